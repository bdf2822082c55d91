"""For given ranks, training ends with the same bytes whatever else is chosen; and they are the reference's bytes.

Compared are parameters and all states of saved checkpoints, read by the format page alone
(checkpoint_reader.py), and what every rank sees in its window. The long form is the whole matrix
(ZEROSHARD_TEST_SHORT unset), the short one covers every pair of choices.
"""

import itertools
import os
import random

import numpy as np
import pytest
import trainers
from deterministic_reference import Run

pytestmark = pytest.mark.skipif(trainers.missing() is not None, reason=f"{trainers.missing()} is not built")

STEPS = 3
SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
FACTORS = {
    "ranks": (1, 2, 3, 4, 6),
    "micro_steps": (1, 3),
    "stage": (0, 1, 2, 3),
    "workers": (1, 2, 3, 4),
    "sizes_of": ("default", "small", "odd"),
    "exchange": ("in_place", "copy", "gloo"),
    "dtype": ("bf16", "fp16", "fp32"),
}
# Bucket sizes and sub-groups, in elements.
SIZES_OF = {
    "default": {},
    "small": {"reduce_bucket_size": 20000, "allgather_bucket_size": 10000, "sub_group_size": 256,
              "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 1000},
    "odd": {"reduce_bucket_size": 70001, "sub_group_size": 7777, "stage3_prefetch_bucket_size": 30011,
            "stage3_max_live_parameters": 45000, "stage3_param_persistence_threshold": 0},
}


def options_of(row):
    """The trainer's options for a row of the matrix. Stage 1 joins the others under accumulation when told to."""
    own = {"reduction_order": "ranks_first"}
    own.update({"transport": "gloo"} if row["exchange"] == "gloo" else {"transport": "shm", "window": row["exchange"]})
    return {
        "stage": row["stage"],
        "micro_steps": row["micro_steps"],
        "dtype": row["dtype"],
        "config": {"zero_optimization": SIZES_OF[row["sizes_of"]], "zeroshard": own},
    }


def covering_rows(factors, seed=20):
    """Rows such that every pair of values of two factors is in one: greedy, the same ones every time."""
    names = list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2)
               for x in factors[a] for y in factors[b]}
    pick = random.Random(seed)
    rows = []
    while missing:
        candidates = []
        for _ in range(200):
            row = {name: pick.choice(values) for name, values in factors.items()}
            pairs = set(itertools.combinations(row.items(), 2))
            candidates.append((len(pairs & missing), len(candidates), row, pairs))
        _, _, row, pairs = max(candidates, key=lambda candidate: candidate[:2])
        missing -= pairs
        rows.append(row)
    return rows


def full_rows(ranks, micro_steps):
    rest = {name: values for name, values in FACTORS.items() if name not in ("ranks", "micro_steps", "dtype")}
    for values in itertools.product(*rest.values()):
        yield {"ranks": ranks, "micro_steps": micro_steps, "dtype": "bf16", **dict(zip(rest, values))}


@pytest.fixture(scope="module")
def daemons():
    all_daemons = trainers.Daemons()
    yield all_daemons
    all_daemons.close()


class Expected:
    """The states that the reference run ends with, computed once for each (ranks, micro-steps, type)."""

    def __init__(self):
        self.known = {}

    def of(self, row):
        key = (row["ranks"], row["micro_steps"], row["dtype"])
        if key not in self.known:
            self.known[key] = Run(row["ranks"], trainers.SIZES, dtype=row["dtype"], micro_steps=row["micro_steps"],
                                  steps=STEPS)
        return self.known[key]


@pytest.fixture(scope="module")
def expected():
    return Expected()


def check(result, run, what):
    """Every byte of every state of every parameter is the reference's, and every rank sees the parameters."""
    states = result.states()
    assert {kind for _, kind in states} == {kind for _, kind in run.states()}, what
    for unit, plan in enumerate(run.units):
        for parameter, (offset, elements) in plan.places.items():
            for kind in {kind for i, kind in run.states() if i == parameter}:
                if elements == 0:
                    continue
                dtype, stored = states[unit, kind]
                own = {"parameter": run.dtype, "master": "float32"}
                assert dtype == own.get(kind, run.state_type), what
                got, want = stored[offset : offset + elements], run.states()[parameter, kind]
                different = np.flatnonzero(got.view(np.uint8) != np.ascontiguousarray(want).view(np.uint8))
                assert different.size == 0, (
                    f"{what}: {kind} of p{parameter} differs in {different.size} bytes, the first {different[0]}")
    seen = np.concatenate([run.job.parameter(i) for i in range(len(run.sizes))])
    for rank, parameters in enumerate(result.parameters):
        assert parameters.tobytes() == seen.tobytes(), f"{what}: rank {rank} sees other parameters"
    assert {report["norm"] for report in result.reports} == {run.job.norm}, what


def train_and_check(daemons, expected, row):
    result = daemons.train(row["workers"], row["ranks"], steps=STEPS, **options_of(row))
    check(result, expected.of(row), str(row))


@pytest.mark.parametrize("row", covering_rows(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices_gives_the_bytes_of_the_reference(daemons, expected, row):
    train_and_check(daemons, expected, row)


@pytest.mark.skipif(SHORT, reason="the whole matrix is for the long form")
@pytest.mark.parametrize("ranks, micro_steps", itertools.product(FACTORS["ranks"], FACTORS["micro_steps"]))
def test_the_whole_matrix_gives_the_bytes_of_the_reference(daemons, expected, ranks, micro_steps):
    for row in full_rows(ranks, micro_steps):
        train_and_check(daemons, expected, row)


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("absent, weighted", [(False, False), (True, False), (False, True), (True, True)])
def test_every_optimizer_equals_the_reference(daemons, optimizer, absent, weighted):
    """With parameters that have no gradient now and then, with weights, and with a frozen parameter."""
    options = {"optimizer": optimizer, "absent": absent, "weighted": weighted, "micro_steps": 2, "frozen": (5,)}
    run = Run(3, trainers.SIZES, steps=STEPS, **options)
    # As in DeepSpeed, "Adam" is AdamW unless told otherwise.
    config = {"optimizer": {"params": {"adam_w_mode": False}}} if optimizer == "Adam" else {}
    result = daemons.train(2, 3, steps=STEPS, stage=3, dtype="fp32", config=config, **options)
    check(result, run, str(options))


# Stage, workers, exchange.
PLACES = ((0, 2, {}), (1, 3, {}), (2, 1, {}), (3, 4, {}), (3, 2, {"window": "copy"}), (2, 3, {"transport": "gloo"}))


@pytest.mark.parametrize("optimizer, master, states", [
    ("AdamW", "fp32", "float32"), ("AdamW", "split", "float32"), ("AdamW", "split", "bfloat16"),
    ("SGD", "split", "bfloat16"), ("Adagrad", "split", "float32"), ("Lion", "split", "bfloat16"),
])
def test_every_form_of_master_and_states_equals_the_reference(daemons, optimizer, master, states):
    run = Run(2, trainers.SIZES, dtype="bf16", steps=STEPS, optimizer=optimizer, master=master, states=states)
    own = {"master": master, "optimizer_states": "bf16" if states == "bfloat16" else "fp32"}
    for stage, workers, exchange in PLACES:
        config = {"zeroshard": {**own, **exchange}}
        result = daemons.train(workers, 2, steps=STEPS, stage=stage, dtype="bf16", optimizer=optimizer, config=config)
        check(result, run, f"stage {stage}, {workers} workers, {config}")


@pytest.mark.parametrize("optimizer, own", [
    ("AdamW8bit", {}), ("AdamW8bit", {"master": "fp32"}), ("AdamW", {"master": "none"}),
    ("AdamW", {"master": "none", "optimizer_states": "bf16"}), ("Lion", {"optimizer_states": "int8"}),
], ids=str)
def test_codes_and_random_bits_do_not_depend_on_the_place(daemons, optimizer, own):
    """What has no reference in numpy is the same everywhere, scales of the blocks included."""
    texts = []
    for stage, workers, exchange in PLACES[1:]:
        result = daemons.train(workers, 2, steps=STEPS, stage=stage, dtype="bf16", optimizer=optimizer,
                               config={"zeroshard": {**own, **exchange}})
        texts.append({key: array.tobytes() for key, (_, array) in without_padding(result.states()).items()})
        assert texts[-1] == texts[0], (stage, workers, exchange)
    assert any("scales" in kind for _, kind in texts[0]) == (optimizer == "AdamW8bit" or "int8" in own.values())


def without_padding(states):
    """States whose padding, which is nobody's, is zero."""
    units = Run(1, trainers.SIZES, dtype="bf16", steps=0).units
    cleared = {}
    for (unit, kind), (dtype, array) in states.items():
        cleared[unit, kind] = dtype, array
        if not kind.endswith("_scales"):
            kept = np.zeros_like(array)
            for offset, elements in units[unit].places.values():
                kept[offset : offset + elements] = array[offset : offset + elements]
            cleared[unit, kind] = dtype, kept
    return cleared


@pytest.mark.parametrize("group", [1, 2, 3])
def test_groups_of_ranks_set_the_order_of_the_sum(daemons, group):
    run = Run(5, trainers.SIZES, dtype="fp32", steps=STEPS, group=group)
    for workers, exchange in ((1, {}), (3, {"transport": "gloo"})):
        config = {"zeroshard": {"ranks_per_group": group, **exchange}}
        check(daemons.train(workers, 5, steps=STEPS, stage=2, config=config), run, str(config))


def test_stage_1_without_ranks_first_is_one_order_of_its_own(daemons):
    """Under accumulation it adds micro-steps before ranks: the same bytes for all workers and exchanges, but others."""
    results = [
        daemons.train(workers, 3, steps=STEPS, stage=1, micro_steps=3, config={"zeroshard": own})
        for workers, own in ((1, {}), (2, {}), (4, {}), (3, {"transport": "gloo"}))
    ]
    other = daemons.train(2, 3, steps=STEPS, stage=2, micro_steps=3)
    texts = [{key: array.tobytes() for key, (_, array) in result.states().items()} for result in results + [other]]
    assert all(text == texts[0] for text in texts[:-1])
    assert texts[-1] != texts[0]

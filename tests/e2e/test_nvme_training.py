"""Whole jobs over states in files: the bytes of the job whose states are in memory, in a fraction of that memory.

Compared are parameters and all states of saved checkpoints, and what every rank sees. $ZEROSHARD_TEST_SHORT unset: every
pair of choices twice over, and more sizes.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import memory_group
import nvme_jobs
import pytest
import trainers
from daemon import Daemon
from test_bit_identity import covering_rows

pytestmark = pytest.mark.skipif(trainers.missing() is not None, reason=f"{trainers.missing()} is not built")

STEPS = 3
SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
RANKS = 2
FACTORS = {
    "stage": (1, 2, 3),
    "daemon": ("1-auto", "2-auto", "2-threads"),
    "transport": ("shm", "gloo"),
    "dtype": ("bf16", "fp16", "fp32"),
    "optimizer": ("AdamW", "SGD", "AdamW8bit"),
    "micro_steps": (1, 3),
    "places": ("all", "states", "part"),
    "durability": ("process", "power"),
    "aio": ("default", "small", "serial"),
    "sub_group_size": (1e9, 4096, 7777),
}
AIO_OF = {
    "default": {},
    "small": {"queue_depth": 1, "block_size": 4096, "intra_op_parallelism": 1, "single_submit": True},
    "serial": {"queue_depth": 3, "block_size": 65536, "intra_op_parallelism": 2, "overlap_events": False},
}


class Daemons:
    """Daemons with two paths each, by name: number of workers and I/O backend."""

    def __init__(self, directory):
        self.directory = directory
        self.by_name = {}
        self.jobs = 0

    def of(self, name):
        if name not in self.by_name:
            workers, backend = name.split("-")
            directory = self.directory / name
            for drive in ("a", "b"):
                (directory / drive).mkdir(parents=True)
            config = f"nvme_paths: [{directory}/a, {{path: {directory}/b, weight: 2}}]\nio_backend: {backend}\n"
            self.by_name[name] = Daemon(
                directory, worker=trainers.WORKER, devices=[f"cpu:{i}" for i in range(int(workers))], config=config).start()
        return self.by_name[name]

    def train(self, name, job=None, **options):
        self.jobs += 1
        return trainers.run(self.of(name), job or f"job-{self.jobs}", RANKS, **options)


@pytest.fixture(scope="module")
def daemons():
    with tempfile.TemporaryDirectory(prefix="zs-") as directory:
        made = Daemons(pathlib.Path(directory))
        yield made
        assert [daemon.stop() for daemon in made.by_name.values()] == [0] * len(made.by_name)


@pytest.fixture(scope="module")
def in_memory(daemons):
    """in_memory(options) -> what a job with these options leaves whose states are in memory; made once."""
    known = {}

    def result(gradients="fp32", **options):
        key = gradients + str(sorted(options.items()))
        if key not in known:
            config = {"zeroshard": {"reduction_order": "ranks_first"}, "data_types": {"grad_accum_dtype": gradients}}
            known[key] = daemons.train("2-auto", stage=2, config=config, **options)
        return known[key]

    return result


def check_equal(result, expected, what):
    states, wanted = result.states(), expected.states()
    assert set(states) == set(wanted), what
    for key, (dtype, array) in states.items():
        assert (dtype, array.tobytes()) == (wanted[key][0], wanted[key][1].tobytes()), f"{what}: {key}"
    for rank, parameters in enumerate(result.parameters):
        assert parameters.tobytes() == expected.parameters[0].tobytes(), f"{what}: rank {rank} sees other parameters"
    assert {report["norm"] for report in result.reports} == {report["norm"] for report in expected.reports}, what


def config_of(row):
    own = {"reduction_order": "ranks_first", "transport": row["transport"]}
    optimizer = {}
    if row["places"] == "part" and row["stage"] == 3:
        optimizer["ratio"] = 0.5
    elif row["durability"] == "power" and row["transport"] != "gloo":  # it wants all states on the tier, and shared memory
        own["durability"] = "power"
    whole = row["stage"] == 3 and row["places"] == "all"
    config = nvme_jobs.config(stage=row["stage"], parameters=whole, optimizer=optimizer, **own)
    config["zero_optimization"]["sub_group_size"] = row["sub_group_size"]
    config["aio"] = AIO_OF[row["aio"]]
    return config


def rows():
    return [row for seed in ([4] if SHORT else [4, 5]) for row in covering_rows(FACTORS, seed)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices_gives_the_bytes_of_a_job_in_memory(daemons, in_memory, row):
    options = {name: row[name] for name in ("dtype", "optimizer", "micro_steps")}
    if row["optimizer"] == "AdamW8bit" and row["dtype"] == "fp16":
        options["dtype"] = "bf16"
    options["steps"] = STEPS
    result = daemons.train(row["daemon"], stage=row["stage"], config=config_of(row), **options)
    check_equal(result, in_memory(**options), str(row))


# --- In a fraction of the memory ---------------------------------------------------------------------------------

LARGE = (300_000,) * 32
# What makes a job small in memory: 16-bit sums of gradients, small buckets and chunks, little staging.
FRUGAL = {
    "data_types": {"grad_accum_dtype": "bf16"},
    "aio": {"queue_depth": 2},
    "zero_optimization": {"stage3_max_live_parameters": 300_000, "stage3_prefetch_bucket_size": 0,
                          "reduce_bucket_size": 300_000, "sub_group_size": 40_000},
}


def frugal(stage, limit, transport):
    config = nvme_jobs.config(stage=stage, optimizer={"buffer_count": 2, "pin_memory": True}, transport=transport,
                              host_limit=limit,
                              reduction_order="ranks_first")
    if stage == 3:
        config["zero_optimization"]["offload_param"]["buffer_count"] = 2
    config["zero_optimization"].update(FRUGAL["zero_optimization"])
    return {**FRUGAL, **config}


def limit_of(stage):
    """Bytes of memory that the job may have: a quarter of its states, gradients aside (14 bytes a parameter).

    Below stage 3 memory holds all parameters and sums of gradients, by what these stages are: there it is an eighth of what is
    on the tier, beside them.
    """
    size = sum(LARGE)
    return 14 * size // 4 if stage == 3 else 4 * size + 12 * size // 8


def idle_worker(daemon):
    """Bytes of its own that a worker has whose job is tiny."""
    trainers.train_and_keep(daemon, "tiny", 1, stage=2, dtype="bf16", steps=1, sizes=(300,))
    own = [nvme_jobs.private_memory(pid) for pid in nvme_jobs.workers(daemon.process.pid, "tiny")]
    daemon.cli("remove", "tiny", "--force")
    return min(own)


@pytest.mark.parametrize("stage, name, transport", [
    (3, "2-auto", "shm"), (1, "1-auto", "shm"),
    *([] if SHORT else [(3, "2-threads", "shm"), (2, "2-auto", "shm")]),
])
def test_states_of_many_times_the_memory(daemons, in_memory, stage, name, transport):
    """The daemon admits the job to so much memory; and what its memory files and its workers come to is never more.

    Not over Gloo: what its messages take in the workers is beside the limit.
    """
    daemon = daemons.of(name)
    options = {"dtype": "bf16", "steps": STEPS, "sizes": LARGE, "one_by_one": True}
    limit = limit_of(stage)
    config = frugal(stage, limit, transport)
    idle = idle_worker(daemon)
    with nvme_jobs.Meter(daemon, "large", idle) as meter:
        result = daemons.train(name, stage=stage, config=config, job="large", keep=True, **options)
    view = daemon.job("large")
    daemon.cli("remove", "large", "--force")
    assert nvme_jobs.on_tier(view) >= 12 * sum(LARGE)
    assert nvme_jobs.on_tier(view, "host") <= limit
    assert meter.samples > 20 and meter.most <= limit
    check_equal(result, in_memory(gradients="bf16", **options), name)


@pytest.fixture
def group():
    made = memory_group.MemoryGroup.make()
    if made is None:
        pytest.skip("this user may not make a control group for memory")
    with made:
        yield made


def test_states_of_four_times_the_memory_that_the_kernel_gives(daemons, in_memory, group, tmp_path):
    """Daemon and workers may have what they have while their job is tiny, and a quarter of the states beside it."""
    options = {"dtype": "bf16", "steps": STEPS, "sizes": LARGE, "one_by_one": True}
    limit = limit_of(3)
    (tmp_path / "drive").mkdir()
    daemon = Daemon(tmp_path, worker=trainers.WORKER, devices=["cpu:0", "cpu:1"], config=f"nvme_paths: [{tmp_path}/drive]\n",
                    process={"preexec_fn": group.enter}).start()
    trainers.train_and_keep(daemon, "tiny", RANKS, stage=3, config=frugal(3, limit, "shm"), dtype="bf16", steps=1, sizes=(300,))
    group.limit(group.unreclaimable() + limit)
    daemon.cli("remove", "tiny", "--force")
    result = trainers.run(daemon, "large", RANKS, stage=3, config=frugal(3, limit, "shm"), **options)
    assert group.kills() == 0
    # And it is a limit: what holds the states in memory does not live.
    hold = subprocess.run([sys.executable, "-c", f"bytearray({14 * sum(LARGE)})"], preexec_fn=group.enter, check=False)
    assert hold.returncode == -9 and group.kills() == 1
    assert daemon.stop() == 0
    check_equal(result, in_memory(gradients="bf16", **options), "large")

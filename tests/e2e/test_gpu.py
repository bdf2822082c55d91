"""Jobs on GPUs, on the fake driver and the fake NCCL: the bits of the host, deaths of every part, errors that are clear.

What runs here has not run on a GPU: docs/gpu.md says what has.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import gpu_jobs
import pytest
import trainers
from deterministic_reference import Run
from test_bit_identity import check, covering_rows, without_padding

pytestmark = pytest.mark.skipif(gpu_jobs.missing() is not None, reason=f"{gpu_jobs.missing()} is not built")

STEPS = 3
SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
FACTORS = {
    "ranks": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "tier": ("gpu", "host", "half", "nvme"),
    "parameters": ("gpu", "host", "nvme"),  # the latter two are of stage 3
    "micro_steps": (1, 3),
    "dtype": ("bf16", "fp32"),
    "odd": (False, True),  # absent parameters and weights
}
# A window that holds little, gradients that come in small buckets.
SMALL = {"zero_optimization": {"stage3_max_live_parameters": 45000, "reduce_bucket_size": 70001,
                               "stage3_prefetch_bucket_size": 0}}


@pytest.fixture(scope="module")
def daemons(node):
    """daemons(workers): started when first asked for."""
    known = {}

    def of(workers):
        if workers not in known:
            known[workers] = node.daemon(workers)
        return known[workers]

    return of


@pytest.fixture
def job(node, request):
    """job(daemon, ranks, **options) -> a gpu_jobs.Job that is gone when the test ends."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make(daemon, ranks, **options):
            name = re.sub(r"[^A-Za-z0-9]", "-", request.node.name)[:80] + f"-{next(numbers)}"
            one = gpu_jobs.Job(node, daemon, name, ranks, **options)
            stack.callback(one.close)
            return one

        yield make


def merged(*parts):
    result = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def config_of(daemon, tier, *more):
    # Micro-steps are added after ranks, as the reference does.
    return merged(gpu_jobs.tier(tier, daemon.directory / "drive"), {"zeroshard": {"reduction_order": "ranks_first"}}, *more)


# --- The same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", covering_rows(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices_gives_the_bytes_of_the_reference(daemons, job, row):
    daemon = daemons(row["ranks"])
    tier = "host" if row["tier"] == "half" and row["stage"] < 3 else row["tier"]  # a ratio is of stage 3
    tier += "" if row["parameters"] == "gpu" else f"-{row['parameters']}"
    options = {"micro_steps": row["micro_steps"], "absent": row["odd"], "weighted": row["odd"]}
    one = job(daemon, row["ranks"], steps=STEPS, stage=row["stage"], dtype=row["dtype"],
              config=config_of(daemon, tier, SMALL if row["odd"] else {}), **options)
    result = one.start().result()
    check(result, Run(row["ranks"], trainers.SIZES, dtype=row["dtype"], steps=STEPS, **options), str(row))


@pytest.fixture(scope="module")
def hosts():
    daemons = trainers.Daemons()
    yield daemons
    daemons.close()


@pytest.mark.parametrize("tier, states", [("half", "bf16"), ("nvme-host", "fp32")])
def test_without_a_master_the_bytes_are_those_of_the_host(daemons, job, hosts, tier, states):
    """Rounded by the same random bits, wherever states and parameters rest."""
    options = {"steps": STEPS, "stage": 3, "dtype": "bf16", "absent": True}
    own = {"zeroshard": {"master": "none", "rounding_seed": 5, "optimizer_states": states}}
    daemon = daemons(2)
    found = job(daemon, 2, config=config_of(daemon, tier, own), **options).start().result()
    wanted = hosts.train(2, 2, config=own, **options)
    texts = [{key: array.tobytes() for key, (_, array) in without_padding(result.states()).items()}
             for result in (found, wanted)]
    assert texts[0] == texts[1]
    assert [p.tobytes() for p in found.parameters] == [p.tobytes() for p in wanted.parameters]


def test_stage_1_adds_micro_steps_first_as_on_the_host(daemons, job, hosts):
    """Unless told otherwise; the same bytes as the job on the host."""
    options = {"steps": STEPS, "stage": 1, "micro_steps": 3, "dtype": "bf16", "absent": True, "weighted": True}
    found = job(daemons(3), 3, **options).start().result()
    wanted = hosts.train(2, 3, **options)
    assert [p.tobytes() for p in found.parameters] == [p.tobytes() for p in wanted.parameters]
    assert {r["norm"] for r in found.reports} == {r["norm"] for r in wanted.reports}


@pytest.mark.parametrize("tier, config", [("gpu", {}), ("host", SMALL), ("gpu-host", {}), ("half-nvme", SMALL)],
                         ids=["gpu", "host-small", "parameters-on-host", "parameters-on-nvme"])
def test_ranks_read_parameters_alone_and_in_any_order(daemons, job, tier, config):
    """Rank 0 also in the middle of the training, while the other one goes on."""
    daemon = daemons(2)
    one = job(daemon, 2, steps=STEPS, stage=3, dtype="bf16", one_by_one=True, config=config_of(daemon, tier, config))
    check(one.start().result(), Run(2, trainers.SIZES, dtype="bf16", steps=STEPS), tier)


def test_the_ledger_says_what_is_on_the_gpu(daemons, job):
    one = job(daemons(2), 2, steps=500, pause_ms=50, stage=3, dtype="bf16", config=gpu_jobs.tier("half", ""))
    one.start().reach(1)
    lines = one.view()["ledger"]
    on_gpu = {line["state"] for line in lines if line["tier"] == "gpu" and line["bytes"] > 0}
    assert {"parameters", "gradients", "master"} <= on_gpu, lines
    assert any(line["tier"] == "host" and line["state"] == "master" for line in lines), lines


def test_the_native_module_takes_a_step(node, daemons):
    """With the fake's device memory, which only copies and kernels can touch: addresses and order, no values."""
    native = gpu_jobs.BINARIES / "client/python/_native.so"
    if not native.exists():
        pytest.skip(f"not built: {native}")
    script = pathlib.Path(__file__).with_name("native_on_gpu.py")
    environment = {**node.environment(), "PYTHONPATH": str(script.parents[2] / "client/python")}
    answer = subprocess.run(["/usr/bin/python3", str(script), str(native), str(daemons(1).socket)],
                            env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr + daemons(1).text()[-3000:]
    report = json.loads(answer.stdout.splitlines()[-1])
    assert report["step"] == 1 and not report["skipped"] and report["slots"] > 0


# --- Deaths --------------------------------------------------------------------------------------

LONG = {"steps": 24, "pause_ms": 20, "stage": 3, "dtype": "bf16"}


def expected(ranks):
    return Run(ranks, trainers.SIZES, dtype="bf16", steps=LONG["steps"])


@pytest.mark.parametrize("tier", ["gpu", "half-host", "nvme", "half-nvme"])
def test_a_worker_that_is_killed_is_not_noticed(daemons, job, tier):
    daemon = daemons(2)
    one = job(daemon, 2, config=config_of(daemon, tier), **LONG).start()
    for step in (4, 9, 15):
        one.reach(step)
        worker = one.view()["workers"][step % 2]
        if tier.endswith("-nvme"):  # while its rank waits for a gather
            os.kill(worker["pid"], signal.SIGSTOP)
            time.sleep(0.3)
        os.kill(worker["pid"], signal.SIGKILL)
    result = one.result()
    check(result, expected(2), tier)
    assert {report["generation"] for report in result.reports} == {1}


@pytest.mark.parametrize("tier, stage", [("gpu-host", 3), ("host", 1), ("nvme", 2), ("gpu-nvme", 3)])
def test_ranks_go_on_in_their_processes_when_one_of_them_is_killed(daemons, job, tier, stage):
    daemon = daemons(3)
    one = job(daemon, 3, config=config_of(daemon, tier), lives=5, **{**LONG, "stage": stage}).start()
    for step, victim in ((4, 1), (10, 0)):
        one.reach(step)
        one.kill(victim)
        survivors = {rank: one.processes[rank].pid for rank in range(3) if rank != victim}
        one.start(victim)
        one.reach(step + 1)
        assert all(one.processes[rank].pid == pid for rank, pid in survivors.items())
    result = one.result()
    check(result, expected(3), f"{tier}, stage {stage}")
    assert all(report["generation"] >= 3 for report in result.reports)
    assert "goes on after" in result.said[2]


def test_a_collective_that_hangs_ends_in_time_for_all_and_nothing_is_lost(node, job):
    daemon = node.daemon(2, config="collective_timeout: 3s\nrejoin_timeout: 20s\n")
    one = job(daemon, 2, config=config_of(daemon, "host"), **LONG)
    one.start(0, nccl="hang:40")
    one.start(1)
    start = time.monotonic()
    texts = one.errors()
    assert time.monotonic() - start < 50
    assert all("ABORTED" in text.upper() or "aborted" in text for text in texts.values()), texts
    check(one.start().result(), expected(2), "hang")


@pytest.mark.parametrize("fault", ["lost:400:CUDA_ERROR_ILLEGAL_ADDRESS", "fault=cuMemcpyHtoDAsync:60:CUDA_ERROR_UNKNOWN"])
def test_a_device_that_fails_a_rank_is_named_and_nothing_is_lost(daemons, job, fault):
    daemon = daemons(2)
    one = job(daemon, 2, config=config_of(daemon, "host"), **LONG)
    one.start(0)
    one.start(1, cuda=fault if fault.startswith("fault") else f"fault={fault}")
    texts = one.errors()
    assert "aborted" in texts[0], texts
    check(one.start().result(), expected(2), fault)


def test_a_worker_that_loses_its_context_once_is_replaced(node, job):
    daemon = node.daemon(1, cuda="lost:150:CUDA_ERROR_ILLEGAL_ADDRESS,once=1,only=zeroshard-worker")
    one = job(daemon, 1, config=config_of(daemon, "half"), lives=3, **LONG).start()
    check(one.result(), expected(1), "lost context")
    assert "died: exited with code 1: device lost: cuda:0" in daemon.text(), daemon.text()


def test_a_gpu_that_is_lost_ends_the_job_with_its_error():
    with gpu_jobs.Node(devices=1) as node:
        daemon = node.daemon(1, cuda="lost:150,only=zeroshard-worker")
        one = gpu_jobs.Job(node, daemon, "lost", 1, config=config_of(daemon, "gpu"), lives=9, **LONG).start()
        try:
            text = one.errors()[0]
        finally:
            one.close()
        assert "device lost" in text and "CUDA_ERROR_ECC_UNCORRECTABLE" in text, text


def test_a_job_on_drives_goes_on_after_the_loss_of_power():
    with gpu_jobs.Node(devices=2) as node:
        daemon = node.daemon(2)
        power = config_of(daemon, "nvme", {"zeroshard": {"durability": "power"}})
        one = gpu_jobs.Job(node, daemon, "power", 2, config=power, **LONG).start()
        try:
            one.reach(4)
            daemon.process.kill()
            daemon.process.wait()
            one.errors()
            daemon.start()
            result = one.start().result()
        finally:
            one.close()
        assert "goes on after step" in daemon.text(), daemon.text()
        check(result, expected(2), "power")


# --- What cannot be ------------------------------------------------------------------------------


def refusal(one):
    texts = one.start().errors()
    return texts[0]


def test_a_trainer_on_the_host_of_a_job_on_gpus_is_told(daemons, job):
    text = refusal(job(daemons(1), 1, steps=1, stage=3, cuda=None, timeout_ms=5000))
    assert "GPU" in text, text


def test_a_trainer_on_another_gpu_than_its_worker_is_told(daemons, job):
    text = refusal(job(daemons(1), 1, steps=1, stage=3, cuda=2, timeout_ms=5000))
    assert "cuda:" in text or "GPU" in text, text


def test_more_ranks_than_gpus_are_refused(daemons, job):
    text = refusal(job(daemons(2), 3, steps=1, stage=3, timeout_ms=5000))
    assert "3" in text and "2" in text, text


def test_a_trainer_without_a_driver_says_so(daemons, job, node):
    one = job(daemons(1), 1, steps=1, stage=3, cuda=0)
    node_environment = node.environment
    node.environment = lambda **faults: {**node_environment(**faults), "LD_LIBRARY_PATH": ""}
    try:
        text = refusal(one)
    finally:
        node.environment = node_environment
    assert "no CUDA device" in text, text

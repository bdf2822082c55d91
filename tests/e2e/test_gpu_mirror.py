"""Jobs on GPUs (fakes) whose GPU is lost in the middle: they go back to their last mirror, or say what to do."""

import itertools

import gpu_jobs
import pytest
import trainers
from daemon import wait_for
from deterministic_reference import Run
from test_bit_identity import check

pytestmark = pytest.mark.skipif(gpu_jobs.missing() is not None, reason=f"{gpu_jobs.missing()} is not built")

STEPS = 24
OPTIONS = {"steps": STEPS, "pause_ms": 20, "stage": 3, "dtype": "bf16"}


@pytest.fixture
def job():
    """job(fault, steps, ...) -> a running gpu_jobs.Job of two ranks, the worker of rank 1 having the fault once."""
    made = []
    numbers = itertools.count()

    def make(fault, mirror_steps, tier="gpu", **options):
        node = gpu_jobs.Node(devices=2).__enter__()
        made.append(node)
        daemon = node.daemon(2, cuda=f"{fault},once=1,only=--worker=1")
        config = gpu_jobs.tier(tier, daemon.directory / "drive")
        config["zeroshard"] = {"reduction_order": "ranks_first", "gpu_mirror_steps": mirror_steps}
        one = gpu_jobs.Job(node, daemon, f"gpt-{next(numbers)}", 2, config=config, **{**OPTIONS, **options})
        made.append(one)
        return one.start()

    yield make
    for one in reversed(made):
        one.close() if isinstance(one, gpu_jobs.Job) else one.__exit__(None, None, None)


# An error that the other processes of the GPU do not see, so that trainers can go on in theirs.
LOST = "lost:150:CUDA_ERROR_HARDWARE_STACK_ERROR"


@pytest.mark.parametrize("tier, every", [("gpu", 5), ("half-host", 1)])
def test_a_lost_gpu_takes_the_job_back_to_its_last_mirror_and_it_ends_with_the_same_bytes(job, tier, every):
    one = job(LOST, every, tier, lives=5)
    wait_for(lambda: one.view().get("counters", {}).get("times_gone_back"), "the way back")
    result = one.result()
    check(result, Run(2, trainers.SIZES, dtype="bf16", steps=STEPS), f"{tier}, mirror every {every}")
    log = one.daemon.text()
    assert "device lost on worker 1: the job goes back to step " in log
    assert "went back to step " in log
    assert "goes on after" in result.said[0] and "its last mirror" in result.said[0]


def test_what_protects_the_states_is_told(job):
    one = job(LOST, 5, lives=5)
    view = wait_for(lambda: one.view() or None, "the job")
    assert any("goes back to its last mirror in host memory, taken every 5 steps" in text for text in view["warnings"])
    mirrors = [line for line in view["ledger"] if line["state"] == "mirror"]
    assert [line["tier"] for line in mirrors] == ["host", "host"]
    one.result()


def test_without_a_mirror_the_job_fails_and_says_what_to_do(job):
    one = job(LOST, 0, lives=5)
    texts = one.errors()
    wanted = f"device lost on worker 1 of job '{one.name}'"
    assert any(wanted in text and "it has saved no checkpoint" in text for text in texts.values()), texts
    assert one.view()["summary"]["state"] == "failed"

"""A rank on a GPU dies at each point of its data plane: the others go on in their processes, to the same bits. Workers
die while ranks gather alone: nobody notices.

The daemon, its workers and the trainers run on the fake driver and the fake NCCL.
"""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "e2e")]

import gpu_jobs  # noqa: E402
import trainers  # noqa: E402
from deterministic_reference import Run  # noqa: E402
from test_bit_identity import check  # noqa: E402

OPTIONS = {"steps": 10, "stage": 3, "dtype": "bf16"}
POINTS = sorted({point for file in (ROOT / "client/dataplane").glob("*.cc")
                 for point in re.findall(r'ZS_FAULT_POINT\("([^"]+)"\)', file.read_text())})

pytestmark = pytest.mark.skipif(gpu_jobs.missing() is not None, reason=f"{gpu_jobs.missing()} is not built")


@pytest.fixture(scope="module")
def daemon():
    with gpu_jobs.Node() as node:
        yield node, node.daemon(2)


@pytest.mark.parametrize("hit", [1, 7])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_there_and_the_others_go_on(daemon, point, hit):
    node, one = daemon
    job = gpu_jobs.Job(node, one, f"{point.replace('.', '-')}-{hit}", 2, lives=3, **OPTIONS)
    try:
        job.start(0)
        job.start(1, faults=f"{point}=kill:{hit}")
        assert job.processes[1].wait(60) == -9, f"nobody came to {point}"
        survivor = job.processes[0].pid
        job.start(1)
        result = job.result()
        assert job.processes[0].pid == survivor
        check(result, Run(2, trainers.SIZES, dtype="bf16", steps=OPTIONS["steps"]), point)
    finally:
        job.close()


@pytest.mark.parametrize("point", ["worker.window.before_filled", "worker.window.before_punch"])
def test_workers_die_while_ranks_gather_alone(point):
    with gpu_jobs.Node(devices=2) as node:
        # Nothing else fills a window in such a job.
        daemon = node.daemon(2, faults=f"{point}=kill:3")
        job = gpu_jobs.Job(node, daemon, "alone", 2, one_by_one=True, keep=True, **OPTIONS)
        try:
            result = job.start().result()
            assert {report["generation"] for report in result.reports} == {1}
            assert [worker["restarts"] for worker in job.view()["workers"]].count(0) < 2, f"nobody came to {point}"
            check(result, Run(2, trainers.SIZES, dtype="bf16", steps=OPTIONS["steps"]), point)
        finally:
            job.close()

"""A fault point that no test exercises fails the suite.

The points of trainers and workers are tested as they are listed by the programs (test_trainer_kills, test_worker_kills:
one that no process comes to fails there). The others must be named by a test.
"""

import pytest
from crash import DAEMON, ROOT, TRAINER, WORKER, fault_points, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()} is not built with --config=faults")

# The tests that name each point which this folder does not take from the programs' lists.
NAMED = {
    "storage.checkpoint.commit": "tests/storage",
    "storage.file.sync": "tests/storage",
    "storage.file.write": "tests/storage",
    "storage.journal.rename": "tests/storage",
    "storage.named_dir.rename": "tests/storage",
    "worker.hello.micro_end_back": "tests/crash",
    "worker.hello.contribution_back": "tests/crash",
    "worker.drop.before_generation": "tests/crash",
    "worker.bridge.before_drop": "tests/crash",
    "worker.resume.before_manifest": "tests/worker",
    "worker.resume.after_manifest": "tests/worker",
}

# The tests that take all points of their own program that begin so.
PREFIXES = {
    "worker.tier.": "tests/worker/nvme_job_kill_test.cc",
    "worker.device.": "tests/worker/device_job_kill_test.cc",
    "worker.device.mirror.": "tests/worker/device_job_mirror_kill_test.cc",
}


def listed_elsewhere(points):
    """Those that are enumerated by a test."""
    import test_trainer_kills
    import test_worker_kills

    by_prefix = {point for point in points if point.startswith(tuple(PREFIXES))}
    return by_prefix | set(test_trainer_kills.POINTS) | {point for point, _ in test_worker_kills.CASES}


def test_points_of_the_data_plane_are_taken_from_its_sources():
    import test_gpu_kills

    assert len(test_gpu_kills.POINTS) >= 3


def test_every_fault_point_has_a_test():
    points = {point for program in (DAEMON, WORKER, TRAINER) for point in fault_points(program)}
    assert points - listed_elsewhere(points) - set(NAMED) == set(), "a fault point without a test"
    assert set(NAMED) - points == set(), "these points are gone"


@pytest.mark.parametrize("point", sorted(NAMED))
def test_the_tests_name_it(point):
    texts = [path.read_text() for path in (ROOT / NAMED[point]).rglob("*")
             if path.suffix in (".cc", ".py") and path.name != "test_fault_points.py"]
    assert any(point in text for text in texts), f"no test below {NAMED[point]} names {point}"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_test_takes_all_with_the_prefix(prefix):
    text = (ROOT / PREFIXES[prefix]).read_text()
    assert f'"{prefix}"' in text and "FaultPointNames()" in text

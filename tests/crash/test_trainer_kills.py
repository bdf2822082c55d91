"""A rank killed at every fault point of a trainer, again and again, and all ranks at once: the run ends as if nobody had died.

The other ranks are never started again: they wait. Each trainer checks its user_state when it attaches.
"""

import os
import signal
import time

import pytest
from crash import SHORT, TRAINER, Run, fault_points, kill
from jobs import JOBS

# Those of storage/ are of files, which a trainer links with the layout of its memory and never writes.
POINTS = [point for point in fault_points(TRAINER) if not point.startswith("storage.")] if TRAINER.exists() else []
# Reached by rank 0 alone.
FIRST_RANKS = {"client.put.before", "client.save.before", "client.export.before"}
# The k-th incarnation dies at the k-th of these hits; the run is over when one comes through.
HITS = [1, 1, 2, 3, 5, 9] if SHORT else [1, 1, *range(2, 25), 30, 40, 60, 90]
NAMES = ["stage1", "bounded"] if SHORT else list(JOBS)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_rank_leaves_no_trace(daemon, undisturbed, name, point):
    expected = undisturbed(JOBS[name])
    killed = 0
    victims = [0] if point in FIRST_RANKS else [1] if SHORT else [0, 1]
    for victim in victims:
        run = Run(daemon, JOBS[name], plans={victim: kill(point, *HITS)})
        assert run.finish() == expected
        assert run.ranks[1 - victim].deaths == 0
        assert run.restarts == [0, 0]
        killed += run.ranks[victim].deaths
    if not (point == "client.release.before" and JOBS[name]["stage"] < 3):
        assert killed > 0, f"no process came to {point}"


@pytest.mark.parametrize("name", ["stage3"] if SHORT else list(JOBS))
@pytest.mark.parametrize("point", ["client.step.before", "client.request.sent", "trainer.slot.half_written"])
def test_two_ranks_of_three_that_die_alternately(daemon, undisturbed, name, point):
    expected = undisturbed(JOBS[name], 3)
    run = Run(daemon, JOBS[name], 3, plans={0: kill(point, 2, 3, 4, 7), 2: kill(point, 1, 4, 6, 9)})
    assert run.finish() == expected
    assert run.ranks[0].deaths > 0 and run.ranks[2].deaths > 0 and run.ranks[1].deaths == 0


@pytest.mark.parametrize("name", ["stage1", "gloo3"] if SHORT else list(JOBS))
def test_all_ranks_killed_at_once_resume_at_the_committed_step(daemon, undisturbed, name):
    options = {**JOBS[name], "steps": 8}
    expected = undisturbed(options)
    run = Run(daemon, {**options, "progress": True, "pause-ms": 5})
    for step in (1, 3, 6):
        run.supervise(lambda: run.step() >= step)
        run.kill_all()
    assert run.finish() == expected
    assert [rank.deaths for rank in run.ranks] == [3, 3]


@pytest.mark.parametrize("point", ["worker.step.before_decision", "worker.apply.before", "worker.apply.before_applied",
                                   "worker.commit.before"])
@pytest.mark.parametrize("name", ["stage3"] if SHORT else ["stage1", "stage2", "stage3"])
def test_all_ranks_killed_while_the_workers_decide_and_apply(daemon, undisturbed, name, point):
    """A step that is decided is committed without them; one that is not is dropped."""
    options = {**JOBS[name], "steps": 6}
    expected = undisturbed(options)
    run = Run(daemon, {**options, "progress": True}, worker_plans={0: [f"{point}=sleep:150:3"]})
    run.supervise(lambda: run.step() >= 2)
    run.kill_all()
    assert run.finish() == expected
    assert [rank.deaths for rank in run.ranks] == [1, 1]


def test_all_ranks_and_all_workers_killed_at_once(daemon, undisturbed):
    options = {**JOBS["stage3"], "steps": 8}
    expected = undisturbed(options)
    run = Run(daemon, {**options, "progress": True, "pause-ms": 5})
    for step in (2, 5):
        run.supervise(lambda: run.step() >= step)
        for worker in run.workers():
            os.kill(worker["pid"], signal.SIGKILL)
        run.kill_all()
    assert run.finish() == expected
    assert run.restarts == [2, 2]


def test_a_rank_killed_while_it_attaches_may_come_again_at_once(daemon, undisturbed):
    """Was refused: two processes cannot be the same rank."""
    options = {**JOBS["stage3"], "steps": 2}
    run = Run(daemon, options, only=[0])
    for attempt in range(30):
        time.sleep(0.001 * attempt)
        run.kill_rank(0)
        run.ranks[0].process.wait()
        run.poll(run.ranks[0])
        assert not run.ranks[0].error, run.ranks[0].error
    run.add(1)
    assert run.finish() == undisturbed(options)

"""Ranks that do not come, stop, disagree or stay dead: every survivor gets an error that names them, within the deadline.

And afterwards nothing is lost: the ranks start again and end as if nothing had happened. A worker that stops or gets
stuck is replaced, and the run ends as if it had not.
"""

import itertools
import os
import signal
import time

import pytest
from crash import SHORT, Run
from jobs import JOBS

DEADLINE = 1.0
# What a loaded machine may add to the deadline.
SLACK = 4.0
# Ranks and workers that share memory, with and without gathers, and islands; in the short form a case of each kind.
NAMES = ["stage1", "stage3", "gloo3"]
CONFIG = f"collective_timeout: {DEADLINE}s\nrejoin_timeout: {DEADLINE}s\n"


@pytest.fixture(scope="module")
def strict(start_daemon):
    return start_daemon(2, CONFIG)


def errors_of(run, ranks, since):
    """Waits until the ranks have failed; returns their words and the time it took."""
    end = since + DEADLINE + SLACK
    while any(run.ranks[rank].running for rank in ranks):
        assert time.monotonic() < end, f"ranks still wait: {run.describe()}\n{run.tail()}"
        time.sleep(0.005)
    took = time.monotonic() - since
    for rank in ranks:
        assert run.ranks[rank].process.returncode == 1, run.describe()
    return [open(f"{run.ranks[rank].output}.err").read() for rank in ranks], took


def start_again(run, expected):
    """All ranks start anew, without what disturbed them."""
    for rank in run.ranks:
        if rank.running:
            rank.process.kill()
            rank.process.wait()
    run.arguments = {}
    for rank in run.ranks:
        rank.process.stdin.close()
        rank.process = None
        rank.deaths += 1
        run.start(rank)
    assert run.finish() == expected


def until_step(run, step):
    run.supervise(lambda: run.step() >= step)


@pytest.mark.parametrize("name", ["stage1", "gloo3"] if SHORT else NAMES)
def test_a_stopped_rank_is_named_on_all_ranks(strict, undisturbed, name):
    options = {**JOBS[name], "steps": 8}
    run = Run(strict, {**options, "progress": True, "pause-ms": 20}, 3)
    until_step(run, 2)
    os.kill(run.ranks[1].process.pid, signal.SIGSTOP)
    try:
        texts, took = errors_of(run, [0, 2], time.monotonic())
        for text in texts:
            assert "rank 1" in text and "DEADLINE_EXCEEDED" in text
            assert "unit" in text or "gather" in text
    finally:
        os.kill(run.ranks[1].process.pid, signal.SIGCONT)
    (text,), _ = errors_of(run, [1], time.monotonic())
    assert "rank 1" in text
    assert took >= DEADLINE * 0.5
    start_again(run, undisturbed(options, 3))


@pytest.mark.parametrize("name", ["gloo3"] if SHORT else NAMES)
def test_a_rank_that_stays_dead_is_named_on_all_ranks(strict, undisturbed, name):
    options = {**JOBS[name], "steps": 8}
    run = Run(strict, {**options, "progress": True, "pause-ms": 20}, 3)
    until_step(run, 2)
    since = time.monotonic()
    run.kill_rank(2)
    texts, took = errors_of(run, [0, 1], since)
    for text in texts:
        assert "rank 2" in text and "no successor attached" in text
    assert took >= DEADLINE * 0.5
    start_again(run, undisturbed(options, 3))


@pytest.mark.parametrize("name", ["stage3", "gloo3"] if SHORT else ["stage3", "bounded", "gloo3"])
def test_swapped_gathers_name_both_ranks_and_both_units_at_once(strict, undisturbed, name):
    options = {**JOBS[name], "steps": 6, "sizes": "40000,513,20000,30000"}
    run = Run(strict, options, 2, arguments={1: ["--swap-at=3"]})
    texts, took = errors_of(run, [0, 1], time.monotonic())
    for text in texts:
        assert "rank 0" in text and "rank 1" in text and text.count("unit") >= 2 and "order" in text
    assert took < SLACK
    start_again(run, undisturbed(options))


def test_a_rank_that_never_comes_is_named(strict):
    run = Run(strict, {**JOBS["stage3"], "timeout-ms": 500}, 3, only=[0, 2])
    texts, _ = errors_of(run, [0, 1], time.monotonic())  # by their place in `only`
    for text in texts:
        assert "missing: rank 1" in text and "DEADLINE_EXCEEDED" in text
    assert strict.job(run.name) is None


RANK_POINTS = ["trainer.slot.half_written", "client.step.before", "client.wait.before", "client.micro_end.before"]
RANK_NAMES = ["stage1", "stage2", "stage3", "gloo3"]


@pytest.mark.parametrize("name, point", zip(RANK_NAMES, RANK_POINTS) if SHORT
                         else itertools.product(RANK_NAMES, RANK_POINTS))
def test_a_rank_that_stops_in_the_middle_of_a_step(strict, point, name):
    run = Run(strict, JOBS[name], 2, plans={1: [f"{point}=stop:3"]})
    since = time.monotonic()
    try:
        (text,), _ = errors_of(run, [0], since + 2)
        assert "rank 1" in text
    finally:
        run.clear()


# A worker may show no progress for a quarter of the collective timeout.
WORKER_BOUND = 2.0
PATIENT = f"collective_timeout: {WORKER_BOUND * 4}s\n"


@pytest.fixture(scope="module")
def patient(start_daemon):
    return start_daemon(2, PATIENT)


def words_about(run, worker, word):
    """The daemon's log line about a worker of the run that it ended."""
    lines = [line for line in run.daemon.log.read_text().splitlines() if f"job {run.name}: worker {worker}: process" in line]
    assert len(lines) == 1 and f"had not answered for 2s ({word})" in lines[0], run.tail()


@pytest.mark.parametrize("name", ["stage3"] if SHORT else NAMES)
def test_a_stopped_worker_is_replaced(patient, undisturbed, name):
    options = {**JOBS[name], "steps": 40}
    run = Run(patient, {**options, "progress": True, "pause-ms": 50})
    until_step(run, 2)
    os.kill(run.workers()[1]["pid"], signal.SIGSTOP)
    since = time.monotonic()
    outcome = run.finish()
    assert time.monotonic() - since < WORKER_BOUND + 2 * SLACK
    assert outcome == undisturbed(options)
    assert run.restarts == [0, 1]
    words_about(run, 1, "stopped")


WORKER_POINTS = ["worker.step.before_ready", "worker.apply.group", "worker.commit.before"]


@pytest.mark.parametrize("name, point", zip(NAMES, WORKER_POINTS) if SHORT else itertools.product(NAMES, WORKER_POINTS))
def test_a_worker_that_gets_stuck_is_replaced(patient, undisturbed, name, point):
    """The leader, in the middle of a step."""
    run = Run(patient, JOBS[name], worker_plans={0: [f"{point}=sleep:600000:2"]})
    assert run.finish() == undisturbed(JOBS[name])
    assert run.restarts == [1, 0]
    words_about(run, 0, "stuck")


def test_a_worker_that_gets_stuck_again_and_again_is_named_on_all_ranks(patient):
    run = Run(patient, JOBS["stage3"], worker_plans={1: ["worker.step.before_ready=sleep:600000:1"] * 3})
    end = time.monotonic() + 3 * WORKER_BOUND + 2 * SLACK
    try:
        while any(rank.running for rank in run.ranks):
            assert time.monotonic() < end, f"{run.describe()}\n{run.tail()}"
            time.sleep(0.01)
        for rank in run.ranks:
            text = open(f"{rank.output}.err").read()
            assert "worker 1" in text and "got stuck 3 times at step 0" in text and "had not answered for 2s" in text
    finally:
        run.clear()


def test_a_slow_disk_is_not_taken_for_a_stuck_worker(patient, undisturbed):
    plans = {0: [f"storage.file.sync=sleep:{int(2500 * WORKER_BOUND)}:1"]}
    run = Run(patient, JOBS["stage3"], worker_plans=plans)
    since = time.monotonic()
    assert run.finish() == undisturbed(JOBS["stage3"])
    assert time.monotonic() - since > 2 * WORKER_BOUND
    assert run.restarts == [0, 0]

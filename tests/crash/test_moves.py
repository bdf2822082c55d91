"""Workers and ranks killed while states move between memory and files: the run ends as if nobody had died, and nothing had moved.

The job has its states in memory and may move them ("nvme_path" beside the device cpu); an operator moves them there and back.
"""

import os
import signal
import time

import pytest
from crash import SHORT, Run, kill
from jobs import JOBS, MOVABLE, job

POINTS = ["worker.tier.move", "worker.tier.before_forget", "worker.tier.promote.before_forget",
          "worker.tier.demote.before_punch"]
SIZES = (40000, 513, 7, 0, 1, 20000)  # the trainer's default


def bytes_of_states(name):
    """So much is moved at least: masters of 4 bytes and two states of as many; padding is moved, too."""
    frozen = map(int, JOBS[name].get("frozen", "").split(",")) if "frozen" in JOBS[name] else ()
    return 12 * (sum(SIZES) - sum(SIZES[i] for i in frozen))


def movable(daemon, name):
    options = JOBS[name]
    zero = {**MOVABLE, "offload_optimizer": {**MOVABLE["offload_optimizer"], "nvme_path": str(daemon.directory / "drive0")}}
    own = {key: value for key, value in options.items() if key not in ("stage", "steps", "config-extra")}
    transport = "gloo" if "gloo" in name else "shm"
    return {**job(options["stage"], {"zero_optimization": zero, "zeroshard": {"transport": transport}}, **own), "steps": 60}


def move(run, to, *more):
    answer = run.daemon.cli("move", run.name, "--to", to, "--rate", "0", *more)
    assert answer.returncode == 0, answer.stderr


def on_nvme(run):
    return run.daemon.job(run.name)["counters"].get("nvme_state_bytes", 0)


def wait_until(run, condition, what):
    end = time.monotonic() + 30
    while not condition():
        run.look()
        assert time.monotonic() < end, f"waited for {what}: {run.daemon.job(run.name)}\n{run.tail()}"
        time.sleep(0.01)


def there_and_back(run, states):
    """Moves all states, twice there and twice back."""
    for to in ("nvme", "host") * 2:
        move(run, to)
        there = states if to == "nvme" else 0
        wait_until(run, lambda: there <= on_nvme(run) <= 1.1 * there, f"all states on {to}")


def train_and_move(daemon, undisturbed, name, plans):
    """Returns how often each worker died."""
    options = movable(daemon, name)
    expected = undisturbed(options)
    run = Run(daemon, {**options, "progress": True, "pause-ms": 50}, worker_plans=plans)
    run.supervise(lambda: run.step() >= 1)
    there_and_back(run, bytes_of_states(name))
    assert run.finish() == expected
    return run.restarts


@pytest.mark.parametrize("name", ["stage1"] if SHORT else ["stage1", "stage2", "stage3", "gloo3"])
def test_workers_killed_while_states_move(daemon, undisturbed, name):
    """Each worker at two points, one after the other."""
    points = {0: ["worker.tier.move=kill:2", "worker.tier.before_forget=kill"],
              1: ["worker.tier.demote.before_punch=kill:2", "worker.tier.promote.before_forget=kill"]}
    assert train_and_move(daemon, undisturbed, name, points) == [2, 2]


@pytest.mark.skipif(SHORT, reason="every point on its own is for the long form")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "gloo3"])
def test_workers_killed_again_and_again_while_states_move(daemon, undisturbed, name, point):
    plans = {0: kill(point, 1, 3), 1: kill(point, 2, 5)}
    assert sum(train_and_move(daemon, undisturbed, name, plans)) > 0, f"no worker came to {point}"


@pytest.mark.parametrize("name", ["stage3"] if SHORT else ["stage3", "gloo3"])
def test_all_killed_in_the_middle_of_a_slow_move(daemon, undisturbed, name):
    """The target survives: the move goes on in the successors, at the rate that was asked for."""
    options = movable(daemon, name)
    expected = undisturbed(options)
    states = bytes_of_states(name)
    run = Run(daemon, {**options, "progress": True, "pause-ms": 50})
    run.supervise(lambda: run.step() >= 1)
    rate = states // 2
    begin = time.monotonic()
    assert daemon.cli("move", run.name, "--to", "nvme", "--rate", str(rate)).returncode == 0
    wait_until(run, lambda: 0 < on_nvme(run) < states, "the middle of the move")
    assert daemon.job(run.name)["counters"]["move_left_bytes"] > 0
    for worker in run.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    run.kill_all()
    wait_until(run, lambda: on_nvme(run) >= states, "the end of the move")
    # A slice of each worker comes at once, before and after the kill.
    assert time.monotonic() - begin > 0.5 * states / rate
    assert run.finish() == expected
    assert run.restarts == [1, 1]

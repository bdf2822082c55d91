"""Many SIGKILLs in one run, at random times, of random ranks and workers: the end is bit-equal to that of an undisturbed run.

$ZEROSHARD_KILLS says how many (default: 25 in the short form, else 150); $ZEROSHARD_SEED makes the same choices again.
"""

import collections
import os
import random
import signal
import time

import pytest
from crash import SHORT, Run
from jobs import JOBS

KILLS = int(os.environ.get("ZEROSHARD_KILLS") or (25 if SHORT else 150))
# One less than a worker may die within a minute before the job counts as broken.
WORKER_DEATHS = 4
WINDOW = 61.0
WORKERS_SHARE = 0.3


class Killer:
    """Kills one process at a time. Workers are spared when they have died too often lately."""

    def __init__(self, run, seed, kills):
        self.run = run
        self.random = random.Random(seed)
        # Whom each strike is for. Dealt, not drawn: both kinds are in every run.
        of_workers = max(1, round(kills * WORKERS_SHARE))
        self.deck = ["worker"] * of_workers + ["rank"] * (kills - of_workers)
        self.random.shuffle(self.deck)
        self.worker_deaths = collections.defaultdict(list)
        self.kills = collections.Counter()

    def strike(self):
        """Kills somebody; those who died before are started again first."""
        while not self.try_to_strike(self.deck[-1]):
            soon = time.monotonic() + 0.01
            self.run.supervise(lambda: time.monotonic() > soon)
        self.deck.pop()

    def try_to_strike(self, wanted):
        time.sleep(self.random.expovariate(1 / 0.006))
        victims = [("rank", rank.number) for rank in self.run.ranks]
        if wanted == "worker":
            victims = self.mortal_workers() or victims
        kind, number = self.random.choice(victims)
        if kind == "rank":
            done = self.run.kill_rank(number)
        else:
            done = self.kill_worker(number)
        self.kills[kind] += int(done)
        return done

    def mortal_workers(self):
        now = time.monotonic()
        recent = {worker: [at for at in times if now - at < WINDOW] for worker, times in self.worker_deaths.items()}
        return [("worker", w["worker"]) for w in self.run.workers() if len(recent.get(w["worker"], [])) < WORKER_DEATHS]

    def kill_worker(self, number):
        victim = next((w for w in self.run.workers() if w["worker"] == number), None)
        if victim is None or victim["state"] != "ready":
            return False
        try:
            os.kill(victim["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.worker_deaths[number].append(time.monotonic())
        return True


@pytest.mark.parametrize("name, ranks, workers", [("stage3", 3, 4), ("stage1", 3, 2), ("gloo3", 2, 2), ("power", 2, 2)])
def test_random_kills(start_daemon, name, ranks, workers):
    daemon = start_daemon(workers)
    seed = int(os.environ.get("ZEROSHARD_SEED") or random.randrange(1 << 32))
    print(f"ZEROSHARD_SEED={seed}")  # shown when the test fails
    kills = KILLS if name == "stage3" else max(10, KILLS // 5)
    options = {**JOBS[name], "steps": kills + 5}
    expected = Run(daemon, options, ranks).finish()
    run = Run(daemon, {**options, "progress": True, "pause-ms": 2}, ranks)
    killer = Killer(run, seed, kills)
    for kill in range(kills):
        run.supervise(lambda: run.step() > kill)
        killer.strike()
    assert run.finish() == expected
    assert killer.kills.total() == kills and killer.kills["rank"] and killer.kills["worker"], killer.kills

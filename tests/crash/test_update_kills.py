"""Workers killed inside the update, at random instants: the end is bit-equal to that of an undisturbed run.

A killer watches the board: a step is decided, a worker has not applied its part; somewhere in the time that this takes it sends
SIGKILL. A kill counts when the dead worker had not come to the end of its part. $ZEROSHARD_KILLS is the number of kills that
count, over all forms of master and states (default: 24 in the short form, else 300).
"""

import collections
import glob
import json
import os
import random
import signal
import time

import pytest
from board import boards
from crash import SHORT, Run

KILLS = int(os.environ.get("ZEROSHARD_KILLS") or (24 if SHORT else 300))
RANKS, WORKERS = 2, 4
# One less than a worker may die within a minute before the job counts as broken.
DEATHS = 4


def form(optimizer, dtype, stage=2, **zeroshard):
    options = {"optimizer": optimizer, "dtype": dtype, "stage": stage, "sizes": "1500000,700001,513,70000,40,3,700,90,1,260"}
    return {**options, "config-extra": json.dumps({"zeroshard": zeroshard})}


def on_nvme(options):
    """The same with states in files."""
    config = json.loads(options["config-extra"])
    config["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "pin_memory": False}, "sub_group_size": 100000}
    return {**options, "config-extra": json.dumps(config)}


FORMS = {
    "adamw-fp32-master": form("AdamW", "bf16", master="fp32"),
    "adamw-split": form("AdamW", "bf16", stage=3),
    "adamw8bit-split": form("AdamW8bit", "bf16"),
    "adamw-bf16-states": form("AdamW", "bf16", stage=1, optimizer_states="bf16"),
    "adamw-stochastic": form("AdamW", "bf16", master="none", rounding_seed=7),
    "adamw-nvme": on_nvme(form("AdamW", "bf16")),
    "sgd-bf16-momentum": form("SGD", "bf16", optimizer_states="bf16"),
    "adamw-fp16": form("AdamW", "fp16"),
    "adamw-fp32": form("AdamW", "fp32", stage=0),
    "adagrad-split": form("Adagrad", "bf16"),
    "adamw8bit-nvme-power": on_nvme(form("AdamW8bit", "bf16", stage=3, durability="power")),
    "lion8bit-gloo": form("Lion", "bf16", stage=3, optimizer_states="int8", transport="gloo"),
}
NAMES = list(FORMS)[:7] if SHORT else list(FORMS)


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


class Killer:
    """Kills workers of one run while they apply the update."""

    def __init__(self, run, choice, longest):
        self.run = run
        self.random = choice
        self.longest = longest  # of an update so far, in seconds
        self.deaths = collections.Counter()
        self.inside = 0
        self.boards = []
        self.beats = collections.Counter()  # of each worker at its last death: below it, its successor has done nothing yet

    def board_of(self, worker):
        return self.boards[worker] if len(self.boards) > 1 else self.boards[0]

    def pids(self):
        """{worker: process} of those that run now, without asking the daemon, which takes longer than a step."""
        pids = {}
        for children in glob.glob(f"/proc/{self.run.daemon.process.pid}/task/*/children"):
            for pid in map(int, read(children).split()):
                words = read(f"/proc/{pid}/cmdline").split("\0")
                if f"--job={self.run.name}" in words and not words[0].endswith("sh"):
                    pids[int(words[words.index(f"--job={self.run.name}") + 1].removeprefix("--worker="))] = pid
        return pids

    def applying(self, workers):
        """One of the workers that is inside the update, as (worker, step)."""
        for worker in workers:
            board = self.board_of(worker)
            step = board.decided()
            if step and board.applied(worker) < step and board.beats(worker) > self.beats[worker]:
                return worker, step
        return None

    def strike(self):
        """Waits for an update and kills a worker in it; False when the run came to its end first."""
        found = None
        while found is None:
            self.boards = self.boards or boards(self.run.daemon.process.pid, self.run.name)
            pids = {worker: pid for worker, pid in self.pids().items() if self.boards and self.deaths[worker] < DEATHS}
            until = time.monotonic() + 0.01
            self.run.look()
            if self.all_done():
                return False
            workers = self.random.sample(sorted(pids), k=len(pids))
            while found is None and time.monotonic() < until:
                found = self.applying(workers)
        self.kill(*found, pids[found[0]])
        return True

    def all_done(self):
        return all(rank.result for rank in self.run.ranks)

    def kill(self, worker, step, pid):
        board = self.board_of(worker)
        begin = time.monotonic()
        until = begin + self.random.uniform(0, self.longest)
        while time.monotonic() < until and board.applied(worker) < step:
            pass
        if board.applied(worker) >= step:
            self.longest = max(0.9 * self.longest, 1e-5)
            return
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.longest = min(1.05 * self.longest, 0.05)
        self.deaths[worker] += 1
        self.wait_for_end(pid)
        self.beats[worker] = board.beats(worker)
        self.inside += int(board.applied(worker) < step)

    def wait_for_end(self, pid):
        end = time.monotonic() + 5
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < end, f"process {pid} survives SIGKILL"


@pytest.mark.parametrize("name", NAMES)
def test_workers_killed_inside_the_update(start_daemon, name):
    daemon = start_daemon(WORKERS)
    seed = int(os.environ.get("ZEROSHARD_SEED") or random.randrange(1 << 32))
    print(f"ZEROSHARD_SEED={seed}")  # shown when the test fails
    choice = random.Random(seed)
    options = {**FORMS[name], "steps": 8}
    expected = Run(daemon, options, RANKS).finish()
    wanted = -(-KILLS // len(NAMES))
    inside = tries = 0
    longest = 0.001
    while inside < wanted:
        run = Run(daemon, options, RANKS)
        killer = Killer(run, choice, longest)
        while inside + killer.inside < wanted and killer.strike():
            pass
        assert run.finish() == expected
        run.remove_files()
        assert sum(run.restarts) == sum(killer.deaths.values())
        longest = killer.longest
        inside += killer.inside
        tries += 1
        assert tries < 10 + wanted, f"only {inside} kills of {tries} runs landed inside the update"
    print(f"{name}: {inside} kills inside the update in {tries} runs")

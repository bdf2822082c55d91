"""Jobs whose processes die: a daemon, supervised ranks, and what is left at the end.

A Run starts one deterministic trainer a rank and starts every rank that was killed again, as a supervisor does.
Faults are plans: which place kills which incarnation of which process. `finish()` returns an Outcome, which two runs
with the same options have in common bit for bit, whoever died in them.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import tempfile
import time

import checkpoint_reader

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-faults-bin"))
DAEMON = BINARIES / "server/zeroshardd"
WORKER = BINARIES / "worker/zeroshard-worker"
CLI = BINARIES / "client/cli/zeroshard"
TRAINER = BINARIES / "tests/e2e/deterministic_trainer"

SHORT = os.environ.get("ZEROSHARD_TEST_SHORT", "") not in ("", "0")
PATIENCE = 30.0

# A worker is started through this: it arms the fault points that a test planned for one incarnation of it.
ARMED_WORKER = """#!/bin/sh
plan="{plans}/${{1#--job=}}.${{2#--worker=}}.${{3#--incarnation=}}"
if [ -f "$plan" ]; then ZEROSHARD_FAULTS=$(cat "$plan"); export ZEROSHARD_FAULTS; fi
exec "{worker}" "$@"
"""


def fault_points(program):
    """The names of all fault points of a program."""
    environment = {**os.environ, "ZEROSHARD_FAULTS": "list"}
    listed = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=20)
    return listed.stdout.split()


def missing():
    """What is not built (with fault points), or None."""
    for program in (DAEMON, WORKER, CLI, TRAINER):
        if not program.exists():
            return program
    return None if fault_points(TRAINER) else TRAINER


def kill(*plan):
    """The plan of one process: the k of each of its incarnations, for kill("point", 1, 2, 5)."""
    point, *hits = plan
    return [f"{point}=kill:{hit}" for hit in hits]


class Daemon:
    """One zeroshardd below `directory`, with `workers` workers a job."""

    def __init__(self, directory, workers, config):
        self.directory = directory
        self.log = directory / "log"
        self.socket = directory / "run/zeroshardd.sock"
        self.plans = directory / "plans"
        self.plans.mkdir()
        self.checkpoints = directory / "checkpoints"
        self.exports = directory / "exports"
        script = directory / "armed-worker"
        script.write_text(ARMED_WORKER.format(plans=self.plans, worker=WORKER))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        file = directory / "zeroshardd.yaml"
        drives = [directory / name for name in ("drive0", "drive1")]
        for drive in drives:
            drive.mkdir()
        file.write_text(config + f"\nnvme_paths: [{', '.join(str(drive) for drive in drives)}]\n")
        command = [
            DAEMON, "--config", file, "--run-dir", directory / "run", "--state-dir", directory / "state",
            "--checkpoint-dir", self.checkpoints, "--export-dir", self.exports, "--worker-binary", script,
            "--metrics-address", "off",
        ]
        for worker in range(workers):
            command += ["--device", f"cpu:{worker}"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE
        while not self.socket.exists() or self.cli("status").returncode != 0:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def cli(self, *arguments):
        return subprocess.run(
            [str(CLI), "--socket", str(self.socket), *arguments], capture_output=True, text=True, timeout=60)

    def job(self, name):
        """What an operator sees of a job; None when there is none."""
        answer = self.cli("job", name, "--json")
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run ends with; everything in it is a function of the run's options."""

    steps: tuple      # of each rank
    checksums: tuple  # of all parameters, as each rank reads them
    sent: tuple       # of all gradients that each rank sent, from its user_state
    exported: str     # hash of the tensors of the exported file
    states: tuple     # hash of every (unit, kind) of the checkpoint


class Rank:
    """One rank: its process, and that process's predecessors."""

    def __init__(self, number, plan):
        self.number = number
        self.plan = list(plan)
        self.process = None
        self.output = None
        self.result = None   # the last line of a process that came to its end
        self.left = False    # its process is gone for good
        self.deaths = 0
        self.error = ""

    @property
    def running(self):
        return self.process is not None and self.process.poll() is None

    def lines(self):
        return [json.loads(line) for line in self.output.read_text().splitlines() if line.endswith("}")]


class Run:
    """A job under supervision. `plans`: {rank: [faults of each incarnation]}; `worker_plans`: the same by worker;
    `arguments`: {rank: more arguments}; `only`: the ranks that come at all.
    """

    _numbers = itertools.count()

    def __init__(self, daemon, options, ranks=2, plans=None, worker_plans=None, arguments=None, only=None):
        self.daemon = daemon
        self.name = f"job{next(Run._numbers)}"
        self.arguments = arguments or {}
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=daemon.directory))
        self.command = [str(TRAINER), f"--socket={daemon.socket}", f"--job={self.name}", f"--ranks={ranks}", "--linger"]
        for key, value in options.items():
            self.command.append(f"--{key}" if value is True else f"--{key}={value}")
        for worker, plan in (worker_plans or {}).items():
            for incarnation, faults in enumerate(plan, 1):
                (daemon.plans / f"{self.name}.{worker}.{incarnation}").write_text(faults)
        self.leaving = False  # all ranks have come to their end
        self.restarts = None  # of each worker, at the end
        self.ranks = [Rank(number, (plans or {}).get(number, [])) for number in range(ranks)]
        self.ranks = [rank for rank in self.ranks if only is None or rank.number in only]
        for rank in self.ranks:
            self.start(rank)

    def add(self, number):
        """A rank that was not in `only` comes after all."""
        self.ranks.append(Rank(number, []))
        self.start(self.ranks[-1])

    def start(self, rank):
        environment = {key: value for key, value in os.environ.items() if key != "ZEROSHARD_FAULTS"}
        if rank.deaths < len(rank.plan):
            environment["ZEROSHARD_FAULTS"] = rank.plan[rank.deaths]
        command = [*self.command, f"--rank={rank.number}", *self.arguments.get(rank.number, [])]
        if rank.number == 0:
            command += [f"--save={self.name}", f"--export={self.name}"]
        rank.output = self.scratch / f"{rank.number}.{rank.deaths}"
        with open(rank.output, "wb") as output, open(f"{rank.output}.err", "wb") as errors:
            rank.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors)

    def poll(self, rank):
        """Looks at a rank and starts it again where it was killed."""
        code = rank.process.poll()
        if rank.result is None and (code is not None or rank.output.stat().st_size > 0):
            rank.result = next((line for line in rank.lines() if "checksum" in line), None)
        if code is None:
            return
        rank.process.stdin.close()
        if code == -signal.SIGKILL:
            rank.deaths += 1
            if not self.leaving:
                rank.result = None
                return self.start(rank)
        rank.left = True
        if code not in (0, -signal.SIGKILL):
            rank.error = pathlib.Path(f"{rank.output}.err").read_text()

    def look(self):
        """Starts again what died; a rank that failed ends the test."""
        for rank in self.ranks:
            if not rank.left:
                self.poll(rank)
            assert not rank.error, f"{self.name}: {rank.error}\n{self.tail()}"

    def supervise(self, until, patience=PATIENCE):
        """Looks until `until()` holds."""
        end = time.monotonic() + patience
        while not until():
            self.look()
            assert time.monotonic() < end, f"{self.name} hangs: {self.describe()}\n{self.tail()}"
            time.sleep(0.002)

    def finish(self):
        """Waits for the end of the run, takes what it left, and removes the job."""
        try:
            self.supervise(lambda: all(rank.result for rank in self.ranks))
            self.restarts = [worker["restarts"] for worker in self.workers()]
            self.leaving = True
            for rank in self.ranks:
                if not rank.process.stdin.closed:
                    rank.process.stdin.close()
            self.supervise(lambda: all(rank.left for rank in self.ranks))
            return self.outcome()
        finally:
            self.clear()

    def outcome(self):
        checkpoint = self.daemon.checkpoints / self.name
        states = checkpoint_reader.Checkpoint(checkpoint).states()
        return Outcome(
            steps=tuple(rank.result["step"] for rank in self.ranks),
            checksums=tuple(rank.result["checksum"] for rank in self.ranks),
            sent=tuple(rank.result["sent"] for rank in self.ranks),
            exported=hash_of_tensors(self.daemon.exports / f"{self.name}.safetensors"),
            states=tuple((unit, kind, dtype, hashlib.sha256(array.tobytes()).hexdigest())
                         for (unit, kind), (dtype, array) in sorted(states.items())),
        )

    def remove_files(self):
        """What the run left, for tests with many runs."""
        shutil.rmtree(self.daemon.checkpoints / self.name, ignore_errors=True)
        (self.daemon.exports / f"{self.name}.safetensors").unlink(missing_ok=True)

    def clear(self):
        for rank in self.ranks:
            if rank.running:
                rank.process.kill()
                rank.process.wait()
            if not rank.process.stdin.closed:
                rank.process.stdin.close()
        if self.daemon.job(self.name):
            self.daemon.cli("remove", self.name, "--force")

    def step(self):
        """The last step that any rank has reported; needs the option `progress`."""
        steps = [line.get("at", line.get("step", 0)) for rank in self.ranks for line in rank.lines()]
        return max(steps, default=0)

    def kill_rank(self, number):
        """Whether there was anybody to kill."""
        if not self.ranks[number].running:
            return False
        self.ranks[number].process.kill()
        return True

    def kill_all(self):
        for rank in self.ranks:
            self.kill_rank(rank.number)
        for rank in self.ranks:
            rank.process.wait()

    def workers(self):
        view = self.daemon.job(self.name)
        return view["workers"] if view else []

    def describe(self):
        return [(rank.number, rank.deaths, rank.running, rank.result) for rank in self.ranks]

    def tail(self):
        return "\n".join(self.daemon.log.read_text().splitlines()[-40:])


def hash_of_tensors(path):
    """Of a safetensors file, without its metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + data[8 + length :]).hexdigest()

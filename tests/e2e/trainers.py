"""Runs whole jobs of deterministic trainers (deterministic_trainer.cc) on real daemons, and reads what they saved."""

import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import tempfile

import checkpoint_reader
import numpy as np
from daemon import BINARIES, CLI, DAEMON, Daemon

WORKER = BINARIES / "worker/zeroshard-worker"
TRAINER = BINARIES / "tests/e2e/deterministic_trainer"
SIZES = (40000, 513, 7, 0, 1, 20000)  # the trainer's default
PATIENCE = 120.0


def missing():
    """The first program that is not built, or None."""
    return next((path for path in (DAEMON, CLI, WORKER, TRAINER) if not path.exists()), None)


class Daemons:
    """Daemons with real workers, one for each number of workers, started when first asked for."""

    def __init__(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="zs-"))
        self.by_workers = {}
        self.numbers = itertools.count()

    def of(self, workers, **options):
        """The daemon whose jobs have so many workers."""
        if workers not in self.by_workers:
            directory = self.directory / str(workers)
            directory.mkdir()
            devices = [f"cpu:{i}" for i in range(workers)]
            self.by_workers[workers] = Daemon(directory, worker=WORKER, devices=devices, **options).start()
        return self.by_workers[workers]

    def close(self):
        codes = {workers: daemon.stop() for workers, daemon in self.by_workers.items()}
        shutil.rmtree(self.directory, ignore_errors=True)
        assert all(code == 0 for code in codes.values()), codes

    def train(self, workers, ranks, **options):
        """Trains a job to its end and returns what it left: a Result."""
        job = f"job-{next(self.numbers)}"
        return run(self.of(workers), job, ranks, **options)


class Result:
    """reports: the JSON line of each rank. parameters: the fp32 values that each rank saw at the end, one array."""

    def __init__(self, reports, dumps, directory):
        self.reports = reports
        self.parameters = dumps
        self.checkpoint = checkpoint_reader.Checkpoint(directory)

    def states(self):
        """{(unit, kind): (dtype, bytes of the data)}: without padding, whatever the number of workers."""
        return self.checkpoint.states()


def command(daemon, job, rank, ranks, **options):
    """The trainer's command line. Options: its own, with underscores; `config` is a dictionary; True is a flag."""
    line = [TRAINER, "--socket", daemon.socket, "--job", job, "--rank", rank, "--ranks", ranks]
    for name, value in options.items():
        if name == "config":
            line += ["--config-extra", json.dumps(value)]
        elif value is True:
            line.append("--" + name.replace("_", "-"))
        elif isinstance(value, (tuple, list)):
            line += ["--" + name.replace("_", "-"), ",".join(map(str, value))]
        elif value is not None and value is not False:
            line += ["--" + name.replace("_", "-"), value]
    return [str(part) for part in line]


def run_ranks(daemon, job, lines):
    """Runs one process for each command line to its end; the JSON line of each."""
    with contextlib.ExitStack() as stack:
        processes = []
        for line in lines:
            process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            processes.append(process)
        answers = [process.communicate(timeout=PATIENCE) for process in processes]
        errors = "".join(error for process, (_, error) in zip(processes, answers) if process.returncode != 0)
        assert not errors, f"{job}: {errors}\n{daemon.text()[-4000:]}"
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


def train_and_keep(daemon, job, ranks, **options):
    """Runs all ranks of a job, which stays in the daemon with its memory."""
    return run_ranks(daemon, job, [command(daemon, job, rank, ranks, keep=True, **options) for rank in range(ranks)])


def run(daemon, job, ranks, **options):
    """Runs all ranks of a job to their end; the checkpoint is read and removed."""
    checkpoint = daemon.directory / "checkpoints" / job
    files = [daemon.directory / f"{job}-{rank}.f32" for rank in range(ranks)]
    reports = run_ranks(daemon, job, [
        command(daemon, job, rank, ranks, save=job, dump=files[rank], **options) for rank in range(ranks)])
    dumps = [np.fromfile(file, np.float32) for file in files]
    result = Result(reports, dumps, checkpoint)
    for file in files:
        file.unlink()
    shutil.rmtree(checkpoint)
    return result

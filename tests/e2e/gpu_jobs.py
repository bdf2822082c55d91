"""Nodes of fake GPUs (tests/fakes/cuda, tests/fakes/nccl) under the very programs that run on real ones."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import trainers
from daemon import BINARIES, Daemon, wait_for

FAKES = (BINARIES / "tests/fakes/cuda/libcuda.so.1", BINARIES / "tests/fakes/nccl/libnccl.so.2")
LIBRARY = BINARIES / "client/dataplane/libzeroshard-dataplane.so"


def missing():
    """The first program that is not built, or None."""
    return trainers.missing() or next((path for path in (*FAKES, LIBRARY) if not path.exists()), None)


def tier(name, directory):
    """What is merged into the trainer's ds_config, for states on gpu, host or nvme, or half of them on the host.

    "-host", "-nvme": with parameters there. No directory: all that the daemon has.
    """
    places = {
        "gpu": {},
        "host": {"device": "cpu"},
        "half": {"device": "cpu", "ratio": 0.5},
        "nvme": {"device": "nvme", **({"nvme_path": str(directory)} if directory else {})},
    }
    state, _, parameters = name.partition("-")
    zero = {"offload_optimizer": places[state]} if places[state] else {}
    if parameters:
        zero["offload_param"] = {**places[parameters], **({"max_in_cpu": 0} if parameters == "nvme" else {})}
    return {"zero_optimization": zero} if zero else {}


class Node:
    """GPUs that all processes of a test share, and daemons that have some of them. Take it as a context manager."""

    def __init__(self, devices=4):
        # Memory of the fake devices is files: in memory, and gone with the directory.
        self.memory = pathlib.Path(tempfile.mkdtemp(prefix="zs-gpu-", dir="/dev/shm"))
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="zs-"))
        self.devices = devices
        self.daemons = []

    def environment(self, cuda="", nccl="", faults=""):
        """Of a process on this node; with faults that only it has: of the fakes, or at fault points."""
        settings = f"devices={self.devices},memory=1G,node={self.memory}"
        return {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(str(file.parent) for file in FAKES),
            "ZEROSHARD_FAKE_CUDA": settings + (f",{cuda}" if cuda else ""),
            "ZEROSHARD_FAKE_NCCL": nccl,
            "ZEROSHARD_DATAPLANE": str(LIBRARY),
            "ZEROSHARD_FAULTS": faults,
        }

    def daemon(self, workers, config="", cuda="", faults="", first=0):
        """A daemon whose jobs have so many workers, each on a GPU of its own; with faults that its workers have.

        Its GPUs are those from `first` on. Of `faults`, the first incarnation of each worker.
        """
        directory = self.directory / str(len(self.daemons))
        (directory / "drive").mkdir(parents=True)
        config = f"nvme_paths: [{directory / 'drive'}]\n" + config
        devices = [f"cuda:{i}" for i in range(first, first + workers)]
        daemon = Daemon(directory, worker=trainers.WORKER, devices=devices, config=config,
                        process={"env": self.environment(cuda, faults=faults)})
        self.daemons.append(daemon.start())
        return daemon

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        codes = [daemon.stop() for daemon in self.daemons]
        texts = "".join(daemon.text() for daemon in self.daemons)
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        assert not any(codes), texts


class Job:
    """The ranks of one job, each a process on a GPU."""

    def __init__(self, node, daemon, name, ranks, **options):
        self.node, self.daemon, self.name, self.ranks = node, daemon, name, ranks
        self.options = {"cuda": -1, "save": name, **options}
        self.processes = {}

    def start(self, *ranks, **faults):
        """Starts these ranks (default: all); faults: of Node.environment, for them alone."""
        for rank in ranks or range(self.ranks):
            dump = self.daemon.directory / f"{self.name}-{rank}.f32"
            line = trainers.command(self.daemon_of(rank), self.name, rank, self.ranks, dump=dump, **self.options)
            self.processes[rank] = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.node.environment(**faults))
        return self

    def daemon_of(self, rank):
        return self.daemon

    def view(self):
        answer = self.daemon.cli("job", self.name, "--json", check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else {}

    def step(self):
        """Committed steps; -1 where there is no such job."""
        jobs = [job for job in self.daemon.json("jobs")["jobs"] if job["name"] == self.name]
        return jobs[0].get("step", 0) if jobs else -1

    def reach(self, step):
        """Waits until the job has committed so many steps."""
        wait_for(lambda: self.step() >= step or any(p.poll() is not None for p in self.processes.values()),
                 f"step {step}", 60)
        for rank, process in self.processes.items():
            assert process.poll() is None, f"rank {rank} ended: {process.communicate()}\n{self.daemon.text()[-4000:]}"

    def kill(self, rank):
        self.processes[rank].kill()
        self.processes[rank].wait()

    def errors(self, patience=60):
        """The last words of each rank; all of them must end with an error."""
        texts = {rank: process.communicate(timeout=patience)[1] for rank, process in self.processes.items()}
        codes = {rank: process.returncode for rank, process in self.processes.items()}
        assert all(code == 1 for code in codes.values()), (codes, texts)
        return texts

    def finish(self):
        """The report of each rank, its parameters and what it said on stderr, once all have ended well."""
        answers = {rank: process.communicate(timeout=trainers.PATIENCE) for rank, process in self.processes.items()}
        failed = {rank: answers[rank][1] for rank, process in self.processes.items() if process.returncode != 0}
        assert not failed, f"{failed}\n{self.daemon.text()[-6000:]}"
        reports = [json.loads(answers[rank][0].splitlines()[-1]) for rank in range(self.ranks)]
        files = [self.daemon.directory / f"{self.name}-{rank}.f32" for rank in range(self.ranks)]
        parameters = [np.fromfile(file, np.float32) for file in files]
        return reports, parameters, [answers[rank][1] for rank in range(self.ranks)]

    def result(self):
        """A trainers.Result, once all ranks have ended well; and what each said on stderr."""
        reports, parameters, said = self.finish()
        directory = self.daemon.directory / "checkpoints" / self.name
        result = trainers.Result(reports, parameters, directory)
        result.said = said
        shutil.rmtree(directory)
        return result

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)

"""Two zeroshardd that run one job: node 0 and node 1 of a cluster, each with directories of its own."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile

import trainers
from daemon import Daemon, wait_for

PATIENCE = 120.0


def free_ports(count):
    """Ports of loopback that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """The daemons, by node. `devices` of each; `config` is added to the configuration of every node; `nvme`: each has a
    path of its own."""

    def __init__(self, devices=(2, 2), addresses=None, config="", cluster_config="", prefixes=((), ()), nvme=False):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="zs-"))
        addresses = addresses or [f"127.0.0.1:{port}" for port in free_ports(len(devices))]
        self.addresses = addresses
        self.daemons = []
        for node, count in enumerate(devices):
            directory = self.directory / str(node)
            directory.mkdir()
            text = f"cluster: {{node: {node}, addresses: {json.dumps(addresses)}{cluster_config}}}\n{config}"
            names = [f"cpu:{i}" for i in range(count)]
            flags = ["--nvme-path", directory / "nvme"] if nvme else []
            if nvme:
                (directory / "nvme").mkdir()
            daemon = Daemon(directory, *flags, worker=trainers.WORKER, devices=names, config=text)
            daemon.command = [*prefixes[node], *daemon.command]
            self.daemons.append(daemon)
        for daemon in self.daemons:
            daemon.start()

    def close(self):
        codes = [daemon.stop() for daemon in self.daemons]
        text = "".join(daemon.text() for daemon in self.daemons)
        shutil.rmtree(self.directory, ignore_errors=True)
        assert all(code == 0 for code in codes), f"{codes}\n{text}"

    def rank(self, job, rank, ranks, **options):
        """Starts one rank at the daemon that it belongs to; options of the trainer (trainers.command)."""
        local = options.pop("local_ranks", ranks // len(self.daemons))
        node = options.pop("node", rank // local)
        line = trainers.command(self.daemons[node], job, rank, ranks, local_ranks=local, **options)
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def train(self, job, ranks=4, **options):
        """Runs all ranks to their end and keeps the job; the JSON line of each."""
        return self.finish([self.rank(job, rank, ranks, keep=True, **options) for rank in range(ranks)])

    def finish(self, processes):
        answers = outcomes(processes)
        errors = "".join(error for code, _, error in answers if code != 0)
        assert not errors, errors + "".join(daemon.text()[-4000:] for daemon in self.daemons)
        return [json.loads(output.splitlines()[-1]) for _, output, _ in answers]

    def exports(self, job):
        """The parameters, as each node exports them."""
        files = []
        for daemon in self.daemons:
            daemon.cli("export", job, "--name", job)
            files.append((daemon.directory / "exports" / f"{job}.safetensors").read_bytes())
        return files

    def remove(self, job):
        for daemon in self.daemons:
            daemon.cli("remove", job)

    def text(self):
        return "".join(daemon.text() for daemon in self.daemons)

    def kill_worker(self, node, job, which=0):
        """Kills one worker with SIGKILL; returns when another has taken its place."""
        workers = self.daemons[node].job(job)["workers"]
        subprocess.run(["kill", "-KILL", str(workers[which]["pid"])], check=True)
        wait_for(lambda: self.daemons[node].job(job)["workers"][which]["restarts"] > workers[which]["restarts"],
                 "a successor of the worker")

    def kill_daemon(self, node):
        self.daemons[node].process.send_signal(signal.SIGKILL)
        self.daemons[node].process.wait(PATIENCE)


def outcomes(processes):
    """(exit code, stdout, stderr) of each, once all have ended."""
    try:
        answers = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *answer) for process, answer in zip(processes, answers)]

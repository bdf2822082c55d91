"""ds_configs of jobs whose states rest in files, and what such a job occupies."""

import os
import pathlib
import re
import threading


def config(path=None, stage=2, parameters=None, optimizer=None, **own):
    """What is merged into the trainer's ds_config. `parameters`: offload_param too (default: at stage 3); `optimizer`:
    more keys of offload_optimizer; the rest: keys of the block "zeroshard"."""
    place = {"device": "nvme", **({"nvme_path": str(path)} if path else {})}
    zero = {"offload_optimizer": {**place, **(optimizer or {})}}
    if stage == 3 if parameters is None else parameters:
        zero["offload_param"] = {**place, "max_in_cpu": 0}
    return {"zero_optimization": zero, "zeroshard": own}


def on_tier(view, tier="nvme", without=("slots",)):
    """Bytes of a job's states on a tier, by the ledger; `without` the room that no state fills."""
    return sum(line["bytes"] for line in view["ledger"] if line["tier"] == tier and line["state"] not in without)


def private_memory(pid):
    """Bytes of a process's memory that no file stands behind."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB", text, re.M)[1]) * 1024


def shared_memory(pid, job):
    """Bytes that the memory files of a job occupy, by the descriptors of the daemon that owns them."""
    files = {}
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:zeroshard:{job}:"):
                info = os.stat(f"{folder}/{name}")
                files[info.st_ino] = info.st_blocks * 512
        except OSError:
            pass  # closed meanwhile
    return sum(files.values())


def workers(daemon_pid, job):
    """The processes of a job's workers, without asking the daemon."""
    pids = []
    for children in pathlib.Path(f"/proc/{daemon_pid}/task").glob("*/children"):
        try:
            pids += [int(pid) for pid in children.read_text().split() if is_worker(pid, job)]
        except OSError:
            pass  # the thread ended
    return pids


def is_worker(pid, job):
    try:
        return f"--job={job}" in pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False  # it ended


class Meter(threading.Thread):
    """Watches, some hundred times a second, what a job's memory files and its workers' own memory come to.

    idle: the own memory of a worker that has nothing to do, which is not the job's. most: the largest sum seen.
    """

    def __init__(self, daemon, job, idle=0):
        super().__init__(daemon=True)
        self.pid = daemon.process.pid
        self.job = job
        self.idle = idle
        self.most = 0
        self.samples = 0
        self.stopped = threading.Event()

    def run(self):
        while not self.stopped.wait(0.003):
            self.sample()

    def sample(self):
        total = shared_memory(self.pid, self.job)
        for pid in workers(self.pid, self.job):
            try:
                total += max(0, private_memory(pid) - self.idle)
            except (OSError, TypeError):
                pass  # it ended
        self.most = max(self.most, total)
        self.samples += 1

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused):
        self.stopped.set()
        self.join()

"""The node's cores shared out among the workers of several jobs: results stay the same, and a
worker that is killed gives its cores back."""

import os
import pathlib
import signal
import socket
import threading
import time

import pytest
import torch

import real_daemon
import zeroshard
from conftest import BINARIES, Running
from models import Mlp, build, config

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None, reason="the daemon is not built"
)


STEPS = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def train(ranks, job, steps):
    engine, *_ = zeroshard.initialize(
        model=build(lambda: Mlp(96)),
        config=config(3, bf16={"enabled": True}),
        job=job,
        rank=0,
        world_size=1,
        socket=ranks.socket,
    )
    for step in range(steps):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
    found = engine.module.state_dict()
    engine.destroy()
    return found


def workers_of(daemon):
    pid = daemon.process.pid
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def cores(daemon, address):
    """name -> value of the first NUMA node."""
    found = {}
    for line in daemon.metrics(address).splitlines():
        if line.startswith("zeroshard_core") and 'numa="0"' in line:
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            found[name] = value
    return found


def test_two_jobs_of_many_workers_share_the_cores(tmp_path):
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    with Running(tmp_path / "alone", 1) as alone:
        (expected,) = alone.run(1, lambda rank: train(alone, "job", STEPS))
    address = free_port()
    running = Running(tmp_path / "shared", 4, metrics=address)
    with running as ranks:
        most, killed = [], []
        done = threading.Event()

        def watch():
            while not done.wait(0.01):
                most.append(cores(running.daemon, address).get("zeroshard_cores_in_use", 0))

        def killer():
            """Kills a worker now and then; the job goes on with its successor."""
            for _ in range(3):
                if done.wait(0.15):
                    return
                workers = workers_of(running.daemon)
                if workers:
                    os.kill(workers[-1], signal.SIGKILL)
                    killed.append(workers[-1])

        helpers = [threading.Thread(target=watch), threading.Thread(target=killer)]
        for helper in helpers:
            helper.start()
        try:
            both = ranks.run(2, lambda rank: train(ranks, f"job{rank}", STEPS))
        finally:
            done.set()
            for helper in helpers:
                helper.join()
        for found in both:
            for name, value in expected.items():
                assert torch.equal(value, found[name]), name
        end = time.monotonic() + 10
        now = cores(running.daemon, address)
        while now["zeroshard_cores_in_use"] or not now["zeroshard_core_seconds_total"]:
            assert time.monotonic() < end, now
            time.sleep(0.1)
            now = cores(running.daemon, address)
        assert killed
        assert max(most) <= now["zeroshard_cores"]
        assert now["zeroshard_core_overdrafts_total"] == 0

"""What needs the real daemon: other numbers of workers, its counters, its checkpoints."""

import copy
import re
import socket

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import real_daemon
import zeroshard
from conftest import BINARIES, Running
from models import Lora, Mlp, Odd, build, config

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None, reason="the daemon is not built"
)


def data(rank, step, width):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(engine, rank, width, steps):
    while engine.global_steps < steps:
        engine.backward(engine(data(rank, engine.global_steps, width)).float().pow(2).mean())
        engine.step()


def start(ranks, factory, rank, world, settings, job="job"):
    model = copy.deepcopy(build(factory))
    engine, *_ = zeroshard.initialize(
        model=model, config=settings, job=job, rank=rank, world_size=world, socket=ranks.socket
    )
    return engine


@pytest.mark.parametrize("factory,width", [(Mlp, 24), (Odd, 5), (Lora, 8)])
def test_checkpoint_loads_with_other_workers_and_stage(tmp_path, factory, width):
    """Saved at W = 2, stage 3: training goes on bit for bit at W = 1, 3, 4 and other stages."""

    def first(rank):
        engine = start(ranks, factory, rank, 2, config(3, bf16={"enabled": True}))
        train(engine, rank, width, 3)
        engine.save_checkpoint(str(tmp_path / "saved"))
        train(engine, rank, width, 6)
        found = engine.module.state_dict()
        engine.destroy()
        return found

    with Running(tmp_path, 2) as ranks:
        expected = ranks.run(2, first)[0]
    for workers, stage in ((1, 0), (3, 1), (4, 3), (1, 2)):

        def second(rank, stage=stage):
            engine = start(ranks, factory, rank, 2, config(stage, bf16={"enabled": True}))
            engine.load_checkpoint(str(tmp_path / "saved"))
            assert engine.global_steps == 3
            train(engine, rank, width, 6)
            found = engine.module.state_dict()
            engine.destroy()
            return found

        with Running(tmp_path, workers) as ranks:
            for found in ranks.run(2, second):
                for name, value in expected.items():
                    assert torch.equal(found[name], value), (name, workers, stage)


class Views(torch.nn.Module):
    """Keeps views of its weights across forward and backward; every weight is a unit of its own."""

    def __init__(self, width=132):
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.w = torch.nn.Parameter(torch.randn(width, width) * 0.1)
        self.last = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        kept = self.w.t()
        a, b = self.w.chunk(2)
        h = torch.tanh(self.first(x))
        h = torch.tanh(checkpoint(self.last, h @ kept, use_reentrant=False))
        return (self.first(h) @ a.t()).sum(-1) * (h @ b.t()).sum(-1)


def test_the_smallest_window_changes_no_bit(tmp_path):
    """Room for one unit: what a view needs comes back at its address, from other processes too."""

    def run(own, live):
        settings = config(3, bf16={"enabled": True}, zeroshard=own, prefetch=0)
        settings["gradient_accumulation_steps"] = 2
        settings["zero_optimization"]["stage3_max_live_parameters"] = live

        def rank_main(rank):
            engine = start(ranks, Views, rank, 2, settings)
            while engine.global_steps < 3:
                engine.backward(engine(data(rank, engine.micro_steps, 132)).float().pow(2).mean())
                engine.step()
            found = engine.module.state_dict()
            engine.destroy()
            return found

        with Running(tmp_path, 3) as ranks:
            one, two = ranks.run(2, rank_main)
        assert all(torch.equal(two[name], value) for name, value in one.items())
        return one

    expected = run({}, 10**9)
    for own in ({"window": "copy"}, {"transport": "gloo"}):
        found = run(own, 1)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), own


@pytest.mark.parametrize("exclude", [False, True])
def test_frozen_parameters_in_and_out_of_a_checkpoint(tmp_path, exclude):
    def first(rank):
        engine = start(ranks, Lora, rank, 1, config(3))
        train(engine, rank, 8, 2)
        engine.save_checkpoint(str(tmp_path / "saved"), exclude_frozen_parameters=exclude)
        found = engine.module.state_dict()
        engine.destroy()
        return found

    def second(rank):
        model = build(Lora, seed=0 if exclude else 5)
        engine, *_ = zeroshard.initialize(
            model=model, config=config(2), job="job", rank=rank, world_size=1, socket=ranks.socket
        )
        engine.load_checkpoint(str(tmp_path / "saved"))
        found = engine.module.state_dict()
        engine.destroy()
        return found

    with Running(tmp_path, 2) as ranks:
        (expected,) = ranks.run(1, first)
        (found,) = ranks.run(1, second)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("stage,gathers", [(3, 2), (2, 0), (1, 0)])
def test_traffic_in_logical_elements(tmp_path, stage, gathers):
    """A step moves 3P elements a rank at stage 3 (two gathers, one scatter), 2P below it."""

    def layers():
        return torch.nn.Sequential(*[torch.nn.Linear(150, 150) for _ in range(4)])

    size, steps = sum(p.numel() for p in layers().parameters()), 3
    running = Running(tmp_path, 2, f"127.0.0.1:{free_port()}")

    def rank_main(rank):
        engine = start(ranks, layers, rank, 2, config(stage))
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 150)).pow(2).mean())
            engine.step()
        return engine  # alive, so that the job's counters are

    with running as ranks:
        engines = ranks.run(2, rank_main)
        counters = wait_for(running, 2 * steps * size * (3 if stage == 3 else 2))
        for engine in engines:
            engine.destroy()
    assert counters["gather"] == 2 * steps * gathers * size
    assert counters["scatter"] == 2 * steps * size
    assert counters["step_gather"] == (0 if stage == 3 else 2 * steps * size)


def wait_for(running, total):
    """The workers report about once a second: waits until their sum is `total` or for ten seconds."""
    import time

    counters = {}
    for _ in range(100):
        counters = {"gather": 0, "scatter": 0, "step_gather": 0}
        for line in running.daemon.metrics(running.metrics).splitlines():
            found = re.match(r"zeroshard_collective_elements_total\{(.*)\} (\S+)", line)
            kind = found and re.search(r'kind="(\w+)"', found.group(1)).group(1)
            if kind in counters:
                counters[kind] += int(float(found.group(2)))
        if sum(counters.values()) == total:
            break
        time.sleep(0.1)
    return counters

"""Model files and checkpoints as wholes: every name of a tied weight, and how much memory writing
takes."""

import copy
import json
import os
import pathlib
import re
import threading

import pytest
import torch

import real_daemon
import zeroshard
from conftest import BINARIES, Running
from models import Tied, build, config

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None, reason="the daemon is not built"
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_weight_counts_once_in_the_norm_and_has_both_names_everywhere(tmp_path, stage):
    tokens = torch.arange(12).view(3, 4)
    model = build(lambda: Tied(False))
    plain = copy.deepcopy(model)
    plain(tokens).pow(2).mean().backward()
    gradients = [p.grad for p in plain.parameters()]  # PyTorch lists the tied one once
    norm = torch.stack([g.double().pow(2).sum() for g in gradients]).sum().sqrt().item()

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=copy.deepcopy(model),
            config=config(stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}),
            job="job", rank=rank, world_size=2, socket=ranks.socket,
        )
        engine.backward(engine(tokens).pow(2).mean())
        engine.step()
        files = []
        if rank == 0:
            files = [engine.save_16bit_model(str(tmp_path)), engine.export("model")["path"]]
            engine.save_checkpoint(str(tmp_path), tag="t")
        engine.barrier()
        facts = engine.get_global_grad_norm(), engine.module.state_dict(), files
        engine.destroy()
        return facts

    with Running(tmp_path, 2) as ranks:
        (found_norm, values, files), _ = ranks.run(2, rank_main)
    assert found_norm == pytest.approx(norm, rel=1e-6)
    assert torch.equal(values["embed.weight"], values["head.weight"])
    torch.testing.assert_close(
        values["head.weight"], plain.embed.weight.detach() - plain.embed.weight.grad
    )
    for path in files:
        found = zeroshard.load_safetensors(path)
        assert found.keys() == values.keys(), path
        assert all(torch.equal(found[name], value) for name, value in values.items())
    saved = json.loads((tmp_path / "t/zeroshard.json").read_text())["directory"]
    manifest = (pathlib.Path(saved) / "manifest.pb").read_bytes()
    assert b"embed.weight" in manifest and b"head.weight" in manifest


class Layers(torch.nn.Module):
    """Eight frozen matrices of 4 MiB in bf16."""

    COUNT, SIDE = 8, 1448

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(self.SIDE, self.SIDE, bias=False) for _ in range(self.COUNT)]
        )
        for number, layer in enumerate(self.layers):
            layer.weight.requires_grad_(False).fill_(number + 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


TENSOR = 2 * Layers.SIDE**2


def children(pid):
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in path.read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def private_bytes(pid):
    """Memory that is this process's alone."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024


def region_bytes(pid, job):
    """What the job's regions, held by the daemon, occupy."""
    total = 0
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"/memfd:zeroshard:{job}:"):
                total += os.stat(fd).st_blocks * 512
        except FileNotFoundError:
            pass
    return total


class Peak:
    """The most that daemon, workers and this process (the ranks) take while the block runs, above
    what they took before it."""

    def __init__(self, daemon, job):
        self.pids = [daemon.process.pid, *children(daemon.process.pid), os.getpid()]
        self.daemon, self.job = daemon.process.pid, job
        self.growth, self._end = 0, threading.Event()

    def _now(self):
        return sum(map(private_bytes, self.pids)) + region_bytes(self.daemon, self.job)

    def _watch(self):
        while not self._end.is_set():
            self.growth = max(self.growth, self._now() - self._begin)

    def __enter__(self):
        self._begin = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._end.set()
        self._thread.join()
        self.growth = max(self.growth, self._now() - self._begin)


@pytest.mark.parametrize("writer", ["daemon", "engine"])
@pytest.mark.parametrize(
    "own", [{}, {"window": "copy"}, {"transport": "gloo"}], ids=["in_place", "copy", "gloo"]
)
def test_writing_a_model_takes_less_than_two_tensors(tmp_path, writer, own):
    """Whatever the model's size, where the window holds everything and where it is filled."""
    settings = config(3, bf16={"enabled": True}, zeroshard=own)
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    running = Running(tmp_path, 2)

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=Layers(), config=settings, job="job", rank=rank, world_size=1,
            socket=ranks.socket,
        )
        engine.save_16bit_model(str(tmp_path), "warm")  # what libraries allocate once
        os.remove(tmp_path / "warm")
        with Peak(running.daemon, "job") as peak:
            if writer == "daemon":
                path = engine.export("model")["path"]
            else:
                path = engine.save_16bit_model(str(tmp_path))
        with torch.no_grad():  # the window is as good as before
            x = torch.ones(1, Layers.SIDE, dtype=torch.bfloat16)
            assert torch.isfinite(engine(x)).all()
        engine.destroy()
        return peak.growth, path

    with running as ranks:
        ((growth, path),) = ranks.run(1, rank_main)
    found = zeroshard.load_safetensors(path)
    assert sorted(found) == [f"layers.{i}.weight" for i in range(Layers.COUNT)]
    for i in range(Layers.COUNT):
        assert (found[f"layers.{i}.weight"] == i + 1).all(), i
    assert growth < 2 * TENSOR, f"{growth / TENSOR:.2f} tensors"


class Adapters(torch.nn.Module):
    """A frozen base of 4 MiB, larger than all that is trained."""

    def __init__(self, side=1448):
        super().__init__()
        self.base = torch.nn.Linear(side, side, bias=False)
        self.down = torch.nn.Linear(side, 2, bias=False)
        self.up = torch.nn.Linear(2, side, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trained_model_and_its_frozen_reference_live_side_by_side(tmp_path, stage):
    """The reference is a forward-only job; evaluation of the trained one changes nothing."""
    model = build(Adapters)
    x = torch.randn(4, 1448, generator=torch.Generator().manual_seed(2))
    settings = config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-4}})

    def join(job, rank, frozen):
        mine = copy.deepcopy(model)
        if frozen:
            mine.requires_grad_(False)
        engine, *_ = zeroshard.initialize(
            model=mine, config=settings, job=job, rank=rank, world_size=2, socket=ranks.socket
        )
        return engine

    def rank_main(rank):
        policy, reference = join("policy", rank, False), join("reference", rank, True)
        assert reference.forward_only and not policy.forward_only
        losses = []
        for _ in range(3):
            with torch.no_grad():
                target = reference(x)
            loss = (policy(x) - target - 1).pow(2).mean()
            policy.backward(loss)
            policy.step()
            losses.append(loss.item())
            policy.eval()
            with torch.no_grad():
                policy(x)
            policy.train()
        found = policy.module.state_dict(), reference.module.state_dict(), losses, target
        with pytest.raises(zeroshard.ZeroShardError, match="forward-only"):
            reference.step()
        policy.destroy()
        reference.destroy()
        return found

    plain, expected = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW([plain.down.weight, plain.up.weight], lr=1e-4, weight_decay=0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (plain(x) - model(x).detach() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    with Running(tmp_path, 2) as ranks:
        for trained, kept, losses, target in ranks.run(2, rank_main):
            assert losses == pytest.approx(expected, rel=1e-5) and len(set(expected)) == 3
            for name, value in model.state_dict().items():
                assert torch.equal(kept[name], value), name
            assert torch.equal(trained["base.weight"], model.base.weight)
            assert not torch.equal(trained["up.weight"], model.up.weight)
            torch.testing.assert_close(target, model(x).detach())


def test_states_of_another_optimizer_are_refused_and_change_nothing(tmp_path):
    model = build(lambda: Tied(False))
    tokens = torch.arange(12).view(3, 4)

    def join(kind, rank, job):
        engine, *_ = zeroshard.initialize(
            model=copy.deepcopy(model), job=job, rank=rank, world_size=1, socket=ranks.socket,
            config=config(3, optimizer={"type": kind, "params": {"lr": 0.1}}),
        )
        engine.backward(engine(tokens).pow(2).mean())
        engine.step()
        return engine

    def rank_main(rank):
        first = join("SGD", rank, "first")
        saved = first.module.state_dict()
        first.save_checkpoint(str(tmp_path))
        first.destroy()
        second = join("AdamW", rank, "second")
        before = second.module.state_dict()
        with pytest.raises(zeroshard.ZeroShardError, match="no exp_avg of .*another optimizer"):
            second.load_checkpoint(str(tmp_path))
        after = second.module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        second.load_checkpoint(str(tmp_path), load_module_only=True)
        loaded = second.module.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        second.destroy()

    with Running(tmp_path, 2) as ranks:
        ranks.run(1, rank_main)

"""Empty, tiny and odd parameters from the first put to a loaded checkpoint; checkpoints whose
states are the same bytes at every number of workers and stage; a run that is interrupted."""

import json
import pathlib
import sys

import pytest
import torch

import real_daemon
import zeroshard
from conftest import BINARIES, ROOT, Running
from models import config

sys.path.append(str(ROOT / "tests" / "e2e"))

import checkpoint_reader  # noqa: E402

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None, reason="the daemon is not built"
)

HALVING = {"type": "SGD", "params": {"lr": 0.25}}


class Shapes(torch.nn.Module):
    """loss = factor * sum of squares: SGD with lr 1/4 halves every element at factor 1."""

    def __init__(self, shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.shapes = [tuple(shape) for shape in shapes]
        for i, shape in enumerate(self.shapes):
            value = torch.randint(-64, 64, shape, generator=generator).float()
            self.register_parameter(f"p{i}", torch.nn.Parameter(value))

    def forward(self, factor):
        total = torch.zeros(())
        for i, shape in enumerate(self.shapes):
            parameter = getattr(self, f"p{i}")
            assert tuple(parameter.shape) == shape
            total = total + parameter.float().pow(2).sum()
        return total * factor


def start(ranks, shapes, rank, world, settings, job="job"):
    engine, *_ = zeroshard.initialize(
        model=Shapes(shapes), config=settings, job=job, rank=rank, world_size=world,
        socket=ranks.socket,
    )
    return engine


def step(engine, factor=1.0):
    engine.backward(engine(factor))
    engine.step()


def same(found, expected, shapes):
    for (name, value), (_, wanted), shape in zip(found.items(), expected.items(), shapes):
        assert tuple(value.shape) == tuple(shape), name
        assert torch.equal(value.float(), wanted.float()), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "shapes,workers",
    [([[16], [4], [0, 4]], 1), ([[8], [0], [24]], 2), ([[3]], 8), ([[], [0], [1, 0, 2]], 3)],
)
def test_empty_tiny_and_odd_parameters_keep_shape_and_value(tmp_path, shapes, workers, stage):
    """put, gather, scatter, step, save, load, and both kinds of model file."""
    first = Shapes(shapes).state_dict()
    half = {name: value / 2 for name, value in first.items()}
    quarter = {name: value / 4 for name, value in first.items()}

    def rank_main(rank):
        engine = start(ranks, shapes, rank, 2, config(stage, optimizer=HALVING))
        same(engine.module.state_dict(), first, shapes)
        step(engine)
        same(engine.module.state_dict(), half, shapes)
        norm = engine.get_global_grad_norm()
        engine.save_checkpoint(str(tmp_path / "saved"))
        step(engine)
        same(engine.module.state_dict(), quarter, shapes)
        files = []
        if rank == 0:
            files = [engine.save_16bit_model(str(tmp_path)), engine.export("model")["path"]]
        engine.barrier()
        engine.load_checkpoint(str(tmp_path / "saved"))
        engine.barrier()
        assert engine.global_steps == 1
        same(engine.module.state_dict(), half, shapes)
        step(engine)
        same(engine.module.state_dict(), quarter, shapes)
        engine.destroy()
        return norm, files

    with Running(tmp_path, workers) as ranks:
        (norm, files), _ = ranks.run(2, rank_main)
    for path in files:
        found = zeroshard.load_safetensors(path)
        same(dict(sorted(found.items())), quarter, shapes)
    assert norm == sum(float((2 * v.double()).pow(2).sum()) for v in first.values()) ** 0.5


def states_of(engine, save_dir, tag):
    """{(parameter, kind of state): bytes} of a checkpoint of this engine; padding is left out."""
    engine.save_checkpoint(str(save_dir), tag=tag)
    document = json.loads((pathlib.Path(save_dir) / tag / "zeroshard.json").read_text())
    checkpoint = checkpoint_reader.Checkpoint(document["directory"])
    states = {}
    for (unit, kind), (dtype, values) in checkpoint.states().items():
        for parameter, (of, offset, elements) in enumerate(engine.session.places()):
            if of == unit:
                states[parameter, kind] = (dtype, values[offset : offset + elements].tobytes())
    return states


SMALL = [[5], [7], [0], [1]]


@pytest.mark.parametrize("shapes", [SMALL, [*SMALL, [300, 7]]])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_states_load_bit_for_bit_with_other_workers_and_another_stage(tmp_path, shapes, kind):
    """Saved at W = 2 with all states; loaded and saved again at W = 1, 3, 4."""
    parameters = {"lr": 0.01, "weight_decay": 0.1}
    if kind == "SGD":
        parameters["momentum"] = 0.9

    def settings(stage):
        made = config(stage, optimizer={"type": kind, "params": parameters},
                      bf16={"enabled": True})
        made["zero_optimization"]["sub_group_size"] = 4
        return made

    def first(rank):
        engine = start(ranks, shapes, rank, 2, settings(3))
        for i in range(3):
            step(engine, 0.3 + 0.1 * rank + i)
        states = states_of(engine, tmp_path / "saved", "first") if rank == 0 else None
        engine.barrier()
        values = engine.module.state_dict()
        engine.destroy()
        return states, values

    with Running(tmp_path, 2) as ranks:
        expected, values = ranks.run(2, first)[0]
    kinds = {"AdamW": {"exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}}[kind]
    assert {state for _, state in expected} == {"parameter", "master"} | kinds
    for workers, stage in ((1, 1), (3, 2), (4, 0), (3, 3)):

        def second(rank, workers=workers, stage=stage):
            engine = start(ranks, shapes, rank, 2, settings(stage))
            engine.load_checkpoint(str(tmp_path / "saved"), tag="first")
            engine.barrier()
            found = engine.module.state_dict()
            states = (
                states_of(engine, tmp_path / "saved", f"w{workers}.{stage}") if rank == 0 else None
            )
            engine.barrier()
            engine.destroy()
            return states, found

        with Running(tmp_path, workers) as ranks:
            results = ranks.run(2, second)
        assert results[0][0] == expected, (workers, stage)
        for _, found in results:
            same(found, values, shapes)


# Which steps overflow: the one before the interruption uses hysteresis up, the one after it lowers
# the scale because of that.
OVERFLOWS = "NNNNO" + "ONNNN"


@pytest.mark.parametrize("how", ["checkpoint", "reattach"])
def test_five_steps_and_five_more_are_ten(tmp_path, how):
    """Parameters, moments, step, scheduler, loss scale, hysteresis, accumulation position."""
    settings = config(
        3,
        fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2},
        gradient_accumulation_steps=3,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 8}},
    )

    def go_on(engine, rank, until):
        scales = []
        while engine.global_steps < until:
            overflow = OVERFLOWS[engine.global_steps] == "O" and rank == 1
            for micro in range(3):
                bad = overflow and micro == 1
                engine.backward(engine(float("inf") if bad else 0.001 * (1 + rank + micro)))
                engine.step()
            scales.append(engine.loss_scale)
        return scales

    def facts(engine, rank, tag):
        found = {
            "parameters": {n: v.numpy().tobytes() for n, v in engine.module.state_dict().items()},
            "numbers": (engine.global_steps, engine.micro_steps, engine.skipped_steps,
                        engine.loss_scale, engine.get_lr()),
            "scheduler": engine.lr_scheduler.state_dict(),
        }
        if rank == 0:
            found["states"] = states_of(engine, tmp_path / "saved", tag)
        engine.barrier()
        return found

    def whole(rank):
        engine = start(ranks, SMALL, rank, 2, settings, "whole")
        scales = go_on(engine, rank, 10)
        found = facts(engine, rank, "whole")
        engine.destroy()
        return found, scales

    def first_half(rank):
        engine = start(ranks, SMALL, rank, 2, settings, "halves")
        scales = go_on(engine, rank, 5)
        if how == "checkpoint":
            engine.save_checkpoint(str(tmp_path / "half"), tag="half")
            engine.barrier()
        engine.destroy(keep=how == "reattach")
        return scales

    def second_half(rank):
        engine = start(ranks, SMALL, rank, 2, settings, "halves")
        if how == "checkpoint":
            engine.load_checkpoint(str(tmp_path / "half"))
            engine.barrier()
        assert (engine.global_steps, engine.micro_steps) == (5, 15)
        scales = go_on(engine, rank, 10)
        found = facts(engine, rank, "halves")
        engine.destroy()
        return found, scales

    with Running(tmp_path, 2) as ranks:
        expected = ranks.run(2, whole)
        before = ranks.run(2, first_half)
        if how == "reattach":
            resumed = ranks.run(2, second_half)
    if how == "checkpoint":
        with Running(tmp_path, 3) as ranks:
            resumed = ranks.run(2, second_half)
    scales = expected[0][1]
    assert scales[4] > scales[0] and scales[5] == scales[4] / 2 and scales[9] > scales[5]
    for rank in range(2):
        assert before[rank] + resumed[rank][1] == expected[rank][1]
        assert resumed[rank][0] == expected[rank][0]

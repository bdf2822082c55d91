"""zeroshard.optim and a daemon's workers compute the same bits from the same gradients."""

import pytest
import torch

import real_daemon
import zeroshard
from conftest import BINARIES, Running
from models import config
from optim_cases import needs_kernels, same_bits
from zeroshard import optim

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None, reason="the daemon is not built"
)

STEPS = 4
# The daemon's optimizer block, and the same optimizer here.
OPTIMIZERS = {
    "adamw": (
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.8, 0.95]}},
        lambda of, **forms: optim.AdamW(of, 1e-2, (0.8, 0.95), weight_decay=0.1, **forms),
    ),
    "adam": (
        {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda of, **forms: optim.Adam(of, 1e-2, weight_decay=0.1, **forms),
    ),
    "momentum": (
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}},
        lambda of, **forms: optim.SGD(of, 1e-2, 0.9, weight_decay=0.1, **forms),
    ),
    "sgd": (
        {"type": "SGD", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        lambda of, **forms: optim.SGD(of, 1e-2, weight_decay=0.1, **forms),
    ),
    "adagrad": (
        {"type": "Adagrad", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        lambda of, **forms: optim.Adagrad(of, 1e-2, weight_decay=0.1, **forms),
    ),
    "lion": (
        {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        lambda of, **forms: optim.Lion(of, 1e-3, (0.9, 0.99), weight_decay=0.1, **forms),
    ),
}
# The daemon's settings, and the forms here.
FP32 = ({}, {})
FORMS = {
    "fp32": FP32,
    "bf16 states": ({"zeroshard": {"optimizer_states": "bf16"}}, {"states": "bf16"}),
    "int8 states": ({"zeroshard": {"optimizer_states": "int8"}}, {"states": "int8"}),
    "split": ({"bf16": {"enabled": True}}, {}),
    "bf16, fp32 master": (
        {"bf16": {"enabled": True}, "zeroshard": {"master": "fp32"}},
        {"master": "fp32"},
    ),
    "stochastic": (
        {"bf16": {"enabled": True}, "zeroshard": {"master": "none", "rounding_seed": 5}},
        {"master": "none", "rounding_seed": 5},
    ),
    "split, int8": (
        {"bf16": {"enabled": True}, "zeroshard": {"optimizer_states": "int8"}},
        {"states": "int8"},
    ),
}
CASES = [
    (name, form)
    for name in OPTIMIZERS
    for form in FORMS
    if "int8" not in form or name not in ("sgd", "adagrad")
]


class Given(torch.nn.Module):
    """loss = sum(p * gradient): the gradient is what we say, exactly."""

    def __init__(self, value):
        super().__init__()
        self.p = torch.nn.Parameter(value)

    def forward(self, gradient):
        return (self.p * gradient).sum()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Running(tmp_path_factory.mktemp("daemon"), workers=2) as ranks:
        yield ranks


@pytest.mark.parametrize("name,form", CASES)
def test_the_daemon_and_this_process_agree_bit_for_bit(running, name, form):
    needs_kernels()
    (block, make), (settings, forms) = OPTIMIZERS[name], FORMS[form]
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(3001, generator=generator).to(dtype)
    gradients = [torch.randn(3001, generator=generator).to(dtype) for _ in range(STEPS)]

    def by_the_daemon(rank):
        engine, *_ = zeroshard.initialize(
            model=Given(start.float()),
            config=config(2, optimizer=block, **settings),
            job=running.job(),
            rank=rank,
            world_size=1,
            socket=running.socket,
        )
        for gradient in gradients:
            engine.backward(engine(gradient))
            engine.step()
        value = engine.module.state_dict()["p"].clone()
        engine.destroy()
        return value

    (theirs,) = running.run(1, by_the_daemon)
    ours = torch.nn.Parameter(start.clone())
    optimizer = make([ours], **forms)
    for gradient in gradients:
        ours.grad = gradient.clone()
        optimizer.step()
    assert theirs.dtype == dtype and not torch.equal(ours.detach(), start)
    assert same_bits([ours], [theirs])

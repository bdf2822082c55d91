"""What the tests of zeroshard.optim share: the module with its kernels, and optimizers by name."""

import os
import pathlib

import pytest
import torch

import real_daemon
from zeroshard import optim

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))

# Name: class, arguments, and the same of torch.optim (None: it has none).
CASES = {
    "adamw": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, torch.optim.AdamW),
    "adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, torch.optim.Adam),
    "sgd": (optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}, torch.optim.SGD),
    "momentum": (
        optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        torch.optim.SGD,
    ),
    "nesterov": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "adagrad": (
        optim.Adagrad,
        {"lr": 1e-2, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        torch.optim.Adagrad,
    ),
    "lion": (optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}, None),
}


def needs_kernels():
    """Loads the extension, or skips the test where it was not built."""
    path = BINARIES / "client/python/_native.so"
    if not path.exists():
        pytest.skip(f"not built: {path}")
    real_daemon.load_native(BINARIES)


def parameters(dtype=torch.float32, shapes=((7, 5), (300,), (), (2, 3, 4)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def give_gradients(of, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in of:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(optimizer, of, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(of, step)
        optimizer.step()


def bits(tensor):
    """Contents as integers, so that zeros of both signs and NaNs compare as they are."""
    return tensor.detach().contiguous().view(-1).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    )


def same_bits(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others)
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others))


def states_of(optimizer):
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in sorted(optimizer.state[parameter].items())
    ]

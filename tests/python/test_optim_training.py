"""A language model of letters learns licences, texts that every Debian system has: 8-bit states against fp32 ones."""

import pathlib

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from optim_cases import needs_kernels
from zeroshard import optim

TEXTS = [pathlib.Path("/usr/share/common-licenses") / name for name in ("GPL-3", "MPL-2.0", "Apache-2.0")]
CONTEXT, LETTER, WIDTH, BATCH = 8, 16, 128, 96
STEPS, LAST = 1200, 200


@pytest.fixture(autouse=True)
def kernels():
    needs_kernels()


def text():
    data = bytearray(b"".join(path.read_bytes() for path in TEXTS))
    data = torch.frombuffer(data, dtype=torch.uint8)
    letters, tokens = data.unique(return_inverse=True)
    return len(letters), tokens


def network(letters):
    """The next letter from the eight before it (Bengio et al., A Neural Probabilistic Language Model)."""
    return nn.Sequential(
        nn.Embedding(letters, LETTER),
        nn.Flatten(),
        nn.Linear(CONTEXT * LETTER, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, letters),
    )


def losses(make, seed=1):
    """The training loss of every step; the same start and the same batches for every optimizer."""
    letters, tokens = text()
    windows = tokens.unfold(0, CONTEXT + 1, 1)
    torch.manual_seed(seed)
    model = network(letters)
    optimizer = make(list(model.parameters()))
    order = torch.Generator().manual_seed(2)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 100) * (1 - step / STEPS)
        rows = windows[torch.randint(len(windows), (BATCH,), generator=order)]
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def mean_of_the_last(found):
    return sum(found[-LAST:]) / LAST


def test_8_bit_and_bf16_states_learn_as_fp32_ones_do():
    def trained(states):
        return losses(lambda of: optim.AdamW(of, weight_decay=0.1, states=states))

    whole = trained("fp32")
    end = mean_of_the_last(whole)
    assert end < 0.6 * whole[0]  # it does learn
    for states in ("int8", "bf16"):
        small = trained(states)
        assert small != whole
        assert abs(mean_of_the_last(small) - end) <= 0.005 * end, states

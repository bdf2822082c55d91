"""Small models and the plain PyTorch training that they are compared with."""

import copy
import threading

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard


class Mlp(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.a = nn.Linear(width, 4 * width)
        self.b = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.norm(x + self.b(torch.tanh(self.a(x))))).squeeze(-1)


class Views(nn.Module):
    """Keeps `weight.t()` and chunks of a weight across forward and backward."""

    def __init__(self, width=24):
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) * 0.1)
        self.qkv = nn.Parameter(torch.randn(3 * width, width) * 0.1)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        kept = self.w.t()
        q, k, v = self.qkv.chunk(3)
        h = x @ kept
        h = self.inner(h)
        return ((h @ q.t()) * torch.sigmoid(h @ k.t()) + h @ v.t() @ self.w[:, :].detach()).sum(-1)


class Tied(nn.Module):
    """An embedding whose weight is also the head, used functionally or as a second module."""

    def __init__(self, functional, mode=None, width=24, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.functional, self.mode = functional, mode
        if not functional:
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.embed.weight

    def _block(self, block, h):
        return torch.tanh(block(h)) + h

    def _logits(self, h):
        return F.linear(h, self.embed.weight) if self.functional else self.head(h)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            if self.mode is None:
                h = self._block(block, h)
            else:
                h = checkpoint(self._block, block, h, use_reentrant=self.mode == "reentrant")
        if self.mode == "reentrant":
            return checkpoint(self._logits, h, use_reentrant=True)
        return self._logits(h)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.base = nn.Linear(8, 8)
        self.A = nn.Linear(8, 2, bias=False)
        self.B = nn.Linear(2, 8, bias=False)
        for p in [*self.inp.parameters(), *self.base.parameters()]:
            p.requires_grad_(False)

    def forward(self, x):
        h = self.inp(x)
        h = self.base(h + self.B(self.A(h)))
        return (self.base(h) + self.B(self.A(h))).sum(-1)


class Odd(nn.Module):
    """Empty, scalar and odd-sized parameters, one without a use."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.five = nn.Parameter(torch.randn(5))
        self.seven = nn.Parameter(torch.randn(7))
        self.unused = nn.Parameter(torch.randn(3))
        self.lin = nn.Linear(5, 7)

    def forward(self, x):
        return ((self.lin(x * self.five) * self.seven).sum(-1) + self.empty.sum()) * self.scale


class Experts(nn.Module):
    """Each rank runs the experts it is told to, in the order it is told."""

    def __init__(self, count=4, width=24):
        super().__init__()
        self.front = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(count)])
        for expert in self.experts:
            zeroshard.set_independent(expert)

    def forward(self, x, which):
        h = self.front(x)
        return sum(self.experts[i](h) for i in which).sum(-1)


_generator = threading.Lock()  # PyTorch's is one for all threads, and ranks are threads here


def build(factory, seed=0):
    with _generator:
        torch.manual_seed(seed)
        return factory()


def plain_gradients(model, losses):
    """Gradients of the mean over ranks of the sum over micro-steps of `losses[rank][micro](model)`,
    in fp32."""
    model = copy.deepcopy(model)
    for of_rank in losses:
        for loss in of_rank:
            (loss(model) / len(losses) / len(of_rank)).backward()
    return {n: (None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}


def config(stage, **more):
    zero = {"stage": stage}
    if stage == 3:
        zero.update(
            stage3_param_persistence_threshold=0,
            stage3_prefetch_bucket_size=more.pop("prefetch", 2000),
        )
    more.pop("prefetch", None)
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    }
    base.update(more)
    return base

"""Gradients through the engine equal plain PyTorch's, at every stage: with SGD of lr 1 the step
shows them."""

import copy

import pytest
import torch

import zeroshard
from models import Experts, Lora, Mlp, Odd, Tied, Views, build, config, plain_gradients

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def gradients_by_engine(ranks, factory, losses, stage, **more):
    """What one SGD step of lr 1 subtracts, per parameter, as rank 0 sees it; and rank 0's engine
    facts."""
    job, world = ranks.job(), len(losses)
    model = build(factory)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = config(stage, optimizer=SGD, gradient_accumulation_steps=len(losses[0]), **more)

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=copy.deepcopy(model),
            config=settings,
            job=job,
            rank=rank,
            world_size=world,
            socket=ranks.socket,
        )
        for loss in losses[rank]:
            engine.backward(loss(engine))
            engine.step()
        after = engine.module.state_dict()
        live = engine._table.live_elements
        peak, total = engine._table.peak_live_elements, sum(u.elements for u in engine._table.units)
        engine.destroy()
        return after, live, peak, total

    results = ranks.run(world, rank_main)
    for after, live, _, _ in results:
        assert live == 0
        for name, value in results[0][0].items():
            assert torch.equal(after[name], value), name
    after = results[0][0]
    return {n: before[n] - after[n] for n in before}, results[0]


def check(ranks, factory, losses, stage, **more):
    found, facts = gradients_by_engine(ranks, factory, losses, stage, **more)
    expected = plain_gradients(build(factory), losses)
    for name, gradient in expected.items():
        gradient = torch.zeros_like(found[name]) if gradient is None else gradient
        torch.testing.assert_close(
            found[name], gradient, rtol=2e-5, atol=2e-6, msg=lambda m: f"{name}: {m}"
        )
    return facts


def batch(rank, micro, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + micro + 1))


def regression(world, micro_steps, width):
    return [
        [lambda m, r=r, s=s: m(batch(r, s, 4, width)).pow(2).mean() for s in range(micro_steps)]
        for r in range(world)
    ]


def language(world, micro_steps, words=40):
    def loss(model, rank, micro):
        generator = torch.Generator().manual_seed(100 * rank + micro)
        tokens = torch.randint(words, (3, 5), generator=generator)
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return [[lambda m, r=r, s=s: loss(m, r, s) for s in range(micro_steps)] for r in range(world)]


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_mlp(ranks, stage, world):
    check(ranks, Mlp, regression(world, 2, 24), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_views(ranks, stage):
    check(ranks, Views, regression(2, 1, 24), stage, prefetch=0)


@pytest.mark.parametrize("mode", [None, "reentrant", "plain"])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_and_recomputation(ranks, stage, functional, mode):
    check(ranks, lambda: Tied(functional, mode), language(2, 2), stage)


def test_outputs_that_cannot_be_looked_into(ranks):
    class Box:
        __slots__ = ("value",)

    class Boxed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(24, 24)

        def forward(self, x):
            box = Box()
            box.value = self.lin.weight.t() @ x.t()
            return box

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.boxed, self.last = Boxed(), torch.nn.Linear(24, 24)

        def forward(self, x):
            return {"loss": (self.last(self.boxed(x).value.t()), [x])}

    losses = [[lambda m: m(batch(0, 0, 4, 24))["loss"][0].pow(2).mean()]]
    check(ranks, Outer, losses, 3, prefetch=0)


def test_registered_external_parameter(ranks):
    def factory():
        model = Tied(functional=True)
        zeroshard.register_external_parameter(model, model.embed.weight)
        return model

    check(ranks, factory, language(2, 1), 3)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_base_with_adapters(ranks, stage):
    check(ranks, Lora, regression(2, 1, 8), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_empty_scalar_and_odd_parameters(ranks, stage):
    check(ranks, Odd, regression(2, 2, 5), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_retain_graph(ranks, stage):
    job, model = ranks.job(), build(Views)
    x = batch(0, 0, 4, 24)
    plain = copy.deepcopy(model)
    loss = plain(x).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=model,
            config=config(stage, optimizer=SGD),
            job=job,
            rank=0,
            world_size=1,
            socket=ranks.socket,
        )
        loss = engine(x).pow(2).mean()
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        after = engine.module.state_dict()
        engine.destroy()
        return after

    # Two backward passes before one step() are two micro-steps, so the worker took their mean.
    (after,) = ranks.run(1, rank_main)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(2 * (before[name] - after[name]), p.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_experts_used_by_some_ranks(ranks, stage):
    """Step 1: rank 0 has gradients for e0, e1; rank 1 for e1, e2; nobody for e3. Step 2: another
    order."""
    job, model = ranks.job(), build(Experts)
    uses = [[[0, 1], [3, 0]], [[2, 1], [1, 3]]]
    expected = []
    plain = copy.deepcopy(model)
    for step in range(2):
        plain.zero_grad()
        for rank in range(2):
            (plain(batch(rank, step, 4, 24), uses[rank][step]).pow(2).mean() / 2).backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        expected.append({n: p.detach().clone() for n, p in plain.named_parameters()})

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=copy.deepcopy(model),
            config=config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
            job=job,
            rank=rank,
            world_size=2,
            socket=ranks.socket,
        )
        states = []
        for step in range(2):
            engine.backward(engine(batch(rank, step, 4, 24), uses[rank][step]).pow(2).mean())
            engine.step()
            states.append(engine.module.state_dict())
        engine.destroy()
        return states

    for states in ranks.run(2, rank_main):
        for found, wanted in zip(states, expected):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)
    assert torch.equal(
        expected[0]["experts.3.weight"], dict(model.named_parameters())["experts.3.weight"]
    )


def test_window_is_bounded_to_what_is_used(ranks):
    """Without prefetch at most one block's unit is live at stage 3, in forward and backward."""

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(160, 160) for _ in range(6)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.sum(-1)

    _, _, peak, total = check(ranks, Deep, regression(2, 2, 160), 3, prefetch=0)
    assert peak * 6 == total
    _, _, peak, total = check(ranks, Deep, regression(2, 2, 160), 3, prefetch=30000)
    assert peak * 6 == 2 * total

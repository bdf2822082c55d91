"""Whole training runs against the independent reference (bit for bit) and torch.optim (within 2 ulp
a step)."""

import copy

import numpy as np
import pytest
import torch

import zeroshard
from models import Mlp, build, config
from reference import LossScaler, Reference, decode, encode, round_bf16, tree_sum

OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "adam": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}},
}
HYPER = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adam": {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "sgd": {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False},
}


class Given(torch.nn.Module):
    """loss = sum(p * gradient): the gradient is what we say."""

    def __init__(self, *values):
        super().__init__()
        self.p = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(v)) for v in values])

    def forward(self, gradients):
        return sum((p.float() * g).sum() for p, g in zip(self.p, gradients))


def data(rank, step, width=24):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(ranks, world, stage, steps, accumulation=1, model=None, weights=None, **more):
    """Returns rank 0's parameters after training, and the gradients that every rank sent in each
    micro-step."""
    job, model = ranks.job(), model or build(Mlp)
    sent = [[[] for _ in range(accumulation * steps)] for _ in range(world)]
    settings = config(stage, gradient_accumulation_steps=accumulation, **more)

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=copy.deepcopy(model),
            config=settings,
            job=job,
            rank=rank,
            world_size=world,
            socket=ranks.socket,
        )
        parameters = list(engine.module.parameters())
        for number in range(steps * accumulation):
            into = sent[rank][number]
            handles = [
                p.register_hook(lambda g, i=i: into.append((i, g.detach().float().numpy().copy())))
                for i, p in enumerate(parameters)
            ]
            loss = engine(data(rank, number)).float().pow(2).mean()
            engine.backward(loss, weight=weights[rank][number] if weights else None)
            engine.step()
            for handle in handles:
                handle.remove()
        facts = (engine.module.state_dict(), engine.get_global_grad_norm(), engine.loss_scale)
        engine.destroy()
        return facts

    facts = ranks.run(world, rank_main)[0]
    return facts, [[dict(m) for m in of_rank] for of_rank in sent]


def reference_run(
    model, sent, kind, steps, accumulation, dtype="float32", group=0, weights=None, **more
):
    values = [p.detach().numpy() for p in model.parameters()]
    reference = Reference(values, kind, len(sent), group=group, dtype=dtype, **more)
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            number = step * accumulation + micro
            gradients = [[of_rank[number].get(i) for i in range(len(values))] for of_rank in sent]
            w = [of_rank[number] for of_rank in weights] if weights else None
            total += sum(w) if w else 0.0
            reference.micro_step(gradients, w)
        reference.step([HYPER[kind]], accumulation, total or None)
    return reference


def stored(tensor):
    return (
        tensor.contiguous()
        .view(-1)
        .view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        .numpy()
    )


def same_bits(facts, reference, dtype):
    for i, (name, value) in enumerate(facts[0].items()):
        expected = encode(reference.master[i], dtype)
        assert np.array_equal(stored(value).view(expected.dtype), expected), name


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_reference_bit_for_bit(ranks, kind, stage):
    facts, sent = train(ranks, 2, stage, 4, optimizer=OPTIMIZERS[kind])
    reference = reference_run(build(Mlp), sent, kind, 4, 1)
    same_bits(facts, reference, "float32")
    assert facts[1] == pytest.approx(reference.norm, rel=1e-12)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accumulation_and_clipping_in_bf16(ranks, world, stage):
    facts, sent = train(
        ranks, world, stage, 3, accumulation=3, bf16={"enabled": True}, gradient_clipping=0.05
    )
    reference = reference_run(build(Mlp), sent, "adamw", 3, 3, dtype="bfloat16", clipping=0.05)
    same_bits(facts, reference, "bfloat16")


@pytest.mark.parametrize("stage", [0, 3])
def test_weighted_accumulation_is_the_mean_over_tokens(ranks, stage):
    weights = [[3.0, 1.0, 2.0, 5.0], [1.0, 4.0, 0.0, 2.0]]
    facts, sent = train(ranks, 2, stage, 2, accumulation=2, weights=weights)
    sent[1][2] = {}  # a micro-step without tokens sends nothing
    same_bits(facts, reference_run(build(Mlp), sent, "adamw", 2, 2, weights=weights), "float32")


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_reference_within_two_ulp_of_torch_optim(kind):
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(4096, generator=generator)
    reference = Reference([start.numpy()], kind, 1)
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    }[kind]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    for _ in range(20):
        gradient = torch.randn(4096, generator=generator)
        before = reference.master[0].copy()
        with torch.no_grad():  # each step from the same parameters and moments
            parameter.copy_(torch.from_numpy(before))
            state = optimizer.state[parameter]
            for name, value in (
                ("exp_avg", reference.m),
                ("exp_avg_sq", reference.v),
                ("momentum_buffer", reference.m),
            ):
                if state.get(name) is not None:
                    state[name].copy_(torch.from_numpy(value[0]))
        parameter.grad = gradient.clone()
        optimizer.step()
        reference.micro_step([[gradient.numpy()]])
        reference.step([HYPER[kind]])
        found, wanted = reference.master[0], parameter.detach().numpy()
        # Of the largest operand, the parameter or an update of size lr: their difference may
        # cancel.
        ulp = np.spacing(np.maximum(np.maximum(np.abs(wanted), np.abs(before)), np.float32(1e-2)))
        assert np.max(np.abs(found.astype(np.float64) - wanted) / ulp) <= 2


def steps_with(ranks, values, gradients, world=1, **more):
    """Steps with gradients[step][rank] for a one-parameter model; returns (parameters, scales,
    skipped) after each."""
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=Given(values),
            config=config(0, **more),
            job=job,
            rank=rank,
            world_size=world,
            socket=ranks.socket,
        )
        seen = []
        for of_step in gradients:
            engine.backward(engine([torch.tensor(of_step[rank])]))
            engine.step()
            seen.append(
                (engine.module.state_dict()["p.0"].clone(), engine.loss_scale, engine.skipped_steps)
            )
        engine.destroy()
        return seen

    return ranks.run(world, rank_main)


G = [[0.1, -0.2, 0.3, 0.0], [0.1, 0.2, -0.3, 0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "mode,expected",
    [
        (
            True,
            [
                [0.989000022, -1.98800004, 0.489500016, 0],
                [0.978011072, -1.98653841, 0.489536822, 0],
                [0.969303071, -1.98495877, 0.48945412, 0],
            ],
        ),
        (
            False,
            [
                [0.99000001, -1.99000001, 0.49000001, 0],
                [0.98000133, -1.98331809, 0.488893896, 0],
                [0.970603347, -1.97585142, 0.487323225, 0],
            ],
        ),
    ],
)
def test_published_values(ranks, mode, expected):
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": mode}}
    (seen,) = steps_with(ranks, [1.0, -2.0, 0.5, 0.0], [[g] for g in G], optimizer=optimizer)
    for (found, _, _), wanted in zip(seen, expected):
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-7, atol=0)


def test_bf16_parameters_do_not_get_stuck(ranks):
    """w = 1, eight updates of -1e-3: the fp32 master moves although one update is below bf16's
    resolution."""
    (seen,) = steps_with(
        ranks,
        [1.0],
        [[[1.0]]] * 8,
        bf16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 1e-3}},
    )
    assert seen[-1][0].item() == 0.9921875


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulated_mean(ranks, stage):
    """Accumulation 4, micro-gradients 1, 2, 3, 4 on two ranks: the mean is 2.5."""
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=Given([0.0]),
            job=job,
            rank=rank,
            world_size=2,
            socket=ranks.socket,
            config=config(
                stage,
                gradient_accumulation_steps=4,
                optimizer={"type": "SGD", "params": {"lr": 1.0}},
            ),
        )
        for gradient in (1.0, 2.0, 3.0, 4.0):
            engine.backward(engine([torch.tensor([gradient])]))
            engine.step()
        value = engine.module.state_dict()["p.0"].item()
        engine.destroy()
        return value

    assert ranks.run(2, rank_main) == [-2.5, -2.5]


@pytest.mark.parametrize(
    "power,window,hysteresis,overflows,scales",
    [
        (4, 2, 2, "OOONNNNN", [16, 8, 4, 4, 4, 8, 8, 16]),
        (16, 1000, 2, "OOO", [65536, 32768, 16384]),
    ],
)
def test_dynamic_loss_scale(ranks, power, window, hysteresis, overflows, scales):
    fp16 = {
        "enabled": True,
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": hysteresis,
    }
    gradients = [[[float("inf")], [1.0]] if o == "O" else [[0.5], [0.5]] for o in overflows]
    for seen in steps_with(ranks, [1.0], gradients, world=2, fp16=fp16):
        assert [scale for _, scale, _ in seen] == scales
        assert seen[-1][2] == overflows.count("O")  # an overflow on one rank skips the step on all
        start = torch.tensor([1.0], dtype=torch.float16)
        assert all(
            torch.equal(value, start)
            for (value, _, _), o in zip(seen, overflows[: overflows.find("N")])
        )


def test_reference_helpers():
    one = np.float32([1.0])
    small = np.float32([2.0**-8])
    assert tree_sum([one, small, small, small], 4)[0] == np.float32(1.01171875)
    assert tree_sum([None, np.float32([-0.0])], 2).tobytes() == np.float32([-0.0]).tobytes()
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert np.array_equal(
        round_bf16(values).view(np.int16), stored(torch.from_numpy(values).bfloat16())
    )
    assert np.array_equal(
        decode(round_bf16(values), "bfloat16"), torch.from_numpy(values).bfloat16().float().numpy()
    )
    scaler = LossScaler(16, window=2, hysteresis=2)
    for overflow in [True, True, True, False, False, False, False, False]:
        scaler.update(overflow)
    assert scaler.scale == 16

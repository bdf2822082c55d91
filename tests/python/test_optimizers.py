"""Optimizers as the trainer names them: classes, config types, groups, and what is refused."""

import copy
import json
import math

import pytest
import torch

import zeroshard
from models import Mlp, build, config
from zeroshard import ds_config, optimizer as optimizers


def make(client, text="{}"):
    """The overrides that a client's optimizer gives, as a dictionary of values."""
    _, overrides = optimizers.make(client, None, None, ds_config.DsConfig(text))
    return {key: json.loads(value) for key, value in overrides.items()}


def named(name, base=torch.optim.SGD, **entries):
    """An optimizer class of another package, as far as the engine looks at it."""

    def __init__(self, params, **options):
        torch.optim.Optimizer.__init__(self, params, {"lr": 1e-3, **entries, **options})

    return type(name, (torch.optim.Optimizer,), {"__init__": __init__})


def parameters():
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    "client,expected",
    [
        (
            torch.optim.AdamW(parameters(), lr=2e-3, betas=(0.8, 0.9), weight_decay=0.1),
            {"type": "AdamW", "lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.1},
        ),
        (
            torch.optim.Adam(parameters(), eps=1e-6),
            {"type": "Adam", "adam_w_mode": False, "eps": 1e-6, "weight_decay": 0},
        ),
        (
            torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True),
            {"type": "SGD", "momentum": 0.9, "nesterov": True, "dampening": 0},
        ),
        (
            torch.optim.Adagrad(parameters(), weight_decay=0.2),
            {"type": "Adagrad", "lr": 1e-2, "eps": 1e-10, "weight_decay": 0.2},
        ),
        (
            named("Lion", betas=(0.9, 0.99), weight_decay=0.0)(parameters(), weight_decay=1.0),
            {"type": "Lion", "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 1.0},
        ),
        (
            named("AdamW8bit", betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)(parameters()),
            {"type": "AdamW8bit", "weight_decay": 1e-2, "betas": [0.9, 0.999]},
        ),
        (
            named("Adam8bit", betas=(0.9, 0.999), eps=1e-8, weight_decay=0)(parameters()),
            {"type": "Adam8bit", "weight_decay": 0},
        ),
    ],
)
def test_a_class_is_its_type_in_the_config(client, expected):
    given = make(client)
    assert given.pop("optimizer.type") == expected.pop("type")
    for key, value in expected.items():
        assert given["optimizer.params." + key] == value, key
    if type(client).__name__ != "Adam":
        assert "optimizer.params.adam_w_mode" not in given


@pytest.mark.parametrize(
    "client,match",
    [
        (torch.optim.RMSprop(parameters()), "RMSprop is not known.*Adagrad, Lion, AdamW8bit"),
        (torch.optim.Adam(parameters(), amsgrad=True), "amsgrad=True"),
        (torch.optim.SGD(parameters(), lr=1, maximize=True), "maximize=True"),
        (torch.optim.Adagrad(parameters(), lr_decay=0.1), "lr_decay=0.1"),
        (
            torch.optim.Adagrad(parameters(), initial_accumulator_value=0.5),
            "initial_accumulator_value=0.5",
        ),
        (named("Lion", weight_decay=0.0)(parameters()), "Lion of .* no betas"),
        (named("AdamW8bit", betas=(0.9, 0.999))(parameters()), "no eps"),
    ],
)
def test_refused(client, match):
    with pytest.raises(zeroshard.ZeroShardError, match=match) as error:
        make(client)
    assert error.value.code == "INVALID_ARGUMENT"


def test_lion_with_decay_of_its_own_kind_is_refused():
    lion = named("Lion", betas=(0.9, 0.99), weight_decay=0.0)(parameters())
    lion.decoupled_wd = True
    with pytest.raises(zeroshard.ZeroShardError, match="decoupled_weight_decay"):
        make(lion)


def test_a_class_and_a_config_that_disagree():
    text = '{"optimizer": {"type": "Lion"}}'
    with pytest.raises(zeroshard.ZeroShardError, match="AdamW was given.*optimizer.type is Lion"):
        make(torch.optim.AdamW(parameters()), text)
    lion = named("Lion", betas=(0.9, 0.99), weight_decay=0.0)(parameters())
    assert "optimizer.type" not in make(lion, '{"optimizer": {"type": "lion"}}')


@pytest.mark.parametrize(
    "kind,lr,eps,betas",
    [
        ("Adagrad", 1e-2, 1e-10, None),
        ("LION", 1e-3, None, (0.9, 0.999)),
        ("adamw8bit", 1e-3, 1e-8, (0.9, 0.999)),
        ("SGD", 1e-3, None, None),
    ],
)
def test_groups_have_the_defaults_of_their_type(kind, lr, eps, betas):
    a, b = parameters()
    text = json.dumps({"optimizer": {"type": kind, "params": {"weight_decay": 0.5}}})
    groups = [{"params": [a]}, {"params": [b], "lr": 7.0, "weight_decay": 0.0}]
    sharded, overrides = optimizers.make(None, groups, None, ds_config.DsConfig(text))
    assert overrides == {}
    first, second = sharded.param_groups
    assert (first["lr"], second["lr"]) == (lr, 7.0)
    assert (first["weight_decay"], second["weight_decay"]) == (0.5, 0.0)
    for group in (first, second):
        assert group.get("eps") == eps and group.get("betas") == betas


@pytest.mark.parametrize(
    "bad,match",
    [
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"betas": 0.9}, "betas: expected two numbers"),
        ({"betas": (0.9, 1.0)}, r"betas: 1.0 is not in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, "betas: -0.1"),
        ({"lr": "x"}, "not a number"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_groups_that_cannot_be_sent(bad, match):
    with pytest.raises(zeroshard.ZeroShardError, match=match):
        optimizers.wire_group({"lr": 1.0, **bad})


def lion_step(parameter, momentum, lr, betas, decay):
    """Lion as its paper gives it (Algorithm 2), in fp32."""
    with torch.no_grad():
        update = (momentum * betas[0] + parameter.grad * (1 - betas[0])).sign()
        parameter.mul_(1 - lr * decay).sub_(lr * update)
        momentum.mul_(betas[1]).add_(parameter.grad * (1 - betas[1]))


@pytest.mark.parametrize("kind", ["Adagrad", "Lion"])
def test_training_like_the_plain_optimizer(ranks, kind):
    """Two groups with their own settings, against torch.optim.Adagrad and Lion's definition."""
    job, model = ranks.job(), build(Mlp)
    plain = copy.deepcopy(model)

    def groups(m):
        decay = {"weight_decay": 0.05}
        if kind == "Lion":
            decay["betas"] = (0.8, 0.95)
        return [
            {"params": [*m.a.parameters()], **decay},
            {"params": [*m.b.parameters(), *m.out.parameters(), *m.norm.parameters()], "lr": 3e-3},
        ]

    def inputs(step):
        return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))

    settings = {"type": kind, "params": {"lr": 1e-2}}
    reference = torch.optim.Adagrad(groups(plain), lr=1e-2) if kind == "Adagrad" else None
    momenta = {}
    for step in range(5):
        plain.zero_grad()
        plain(inputs(step)).pow(2).mean().backward()
        if reference is not None:
            reference.step()
            continue
        for group in groups(plain):
            for p in group["params"]:
                lion_step(
                    p,
                    momenta.setdefault(p, torch.zeros_like(p)),
                    group.get("lr", 1e-2),
                    group.get("betas", (0.9, 0.999)),
                    group.get("weight_decay", 0.0),
                )

    def rank_main(rank):
        engine, *_ = zeroshard.initialize(
            model=model,
            model_parameters=groups(model),
            config=config(3, optimizer=settings),
            job=job,
            rank=rank,
            world_size=1,
            socket=ranks.socket,
        )
        for step in range(5):
            engine.backward(engine(inputs(step)).pow(2).mean())
            engine.step()
        found = engine.module.state_dict()
        engine.destroy()
        return found

    (found,) = ranks.run(1, rank_main)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_bad_rate_leaves_the_step_to_be_made(ranks):
    """A NaN or a negative learning rate is refused and changes nothing: the same step is made
    afterwards with a good one."""

    def run(disturb):
        def rank_main(rank):
            engine, optimizer, *_ = zeroshard.initialize(
                model=build(Mlp), config=config(3), job=job, rank=rank, world_size=1,
                socket=ranks.socket,
            )
            for step in range(3):
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
                engine.backward(engine(x).pow(2).mean())
                if disturb:
                    good = optimizer.param_groups[0]["lr"]
                    optimizer.param_groups[0]["lr"] = math.nan
                    before = engine.global_steps
                    with pytest.raises(zeroshard.ZeroShardError, match="lr is nan"):
                        engine.step()
                    assert engine.global_steps == before
                    optimizer.param_groups[0]["lr"] = good
                engine.step()
            found = engine.module.state_dict()
            engine.destroy()
            return found

        job = ranks.job()
        return ranks.run(1, rank_main)[0]

    plain, disturbed = run(False), run(True)
    for name, value in plain.items():
        assert torch.equal(value, disturbed[name]), name

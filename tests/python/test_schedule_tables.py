"""DeepSpeed's schedules against tables: figures worked out from the formulas of its documentation,
typed in here, and closed forms that share no code with the schedules."""

import itertools
import math

import pytest

from zeroshard import schedulers


class Groups:
    def __init__(self, *lrs):
        self.param_groups = [{"lr": lr, "betas": (0.9, 0.999)} for lr in lrs]


def rates(name, params, steps, lrs=(0.004,)):
    """The learning rates of all groups that optimizer steps 1, 2, ... use."""
    groups = Groups(*lrs)
    schedule = schedulers.SCHEDULES[name](groups, **params)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in groups.param_groups])
        schedule.step()
    return seen


# (schedule, parameters, learning rates of the optimizer steps 1, 2, 3, ...)
TABLE = [
    (  # ln(i + 1) / ln 4 for i = 0, 1, 2, 3
        "WarmupLR",
        {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 4},
        [0.0, 0.0, 0.0005, 0.000792481250360578, 0.001, 0.001, 0.001],
    ),
    (
        "WarmupLR",
        {
            "warmup_min_lr": 0.0002,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        [0.0002, 0.0002, 0.0004, 0.0006, 0.0008, 0.001, 0.001],
    ),
    (  # fewer than 2 warm-up steps are 2
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_num_steps": 1, "warmup_type": "linear"},
        [0.0, 0.0, 0.0005, 0.001, 0.001],
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 10,
            "warmup_max_lr": 0.001,
            "warmup_num_steps": 5,
            "warmup_type": "linear",
        },
        [0, 0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0, 0, 0],
    ),
    (  # down to the minimum, not to 0
        "WarmupDecayLR",
        {
            "total_num_steps": 4,
            "warmup_min_lr": 0.0001,
            "warmup_max_lr": 0.0011,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
        },
        [0.0001, 0.0001, 0.0006, 0.0011, 0.0006, 0.0001, 0.0001],
    ),
    (  # the group's own 0.004 times a ratio; the cosine is one step ahead: (i - 4 + 1) / 6
        "WarmupCosineLR",
        {
            "total_num_steps": 10,
            "warmup_min_ratio": 0.25,
            "warmup_num_steps": 4,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        [0.0, 0.001, 0.00175, 0.0025, 0.00325]
        + [0.004 * (0.1 + 0.9 * r) for r in (0.9330127018922194, 0.75, 0.5, 0.25)]
        + [0.004 * (0.1 + 0.9 * 0.0669872981077807), 0.0004],
    ),
    (  # up 4, down 2, then min / (1 + 0.5 * n / 2)
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.005,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "decay_step_size": 2,
        },
        [0.001, 0.002, 0.003, 0.004, 0.005, 0.003, 0.001, 0.0008, 0.001 / 1.5, 0.001 / 1.75],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.001, "cycle_max_lr": 0.003, "cycle_first_step_size": 2},
        [0.001, 0.002, 0.003, 0.002, 0.001, 0.001, 0.001],
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.001,
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": True,
        },
        [0.001, 0.001, 0.002, 0.002, 0.003, 0.003],
    ),
]


@pytest.mark.parametrize("name,params,expected", TABLE)
def test_table(name, params, expected):
    assert [lr for (lr,) in rates(name, params, len(expected))] == pytest.approx(expected, rel=1e-12)


def warm(kind, i, steps):
    return math.log1p(i) / math.log(steps) if kind == "log" else i / steps


@pytest.mark.parametrize(
    "kind,warmup,total", itertools.product(["log", "linear"], [1, 2, 7], [8, 40])
)
def test_closed_forms(kind, warmup, total):
    """Step k > 1 uses iteration i = k - 2: the schedule is stepped after each optimizer step."""
    effective = max(2, warmup)
    common = {"warmup_num_steps": warmup, "warmup_type": kind}
    bounds = {"warmup_min_lr": [1e-5, 2e-4], "warmup_max_lr": [1e-3, 3e-3]}
    cosine = {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.02, "total_num_steps": total}
    plain = rates("WarmupLR", {**common, **bounds}, total, (1, 1))
    decay = rates("WarmupDecayLR", {**common, **bounds, "total_num_steps": total}, total, (1, 1))
    round_ = rates("WarmupCosineLR", {**common, **cosine}, total, (0.5, 0.25))
    assert plain[0] == decay[0] == [1e-5, 2e-4] and round_[0] == [0, 0]
    for i, (a, b, c) in enumerate(zip(plain[1:], decay[1:], round_[1:])):
        warming = i < effective
        ratio = warm(kind, i, effective) if warming else 1.0
        down = ratio if warming else max(0.0, (total - i) / (total - effective))
        swing = 0.5 + 0.5 * math.cos(math.pi * (i + 1 - effective) / (total - effective))
        curve = 0.1 + 0.9 * ratio if warming else 0.02 + 0.98 * swing
        for group, (low, high) in enumerate(((1e-5, 1e-3), (2e-4, 3e-3))):
            assert a[group] == pytest.approx(low + (high - low) * ratio, rel=1e-12)
            assert b[group] == pytest.approx(low + (high - low) * down, rel=1e-12)
        assert c == pytest.approx([0.5 * curve, 0.25 * curve], rel=1e-12)


def test_momentum_of_one_cycle():
    """It starts at the minimum, as DeepSpeed sets it, then moves against the rate; after the cycle
    it grows from the maximum."""
    groups = Groups(1.0, 2.0)
    schedule = schedulers.OneCycle(
        groups,
        cycle_min_lr=0.1,
        cycle_max_lr=0.3,
        cycle_first_step_size=2,
        decay_step_size=4,
        cycle_min_mom=0.6,
        cycle_max_mom=0.8,
        decay_mom_rate=0.1,
    )
    seen = []
    for _ in range(7):
        assert groups.param_groups[0]["betas"] == groups.param_groups[1]["betas"]
        seen.append(groups.param_groups[0]["betas"])
        schedule.step()
    assert [second for _, second in seen] == [0.99] * 7
    expected = [0.6, 0.7, 0.6, 0.7, 0.8, 0.8 * 1.025, 0.8 * 1.05]
    assert [first for first, _ in seen] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name,params,expected", TABLE)
def test_resumed_at_any_step(name, params, expected):
    whole = rates(name, params, len(expected))
    for stop in range(1, len(expected)):
        groups = Groups(0.004)
        first = schedulers.SCHEDULES[name](groups, **params)
        for _ in range(stop):
            first.step()
        groups = Groups(0.004)
        second = schedulers.SCHEDULES[name](groups, **params)
        second.load_state_dict(first.state_dict())
        for at in range(stop, len(expected)):
            assert [group["lr"] for group in groups.param_groups] == whole[at], (stop, at)
            second.step()

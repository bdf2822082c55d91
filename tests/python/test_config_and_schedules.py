"""The trainer's reader of ds_config.json, and schedules against their formulas."""

import base64
import math

import pytest
import torch

import zeroshard
from zeroshard import ds_config, schedulers


@pytest.mark.parametrize(
    "text,expected",
    [
        (
            '{"a": 1, "b": [1, 2.5, 5e8], "c": {"d": true}}',
            {"a": 1, "b": [1, 2.5, 5e8], "c": {"d": True}},
        ),
        ("{\n# one\na: 1 // two\n/* three */ 'b': 'x', }", {"a": 1, "b": "x"}),
        (
            "{a: {b: null, c: -3e-2,},\n d: [1,\n 2\n],}",
            {"a": {"b": None, "c": -0.03}, "d": [1, 2]},
        ),
        ('{"u": "a // b # c \\" d"}', {"u": 'a // b # c " d'}),
        ("{type: AdamW\n lr: 1e-3\n}", {"type": "AdamW", "lr": 1e-3}),
    ],
)
def test_reader(text, expected):
    assert ds_config.parse(text) == expected


@pytest.mark.parametrize(
    "text", ['{"a": 1', '{"a" 1}', "{a: 1, a: 2}", '{"a": "x}', "[1]", "{a: }"]
)
def test_reader_refuses(text):
    with pytest.raises(zeroshard.ZeroShardError, match="config"):
        ds_config.parse(text)


def test_sources(tmp_path):
    text = '{"bf16": {"enabled": true}, // on\n}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (text, str(path), path, coded):
        config = ds_config.DsConfig(source)
        assert config.text == text and config.compute_dtype() == torch.bfloat16
    for source, match in (
        (str(tmp_path), "directory"),
        (str(tmp_path / "no"), "no such file"),
        (7, "int"),
    ):
        with pytest.raises(zeroshard.ZeroShardError, match=match):
            ds_config.DsConfig(source)
    leaf = ds_config.DsConfig(
        {"zero_optimization": {"leaf_module": {"names": "moe", "classes": ["A"]}}}
    )
    assert leaf.leaf_modules() == (["A"], ["moe"], [])
    assert ds_config.DsConfig({"fp16": {"enabled": "auto"}}).compute_dtype() == torch.float32


class Groups:
    def __init__(self, *lrs, betas=(0.9, 0.999)):
        self.param_groups = [{"lr": lr, "betas": betas} for lr in lrs]


def run(schedule, steps):
    seen = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        seen.append(schedule.optimizer.param_groups[0]["lr"])
    return seen


def test_warmup():
    linear = run(schedulers.WarmupLR(Groups(1.0), 0.1, 1.1, 4, "linear"), 6)
    assert linear == pytest.approx([0.1, 0.1, 0.35, 0.6, 0.85, 1.1, 1.1])
    log = run(schedulers.WarmupLR(Groups(1.0), 0.0, 1.0, 8), 9)
    assert log == pytest.approx([0.0] + [math.log(i + 1) / math.log(8) for i in range(8)] + [1.0])


def test_warmup_decay():
    seen = run(schedulers.WarmupDecayLR(Groups(1.0), 10, 0.0, 1.0, 4, "linear"), 12)
    assert seen[1:] == pytest.approx(
        [i / 4 for i in range(4)] + [(10 - i) / 6 for i in range(4, 11)] + [0.0]
    )


def test_warmup_cosine():
    seen = run(schedulers.WarmupCosineLR(Groups(2.0), 10, 0.5, 4, 0.1, "linear"), 9)
    expected = [0.5 + 0.5 * i / 4 for i in range(4)]
    expected += [0.1 + 0.9 * (1 + math.cos(math.pi * (i - 3) / 6)) / 2 for i in range(4, 9)]
    assert seen == pytest.approx([0.0] + [2.0 * r for r in expected])


def test_one_cycle():
    schedule = schedulers.OneCycle(
        Groups(1.0), 0.1, 1.1, 0.5, cycle_first_step_size=4, decay_step_size=2
    )
    seen = run(schedule, 12)
    assert seen[0] == 0.1
    assert seen[1:9] == pytest.approx([0.35, 0.6, 0.85, 1.1, 0.85, 0.6, 0.35, 0.1])
    assert seen[9:] == pytest.approx([0.1 / (1 + 0.5 * i / 2) for i in range(1, 5)])
    betas = Groups(1.0)
    other = schedulers.OneCycle(betas, 0.1, 1.1, cycle_first_step_size=4)
    other.step()
    assert betas.param_groups[0]["betas"] == pytest.approx((0.875, 0.99))


def test_schedules_resume():
    whole = run(schedulers.WarmupDecayLR(Groups(1.0), 10, 0.0, 1.0, 4), 8)
    first, second = (schedulers.WarmupDecayLR(Groups(1.0), 10, 0.0, 1.0, 4) for _ in range(2))
    run(first, 5)
    second.load_state_dict(first.state_dict())
    assert run(second, 3) == whole[5:]


def test_from_config():
    made = schedulers.from_config(
        '{"type": "WarmupLR", "params": {"warmup_num_steps": 5}}', Groups(1.0, 2.0)
    )
    assert isinstance(made, schedulers.WarmupLR) and len(made.get_lr()) == 2
    assert schedulers.from_config("", Groups(1.0)) is None
    for text, match in (
        ('{"type": "Cosine"}', "Cosine"),
        ('{"type": "WarmupLR", "params": {"x": 1}}', "x"),
    ):
        with pytest.raises(zeroshard.ZeroShardError, match=match):
            schedulers.from_config(text, Groups(1.0))

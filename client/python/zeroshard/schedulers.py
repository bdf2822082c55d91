"""DeepSpeed's learning-rate schedules, by the names and parameters of the config's `scheduler`
block.

Each is a pure function of `last_batch_iteration`, the number of schedule steps so far (-1 before
the first). The engine steps it after every update that was applied; a skipped step (overflow) does
not count.
"""

import json
import math

from zeroshard.errors import invalid


class Schedule:
    """Base: subclasses give `lrs(iteration)`, one learning rate a parameter group."""

    def __init__(self, optimizer, last_batch_iteration=-1):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [group["lr"] for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.start_lrs())

    def _per_group(self, value):
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != groups:
                raise invalid(f"scheduler: {len(value)} values given for {groups} parameter groups")
            return [float(v) for v in value]
        return [float(value)] * groups

    def start_lrs(self):
        return self.lrs(self.last_batch_iteration)

    def _set(self, lrs):
        for group, lr in zip(self.optimizer.param_groups, lrs):
            group["lr"] = lr
        self._last_lr = list(lrs)

    def get_lr(self):
        if self.last_batch_iteration < 0:
            return self.start_lrs()
        return self.lrs(self.last_batch_iteration)

    def get_last_lr(self):
        return self._last_lr

    def step(self, last_batch_iteration=None):
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.lrs(self.last_batch_iteration))

    def state_dict(self):
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state):
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set(self.get_lr())


def _warmup_ratio(kind, iteration, steps):
    if kind == "log":
        return math.log(iteration + 1) / math.log(steps)
    return iteration / steps


def _warmup_kind(kind):
    return kind if kind in ("log", "linear") else "log"


class WarmupLR(Schedule):
    """lr = min + (max - min) * ratio(i), ratio reaching 1 at warmup_num_steps, then constant."""

    def __init__(
        self,
        optimizer,
        warmup_min_lr=0.0,
        warmup_max_lr=0.001,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        self.optimizer = optimizer
        self.min_lrs = self._per_group(warmup_min_lr)
        self.max_lrs = self._per_group(warmup_max_lr)
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.warmup_type = _warmup_kind(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def start_lrs(self):
        return list(self.min_lrs)

    def ratio(self, iteration):
        if iteration < self.warmup_num_steps:
            return _warmup_ratio(self.warmup_type, iteration, self.warmup_num_steps)
        return 1.0

    def lrs(self, iteration):
        ratio = self.ratio(iteration)
        return [low + (high - low) * ratio for low, high in zip(self.min_lrs, self.max_lrs)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly down to min at total_num_steps."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_lr=0.0,
        warmup_max_lr=0.001,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        self.total_num_steps = int(total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def ratio(self, iteration):
        if iteration < self.warmup_num_steps:
            return _warmup_ratio(self.warmup_type, iteration, self.warmup_num_steps)
        left = self.total_num_steps - iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """The group's own lr times a ratio: warm-up, then a half cosine down to cos_min_ratio."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_ratio=0.0,
        warmup_num_steps=1000,
        cos_min_ratio=0.0001,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        self.total_num_steps = int(total_num_steps)
        self.warmup_min_ratio = float(warmup_min_ratio)
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.cos_min_ratio = float(cos_min_ratio)
        self.warmup_type = _warmup_kind(warmup_type)
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def start_lrs(self):
        return [0.0 for _ in self.org_lrs]

    def ratio(self, iteration):
        if iteration < self.warmup_num_steps:
            ratio = _warmup_ratio(self.warmup_type, iteration, self.warmup_num_steps)
            return self.warmup_min_ratio + ratio * (1.0 - self.warmup_min_ratio)
        done = iteration - self.warmup_num_steps + 1
        total = max(1, self.total_num_steps - self.warmup_num_steps)
        ratio = (1 + math.cos(math.pi * done / total)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)

    def lrs(self, iteration):
        ratio = self.ratio(iteration)
        return [lr * ratio for lr in self.org_lrs]


class OneCycle(Schedule):
    """Smith's one-cycle policy: lr up and down between two bounds (momentum the other way), then
    decay."""

    def __init__(
        self,
        optimizer,
        cycle_min_lr,
        cycle_max_lr,
        decay_lr_rate=0.0,
        cycle_first_step_size=2000,
        cycle_second_step_size=None,
        cycle_first_stair_count=0,
        cycle_second_stair_count=None,
        decay_step_size=0,
        cycle_momentum=True,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.0,
        last_batch_iteration=-1,
    ):
        self.optimizer = optimizer
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        self.total_size = first + second
        self.step_ratio = first / self.total_size
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs, self.max_lrs = self._per_group(cycle_min_lr), self._per_group(cycle_max_lr)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.param_groups[0]
        self.min_mom, self.max_mom = float(cycle_min_mom), float(cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum(self.min_mom)

    def start_lrs(self):
        return list(self.min_lrs)

    def _scale(self, iteration):
        position = 1.0 + (iteration + 1) / self.total_size
        x = position - math.floor(position)
        return x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)

    def _decay_interval(self, iteration):
        return (iteration - self.total_size + 1) / self.decay_step_size

    def lrs(self, iteration):
        if iteration < self.total_size:
            scale = self._scale(iteration)
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs)]
        if self.decay_step_size == 0:
            return list(self.min_lrs)
        return [
            lr / (1 + self.decay_lr_rate * self._decay_interval(iteration)) for lr in self.min_lrs
        ]

    def momentum(self, iteration):
        if iteration < self.total_size:
            return self.max_mom - (self.max_mom - self.min_mom) * self._scale(iteration)
        if self.decay_step_size == 0:
            return self.max_mom
        return self.max_mom * (1 + self.decay_mom_rate * self._decay_interval(iteration))

    def _set_momentum(self, momentum):
        for group in self.optimizer.param_groups:
            group["betas"] = (momentum, 0.99)

    def step(self, last_batch_iteration=None):
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._set_momentum(self.momentum(self.last_batch_iteration))

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.cycle_momentum and self.last_batch_iteration >= 0:
            self._set_momentum(self.momentum(self.last_batch_iteration))


class LRRangeTest(Schedule):
    """lr = min * (1 + rate * i / step_size), the fraction floored when staircase."""

    def __init__(
        self,
        optimizer,
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
        last_batch_iteration=-1,
    ):
        self.optimizer = optimizer
        self.min_lrs = self._per_group(lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def start_lrs(self):
        return list(self.min_lrs)

    def lrs(self, iteration):
        interval = (iteration + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [lr * (1 + self.step_rate * interval) for lr in self.min_lrs]


SCHEDULES = {
    c.__name__: c for c in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def from_config(text, optimizer):
    """The schedule that the config's scheduler block (JSON text) asks for, or None."""
    block = json.loads(text) if text else None
    if not block or not block.get("type"):
        return None
    kind = SCHEDULES.get(block["type"])
    if kind is None:
        known = ", ".join(sorted(SCHEDULES))
        raise invalid(f"scheduler.type: {block['type']!r} is not known; the known ones are {known}")
    try:
        return kind(optimizer, **(block.get("params") or {}))
    except TypeError as error:
        raise invalid(f"scheduler.params of {block['type']}: {error}") from error

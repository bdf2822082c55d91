"""The project's independent reference of its numerics contract, in numpy: docs/numerics.md says
what, this says how.

Written from the contract, not from the workers' code: fp32 throughout, one rounding an operation,
ranks summed in the canonical tree, micro-steps added after ranks, the norm one fp64 number a grain
and exact between grains.
"""

import math

import numpy as np

F32 = np.float32
GRAIN = 256


def round_bf16(x):
    """fp32 -> bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def encode(x, dtype):
    """fp32 values -> stored array of the named data type."""
    if dtype == "bfloat16":
        return round_bf16(x)
    with np.errstate(over="ignore"):
        return np.asarray(x, F32) if dtype == "float32" else np.asarray(x, F32).astype(np.float16)


def decode(stored, dtype):
    """Stored array -> fp32 values, exactly."""
    if dtype == "bfloat16":
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(F32)
    return np.asarray(stored, F32) if dtype == "float32" else stored.view(np.float16).astype(F32)


def canonical(x):
    """What a split master can hold: a tie of the rounding to bf16 moves by one unit to the side to
    which it rounds, a NaN becomes 0x7fc00000."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.int64)
    tied = (bits & 0xFFFF) == 0x8000
    bits = np.where(tied, bits + np.where((bits >> 16) & 1, 1, -1), bits)
    return np.where(np.isnan(x), 0x7FC00000, bits).astype(np.uint32).view(F32)


def stored_type(dtype):
    return {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[dtype]


def _pairs(level):
    """Adds adjacent pairs level by level; an odd one passes up; None is absent and passes its
    sibling up."""
    while len(level) > 1:
        nxt = []
        for i in range(0, len(level) - 1, 2):
            left, right = level[i], level[i + 1]
            nxt.append(
                right if left is None else left if right is None else (left + right).astype(F32)
            )
        if len(level) % 2:
            nxt.append(level[-1])
        level = nxt
    return level[0]


def tree_sum(values, group):
    """The canonical sum over ranks: groups of `group` consecutive ranks, then over the groups."""
    sums = [_pairs(list(values[i : i + group])) for i in range(0, len(values), group)]
    return _pairs(sums)


def grain_squares(x):
    """The fp64 squared sum of each grain of a unit: 16 lanes in order, then halves folded."""
    padded = np.zeros(-(-len(x) // GRAIN) * GRAIN, np.float64)
    padded[: len(x)] = x
    rows = (padded * padded).reshape(-1, 16, 16)
    lanes = np.zeros((rows.shape[0], 16))
    for i in range(16):
        lanes = lanes + rows[:, i]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes[:, 0]


class LossScaler:
    """DeepSpeed's dynamic loss scale; `window` 0 or dynamic False: constant."""

    def __init__(
        self, initial, window=1000, hysteresis=2, minimum=1.0, consecutive=False, dynamic=True
    ):
        self.scale, self.window, self.hysteresis, self.minimum = (
            float(initial),
            window,
            hysteresis,
            minimum,
        )
        self.consecutive, self.dynamic = consecutive, dynamic
        self.left, self.iteration, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow):
        if self.dynamic and overflow:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        elif self.dynamic:
            if self.consecutive:
                self.left = self.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if self.window and stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.left = self.hysteresis
                self.scale *= 2
        self.iteration += 1


def update(kind, hyper, step, g, p, m, v):
    """One optimizer update in fp32, torch.optim's up to the order of operations; returns (p, m, v)."""
    lr, decay = hyper["lr"], hyper["weight_decay"]
    if kind in ("adamw", "adam"):
        b1, b2 = hyper["beta1"], hyper["beta2"]
        correct = hyper.get("bias_correction", True)
        root = math.sqrt(1 - b2**step) if correct else 1.0
        step_size = F32(lr / (1 - b1**step) * root) if correct else F32(lr)
        if kind == "adamw":
            p = p * F32(1 - lr * decay)
        elif decay != 0:
            g = g + F32(decay) * p
        m = m * F32(b1) + g * F32(1 - b1)
        v = v * F32(b2) + F32(1 - b2) * g * g
        return p - step_size * m / (np.sqrt(v) + F32(hyper["eps"] * root)), m, v
    if kind == "lion":
        direction = np.sign(m * F32(hyper["beta1"]) + g * F32(1 - hyper["beta1"]))
        p = p * F32(1 - lr * decay) - F32(lr) * direction
        return p, m * F32(hyper["beta2"]) + g * F32(1 - hyper["beta2"]), v
    g = g + F32(decay) * p if decay != 0 else g
    if kind == "adagrad":
        m = m + g * g
        return p - F32(lr) * g / (np.sqrt(m) + F32(hyper["eps"])), m, v
    if hyper["momentum"] != 0:
        m = g if step == 1 else m * F32(hyper["momentum"]) + g * F32(1 - hyper["dampening"])
        g = g + F32(hyper["momentum"]) * m if hyper["nesterov"] else m
    return p - F32(lr) * g, m, v


class Reference:
    """A whole job: master copies, moments, accumulators. Parameters are flat fp32 arrays.

    `units`: for the norm, a list of (elements, [(parameter, offset)]); None puts each parameter in
    one of its own. `split`: masters are held in the split form (default: of bf16 parameters).
    `states`: the data type of the optimizer's states.
    """

    def __init__(
        self,
        values,
        kind,
        world_size,
        group=0,
        dtype="float32",
        clipping=0.0,
        scaler=None,
        units=None,
        trainable=None,
        groups=None,
        skip_on_overflow=True,
        sum_over_ranks=False,
        split=None,
        states="float32",
    ):
        self.dtype, self.states = dtype, states
        self.split = dtype == "bfloat16" if split is None else split
        self.master = [
            decode(encode(np.asarray(x, F32).ravel(), dtype), dtype).copy() for x in values
        ]
        self.m = [np.zeros_like(x) for x in self.master]
        self.v = [np.zeros_like(x) for x in self.master]
        self.steps = [0] * len(self.master)
        self.kind, self.world_size, self.group = kind, world_size, group or world_size
        self.clipping, self.scaler = clipping, scaler or LossScaler(1.0, dynamic=False)
        self.units = units or [(len(x), [(i, 0)]) for i, x in enumerate(self.master)]
        self.trainable = trainable or [True] * len(self.master)
        self.groups = groups or [0] * len(self.master)
        self.skip_on_overflow, self.sum_over_ranks = skip_on_overflow, sum_over_ranks
        self.accumulators = [None] * len(self.master)
        self.norm, self.skipped, self.updates, self.step_number = 0.0, False, 0, 0

    def parameter(self, i):
        """The values that the ranks see, widened."""
        return decode(encode(self.master[i], self.dtype), self.dtype)

    def micro_step(self, gradients, weights=None):
        """gradients[rank][parameter]: fp32 array or None; already times the loss scale.
        weights[rank]: or None."""
        for i in range(len(self.master)):
            inputs = []
            for rank, of_rank in enumerate(gradients):
                g = of_rank[i]
                if g is not None:
                    g = np.asarray(g, F32).ravel()
                    g = g if weights is None else (g * F32(weights[rank])).astype(F32)
                inputs.append(g)
            total = tree_sum(inputs, self.group)
            if total is not None:
                old = self.accumulators[i]
                self.accumulators[i] = total.copy() if old is None else (old + total).astype(F32)

    def step(self, hypers, micro_steps=1, weight_total=None):
        """hypers: one dictionary of GroupOptions a group. weight_total: sum over all ranks and
        micro-steps."""
        count = weight_total or micro_steps * (1 if self.sum_over_ranks else self.world_size)
        scale = self.scaler.scale
        squares = []
        for elements, members in self.units:
            unit = np.zeros(elements, F32)
            for i, offset in members:
                if self.accumulators[i] is not None:
                    unit[offset : offset + len(self.accumulators[i])] = self.accumulators[i]
            with np.errstate(over="ignore", invalid="ignore"):
                squares.extend(grain_squares(unit).tolist())
        finite = all(math.isfinite(s) for s in squares)
        self.norm = math.sqrt(math.fsum(squares)) / (scale * count) if finite else math.inf
        self.skipped = not finite and self.skip_on_overflow
        if not self.skipped:
            clip = self.clipping / (self.norm + 1e-6) if self.clipping > 0 else 1.0
            self._apply(hypers, F32(min(1.0, clip) / (scale * count)))
            self.updates += 1
        self.accumulators = [None] * len(self.master)
        self.scaler.update(not finite)
        self.step_number += 1

    def _apply(self, hypers, grad_scale):
        for i, accumulated in enumerate(self.accumulators):
            if accumulated is None or not self.trainable[i]:
                continue
            self.steps[i] += 1
            g = (accumulated * grad_scale).astype(F32)
            self.master[i], self.m[i], self.v[i] = (
                np.asarray(x, F32)
                for x in update(
                    self.kind,
                    hypers[self.groups[i]],
                    self.steps[i],
                    g,
                    self.master[i],
                    self.m[i],
                    self.v[i],
                )
            )
            if self.split:
                self.master[i] = canonical(self.master[i])
            self.m[i], self.v[i] = (
                decode(encode(x, self.states), self.states) for x in (self.m[i], self.v[i])
            )

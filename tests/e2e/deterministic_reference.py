"""The deterministic trainer in numpy: its hash, its gradients, and a whole run through the independent reference.

tests/python/reference.py says what a step computes; nothing of the daemon or of the C++ trainer takes part.
"""

import pathlib
import sys

import checkpoint_reader
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import reference  # noqa: E402

F32 = np.float32
U64 = np.uint64


def _finalise(x):
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def mix(x, *rest):
    """The trainer's Mix; the last argument may be an array."""
    with np.errstate(over="ignore"):
        x = np.atleast_1d(np.asarray(x % 2**64 if isinstance(x, int) else x, U64))
        for value in rest:
            value = np.asarray(value % 2**64 if isinstance(value, int) else value, U64)
            x = _finalise(x) + U64(0x9E3779B97F4A7C15) * (value + U64(1))
        return _finalise(x)


def uniform(hashes):
    return ((hashes >> U64(40)).astype(np.int64) - (1 << 23)).astype(F32) / F32(1 << 23)


class Run:
    """A run of `steps` steps; see TrainerOptions for the words. `ranks_first`: micro-steps are added after ranks."""

    def __init__(self, ranks, sizes, dtype="fp32", optimizer="AdamW", micro_steps=1, steps=5, seed=1, absent=False,
                 weighted=False, frozen=(), group=0, master="split", states="float32"):
        self.ranks, self.sizes, self.seed, self.micro_steps = ranks, sizes, seed, micro_steps
        self.absent, self.weighted, self.optimizer, self.state_type = absent, weighted, optimizer, states
        self.dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
        trainable = [i not in frozen for i in range(len(sizes))]
        self.units = checkpoint_reader.units_of(
            [(n, self.dtype, trainable[i], f"m{i}") for i, n in enumerate(sizes)])
        self.offsets = {i: place[0] for unit in self.units for i, place in unit.places.items()}
        values = [uniform(mix(seed, -1, i, np.arange(n, dtype=U64))) for i, n in enumerate(sizes)]
        scaler = reference.LossScaler(2.0**16, window=1000, hysteresis=1) if dtype == "fp16" else None
        self.job = reference.Reference(
            values, "sgd" if optimizer == "SGD" else optimizer.lower(), ranks, group=group, dtype=self.dtype,
            scaler=scaler, units=[(u.grains * 256, [(i, p[0]) for i, p in u.places.items()]) for u in self.units],
            trainable=trainable, groups=[i % 2 for i in range(len(sizes))],
            split=dtype == "bf16" and master == "split", states=states)
        for step in range(steps):
            self._step(step)

    def hypers(self, step):
        lr = 0.01 / (1.0 + 0.125 * step)
        common = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum": 0.9 if self.optimizer == "SGD" else 0.0,
                  "dampening": 0.0, "nesterov": False}
        return [{**common, "lr": lr, "weight_decay": 0.01}, {**common, "lr": lr / 2, "weight_decay": 0.0}]

    def _weight(self, step, micro, rank):
        return 1.0 + float(mix(self.seed, step, micro, rank)[0] % U64(3)) if self.weighted else 1.0

    def _gradient(self, step, micro, rank, parameter):
        key = int(mix(self.seed, step, micro, rank, parameter)[0])
        if not self.job.trainable[parameter] or (self.absent and int(mix(key, 99)[0]) % 3 == 0):
            return None
        n = self.sizes[parameter]
        index = np.arange(n, dtype=U64) + U64(self.offsets[parameter])
        gradient = uniform(mix(key, index)) + F32(0.125) * self.job.parameter(parameter)
        scaled = (gradient * self.job.scaler.scale).astype(F32)
        return reference.decode(reference.encode(scaled, self.dtype), self.dtype)

    def _step(self, step):
        total = 0.0
        for micro in range(self.micro_steps):
            gradients = [[self._gradient(step, micro, rank, i) for i in range(len(self.sizes))]
                         for rank in range(self.ranks)]
            weights = [self._weight(step, micro, rank) for rank in range(self.ranks)]
            total += sum(weights)
            self.job.micro_step(gradients, weights if self.weighted else None)
        self.job.step(self.hypers(step), self.micro_steps, total if self.weighted else None)

    def states(self):
        """{(parameter, kind): array} as a checkpoint holds it: "parameter" has the job's type, a master is fp32."""
        states = {}
        for i in range(len(self.sizes)):
            states[i, "parameter"] = reference.encode(self.job.master[i], self.dtype)
            if not self.job.trainable[i]:
                continue
            if self.dtype != "float32":
                states[i, "master"] = self.job.master[i]
            slots = {"SGD": ["momentum_buffer"], "Adagrad": ["sum"], "Lion": ["exp_avg"]}
            for slot, values in zip(slots.get(self.optimizer, ["exp_avg", "exp_avg_sq"]), (self.job.m[i], self.job.v[i])):
                states[i, slot] = reference.encode(values, self.state_type)
        return states

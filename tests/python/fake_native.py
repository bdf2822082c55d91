"""A stand-in for zeroshard._native: one daemon in this process, its ranks are threads.

Same API, same layout rules, numerics by reference.py. Hard on its callers: what is not gathered
reads as NaN, gathers are checked for equal order, a gradient slot is overwritten with NaN once its
request has completed, and a rank that does not come ends in an error on all ranks.
"""

import copy
import json
import threading
import time

import numpy as np

from reference import LossScaler, Reference, decode, encode, stored_type
from zeroshard.ds_config import parse
from zeroshard.errors import ZeroShardError

GRAIN, ALIGN, COALESCE, PAGE = 256, 16, 16 * 1024, 4096
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_POISON = 0xFF  # all ones is NaN in each data type


def layout(parameters):
    """(units, places) by the rules of storage/layout.h."""
    counts = [int(np.prod(p["shape"], dtype=np.int64)) for p in parameters]
    parts, of_module = [], {}
    for i, p in enumerate(parameters):
        key = (p["module"], p["dtype"], p["trainable"])
        if key not in of_module:
            of_module[key] = {
                "dtype": p["dtype"],
                "trainable": p["trainable"],
                "parameters": [],
                "n": 0,
            }
            parts.append(of_module[key])
        of_module[key]["parameters"].append(i)
        of_module[key]["n"] += counts[i]
    units, open_units = [], {}
    for part in parts:
        kind = (part["dtype"], part["trainable"])
        small, unit = part["n"] < COALESCE, open_units.get(kind)
        if unit and small and unit["n"] < COALESCE:
            unit["parameters"] += part["parameters"]
            unit["n"] += part["n"]
            continue
        units.append(part)
        open_units[kind] = part if small else None
    places, at = [None] * len(parameters), 0
    for number, unit in enumerate(units):
        offset = 0
        for i in unit["parameters"]:
            begin = -(-offset // ALIGN) * ALIGN
            places[i] = (number, begin, counts[i])
            offset = begin + counts[i]
        unit["elements"] = -(-offset // GRAIN) * GRAIN
        unit["data_elements"] = unit.pop("n")
        unit["bytes"] = unit["elements"] * SIZES[unit["dtype"]]
        unit["window_offset"] = at
        at += -(-unit["bytes"] // PAGE) * PAGE
    return units, places, at


class Daemon:
    """All jobs and checkpoints."""

    def __init__(self, timeout=10.0):
        self.timeout = timeout
        self.jobs = {}
        self.checkpoints = {}
        self.lock = threading.Condition()

    def attach(
        self,
        socket,
        job,
        rank,
        world_size,
        local_ranks,
        parameters,
        groups,
        ds_config,
        overrides,
        timeout_ms=0,
        forward_only=False,
    ):
        with self.lock:
            if job not in self.jobs:
                self.jobs[job] = Job(
                    self, job, world_size, parameters, groups, ds_config, overrides, forward_only
                )
            state = self.jobs[job]
            if state.world_size != world_size or state.parameters != parameters:
                raise ZeroShardError(
                    f"job {job}: rank {rank} disagrees in world size or manifest",
                    "INVALID_ARGUMENT",
                )
            resumed = state.ever_attached >= world_size
            state.attached[rank] = True
            state.seen.add(rank)
            state.ever_attached += 1
            self.lock.notify_all()
            self.wait(lambda: len(state.seen) == world_size, f"ranks of job {job} are missing")
        return Session(state, rank, resumed)

    def wait(self, condition, text):
        """Holding the lock; gives up after the deadline."""
        end = time.monotonic() + self.timeout
        while not condition():
            if not self.lock.wait(max(0.0, end - time.monotonic())) and not condition():
                raise ZeroShardError(f"deadline: {text}", "DEADLINE_EXCEEDED")


def _resolve(text, overrides, world_size, forward_only):
    values = parse(text)
    for key, value in overrides.items():
        node, parts = values, key.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = json.loads(value)
    zero, fp16 = values.get("zero_optimization", {}), values.get("fp16", {})
    optimizer = values.get("optimizer") or {}
    kind = str(optimizer.get("type", "none")).lower()
    if kind == "adam" and optimizer.get("params", {}).get("adam_w_mode", True):
        kind = "adamw"
    accumulation = values.get("gradient_accumulation_steps") or 1
    micro = values.get("train_micro_batch_size_per_gpu") or (
        values.get("train_batch_size", world_size) // accumulation // world_size
    )
    dynamic = bool(fp16.get("enabled")) and not fp16.get("loss_scale", 0)
    config = {
        "stage": zero.get("stage", 0),
        "optimizer": kind,
        "accumulation_steps": accumulation,
        "micro_batch_size": micro,
        "train_batch_size": micro * accumulation * world_size,
        "world_size": world_size,
        "prefetch_elements": zero.get("stage3_prefetch_bucket_size", 50_000_000),
        "persistence_threshold": zero.get("stage3_param_persistence_threshold", 100_000),
        "max_live_elements": zero.get("stage3_max_live_parameters", 1_000_000_000),
        "gradient_clipping": values.get("gradient_clipping", 1.0),
        "forward_only": forward_only,
    }
    scaler = LossScaler(1.0, dynamic=False)
    if fp16.get("enabled"):
        initial = 2.0 ** fp16.get("initial_scale_power", 16) if dynamic else fp16["loss_scale"]
        scaler = LossScaler(
            initial,
            fp16.get("loss_scale_window", 1000),
            fp16.get("hysteresis", 2),
            fp16.get("min_loss_scale", 1),
            fp16.get("consecutive_hysteresis", False),
            dynamic,
        )
    return values, config, scaler


class Job:
    def __init__(
        self, daemon, name, world_size, parameters, groups, ds_config, overrides, forward_only
    ):
        self.daemon, self.name, self.world_size, self.parameters = (
            daemon,
            name,
            world_size,
            parameters,
        )
        self.values, self.config, scaler = _resolve(ds_config, overrides, world_size, forward_only)
        self.units, self.places, self.window_bytes = layout(parameters)
        self.group = self.values.get("zeroshard", {}).get("reduction_group", 0)
        self.groups = groups
        # By rank. Each has a parameter window of its own, so that no rank reads what another holds.
        self.sessions = {}
        self.shards = [np.zeros(u["elements"], stored_type(u["dtype"])) for u in self.units]
        self.put_grains = [np.zeros(u["elements"] // GRAIN, bool) for u in self.units]
        self.scaler = scaler
        self.reference = None
        self.attached, self.seen, self.ever_attached = {}, set(), 0
        self.step_number = 0
        self.user_states = [b""] * world_size
        self.holders = [dict() for _ in self.units]  # rank -> count
        self.orders = [[] for _ in range(world_size)]
        self.contributions = {}
        self.micro_ends = set()
        self.arrivals = {}
        self.poison = None
        self.counts = {"gather": 0, "scatter": 0, "persistent": 0}
        self.norms = []

    def persistent(self, unit):
        return self.units[unit]["data_elements"] <= self.config["persistence_threshold"]

    def check(self):
        if self.poison:
            raise self.poison

    def fail(self, text, code="FAILED_PRECONDITION"):
        self.poison = self.poison or ZeroShardError(text, code)
        self.daemon.lock.notify_all()
        raise self.poison

    # --- parameters

    def put(self, unit, begin, elements, data):
        grains = slice(begin // GRAIN, -(-(begin + elements) // GRAIN))
        self.shards[unit][begin : begin + elements] = np.frombuffer(
            data, self.shards[unit].dtype, elements
        )
        self.put_grains[unit][grains] = True
        self.show_to_holders(unit)
        if self.reference is not None:
            self._adopt(unit)
        self.daemon.lock.notify_all()

    def show_to_holders(self, unit):
        for rank in self.holders[unit]:
            self.sessions[rank].show(unit)

    def readable(self, unit):
        return bool(self.put_grains[unit].all())

    def _value(self, i):
        unit, offset, n = self.places[i]
        return decode(self.shards[unit][offset : offset + n], self.parameters[i]["dtype"])

    def _adopt(self, unit):
        for i in self.units[unit]["parameters"]:
            master, value = self.reference.master[i], self._value(i)
            rounded = decode(
                encode(master, self.parameters[i]["dtype"]), self.parameters[i]["dtype"]
            )
            self.reference.master[i] = np.where(rounded == value, master, value)

    def make_reference(self):
        if self.reference is None:
            units = [
                (u["elements"], [(i, self.places[i][1]) for i in u["parameters"]])
                for u in self.units
            ]
            self.reference = Reference(
                [self._value(i) for i in range(len(self.parameters))],
                self.config["optimizer"],
                self.world_size,
                self.group,
                self.parameters[0]["dtype"],
                self.config["gradient_clipping"],
                self.scaler,
                units,
                [p["trainable"] for p in self.parameters],
                [p["group"] for p in self.parameters],
            )
        return self.reference

    # --- step, with the lock held by the last rank that arrives

    def commit(self):
        reference = self.make_reference()
        first = self.arrivals[0]
        for rank, arrival in self.arrivals.items():
            if arrival["micro_steps"] != first["micro_steps"]:
                self.fail(f"ranks 0 and {rank} disagree in the number of micro-steps")
        weighted = any(a["weight_total"] for a in self.arrivals.values())
        total = None
        if weighted:
            total = sum(a["weight_total"] or a["micro_steps"] for a in self.arrivals.values())
        for micro in range(first["micro_steps"]):
            gradients, weights = [], []
            for rank in range(self.world_size):
                if (micro, rank) not in self.micro_ends:
                    self.fail(f"rank {rank} did not end micro-step {micro}")
                gradients.append(
                    [self.contributions.get((micro, rank, i)) for i in range(len(self.parameters))]
                )
                weights.append(self.contributions.get((micro, rank, "weight"), 1.0))
            reference.micro_step(gradients, weights if any(w != 1.0 for w in weights) else None)
        reference.step([copy.deepcopy(g) for g in first["groups"]], first["micro_steps"], total)
        for i in range(len(self.parameters)):
            unit, offset, n = self.places[i]
            if self.parameters[i]["trainable"]:
                self.shards[unit][offset : offset + n] = encode(
                    reference.master[i], self.parameters[i]["dtype"]
                )
        for unit in range(len(self.units)):
            self.show_to_holders(unit)
        self.step_number += 1
        self.norms.append(reference.norm)
        self.user_states = [self.arrivals[r]["user_state"] for r in range(self.world_size)]
        self.contributions, self.micro_ends, self.arrivals = {}, set(), {}
        self.orders = [[] for _ in range(self.world_size)]
        self.daemon.lock.notify_all()

    def result(self):
        r = self.reference
        return {
            "step": self.step_number,
            "attempt": self.step_number + 1,
            "updates": r.updates,
            "loss_scale": r.scaler.scale,
            "grad_norm": r.norm,
            "norm_valid": np.isfinite(r.norm),
            "skipped": r.skipped,
        }


class Session:
    """One rank."""

    def __init__(self, job, rank, resumed):
        self.job, self.rank, self.world_size = job, rank, job.world_size
        self.config, self.warnings, self.ledger, self.generation = dict(job.config), [], [], 1
        self.scheduler = json.dumps(job.values["scheduler"]) if job.values.get("scheduler") else ""
        self.resumed = resumed
        self.initialized = all(job.readable(u) for u in range(len(job.units)))
        self._refresh()
        largest = max((u["bytes"] for u in job.units), default=0)
        self.gradient_window = bytearray(max(2 * largest, PAGE))
        self._window = bytearray(bytes([_POISON]) * max(job.window_bytes, PAGE))
        self.parameter_window = memoryview(self._window).toreadonly()
        job.sessions[rank] = self
        self._requests, self._slots, self._next = {}, {}, 1
        self.released = 0

    def _refresh(self):
        job = self.job
        self.steps, self.attempt = job.step_number, job.step_number + 1
        self.updates = job.reference.updates if job.reference else 0
        self.loss_scale = job.scaler.scale
        self.user_state = job.user_states[self.rank]

    def show(self, unit):
        u = self.job.units[unit]
        self._window[u["window_offset"] : u["window_offset"] + u["bytes"]] = self.job.shards[
            unit
        ].tobytes()

    def hide(self, unit):
        u = self.job.units[unit]
        self._window[u["window_offset"] : u["window_offset"] + u["bytes"]] = (
            bytes([_POISON]) * u["bytes"]
        )

    def units(self):
        return [
            {
                **{
                    k: u[k]
                    for k in (
                        "dtype",
                        "trainable",
                        "parameters",
                        "elements",
                        "data_elements",
                        "window_offset",
                        "bytes",
                    )
                },
                "persistent": self.job.persistent(i),
            }
            for i, u in enumerate(self.job.units)
        ]

    def places(self):
        return list(self.job.places)

    def _new(self, condition=None, text=""):
        self._requests[self._next] = (condition, text)
        self._next += 1
        return self._next - 1

    def acquire(self, size):
        at = 0
        for offset, taken in sorted(self._slots.items()):
            if offset - at >= size:
                break
            at = -(-(offset + taken) // 64) * 64
        if at + size > len(self.gradient_window):
            raise ZeroShardError(f"no slot of {size} bytes is free", "RESOURCE_EXHAUSTED")
        self._slots[at] = size
        return at

    def _take_slot(self, offset):
        size = self._slots.pop(offset)
        data = bytes(self.gradient_window[offset : offset + size])
        self.gradient_window[offset : offset + size] = bytes([_POISON]) * size
        return data

    def put(self, unit, element_offset, elements, window_offset, last):
        with self.job.daemon.lock:
            self.job.check()
            if element_offset % GRAIN or (
                elements % GRAIN and element_offset + elements != self.job.units[unit]["elements"]
            ):
                raise ZeroShardError("put: not whole grains", "INVALID_ARGUMENT")
            self.job.put(unit, element_offset, elements, self._take_slot(window_offset))
            return self._new()

    def gather(self, units, alone, prefetch):
        job = self.job
        with job.daemon.lock:
            job.check()
            position = None
            if not alone:
                position = len(job.orders[self.rank])
                for other in range(self.world_size):
                    theirs = job.orders[other]
                    if len(theirs) > position and theirs[position] != list(units):
                        job.fail(
                            f"ranks {other} and {self.rank} gather in different order: rank {other} "
                            f"unit {theirs[position]}, rank {self.rank} unit {list(units)}"
                        )
                job.orders[self.rank].append(list(units))
                key = "persistent" if all(job.persistent(u) for u in units) else "gather"
                job.counts[key] += (
                    sum(job.units[u]["data_elements"] for u in units) if self.rank == 0 else 0
                )
            for unit in units:
                job.holders[unit][self.rank] = job.holders[unit].get(self.rank, 0) + 1
            attempt = job.step_number
            job.daemon.lock.notify_all()

            def ready():
                job.check()
                together = (
                    alone
                    or attempt != job.step_number
                    or all(len(o) > position for o in job.orders)
                )
                if together and all(job.readable(u) for u in units):
                    for unit in units:
                        if job.holders[unit].get(self.rank):
                            self.show(unit)
                    return True
                return False

            return self._new(ready, f"gather of {list(units)} by rank {self.rank}")

    def release(self, units):
        job = self.job
        with job.daemon.lock:
            for unit in units:
                if not job.holders[unit].get(self.rank):
                    job.fail(f"rank {self.rank} releases unit {unit} that it does not hold")
                job.holders[unit][self.rank] -= 1
                if not job.holders[unit][self.rank]:
                    del job.holders[unit][self.rank]
                    self.hide(unit)
            self.released += len(units)
            return self._new()

    def scatter(self, unit, micro_step, window_offset, present, weight):
        job = self.job
        with job.daemon.lock:
            job.check()
            u = job.units[unit]
            values = decode(
                np.frombuffer(
                    self._take_slot(window_offset), stored_type(u["dtype"]), u["elements"]
                ),
                u["dtype"],
            )
            if self.rank == 0:
                job.counts["scatter"] += u["data_elements"]
            for position, i in enumerate(u["parameters"]):
                if present and not present[position // 8] >> (position % 8) & 1:
                    continue
                if (micro_step, self.rank, i) in job.contributions:
                    job.fail(f"a second gradient of unit {unit} from rank {self.rank}")
                _, offset, n = job.places[i]
                job.contributions[micro_step, self.rank, i] = values[offset : offset + n].copy()
            if weight not in (0, 1):
                job.contributions[micro_step, self.rank, "weight"] = weight
            return self._new()

    def micro_end(self, micro_step):
        with self.job.daemon.lock:
            self.job.check()
            self.job.micro_ends.add((micro_step, self.rank))
            return self._new()

    def _arrive(self, arrival):
        job = self.job
        with job.daemon.lock:
            job.check()
            if len(arrival["user_state"]) > 1 << 20:
                raise ZeroShardError("user_state is too large", "INVALID_ARGUMENT")
            number = job.step_number
            job.arrivals[self.rank] = arrival
            if len(job.arrivals) == self.world_size:
                job.commit()

            def ready():
                job.check()
                return job.step_number > number

            return self._new(ready, f"step {number + 1} of rank {self.rank}")

    def step(
        self, micro_steps, weight_total, groups, user_state, prefetch_hits, prefetch_misses, wait_us
    ):
        return self._arrive(
            {
                "micro_steps": micro_steps,
                "weight_total": weight_total,
                "groups": groups,
                "user_state": user_state,
                "hits": prefetch_hits,
                "misses": prefetch_misses,
            }
        )

    def wait(self, request, timeout_ms=0):
        condition, text = self._requests[request]
        with self.job.daemon.lock:
            self.job.check()
            if condition is not None:
                try:
                    self.job.daemon.wait(condition, text)
                except ZeroShardError as error:
                    if error.code == "DEADLINE_EXCEEDED":
                        self.job.fail(str(error), error.code)
                    raise

    def done(self, request):
        condition, _ = self._requests[request]
        with self.job.daemon.lock:
            return condition is None or condition()

    def step_result(self):
        return self.job.result()

    def save(self, name, exclude_frozen):
        job = self.job
        with job.daemon.lock:
            if name in job.daemon.checkpoints:
                raise ZeroShardError(f"checkpoint {name} exists", "ALREADY_EXISTS")
            job.make_reference()
            job.daemon.checkpoints[name] = copy.deepcopy(
                (
                    job.reference,
                    job.step_number,
                    job.user_states,
                    [p["name"] for p in job.parameters],
                )
            )
            return {"step": job.step_number, "bytes": 0, "directory": "/fake"}

    def restore(self, name, parameters_only):
        job = self.job
        with job.daemon.lock:
            if name not in job.daemon.checkpoints:
                raise ZeroShardError(f"no checkpoint {name}", "NOT_FOUND")
            saved, step, states, _ = job.daemon.checkpoints[name]
            job.restores = getattr(job, "restores", 0) + 1
            if job.restores % self.world_size == 1 or self.world_size == 1:
                current = job.make_reference()
                kept = copy.deepcopy(saved)
                kept.units, kept.world_size, kept.group = (
                    current.units,
                    job.world_size,
                    job.group or job.world_size,
                )
                job.reference = job.reference if parameters_only else kept
                job.reference.master = [x.copy() for x in kept.master]
                if not parameters_only:
                    job.step_number, job.scaler = step, kept.scaler
                    if len(states) == job.world_size:
                        job.user_states = list(states)
                for i, p in enumerate(job.parameters):
                    unit, offset, n = job.places[i]
                    job.shards[unit][offset : offset + n] = encode(
                        job.reference.master[i], p["dtype"]
                    )
                for unit in range(len(job.units)):
                    job.show_to_holders(unit)
            target = job.restores + (-job.restores) % self.world_size
            job.daemon.lock.notify_all()
            job.daemon.wait(lambda: job.restores >= target, "restore on all ranks")
            self._refresh()
            state = states[self.rank] if len(states) == job.world_size else b""
            return {"step": step, "user_state": state, "bytes": 0}

    def export(self, name, overwrite):
        return {"path": f"/fake/{name}.safetensors", "bytes": 0, "step": self.job.step_number}

    def detach(self, keep):
        with self.job.daemon.lock:
            self.job.attached.pop(self.rank, None)
            for holders in self.job.holders:
                holders.pop(self.rank, None)
            if not self.job.attached and not keep:
                self.job.daemon.jobs.pop(self.job.name, None)

    def close(self):
        pass

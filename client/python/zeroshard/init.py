"""zeroshard.zero.Init: models that are born sharded.

    with zeroshard.zero.Init():
        model = HugeModel()
    engine, *_ = zeroshard.initialize(model=model, config=...)

When the constructor of a module returns, every rank keeps 1/R of each of its parameters and forgets
the rest, so that no rank ever holds the whole model; zeroshard.initialize puts the parts into the
daemon. All ranks must seed their random generators alike: each contributes its part of what should
be the same values.

A constructor that changes parameters of modules that are already complete
(`self.apply(init_weights)`) works: the parameter is opened with this rank's values in place and NaN
elsewhere, and sharded again afterwards. Overwriting it and element-wise changes are exact; anything
that mixes elements gives NaN, which is noticed and refused.
"""

import functools
import os
import threading

import torch

from zeroshard import initial, placeholder
from zeroshard.errors import misuse

_local = threading.local()
_lock = threading.Lock()
_patched = {}
_users = 0
_MAX_OPEN = 4


class Init:
    """Context in which modules are born sharded. With `module`, shards that one at once."""

    def __init__(
        self,
        module=None,
        data_parallel_group=None,
        mem_efficient_linear=True,
        remote_device=None,
        pin_memory=False,
        config_dict_or_path=None,
        config=None,
        enabled=True,
        dtype=None,
        mpu=None,
        rank=None,
        world_size=None,
    ):
        self.enabled = enabled
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self._open = []
        if module is not None and enabled:
            for child in module.modules():
                self.module_done(child)

    def __enter__(self):
        if self.enabled:
            self._outer = getattr(_local, "active", None)
            _local.active = self
            _patch()
        return self

    def __exit__(self, kind, *unused):
        if self.enabled:
            _local.active = self._outer
            _unpatch()
            if kind is None:
                self._close_all()
        return False

    def module_done(self, module):
        self._close_all()
        for key, parameter in module._parameters.items():
            if (
                parameter is not None
                and parameter.is_floating_point()
                and not hasattr(parameter, "zeroshard")
            ):
                self._shard(parameter, f"{type(module).__name__}.{key}")

    def _shard(self, parameter, name):
        parameter.zeroshard = placeholder.Handle(parameter, name, -1, _touch)
        parameter.zeroshard.born = [
            (begin, end, None)
            for begin, end in initial.kept_segments(parameter.numel(), self.rank, self.world_size)
        ]
        self._keep(parameter)

    def _keep(self, parameter):
        handle = parameter.zeroshard
        flat = parameter.data.reshape(-1)
        parts = []
        for begin, end, old in handle.born:
            values = flat[begin:end].clone()
            if (
                old is not None
                and bool(torch.isnan(values).any())
                and not bool(torch.isnan(old).any())
            ):
                raise misuse(
                    f"parameter {handle.name!r} was born sharded and then changed in a way "
                    "that mixes its elements; do that inside the module's own constructor, or after "
                    "zeroshard.initialize with GatheredParameters"
                )
            parts.append((begin, end, values))
        handle.born = parts
        placeholder.unbind(parameter)

    def open(self, parameter):
        while len(self._open) >= _MAX_OPEN:
            self._keep(self._open.pop(0))
        full = torch.full((parameter.numel(),), float("nan"), dtype=parameter.dtype)
        for begin, end, values in parameter.zeroshard.born:
            full[begin:end] = values
        placeholder.bind(parameter, full.view(parameter.zeroshard.placeholder.shape))
        self._open.append(parameter)

    def _close_all(self):
        opened, self._open = self._open, []
        for parameter in opened:
            self._keep(parameter)


def _touch(parameter, func):
    active = getattr(_local, "active", None)
    if active is None:
        raise misuse(
            f"parameter {parameter.zeroshard.name!r} was born sharded (zeroshard.zero.Init) "
            "and has no values until zeroshard.initialize; afterwards use zeroshard.zero.GatheredParameters"
        )
    active.open(parameter)


def _wrap(cls):
    if "__init__" not in cls.__dict__ or cls in _patched:
        return
    original = cls.__dict__["__init__"]

    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        active = getattr(_local, "active", None)
        if active is None or "_zeroshard_constructing" in self.__dict__:
            return original(self, *args, **kwargs)
        self.__dict__["_zeroshard_constructing"] = True
        try:
            original(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_zeroshard_constructing", None)
        active.module_done(self)

    _patched[cls] = original
    cls.__init__ = construct


def _all_subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from _all_subclasses(child)


def _patch():
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for cls in set(_all_subclasses(torch.nn.Module)):
            _wrap(cls)
        torch.nn.Module.__init_subclass__ = classmethod(lambda cls, **kwargs: _wrap(cls))


def _unpatch():
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        for cls, original in _patched.items():
            cls.__init__ = original
        _patched.clear()
        del torch.nn.Module.__init_subclass__

"""zeroshard.initialize: from a model and a ds_config to an engine."""

import atexit
import json
import logging
import os
import re
import sys
import types
import weakref

import torch

from zeroshard import (
    backend,
    checkpoint,
    device,
    initial,
    manifest,
    memory,
    optimizer as optimizers,
    placeholder,
    resume,
    schedulers,
)
from zeroshard.data import ShardedLoader
from zeroshard.ds_config import DsConfig
from zeroshard.engine import Engine
from zeroshard.errors import invalid
from zeroshard.units import UnitTable

log = logging.getLogger("zeroshard")
_engines = weakref.WeakSet()


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
    job=None,
    *,
    rank=None,
    world_size=None,
    local_ranks=None,
    socket=None,
    overrides=None,
    timeout_ms=0,
    seed=0,
):
    """Joins (or creates) `job` as one rank and returns (engine, optimizer, training_dataloader,
    lr_scheduler).

    The first arguments are DeepSpeed's. `rank` and `world_size` default to RANK and WORLD_SIZE, as
    torchrun sets them; `local_ranks`, the ranks of this job on this machine, to LOCAL_WORLD_SIZE;
    `job` to ZEROSHARD_JOB or the script's name; `socket` to ZEROSHARD_SOCKET or the daemon's
    standard place. `overrides`: dotted config key -> value, for "auto" entries. When the job
    exists, the engine stands at its last committed step with this rank's random generators,
    scheduler, loader position and client_state restored.
    """
    if model is None:
        raise invalid("initialize: model is missing")
    if config is None:
        config = (
            config_params if config_params is not None else getattr(args, "deepspeed_config", None)
        )
    config = DsConfig(config)
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) if local_ranks is None else local_ranks
    sharded, from_optimizer = optimizers.make(optimizer, model_parameters, model, config)
    entries = manifest.collect(model, sharded)
    if sharded is not None and not any(e.trainable for e in entries):
        sharded = None
    dtype = config.compute_dtype()
    manifest.cast(model, entries, dtype)
    texts = {key: json.dumps(value) for key, value in (overrides or {}).items()}
    socket, job = socket or os.environ.get("ZEROSHARD_SOCKET", ""), _job_name(job)
    cuda = device.of_model([e.parameter for e in entries])
    described = manifest.describe(entries, dtype)

    def attach(memory=None, gave_up=""):
        on_gpu = {"cuda_device": cuda, "device_memory": memory, "gave_up": gave_up}
        return backend.native().attach(
            socket,
            job,
            rank,
            world_size,
            local_ranks,
            described,
            sharded.wire_groups() if sharded is not None else [],
            config.text,
            {**from_optimizer, **texts},
            timeout_ms,
            sharded is None,
            **({} if cuda is None else on_gpu),
        )

    session = attach()
    if rank == 0:
        for warning in session.warnings:
            log.warning("%s", warning)
    engine = _make_engine(model, session, sharded, config, entries)
    memory.give_back()

    def meet(name):
        point = [
            {
                "name": "point",
                "aliases": [],
                "shape": [1],
                "dtype": "float32",
                "trainable": False,
                "group": 0,
                "module": "",
            }
        ]
        return backend.native().attach(
            socket,
            name,
            rank,
            world_size,
            local_ranks,
            point,
            [],
            '{"train_micro_batch_size_per_gpu": 1}',
            {},
            timeout_ms,
            True,
        )

    engine._rejoin = (meet, job)
    engine._attach_again = attach
    engine.lr_scheduler = _scheduler(lr_scheduler, session, engine.optimizer)
    if training_data is not None:
        engine.training_dataloader = ShardedLoader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            rank,
            world_size,
            collate_fn,
            seed,
            drop_last=bool(config.get("dataloader_drop_last", False)),
        )
    if sharded is not None and session.steps > 0:
        resume.restore(engine, session.user_state, engine._updates)
    _engines.add(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _make_engine(model, session, sharded, config, entries):
    parameters = [e.parameter for e in entries]
    touch = _LateTouch()
    for index, entry in enumerate(entries):
        _attach_handle(entry, index, touch.touch)
    stage = int(session.config.get("stage") or 0)
    table = UnitTable(session, parameters, resident=stage < 3)
    if not session.initialized:
        initial.put_model(session, table, session.rank, session.world_size)
    for entry in entries:
        entry.parameter.zeroshard.born = None
        unit = table.units[session.places()[entry.parameter.zeroshard.index][0]]
        unit.deferred = unit.deferred or bool(entry.aliases)
    table.gather_resident()
    engine = Engine(model, session, table, sharded, config, parameters, _leaves(model, config))
    engine._entries = entries
    for parameter in parameters:
        parameter.zeroshard.on_touch = engine.touch
    model.state_dict = types.MethodType(_state_dict, model)
    model.load_state_dict = types.MethodType(_load_state_dict, model)
    model.__dict__["_zeroshard_engine"] = weakref.ref(engine)
    return engine


class _LateTouch:
    def touch(self, parameter, func):
        placeholder.refuse(parameter, func)


def _attach_handle(entry, index, touch):
    parameter = entry.parameter
    old = getattr(parameter, "zeroshard", None)
    born = old.born if old is not None else None
    if old is not None:
        parameter.__class__ = old.original
    parameter.zeroshard = placeholder.Handle(parameter, entry.name, index, touch)
    parameter.zeroshard.born = born


def _state_dict(self, *args, destination=None, prefix="", keep_vars=False):
    values = checkpoint.state_dict(self.__dict__["_zeroshard_engine"]())
    result = {} if destination is None else destination
    result.update({prefix + name: value for name, value in values.items()})
    return result


def _load_state_dict(self, state_dict, strict=True, **unused):
    missing, unexpected = checkpoint.load_state_dict(
        self.__dict__["_zeroshard_engine"](), state_dict, strict
    )
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _leaves(model, config):
    classes, names, suffixes = config.leaf_modules()
    leaves = []
    for name, module in model.named_modules():
        kind = type(module)
        full = f"{kind.__module__}.{kind.__qualname__}"
        if (
            kind.__name__ in classes
            or full in classes
            or name in names
            or any(name.endswith(s) for s in suffixes)
        ):
            leaves.append(module)
    return leaves


def _scheduler(given, session, optimizer):
    if optimizer is None:
        return None
    if given is None:
        return schedulers.from_config(session.scheduler, optimizer)
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    return given


def _job_name(job):
    if job is not None:
        return job
    if os.environ.get("ZEROSHARD_JOB"):
        return os.environ["ZEROSHARD_JOB"]
    script = os.path.splitext(os.path.basename(sys.argv[0] or ""))[0]
    return re.sub(r"[^A-Za-z0-9._-]", "-", script)[:128] or "job"


@atexit.register
def _leave():
    """A script that ends well leaves its jobs. One that ends by an exception does not: its job
    waits for it."""
    if getattr(sys, "last_value", None) is not None:
        return
    for engine in list(_engines):
        try:
            engine.destroy()
        except Exception as error:  # the interpreter is going away; say it and go on
            log.warning("leaving the job failed: %s", error)

"""The engine: what zeroshard.initialize returns. It has DeepSpeed's habits.

    loss = engine(batch)          # forward; at stage 3 parameters appear module by module
    engine.backward(loss)         # gradients leave as they are complete
    engine.step()                 # at the accumulation boundary: one update of the whole job

All calls come from the thread that trains. Every `backward` is one micro-step. `step` raises
ZeroShardError when the job cannot go on; what was committed stays in the daemon.
"""

import contextlib
import logging

import torch
from torch.autograd import Variable

from zeroshard import checkpoint, placeholder, resume
from zeroshard.errors import misuse
from zeroshard.gradients import Gradients
from zeroshard.hooks import ModuleHooks, is_independent
from zeroshard.memory import Memory

log = logging.getLogger("zeroshard")


class Engine(torch.nn.Module):
    """A module whose parameters live in the daemon."""

    def __init__(self, module, session, table, optimizer, config, managed, leaves=()):
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = None
        self.training_dataloader = None
        self.client_state = {}
        self.global_steps = int(session.steps)
        self.skipped_steps = int(session.steps) - int(session.updates)
        self.micro_steps = 0
        self.in_backward = False
        self._session = session
        self._table = table
        self._ds_config = config
        self._managed = managed  # nn.Parameters in the order of the manifest
        self._unit_by_id = {id(p): u for u in table.units for p in u.parameters}
        self._loss_scale = float(session.loss_scale)
        self._updates = int(session.updates)
        self._grad_norm = None
        self._cycle_open = False
        self._closed = False
        self.compute_dtype = table.units[0].dtype if table.units else torch.float32
        self._hooks = None
        if any(not u.resident for u in table.units):
            self._mark_independent(leaves)
            self._hooks = ModuleHooks(module, table, self.unit_of, self, leaves)
        self._gradients = None
        if not self.forward_only:
            done = self._hooks.maybe_release if self._hooks else lambda unit: None
            self._gradients = Gradients(session, table, self, done)
        self.memory = Memory(module, self._gradients)

    def _mark_independent(self, leaves):
        together = self._table.memory.on_device  # alone is slow there; leaves are run by all ranks
        for module in self.module.modules():
            leaf = not together and any(module is one for one in leaves)
            if is_independent(module) or leaf:
                for parameter in module.parameters():
                    self._unit_by_id[id(parameter)].alone = True

    # --- forward and backward
    # -------------------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        self._check_open()
        training = torch.is_grad_enabled() and self._gradients is not None and self.module.training
        if self._hooks and not self.in_backward and not self._hooks.stack:
            self._begin_pass("train" if training else "eval")
        if self.compute_dtype != torch.float32:
            args, kwargs = _cast_inputs((args, kwargs), self.compute_dtype)
        output = self.module(*args, **kwargs)
        self.memory.sample()
        if self._hooks and not self._cycle_open and not self._hooks.stack:
            self._table.order.end()
            self._table.drop_prefetched()
        return output

    def _begin_pass(self, kind):
        self._hooks.reset()
        if self._cycle_open:
            return  # a further forward of the same micro-step
        self._table.order.begin(kind)
        self._cycle_open = kind == "train"

    def backward(self, loss, weight=None, retain_graph=False, **unused):
        """Runs backward from `loss` (the mean over this rank's part of the micro-batch; not divided
        by the accumulation steps). `weight`: the number of tokens that the loss is a mean over; the
        update then follows the mean over all tokens of all ranks and micro-steps."""
        if self._gradients is None:
            raise misuse("this job is forward-only: it was initialized without an optimizer")
        self._check_open()
        self._begin_backward(weight)
        try:
            scaled = loss.float() * self._loss_scale if self._loss_scale != 1.0 else loss
            scaled.backward(retain_graph=retain_graph)
        except BaseException:
            self.in_backward = False
            raise
        self._end_backward()
        return loss

    def set_weight(self, tokens):
        """The weight of the next backward; see `backward`."""
        self._next_weight = tokens

    _next_weight = None

    def scale(self, loss):
        """`loss` times the loss scale, for scripts that call .backward() themselves."""
        self._scaled = True
        return loss.float() * self._loss_scale if self._loss_scale != 1.0 else loss

    _scaled = False

    def enter_backward(self):
        """A gradient appeared outside of `backward`: the script called loss.backward() itself."""
        if self.in_backward or self._gradients is None:
            return
        if self._loss_scale != 1.0 and not self._scaled:
            raise misuse(
                "with a loss scale use engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._begin_backward(None)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _begin_backward(self, weight):
        weight = self._next_weight if weight is None else weight
        self._next_weight = None
        self._gradients.begin(weight)
        self.in_backward = True

    def _end_backward(self):
        self._scaled = False
        self.memory.sample()
        self._gradients.end()
        for parameter in self.module.parameters():
            parameter.grad = None
        if self._hooks:
            self._table.release_all()
            self._table.order.end()
        self._cycle_open = False
        self.in_backward = False

    # --- step -------------------------------------------------------------------------------------
    # ----------

    def is_gradient_accumulation_boundary(self):
        """Whether the next step() applies the update."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def step(self, *unused):
        self._check_open()
        if self._gradients is None:
            raise misuse("this job is forward-only: it was initialized without an optimizer")
        if self._gradients.logical_steps == 0:
            raise misuse("step() without a backward() before it")
        if not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        groups = self.optimizer.wire_groups()  # a bad one leaves the step to be made
        self.micro_steps += 1
        hits, misses, wait_us = self._table.take_counts()
        user_state = resume.capture(self)
        micro_steps, weight_total = self._gradients.take_step()
        request = self._session.step(
            micro_steps,
            weight_total,
            groups,
            user_state,
            hits,
            misses,
            wait_us,
        )
        self._session.wait(request)
        self._table.after_step()
        self._take_result(self._session.step_result())
        self.memory.sample()

    def _take_result(self, result):
        self.global_steps = int(result["step"])
        self._loss_scale = float(result["loss_scale"])
        self._updates = int(result["updates"])
        self._grad_norm = float(result["grad_norm"]) if result["norm_valid"] else None
        if result["skipped"]:
            self.skipped_steps += 1
            log.info(
                "step %d skipped: a gradient was not finite; the loss scale is %g now",
                self.global_steps,
                self._loss_scale,
            )
            return
        placeholder.bump_versions(p for u in self._table.units if u.trainable for p in u.parameters)
        self.optimizer.note_step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def zero_grad(self, set_to_none=True):
        """Gradients never stay in `.grad`; this only drops what other code put there."""
        for parameter in self.module.parameters():
            parameter.grad = None

    # --- what scripts ask
    # -----------------------------------------------------------------------------------

    @property
    def session(self):
        return self._session

    @property
    def forward_only(self):
        return self.optimizer is None

    @property
    def config(self):
        return self._session.config

    @property
    def loss_scale(self):
        return self._loss_scale

    @property
    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    @property
    def ledger(self):
        return self._session.ledger

    @property
    def was_step_applied(self):
        return self._updates

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self):
        """The norm before clipping of the last step; None before the first one or when it was not
        finite."""
        return self._grad_norm

    def gradient_accumulation_steps(self):
        return int(self.config.get("accumulation_steps") or 1)

    def train_micro_batch_size_per_gpu(self):
        return int(self.config.get("micro_batch_size") or 1)

    def train_batch_size(self):
        return int(self.config.get("train_batch_size") or 1)

    def zero_optimization_stage(self):
        return int(self.config.get("stage") or 0)

    @property
    def global_rank(self):
        return int(self._session.rank)

    @property
    def world_size(self):
        return int(self._session.world_size)

    def barrier(self):
        """Returns when all ranks have called it. Rare operations only: without torch.distributed it
        is made of an Attach to a job of its own, which returns when all ranks are there."""
        self._barriers += 1
        if self.world_size == 1:
            return
        if self._table.memory.on_device:
            self._session.barrier()
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
            return
        attach, job = self._rejoin
        meeting = attach(f"{job[:100]}.barrier{self._barriers}")
        meeting.detach(False)
        meeting.close()

    _barriers = 0
    _rejoin = (
        None  # (attach a job of this name with the same ranks, name of this job); set by initialize
    )

    def unit_of(self, parameter):
        return self._unit_by_id.get(id(parameter))

    @contextlib.contextmanager
    def no_sync(self):
        """For scripts written for DDP; gradients leave in every backward here, as memory
        demands."""
        yield

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
            return getattr(module, name)

    def rejoin(self, reason=""):
        """On GPUs, after an error with the code ABORTED: a rank died, or its GPU, and the step in
        flight ended for all. Attaches again, in this process, when all ranks do; the engine then
        stands at the last committed step, as after a restart. `reason`: the error."""
        old = self._session
        if not getattr(old, "on_device", False):
            raise misuse("rejoin() is for jobs on GPUs: on hosts start the process again")
        old.close()
        self._session = session = self._attach_again(
            old.device_memory, str(reason) or "the trainer gave its session up"
        )
        self.in_backward = self._cycle_open = self._scaled = False
        self._next_weight = None
        for parameter in self.module.parameters():
            parameter.grad = None
        if self._hooks is not None:
            self._hooks.reset()
        self._table.rejoin(session)
        if self._gradients is not None:
            self._gradients.rejoin(session)
        self.global_steps, self._updates = int(session.steps), int(session.updates)
        self.skipped_steps = self.global_steps - self._updates
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self._loss_scale, self._grad_norm = float(session.loss_scale), None
        if not self.forward_only and session.steps > 0:
            resume.restore(self, session.user_state, self._updates)

    _attach_again = None  # (memory, reason) -> session; set by initialize

    # --- saving and leaving
    # ---------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir, tag=None, client_state=None, exclude_frozen_parameters=False, **unused
    ):
        return checkpoint.save(self, save_dir, tag, client_state or {}, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir, tag=None, load_module_only=False, **unused):
        return checkpoint.load(self, load_dir, tag, load_module_only)

    def save_16bit_model(self, save_dir, filename="model.safetensors", **unused):
        return checkpoint.save_model(self, save_dir, filename)

    def export(self, name, overwrite=False):
        return self._session.export(name, overwrite)

    def destroy(self, keep=False):
        """Leaves the job. The last rank to leave ends it, unless all of them say `keep`."""
        if self._closed:
            return
        self._closed = True
        if self._gradients is not None:
            self._gradients.close()
        if self._hooks is not None:
            self._hooks.close()
        for parameter in self._managed:
            parameter.zeroshard.on_touch = _refuse_closed
            placeholder.unbind(parameter)
        self._session.detach(keep)
        self._session.close()

    def _check_open(self):
        if self._closed:
            raise misuse("the engine was destroyed")

    def touch(self, parameter, func):
        if self._hooks is None:
            placeholder.refuse(parameter, func)
        self._hooks.touch(parameter, func)


def _refuse_closed(parameter, func):
    raise misuse(
        f"parameter {parameter.zeroshard.name!r} is gone: its engine was destroyed. "
        "Save the model before that"
    )


def _cast_inputs(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast_inputs(v, dtype) for v in value))
    if type(value) in (tuple, list):
        return type(value)(_cast_inputs(v, dtype) for v in value)
    if type(value) is dict:
        return {k: _cast_inputs(v, dtype) for k, v in value.items()}
    return value

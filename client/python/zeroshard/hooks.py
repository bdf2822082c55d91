"""Stage 3: module hooks that gather a unit before its module runs forward or backward, and release
it after.

Forward: a pre-hook gathers, the hook after it lets go (the unit stays until another one is needed,
so modules that share a unit do not gather it twice). Backward: a hook on the module's outputs
gathers before the first backward node of the module runs; the unit is released when the gradients
of its parameters are complete *and* those of the module's inputs are (a hook on an alias of each
input), because a node that needs the values can be behind either. Whatever is left is released when
backward ends. A forward that runs during backward is a recomputation: its unit is kept for the
backward that follows.
"""

import inspect

import torch

from zeroshard import placeholder
from zeroshard.errors import misuse

_EXTERNAL = "_zeroshard_external"
_INDEPENDENT = "_zeroshard_independent"


def register_external_parameter(module, parameter):
    """Says that `module`'s forward uses `parameter`, which another module owns (a tied head, for
    example)."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise misuse("register_external_parameter takes a module and a parameter")
    externals = module.__dict__.setdefault(_EXTERNAL, [])
    if all(p is not parameter for p in externals):
        externals.append(parameter)


def set_independent(module):
    """Says that ranks may run `module` at different times or not at all (an expert): its parameters
    are gathered by each rank alone, outside of the order that all ranks share."""
    module.__dict__[_INDEPENDENT] = True
    return module


def is_independent(module):
    return module.__dict__.get(_INDEPENDENT, False)


def externals_of(module):
    return module.__dict__.get(_EXTERNAL, ())


class _Call:
    """One run of a module's forward."""

    __slots__ = ("record", "units", "inputs", "remaining", "recompute")

    def __init__(self, record, recompute):
        self.record = record
        self.units = list(record.units)
        self.inputs = 0  # input aliases with a hook
        self.remaining = 0  # of them, those whose gradient is still to come in this backward
        self.recompute = recompute


class _Record:
    __slots__ = ("module", "name", "units")

    def __init__(self, module, name, units):
        self.module = module
        self.name = name
        self.units = units


class ModuleHooks:
    """One thread. `phase` is the engine's view of the pass: phase.in_backward,
    phase.enter_backward()."""

    def __init__(self, model, table, unit_of, phase, leaves):
        self.table = table
        self.unit_of = unit_of
        self.phase = phase
        self.stack = []
        self._handles = []
        self._with_kwargs = _accepts(torch.nn.Module.register_forward_pre_hook, "with_kwargs")
        # A recomputation may stop early by an exception (PyTorch 2): the hook must run all the
        # same.
        always = _accepts(torch.nn.Module.register_forward_hook, "always_call")
        self._after_options = {"always_call": True} if always else {}
        inside = set()
        for leaf in leaves:
            inside.update(id(m) for m in leaf.modules() if m is not leaf)
        leaf_ids = {id(m) for m in leaves}
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            parameters = list(module.parameters(recurse=id(module) in leaf_ids))
            units = self._units([*parameters, *externals_of(module)])
            if units or any(True for _ in module.children()) or module is model:
                self._hook(module, _Record(module, name, units))

    def _units(self, parameters):
        units = []
        for parameter in parameters:
            unit = self.unit_of(parameter)
            if unit is not None and not unit.resident and unit not in units:
                units.append(unit)
        return units

    def _hook(self, module, record):
        if self._with_kwargs:

            def before(module, args, kwargs):
                return self.before_forward(record, args, kwargs)

            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def before(module, args):
                changed = self.before_forward(record, args, {})
                return None if changed is None else changed[0]

            self._handles.append(module.register_forward_pre_hook(before))

        def after(module, args, output):
            return self.after_forward(record, output)

        self._handles.append(module.register_forward_hook(after, **self._after_options))

    def close(self):
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self, record, args, kwargs):
        call = _Call(record, self.phase.in_backward)
        self.stack.append(call)
        if not call.units:
            return None
        for unit in call.units:
            unit.active += 1
        self.table.fetch(call.units)
        if not torch.is_grad_enabled():
            return None
        changed = _map_tensors((args, kwargs), lambda t: self._alias(call, t))
        return changed if call.inputs else None

    def _alias(self, call, tensor):
        if not tensor.requires_grad or placeholder.is_released(tensor):
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        alias = tensor.view_as(tensor)
        call.inputs += 1
        alias.register_hook(lambda gradient: self.input_done(call))
        return alias

    def after_forward(self, record, output):
        call = self._pop(record)
        if call.units:
            if torch.is_grad_enabled():
                found = _visit_tensors(output, lambda t: self._watch_output(call, t))
                for unit in call.units:
                    unit.soft = unit.soft or call.recompute
                    unit.held = (
                        unit.held or not found
                    )  # no way to see its backward come: it stays until the end
            for unit in call.units:
                unit.active -= 1
                self.table.idle(unit)
        if not self.stack and not self.phase.in_backward:
            self.table.release_idle()
            self.table.prefetch()

    def _pop(self, record):
        # Calls above ours were left by an exception that the model caught.
        while self.stack:
            call = self.stack.pop()
            if call.record is record:
                return call
            for unit in call.units:
                unit.active = max(0, unit.active - 1)
        raise misuse(f"module {record.name!r} left a forward pass that it did not enter")

    def _watch_output(self, call, tensor):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda gradient: self.before_backward(call))

    def before_backward(self, call):
        self.phase.enter_backward()
        for unit in call.units:
            if call.inputs and call not in unit.pending:
                call.remaining = call.inputs
                unit.pending.add(call)
            unit.held = True
        self.table.fetch(call.units)

    def input_done(self, call):
        call.remaining -= 1
        if call.remaining > 0:
            return
        for unit in call.units:
            unit.pending.discard(call)
            self.maybe_release(unit)

    def maybe_release(self, unit):
        """Releases a unit whose backward is over; called when a gradient of it or of an input has
        appeared."""
        if not unit.live or unit.resident or unit.active or unit.pending:
            return
        if len(unit.fired) >= unit.trainable_count:
            self.table.release(unit)

    def touch(self, parameter, func):
        """A placeholder was used: gathers it for the module or the recomputation that is running,
        or refuses."""
        unit = self.unit_of(parameter)
        if not self.stack and self.phase.in_backward:
            unit.held = True  # a checkpointed function that is not a module
            self.table.fetch([unit])
            return
        if not self.stack:
            placeholder.refuse(parameter, func)
        call = self.stack[-1]
        unit.active += 1
        call.units.append(unit)
        if unit not in call.record.units:
            call.record.units.append(unit)
        self.table.fetch([unit])

    def reset(self):
        """Forgets calls that an exception left open."""
        for call in self.stack:
            for unit in call.units:
                unit.active = 0
                self.table.idle(unit)
        self.stack.clear()


def _accepts(function, argument):
    return argument in inspect.signature(function).parameters


def _map_tensors(value, function):
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(v, function) for v in value))
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(v, function) for v in value)
    if type(value) is dict:
        return {k: _map_tensors(v, function) for k, v in value.items()}
    return value


def _visit_tensors(value, function):
    """Calls `function` for every tensor in nested containers; False when a part cannot be looked
    into."""
    if isinstance(value, torch.Tensor):
        function(value)
        return True
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Size, torch.dtype)):
        return True
    if isinstance(value, dict):
        return all([_visit_tensors(v, function) for v in value.values()])
    if isinstance(value, (tuple, list)):
        return all([_visit_tensors(v, function) for v in value])
    if hasattr(value, "__dict__"):
        return all([_visit_tensors(v, function) for v in vars(value).values()]) and bool(
            vars(value)
        )
    return False

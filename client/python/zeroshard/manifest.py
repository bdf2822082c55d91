"""From a torch module to the manifest that all ranks send: names, shapes, data types, groups."""

import torch

from zeroshard import placeholder
from zeroshard.errors import invalid

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Entry:
    """One managed parameter."""

    __slots__ = ("name", "aliases", "parameter", "module", "group")

    def __init__(self, name, parameter, module):
        self.name, self.aliases, self.parameter, self.module = name, [], parameter, module
        self.group = None

    @property
    def trainable(self):
        return self.group is not None


def collect(model, optimizer):
    """The managed parameters in registration order: floating-point ones, each once, ties as
    aliases."""
    entries, by_id = [], {}
    for module_name, module in _named_modules(model, "", ()):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{key}" if module_name else key
            if id(parameter) in by_id:
                if name not in by_id[id(parameter)].aliases and name != by_id[id(parameter)].name:
                    by_id[id(parameter)].aliases.append(name)
            elif parameter.is_floating_point():
                by_id[id(parameter)] = entry = Entry(name, parameter, module_name)
                entries.append(entry)
    if not entries:
        raise invalid("model: it has no floating-point parameters")
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for parameter in group["params"]:
            if id(parameter) not in by_id:
                raise invalid(
                    f"optimizer: parameter group {number} has a parameter that is not in the model"
                )
            if parameter.requires_grad:
                by_id[id(parameter)].group = number
    return entries


def _named_modules(module, prefix, seen):
    """Like named_modules, but a module that is registered twice appears under both names."""
    if id(module) in seen:
        raise invalid(f"model: module {prefix!r} contains itself")
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(
                child, f"{prefix}.{name}" if prefix else name, (*seen, id(module))
            )


def cast(model, entries, dtype):
    """Brings parameters and floating-point buffers to the compute data type, as module.bfloat16()
    would."""
    for entry in entries:
        parameter = entry.parameter
        if placeholder.is_released(parameter):
            continue  # born sharded: its values are cast when they are put
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                module._buffers[key] = buffer.to(dtype)


def describe(entries, dtype):
    """The manifest as the native module takes it."""
    return [
        {
            "name": e.name,
            "aliases": e.aliases,
            "shape": list(e.parameter.shape),
            "dtype": _DTYPE_NAMES[dtype],
            "trainable": e.trainable,
            "group": e.group or 0,
            "module": e.module,
        }
        for e in entries
    ]

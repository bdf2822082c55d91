"""Checkpoints and model files.

A checkpoint is written and read by the daemon, in its own directory and under a name; clients never
send paths. What lies in the trainer's `save_dir` is small: `<tag>/zeroshard.json` (name, step,
client_state) and `latest`. A model file (safetensors, docs:
https://github.com/huggingface/safetensors) is streamed by rank 0, unit by unit.
"""

import json
import os
import re
import struct

import torch

from zeroshard import initial, resume
from zeroshard.errors import ZeroShardError, invalid, misuse

_TAG = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE = "zeroshard.json"
_SAFETENSORS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(engine, save_dir, tag, client_state, exclude_frozen):
    if engine._gradients is not None and engine._gradients.logical_steps:
        raise misuse(
            "save_checkpoint: gradients of an unfinished step are on their way; "
            "call it after step()"
        )
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not _TAG.fullmatch(tag):
        raise invalid(f"save_checkpoint: tag {tag!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    if engine.global_rank != 0:
        return True
    document = {
        "step": engine.global_steps,
        "updates": engine._updates,
        "loss_scale": engine.loss_scale,
        "client_state": client_state,
    }
    try:
        json.dumps(document)
    except (TypeError, ValueError) as error:
        raise invalid(
            f"save_checkpoint: client_state must be made of JSON values: {error}"
        ) from error
    directory = os.path.join(save_dir, tag)
    os.makedirs(directory, exist_ok=True)
    document["name"], reply = _save_under_free_name(
        engine.session, f"{tag}-{engine.global_steps}", exclude_frozen
    )
    document["directory"] = reply["directory"]
    _write_whole(os.path.join(directory, _FILE), json.dumps(document, indent=1).encode())
    _write_whole(os.path.join(save_dir, "latest"), tag.encode())
    return True


def _save_under_free_name(session, base, exclude_frozen):
    for attempt in range(1000):
        name = base if attempt == 0 else f"{base}.{attempt}"
        try:
            return name, session.save(name, exclude_frozen)
        except ZeroShardError as error:
            if error.code != "ALREADY_EXISTS":
                raise
    raise misuse(f"save_checkpoint: a thousand checkpoints are named {base}")


def _write_whole(path, data):
    """Replaces `path` by `data`, or leaves it as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(engine, load_dir, tag, parameters_only):
    if tag is None:
        latest = os.path.join(load_dir, "latest")
        if not os.path.exists(latest):
            return None, {}
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    path = os.path.join(load_dir, str(tag))
    try:
        with open(os.path.join(path, _FILE), encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise ZeroShardError(f"load_checkpoint: {error}", "NOT_FOUND") from error
    except ValueError as error:
        raise ZeroShardError(
            f"load_checkpoint: {path}/{_FILE} is damaged: {error}", "DATA_LOSS"
        ) from error
    for unit in engine._table.units:
        with _Alone(engine, unit):
            pass  # readable, so no rank is still putting initial values
    reply = engine.session.restore(document["name"], parameters_only)
    engine._table.after_step()
    if engine._gradients is not None:
        engine._gradients.reset()
    if not parameters_only:
        engine.global_steps = int(reply["step"])
        engine._loss_scale = float(document["loss_scale"])
        engine._updates = int(document["updates"])
        engine.skipped_steps = engine.global_steps - engine._updates
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        resume.restore(engine, reply["user_state"], engine._updates)
    return path, document["client_state"]


class _Alone:
    """Shows one unit's values to this rank alone, without the others."""

    def __init__(self, engine, unit):
        self.memory, self.unit = engine._table.memory, unit
        self.gathered = not (unit.live or unit.resident)

    def __enter__(self):
        if self.gathered:
            self.memory.wait(self.memory.gather([self.unit], alone=True), [self.unit])
        return self.unit

    def __exit__(self, *unused):
        if self.gathered:
            self.memory.release([self.unit])
        return False


def state_dict(engine):
    """All parameters (tied ones under every name) and persistent buffers, as copies."""
    result = {}
    names = _names(engine)
    for unit in engine._table.units:
        with _Alone(engine, unit):
            for parameter in unit.parameters:
                values = parameter.zeroshard.view.clone()
                for name in names[id(parameter)]:
                    result[name] = values
    for name, tensor in _unmanaged(engine):
        result[name] = tensor.detach()
    return result


def _names(engine):
    return {id(e.parameter): [e.name, *e.aliases] for e in engine._entries}


def _unmanaged(engine):
    """Persistent buffers and parameters that are not floating-point."""
    managed = {id(p) for p in engine._managed}
    for prefix, module in engine.module.named_modules():
        dot = prefix + "." if prefix else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield dot + key, buffer
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in managed:
                yield dot + key, parameter


def load_state_dict(engine, values, strict=True):
    """Sets parameters and buffers; rank 0's values count. Returns (missing, unexpected) names."""
    names = _names(engine)
    known = {n for group in names.values() for n in group}
    buffers = dict(_unmanaged(engine))
    missing = sorted(
        n for group in names.values() if not any(n in values for n in group) for n in group[:1]
    )
    missing += sorted(n for n in buffers if n not in values)
    unexpected = sorted(n for n in values if n not in known and n not in buffers)
    if strict and (missing or unexpected):
        raise invalid(f"load_state_dict: missing {missing}, unexpected {unexpected}")
    for name, buffer in buffers.items():
        if name in values:
            buffer.data.copy_(values[name])
    replacements = {}
    for entry in engine._entries:
        for name in (entry.name, *entry.aliases):
            if name in values:
                if values[name].shape != entry.parameter.shape:
                    raise invalid(
                        f"load_state_dict: {name} has shape {list(values[name].shape)}, "
                        f"the model's is {list(entry.parameter.shape)}"
                    )
                replacements[id(entry.parameter)] = values[name]
    replace(engine, replacements, 0)
    return missing, unexpected


def replace(engine, replacements, rank):
    """Puts new values of some parameters, by id; those of `rank` count. All ranks call it."""
    on_device = engine._table.memory.on_device
    if on_device or engine.global_rank == rank:
        for unit in engine._table.units:
            if unit.elements and any(id(p) in replacements for p in unit.parameters):
                with _Alone(engine, unit):
                    if engine.global_rank == rank:
                        initial.put_unit(
                            engine.session, unit, lambda p: replacements.get(id(p), p.zeroshard.view)
                        )
    engine.barrier()
    if on_device:
        engine.session.refresh()
        engine._table.after_step()


def save_model(engine, save_dir, filename):
    """Writes model.safetensors; memory grows by one unit. Returns its path on rank 0, None
    elsewhere."""
    if engine.global_rank != 0:
        if engine._table.memory.on_device:
            for unit in engine._table.units:
                with _Alone(engine, unit):
                    pass  # all ranks gather together
        return None
    os.makedirs(save_dir, exist_ok=True)
    path = os.path.join(save_dir, filename)
    header, offset, plan = {"__metadata__": {"format": "pt"}}, 0, []
    names = _names(engine)
    for unit in engine._table.units:
        for parameter in unit.parameters:
            for name in names[id(parameter)]:
                offset = _describe(header, name, parameter.zeroshard.view, offset)
        plan.append(unit)
    rest = list(_unmanaged(engine))
    for name, tensor in rest:
        offset = _describe(header, name, tensor, offset)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for unit in plan:
            with _Alone(engine, unit):
                for parameter in unit.parameters:
                    for _ in names[id(parameter)]:
                        _write_tensor(file, parameter.zeroshard.view)
        for _, tensor in rest:
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def _describe(header, name, tensor, offset):
    if tensor.dtype not in _SAFETENSORS:
        raise invalid(
            f"save_16bit_model: {name} has data type {tensor.dtype}, "
            "which safetensors does not know"
        )
    size = tensor.numel() * tensor.element_size()
    header[name] = {
        "dtype": _SAFETENSORS[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [offset, offset + size],
    }
    return offset + size


def _write_tensor(file, tensor):
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().view(-1)
        # A scalar or odd-sized tensor cannot be viewed as bytes in PyTorch 1.13 by .view(dtype);
        # numpy's can.
        flat = flat.view(torch.int16) if flat.element_size() == 2 else flat
        file.write(memoryview(flat.numpy()).cast("B"))


def load_safetensors(path):
    """Reads a safetensors file into a dictionary of tensors."""
    kinds = {text: dtype for dtype, text in _SAFETENSORS.items()}
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    result = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = kinds[entry["dtype"]]
        values = (
            torch.frombuffer(
                data,
                dtype=dtype,
                count=(end - begin) // torch.empty(0, dtype=dtype).element_size(),
                offset=begin,
            )
            if end > begin
            else torch.empty(0, dtype=dtype)
        )
        result[name] = values.view(entry["shape"]).clone()
    return result

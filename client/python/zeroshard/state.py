"""user_state: what a rank hands to the daemon with every step and gets back when it re-attaches.

Format, no pickle: b"ZSUS" | uint32 version = 1 | uint64 length of the JSON | JSON | raw bytes. The
JSON is {"values": ..., "blobs": [[name, offset, length], ...]}, offsets from the start of the raw
bytes.
"""

import json
import random
import struct

import numpy
import torch

from zeroshard.errors import ZeroShardError, invalid

_MAGIC = b"ZSUS"
_HEADER = struct.Struct("<4sIQ")


def pack(values, blobs):
    table, offset = [], 0
    for name, data in blobs.items():
        table.append([name, offset, len(data)])
        offset += len(data)
    try:
        text = json.dumps({"values": values, "blobs": table}).encode()
    except (TypeError, ValueError) as error:
        raise invalid(
            f"client_state must be made of JSON values (numbers, strings, lists, dicts): {error}"
        ) from error
    return _HEADER.pack(_MAGIC, 1, len(text)) + text + b"".join(blobs.values())


def unpack(data):
    """Returns (values, blobs) of bytes written by `pack`."""
    try:
        magic, version, length = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != 1:
            raise ValueError(f"starts with {magic!r}, version {version}")
        start = _HEADER.size + length
        document = json.loads(data[_HEADER.size : start])
        blobs = {}
        for name, offset, size in document["blobs"]:
            if offset < 0 or size < 0 or start + offset + size > len(data):
                raise ValueError(f"part {name!r} lies outside of its {len(data)} bytes")
            blobs[name] = data[start + offset : start + offset + size]
        return document["values"], blobs
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ZeroShardError(f"user_state cannot be read: {error}", "DATA_LOSS") from error


def capture_rng():
    """(values, blobs) of the generators of torch, Python and numpy."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    values = {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    blobs = {
        "rng.torch": torch.get_rng_state().numpy().tobytes(),
        "rng.python": struct.pack(f"<{len(words)}I", *words),
        "rng.numpy": numpy.asarray(keys, dtype="<u4").tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        blobs["rng.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return values, blobs


def restore_rng(values, blobs):
    if "rng.torch" in blobs:
        torch.set_rng_state(torch.frombuffer(bytearray(blobs["rng.torch"]), dtype=torch.uint8))
    if "rng.cuda" in blobs and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(blobs["rng.cuda"]), dtype=torch.uint8))
    if "rng.python" in blobs:
        version, gauss = values["python"]
        words = struct.unpack(f"<{len(blobs['rng.python']) // 4}I", blobs["rng.python"])
        random.setstate((version, words, gauss))
    if "rng.numpy" in blobs:
        name, position, has_gauss, cached = values["numpy"]
        keys = numpy.frombuffer(blobs["rng.numpy"], dtype="<u4")
        numpy.random.set_state((name, keys, position, has_gauss, cached))

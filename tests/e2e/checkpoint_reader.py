"""Reads a checkpoint by docs/checkpoint.md and docs/layout.md alone: a second reader, so that the pages are proven.

Nothing here is shared with the daemon's reader but libxxhash; every checksum is verified.
"""

import ctypes
import dataclasses
import pathlib
import struct

import numpy as np

_xxh3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
_xxh3.argtypes, _xxh3.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64

GRAIN = 256
PAGE = 4096
HEADER = struct.Struct("<8sIIQQQ")
ENTRY = struct.Struct("<II32sQQQQQ")
FOOTER = struct.Struct("<8sQQQQ")
COMMIT = struct.Struct("<8sIIQQ")
# Name, stored type, values a grain of each type of record.
DTYPES = {
    0: ("float32", np.float32, 256),
    1: ("bfloat16", np.uint16, 256),
    2: ("float16", np.float16, 256),
    3: ("codes", np.uint8, 256),
    4: ("scales", np.float32, 16),
}


class BadCheckpoint(Exception):
    """The directory is not what the format page says."""


def _require(holds, what):
    if not holds:
        raise BadCheckpoint(what)


def _verify(data, checksum, what):
    _require(_xxh3(data, len(data)) == checksum, f"{what}: wrong checksum")


@dataclasses.dataclass(frozen=True)
class Record:
    """A run of grains of one kind of state of one unit."""

    unit: int
    kind: str
    dtype: str
    first_grain: int
    grains: int
    data: bytes


class Checkpoint:
    """step, job_id, fingerprint, workers, manifest (the bytes of manifest.pb) and records."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.manifest = (self.directory / "manifest.pb").read_bytes()
        self._read_commit()
        shards = sorted(self.directory.glob("shard-*.zsc"), key=lambda path: int(path.stem[len("shard-"):]))
        self.workers = len(shards)
        self.records = []
        identities = set()
        for worker, path in enumerate(shards):
            identity, records = _read_shard(path, worker)
            identities.add(identity)
            self.records += records
        _require(len(identities) == 1, "the shards are of different jobs, layouts or steps")
        self.job_id, self.fingerprint, self.step = identities.pop()

    def _read_commit(self):
        commit = (self.directory / "COMMIT").read_bytes()
        _require(len(commit) == 40, f"COMMIT has {len(commit)} bytes")
        magic, version, zero, length, checksum = COMMIT.unpack_from(commit)
        (own,) = struct.unpack_from("<Q", commit, 32)
        _verify(commit[:32], own, "COMMIT")
        _require((magic, version, zero) == (b"ZSCOMMIT", 1, 0), "COMMIT has another magic or version")
        _require(length == len(self.manifest), "manifest.pb has another length")
        _verify(self.manifest, checksum, "manifest.pb")

    def states(self):
        """{(unit, kind): (dtype, array of the whole unit)}, padding included, whatever the number of shards."""
        parts = {}
        for record in self.records:
            parts.setdefault((record.unit, record.kind, record.dtype), []).append(record)
        whole = {}
        for (unit, kind, dtype), records in parts.items():
            records.sort(key=lambda record: record.first_grain)
            next_grain = 0
            for record in records:
                where = f"unit {unit} {kind}: a gap or overlap at grain {next_grain}"
                _require(record.first_grain == next_grain, where)
                next_grain += record.grains
            stored = next(stored for name, stored, _ in DTYPES.values() if name == dtype)
            whole[unit, kind] = (dtype, np.frombuffer(b"".join(record.data for record in records), stored))
        return whole


def _read_shard(path, worker):
    data = path.read_bytes()
    _require(len(data) >= PAGE + 64, f"{path}: {len(data)} bytes")
    header, footer = data[:PAGE], data[-64:]
    magic, version, owner, job_id, fingerprint, step = HEADER.unpack_from(header)
    _require((magic, version, owner) == (b"ZSSHARD1", 1, worker), f"{path}: another magic, version or worker")
    _verify(header[:-8], struct.unpack("<Q", header[-8:])[0], f"{path}: header")
    magic, index_offset, entries, index_checksum, header_checksum = FOOTER.unpack_from(footer)
    _require(magic == b"ZSINDEX1", f"{path}: no footer")
    _verify(footer[:-8], struct.unpack("<Q", footer[-8:])[0], f"{path}: footer")
    _verify(header, header_checksum, f"{path}: header")
    index = data[index_offset : index_offset + entries * ENTRY.size]
    well_placed = index_offset % PAGE == 0 and index_offset + len(index) + 64 == len(data)
    _require(well_placed, f"{path}: the index is misplaced")
    _verify(index, index_checksum, f"{path}: index")
    records = [_read_record(data, ENTRY.unpack_from(index, i * ENTRY.size), path) for i in range(entries)]
    return (job_id, fingerprint, step), records


def _read_record(data, entry, path):
    unit, dtype, kind, first, grains, offset, length, checksum = entry
    where = f"{path}: unit {unit} at offset {offset}"
    _require(dtype in DTYPES and offset % PAGE == 0 and offset + length <= len(data), f"{where}: a bad entry")
    name, stored, values = DTYPES[dtype]
    _require(1 <= grains <= 4096 and length == grains * values * np.dtype(stored).itemsize, f"{where}: a bad length")
    _verify(data[offset : offset + length], checksum, where)
    return Record(unit, kind.rstrip(b"\0").decode(), name, first, grains, data[offset : offset + length])


# --- The layout, by docs/layout.md --------------------------------------------------------------------------------

LARGE = 16384
MAX_PARAMETERS = 1024


@dataclasses.dataclass
class Unit:
    """places: {index of a parameter: (offset, elements)}."""

    key: tuple
    places: dict
    data_elements: int = 0
    end: int = 0

    @property
    def grains(self):
        return -(-self.end // GRAIN)

    def add(self, parameter, elements):
        offset = -(-self.end // 16) * 16
        self.places[parameter] = (offset, elements)
        self.end = offset + elements
        self.data_elements += elements


def units_of(parameters):
    """parameters: list of (elements, dtype, trainable, module). The units in order."""
    units, open_units = [], {}
    for key, part in _parts(parameters):
        size = sum(parameters[i][0] for i in part)
        mine = open_units.get(key)
        if size >= LARGE:
            mine = Unit(key, {})
            units.append(mine)
            open_units.pop(key, None)
        elif mine is None or mine.data_elements >= LARGE or len(mine.places) + len(part) > MAX_PARAMETERS:
            mine = Unit(key, {})
            units.append(mine)
            open_units[key] = mine
        for i in part:
            mine.add(i, parameters[i][0])
    return units


def _parts(parameters):
    modules = {}
    for i, (_, dtype, trainable, module) in enumerate(parameters):
        parts = modules.setdefault(module, {})
        parts.setdefault((dtype, trainable), []).append(i)
    for parts in modules.values():
        for key, members in parts.items():
            for at in range(0, len(members), MAX_PARAMETERS):
                yield key, members[at : at + MAX_PARAMETERS]

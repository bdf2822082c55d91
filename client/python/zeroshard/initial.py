"""Puts parameter values into the daemon: initial ones, loaded ones, modified ones.

Values travel through this rank's gradient window in whole grains of 256 elements. A replicated
model is put by rank 0; of a model born sharded (init.py) every rank puts what it kept.
"""

import torch

from zeroshard.device import view_of_window

GRAIN = 256
CHUNK = 1 << 20  # elements of one put, at most
_EDGE = 256  # elements at both ends of a parameter that every rank keeps


def kept_segments(elements, rank, world_size):
    """The [begin, end) runs of a parameter that `rank` keeps when it is born sharded: its 1/R (and
    up to a grain more, for grains are put whole), and both ends, whose grains are shared with other
    parameters.
    """
    begin, end = elements * rank // world_size, elements * (rank + 1) // world_size
    runs = sorted(
        [
            (0, min(_EDGE, elements)),
            (begin, min(end + GRAIN, elements)),
            (max(0, elements - _EDGE), elements),
        ]
    )
    merged = []
    for begin, end in runs:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def put_model(session, table, rank, world_size):
    """Puts the initial values of every unit; returns when this rank's part is in the daemon."""
    requests = []
    for unit in table.units:
        if unit.elements == 0:
            continue
        born = any(p.zeroshard.born is not None for p in unit.parameters)
        runs = (
            _runs_of(unit, rank, world_size)
            if born
            else ([(0, unit.elements)] if rank == 0 else [])
        )
        chunk = _chunk(session, unit)
        for begin, end in runs:
            for first in range(begin, end, chunk):
                requests.append(_put(session, unit, first, min(first + chunk, end), _copy_initial))
    for request in requests:
        session.wait(request)


def put_unit(session, unit, source):
    """Puts one whole unit; source(parameter) gives its values."""

    def copy(parameter, begin, end, target):
        target.copy_(source(parameter).detach().reshape(-1)[begin:end])

    chunk = _chunk(session, unit)
    requests = [
        _put(session, unit, first, min(first + chunk, unit.elements), copy)
        for first in range(0, unit.elements, chunk)
    ]
    for request in requests:
        session.wait(request)


def _chunk(session, unit):
    """Elements of one put. The gradient window is as large as trainable units need: a frozen one
    may be larger than all of it."""
    size = torch.empty(0, dtype=unit.dtype).element_size()
    room = memoryview(session.gradient_window).nbytes // size
    return max(GRAIN, min(CHUNK, room // 2 // GRAIN * GRAIN))


def _put(session, unit, begin, end, copy):
    size = torch.empty(0, dtype=unit.dtype).element_size()
    offset = session.acquire((end - begin) * size)
    window = memoryview(session.gradient_window).cast("B")
    values = view_of_window(window, unit.dtype, offset, end - begin)
    values.zero_()
    with torch.no_grad():
        for parameter, (place, elements) in zip(unit.parameters, unit.places):
            low, high = max(begin, place), min(end, place + elements)
            if low < high:
                copy(parameter, low - place, high - place, values[low - begin : high - begin])
    return session.put(unit.index, begin, end - begin, offset, end == unit.elements)


def _copy_initial(parameter, begin, end, target):
    born = parameter.zeroshard.born
    if born is None:
        target.copy_(parameter.data.reshape(-1)[begin:end])
        return
    for first, last, values in born:
        low, high = max(begin, first), min(end, last)
        if low < high:
            target[low - begin : high - begin].copy_(values[low - first : high - first])


def _runs_of(unit, rank, world_size):
    """Element ranges of whole grains that `rank` puts. A grain inside one parameter belongs to the
    rank that keeps its first element; grains that several parameters share are known to all and put
    by rank 0."""
    grains = unit.elements // GRAIN
    runs, inside = [], []
    for offset, elements in unit.places:
        low, high = -(-offset // GRAIN), (offset + elements) // GRAIN
        if low >= high:
            continue
        inside.append((low, high))
        first = -(-(offset + elements * rank // world_size) // GRAIN)
        last = -(-(offset + elements * (rank + 1) // world_size) // GRAIN)
        first, last = max(low, first), min(high, last)
        if first < last:
            runs.append((first, last))
    if rank == 0:
        at = 0
        for low, high in [*inside, (grains, grains)]:
            if at < low:
                runs.append((at, low))
            at = high
    return [(low * GRAIN, high * GRAIN) for low, high in sorted(runs)]

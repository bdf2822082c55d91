"""Units as the trainer sees them: which are gathered, who holds them, and where their values lie.

A unit has one fixed address in the parameter window for the job's life. While it is live its
parameters are views of the window; while it is not they are placeholders (placeholder.py). One
thread: the one that trains.
"""

import time

import torch

from zeroshard import device, placeholder
from zeroshard.order import GatherOrder

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Unit:
    """State of one unit in this trainer."""

    __slots__ = (
        "index",
        "dtype",
        "trainable",
        "elements",
        "data_elements",
        "bytes",
        "window_offset",
        "resident",
        "parameters",
        "places",
        "alone",
        "live",
        "shown",
        "active",
        "pending",
        "held",
        "soft",
        "prefetch",
        "trainable_count",
        "fired",
        "deferred",
        "sent",
    )

    def __init__(self, index, description, resident):
        self.index = index
        self.dtype = as_torch_dtype(description["dtype"])
        self.trainable = bool(description["trainable"])
        self.elements = description["elements"]
        self.data_elements = description["data_elements"]
        self.bytes = description["bytes"]
        self.window_offset = description["window_offset"]
        self.resident = resident or bool(description["persistent"])
        self.parameters = []  # the nn.Parameters, in order of offset
        self.places = []  # (offset, elements) of each
        self.alone = False  # gathered without the other ranks (experts)
        self.live = False  # gathered: its address holds its values
        self.shown = False  # its parameters are views of the window; else a use of them is noticed
        self.active = 0  # forward calls that are using it
        self.pending = set()  # calls whose backward is using it and is seen to end
        self.held = False  # backward is using it
        self.soft = False  # kept for a backward that is about to come
        self.prefetch = None  # request id of a gather issued ahead
        self.trainable_count = 0
        self.fired = set()  # parameters whose gradient is complete in this backward pass
        self.deferred = False  # gradients are complete only when backward ends
        self.sent = False  # scattered in this micro-step


def as_torch_dtype(dtype):
    if isinstance(dtype, torch.dtype):
        return dtype
    return TORCH_DTYPES[str(dtype).lower().replace("dtype_", "")]


class UnitTable:
    """All units of a session, with the counts of prefetch hits and time waited since the last
    step."""

    def __init__(self, session, parameters, resident):
        self.order = GatherOrder()
        self.units = [Unit(i, d, resident) for i, d in enumerate(session.units())]
        self.hits = self.misses = self.wait_us = 0
        self.gathers = 0
        self.live_elements = 0
        self.peak_live_elements = 0
        config = session.config
        self.prefetch_elements = config.get("prefetch_elements", 0)
        self.max_live_elements = config.get("max_live_elements", 0) or 1 << 62
        self._ahead_elements = 0
        self._idle = []
        places = session.places()
        for index, parameter in enumerate(parameters):
            number, offset, elements = places[index]
            unit = self.units[number]
            unit.parameters.append(parameter)
            unit.places.append((offset, elements))
            unit.trainable_count += int(unit.trainable)
        self._take(session)

    def _take(self, session):
        self.session = session
        self.memory = device.memory_of(session)
        for unit in self.units:
            for parameter, (offset, elements) in zip(unit.parameters, unit.places):
                parameter.zeroshard.view = self.memory.parameter(
                    unit, offset, parameter.shape, elements
                )

    def rejoin(self, session):
        """Another session of this rank, in which nothing is gathered yet."""
        self._idle = []
        self._ahead_elements = self.live_elements = 0
        self.order.forget()
        for unit in self.units:
            unit.live = unit.held = unit.soft = unit.sent = False
            unit.active, unit.prefetch = 0, None
            unit.pending.clear()
            unit.fired.clear()
        self._take(session)
        self.gather_resident()

    def gather_resident(self):
        """Gathers the units that stay: all of them below stage 3, the small ones at stage 3."""
        resident = [u for u in self.units if u.resident]
        if resident:
            self.memory.wait(self.memory.gather(resident, alone=True), resident)
        for unit in self.units:
            if unit.resident:
                unit.live = True
                self._show(unit)
            else:
                self._hide(unit)

    def fetch(self, units):
        """Makes `units` live and waits until they are readable."""
        missing = [u for u in units if not u.live]
        if missing:
            self.release_idle()
        for unit in missing:
            if unit.alone:
                self._wait(self.memory.gather([unit], alone=True), unit)
            else:
                self._fetch_in_order(unit)
            unit.live = True
            if not unit.resident:
                self._count_live(unit.elements)
        for unit in units:
            if not unit.shown:
                self._show(unit)
        if missing:
            self.prefetch()

    def _fetch_in_order(self, unit):
        if not self.order.note(unit.index):
            self.drop_prefetched(keep=unit)
        request, unit.prefetch = unit.prefetch, None
        self.gathers += 1
        if request is None:
            self.misses += 1
            self._wait(self.memory.gather([unit]), unit)
        else:
            self._ahead_elements -= unit.elements
            self.live_elements -= unit.elements
            if self.session.done(request):
                self.hits += 1
            else:
                self.misses += 1
            self._wait(request, unit)

    def _wait(self, request, unit):
        start = time.perf_counter_ns()
        self.memory.wait(request, [unit])
        self.wait_us += (time.perf_counter_ns() - start) // 1000

    def prefetch(self):
        """Issues the gathers that come next in the recorded order, as far ahead as the config
        allows."""
        for index in self.order.ahead():
            unit = self.units[index]
            if unit.prefetch is not None:
                continue
            if (
                unit.live
                or self._ahead_elements + unit.elements > self.prefetch_elements
                or self.live_elements + unit.elements > self.max_live_elements
            ):
                break
            unit.prefetch = self.memory.gather([unit], prefetch=True)
            self._ahead_elements += unit.elements
            self._count_live(unit.elements)

    def drop_prefetched(self, keep=None):
        """Gives back what was gathered ahead and is not needed after all."""
        for unit in self.units:
            if unit.prefetch is not None and unit is not keep:
                self._wait(unit.prefetch, unit)
                unit.prefetch = None
                self._ahead_elements -= unit.elements
                self.live_elements -= unit.elements
                self.memory.release([unit])

    def idle(self, unit):
        """A forward call is done with the unit; it goes when another one is needed, and from now on
        a use by another module is noticed."""
        if unit.resident or not unit.live or unit.active or unit.pending or unit.held:
            return
        self._hide(unit)
        if unit not in self._idle:
            self._idle.append(unit)

    def release_idle(self):
        idle, self._idle = self._idle, []
        gone = [u for u in idle if u.live and not (u.active or u.pending or u.held or u.soft)]
        for unit in gone:
            self._let_go(unit)
        if gone:
            self.memory.release(gone)

    def release(self, unit):
        """Releases now; used by backward, which knows when a unit is done."""
        unit.soft = unit.held = False
        unit.pending.clear()
        unit.fired.clear()
        if unit.live and not unit.resident and not unit.active:
            self._let_go(unit)
            self.memory.release([unit])
            self.prefetch()

    def release_all(self):
        """At the end of a pass: nothing but resident units stays."""
        self._idle = []
        for unit in self.units:
            unit.active = 0
            self.release(unit)
        self.drop_prefetched()

    def _count_live(self, elements):
        self.live_elements += elements
        self.peak_live_elements = max(self.peak_live_elements, self.live_elements)

    def _show(self, unit):
        for parameter in unit.parameters:
            placeholder.bind(parameter, parameter.zeroshard.view)
        unit.shown = True

    def _hide(self, unit):
        for parameter in unit.parameters:
            placeholder.unbind(parameter)
        unit.shown = False

    def _let_go(self, unit):
        self._hide(unit)
        unit.live = False
        self.live_elements -= unit.elements

    def after_step(self):
        """The step is committed."""
        self.memory.after_step([u for u in self.units if u.resident])

    def take_counts(self):
        counts = (self.hits, self.misses, self.wait_us)
        self.hits = self.misses = self.wait_us = 0
        return counts

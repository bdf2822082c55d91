"""A stand-in for the native module of a job on GPUs: fake_native's sessions, as PyTorch on a GPU would meet them.

There is no device: tensors are the host's, a stream is a number. What it checks is what the package must do on a
GPU: values are there only for a stream that was told to wait, every use ends on the stream that made it, nothing
but steps and puts is waited for, and ranks gather together.
"""

import threading
import types

import torch

import fake_native
from zeroshard import device
from zeroshard.device import view_of_window
from zeroshard.errors import ZeroShardError
from zeroshard.units import as_torch_dtype

_local = threading.local()


def on_stream(number):
    """The current stream of this thread from now on."""
    _local.stream = number


def current_stream(*unused):
    return types.SimpleNamespace(cuda_stream=getattr(_local, "stream", 7))


class Session:
    """One rank's session; `calls` records what the package asked for."""

    on_device = True
    device = {"ordinal": 0, "name": "no GPU", "uuid": bytes(16)}
    device_memory = "the window"

    def __init__(self, inner, daemon):
        self._inner, self._daemon = inner, daemon
        self._gathers, self._host = {}, set()
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _note(self, *call):
        self.calls.append(call)

    def parameter_tensor(self, unit, offset, shape):
        u = self._inner.units()[unit]
        window = memoryview(self._inner.parameter_window).cast("B")
        flat = view_of_window(window, as_torch_dtype(u["dtype"]), u["window_offset"], u["elements"])
        count = 1
        for dimension in shape:
            count *= dimension
        return flat[offset : offset + count].view(shape)

    def acquire_device(self, unit):
        u = self._inner.units()[unit]
        offset = self._inner.acquire(u["bytes"])
        window = memoryview(self._inner.gradient_window).cast("B")
        return offset, view_of_window(window, as_torch_dtype(u["dtype"]), offset, u["elements"])

    def put(self, *arguments):
        request = self._inner.put(*arguments)
        self._host.add(request)
        return request

    def gather(self, units, alone, prefetch):
        request = self._inner.gather(units, alone, prefetch)
        for unit in units:
            self._gathers[unit] = request
        return request

    def wait_on(self, units, stream):
        self._note("wait_on", tuple(units), stream)
        for unit in units:
            if self._gathers[unit] is not None:
                self._inner.wait(self._gathers[unit])
                self._gathers[unit] = None

    def wait(self, request, timeout_ms=0):
        if request not in self._host:
            raise AssertionError(f"the host waits for request {request}, which is no put or step")
        return self._inner.wait(request, timeout_ms)

    def release(self, units, stream):
        self._note("release", tuple(units), stream)
        return self._inner.release(units)

    def scatter(self, unit, micro_step, slot, present, weight, stream):
        self._note("scatter", unit, stream)
        return self._inner.scatter(unit, micro_step, slot, present, weight)

    def step(self, *arguments):
        if self._daemon.abort_next:
            self._daemon.abort_next -= 1
            # The step in flight is dropped.
            job = self._inner.job
            job.contributions, job.micro_ends, job.arrivals = {}, set(), {}
            job.orders = [[] for _ in range(job.world_size)]
            job.holders = [{} for _ in job.units]
            raise ZeroShardError("step 3 aborted: rank 1 died", "ABORTED")
        request = self._inner.step(*arguments)
        self._host.add(request)
        return request

    def refresh(self):
        self._note("refresh")

    def barrier(self):
        self._daemon.meeting_of(self._inner.job).wait(10)


class Daemon(fake_native.Daemon):
    def __init__(self, timeout=10.0):
        super().__init__(timeout)
        self.attaches = []
        self.abort_next = 0  # so many steps end with ABORTED
        self._meetings = {}

    def meeting_of(self, job):
        with self.lock:
            return self._meetings.setdefault(job.name, threading.Barrier(job.world_size))

    def attach(self, *arguments, cuda_device, device_memory, gave_up, **more):
        self.attaches.append((cuda_device, device_memory, gave_up))
        return Session(super().attach(*arguments, **more), self)


def use(monkeypatch):
    """Lets the package believe that all parameters are on a GPU."""
    monkeypatch.setattr(device, "of_model", lambda parameters: 0)
    monkeypatch.setattr(device, "require_cuda", lambda: None)
    monkeypatch.setattr(device.dlpack, "from_dlpack", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return Daemon()

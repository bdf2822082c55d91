"""Where parameters and gradients are: shared memory of the host, or device memory of this process's GPU.

UnitTable and Gradients ask one of these two for views, for room, and for the order between the
data plane's streams and PyTorch's. On a GPU nothing here waits for the device.
"""

import warnings

import torch
from torch.utils import dlpack

from zeroshard.errors import misuse


def of_model(parameters):
    """The ordinal of the GPU that all these parameters are on, None for the host."""
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise misuse(f"the model's parameters are on several devices: {names}; move them to one")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise misuse(f"the model is on {device}: parameters must be on the host or on a CUDA device")
    require_cuda()
    return torch.cuda.current_device() if device.index is None else device.index


def require_cuda():
    """An error that says why PyTorch cannot use a GPU here."""
    if torch.cuda.is_available():
        return
    built = getattr(torch.version, "cuda", None)
    reason = (
        f"PyTorch {torch.__version__} was built for CUDA {built} and finds no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        if built
        else f"PyTorch {torch.__version__} was built without CUDA: install a CUDA build of it"
    )
    raise misuse(f"this job trains on GPUs, and torch.cuda cannot be used: {reason}")


def memory_of(session):
    """The memory of a session's job."""
    return DeviceMemory(session) if getattr(session, "on_device", False) else HostMemory(session)


class HostMemory:
    """Windows that the worker shares with this rank."""

    on_device = False

    def __init__(self, session):
        self.session = session
        self._parameters = memoryview(session.parameter_window).cast("B")
        self._gradients = memoryview(session.gradient_window).cast("B")
        self._units = {}  # a view of each
        self._whole = {}  # by data type, of all gradients

    def parameter(self, unit, offset, shape, elements):
        """A view of the unit's elements from `offset` on."""
        flat = self._units.get(unit.index)
        if flat is None:
            flat = view_of_window(self._parameters, unit.dtype, unit.window_offset, unit.elements)
            self._units[unit.index] = flat
        return flat[offset : offset + elements].view(shape)

    def gather(self, units, alone=False, prefetch=False):
        return self.session.gather([u.index for u in units], alone, prefetch)

    def wait(self, request, units):
        """Until the gathered units may be used: by the host, on GPUs by what the current stream is given."""
        self.session.wait(request)

    def release(self, units):
        self.session.release([u.index for u in units])

    def after_step(self, resident):
        """Resident units have new values in place."""

    def gradient_slot(self, unit):
        """(what a scatter names, a tensor for the unit's gradient)."""
        offset = self.session.acquire(unit.bytes)
        whole = self._whole.get(unit.dtype)
        if whole is None:
            size = torch.empty(0, dtype=unit.dtype).element_size()
            whole = view_of_window(self._gradients, unit.dtype, 0, len(self._gradients) // size)
            self._whole[unit.dtype] = whole
        first = offset // whole.element_size()
        return offset, whole[first : first + unit.elements]

    def scatter(self, unit, micro_step, slot, present, weight):
        self.session.scatter(unit.index, micro_step, slot, present, weight)


class DeviceMemory:
    """The window and the slots of this process, on its GPU.

    Tensors are made by DLPack over memory that PyTorch's allocator does not know: it is in none of
    torch.cuda's numbers, and `expandable_segments` neither moves nor counts it.
    """

    on_device = True

    def __init__(self, session):
        require_cuda()
        self.session = session
        self.device = torch.device("cuda", session.device["ordinal"])

    def stream(self):
        """The number of PyTorch's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def parameter(self, unit, offset, shape, elements):
        if elements == 0:
            return torch.empty(tuple(shape), dtype=unit.dtype, device=self.device)
        return dlpack.from_dlpack(self.session.parameter_tensor(unit.index, offset, list(shape)))

    def gather(self, units, alone=False, prefetch=False):
        # Alone comes through the host's memory; resident units all ranks gather, at the same place.
        return self.session.gather([u.index for u in units], alone, prefetch)

    def wait(self, request, units):
        self.session.wait_on([u.index for u in units], self.stream())

    def release(self, units):
        self.session.release([u.index for u in units], self.stream())

    def after_step(self, resident):
        if resident:
            self.session.wait_on([u.index for u in resident], self.stream())

    def gradient_slot(self, unit):
        offset, capsule = self.session.acquire_device(unit.index)
        return offset, dlpack.from_dlpack(capsule)

    def scatter(self, unit, micro_step, slot, present, weight):
        self.session.scatter(unit.index, micro_step, slot, present, weight, self.stream())


def view_of_window(buffer, dtype, offset, elements):
    """`elements` numbers of the buffer at byte `offset`, without a copy."""
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is read-only is on purpose
        return torch.frombuffer(buffer, dtype=dtype, count=elements, offset=offset)

"""What this trainer's memory was used for, in PyTorch's terms.

On CUDA the numbers are torch.cuda.max_memory_allocated and max_memory_reserved. On the CPU PyTorch
keeps no such counts, so they are made from what can be known without a profiler:

  activations   peak bytes of distinct storages that autograd saved for backward, parameters and
                windows left out (counted by saved-tensor hooks, only inside `with
                engine.memory.measure():`; tensors inside a checkpointed segment are not saved and
                not counted)
  gradients     peak bytes of `.grad` waiting to be scattered
  allocated     activations + gradients + buffers of the model
  reserved      peak resident memory of the process that is its own (RssAnon, sampled at the ends of
                forward and backward and at steps), as the caching allocator's "reserved" includes
                what it keeps
  windows       resident shared memory (RssShmem): parameter and gradient windows, owned by the
  daemon
"""

import contextlib
import ctypes

import torch


def _storage(tensor):
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()


def resident():
    """(anonymous, shared) resident bytes of this process."""
    anonymous = shared = 0
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                anonymous = int(line.split()[1]) * 1024
            elif line.startswith("RssShmem:"):
                shared = int(line.split()[1]) * 1024
    return anonymous, shared


def give_back():
    """Returns freed heap memory to the kernel: glibc keeps that of a model's initial values
    otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Memory:
    """One thread. Peaks since the last `reset()`."""

    def __init__(self, model, gradients):
        self._model = model
        self._gradients = gradients
        self.measuring = False
        self.reset()

    def reset(self):
        self.peak_activations = 0
        self.peak_reserved = 0
        self.peak_windows = 0
        self._live = 0
        if self._gradients is not None:
            self._gradients.bytes_in_flight_peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def sample(self):
        if self.measuring:
            anonymous, shared = resident()
            self.peak_reserved = max(self.peak_reserved, anonymous)
            self.peak_windows = max(self.peak_windows, shared)

    @contextlib.contextmanager
    def measure(self):
        """Counts activations and samples resident memory inside; costs a few microseconds an
        operation."""
        self.measuring = True
        parameters = {id(p) for p in self._model.parameters()}
        windows = {
            _storage(p.zeroshard.view).data_ptr()
            for p in self._model.parameters()
            if hasattr(p, "zeroshard")
        }
        storages = {}

        def pack(tensor):
            key = _storage(tensor).data_ptr()
            if id(tensor) in parameters or key in windows:
                return tensor
            if storages.get(key, 0) == 0:
                self._live += _storage(tensor).nbytes()
                self.peak_activations = max(self.peak_activations, self._live)
            storages[key] = storages.get(key, 0) + 1
            return _Saved(tensor, key)

        def unpack(saved):
            return saved.tensor if isinstance(saved, _Saved) else saved

        class _Saved:
            __slots__ = ("tensor", "key")

            def __init__(saved, tensor, key):
                saved.tensor, saved.key = tensor, key

            def __del__(saved):
                storages[saved.key] -= 1
                if storages[saved.key] == 0:
                    self._live -= _storage(saved.tensor).nbytes()

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield self
        finally:
            self.sample()
            self.measuring = False

    def report(self):
        gradients = self._gradients.bytes_in_flight_peak if self._gradients is not None else 0
        buffers = sum(b.numel() * b.element_size() for b in self._model.buffers())
        if torch.cuda.is_available():
            source, allocated = "cuda", torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
        else:
            source, allocated = "cpu", self.peak_activations + gradients + buffers
            reserved = self.peak_reserved
        return {
            "source": source,
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "activations": self.peak_activations,
            "gradients": gradients,
            "buffers": buffers,
            "windows": self.peak_windows,
        }

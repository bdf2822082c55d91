"""How tensors lie in memory, and how autograd learns that one was written by native code."""

import torch


def is_dense(tensor):
    """Whether every element of a block of memory belongs to the tensor, once: whatever the order of
    the dimensions, the block may then be worked on as one array."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def laid_out_alike(one, other):
    """Of two dense tensors of one shape: whether their elements have the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def as_laid_out(tensor, model):
    """The tensor with its elements in `model`'s order in memory; a copy if need be."""
    if laid_out_alike(tensor, model):
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)


class WriteNotes:
    """Raises the version of tensors, so that a backward pass through an older value is an error, as
    after any in-place operation."""

    def __init__(self):
        self._views = {}

    def note(self, tensors):
        if not tensors:
            return
        increment = getattr(torch._C, "_increment_version", None)
        if increment is not None:
            try:
                increment(tensors)
            except TypeError:  # PyTorch before 2.5 takes one at a time
                for tensor in tensors:
                    increment(tensor)
            return
        torch._foreach_zero_([self._view(tensor) for tensor in tensors])

    def _view(self, tensor):
        """For PyTorch before 2.1: an empty tensor that shares the version, but not the memory."""
        view = self._views.get(tensor)
        if view is None:
            view = tensor.detach()
            view.data = torch.empty(0, dtype=tensor.dtype)
            self._views[tensor] = view
        return view

"""What a parameter is while its values are not here.

A released parameter keeps its shape, data type and identity, but its storage is one NaN and its
class is a subclass whose `__torch_function__` sees every use. Metadata may be read; any use of the
values is handed to `on_touch`, which gathers the parameter if it may be used here and otherwise
raises an error that names it.
"""

import torch

from zeroshard.errors import misuse

_DisableTorchFunction = getattr(
    torch._C, "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction
)


def _metadata_functions():
    tensor = torch.Tensor
    attributes = (
        "shape dtype device layout ndim requires_grad grad grad_fn is_leaf is_cuda is_sparse "
        "is_quantized is_meta is_mkldnn is_cpu is_complex name names output_nr _version "
        "_backward_hooks retains_grad itemsize nbytes _grad is_nested is_mps is_xpu is_vulkan is_ipu is_ort is_xla "
        "is_sparse_csr is_hpu"
    )
    methods = (
        "size numel nelement dim ndimension element_size is_floating_point is_complex is_contiguous "
        "stride requires_grad_ register_hook retain_grad get_device __hash__ __len__ is_signed "
        "storage_offset is_same_size _is_view __bool__ register_post_accumulate_grad_hook is_inference"
    )
    allowed = set()
    for name in attributes.split():
        descriptor = tensor.__dict__.get(name) or getattr(torch._C._TensorBase, name, None)
        if hasattr(descriptor, "__get__") and not callable(descriptor):
            allowed.add(descriptor.__get__)
            if name in ("requires_grad", "grad", "_grad"):
                allowed.add(descriptor.__set__)
                allowed.add(descriptor.__delete__)
    for name in methods.split():
        if hasattr(tensor, name) and name not in ("__len__", "__bool__"):
            allowed.add(getattr(tensor, name))
    allowed.update((torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor))
    return allowed


_METADATA = _metadata_functions()


class ReleasedParameter:
    """Mixed into the class of a released parameter; see the module's text."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _METADATA:
            if getattr(func, "__name__", "") == "__repr__":
                return describe(args[0])
            for parameter in _released(args, kwargs):
                parameter.zeroshard.on_touch(parameter, func)
            if next(_released(args, kwargs), None) is None:
                return func(*args, **kwargs)
        with _DisableTorchFunction():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        self.zeroshard.on_touch(self, self.__deepcopy__)
        return type(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol):
        self.zeroshard.on_touch(self, self.__reduce_ex__)
        return type(self).__reduce_ex__(self, protocol)


def _released(args, kwargs):
    stack = [args, kwargs]
    while stack:
        item = stack.pop()
        if isinstance(item, ReleasedParameter):
            yield item
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())


_classes = {}


def _released_class(original):
    if original not in _classes:
        _classes[original] = type("Released" + original.__name__, (ReleasedParameter, original), {})
    return _classes[original]


class Handle:
    """Attached to a managed parameter as `parameter.zeroshard`."""

    __slots__ = ("name", "index", "on_touch", "original", "released", "placeholder", "view", "born")

    def __init__(self, parameter, name, index, on_touch):
        self.name = name
        self.index = index
        self.on_touch = on_touch
        self.original = type(parameter)
        self.released = _released_class(self.original)
        with torch.no_grad():
            self.placeholder = torch.full(
                (), float("nan"), dtype=parameter.dtype, device=parameter.device
            ).expand(parameter.shape)
        self.view = None
        self.born = None  # values of a parameter that was born sharded; see init.py


def is_released(parameter):
    return isinstance(parameter, ReleasedParameter)


def bind(parameter, data):
    """Shows `data` as the parameter's values."""
    parameter.__class__ = parameter.zeroshard.original
    parameter.data = data


def unbind(parameter):
    """Takes the values away."""
    handle = parameter.zeroshard
    parameter.__class__ = handle.original
    parameter.data = handle.placeholder
    parameter.__class__ = handle.released


def describe(parameter):
    return f"<parameter {parameter.zeroshard.name!r}, held by ZeroShard, not gathered here>"


def refuse(parameter, func):
    """The error of a use that is not allowed."""
    name = parameter.zeroshard.name
    what = getattr(func, "__name__", str(func))
    raise misuse(
        f"parameter {name!r} was used ({what}) outside of the forward pass of the "
        "module that owns it, where its values are not gathered. Use `with zeroshard.zero."
        "GatheredParameters([parameter]):`, or, if a module uses the parameter of another one, zeroshard.register_external_parameter(module, parameter)"
    )


def bump_versions(parameters):
    """Tells autograd that the values changed, as an in-place optimizer would, without touching
    them."""
    with torch.no_grad(), _DisableTorchFunction():
        for parameter in parameters:
            parameter.as_strided((0,), (1,)).zero_()

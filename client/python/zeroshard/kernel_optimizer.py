"""The base of the optimizers of zeroshard.optim: a torch optimizer whose step is a native call."""

import functools
import typing

import torch

from zeroshard import kernel_threads
from zeroshard.backend import native
from zeroshard.errors import invalid
from zeroshard.tensor_layout import WriteNotes, as_laid_out, is_dense, laid_out_alike

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_STATE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable", "lr_decay")
_BLOCK = 256  # elements that share a scale of an 8-bit state


class Forms(typing.NamedTuple):
    """How a group's masters and states are kept."""

    master: str
    states: str
    rounding_seed: int


class _Loaded:
    """A parameter's state on its way through torch's load_state_dict, which would convert the
    tensors of a dictionary to the parameter's type."""

    def __init__(self, values):
        self.values = values


class KernelOptimizer(torch.optim.Optimizer):
    """A subclass gives `kind(group)`, the kernel's name, and `hyper(group)`, its numbers."""

    def __init__(self, params, numbers, options, forms):
        self._start()
        defaults = {
            **numbers,
            **options,
            "foreach": None,
            "fused": None,
            **forms._asdict(),
        }
        super().__init__(params, defaults)

    def _start(self):
        self._native = native().OptimizerStep()
        self._notes = WriteNotes()

    def initial_state(self, group):
        """What a fresh state is filled with."""
        return 0.0

    # The torch interface.

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for position, parameter in enumerate(group["params"]):
                self._check_parameter(group, parameter, position)
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. All or nothing: an error (a sparse
        gradient, a learning rate that is no number, ...) leaves parameters and states alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [self._wire(group) for group in self.param_groups]
        created = []
        prepare = functools.partial(self._prepare, created)
        try:
            updated = self._native.step(kernel_threads.pool(), groups, self.state, prepare)
        except BaseException:
            self._forget(created)
            raise
        self._notes.note(updated)
        return loss

    def load_state_dict(self, state_dict):
        """Takes the state of this class or of its torch namesake. Tensors are copied; states have
        the type that the group says, whatever the parameter's."""
        register = getattr(self, "register_load_state_dict_pre_hook", None)
        if register is None:
            super().load_state_dict(self._converted(state_dict))
            return
        # Last of the hooks, as it hands over what only __setstate__ understands.
        hook = register(lambda _, given: self._converted(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._start()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for parameter, values in self.state.items():
            if isinstance(values, _Loaded):
                self.state[parameter] = values.values

    def refresh_masters(self):
        """To be called after 16-bit parameters were changed by hand (a model's load_state_dict, a
        copy_): the next step then goes on from their values, not from the masters kept so far."""
        for values in self.state.values():
            values.pop("master", None)
            values.pop("master_low", None)

    # Groups.

    def _wire(self, group):
        self._check_options(group)
        try:
            hyper = {key: float(value) for key, value in self.hyper(group).items()}
        except (TypeError, ValueError) as error:
            raise invalid(f"optimizer: a hyperparameter is not a number: {error}") from error
        hyper["nesterov"] = bool(group.get("nesterov", False))
        hyper["bias_correction"] = bool(group.get("bias_correction", True))
        hyper["rounding_seed"] = group["rounding_seed"]
        return {**self._form(group), "hyper": hyper, "params": group["params"]}

    def _form(self, group):
        return {"kind": self.kind(group), "master": group["master"], "states": group["states"]}

    def _check_options(self, group):
        for key in _REFUSED:
            if group.get(key):
                raise invalid(f"{type(self).__name__}: {key}={group[key]!r} is not supported")
        seed = group["rounding_seed"]
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            name = type(self).__name__
            raise invalid(f"{name}: rounding_seed is {seed!r}, expected 0 to 2**64 - 1")

    def _check_group(self, group):
        native().check_hyperparameters(self._wire(group))

    def _check_parameter(self, group, parameter, position=None):
        problem = None
        if parameter.layout is not torch.strided or not parameter.is_cpu:
            problem = f"is {parameter.layout} on {parameter.device}, expected dense on the CPU"
        elif parameter.dtype not in _DTYPES:
            problem = f"is {parameter.dtype}, expected float32, bfloat16 or float16"
        elif parameter.dtype == torch.float16 and group["master"] == "none":
            problem = "is float16; parameters without a master are bfloat16 ones (master='none')"
        elif not is_dense(parameter):
            problem = f"has gaps or overlaps in memory (strides {parameter.stride()}): clone it"
        if problem:
            raise invalid(f"{type(self).__name__}: {self._name(parameter, position)} {problem}")

    def _name(self, parameter, position=None):
        if position is not None:
            return f"parameter {position} of shape {tuple(parameter.shape)}"
        for number, group in enumerate(self.param_groups):
            for position, other in enumerate(group["params"]):
                if other is parameter:
                    shape = tuple(parameter.shape)
                    return f"parameter {position} of group {number}, of shape {shape},"
        return "a parameter"

    # States.

    def _keys(self, group, parameter):
        return native().optimizer_state_keys(self._form(group), _DTYPES[parameter.dtype])

    def _prepare(self, created, number, parameter, gradient):
        """Called by the native step for a parameter that is new or has changed in some way."""
        group = self.param_groups[number]
        self._check_parameter(group, parameter)
        problem = None
        if gradient.layout is not torch.strided:
            problem = f"has a sparse gradient ({gradient.layout}), which is not supported"
        elif not gradient.is_cpu or gradient.shape != parameter.shape:
            problem = f"has a gradient of shape {tuple(gradient.shape)} on {gradient.device}"
        elif gradient.dtype not in (parameter.dtype, torch.float32):
            problem = f"is {parameter.dtype}, its gradient {gradient.dtype}"
        if problem:
            raise invalid(f"{type(self).__name__}: {self._name(parameter)} {problem}")
        keys = self._keys(group, parameter)
        values = self.state[parameter] if keys else {}
        for key, role in keys:
            if values.get(key) is None:
                values[key] = self._new(group, parameter, role)
                created.append((parameter, key))
            else:
                self._check_state(group, parameter, key, role, values[key])
        return as_laid_out(gradient, parameter)

    def _forget(self, created):
        for parameter, key in created:
            values = self.state[parameter]
            values.pop(key, None)
            if not values:
                del self.state[parameter]

    def _type_of(self, group, role):
        if role == "state":
            return _STATE_TYPES[group["states"]]
        return torch.int16 if role == "low" else torch.float32

    def _new(self, group, parameter, role):
        dtype = self._type_of(group, role)
        if role == "step":
            return torch.zeros((), dtype=dtype)
        if role == "absmax":
            return torch.zeros(_blocks(parameter), dtype=dtype)
        if role == "master":
            return torch.empty_like(parameter, dtype=dtype).copy_(parameter)
        fill = self.initial_state(group) if role == "state" else 0
        return torch.full_like(parameter, fill, dtype=dtype)

    def _check_state(self, group, parameter, key, role, value):
        dtypes = (self._type_of(group, role),) + ((torch.float64,) if role == "step" else ())
        elements = {"step": 1, "absmax": _blocks(parameter)}
        wanted = elements.get(role, parameter.numel())
        fits = isinstance(value, torch.Tensor) and value.dtype in dtypes and value.is_cpu
        fits = fits and value.numel() == wanted
        if role not in elements:
            fits = fits and value.shape == parameter.shape and laid_out_alike(value, parameter)
        if not fits:
            raise invalid(
                f"{type(self).__name__}: the state {key!r} of {self._name(parameter)} does not "
                f"fit: expected {wanted} elements of {dtypes[0]}, laid out as the parameter is"
            )

    # Loading.

    def _converted(self, state_dict):
        saved = state_dict["param_groups"]
        places = {}
        for own, other in zip(self.param_groups, saved):
            group = {**self.defaults, **other}
            self._check_group(dict(group, params=own["params"]))
            pairs = zip(other["params"], own["params"])
            places.update({key: (group, parameter) for key, parameter in pairs})
        state = {}
        for key, values in state_dict["state"].items():
            loaded = key in places and isinstance(values, dict)
            state[key] = _Loaded(self._adopted(*places[key], values)) if loaded else values
        return {**state_dict, "state": state}

    def _adopted(self, group, parameter, values):
        """A copy of a saved state in the types that the kernels want."""
        keys = dict(self._keys(group, parameter))
        states = [key for key, role in keys.items() if role == "state"]
        adopted = {}
        for key, value in values.items():
            if value is None:
                continue
            role = keys.get(key)
            if role == "step":
                value = torch.tensor(float(value), dtype=torch.float32)
            elif role is not None and isinstance(value, torch.Tensor):
                value = self._adopt_tensor(group, parameter, key, role, value)
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            adopted[key] = value
        if "step" in keys and "step" not in adopted and all(key in adopted for key in states):
            if self.kind(group) not in ("sgd", "sgd_momentum", "lion"):
                raise invalid(f"{type(self).__name__}: a state to load has no 'step'")
            adopted["step"] = torch.tensor(1.0)
        return adopted

    def _adopt_tensor(self, group, parameter, key, role, value):
        dtype = self._type_of(group, role)
        shape = (_blocks(parameter),) if role == "absmax" else tuple(parameter.shape)
        # Floating-point states are converted; codes and bits mean nothing in another type.
        known = value.is_floating_point() and dtype.is_floating_point or value.dtype == dtype
        if tuple(value.shape) != shape or not known:
            raise invalid(
                f"{type(self).__name__}: the state {key!r} to load has shape {tuple(value.shape)} "
                f"and type {value.dtype}, expected {shape} and {dtype} ({self._name(parameter)})"
            )
        if role == "absmax":
            return value.clone()
        return torch.empty_like(parameter, dtype=dtype).copy_(value)


def _blocks(parameter):
    return (parameter.numel() + _BLOCK - 1) // _BLOCK

"""The optimizer as the trainer sees it: parameter groups with hyperparameters. The update runs in
the workers."""

import json
import math

import torch

from zeroshard.errors import invalid, misuse

_ADAM_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
_SGD_DEFAULTS = {
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
}
_ADAGRAD_DEFAULTS = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}
_LION_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
# By the config's optimizer.type, which is also the name of the client's class: torch.optim's, and
# Lion and the 8-bit ones of whatever package (torch has none).
_DEFAULTS = {
    "AdamW": _ADAM_DEFAULTS,
    "Adam": _ADAM_DEFAULTS,
    "SGD": _SGD_DEFAULTS,
    "Adagrad": _ADAGRAD_DEFAULTS,
    "Lion": _LION_DEFAULTS,
    "AdamW8bit": _ADAM_DEFAULTS,
    "Adam8bit": _ADAM_DEFAULTS,
}
# What the workers' kernels do not do, by the name of the group's entry.
_REFUSED = ("amsgrad", "maximize", "lr_decay", "initial_accumulator_value", "differentiable")


def _defaults_of(kind):
    for name, defaults in _DEFAULTS.items():
        if name.lower() == kind.lower():
            return dict(defaults)
    return dict(_ADAM_DEFAULTS)  # the daemon refuses the type by name


class ShardedOptimizer(torch.optim.Optimizer):
    """Looks like a torch optimizer to schedulers and loggers; what is written to `param_groups`
    (lr, betas, eps, weight_decay, momentum, ...) holds from the next step on."""

    def __init__(self, groups, defaults, client=None):
        super().__init__(groups, dict(defaults))
        self.client = client
        if client is not None:
            self.param_groups = client.param_groups

    def step(self, closure=None):
        raise misuse("call engine.step(): the update of all ranks is one transaction of the daemon")

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def note_step(self):
        """Lets torch's schedulers see that an optimizer step happened before theirs."""
        for optimizer in (self, self.client):
            if optimizer is not None:
                optimizer._step_count = getattr(optimizer, "_step_count", 0) + 1
                optimizer._opt_called = True

    def wire_groups(self):
        return [wire_group(group) for group in self.param_groups]


def wire_group(group):
    """The GroupOptions of one parameter group."""
    try:
        beta1, beta2 = group.get("betas", (0.9, 0.999))
    except (TypeError, ValueError) as error:
        raise invalid(
            f"optimizer: betas: expected two numbers, found {group['betas']!r}"
        ) from error
    options = {
        "lr": group["lr"],
        "weight_decay": group.get("weight_decay", 0.0),
        "beta1": beta1,
        "beta2": beta2,
        "eps": group.get("eps", 1e-8),
        "momentum": group.get("momentum", 0.0),
        "dampening": group.get("dampening", 0.0),
    }
    try:
        options = {key: float(value) for key, value in options.items()}
    except (TypeError, ValueError) as error:
        raise invalid(f"optimizer: a hyperparameter is not a number: {error}") from error
    for key, value in options.items():
        if not math.isfinite(value):
            raise invalid(f"optimizer: {key} is {value}; expected a finite number")
        if value < 0 and key in ("lr", "weight_decay", "eps", "momentum"):
            raise invalid(f"optimizer: {key} is {value}; expected 0 or more")
        if key in ("beta1", "beta2") and not 0 <= value < 1:
            raise invalid(f"optimizer: betas: {value} is not in [0, 1)")
    options["nesterov"] = bool(group.get("nesterov", False))
    options["bias_correction"] = bool(group.get("bias_correction", True))
    return options


def _values_of(client, config):
    """The config values that describe a torch optimizer: those that the file leaves open."""
    name = type(client).__name__
    if name not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise invalid(f"optimizer: {name} is not known; classes of these names are: {known}")
    _refuse_options(name, client)
    first = {k: v for k, v in client.param_groups[0].items() if k != "params"}
    keys = _defaults_of(name)
    params = {k: list(v) if isinstance(v, tuple) else v for k, v in first.items() if k in keys}
    params = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in params.items()}
    if name == "Adam":
        params["adam_w_mode"] = False
    values = {
        "optimizer.type": name,
        **{"optimizer.params." + key: value for key, value in params.items()},
    }
    kind = config.get("optimizer.type")
    if kind is not None and str(kind).lower() != name.lower():
        raise invalid(
            f"optimizer: a torch.optim.{name} was given, but the config's optimizer.type is {kind}"
        )
    return {key: json.dumps(value) for key, value in values.items() if config.get(key) is None}


def _refuse_options(name, client):
    needed = [key for key in ("lr", "betas", "eps", "momentum") if key in _DEFAULTS[name]]
    for group in client.param_groups:
        for key in _REFUSED:
            if group.get(key):
                raise invalid(f"optimizer: {name}({key}={group[key]!r}) is not supported")
        missing = [key for key in needed if key not in group]
        if missing:
            raise invalid(
                f"optimizer: {name} of {type(client).__module__} is not the {name} that is known: "
                f"its parameter groups have no {' and no '.join(missing)}"
            )
    if getattr(client, "decoupled_wd", False):  # lion_pytorch: decay that lr does not scale
        raise invalid(f"optimizer: {name}(decoupled_weight_decay=True) is not supported")


def _as_groups(model_parameters, model):
    if model_parameters is None:
        model_parameters = [p for p in model.parameters() if p.requires_grad]
    model_parameters = list(model_parameters)
    if model_parameters and isinstance(model_parameters[0], dict):
        return [dict(group, params=list(group["params"])) for group in model_parameters]
    return [{"params": model_parameters}]


def make(optimizer, model_parameters, model, config):
    """Returns (ShardedOptimizer or None, overrides). None: no optimizer anywhere, a forward-only
    job."""
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(_as_groups(model_parameters, model))
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise invalid(
                f"optimizer: expected a torch.optim optimizer, found {type(optimizer).__name__}"
            )
        overrides = _values_of(optimizer, config)
        groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        return ShardedOptimizer(groups, optimizer.defaults, optimizer), overrides
    kind = config.get("optimizer.type")
    if kind is None:
        return None, {}
    params = config.get("optimizer.params", {})
    given = {k: v for k, v in params.items() if v is not None and v != "auto"}
    defaults = _defaults_of(str(kind))
    defaults.update({k: v for k, v in given.items() if k in defaults})
    if "betas" in defaults:
        defaults["betas"] = tuple(defaults["betas"])
    groups = [g for g in _as_groups(model_parameters, model) if g["params"]]
    return (ShardedOptimizer(groups, defaults), {}) if groups else (None, {})

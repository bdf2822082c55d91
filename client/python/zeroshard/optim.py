"""The daemon's update kernels for torch tensors, in this process: a faster `torch.optim` on CPUs.

import zeroshard.optim
optimizer = zeroshard.optim.AdamW(model.parameters(), lr=1e-3)  # for torch.optim.AdamW(fused=True)

No daemon is needed. The classes are torch optimizers with their namesakes' arguments: schedulers,
parameter groups, closures and `state_dict` work as they do there; for fp32 parameters the state
dict is torch's, both ways. One step computes exactly what the daemon computes for the same numbers.
There is no undo record: the tensors of a process that is killed die with it, so there is nothing to
roll forward.

Parameters are fp32, bf16 or fp16, dense, on the CPU; gradients have their type or fp32. More
arguments, of every class and of its groups:

- `master`, for bf16 parameters: "split" (default: the 16 bits that the parameter lacks lie beside
  it, `master_low`), "fp32" (a whole copy, `master`) or "none" (stochastic rounding, the same on any
  number of threads). fp16 parameters always have an fp32 master, fp32 ones are their own.
- `states`: "fp32" (default), "bf16", or "int8" (codes and one scale, `..._absmax`, a block of 256).
- `rounding_seed` of the stochastic rounding.

The threads are this module's own, as many as `torch.get_num_threads()` says or `set_threads` sets.
"""

from zeroshard.errors import invalid
from zeroshard.kernel_optimizer import Forms, KernelOptimizer
from zeroshard.kernel_threads import set_threads, threads

__all__ = [
    "AdamW",
    "Adam",
    "SGD",
    "Adagrad",
    "Lion",
    "AdamW8bit",
    "Adam8bit",
    "DeepSpeedCPUAdam",
    "set_threads",
    "threads",
]


def _options(amsgrad, maximize, capturable, differentiable):
    """What torch's classes know and these refuse."""
    return {
        "amsgrad": amsgrad,
        "maximize": maximize,
        "capturable": capturable,
        "differentiable": differentiable,
    }


class _AdamLike(KernelOptimizer):
    def hyper(self, group):
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }


class AdamW(_AdamLike):
    """torch.optim.AdamW. `foreach` and `fused` are taken and mean nothing."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        master="split",
        states="fp32",
        rounding_seed=0,
    ):
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            _options(amsgrad, maximize, capturable, differentiable),
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "adamw"


class Adam(_AdamLike):
    """torch.optim.Adam: the weight decay is added to the gradient."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        foreach=None,
        maximize=False,
        capturable=False,
        differentiable=False,
        fused=None,
        decoupled_weight_decay=False,
        master="split",
        states="fp32",
        rounding_seed=0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
            _options(amsgrad, maximize, capturable, differentiable),
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "adamw" if group.get("decoupled_weight_decay") else "adam"


class AdamW8bit(AdamW):
    """AdamW with 8-bit states (Dettmers et al., 8-bit Optimizers via Block-wise Quantization)."""

    def __init__(self, params, *numbers, **options):
        super().__init__(params, *numbers, **{"states": "int8", **options})


class Adam8bit(Adam):
    """Adam with 8-bit states."""

    def __init__(self, params, *numbers, **options):
        super().__init__(params, *numbers, **{"states": "int8", **options})


class DeepSpeedCPUAdam(_AdamLike):
    """deepspeed.ops.adam.DeepSpeedCPUAdam. `fp32_optimizer_states=False`: states in bf16."""

    def __init__(
        self,
        model_params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        adamw_mode=True,
        fp32_optimizer_states=True,
        *,
        master="split",
        states=None,
        rounding_seed=0,
    ):
        states = states or ("fp32" if fp32_optimizer_states else "bf16")
        super().__init__(
            model_params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adamw_mode": adamw_mode,
            },
            {"amsgrad": amsgrad},
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "adamw" if group["adamw_mode"] else "adam"


class SGD(KernelOptimizer):
    """torch.optim.SGD, with momentum and Nesterov's."""

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        *,
        maximize=False,
        foreach=None,
        differentiable=False,
        fused=None,
        master="split",
        states="fp32",
        rounding_seed=0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            {"maximize": maximize, "differentiable": differentiable},
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "sgd_momentum" if group["momentum"] else "sgd"

    def hyper(self, group):
        return {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay")}


class Adagrad(KernelOptimizer):
    """torch.optim.Adagrad with lr_decay 0."""

    def __init__(
        self,
        params,
        lr=1e-2,
        lr_decay=0.0,
        weight_decay=0.0,
        initial_accumulator_value=0.0,
        eps=1e-10,
        foreach=None,
        *,
        maximize=False,
        differentiable=False,
        fused=None,
        master="split",
        states="fp32",
        rounding_seed=0,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
            },
            {"maximize": maximize, "differentiable": differentiable},
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "adagrad"

    def hyper(self, group):
        return {key: group[key] for key in ("lr", "eps", "weight_decay")}

    def initial_state(self, group):
        return group["initial_accumulator_value"]

    def _check_options(self, group):
        super()._check_options(group)
        if not 0 <= group["initial_accumulator_value"] < float("inf"):
            raise invalid("Adagrad: initial_accumulator_value is not a finite number from 0")


class Lion(KernelOptimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms), decoupled weight decay."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        *,
        master="split",
        states="fp32",
        rounding_seed=0,
    ):
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            {},
            Forms(master, states, rounding_seed),
        )

    def kind(self, group):
        return "lion"

    def hyper(self, group):
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
        }

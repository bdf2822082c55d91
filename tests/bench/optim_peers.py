"""zeroshard.optim.AdamW in a script of its own against torch.optim.AdamW(fused=True) of PyTorch 2.x.

    tests/bench/run optim [--smoke] [--blocks=N]

One thread, fp32. The small tensors show what a step costs beside arithmetic; processor time is compared, so that other
work on the machine counts for neither side. Both sides take the same steps, and afterwards their parameters are compared.
"""

import os
import pathlib
import sys
import time

import paired

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "python")]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
# Tensors, elements of each, steps of one measurement, and what is asked for.
SHAPES = [(10_000, 10, 5, "<= 0.6"), (10_000, 1_000, 5, "<= 1"), (1, 16_000_000, 5, "<= 1.1")]


class Side:
    """One optimizer over its own copy of the parameters."""

    def __init__(self, make, tensors, elements):
        import torch

        generator = torch.Generator().manual_seed(1)
        values = torch.randn(tensors, elements, generator=generator)
        gradients = torch.randn(tensors, elements, generator=generator)
        self.parameters = [torch.nn.Parameter(row.clone()) for row in values]
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient.clone()
        self.optimizer = make(self.parameters)
        self.steps = 0

    def milliseconds(self, steps):
        begin = time.process_time()
        for _ in range(steps):
            self.optimizer.step()
        self.steps += steps
        return (time.process_time() - begin) / steps * 1e3


def main():
    options = paired.parser(__doc__).parse_args()
    import torch
    import real_daemon
    from zeroshard import optim

    real_daemon.load_native(BINARIES)
    torch.set_num_threads(1)
    bench = paired.Bench("optim", options.smoke)
    for tensors, elements, steps, target in SHAPES:
        if options.smoke:
            tensors, elements, steps = min(tensors, 100), min(elements, 1000), 1
        ours = Side(lambda p: optim.AdamW(p), tensors, elements)
        theirs = Side(lambda p: torch.optim.AdamW(p, fused=True), tensors, elements)
        sides = {"ours": lambda: ours.milliseconds(steps), "torch": lambda: theirs.milliseconds(steps)}
        found = paired.blocks(1 if options.smoke else options.blocks, sides)
        figure = f"AdamW step of {tensors} x {elements} elements"
        vs = f"PyTorch {torch.__version__} fused"
        bench.compare(figure, vs, "ms", found["ours"], found["torch"], target)
        far = max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters, theirs.parameters))
        bench.require(ours.steps == theirs.steps and far < 1e-5, f"{figure}: parameters differ by {far}")
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

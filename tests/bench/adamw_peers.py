"""AdamW with bf16 gradients in and bf16 parameters out against what DeepSpeed and PyTorch do on a CPU.

    tests/bench/run adamw [--smoke] [--blocks=N] [--elements=N]

256 Mi parameters, 2 threads. This project's side is the program //tests/bench:adamw, whose update runs under crash
protection, with an fp32 master and with the split one. The peers work on the same number of elements, in this process:

  DeepSpeed, three passes  what ZeRO-Offload does: gradients cast to fp32, DeepSpeedCPUAdam, fp32 parameters copied to bf16
  DeepSpeed's kernel       DeepSpeedCPUAdam alone: fp32 gradients in, fp32 parameters out
  PyTorch, three passes    the same casts around torch.optim.AdamW(fused=True)

Their memory is prefaulted and asks for huge pages. Before anything is timed all of them are checked against the formula.
"""

import os
import pathlib
import subprocess
import sys
import time

import paired
import peer_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
THREADS = 2
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
PEERS = {
    "deepspeed": ("DeepSpeed, three passes", ">= 1.6"),
    "kernel": ("DeepSpeed's kernel alone, fp32 in and out", ">= 1.05"),
    "torch": ("PyTorch fused, three passes", ">= 1.5"),
}
FORMS = {"fp32 master": [], "split master": ["--split"]}


class Served:
    """The program adamw, which runs updates when told and sleeps otherwise."""

    def __init__(self, program, elements, options):
        command = [program, "--serve", f"--elements={elements}", f"--threads={THREADS}", *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._line().split()
        if ready[:1] != ["ready"] or int(ready[1]) != elements:
            raise SystemExit(f"adamw: expected \"ready {elements}\", found {ready}")

    def check(self):
        return self._ask("check")

    def seconds(self):
        return float(self._ask("run 1"))

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)

    def _ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"adamw: the program ended with status {self.process.wait()}")
        return line.strip()


class Peers:
    """The peers' updates of one set of tensors; DeepSpeed and PyTorch share parameters and states."""

    def __init__(self, elements):
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        torch.set_num_threads(THREADS)
        generator = torch.Generator().manual_seed(1)
        self.gradient16 = torch.empty(elements, dtype=torch.bfloat16)
        self.gradient16.normal_(std=1e-3, generator=generator)
        self.master = torch.nn.Parameter(torch.empty(elements).normal_(generator=generator))
        self.master.grad = self.gradient16.float()
        self.parameter16 = self.master.detach().to(torch.bfloat16)
        options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        self.by_deepspeed = DeepSpeedCPUAdam([self.master], adamw_mode=True, **options)
        self.by_deepspeed.step()
        self.by_torch = torch.optim.AdamW([self.master], fused=True, **options)
        state = self.by_deepspeed.state[self.master]
        self.by_torch.state[self.master] = {
            "step": torch.tensor(1.0),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }

    def deepspeed(self):
        return self._timed(self._three_passes, self.by_deepspeed)

    def kernel(self):
        return self._timed(self.by_deepspeed.step)

    def torch(self):
        return self._timed(self._three_passes, self.by_torch)

    def _three_passes(self, optimizer):
        self.master.grad.copy_(self.gradient16)
        optimizer.step()
        self.parameter16.copy_(self.master.detach())

    def _timed(self, function, *arguments):
        begin = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - begin


def wrong_of(optimizer, elements=100_003):
    """One update of `optimizer`'s side on a small problem against the formula in fp64: the largest error relative to the
    change."""
    peers = Peers(elements)
    state = peers.by_deepspeed.state[peers.master]
    p, m, v = (t.detach().double() for t in (peers.master, state["exp_avg"], state["exp_avg_sq"]))
    g = peers.gradient16.double()
    getattr(peers, optimizer)()
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    denominator = (v / (1 - BETAS[1] ** 2)).sqrt() + EPS
    expected = p * (1 - LR * DECAY) - LR * m / (1 - BETAS[0] ** 2) / denominator
    error = (peers.master.detach().double() - expected).abs().max() / (expected - p).abs().max()
    if optimizer != "kernel":
        assert (peers.parameter16 == peers.master.detach().to(peers.parameter16.dtype)).all()
    return float(error)


def measure(bench, arguments):
    program = str(pathlib.Path(arguments.binaries).resolve() / "tests/bench/adamw")
    for name, (title, _) in PEERS.items():
        error = wrong_of(name)
        bench.require(error < 1e-3, f"{title}: an update is off by {error:.2g} of its size")
    served = {form: Served(program, arguments.elements, o) for form, o in FORMS.items()}
    try:
        _check(bench, served)
        peers = Peers(arguments.elements)
        sides = {form: server.seconds for form, server in served.items()}
        sides.update({name: getattr(peers, name) for name in PEERS})
        times = paired.blocks(arguments.blocks, sides)
        _check(bench, served)
        return times
    finally:
        for server in served.values():
            server.close()


def _check(bench, served):
    for form, server in served.items():
        answer = server.check()
        bench.require(answer == "ok", f"AdamW, {form}: {answer}")


def main():
    parser = paired.parser(__doc__)
    parser.add_argument("--elements", type=int)
    parser.add_argument(
        "--binaries", default=os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin")
    )
    arguments = parser.parse_args()
    arguments.blocks = 1 if arguments.smoke else arguments.blocks
    arguments.elements = arguments.elements or (1 << 20 if arguments.smoke else 256 << 20)
    peer_environment.prepare()
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    bench = paired.Bench("adamw", arguments.smoke)
    times = measure(bench, arguments)
    rates = {name: [arguments.elements / t / 1e6 for t in values] for name, values in times.items()}
    for form in FORMS:
        for name, (title, target) in PEERS.items():
            figure = f"AdamW, {form}, protected"
            bench.compare(figure, title, "M elements/s", rates[form], rates[name], target)
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

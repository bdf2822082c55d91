"""AdamW with bf16 gradients in and bf16 parameters out against what DeepSpeed and PyTorch do on a
CPU.

    tests/bench/run adamw [--smoke] [--blocks=N] [--elements=N]

256 Mi parameters, 2 threads. This project's side is the program //tests/bench:adamw, whose update
runs under crash protection: with the split master, the default of bf16 jobs, and with an fp32
master, reported only. The peers update as many elements in this process:

  DeepSpeed, three passes  what ZeRO-Offload does: gradients cast to fp32, DeepSpeedCPUAdam, fp32
                           parameters copied to bf16
  DeepSpeed's kernel       DeepSpeedCPUAdam alone: fp32 gradients in, fp32 parameters out
  PyTorch, three passes    the same casts around torch.optim.AdamW(fused=True)

This project's side and PyTorch have huge pages; DeepSpeed has small ones, which are better for it
(huge ones, or arrays at multiples of 2 MiB, cost its kernel a fifth). A kernel may have no huge
pages for memory files, in which a worker's states lie, so the figures against DeepSpeed are
reported for memory files as well, and not judged. All memory is touched before, and before anything
is timed all sides are checked against the formula.
"""

import mmap
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
FORMS = {"fp32 master": [], "split master": ["--split"]}
JUDGED = "split master"


class Served:
    """The program adamw, which runs updates when told and sleeps otherwise."""

    def __init__(self, program, elements, options):
        command = [program, "--serve", f"--elements={elements}", f"--threads={THREADS}", *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._line().split()
        if ready[:1] != ["ready"] or int(ready[1]) != elements:
            raise SystemExit(f'adamw: expected "ready {elements}", found {ready}')

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


def huge(elements, dtype):
    """A tensor of zeros in huge pages, if the kernel has any."""
    import torch

    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).zero_()


class Peer:
    """Parameters, gradients and states of one optimizer, and the two casts around it."""

    def __init__(self, elements, allocate):
        import torch

        torch.set_num_threads(THREADS)
        generator = torch.Generator().manual_seed(1)
        self.gradient16 = allocate(elements, torch.bfloat16).normal_(std=1e-3, generator=generator)
        master = allocate(elements, torch.float32).normal_(generator=generator)
        self.master = torch.nn.Parameter(master)
        self.master.grad = allocate(elements, torch.float32).copy_(self.gradient16)
        self.parameter16 = allocate(elements, torch.bfloat16).copy_(master)
        self.exp_avg = self.exp_avg_sq = None
        self.options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

    def kernel(self):
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def three_passes(self):
        begin = time.perf_counter()
        self.master.grad.copy_(self.gradient16)
        self.optimizer.step()
        self.parameter16.copy_(self.master.detach())
        return time.perf_counter() - begin


class DeepSpeed(Peer):
    def __init__(self, elements):
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        super().__init__(elements, lambda n, dtype: torch.zeros(n, dtype=dtype))
        self.optimizer = DeepSpeedCPUAdam([self.master], adamw_mode=True, **self.options)
        self.optimizer.step()
        state = self.optimizer.state[self.master]
        self.exp_avg, self.exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]

    def sides(self):
        return {
            ("DeepSpeed, three passes", ">= 1.6"): self.three_passes,
            ("DeepSpeed's kernel alone, fp32 in and out", ">= 1.05"): self.kernel,
        }


class Torch(Peer):
    def __init__(self, elements):
        import torch

        super().__init__(elements, huge)
        self.optimizer = torch.optim.AdamW([self.master], fused=True, **self.options)
        self.exp_avg, self.exp_avg_sq = (huge(elements, torch.float32) for _ in range(2))
        self.optimizer.state[self.master] = {
            "step": torch.tensor(0.0),
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        self.optimizer.step()

    def sides(self):
        return {("PyTorch fused, three passes", ">= 1.5"): self.three_passes}


def error_of(kind, elements=100_003):
    """The second update of a small problem against the formula in fp64: the largest error relative
    to the largest change."""
    peer = kind(elements)
    p, m, v = (t.detach().double() for t in (peer.master, peer.exp_avg, peer.exp_avg_sq))
    g = peer.gradient16.double()
    peer.three_passes()
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    denominator = (v / (1 - BETAS[1] ** 2)).sqrt() + EPS
    expected = p * (1 - LR * DECAY) - LR * m / (1 - BETAS[0] ** 2) / denominator
    difference = (peer.master.detach().double() - expected).abs().max()
    rounded = peer.master.detach().to(peer.parameter16.dtype)
    return float(difference / (expected - p).abs().max()) if rounded.equal(peer.parameter16) else 1


def compare(bench, arguments, kind, pages):
    """Figures of both forms against one peer."""
    program = str(pathlib.Path(arguments.binaries).resolve() / "tests/bench/adamw")
    served = {f: Served(program, arguments.elements, [*o, *pages]) for f, o in FORMS.items()}
    try:
        check(bench, served)
        peer = kind(arguments.elements)
        sides = {form: server.seconds for form, server in served.items()}
        times = paired.blocks(arguments.blocks, {**sides, **peer.sides()})
        check(bench, served)
    finally:
        for server in served.values():
            server.close()
    rates = {side: [arguments.elements / t / 1e6 for t in values] for side, values in times.items()}
    for form in FORMS:
        where = "huge pages" if pages else "memory files"
        for title, target in peer.sides():
            bench.compare(
                f"AdamW, {form}, protected, {where}",
                title,
                "M elements/s",
                rates[form],
                rates[(title, target)],
                target if pages and form == JUDGED else None,
            )


def check(bench, served):
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
    bench = paired.Bench("adamw", arguments.smoke)
    for kind in (DeepSpeed, Torch):
        error = error_of(kind)
        bench.require(error < 1e-3, f"{kind.__name__}: an update is off by {error:.2g} of its size")
    compare(bench, arguments, DeepSpeed, ["--huge"])
    compare(bench, arguments, Torch, ["--huge"])
    compare(bench, arguments, DeepSpeed, [])
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

"""PyTorch's side of the benchmark `reduce`: ranks that sum gradients over Gloo.

Run by tests/bench/reduce with the interpreter of tests/bench/peers; speaks on standard input and output:

    ready VARIANT     after start: every rank stands, and this is the fastest right way to do it
    run N          -> N numbers: the seconds of one sum each
    end

The ways are reduce_scatter and all_reduce, of bf16 (rounded after every addition) and of fp32 numbers.
"""

import argparse
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


class Sum:
    """One way to sum; every run overwrites its input with part of its output."""

    def __init__(self, name, dtype, scatters, elements):
        self.name, self.scatters = name, scatters
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.input = torch.empty(elements, dtype=dtype)
        self.output = torch.empty(elements // self.ranks, dtype=dtype) if scatters else None

    def run(self):
        if self.scatters:
            dist.reduce_scatter_tensor(self.output, self.input)
        else:
            dist.all_reduce(self.input)

    def right(self):
        """Whether small whole numbers come out exactly."""
        values = torch.arange(self.input.numel()) % 7
        self.input.copy_(values + self.rank)
        self.run()
        part = self.input.numel() // self.ranks
        mine = slice(self.rank * part, (self.rank + 1) * part)
        got = self.output if self.scatters else self.input[mine]
        wanted = values[mine] * self.ranks + self.ranks * (self.ranks - 1) // 2
        return bool((got.to(torch.int64) == wanted).all())


def order(value):
    """What rank 0 tells the others."""
    tensor = torch.tensor(value)
    dist.broadcast(tensor, 0)
    return tensor.tolist()


def timed(way):
    dist.barrier()
    start = time.perf_counter()
    way.run()
    return time.perf_counter() - start


def agree(value):
    """The largest of all ranks' values."""
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def fastest(elements):
    best, best_seconds = None, float("inf")
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for scatters, verb in ((True, "reduce_scatter"), (False, "all_reduce")):
            try:
                way = Sum(f"{verb} {word}", dtype, scatters, elements)
                wrong = not way.right()
            except RuntimeError:  # Gloo has no such operation; every rank finds so
                continue
            if agree(wrong) != 0:
                continue
            seconds = min(agree(timed(way)) for _ in range(3))
            if seconds < best_seconds:
                best, best_seconds = way, seconds
    return best


def serve(rank, ranks, elements, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    way = fastest(elements)
    if rank == 0:
        print("ready", way.name, flush=True)
    while True:
        count = 0
        if rank == 0:
            words = sys.stdin.readline().split()
            count = int(words[1]) if words[:1] == ["run"] else 0
        count = order(count)
        if count == 0:
            break
        seconds = [timed(way) for _ in range(count)]
        if rank == 0:
            print(*seconds, flush=True)
    dist.destroy_process_group()


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, required=True)
    options.add_argument("--elements", type=int, required=True)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(
                target=serve, args=(rank, arguments.ranks, arguments.elements, store), daemon=True
            )
            for rank in range(1, arguments.ranks)
        ]
        for process in others:
            process.start()
        serve(0, arguments.ranks, arguments.elements, store)
        for process in others:
            process.join()


if __name__ == "__main__":
    main()

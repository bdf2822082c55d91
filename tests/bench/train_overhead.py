"""A training step of the quickstart's model through the engine against plain PyTorch DDP with Gloo.

    tests/bench/run train_overhead [--smoke] [--blocks=N]

Two rank processes train both, step by step in blocks A B B A, so that both sides see the same
machine even when its speed wanders. Both do the same work with the same seed and data: fp32 (Gloo
of PyTorch 1.13 cannot reduce bf16), AdamW, clipping by the global norm. One JSON line a stage: the
median ratio of the blocks and its bootstrap 95 % interval. The losses of both sides are compared in
the same run, and a figure without equal losses does not count.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import paired

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "python")]

TARGET = "<= 1.03"
RANKS = 2
MODEL = {"width": 128, "layers": 4, "heads": 4, "context": 128}
SMALL = {"width": 32, "layers": 1, "heads": 2, "context": 32}
BATCH = 8
PERSISTENCE = {"stage3_param_persistence_threshold": 10_000}


class Ddp:
    """The peer: PyTorch's DistributedDataParallel over Gloo and torch.optim.AdamW."""

    def __init__(self, model, lr):
        import torch

        self.torch = torch
        self.model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, weight_decay=0.1, foreach=True
        )

    def step(self, inputs, targets):
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.item()


class Sharded:
    """This project's engine."""

    def __init__(self, model, lr, stage, job):
        import zeroshard

        params = {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
        self.engine, *_ = zeroshard.initialize(
            model=model,
            job=job,
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": stage, **(PERSISTENCE if stage == 3 else {})},
                "optimizer": {"type": "AdamW", "params": params},
            },
        )

    def step(self, inputs, targets):
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def loss_of(logits, targets):
    import torch

    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rank_main(arguments):
    """One rank; rank 0 prints the block times as JSON."""
    import torch

    import real_daemon
    from zeroshard import backend
    from zeroshard.examples.char_gpt import CharGpt

    torch.set_num_threads(1)
    backend.use(real_daemon.load_native(pathlib.Path(arguments.binaries)))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.rendezvous}", rank=arguments.rank, world_size=RANKS
    )
    shape = SMALL if arguments.smoke else MODEL
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(CharGpt(100, **shape))
    sides = {
        "engine": Sharded(models[0], 1e-4, arguments.stage, f"bench{arguments.stage}"),
        "ddp": Ddp(models[1], 1e-4),
    }
    losses = {name: [] for name in sides}

    def block(name, steps):
        side, start = sides[name], len(losses[name])
        batches = [batch(start + i, arguments.rank, shape["context"]) for i in range(steps)]
        torch.distributed.barrier()
        begin = time.perf_counter()
        losses[name] += [side.step(*b) for b in batches]
        torch.distributed.barrier()
        return (time.perf_counter() - begin) / steps

    for name in sides:
        block(name, 2 if arguments.smoke else 5)  # the recorded order and the allocators settle
    steps = {name: functools.partial(block, name, arguments.steps) for name in sides}
    times = paired.blocks(arguments.blocks, steps, first=0)
    if arguments.rank == 0:
        print(json.dumps({"times": times, "losses": losses}))
    sides["engine"].engine.destroy()


def batch(number, rank, context):
    import torch

    generator = torch.Generator().manual_seed(number * RANKS + rank)
    rows = torch.randint(100, (BATCH, context + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def measure(arguments, stage, daemon, directory):
    children = []
    for rank in range(RANKS):
        command = [sys.executable, __file__, "--rank", str(rank), "--stage", str(stage)]
        command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
        command += ["--binaries", str(daemon.binaries), "--rendezvous", f"{directory}/meet{stage}"]
        command += ["--smoke"] if arguments.smoke else []
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
            "ZEROSHARD_SOCKET": daemon.socket,
        }
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    outputs = [child.communicate(timeout=900)[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(2)
    return json.loads(outputs[0])


def report(bench, stage, found):
    times, losses = found["times"], found["losses"]
    difference = max(abs(a - b) for a, b in zip(losses["engine"], losses["ddp"]))
    bench.require(difference < 1e-3, f"the losses at stage {stage} differ by {difference}")
    milliseconds = {name: [1e3 * t for t in values] for name, values in times.items()}
    bench.compare(
        f"step at stage {stage}",
        "PyTorch DDP with Gloo",
        "ms",
        milliseconds["engine"],
        milliseconds["ddp"],
        TARGET,
        losses_differ_by=round(difference, 5),
    )


def main():
    parser = paired.parser(__doc__, blocks=24)
    parser.add_argument(
        "--steps", type=int, default=1, help="steps of each side between two of the other"
    )
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument(
        "--binaries", default=os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin")
    )
    parser.add_argument("--rank", type=int)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--rendezvous")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
        return 0
    import real_daemon

    if arguments.smoke:
        arguments.blocks, arguments.steps = 1, 2
    bench = paired.Bench("train_overhead", arguments.smoke)
    with tempfile.TemporaryDirectory() as directory:
        daemon = real_daemon.Daemon(
            pathlib.Path(arguments.binaries).resolve(), pathlib.Path(directory), timeout="120s"
        )
        try:
            for stage in (int(s) for s in arguments.stages.split(",")):
                report(bench, stage, measure(arguments, stage, daemon, directory))
        finally:
            daemon.stop()
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

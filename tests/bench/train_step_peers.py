"""A training step of a GPT with 124 million parameters against DeepSpeed ZeRO-2 CPU offload and
PyTorch FSDP2 over Gloo.

    tests/bench/run train_step [--smoke] [--blocks=N]

2 ranks, 1 thread each, bf16, AdamW, clipping by the global norm; 4 sequences of 128 tokens a rank,
as in fine-tuning on such a machine. Each framework and the plain module have a pair of processes of
their own with the same seed and data; one pair works while the others sleep. A block is P A B C C B
A P, one step each. Figures, against each peer, so that the better one decides: the whole step, and
the part that is not forward-backward: the step less that of the plain module (forward and backward
of the same bf16 module alone, no communication, no update) in the same block. The losses of all
sides must agree.
"""

import os
import pathlib
import sys
import tempfile

import paired
from training_ranks import GPT, SMALL, Ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

PEERS = {"deepspeed": "DeepSpeed ZeRO-2 CPU offload", "fsdp": "PyTorch FSDP2 with Gloo"}
LOSS_TOLERANCE = 0.005  # relative, at every step


def measure(arguments, directory, daemon):
    """Returns (side -> seconds a step, two values a block; side -> losses)."""
    shape = (
        {**SMALL, "batch": 2, "length": 32}
        if arguments.smoke
        else {**GPT, "batch": 4, "length": 128}
    )
    shape["bucket"] = int(5e8)
    ranks = {}
    try:
        for side in ("plain", "zeroshard", *PEERS):
            ranks[side] = Ranks(side, shape, daemon.binaries, directory, daemon.socket)
            ranks[side].ask("build")
        steps = {side: lambda r=r: r.steps(arguments.steps) for side, r in ranks.items()}
        times = paired.blocks(arguments.blocks, steps, first=2)
        return times, {side: r.losses for side, r in ranks.items()}
    finally:
        for running in ranks.values():
            running.close()


def report(bench, times, losses):
    ours = losses["zeroshard"]
    bench.require(min(ours) < ours[0], "the loss did not fall")
    milliseconds = {side: [1e3 * t for t in values] for side, values in times.items()}
    rest = {
        side: [t - p for t, p in zip(values, milliseconds["plain"])]
        for side, values in milliseconds.items()
    }
    for peer, name in PEERS.items():
        difference = max(abs(a - b) / b for a, b in zip(ours, losses[peer]))
        bench.require(
            difference <= LOSS_TOLERANCE, f"losses differ from {name}'s by {difference:.2%}"
        )
        more = {"losses_differ_by": round(difference, 5)}
        step = (milliseconds["zeroshard"], milliseconds[peer], "<= 0.85")
        bench.compare("step", name, "ms", *step, **more)
        step = (rest["zeroshard"], rest[peer], "<= 0.45")
        bench.compare("step without forward-backward", name, "ms", *step)
    bench.absolute(
        "forward-backward", "ms", sorted(milliseconds["plain"])[len(times["plain"]) // 2]
    )


def main():
    parser = paired.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1, help="steps of a side between two others")
    parser.add_argument(
        "--binaries", default=os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin")
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.blocks = 1
    import real_daemon

    bench = paired.Bench("train_step", arguments.smoke)
    with tempfile.TemporaryDirectory() as directory:
        binaries = pathlib.Path(arguments.binaries).resolve()
        daemon = real_daemon.Daemon(binaries, pathlib.Path(directory), timeout="600s")
        try:
            report(bench, *measure(arguments, directory, daemon))
        finally:
            daemon.stop()
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

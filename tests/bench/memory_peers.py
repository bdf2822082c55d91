"""Peak memory a parameter while training at stage 2 on the host tier, against the ledger and
DeepSpeed's CPU offload.

    tests/bench/run memory [--smoke]

2 ranks train a GPT of 308 million parameters, 2 % of them in the embedding (as in one of 7
billion), in bf16 with AdamW. Counted are all processes of the job: trainers, daemon and workers;
private memory, files by proportional set size, memory files once. What the same two trainers use
before they have this model, after some steps of one layer of it (libraries, process group, threads;
not the daemon), is subtracted. The peak is taken over training steps with so few tokens that
activations do not count; the peak while the model is built is reported beside it. Both have the
same reduce_bucket_size, and an allocator that gives freed tensors back at once.
"""

import os
import pathlib
import sys
import tempfile

import memory_of
import paired
from training_ranks import SMALL, Ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

LIMIT, AGAINST_DEEPSPEED = 16.6, 0.75
TOKENS = 4
MODEL = {"vocabulary": 6144, "width": 1024, "layers": 24, "heads": 16, "context": 1024}
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def measure(side, arguments, directory, daemon):
    """Peaks of one framework and what they are made of, in bytes."""
    shape = {**(SMALL if arguments.smoke else MODEL), "batch": 1, "length": TOKENS}
    shape["bucket"] = int(arguments.bucket)
    socket = daemon.socket if daemon else ""
    with Ranks(side, shape, arguments.binaries, directory, socket, ALLOCATOR) as ranks:
        ranks.ask("warm")
        before = sum(memory_of.all_of(ranks.pids()).values())

        def pids():
            return ranks.pids() + (memory_of.tree(daemon.process.pid) if daemon else [])

        with memory_of.Peak(pids) as build:
            parameters = ranks.ask("build")[0]["parameters"]
        ranks.steps(1)
        with memory_of.Peak(pids) as steps:
            ranks.steps(arguments.steps)
        return {
            "steps": steps.bytes - before,
            "build": build.bytes - before,
            "parameters": parameters,
            "parts": {**steps.parts, "baseline": before},
            "samples": steps.samples,
            "ledger": ranks.ask("ledger")[0]["bytes"] if daemon else None,
        }


def report(bench, ours, theirs):
    def a_parameter(found, key="steps"):
        return found[key] / found["parameters"]

    bench.absolute(
        "peak of a step, all processes of the job",
        "bytes a parameter",
        a_parameter(ours),
        f"<= {LIMIT}",
        ledger=round(a_parameter(ours, "ledger"), 3),
        parts_mib={name: value >> 20 for name, value in ours["parts"].items()},
        deepspeed_parts_mib={name: value >> 20 for name, value in theirs["parts"].items()},
        samples=ours["samples"],
    )
    shared = ours["parts"]["shared"]
    bench.require(shared <= ours["ledger"], f"{shared} bytes are shared: more than in the ledger")
    for figure, key, target in (
        ("peak of a step, of DeepSpeed ZeRO-2 CPU offload's", "steps", f"<= {AGAINST_DEEPSPEED}"),
        ("peak while the model is built, of DeepSpeed's", "build", None),
    ):
        a, b = a_parameter(ours, key), a_parameter(theirs, key)
        bench.absolute(figure, "ratio", a / b, target, a=round(a, 3), b=round(b, 3))


def main():
    parser = paired.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bucket", type=float, default=5e6, help="reduce_bucket_size of both")
    parser.add_argument(
        "--binaries", default=os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin")
    )
    arguments = parser.parse_args()
    import real_daemon

    bench = paired.Bench("memory", arguments.smoke)
    with tempfile.TemporaryDirectory() as directory:
        arguments.binaries = pathlib.Path(arguments.binaries).resolve()
        daemon = real_daemon.Daemon(arguments.binaries, pathlib.Path(directory), timeout="120s")
        try:
            ours = measure("zeroshard", arguments, directory, daemon)
        finally:
            daemon.stop()
        theirs = measure("deepspeed", arguments, directory, None)
    report(bench, ours, theirs)
    return bench.status()


if __name__ == "__main__":
    sys.exit(main())

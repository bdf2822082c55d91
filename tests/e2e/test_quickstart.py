"""deploy/quickstart, run as a user runs it; the build is taken from $ZEROSHARD_BIN_DIR (default:
bazel-bin)."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))

pytestmark = pytest.mark.skipif(
    not (BINARIES / "worker/zeroshard-worker").exists(),
    reason="the daemon is not built; tests/run e2e builds it",
)

SMALL = [
    "--width",
    "64",
    "--layers",
    "2",
    "--context",
    "64",
    "--micro-batch",
    "4",
    "--sample",
    "40",
]


def run(out, *options, expect=0):
    environment = {**os.environ, "ZEROSHARD_BIN_DIR": str(BINARIES)}
    done = subprocess.run(
        [str(ROOT / "deploy/quickstart"), "--out", str(out), *SMALL, *options],
        env=environment,
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def summary(out):
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("stage,ranks,workers", [(1, 2, 2), (2, 3, 1), (3, 2, 3)])
def test_trains_and_reports(tmp_path, stage, ranks, workers):
    output = run(
        tmp_path,
        "--stage",
        str(stage),
        "--ranks",
        str(ranks),
        "--workers",
        str(workers),
        "--steps",
        "25",
        "--json",
        str(tmp_path / "other.json"),
    )
    found = summary(tmp_path)
    assert found == json.loads((tmp_path / "other.json").read_text())
    assert found["stage"] == stage and found["ranks"] == ranks and len(found["losses"]) == 25
    assert sum(found["losses"][-5:]) < sum(found["losses"][:5]) - 0.5
    for name in ("loss.png", "model.safetensors", "sample.txt"):
        assert (tmp_path / name).stat().st_size > 0
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "Where the state lives" in output and "Sample, by plain PyTorch" in output
    check_ledger(found, workers)


def check_ledger(found, workers):
    """Every kind of state: the sum over the workers is what the formula says, for P parameters."""
    size = found["parameters"]
    per_parameter = {
        "parameters": 2,
        "gradients": 4,
        "master, low halves": 2,
        "exp_avg": 4,
        "exp_avg_sq": 4,
    }
    for state, factor in per_parameter.items():
        lines = [
            line
            for line in found["ledger"]
            if line["state"] == state and line["holder"].startswith("worker")
        ]
        if state != "parameters" or found["stage"] == 3:
            assert sum(line["bytes"] for line in lines) == factor * size, state
            assert len(lines) == workers


def test_loss_curve_equals_plain_pytorch(tmp_path):
    """The same script trained by PyTorch alone with the same precision recipe; fp32 and bf16."""
    for dtype, tolerance in (("fp32", 1e-4), ("bf16", 2e-2)):
        curves = []
        for more in ([], ["--plain"]):
            out = tmp_path / (dtype + "".join(more))
            run(out, "--steps", "20", "--dtype", dtype, "--lr", "3e-4", *more)
            curves.append(summary(out)["losses"])
        assert curves[0][0] == pytest.approx(curves[1][0], abs=1e-6)
        assert curves[0] == pytest.approx(curves[1], abs=tolerance)


def test_recomputation_does_not_change_the_curve(tmp_path):
    run(tmp_path / "a", "--steps", "6", "--dtype", "fp32")
    run(tmp_path / "b", "--steps", "6", "--dtype", "fp32", "--recompute", "--accumulation", "1")
    assert summary(tmp_path / "a")["losses"] == summary(tmp_path / "b")["losses"]
    assert (
        summary(tmp_path / "b")["memory"]["activations"]
        < summary(tmp_path / "a")["memory"]["activations"]
    )


# 13 M parameters with 16-bit sums of gradients, small buckets and little staging.
FRUGAL = {
    "train_micro_batch_size_per_gpu": 1,
    "data_types": {"grad_accum_dtype": "bf16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 10000,
        "stage3_max_live_parameters": 1000000,
        "stage3_prefetch_bucket_size": 500000,
        "reduce_bucket_size": 700000,
        "sub_group_size": 50000,
    },
}


def frugal_on_nvme():
    place = {"device": "nvme", "buffer_count": 2}
    zero = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    return {
        **FRUGAL,
        "aio": {"queue_depth": 2},
        "zeroshard": {"host_limit": HOST_LIMIT},
        "zero_optimization": {**FRUGAL["zero_optimization"], **zero},
    }


HOST_LIMIT = 48_000_000  # of memory, all windows included


def test_offloaded_to_nvme_a_model_of_four_times_the_memory_trains_the_same(tmp_path):
    large = ["--width", "384", "--layers", "7", "--context", "16", "--micro-batch", "1", "--ranks", "1"]
    models = []
    for name, config in (("host", FRUGAL), ("nvme", frugal_on_nvme())):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        out = tmp_path / name
        output = run(out, *large, "--steps", "3", "--offload", name.replace("host", "none"), "--config", str(file))
        models.append((summary(out)["losses"], (out / "model.safetensors").read_bytes()))
    assert models[0] == models[1]
    lines = summary(tmp_path / "nvme")["ledger"]
    on_nvme = sum(line["bytes"] for line in lines if line["tier"] == "nvme" and line["state"] != "slots")
    assert on_nvme >= 4 * HOST_LIMIT
    assert sum(line["bytes"] for line in lines if line["tier"] == "host") <= HOST_LIMIT
    assert "of states, and" in output and "zeroshard tiers said" in output
    assert not (tmp_path / "nvme/nvme").exists(), "files are left"


def test_offload_options_choose_where_the_files_lie(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "mine").write_text("a user's")
    output = run(tmp_path / "out", "--steps", "3", "--stage", "2", "--offload", "nvme", "--nvme-path", str(drive))
    states = {line["state"] for line in summary(tmp_path / "out")["ledger"] if line["tier"] == "nvme"}
    assert states == {"master", "exp_avg", "exp_avg_sq", "slots"}, output
    assert f'on {drive}"' in (tmp_path / "out/zeroshardd.log").read_text()
    assert (drive / "mine").read_text() == "a user's"


def test_bad_options_say_what_is_expected(tmp_path):
    assert "from 0 to 3" in run(tmp_path, "--stage", "7", expect=2)
    assert "from 1 to 64" in run(tmp_path, "--ranks", "none", expect=2)
    assert "cannot read" in run(tmp_path, "--text", "/nonexistent", expect=1)
    assert "none, cpu or nvme" in run(tmp_path, "--offload", "disk", expect=2)
    assert "without --offload nvme" in run(tmp_path, "--nvme-path", str(tmp_path), expect=1)
    assert "is not a directory" in run(tmp_path, "--offload", "nvme", "--nvme-path", "/nonexistent", expect=1)
    assert "--frobnicate" in run(tmp_path, "--frobnicate", expect=1)

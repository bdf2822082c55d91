"""`zeroshard bench nvme PATH`: no daemon, real transfers, nothing left behind."""

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest

from daemon import CLI, wait_for

pytestmark = pytest.mark.skipif(not CLI.exists(), reason=f"{CLI} is not built")


def bench(*arguments):
    return subprocess.run([CLI, "bench", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_figures_and_settings_as_json(tmp_path):
    result = bench("nvme", tmp_path, "--size", 64, "--seconds", 1, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["path"] == str(tmp_path)
    assert {row["access"] for row in report["rows"]} == {"read", "write", "read+write"}
    assert all(row["gb_per_s"] > 0 and row["p99_us"] >= row["p50_us"] > 0 for row in report["rows"])
    both = [(row["block_size"], row["queue_depth"]) for row in report["rows"] if row["access"] == "read+write"]
    assert (report["aio"]["block_size"], report["aio"]["queue_depth"]) in both
    assert os.listdir(tmp_path) == []


def test_the_settings_are_those_of_a_ds_config(tmp_path):
    result = bench("nvme", tmp_path, "--size", 32, "--seconds", 1, "--backend", "threads")
    assert result.returncode == 0, result.stderr
    assert "threads, as io.backend says" in result.stdout
    settings = json.loads("{" + result.stdout[result.stdout.index('"aio":'):] + "}")
    assert set(settings["aio"]) == {
        "block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"}


def test_nothing_is_left_by_a_killed_one(tmp_path):
    process = subprocess.Popen([CLI, "bench", "nvme", tmp_path, "--size", "64", "--seconds", "60"],
                               stdout=subprocess.DEVNULL)
    files = f"/proc/{process.pid}/fd"

    def writes():
        for name in os.listdir(files):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(os.path.join(files, name)).startswith(str(tmp_path)):
                    return True
        return False

    wait_for(writes, "the file of the measurement")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(tmp_path) == []


def test_exit_codes(tmp_path):
    missing = bench("nvme", tmp_path / "missing")
    assert missing.returncode == 1
    assert "No such file or directory" in missing.stderr
    for wrong in ([], ["nvme"], ["nvme", tmp_path, "--backend", "aio"], ["nvme", tmp_path, "--size", 1]):
        assert bench(*wrong).returncode == 2, wrong


def test_it_ends_in_about_the_time_given(tmp_path):
    begin = time.monotonic()
    assert bench("nvme", tmp_path, "--size", 64, "--seconds", 2).returncode == 0
    assert time.monotonic() - begin < 20

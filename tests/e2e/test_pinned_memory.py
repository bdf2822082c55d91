"""Pinned memory of real workers: locked to the page, unlocked with one warning over the limit, or refused."""

import os
import pathlib
import re
import resource
import subprocess
import urllib.request

import daemon as programs
import pytest
from daemon import BINARIES, wait_for

WORKER = BINARIES / "worker/zeroshard-worker"
NOBODY = 65534
LOW = 4096  # less than the states of any job

pytestmark = pytest.mark.skipif(not WORKER.exists(), reason=f"{WORKER} is not built")


def config(pin):
    return """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": %s}}}""" % pin


def unprivileged():
    """Popen's arguments for a process that is held to LOW locked bytes."""
    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOW, LOW))

    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return {**user, "preexec_fn": limit}


@pytest.fixture
def limited(start, directory):
    """Starts a daemon without privileges and with a low lock limit."""
    how = unprivileged()
    if how.get("user") is not None:
        os.chown(directory, NOBODY, NOBODY)
        try:
            subprocess.run([programs.DAEMON, "--help"], **how, check=True, capture_output=True, timeout=20)
        except (PermissionError, subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"user {NOBODY} cannot run {programs.DAEMON} here: {error}")

    def make(text=""):
        return start(worker=WORKER, metrics="127.0.0.1:0", config=text, process=how)

    return make


def gauges(daemon, name):
    """The value of each worker, once all have reported."""
    address = daemon.json("status")["metrics_address"]

    def values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
            found = re.findall(rf"^{name}{{.*}} (\S+)$", reply.read().decode(), re.MULTILINE)
        return [int(float(value)) for value in found] if len(found) == 2 else None

    return wait_for(values, name)


def locked(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^VmLck:\s+(\d+) kB", status, re.MULTILINE).group(1)) * 1024


def test_over_the_limit_a_job_runs_unpinned_with_one_warning(limited, probe):
    daemon = limited()
    probe(daemon, job="gpt", config=config("true")).attached()
    assert gauges(daemon, "zeroshard_worker_pinned_bytes") == [0, 0]
    missing = gauges(daemon, "zeroshard_worker_unpinned_bytes")
    assert all(value > LOW for value in missing)
    for worker, value in enumerate(missing):
        lines = [line for line in daemon.text().splitlines() if f"states of worker {worker}: " in line]
        assert len(lines) == 1, lines
        assert f"RLIMIT_MEMLOCK is {LOW} bytes" in lines[0] and f"LimitMEMLOCK={value} " in lines[0], lines


def test_over_the_limit_a_job_is_refused_where_pinned_memory_is_required(limited, probe):
    daemon = limited("require_pinned: true\n")
    message = probe(daemon, job="gpt", config=config("true")).refused("RESOURCE_EXHAUSTED")
    for part in ("states of worker", "cannot be locked", f"RLIMIT_MEMLOCK is {LOW} bytes", "LimitMEMLOCK="):
        assert part in message, message
    assert daemon.json("jobs")["jobs"] == []
    # Whoever does not ask for it is served.
    probe(daemon, job="plain", config=config("false")).attached()
    assert gauges(daemon, "zeroshard_worker_unpinned_bytes") == [0, 0]


def test_exactly_the_states_are_locked(start, probe):
    daemon = start(worker=WORKER, metrics="127.0.0.1:0")
    probe(daemon, job="plain", config=config("false")).attached()
    assert gauges(daemon, "zeroshard_worker_pinned_bytes") == [0, 0]
    daemon.cli("remove", "plain", "--force")
    probe(daemon, job="gpt", config=config("true")).attached()
    if sum(gauges(daemon, "zeroshard_worker_unpinned_bytes")) > 0:
        pytest.skip("this user may not lock the states of a small job: " + daemon.text())
    pinned = gauges(daemon, "zeroshard_worker_pinned_bytes")
    workers = daemon.job("gpt")["workers"]
    assert [locked(worker["pid"]) for worker in workers] == pinned
    assert all(value > 0 and value % 4096 == 0 for value in pinned)


def test_a_restarted_worker_pins_its_states_again(start, probe):
    daemon = start(worker=WORKER, metrics="127.0.0.1:0")
    probe(daemon, job="gpt", config=config("true")).attached()
    before = gauges(daemon, "zeroshard_worker_pinned_bytes")
    os.kill(daemon.job("gpt")["workers"][1]["pid"], 9)
    worker = wait_for(
        lambda: next((w for w in daemon.job("gpt")["workers"] if w["restarts"] == 1 and w["state"] == "ready"), None),
        "the restart")
    assert locked(worker["pid"]) == before[1]

"""A PyTorch rank killed with SIGKILL re-attaches and the run ends with the bytes of an undisturbed one."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "python"))
import real_daemon  # noqa: E402

BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
STEPS = 40
OPTIONS = (
    f"--steps {STEPS} --width 64 --layers 2 --context 64 --micro-batch 4 --accumulation 2 --sample 5"
).split()

pytestmark = pytest.mark.skipif(
    real_daemon.missing(BINARIES) is not None,
    reason="the daemon is not built; tests/run e2e builds it",
)


class Run:
    """Two ranks of the example trainer on a daemon of their own."""

    def __init__(self, directory, stage):
        self.directory, self.stage = directory, stage
        directory.mkdir()
        package = directory / "package"
        shutil.copytree(ROOT / "client/python/zeroshard", package / "zeroshard")
        shutil.copy(BINARIES / "client/python/_native.so", package / "zeroshard/_native.so")
        self.daemon = real_daemon.Daemon(BINARIES, directory, workers=2, timeout="60s")
        self.processes = {}

    def start(self, rank):
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.directory / "package"),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "ZEROSHARD_SOCKET": self.daemon.socket,
        }
        command = ["/usr/bin/python3", "-u", "-m", "zeroshard.examples.char_gpt"]
        command += ["--out", str(self.directory), "--stage", str(self.stage), *OPTIONS]
        with open(self.directory / f"rank{rank}.log", "ab") as log:
            self.processes[rank] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_for_step(self, step):
        """Until rank 0 has told of a step at or after `step`."""
        end = time.monotonic() + 100
        while time.monotonic() < end:
            text = (self.directory / "rank0.log").read_text()
            told = [
                int(line.split()[1].split("/")[0])
                for line in text.splitlines()
                if line.startswith("step ")
            ]
            if told and told[-1] >= step:
                return
            assert all(p.poll() is None for p in self.processes.values()), text
            time.sleep(0.005)
        raise AssertionError(f"step {step} did not come:\n{text}")

    def kill(self, rank):
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait()

    def finish(self):
        for rank, process in self.processes.items():
            assert process.wait(120) == 0, (self.directory / f"rank{rank}.log").read_text()
        return (self.directory / "model.safetensors").read_bytes()

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self.daemon.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    models = {}

    def of_stage(stage):
        if stage not in models:
            run = Run(tmp_path_factory.mktemp("plain") / "run", stage)
            try:
                run.start(0)
                run.start(1)
                models[stage] = run.finish()
            finally:
                run.close()
        return models[stage]

    return of_stage


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_killed_ranks_go_on_where_they_were(tmp_path, undisturbed, stage, victims):
    delays = random.Random(str((stage, victims)))
    run = Run(tmp_path / "run", stage)
    try:
        run.start(0)
        run.start(1)
        for number, victim in enumerate(victims):
            run.wait_for_step(STEPS * (1 + number) // 5)
            time.sleep(delays.random() * 0.05)
            run.kill(victim)
            run.start(victim)
        found = run.finish()
    finally:
        run.close()
    assert found == undisturbed(stage)


def test_ranks_of_a_dead_daemon_say_so_soon(tmp_path):
    """Not after the 60 s that a rank waits for a worker: nobody listens any more."""
    run = Run(tmp_path / "run", 3)
    try:
        run.start(0)
        run.start(1)
        run.wait_for_step(2)
        run.daemon.process.kill()
        start = time.monotonic()
        for rank, process in run.processes.items():
            assert process.wait(30) != 0
            assert "the daemon or the job is gone" in (run.directory / f"rank{rank}.log").read_text()
        assert time.monotonic() - start < 10
    finally:
        run.close()

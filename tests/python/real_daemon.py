"""Starts a real zeroshardd with its workers for one test, and loads the real native module."""

import importlib.machinery
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request


def missing(binaries):
    """The first file that a daemon and a trainer need and that is not built, or None."""
    for name in ("server/zeroshardd", "worker/zeroshard-worker", "client/python/_native.so"):
        if not (binaries / name).exists():
            return binaries / name
    return None


def load_native(binaries):
    name = "zeroshard._native"
    if name not in sys.modules:
        path = str(binaries / "client/python/_native.so")
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


class Daemon:
    """One zeroshardd; its directories are temporary, its log is `directory`/zeroshardd.log."""

    def __init__(
        self, binaries, directory, workers=2, timeout="10s", metrics="off", environment=None
    ):
        self.binaries = binaries
        self._run = tempfile.TemporaryDirectory(prefix="zs-")  # short: socket paths are limited
        self.run_dir = self._run.name
        self.socket = self.run_dir + "/zeroshardd.sock"
        self.log = directory / "zeroshardd.log"
        config = directory / "zeroshardd.yaml"
        lines = [
            f"run_dir: {self.run_dir}",
            f"state_dir: {directory}/state",
            f"checkpoint_dir: {directory}/checkpoints",
            f"export_dir: {directory}/exports",
            f"worker_binary: {binaries}/worker/zeroshard-worker",
            f"devices: [{', '.join(f'cpu:{i}' for i in range(workers))}]",
            f'metrics_address: "{metrics}"',
            f"attach_timeout: {timeout}",
            f"collective_timeout: {timeout}",
            "lanes_per_worker: 1",
        ]
        config.write_text("\n".join(lines) + "\n")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(binaries / "server/zeroshardd"), "--config", str(config)],
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._wait_until_up()

    def _wait_until_up(self):
        end = time.monotonic() + 20
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"zeroshardd did not start:\n{self.log.read_text()}")
            time.sleep(0.01)

    def _answers(self):
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    def native(self):
        return load_native(self.binaries)

    def metrics(self, address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
            return reply.read().decode()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"zeroshardd did not stop:\n{self.log.read_text()}") from None
        finally:
            self._run.cleanup()

"""Fixtures: a daemon for the ranks of a test to talk to, once as a stand-in and once for real.

The real one is started from $ZEROSHARD_BIN_DIR (default: bazel-bin of this tree); tests that need
it are skipped, and counted, where it was not built.
"""

import os
import pathlib
import sys
import threading

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import fake_native  # noqa: E402
import real_daemon  # noqa: E402
from zeroshard import backend  # noqa: E402

BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))

torch.set_num_threads(1)


class Ranks:
    """Runs a function as the ranks of a job, one thread each; raises what the first failing rank
    raised."""

    def __init__(self, socket=None):
        self.socket = socket
        self.count = 0

    def job(self):
        self.count += 1
        return f"job{self.count}"

    def run(self, world_size, function):
        results, errors = [None] * world_size, [None] * world_size

        def body(rank):
            try:
                results[rank] = function(rank)
            except BaseException as error:  # handed to the test's thread
                errors[rank] = error

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        self.errors = errors
        # The error of the rank that failed first tells more than that of those it left alone.
        for error in sorted(
            (e for e in errors if e), key=lambda e: getattr(e, "code", "") == "DEADLINE_EXCEEDED"
        ):
            raise error
        return results


class Running:
    """A daemon with `workers` workers, of a test that chooses them; its ranks are threads of this
    process. `with Running(...) as ranks:`"""

    def __init__(self, directory, workers, metrics="off"):
        self.daemon = real_daemon.Daemon(BINARIES, directory, workers=workers, metrics=metrics)
        self.metrics = metrics

    def __enter__(self):
        backend.use(self.daemon.native())
        return Ranks(self.daemon.socket)

    def __exit__(self, *unused):
        backend.use(None)
        self.daemon.stop()


@pytest.fixture(params=["fake", "daemon"])
def ranks(request, tmp_path):
    if request.param == "fake":
        backend.use(fake_native.Daemon())
        yield Ranks()
        backend.use(None)
        return
    missing = real_daemon.missing(BINARIES)
    if missing:
        pytest.skip(f"not built: {missing}")
    daemon = real_daemon.Daemon(BINARIES, tmp_path)
    backend.use(daemon.native())
    try:
        yield Ranks(daemon.socket)
    finally:
        backend.use(None)
        daemon.stop()

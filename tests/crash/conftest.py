"""Fixtures of the crash tests: daemons whose workers can be killed at named places, and undisturbed runs to compare with.

The programs come from $ZEROSHARD_BIN_DIR, which must be a build with fault points (default: bazel-faults-bin).
ZEROSHARD_TEST_SHORT=1 tries fewer places; ZEROSHARD_KILLS is the number of random kills in one run, and of those inside
the update.
"""

import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import crash  # noqa: E402


@pytest.fixture(scope="session")
def start_daemon():
    """start_daemon(workers, config) -> a daemon that lives as long as the tests."""
    if crash.missing():
        pytest.skip(f"{crash.missing()} is not built with --config=faults")
    daemons = {}

    def start(workers=2, config=""):
        if (workers, config) not in daemons:
            # Not tmp_path: the paths of Unix sockets are short.
            directory = pathlib.Path(tempfile.mkdtemp(prefix="zs-"))
            daemons[workers, config] = crash.Daemon(directory, workers, config)
        return daemons[workers, config]

    yield start
    for daemon in daemons.values():
        code = daemon.stop()
        text = daemon.log.read_text()
        shutil.rmtree(daemon.directory, ignore_errors=True)
        assert code == 0, text


@pytest.fixture(scope="session")
def daemon(start_daemon):
    return start_daemon(2)


@pytest.fixture(scope="session")
def undisturbed(daemon):
    """undisturbed(options, ranks) -> the Outcome of a run in which nobody dies; made once."""
    known = {}

    def outcome(options, ranks=2):
        key = (tuple(sorted(options.items())), ranks)
        if key not in known:
            known[key] = crash.Run(daemon, options, ranks).finish()
        return known[key]

    return outcome

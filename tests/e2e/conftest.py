"""Fixtures: a daemon of its own for every test, and probes that are gone when it ends; fake GPUs.

The programs come from $ZEROSHARD_BIN_DIR (default: bazel-bin of this tree).
"""

import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import daemon as programs  # noqa: E402
import gpu_jobs  # noqa: E402


@pytest.fixture
def directory():
    # Not tmp_path: the paths of Unix sockets are short.
    path = pathlib.Path(tempfile.mkdtemp(prefix="zs-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(directory):
    """Starts a daemon (arguments of daemon.Daemon); it is stopped, and must stop cleanly, at the end."""
    if programs.missing():
        pytest.skip(f"{programs.missing()} is not built")
    daemons = []

    def make(*flags, **options):
        one = programs.Daemon(directory, *flags, **options).start()
        daemons.append(one)
        return one

    yield make
    for one in daemons:
        assert one.stop() == 0, one.text()


@pytest.fixture
def daemon(start):
    return start()


@pytest.fixture(scope="module")
def node():
    """Fake GPUs, and daemons that have some of them, of all tests of a file."""
    with gpu_jobs.Node() as one:
        yield one


@pytest.fixture
def probe():
    """Makes probes of a daemon: probe(daemon, job=..., rank=..., world_size=...)."""
    probes = []

    def make(daemon, **spec):
        one = daemon.probe(**spec)
        probes.append(one)
        return one

    yield make
    for one in probes:
        one.close()

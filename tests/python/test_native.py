"""The native module against a real daemon: what the pure-Python package relies on, without that package."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
import torch

import real_daemon
from zeroshard import ZeroShardError

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
CONFIG = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "gradient_clipping": 0,
             "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
             "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}}"""
PARAMETERS = [
    {"name": "a.weight", "shape": [100, 200], "dtype": "bfloat16", "module": "a"},
    {"name": "b.weight", "shape": [50, 400], "dtype": "bfloat16", "module": "b"},
    {"name": "scale", "shape": [], "dtype": "bfloat16"},
]


@pytest.fixture
def daemon(tmp_path):
    missing = real_daemon.missing(BINARIES)
    if missing:
        pytest.skip(f"not built: {missing}")
    one = real_daemon.Daemon(BINARIES, tmp_path)
    yield one
    one.stop()


def attach(daemon, rank=0, world_size=1, **changes):
    arguments = {"parameters": PARAMETERS, "groups": [{"lr": 0.5}], "ds_config": CONFIG, "overrides": {},
                 "timeout_ms": 10_000, **changes}
    return daemon.native().attach(daemon.socket, "job", rank, world_size, 0, **arguments)


def values(session, unit):
    return torch.frombuffer(bytearray(memoryview(session.parameter_window)), dtype=torch.bfloat16,
                            count=unit["elements"], offset=unit["window_offset"])


def slot(session, unit):
    offset = session.acquire(unit["bytes"])
    window = torch.frombuffer(memoryview(session.gradient_window), dtype=torch.bfloat16, count=unit["elements"],
                              offset=offset)
    return offset, window


def fill(session, value):
    for number, unit in enumerate(session.units()):
        offset, window = slot(session, unit)
        window.fill_(value)
        session.wait(session.put(number, 0, unit["elements"], offset, True))


def train(session, gradient, user_state=b""):
    for number, unit in enumerate(session.units()):
        offset, window = slot(session, unit)
        window.fill_(gradient)
        session.scatter(number, 0, offset)
    session.micro_end(0)
    session.wait(session.step(1, user_state=user_state))


def test_attach_describes_the_job(daemon):
    session = attach(daemon)
    assert (session.rank, session.world_size, session.steps, session.updates) == (0, 1, 0, 0)
    assert not session.initialized and not session.resumed and session.user_state == b""
    assert session.config["stage"] == 3 and session.config["compute_dtype"] == "bfloat16"
    assert session.config["optimizer"] == "sgd" and session.config["loss_scale"]["dynamic"] is False
    units = session.units()
    assert [u["parameters"] for u in units] == [[0], [1], [2]]
    assert [u["persistent"] for u in units] == [False, False, True]
    assert all(u["elements"] % 256 == 0 and u["bytes"] == 2 * u["elements"] for u in units)
    assert session.places() == [(0, 0, 20000), (1, 0, 20000), (2, 0, 1)]
    assert {line["state"] for line in session.ledger} >= {"parameters", "gradients"}
    session.detach(False)


def test_a_step_updates_the_window(daemon):
    session = attach(daemon)
    fill(session, 2.0)
    assert memoryview(session.parameter_window).readonly and not memoryview(session.gradient_window).readonly
    units = session.units()
    session.wait(session.gather([0, 1, 2]))
    assert (values(session, units[0])[:20000] == 2.0).all()
    epoch = session.parameter_epoch
    train(session, 1.0, b"cursor")
    result = session.step_result()
    assert (result["step"], result["updates"], result["skipped"]) == (1, 1, False)
    assert result["grad_norm"] == pytest.approx(40001 ** 0.5) and result["norm_valid"]
    assert (values(session, units[1])[:20000] == 1.5).all()
    assert session.parameter_epoch > epoch
    session.detach(True)
    successor = attach(daemon)
    assert successor.resumed and successor.initialized
    assert (successor.steps, successor.user_state) == (1, b"cursor")
    successor.detach(False)


def test_what_lies_in_padding_is_never_read(daemon):
    """5 and 7 elements, NaN around them in every slot: gathers, the norm and the update are exact."""
    parameters = [{"name": "five", "shape": [5], "dtype": "bfloat16", "module": "m"},
                  {"name": "seven", "shape": [7], "dtype": "bfloat16", "module": "m"}]
    session = attach(daemon, parameters=parameters)
    (unit,) = session.units()
    places = [(offset, elements) for _, offset, elements in session.places()]
    assert sum(elements for _, elements in places) == 12 < unit["elements"]

    def padded(value):
        offset, window = slot(session, unit)
        window.fill_(float("nan"))
        for at, elements in places:
            window[at : at + elements] = value
        return offset

    session.wait(session.put(0, 0, unit["elements"], padded(3.0), True))
    for expected in (3.0, 2.0, 1.0):
        session.wait(session.gather([0]))
        shown = values(session, unit)
        assert all((shown[at : at + elements] == expected).all() for at, elements in places)
        session.scatter(0, 0, padded(2.0))
        session.micro_end(0)
        session.wait(session.step(1))
        result = session.step_result()
        assert result["norm_valid"] and not result["skipped"]
        assert result["grad_norm"] == 48 ** 0.5
    session.detach(False)


def test_errors_carry_a_code_and_say_what_to_do(daemon):
    session = attach(daemon)
    with pytest.raises(ZeroShardError, match="there is no unit 9: the job has 3") as error:
        session.gather([9])
    assert error.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ZeroShardError, match="gradient window") as error:
        session.acquire(1 << 40)
    assert error.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ZeroShardError, match="is not a slot"):
        session.scatter(0, 0, 64)
    with pytest.raises(ZeroShardError, match="no request 12345"):
        session.wait(12345)
    session.detach(False)
    with pytest.raises(ZeroShardError, match="has left the job") as error:
        session.micro_end(0)
    assert error.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize("changes, message", [
    ({"parameters": [{"name": "a", "shape": "x"}]}, "wrong value for 'shape'"),
    ({"parameters": [{"name": "a", "shape": [1], "size": 1}]}, "unknown key"),
    ({"parameters": [{"name": "a", "shape": [1], "dtype": "int7"}]}, "parameter a"),
    ({"parameters": [3]}, "is not a dict"),
    ({"parameters": []}, "manifest|parameter"),
    ({"groups": [{"lr": "fast"}]}, "wrong value for 'lr'"),
])
def test_a_wrong_description_is_refused_by_name(daemon, changes, message):
    with pytest.raises(ZeroShardError, match=message) as error:
        attach(daemon, **changes)
    assert error.value.code == "INVALID_ARGUMENT"


def test_a_signal_interrupts_a_wait(daemon):
    sessions = {}

    def second():
        sessions[1] = attach(daemon, 1, 2)

    thread = threading.Thread(target=second)
    thread.start()
    sessions[0] = attach(daemon, 0, 2)
    thread.join()
    request = sessions[0].step(1)  # rank 1 does not come
    # A shell that starts its jobs in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sessions[0].wait(request)
    timer.join()
    signal.signal(signal.SIGINT, before)
    for session in sessions.values():
        session.close()


def test_a_forked_child_has_no_session(daemon):
    session = attach(daemon)
    child = os.fork()
    if child == 0:
        try:
            session.micro_end(0)
        except ZeroShardError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    fill(session, 1.0)  # the parent goes on
    session.detach(False)


FAULT = """
import sys
sys.path.insert(0, {tests!r})
sys.path.insert(0, {package!r})
import real_daemon, pathlib, torch
native = real_daemon.load_native(pathlib.Path({binaries!r}))
session = native.attach({socket!r}, "fault", 0, 1, 0, {parameters!r}, [{{}}], {config!r}, {{}}, 10000)
native.install_write_guard()
unit = session.units()[1]
view = torch.frombuffer(memoryview(session.parameter_window), dtype=torch.bfloat16, count=9,
                        offset=unit["window_offset"])
view.add_(1)
"""


def test_a_write_to_a_parameter_names_it(daemon):
    script = FAULT.format(
        tests=str(ROOT / "tests/python"), package=str(ROOT / "client/python"), binaries=str(BINARIES),
        socket=daemon.socket, parameters=PARAMETERS, config=CONFIG,
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGSEGV, result.stderr
    assert "parameter 'b.weight' is read-only" in result.stderr

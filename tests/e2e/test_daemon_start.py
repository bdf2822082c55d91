"""What goes wrong when the daemon starts: a clear error, a non-zero exit code, nothing left behind."""

import os
import socket
import subprocess

import daemon as programs
import pytest

pytestmark = pytest.mark.skipif(programs.missing() is not None, reason=f"{programs.missing()} is not built")


def leftovers(directory):
    """Everything below the directory but the configuration file."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.name != "zeroshardd.yaml")


@pytest.mark.parametrize(
    "config, words",
    [
        ("devices: [\"rocm:0\"]", ["devices", "rocm:0", "cpu:0"]),
        ("devices: [\"cuda:0\", \"cpu:0\"]", ["devices", "two kinds"]),
        ("attach_timeout: [1]", ["attach_timeout"]),
        ("host_memory_limit: lots", ["host_memory_limit", "lots"]),
        ("metrics_adress: off", ["metrics_adress"]),
        ("devices: {a", ["zeroshardd.yaml"]),
    ],
)
def test_a_bad_configuration_names_key_and_value(directory, config, words):
    code, error = programs.run_daemon(directory, devices=(), config=config)
    assert code == 2
    for word in words:
        assert word in error
    assert leftovers(directory) == []


def test_a_directory_is_no_configuration_file(directory):
    one = programs.Daemon(directory)
    result = subprocess.run([str(one.command[0]), "--config", str(directory)], capture_output=True, text=True, timeout=20)
    code, error = result.returncode, result.stderr
    assert code == 2
    assert "is a directory" in error


def test_unknown_flags_are_refused(directory):
    code, _ = programs.run_daemon(directory, "--no-such-flag")
    assert code == 2


def test_check_config_prints_and_touches_nothing(directory):
    one = programs.Daemon(directory, "--check-config")
    result = subprocess.run([str(part) for part in one.command], capture_output=True, text=True, timeout=20)
    assert result.returncode == 0
    assert f'run_dir: "{one.run_dir}"' in result.stdout
    assert leftovers(directory) == []


def test_a_used_metrics_port_is_named(directory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, error = programs.run_daemon(directory, metrics=address)
    assert code == 1
    assert address in error and "metrics_address" in error
    assert leftovers(directory) == []


def test_a_missing_worker_program_is_named(directory):
    code, error = programs.run_daemon(directory, worker=directory / "nowhere")
    assert code == 1
    assert str(directory / "nowhere") in error and "worker_binary" in error
    assert leftovers(directory) == []


def test_a_file_in_place_of_a_directory_is_named(directory):
    (directory / "checkpoints").write_text("mine")
    code, error = programs.run_daemon(directory)
    assert code == 1
    assert "checkpoint_dir" in error and str(directory / "checkpoints") in error
    assert (directory / "checkpoints").read_text() == "mine"
    assert not (directory / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_named(directory):
    (directory / "run").mkdir(mode=0o500)
    code, error = programs.run_daemon(directory)
    assert code == 1
    assert str(directory / "run") in error and "Permission denied" in error


def test_a_second_daemon_in_the_same_place_is_refused(directory, start):
    one = start()
    code, error = programs.run_daemon(directory)
    assert code == 1
    assert "another daemon" in error and str(one.socket) in error
    assert one.answers()


def test_a_stale_socket_file_is_replaced(directory, start):
    (directory / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(directory / "run/zeroshardd.sock"))
    assert start().answers()


def test_a_file_that_is_no_socket_is_kept(directory):
    (directory / "run").mkdir()
    (directory / "run/zeroshardd.sock").write_text("mine")
    code, error = programs.run_daemon(directory)
    assert code == 1
    assert "zeroshardd.sock" in error
    assert (directory / "run/zeroshardd.sock").read_text() == "mine"


def test_a_stopped_daemon_leaves_no_socket(directory, start):
    one = start()
    assert one.stop() == 0
    assert not one.run_dir.exists()
    assert "stopped" in one.text()


def test_a_killed_daemon_is_followed_by_another(directory, start, probe):
    one = start()
    probe(one, job="gpt").attached()
    one.process.kill()
    one.process.wait()
    one.start()
    assert "job gpt of an earlier daemon is gone" in one.text()
    assert probe(one, job="gpt").attached()["resumed"] is False


def test_the_command_says_when_no_daemon_answers(directory):
    one = programs.Daemon(directory)
    result = one.cli("status", check=False)
    assert result.returncode == 1
    assert str(one.socket) in result.stderr and "ZEROSHARD_SOCKET" in result.stderr

"""Starts the real zeroshardd with a worker that fakes its work, and probes that attach to it."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
DAEMON = BINARIES / "server/zeroshardd"
CLI = BINARIES / "client/cli/zeroshard"
FAKE_WORKER = BINARIES / "tests/fakes/fake_worker"
PROBE = BINARIES / "tests/fakes/probe"

PATIENCE = 20.0


def missing():
    """The first program that is not built, or None."""
    return next((path for path in (DAEMON, CLI, FAKE_WORKER, PROBE) if not path.exists()), None)


def wait_for(condition, what, patience=PATIENCE):
    """Polls until `condition()` is true and returns what it returned."""
    end = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {patience} s for {what}"
        time.sleep(0.005)


class Daemon:
    """One zeroshardd below `directory`; stopped with SIGTERM by stop()."""

    def __init__(self, directory, *flags, worker=FAKE_WORKER, devices=("cpu:0", "cpu:1"), metrics="off", config="",
                 process=None):
        """process: further arguments of Popen, such as another user."""
        self.directory = directory
        self.of_process = process or {}
        self.run_dir = directory / "run"
        self.socket = self.run_dir / "zeroshardd.sock"
        self.log = directory / "log"
        file = directory / "zeroshardd.yaml"
        file.write_text(config)
        self.command = [
            DAEMON, "--config", file, "--run-dir", self.run_dir, "--state-dir", directory / "state",
            "--checkpoint-dir", directory / "checkpoints", "--export-dir", directory / "exports",
            "--worker-binary", worker, "--metrics-address", metrics, *flags,
        ]
        for device in devices:
            self.command += ["--device", device]
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            command = [str(part) for part in self.command]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, **self.of_process)
        wait_for(lambda: self.answers() or self.process.poll() is not None, "the daemon")
        assert self.process.poll() is None, self.text()
        return self

    def answers(self):
        return self.socket.exists() and self.cli("status", check=False).returncode == 0

    def text(self):
        return self.log.read_text()

    def stop(self):
        """Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def cli(self, *arguments, check=True):
        result = subprocess.run(
            [str(CLI), "--socket", str(self.socket), *arguments], capture_output=True, text=True, timeout=60
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    def json(self, *arguments):
        return json.loads(self.cli(*arguments, "--json").stdout)

    def job(self, name):
        return self.json("job", name)

    def probe(self, **spec):
        return Probe(self.socket, spec)

    def ask(self, verb):
        result = subprocess.run([str(PROBE), str(self.socket), verb], capture_output=True, text=True, timeout=30)
        return json.loads(result.stdout)


def run_daemon(directory, *flags, **options):
    """Runs a daemon that is expected to fail at once; returns (exit code, stderr)."""
    daemon = Daemon(directory, *flags, **options)
    result = subprocess.run(
        [str(part) for part in daemon.command], capture_output=True, text=True, timeout=PATIENCE
    )
    return result.returncode, result.stderr


class Watcher:
    """A process that watches a job; take it as a context manager."""

    def __init__(self, socket, job):
        self.process = subprocess.Popen([str(PROBE), str(socket), "watch", job], stdout=subprocess.PIPE, text=True)
        self.until("watching")

    def until(self, kind):
        """The next event of this kind."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("kind") == kind:
                return event
        raise AssertionError(f"the stream ended before {kind}")

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Probe:
    """One trainer process. The attach is under way when the constructor returns; see attached()."""

    def __init__(self, socket, spec):
        self.process = subprocess.Popen(
            [str(PROBE), str(socket), "attach", json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    @property
    def pid(self):
        return self.process.pid

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the probe ended without an answer"
        return json.loads(line)

    def attached(self):
        """The AttachReply; fails the test when the attach was refused."""
        answer = self.answer()
        assert answer["ok"], answer
        return answer["reply"]

    def refused(self, code):
        """The message of the error; fails the test when the attach succeeded."""
        answer = self.answer()
        assert not answer["ok"], "the attach was not refused"
        assert answer["code"] == code, answer
        return answer["message"]

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

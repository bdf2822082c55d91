"""The controller's end of training_rank.py: starts the ranks of one framework and drives them
through pipes."""

import json
import os
import pathlib
import subprocess
import sys

RANKS = 2
# GPT-2 small: 124 million parameters, the output layer is the embedding.
GPT = {"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12, "context": 1024}
SMALL = {"vocabulary": 512, "width": 64, "layers": 2, "heads": 2, "context": 64}


class Ranks:
    """RANKS processes of one side ("zeroshard", "deepspeed", "fsdp", "plain"), one thread each.
    They sleep between calls. A rank that fails ends the run."""

    def __init__(self, side, shape, binaries, directory, socket="", more_environment=None):
        self.side = side
        self.losses = []  # rank 0's, of all steps
        self.processes = []
        options = {**shape, "ranks": RANKS, "side": side, "binaries": binaries}
        options["rendezvous"] = pathlib.Path(directory) / f"meet-{side}"
        script = pathlib.Path(__file__).with_name("training_rank.py")
        self.log = open(pathlib.Path(directory) / f"{side}.log", "w+", encoding="utf-8")
        for rank in range(RANKS):
            command = [sys.executable, str(script), f"--rank={rank}"]
            command += [f"--{name}={value}" for name, value in options.items()]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "ZEROSHARD_SOCKET": socket,
                **(more_environment or {}),
            }
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log,
                    text=True,
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def ask(self, do, **more):
        """All ranks do it; returns their answers."""
        for process in self.processes:
            self._send(process, {"do": do, **more})
        answers = []
        for process in self.processes:
            line = process.stdout.readline()
            if not line:
                self._fail(do)
            answers.append(json.loads(line))
        return answers

    def steps(self, count):
        """Seconds a step, of the slower rank."""
        answers = self.ask("steps", count=count)
        self.losses += answers[0]["losses"]
        return max(a["seconds"] for a in answers) / count

    def pids(self):
        return [process.pid for process in self.processes]

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()

    def _send(self, process, command):
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._fail(command["do"])

    def _fail(self, do):
        self.log.seek(0)
        sys.stderr.write(self.log.read()[-8000:])
        for process in self.processes:
            try:
                process.wait(5)  # the one that ended shows its status
            except subprocess.TimeoutExpired:
                process.kill()
        statuses = [process.wait() for process in self.processes]
        raise SystemExit(f"{self.side}: a rank ended during {do!r}; statuses {statuses}")

"""Jobs with zeroshard.durability "power": the daemon dies with its workers, and the next one goes on with the job.

ZEROSHARD_KILLS: how often the daemon is killed in one run (default 4).
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import daemon as programs
import numpy as np
import pytest
import trainers

KILLS = int(os.environ.get("ZEROSHARD_KILLS", "4"))
SEED = int(os.environ.get("ZEROSHARD_SEED", random.randrange(1 << 32)))


def config(durability="power", **zero):
    zero = {"offload_optimizer": {"device": "nvme", "pin_memory": False}, **zero}
    return {"zero_optimization": zero, "zeroshard": {"durability": durability}}


OPTIONS = {"stage": 2, "dtype": "bf16", "steps": 12, "micro_steps": 2, "absent": True, "config": config()}


class Node:
    """A daemon with real workers and a drive; it can die, and be started again."""

    def __init__(self, directory, workers=2):
        self.drive = directory / "nvme"
        self.drive.mkdir()
        self.devices = [f"cpu:{i}" for i in range(workers)]
        self.daemon = programs.Daemon(
            directory, "--nvme-path", self.drive, worker=trainers.WORKER, devices=self.devices).start()

    def die(self):
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait(programs.PATIENCE)

    def start(self):
        self.daemon.start()

    def files(self, ending):
        return sorted(entry.name for entry in (self.drive / "zeroshard").iterdir() if entry.name.endswith(ending))

    def file(self, ending, index=0):
        return self.drive / "zeroshard" / self.files(ending)[index]

    def command(self, rank, ranks=2, **options):
        return trainers.command(self.daemon, "gpt", rank, ranks, **{**OPTIONS, **options})

    def spawn(self, ranks=2, **options):
        return [
            subprocess.Popen(self.command(rank, ranks, **options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)]

    def train(self, **options):
        """The reports of all ranks, which must come to their end."""
        return trainers.run_ranks(self.daemon, "gpt", [self.command(rank, **options) for rank in range(2)])

    def refusal(self, **options):
        """What an attach is told that must fail."""
        ended = [(process.communicate(timeout=trainers.PATIENCE), process.returncode) for process in self.spawn(**options)]
        assert all(code != 0 for _, code in ended)
        return "".join(error for (_, error), _ in ended)

    def job_step(self):
        return self.daemon.job("gpt")["summary"].get("step", 0)


@pytest.fixture
def node(directory):
    if trainers.missing():
        pytest.skip(f"{trainers.missing()} is not built")
    made = Node(directory)
    yield made
    if made.daemon.process.poll() is None:
        assert made.daemon.stop() == 0, made.daemon.text()


@pytest.fixture(scope="module")
def undisturbed():
    """undisturbed(options) -> the Result of a run whose daemon lives."""
    if trainers.missing():
        pytest.skip(f"{trainers.missing()} is not built")
    daemons = trainers.Daemons()
    known = {}

    def result(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            host = {**options, "config": {}}
            known[key] = daemons.train(1, 2, **host)
        return known[key]

    yield result
    daemons.close()


def assert_ends_as(node, expected, **options):
    """Trains to the end; what is left is what the undisturbed run left, bit for bit."""
    result = trainers.run(node.daemon, "gpt", 2, **options)
    mine, theirs = result.states(), expected.states()
    assert mine.keys() == theirs.keys()
    for key, (dtype, values) in mine.items():
        assert dtype == theirs[key][0] and values.tobytes() == theirs[key][1].tobytes(), key
    for one, other in zip(result.parameters, expected.parameters):
        assert np.array_equal(one, other)
    return result


READY = re.compile(r"is ready: ranks [^\n]* attached")


def kill_while_training(node, seconds, ready=False, **options):
    """All processes of the node die at some moment: from their start on, or from the first step on."""
    before = len(READY.findall(node.daemon.text()))
    processes = node.spawn(keep=True, **options)
    patience = time.monotonic() + 30
    while ready and len(READY.findall(node.daemon.text())) == before and time.monotonic() < patience:
        time.sleep(0.01)
    time.sleep(seconds)
    node.die()
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stage,extra", [(2, {}), (3, {"offload_param": {"device": "nvme"}})])
def test_a_daemon_killed_at_random_moments(node, undisturbed, stage, extra):
    options = {**OPTIONS, "stage": stage, "steps": 12 * KILLS, "config": config(**extra)}
    expected = undisturbed(**options)
    moments = random.Random(SEED)
    print("seed", SEED)
    for kill in range(KILLS):
        ready = kill % 2 == 1 or kill == 0
        kill_while_training(node, moments.uniform(*((0.06, 0.3) if ready else (0.1, 0.8))), ready, pause_ms=30, **options)
        node.start()
    assert_ends_as(node, expected, **options)
    resumed = [int(step) for step in re.findall(r"goes on after step (\d+) of an earlier daemon", node.daemon.text())]
    assert resumed == sorted(resumed) and len(set(resumed)) > 1 and resumed[0] < options["steps"], resumed


def test_a_job_goes_on_at_its_last_step(node, undisturbed):
    node.train(steps=5, keep=True)
    node.die()
    node.start()
    assert "job gpt of an earlier daemon can be resumed" in node.daemon.text()
    jobs = node.daemon.json("jobs")["jobs"]
    assert [(job["name"], job["state"]) for job in jobs] == [("gpt", "resumable")]
    assert "attach under its name to go on" in node.daemon.cli("job", "gpt", check=False).stderr
    reports = node.train(steps=5, keep=True)
    assert all(report["resumed"] for report in reports)
    assert node.job_step() == 5
    assert_ends_as(node, undisturbed(**OPTIONS), **OPTIONS)
    programs.wait_for(lambda: not node.files(".extent") and not node.files(".manifest"), "the end of the files")
    node.die()
    node.start()
    assert node.daemon.json("jobs")["jobs"] == []


def test_a_daemon_that_is_stopped_keeps_the_job(node, undisturbed):
    node.train(steps=4, keep=True)
    assert node.daemon.stop() == 0
    node.start()
    assert_ends_as(node, undisturbed(**OPTIONS), **OPTIONS)


def test_another_job_of_that_name_is_refused_with_the_difference(node):
    node.train(steps=2, keep=True)
    node.die()
    node.start()
    for options, words in [
        ({"config": config("process")}, 'its zeroshard.durability is not "power"'),
        ({"optimizer": "SGD"}, "optimizer was OPTIMIZER_ADAMW and is OPTIMIZER_SGD"),
        ({"stage": 1}, "zero_optimization.stage was 2 and is 1"),
        ({"sizes": (40000, 512, 7, 0, 1, 20000)}, "parameters was layout"),
        ({"config": config(sub_group_size=4096)}, "what lies where in the files of worker 0"),
    ]:
        message = node.refusal(steps=3, **options)
        assert words in message and "`zeroshard remove gpt` deletes" in message, message
    assert node.train(steps=3)[0]["resumed"]


def test_what_would_be_lost_is_refused(node):
    message = node.refusal(frozen=(2,))
    assert "is frozen: its values are in memory only" in message
    message = node.refusal(config={**config(), "zeroshard": {"durability": "power", "transport": "gloo"}})
    assert "needs workers that share memory" in message


def test_a_lost_journal_keeps_the_files(node):
    node.train(steps=2, keep=True)
    node.die()
    shutil.rmtree(node.daemon.directory / "state")
    node.start()
    (job,) = node.daemon.json("jobs")["jobs"]
    assert job["state"] == "resumable" and "the journal says nothing" in job["reason"]
    assert len(node.files(".extent")) == 2 and len(node.files(".manifest")) == 2
    node.daemon.cli("remove", job["name"])
    programs.wait_for(lambda: not node.files(".extent") and not node.files(".manifest"), "the end of the files")
    assert node.daemon.json("jobs")["jobs"] == []


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def test_a_flipped_manifest_is_the_step_before(node, undisturbed):
    node.train(steps=5, keep=True)
    node.die()
    manifest = node.file(".manifest")
    copy = manifest.stat().st_size // 2
    flip(manifest, copy + 600)  # copies take turns; that of step 5 is the second
    node.start()
    assert node.train(steps=5, keep=True)[0]["resumed"]
    assert "goes on after step 4" in node.daemon.text()
    assert_ends_as(node, undisturbed(**OPTIONS), **OPTIONS)


def test_damage_is_named_and_changes_nothing(node):
    node.train(steps=5, keep=True)
    node.die()
    manifest, extent = node.file(".manifest", 1), node.file(".extent", 1)
    whole = manifest.read_bytes(), extent.read_bytes()
    for offset in (600, manifest.stat().st_size // 2 + 600):
        flip(manifest, offset)
    node.start()
    message = node.refusal()
    assert "no step is whole on the nvme paths of all workers" in message and manifest.name in message
    manifest.write_bytes(whole[0])
    for offset in range(4096 + 5000, len(whole[1]), 8192):
        flip(extent, offset)
    message = node.refusal()
    assert extent.name in message and "at offset" in message
    assert manifest.read_bytes() == whole[0]
    extent.write_bytes(whole[1])
    assert node.train(steps=6)[0]["resumed"]


def test_missing_files_are_named_and_nothing_is_lost(node):
    node.train(steps=3, keep=True)
    node.die()
    away = node.drive.with_name("away")
    node.drive.rename(away)
    node.start()
    message = node.refusal()
    assert str(node.drive) in message and "does not exist" in message
    node.drive.mkdir()  # where the drive should be mounted
    message = node.refusal()
    assert "cannot be resumed: files are not there" in message and "is the drive mounted?" in message
    assert not node.files(".extent")
    shutil.rmtree(node.drive)
    away.rename(node.drive)
    lost = node.file(".extent", 1)
    lost.rename(node.drive / "lost")
    assert lost.name in node.refusal()
    (node.drive / "lost").rename(lost)
    assert node.train(steps=4)[0]["resumed"]


def test_a_failed_job_goes_on_from_its_files(node, undisturbed):
    node.train(steps=4, keep=True)
    killed = set()

    def has_failed():
        view = node.daemon.job("gpt")
        pid = view["workers"][0].get("pid", 0)
        if pid and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return view["summary"]["state"] == "failed"

    programs.wait_for(has_failed, "a worker that died too often")
    assert_ends_as(node, undisturbed(**OPTIONS), **OPTIONS)
    assert "goes on after step 4 of an earlier daemon" in node.daemon.text()


def test_a_removed_job_begins_anew(node):
    node.train(steps=3, keep=True)
    node.die()
    node.start()
    node.daemon.cli("remove", "gpt")
    programs.wait_for(lambda: not node.files(".extent"), "the end of the files")
    assert not node.train(steps=2)[0]["resumed"]

"""Drives that fail for real, fill up or go away under jobs that train: clear errors, nothing lost, nobody else disturbed."""

import pathlib
import shutil
import signal
import os
import subprocess

import checkpoint_reader
import loop_drive
import nvme_jobs
import pytest
import trainers
from daemon import wait_for

pytestmark = pytest.mark.skipif(trainers.missing() is not None, reason=f"{trainers.missing()} is not built")

OPTIONS = {"stage": 2, "dtype": "bf16", "steps": 12}
RANKS = 2


@pytest.fixture
def real(start):
    """Starts a daemon with real workers."""
    return lambda *flags, **options: start(*flags, worker=trainers.WORKER, **options)


@pytest.fixture
def drive(directory):
    """A file system of 64 MiB on a loop device; the test is skipped where there can be none."""
    try:
        with loop_drive.loop_drive(directory, 64) as made:
            yield made
    except loop_drive.NotAllowed as reason:
        pytest.skip(str(reason))


class Job:
    """The ranks of a job that trains slowly."""

    def __init__(self, daemon, name, path, **more):
        self.daemon, self.name = daemon, name
        self.config = nvme_jobs.config(path, stage=2)
        self.options = {**OPTIONS, **more}
        self.ranks = []

    def start(self):
        lines = [trainers.command(self.daemon, self.name, rank, RANKS, config=self.config, save=self.name, pause_ms=100,
                                  **self.options) for rank in range(RANKS)]
        self.ranks = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for line in lines]
        return self

    def step(self):
        jobs = [job for job in self.daemon.json("jobs")["jobs"] if job["name"] == self.name]
        return jobs[0].get("step", 0) if jobs else -1

    def reach(self, step):
        wait_for(lambda: self.step() >= step or self.ranks[0].poll() is not None, f"step {step}")
        assert self.ranks[0].poll() is None, self.ranks[0].communicate()[1] + self.daemon.text()[-3000:]

    def errors(self):
        """Of ranks that end with one."""
        texts = [rank.communicate(timeout=60)[1] for rank in self.ranks]
        assert all(rank.returncode == 1 for rank in self.ranks), texts
        return texts

    def result(self):
        """All states at the end."""
        texts = [rank.communicate(timeout=60)[1] for rank in self.ranks]
        assert all(rank.returncode == 0 for rank in self.ranks), "".join(texts) + self.daemon.text()[-3000:]
        directory = self.daemon.directory / "checkpoints" / self.name
        states = checkpoint_reader.Checkpoint(directory).states()
        shutil.rmtree(directory)
        return {key: (dtype, array.tobytes()) for key, (dtype, array) in states.items()}

    def kill(self):
        for rank in self.ranks:
            rank.kill()


@pytest.fixture
def jobs():
    """Starts jobs: jobs(daemon, name, path)."""
    made = []

    def make(*arguments, **options):
        made.append(Job(*arguments, **options).start())
        return made[-1]

    yield make
    for job in made:
        job.kill()


def in_memory(daemon):
    result = trainers.run(daemon, "undisturbed", RANKS, **OPTIONS)
    return {key: (dtype, array.tobytes()) for key, (dtype, array) in result.states().items()}


def check_told(job, drive):
    for text in job.errors():
        assert str(drive.path) in text and "Input/output error" in text and "UNAVAILABLE" in text, text


def test_a_drive_that_fails_in_a_step_and_works_again(real, drive, directory, jobs):
    """EIO: ranks are told which file, the committed step stays, other jobs go on; and so does this one when the drive is back."""
    other = directory / "other"
    other.mkdir()
    daemon = real("--nvme-path", drive.path, "--nvme-path", other)
    expected = in_memory(daemon)
    bystander = jobs(daemon, "bystander", other)
    victim = jobs(daemon, "victim", drive.path)
    victim.reach(3)
    drive.fail()
    check_told(victim, drive)
    step = victim.step()
    assert 3 <= step < OPTIONS["steps"]
    # Still failing: not a step further, and the job is still there.
    check_told(victim.start(), drive)
    assert victim.step() == step
    drive.heal()
    assert victim.start().result() == expected
    assert bystander.result() == expected
    assert daemon.process.poll() is None


def test_a_drive_that_fails_while_files_are_made(real, directory, jobs):
    """The loop device's own file has no room: writes fail in the middle, and the attach says so."""
    good = directory / "good"
    good.mkdir()
    try:
        with loop_drive.small_memory(directory / "memory", 4) as memory, \
                loop_drive.loop_drive(directory, 64, memory / "image") as drive:
            daemon = real("--nvme-path", good)
            job = jobs(daemon, "gpt", drive.path, sizes=(1_000_000,))
            for text in job.errors():
                # The kernel tells which: it may also take a small write, and lose it.
                told = ("Input/output error", "errno 28", "does not read back")
                assert str(drive.path) in text and any(one in text for one in told), text
            daemon.cli("remove", "gpt", "--force", check=False)
            wait_for(lambda: not list(drive.path.glob("zeroshard/job-*")), "what was made to go")
            assert jobs(daemon, "other", good).result() == in_memory(daemon)
            assert daemon.stop() == 0
    except loop_drive.NotAllowed as reason:
        pytest.skip(str(reason))


def test_a_drive_that_fills_up_under_a_job_does_not_disturb_it(real, drive, jobs):
    daemon = real("--nvme-path", drive.path)
    job = jobs(daemon, "gpt", drive.path)
    job.reach(2)
    with pytest.raises(OSError), open(drive.path / "full", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    late = jobs(daemon, "late", drive.path)
    for text in late.errors():
        assert "RESOURCE_EXHAUSTED" in text and str(drive.path) in text, text
    assert job.result() == in_memory(daemon)


def test_two_jobs_share_a_path(real, directory, jobs):
    path = directory / "nvme"
    path.mkdir()
    daemon = real("--nvme-path", path)
    both = [jobs(daemon, name, path) for name in ("a", "b")]
    expected = in_memory(daemon)
    assert both[0].result() == expected and both[1].result() == expected
    wait_for(lambda: not list(path.glob("zeroshard/job-*")), "the files to go")


def spoil(path, how):
    if how == "replaced":
        shutil.rmtree(path)
        path.write_text("a file")
    elif how == "removed":
        shutil.rmtree(path)
    elif how == "read-only":
        os.chmod(path / "zeroshard", 0o777)  # anybody could have written what lies there


@pytest.mark.parametrize("how, words", [
    ("removed", "does not exist"), ("replaced", "is not a directory"), ("read-only", "")])
def test_a_path_that_is_spoilt_under_a_job(real, directory, jobs, how, words):
    """The job has its files open and goes on; a further one is refused."""
    path = directory / "nvme"
    path.mkdir()
    daemon = real("--nvme-path", path)
    job = jobs(daemon, "gpt", path)
    job.reach(2)
    spoil(path, how)
    for text in jobs(daemon, "late", path).errors():
        assert str(path) in text and words in text, text
    assert job.result() == in_memory(daemon)


def test_a_worker_whose_files_are_gone_says_which(real, directory, jobs):
    """Killed after somebody removed the files: there is nothing to go on with, and nobody else is disturbed."""
    path, other = directory / "nvme", directory / "other"
    path.mkdir()
    other.mkdir()
    daemon = real("--nvme-path", path, "--nvme-path", other)
    bystander = jobs(daemon, "bystander", other)
    job = jobs(daemon, "gpt", path)
    job.reach(2)
    shutil.rmtree(path)
    os.kill(nvme_jobs.workers(daemon.process.pid, "gpt")[0], signal.SIGKILL)
    for text in job.errors():
        assert str(path) in text, text
    assert bystander.result() == in_memory(daemon)


def test_yesterdays_longer_file_is_not_taken_for_todays(real, directory, jobs):
    """A daemon that was killed left the files of a larger job, of the same name."""
    path = directory / "nvme"
    path.mkdir()
    daemon = real("--nvme-path", path)
    yesterday = jobs(daemon, "gpt", path, sizes=(300_000, 513, 7, 0, 1, 20_000), seed=7)
    yesterday.reach(2)
    files = {file.name: file.read_bytes() for file in path.glob("zeroshard/job-*.extent")}
    assert files
    yesterday.kill()
    workers = nvme_jobs.workers(daemon.process.pid, "gpt")
    daemon.process.kill()
    daemon.process.wait()
    wait_for(lambda: not any(nvme_jobs.is_worker(pid, "gpt") for pid in workers), "the end of its workers")
    daemon.start()
    assert all(name in daemon.text() for name in files)
    today = jobs(daemon, "gpt", path)
    today.reach(2)
    # Whoever puts them back in the middle does not matter either.
    for name, data in files.items():
        if not (path / "zeroshard" / name).exists():
            pathlib.Path(path / "zeroshard" / name).write_bytes(data)
    assert today.result() == in_memory(daemon)

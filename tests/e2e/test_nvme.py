"""Jobs with an NVMe tier as the daemon sees them: paths, rooms, limits, moves. Most workers are faked."""

import json
import os
import re
import subprocess
import urllib.request

import daemon as programs
import pytest
import trainers
from daemon import wait_for

LARGE = [["w", [1 << 20], "bfloat16"]]


def nvme_config(path=None, device="nvme", stage=2, **own):
    offload = {"device": device, "pin_memory": False}
    if path is not None:
        offload["nvme_path"] = str(path)
    return json.dumps({
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload}, "zeroshard": own,
    })


@pytest.fixture
def paths(directory):
    """Two directories on a disk."""
    made = [directory / "nvme0", directory / "nvme1"]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def small_disk(directory):
    """A file system of 8 MiB."""
    path = directory / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_states_are_listed_where_they_rest(start, probe, paths):
    daemon = start("--nvme-path", f"{paths[0]}=3", "--nvme-path", paths[1])
    reply = probe(daemon, job="gpt", config=nvme_config()).attached()
    lines = reply["ledger"]
    on_nvme = {line["state"] for line in lines if line["tier"] == "nvme"}
    assert on_nvme == {"master", "exp_avg", "exp_avg_sq", "slots"}
    view = daemon.job("gpt")
    assert sum(line["bytes"] for line in lines if line["tier"] == "host") == view["summary"]["bytes"]
    assert {line["state"] for line in lines if line["tier"] == "host"} >= {"staging", "slot table"}


def test_without_a_path_there_is_advice(start, probe, paths):
    daemon = start()
    message = probe(daemon, job="gpt", config=nvme_config()).refused("FAILED_PRECONDITION")
    assert "--nvme-path" in message
    # The daemon's own user may name any directory.
    probe(daemon, job="gpt", config=nvme_config(paths[0])).attached()


def test_paths_that_will_not_do_are_refused_at_attach(daemon, probe, directory):
    (directory / "file").write_text("not a directory")
    for path, code, words in [
        (directory / "missing", "NOT_FOUND", "does not exist"),
        (directory / "file", "INVALID_ARGUMENT", "is not a directory"),
    ]:
        message = probe(daemon, job="gpt", config=nvme_config(path)).refused(code)
        assert str(path) in message and words in message
    assert daemon.json("jobs")["jobs"] == []


def test_a_read_only_file_system_is_refused(daemon, probe, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    message = probe(daemon, job="gpt", config=nvme_config(small_disk)).refused("FAILED_PRECONDITION")
    assert "read-only" in message


def test_memory_is_taken_with_a_warning_and_its_end_is_seen(daemon, probe, small_disk):
    reply = probe(daemon, job="small", config=nvme_config(small_disk)).attached()
    assert any("tmpfs" in warning for warning in reply["warnings"])
    message = probe(daemon, job="large", config=nvme_config(small_disk), parameters=LARGE).refused("RESOURCE_EXHAUSTED")
    assert str(small_disk) in message and "free" in message
    (small_disk / "full").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    message = probe(daemon, job="late", config=nvme_config(small_disk)).refused("RESOURCE_EXHAUSTED")
    assert str(small_disk) in message
    assert daemon.job("small")["summary"]["state"] == "ready"


def test_limits_of_a_job_and_of_all_jobs(start, probe, paths):
    daemon = start("--nvme-path", paths[0], config="nvme_limit: 1MiB\njob_nvme_limit: 900KiB\n")
    message = probe(daemon, job="gpt", config=nvme_config(), parameters=LARGE).refused("RESOURCE_EXHAUSTED")
    assert "the daemon's job_nvme_limit is 900.00 KiB" in message
    message = probe(daemon, job="gpt", config=nvme_config(nvme_limit=5000)).refused("RESOURCE_EXHAUSTED")
    assert "zeroshard.nvme_limit is 4.88 KiB" in message
    message = probe(daemon, job="gpt", config=nvme_config(host_limit=5000)).refused("RESOURCE_EXHAUSTED")
    assert "zeroshard.host_limit is 4.88 KiB" in message
    config = nvme_config(nvme_limit=1 << 30)
    message = probe(daemon, job="gpt", config=config, parameters=LARGE).refused("RESOURCE_EXHAUSTED")
    assert "nvme_limit is 1.00 MiB, of which other jobs hold 0 B" in message
    probe(daemon, job="gpt", config=nvme_config()).attached()


def test_files_go_with_their_job_and_leftovers_at_the_next_start(start, probe, paths):
    daemon = start("--nvme-path", paths[0])
    one = probe(daemon, job="gpt", config=nvme_config())
    one.attached()
    own = paths[0] / "zeroshard"
    (own / ".tmp-job-0000000000000001.w0.p0.extent-1").write_text("half made")
    (own / "photo.jpg").write_text("a user's")
    daemon.cli("remove", "gpt", "--force")
    wait_for(lambda: not daemon.json("jobs")["jobs"], "the end of the job")
    assert daemon.stop() == 0
    assert "of an earlier daemon" not in daemon.text()
    daemon.start()
    assert sorted(entry.name for entry in own.iterdir()) == ["lock", "photo.jpg"]
    assert "photo.jpg" in daemon.text() and "is left alone" in daemon.text()
    files = daemon.json("nvme", "--remove-stale")["files"]
    assert [(f["name"], f["kind"]) for f in files] == [("photo.jpg", "foreign")]
    assert "photo.jpg" in daemon.cli("nvme").stdout


def ledger_tiers(daemon, job, state):
    """{tier: bytes} of one kind of state."""
    view = daemon.job(job)
    tiers = {}
    for line in view["ledger"]:
        if line["state"] == state:
            tiers[line["tier"]] = tiers.get(line["tier"], 0) + line["bytes"]
    host = sum(line["bytes"] for line in view["ledger"] if line["tier"] == "host")
    assert host == view["summary"]["bytes"]
    return tiers


def test_states_move_and_the_ledger_says_so(start, probe, paths):
    daemon = start("--nvme-path", paths[0], metrics="127.0.0.1:0")
    probe(daemon, job="gpt", config=nvme_config(device="cpu", path=paths[0]), parameters=LARGE).attached()
    assert set(ledger_tiers(daemon, "gpt", "exp_avg")) == {"host"}
    out = daemon.cli("move", "gpt", "--to", "nvme", "--rate", "100MiB").stdout
    assert "12.00 MiB of states move to nvme" in out
    assert ledger_tiers(daemon, "gpt", "exp_avg") == {"nvme": 4 << 20}
    assert daemon.job("gpt")["moving"], "the faked worker moves nothing"
    daemon.cli("move", "gpt", "--to", "host", "--unit", "w", "--wait")
    assert ledger_tiers(daemon, "gpt", "exp_avg") == {"host": 4 << 20}
    tiers = daemon.json("tiers")
    assert [tier["name"] for tier in tiers["tiers"]] == ["host", f"nvme {paths[0]}"]
    assert tiers["jobs"][0]["nvme_bytes"] == tiers["tiers"][1]["used_bytes"] > 2 * (12 << 20)


def test_moves_that_cannot_be_are_refused(start, probe, paths):
    daemon = start("--nvme-path", paths[0], config="job_host_limit: 24MiB\n")
    plain = nvme_config(device="cpu")
    probe(daemon, job="host", config=plain).attached()
    config = nvme_config(paths[0], durability="power")
    probe(daemon, job="power", config=config).attached()
    probe(daemon, job="large", config=nvme_config(paths[0]), parameters=LARGE).attached()
    for arguments, words in [
        (["host", "--to", "nvme"], "give offload_optimizer.nvme_path in its ds_config"),
        (["power", "--to", "host"], "survive the loss of power"),
        (["large", "--to", "tape"], 'expected "nvme", "host" or "gpu", found "tape"'),
        (["large", "--to", "gpu"], "does not run on GPUs"),
        (["large", "--to", "host", "--state", "gradients"], 'expected "optimizer"'),
        (["large", "--to", "host", "--unit", "x"], 'has no unit "x"'),
        (["large", "--to", "host", "--unit", "7"], 'has no unit "7"'),
        (["large", "--to", "host"], "but its host_limit is 24.00 MiB"),
        (["nobody", "--to", "host"], "there is no job 'nobody'"),
    ]:
        result = daemon.cli("move", *arguments, check=False)
        assert result.returncode == 1 and words in result.stderr, result.stderr
    assert set(ledger_tiers(daemon, "large", "exp_avg")) == {"nvme"}


def test_two_daemons_do_not_share_a_path(start, probe, paths, directory):
    start("--nvme-path", paths[0])
    other = directory / "b"
    other.mkdir()
    second = programs.Daemon(other, "--nvme-path", paths[0]).start()
    try:
        message = probe(second, job="gpt", config=nvme_config()).refused("FAILED_PRECONDITION")
        assert "another daemon" in message
    finally:
        assert second.stop() == 0


def offloaded(device, **more):
    """What makes a job of the deterministic trainer keep its states there."""
    return {"zero_optimization": {"offload_optimizer": {"device": device, "pin_memory": False, **more}}}


def metric(daemon, name, **labels):
    """The sum of a family's series that have these labels."""
    address = daemon.json("status")["metrics_address"]
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines
               if all(f'{key}="{value}"' in line for key, value in labels.items()))


@pytest.mark.skipif(trainers.missing() is not None, reason=f"{trainers.missing()} is not built")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_job_whose_states_move_while_it_trains_is_bit_equal(start, paths, stage):
    daemon = start("--nvme-path", paths[0], "--nvme-path", paths[1], worker=trainers.WORKER, metrics="127.0.0.1:0")
    options = dict(stage=stage, steps=600, dtype="bf16")
    still = trainers.run(daemon, "still", 2, config=offloaded("cpu"), **options)
    lines = [trainers.command(daemon, "moved", rank, 2, config=offloaded("nvme"), save="moved", **options)
             for rank in range(2)]
    ranks = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for line in lines]
    wait_for(lambda: [j for j in daemon.json("jobs")["jobs"] if j["name"] == "moved" and j["step"] > 5], "steps")
    seen = []
    while ranks[0].poll() is None and ranks[1].poll() is None and len(seen) < 6:
        to = "host" if len(seen) % 2 == 0 else "nvme"
        if daemon.cli("move", "moved", "--to", to, "--wait", check=False).returncode != 0:
            break
        view = daemon.cli("job", "moved", "--json", check=False)
        if view.returncode != 0:  # the job has come to its end
            break
        seen.append((to, json.loads(view.stdout)["counters"]["nvme_state_bytes"]))
    assert all(rank.wait(trainers.PATIENCE) == 0 for rank in ranks), daemon.text()
    assert len(seen) >= 2, "the job was over before its states had moved"
    assert all((found == 0) == (to == "host") for to, found in seen), seen
    moved = trainers.checkpoint_reader.Checkpoint(daemon.directory / "checkpoints" / "moved").states()
    expected = still.states()
    assert moved.keys() == expected.keys()
    for key, value in expected.items():
        assert moved[key][0] == value[0] and bytes(moved[key][1]) == bytes(value[1]), key
    assert metric(daemon, "zeroshard_tier_used_bytes", tier="nvme") >= 0
    wait_for(lambda: not [f for path in paths for f in (path / "zeroshard").glob("job-*")], "the files to go")
    assert not re.search("level=error", daemon.text())

"""Ranks and workers that die, jobs that are kept and removed, and what operators can see of it."""

import os
import signal
import urllib.request

import daemon as programs
import pytest
from daemon import wait_for

CONFIG = "rejoin_timeout: 300ms\n"


def state(daemon, job="gpt"):
    return daemon.job(job)["summary"]["state"]


def metrics(daemon):
    address = daemon.json("status")["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        return reply.read().decode()


def test_all_ranks_gone_leaves_an_idle_job_that_can_be_joined_again(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    one.kill()
    wait_for(lambda: state(daemon) == "idle", "an idle job")
    reply = probe(daemon, job="gpt").attached()
    assert reply["resumed"] and reply["generation"] > 1


def test_a_dead_rank_is_noticed_and_replaced_while_the_other_waits(daemon, probe):
    one = probe(daemon, job="gpt", rank=0, world_size=2)
    two = probe(daemon, job="gpt", rank=1, world_size=2)
    one.attached(), two.attached()
    two.kill()
    wait_for(lambda: daemon.job("gpt")["ranks"][1]["state"] == "dead", "the death")
    assert state(daemon) == "ready"
    assert probe(daemon, job="gpt", rank=1, world_size=2).attached()["resumed"]
    assert one.ask("page")["poisoned"] == 0


def test_survivors_are_told_when_no_successor_comes(start, probe):
    daemon = start(config=CONFIG)
    one = probe(daemon, job="gpt", rank=0, world_size=2)
    two = probe(daemon, job="gpt", rank=1, world_size=2)
    one.attached(), two.attached()
    two.kill()
    wait_for(lambda: one.ask("page")["poisoned"] == 1, "the poison")
    assert "no successor attached" in daemon.job("gpt")["summary"]["reason"]
    one.kill()
    wait_for(lambda: state(daemon) == "idle", "an idle job")


def test_detach_ends_the_job_and_keep_keeps_it(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    assert one.ask("detach")["ok"]
    wait_for(lambda: not daemon.json("jobs")["jobs"], "the end of the job")
    two = probe(daemon, job="gpt")
    assert not two.attached()["resumed"]
    assert two.ask("keep")["ok"]
    wait_for(lambda: state(daemon) == "idle", "an idle job")
    assert daemon.cli("remove", "gpt").stdout.startswith("removed gpt")
    assert daemon.json("jobs")["jobs"] == []
    assert daemon.json("tiers")["tiers"][0]["used_bytes"] == 0


def test_a_job_in_use_is_removed_only_by_force(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    refused = daemon.cli("remove", "gpt", check=False)
    assert refused.returncode == 1 and f"process {one.pid}" in refused.stderr
    daemon.cli("remove", "gpt", "--force")
    assert daemon.json("jobs")["jobs"] == []


def test_a_killed_worker_is_started_again_with_its_reason(daemon, probe):
    probe(daemon, job="gpt").attached()
    victim = daemon.job("gpt")["workers"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    worker = wait_for(
        lambda: next((w for w in daemon.job("gpt")["workers"] if w["restarts"] == 1 and w["state"] == "ready"), None),
        "the restart")
    assert worker["worker"] == 1 and "signal 9" in worker["last_exit"] and worker["pid"] != victim
    assert state(daemon) == "ready"


def test_a_worker_that_dies_when_it_is_ready_comes_back(daemon, probe):
    probe(daemon, job="gpt.flaky").attached()
    wait_for(lambda: all(w["restarts"] == 1 and w["state"] == "ready" for w in daemon.job("gpt.flaky")["workers"]),
             "the restarts")


def test_a_worker_that_cannot_go_on_fails_the_attach_with_its_words(daemon, probe):
    assert "the partition is not this job's" in probe(daemon, job="gpt.fatal").refused("DATA_LOSS")
    assert daemon.json("jobs")["jobs"] == []


def test_workers_that_always_die_fail_the_attach(daemon, probe):
    message = probe(daemon, job="gpt.exit", timeout_ms=30000).refused("INTERNAL")
    assert "died 6 times" in message and "exited with code 3" in message
    assert daemon.json("jobs")["jobs"] == []


def test_workers_that_hang_are_named_in_time(daemon, probe):
    message = probe(daemon, job="gpt.hang", timeout_ms=300).refused("DEADLINE_EXCEEDED")
    assert "worker 0 is starting" in message


def test_other_jobs_do_not_notice(daemon, probe):
    good = probe(daemon, job="good")
    good.attached()
    probe(daemon, job="bad.exit", timeout_ms=30000).refused("INTERNAL")
    assert state(daemon, "good") == "ready" and good.ask("page")["poisoned"] == 0


def test_a_poisoned_generation_reaches_every_rank(daemon, probe):
    one = probe(daemon, job="gpt.poison")
    one.attached()
    wait_for(lambda: one.ask("page")["poisoned"] == 1, "the poison")
    assert "ranks 0 and 1 gather different units" in daemon.job("gpt.poison")["summary"]["reason"]


def test_workers_end_with_the_daemon(start, probe):
    daemon = start()
    probe(daemon, job="gpt").attached()
    pids = [w["pid"] for w in daemon.job("gpt")["workers"]]
    assert daemon.stop() == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not daemon.run_dir.exists()


def test_workers_end_when_the_daemon_is_killed(start, probe):
    daemon = start()
    probe(daemon, job="gpt").attached()
    pids = [w["pid"] for w in daemon.job("gpt")["workers"]]
    daemon.process.kill()
    daemon.process.wait()

    def gone():
        return all(not os.path.exists(f"/proc/{pid}/exe") for pid in pids)

    wait_for(gone, "the workers to end")
    daemon.start()


def test_export_is_whole_or_not_there(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    reply = daemon.json("export", "gpt", "--name", "model")
    assert reply["path"] == str(daemon.directory / "exports/model.safetensors")
    assert (daemon.directory / "exports/model.safetensors").read_bytes() == b"fake"
    again = daemon.cli("export", "gpt", "--name", "model", check=False)
    assert again.returncode == 1 and "model.safetensors" in again.stderr
    daemon.cli("export", "gpt", "--name", "model", "--overwrite")
    assert "name" in daemon.cli("export", "gpt", "--name", "../x", check=False).stderr
    assert sorted(p.name for p in (daemon.directory / "exports").iterdir()) == ["model.safetensors"]


def test_a_save_that_fails_leaves_no_checkpoint(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    answer = one.ask("save first")
    assert answer["code"] == "UNIMPLEMENTED" and "a fake has no state" in answer["message"]
    assert list((daemon.directory / "checkpoints").iterdir()) == []


def test_a_worker_that_dies_during_an_export_fails_it(daemon, probe):
    one = probe(daemon, job="gpt.mute")
    one.attached()
    one.process.stdin.write("export model\n")
    one.process.stdin.flush()
    # The command is on its way once the temporary file is there.
    wait_for(lambda: list((daemon.directory / "exports").iterdir()), "the export")
    os.kill(daemon.job("gpt.mute")["workers"][0]["pid"], signal.SIGKILL)
    answer = one.answer()
    assert answer["code"] in ("UNAVAILABLE", "FAILED_PRECONDITION"), answer
    assert list((daemon.directory / "exports").iterdir()) == []


def test_health_and_reflection_answer(daemon):
    assert daemon.ask("health")["serving"]
    services = daemon.ask("services")["text"]
    for name in ("zeroshard.trainer.v1.Trainer", "zeroshard.admin.v1.Admin", "grpc.health.v1.Health"):
        assert name in services


def test_who_watches_hears_of_deaths_returns_and_the_end(daemon, probe):
    one, two = (probe(daemon, job="gpt", rank=rank, world_size=2) for rank in range(2))
    for each in (one, two):
        each.attached()
    with programs.Watcher(daemon.socket, "gpt") as watcher:
        two.kill()
        assert "rank 1" in watcher.until("rank-died")["text"]
        successor = probe(daemon, job="gpt", rank=1, world_size=2)
        successor.attached()
        assert "rank 1" in watcher.until("attached")["text"]
        os.kill(daemon.job("gpt")["workers"][0]["pid"], signal.SIGKILL)
        assert "worker 0" in watcher.until("worker-died")["text"]
        watcher.until("worker-ready")
        one.ask("detach")
        successor.ask("detach")
        watcher.until("ended")
        assert watcher.process.wait(20) == 0
    with programs.Watcher(daemon.socket, "nowhere") as watcher:
        assert "there is no job 'nowhere'" in watcher.process.stdout.read()


def test_metrics_show_the_job_and_forget_it(start, probe):
    daemon = start(metrics="127.0.0.1:0")
    one = probe(daemon, job="gpt")
    one.attached()
    wait_for(lambda: 'zeroshard_step{job="gpt"}' in metrics(daemon), "the workers' counters")
    text = metrics(daemon)
    for line in ('zeroshard_ranks_attached{job="gpt"} 1', "zeroshard_tier_capacity_bytes", "zeroshard_loss_scale",
                 'zeroshard_state_bytes{holder="worker 0",job="gpt",state="exp_avg",tier="host"}',
                 'zeroshard_collective_elements_total{job="gpt",kind="gather",worker="0"}',
                 "zeroshard_gather_seconds_bucket" if "zeroshard_gather_seconds" in text else "zeroshard_step"):
        assert line in text, line
    one.ask("detach")
    wait_for(lambda: 'job="gpt"' not in metrics(daemon), "the series to go")


def test_the_command_resolves_a_config(daemon, directory):
    file = directory / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, // a comment\n}')
    values = {v["key"]: v for v in daemon.json("config", str(file), "--world-size", "4")["values"]}
    assert values["zero_optimization.stage"]["origin"] == "file"
    assert values["batch.micro"]["value"] == "2"
    assert "zero_optimization.stage" in daemon.cli("config", str(file)).stdout
    file.write_text('{"zero_optimisation": 1, "zero_optimization": {"stage": "many"}}')
    bad = daemon.cli("config", str(file), check=False)
    assert bad.returncode == 1 and "stage" in bad.stderr
    assert daemon.cli("config", str(directory), check=False).returncode == 1
    assert "is a directory" in daemon.cli("config", str(directory), check=False).stderr


def test_wrong_usage_of_the_command_is_told_apart(daemon):
    assert daemon.cli("no-such-command", check=False).returncode == 2
    missing = daemon.cli("job", "nowhere", check=False)
    assert missing.returncode == 1 and "there is no job 'nowhere'" in missing.stderr


def test_jobs_that_come_and_go_leave_no_descriptor_behind(daemon, probe):
    def descriptors():
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    def one_job():
        one = probe(daemon, job="gpt")
        one.attached()
        one.ask("detach")
        one.close()
        wait_for(lambda: not daemon.json("jobs")["jobs"], "the end of the job")

    one_job()
    before = wait_for(descriptors, "a count")
    for _ in range(10):
        one_job()
    # Connections close a moment after their peer.
    wait_for(lambda: descriptors() <= before + 2, f"{before} descriptors")
    assert list((daemon.run_dir / "jobs").iterdir()) == []


def test_a_rank_that_waits_hears_that_the_daemon_ends(start, probe):
    daemon = start()
    one = probe(daemon, job="gpt", world_size=2)
    wait_for(lambda: daemon.json("jobs")["jobs"], "the job")
    assert daemon.stop() == 0
    assert "removed" in one.refused("CANCELLED")

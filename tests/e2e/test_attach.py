"""Attaching to a job: agreement between ranks, limits, deadlines, and what lies behind the descriptors."""

import json
import os
import time

import daemon as programs
import pytest
from daemon import wait_for

STAGE = '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": %d}}'


def run_pair(probe, daemon, first, second):
    """Two ranks of one job; returns both probes."""
    one = probe(daemon, job="gpt", rank=0, **first)
    wait_for(lambda: daemon.json("jobs")["jobs"], "the job")
    return one, probe(daemon, job="gpt", rank=1, **second)


def test_ranks_get_memory_tokens_and_sockets(daemon, probe):
    one, two = run_pair(probe, daemon, {"world_size": 2}, {"world_size": 2})
    replies = [one.attached(), two.attached()]
    assert replies[0]["token"] != replies[1]["token"] and len(replies[0]["token"]) == 64
    assert [r["kind"] for r in replies[0]["regions"]] == [
        "KIND_PARAMETER_WINDOW", "KIND_GRADIENT_WINDOW", "KIND_RANK_PAGE"]
    assert replies[0]["worker_socket"].endswith("worker-0.sock")
    assert replies[1]["worker_socket"].endswith("worker-1.sock")
    assert replies[0]["layout_fingerprint"] == replies[1]["layout_fingerprint"]
    assert replies[0]["generation"] == 1 and not replies[0]["resumed"]
    assert sum(line["bytes"] for line in replies[0]["ledger"]) == daemon.job("gpt")["summary"]["bytes"]


def test_descriptors_are_sealed_and_only_gradients_can_be_written(daemon, probe):
    one = probe(daemon, job="gpt")
    reply = one.attached()
    regions = one.ask("regions")["regions"]
    assert [r["bytes"] for r in regions] == [r["bytes"] for r in reply["regions"]]
    assert all(r["sealed"] for r in regions)
    assert [r["writable"] for r in regions] == [False, True, False]
    assert regions[0]["mode"] == regions[2]["mode"] == 0o400
    assert one.ask("page") == {"ok": True, "poisoned": 0, "generation": 1}


def test_a_token_of_a_detached_rank_opens_nothing(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    assert one.ask("keep")["ok"]
    answer = one.ask("regions")
    assert not answer["ok"] and "attach again" in answer["answer"]


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "x" * 129, "a b", "ü"])
def test_a_name_that_is_none_is_refused(daemon, probe, name):
    assert "name" in probe(daemon, job=name).refused("INVALID_ARGUMENT")
    assert daemon.json("jobs")["jobs"] == []


def test_the_longest_name_works(daemon, probe):
    probe(daemon, job="x" * 128).attached()


def test_world_sizes_that_disagree_fail_both_ranks(daemon, probe):
    one, two = run_pair(probe, daemon, {"world_size": 2}, {"world_size": 3})
    for each in (one, two):
        assert "world_size is 2 on rank 0 but 3 on rank 1" in each.refused("INVALID_ARGUMENT")
    assert daemon.json("jobs")["jobs"] == []


def test_shapes_that_disagree_name_the_parameter(daemon, probe):
    first = {"world_size": 2, "parameters": [["fc.weight", [4, 2], "float32"]]}
    second = {"world_size": 2, "parameters": [["fc.weight", [2, 4], "float32"]]}
    for each in run_pair(probe, daemon, first, second):
        message = each.refused("INVALID_ARGUMENT")
        assert "'fc.weight': float32[4,2]" in message and "'fc.weight': float32[2,4]" in message


def test_configs_that_disagree_show_the_key(daemon, probe):
    one, two = run_pair(
        probe, daemon, {"world_size": 2, "config": STAGE % 3}, {"world_size": 2, "config": STAGE % 2})
    for each in (one, two):
        assert "zero_optimization.stage" in each.refused("INVALID_ARGUMENT")


def test_a_rank_that_never_comes_is_named_in_time(daemon, probe):
    begin = time.monotonic()
    one = probe(daemon, job="gpt", rank=1, world_size=3, timeout_ms=300)
    assert "missing: ranks 0, 2" in one.refused("DEADLINE_EXCEEDED")
    assert time.monotonic() - begin < 5
    assert daemon.json("jobs")["jobs"] == []


def test_a_rank_that_dies_while_it_waits_leaves_nothing(daemon, probe):
    one = probe(daemon, job="gpt", world_size=2)
    wait_for(lambda: daemon.json("jobs")["jobs"], "the job")
    one.kill()
    wait_for(lambda: not daemon.json("jobs")["jobs"], "the job to go")


def test_the_same_rank_twice_names_the_holder(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    assert f"held by process {one.pid}" in probe(daemon, job="gpt").refused("ALREADY_EXISTS")


def test_a_second_job_of_the_same_name_is_told_what_to_do(daemon, probe):
    probe(daemon, job="gpt").attached()
    message = probe(daemon, job="gpt", config=STAGE % 1).refused("ALREADY_EXISTS")
    assert "zero_optimization.stage" in message and "zeroshard remove gpt" in message


@pytest.mark.parametrize(
    "spec, words",
    [
        ({"rank": 2, "world_size": 2}, ["rank", "2"]),
        ({"world_size": 0}, ["world_size"]),
        ({"world_size": 100000}, ["world_size", "100000"]),
        ({"world_size": 4, "local_ranks": 2}, ["local_ranks"]),
        ({"config": '{"zero_optimization": {"stage": 5}}'}, ["stage"]),
        ({"config": "[]"}, []),
        ({"config": '{"train_micro_batch_size_per_gpu": 1}'}, ["optimizer"]),
        ({"parameters": []}, ["manifest"]),
        ({"parameters": [["w", [4], "float32"], ["w", [4], "float32"]]}, ["w"]),
        ({"parameters": [["w", [1 << 40, 1 << 40], "float32"]]}, ["w"]),
    ],
)
def test_bad_requests_are_refused_with_a_reason(daemon, probe, spec, words):
    message = probe(daemon, job="gpt", **spec).refused("INVALID_ARGUMENT")
    for word in words:
        assert word in message
    assert daemon.json("jobs")["jobs"] == []


def test_more_memory_than_the_machine_has_is_refused_with_the_sum(daemon, probe):
    spec = {"parameters": [["w", [1 << 40], "bfloat16"]]}
    message = probe(daemon, job="gpt", **spec).refused("RESOURCE_EXHAUSTED")
    assert "TiB of host memory" in message and "exp_avg" in message and "MemAvailable" in message
    assert daemon.json("jobs")["jobs"] == []
    assert list((daemon.run_dir / "jobs").iterdir()) == []


def test_the_daemons_own_limit_is_named(start, probe):
    daemon = start("--host-memory-limit", "1MiB")
    message = probe(daemon, job="gpt").refused("RESOURCE_EXHAUSTED")
    assert "host_memory_limit is 1.00 MiB" in message


def batch_config(train, micro, accumulation):
    given = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro,
             "gradient_accumulation_steps": accumulation}
    given = {key: value for key, value in given.items() if value is not None}
    return json.dumps({**given, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}})


def attach_all(probe, daemon, ranks, config):
    probes = [probe(daemon, job="gpt", rank=rank, world_size=ranks, config=config) for rank in range(ranks)]
    return [one.answer() for one in probes]


@pytest.mark.parametrize("train, micro, accumulation, ranks, words", [
    (8, 2, 1, 1, "8 is not 2 * 1 * 1 = 2"),
    (256, 2, 18, 7, "256 is not 2 * 18 * 7 = 252"),
    (None, None, None, 2, "train_batch_size not given"),
])
def test_a_batch_that_does_not_divide_is_refused_on_every_rank(daemon, probe, train, micro, accumulation, ranks, words):
    for answer in attach_all(probe, daemon, ranks, batch_config(train, micro, accumulation)):
        assert not answer["ok"] and answer["code"] == "INVALID_ARGUMENT"
        assert words in answer["message"], answer["message"]
    assert daemon.json("jobs")["jobs"] == []


@pytest.mark.parametrize("train, micro, accumulation, batch", [
    (32, None, None, (32, 8, 1)), (32, 4, None, (32, 4, 2)), (None, 4, 2, (32, 4, 2)),
])
def test_what_a_batch_lacks_follows_from_the_ranks(daemon, probe, train, micro, accumulation, batch):
    for answer in attach_all(probe, daemon, 4, batch_config(train, micro, accumulation)):
        config = answer["reply"]["config"]
        assert (config["train_batch_size"], config["micro_batch_size"], config["accumulation_steps"]) == batch


def test_unresolved_autos_are_named_together(daemon, probe):
    config = json.dumps({
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    message = probe(daemon, job="gpt", config=config).refused("INVALID_ARGUMENT")
    for key in ("train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization.reduce_bucket_size"):
        assert key in message, message


def test_a_full_dev_shm_does_not_matter(daemon, probe):
    """Regions are anonymous memory files, so nothing of a job lies in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    probe(daemon, job="gpt").attached()
    assert set(os.listdir("/dev/shm")) - before == set()


FULL = "mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 64k /dev/zero > /dev/shm/full; exec \"$@\""


@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of its own takes root")
def test_a_daemon_with_a_full_dev_shm_takes_jobs(directory, probe):
    if programs.missing():
        pytest.skip(f"{programs.missing()} is not built")
    daemon = programs.Daemon(directory)
    daemon.command = ["unshare", "--mount", "sh", "-c", FULL, "sh", *daemon.command]
    daemon.start()
    try:
        spec = {"parameters": [["w", [1 << 20], "bfloat16"]]}
        assert probe(daemon, job="gpt", **spec).attached()["ledger"]
    finally:
        assert daemon.stop() == 0


def test_the_operator_sees_the_job(daemon, probe):
    one = probe(daemon, job="gpt")
    one.attached()
    view = daemon.job("gpt")
    assert view["summary"]["state"] == "ready" and view["summary"]["parameters"] == 8
    assert view["ranks"] == [{"rank": 0, "pid": one.pid, "state": "attached", "home_worker": 0}]
    assert [w["device"] for w in view["workers"]] == ["cpu:0", "cpu:1"]
    assert "gpt" in daemon.cli("jobs").stdout
    text = daemon.cli("job", "gpt").stdout
    for word in ("exp_avg", "4P/N", "cpu:1", str(one.pid)):
        assert word in text
    assert json.loads(daemon.cli("tiers", "--json").stdout)["tiers"][0]["used_bytes"] == view["summary"]["bytes"]

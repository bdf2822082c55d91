"""Jobs on GPUs as the control plane sees them: the daemon with a worker that fakes its GPUs.

What workers and trainers do with their devices is tested elsewhere; here are the devices that there are, the
memory that is promised, the descriptors that outlive workers, and generations that end for all ranks at once.
"""

import contextlib
import os
import pathlib
import signal

import daemon as programs
import pytest
from daemon import wait_for

MIB = 1 << 20
DEAD = 2**63 - 1  # kDeadCounter


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """How many GPUs there are, for the worker's probe."""
    monkeypatch.setenv("ZEROSHARD_FAKE_GPUS", "2")
    return lambda count: monkeypatch.setenv("ZEROSHARD_FAKE_GPUS", str(count))


@pytest.fixture
def node(start):
    return start(devices=("cuda:all",))


def pair(probe, daemon, job="gpt", **spec):
    """Two ranks that have attached; their probes and replies."""
    one = probe(daemon, job=job, rank=0, world_size=2, **spec)
    two = probe(daemon, job=job, rank=1, world_size=2, **spec)
    return one, two, one.attached(), two.attached()


def uuid_of(number):
    return f"{number:08x}" + 24 * "0"


def reported(daemon, text):
    return wait_for(lambda: text in daemon.text(), text)


# What there is.


def test_without_a_driver_the_daemon_says_what_to_do_and_ends_with_code_3(directory, gpus):
    gpus(0)
    code, error = programs.run_daemon(directory, devices=("cuda:0",))
    assert code == 3
    assert "devices: cuda:0: no CUDA device: libcuda.so.1 is not there" in error


def test_a_gpu_that_there_is_not_is_named_with_those_that_there_are(directory):
    code, error = programs.run_daemon(directory, devices=("cuda:5",))
    assert code == 3
    assert "there is no cuda:5" in error and "cuda:0, cuda:1" in error


def test_a_mig_slice_is_refused_by_name_and_left_out_of_all(directory, start, gpus):
    gpus(3)
    code, error = programs.run_daemon(directory, devices=("cuda:2",))
    assert code == 3
    assert "MIG slice" in error
    assert start(devices=("cuda:all",)).json("status")["devices"] == ["cuda:0", "cuda:1"]


def test_tiers_has_a_line_for_each_gpu(start, probe):
    daemon = start("--gpu-memory-limit", "512MiB", devices=("cuda:all",))
    probe(daemon, job="gpt").attached()
    tiers = {tier["name"]: tier for tier in daemon.json("tiers")["tiers"]}
    assert tiers["gpu cuda:0"]["capacity_bytes"] == 512 * MIB
    assert tiers["gpu cuda:0"]["used_bytes"] > 0 and tiers["gpu cuda:1"]["used_bytes"] == 0
    assert "Fake GPU" in tiers["gpu cuda:1"]["note"]
    assert daemon.json("tiers")["jobs"][0]["gpu_bytes"] == tiers["gpu cuda:0"]["used_bytes"]
    assert "ROOM ON GPU" in daemon.cli("tiers").stdout


# Attach.


def test_each_rank_gets_the_gpu_of_its_worker_and_the_regions_of_the_host(node, probe):
    one, two, *replies = pair(probe, node)
    assert [reply["device"]["uuid"] for reply in replies] == [uuid_of(0), uuid_of(1)]
    assert [region["kind"] for region in replies[1]["regions"]] == [
        "KIND_PARAMETER_WINDOW", "KIND_GRADIENT_WINDOW", "KIND_RANK_PAGE", "KIND_DEVICE_SHARED",
        "KIND_DEVICE_COUNTERS"]
    assert [region["bytes"] for region in two.ask("regions")["regions"]] == [
        region["bytes"] for region in replies[1]["regions"]]
    assert replies[1]["worker_socket"].endswith("worker-1.sock")
    assert any("survive the death of trainers and workers" in text for text in replies[0]["warnings"])
    ledger = {(line["holder"], line["state"]): line["tier"] for line in replies[0]["ledger"]}
    assert ledger["worker 0", "exp_avg"] == "gpu" and ledger["rank 1", "window"] in ("gpu", "host")
    host = sum(line["bytes"] for line in replies[0]["ledger"] if line["tier"] == "host")
    assert host == node.job("gpt")["summary"]["bytes"]


def test_workers_go_to_the_gpus_that_the_ranks_name(node, probe):
    one = probe(node, job="gpt", rank=0, world_size=2, gpu=1)
    two = probe(node, job="gpt", rank=1, world_size=2)
    assert one.attached()["device"]["uuid"] == uuid_of(1)
    assert two.attached()["device"]["uuid"] == uuid_of(0)
    assert [worker["device"] for worker in node.job("gpt")["workers"]] == ["cuda:1", "cuda:0"]


def test_a_successor_on_another_gpu_is_refused_naming_both(node, probe):
    one = probe(node, job="gpt", gpu=1)
    one.attached()
    one.kill()
    wait_for(lambda: node.job("gpt")["summary"]["state"] == "idle", "the death")
    message = probe(node, job="gpt", gpu=0).refused("FAILED_PRECONDITION")
    assert "rank 0 trains on GPU-00000000-" in message and "memory is on cuda:1, GPU-00000001-" in message
    assert probe(node, job="gpt", gpu=1).attached()["resumed"]


def test_two_ranks_on_one_gpu_or_on_none_of_the_daemons_are_refused(node, probe):
    ranks = [probe(node, job="a", rank=rank, world_size=2, gpu=1) for rank in range(2)]
    assert "ranks 0 and 1 both train on cuda:1" in ranks[0].refused("FAILED_PRECONDITION")
    assert "none of the daemon's devices" in probe(node, job="b", gpu=7).refused("FAILED_PRECONDITION")


def test_more_ranks_than_gpus_are_refused(node, probe):
    assert "3 ranks and the daemon 2 GPUs" in probe(node, rank=0, world_size=3).refused("FAILED_PRECONDITION")


def test_a_job_that_does_not_fit_is_refused_with_figures(start, probe):
    daemon = start("--gpu-memory-limit", "64MiB", devices=("cuda:all",))
    large = [["w", [4096, 1024], "float32"]]
    message = probe(daemon, job="large", parameters=large).refused("RESOURCE_EXHAUSTED")
    assert "of cuda:0, 64.00 MiB free of 64.00 MiB (gpu_memory_limit)" in message and "master" in message
    first = probe(daemon, job="first")
    first.attached()
    held = daemon.json("tiers")["jobs"][0]["gpu_bytes"]
    assert 0 < held < 64 * MIB
    limited = ('{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, '
               '"zero_optimization": {"stage": 3}, "zeroshard": {"gpu_limit": %d}}')
    message = probe(daemon, job="own", config=limited % (held - 1)).refused("RESOURCE_EXHAUSTED")
    assert "zeroshard.gpu_limit" in message
    probe(daemon, job="own", gpu=1, config=limited % held).attached()


def test_a_gpu_that_another_program_has_filled_is_refused_with_the_workers_figures(node, probe):
    message = probe(node, job="a.full").refused("RESOURCE_EXHAUSTED")
    assert "needs 2.00 GiB of cuda:0, 1.00 GiB free" in message
    assert node.json("tiers")["jobs"] == []


def test_a_worker_without_device_memory_is_no_worker(node, probe):
    assert "has not handed its device memory over" in probe(node, job="a.forgets").refused("INTERNAL")


def test_configurations_that_gpus_cannot_have_are_refused_with_the_reason(node, probe):
    in_place = '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zeroshard": {"window": "in_place"}}'
    assert "memory of their own" in probe(node, config=in_place).refused("INVALID_ARGUMENT")


# What outlives whom.


def test_a_workers_successor_gets_its_device_memory_and_ranks_notice_nothing(node, probe):
    one, two, before, _ = pair(probe, node)
    worker = node.job("gpt")["workers"][0]
    os.kill(worker["pid"], signal.SIGKILL)
    wait_for(lambda: node.job("gpt")["workers"][0]["state"] == "ready" and
             node.job("gpt")["workers"][0]["restarts"] == 1, "the successor")
    reported(node, "worker 0 recovered: device memory was there")
    assert one.ask("regions")["ok"]
    assert node.job("gpt")["summary"]["generation"] == before["generation"]


def test_device_memory_is_let_go_when_the_job_ends(node, probe):
    def held():
        count = 0
        for fd in pathlib.Path(f"/proc/{node.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += "fake-device" in os.readlink(fd)
        return count

    one, two, *_ = pair(probe, node)
    assert held() == 4
    one.ask("detach")
    two.ask("detach")
    wait_for(lambda: held() == 0, "the descriptors")
    assert node.json("tiers")["tiers"][1]["used_bytes"] == 0


# Generations.


def test_a_dead_rank_aborts_the_step_and_survivors_attach_again_from_their_processes(node, probe):
    one, two, before, _ = pair(probe, node)
    two.kill()
    page = wait_for(lambda: (page := one.ask("page"))["poisoned"] and page, "the abort")
    assert page["poisoned"] == 1
    assert one.ask("counters")["summed"] == DEAD, "no stream waits for what will not come"
    reported(node, f"step 1 aborted: rank 1 (process {two.pid}) died")
    successor = probe(node, job="gpt", rank=1, world_size=2)
    after = one.ask("again")
    assert after["ok"], after
    other = successor.attached()
    assert after["reply"]["generation"] == other["generation"] > before["generation"]
    assert after["reply"]["resumed"] and other["resumed"]
    assert after["reply"]["token"] != before["token"]
    assert one.ask("page") == {"ok": True, "poisoned": 0, "generation": other["generation"]}


def test_a_rank_whose_data_plane_failed_says_so_to_all(node, probe):
    one, two, *_ = pair(probe, node)
    one.process.stdin.write("again NCCL: unhandled system error\n")
    one.process.stdin.flush()
    wait_for(lambda: two.ask("page")["poisoned"], "the abort")
    reported(node, f"step 1 aborted: rank 0 (process {one.pid}): NCCL: unhandled system error")
    assert two.ask("again")["ok"]
    assert one.answer()["ok"]


def test_a_live_rank_does_not_attach_twice_without_a_reason(node, probe):
    one, two, *_ = pair(probe, node)
    refused = one.ask("again")
    assert not refused["ok"] and "is held by process" in refused["message"]
    assert one.ask("page")["poisoned"] == 0


def test_ranks_find_each_other_by_the_store_of_their_generation(node, probe):
    one, two, before, _ = pair(probe, node)
    assert one.ask("set id 0123")["value"] == "0123"
    assert two.ask("get id 5000")["value"] == "0123"
    assert one.ask("set id 4567")["code"] == "ALREADY_EXISTS"
    assert two.ask("get other 10")["code"] == "DEADLINE_EXCEEDED"
    assert one.ask("set " + 257 * "k" + " v")["code"] == "INVALID_ARGUMENT"
    one.process.stdin.write("get other 30000\n")
    one.process.stdin.flush()
    two.kill()
    waited = one.answer()
    assert waited["code"] == "ABORTED" and "aborted: rank 1" in waited["message"]
    successor = probe(node, job="gpt", rank=1, world_size=2)
    assert one.ask("again")["ok"]
    successor.attached()
    assert one.ask("get id 10")["code"] == "DEADLINE_EXCEEDED", "another generation, another store"


def test_a_survivor_that_hangs_is_named(node, probe):
    one, two, *_ = pair(probe, node)
    two.kill()
    wait_for(lambda: one.ask("page")["poisoned"], "the abort")
    message = probe(node, job="gpt", rank=1, world_size=2, timeout_ms=300).refused("DEADLINE_EXCEEDED")
    assert f"rank 0 (process {one.pid}) neither attached again nor ended" in message


# The real worker's probe; where there is a driver it is the fake one.

REAL_WORKER = programs.BINARIES / "worker/zeroshard-worker"
FAKE_DRIVER = programs.BINARIES / "tests/fakes/cuda/libcuda.so.1"
real = pytest.mark.skipif(not REAL_WORKER.exists() or not FAKE_DRIVER.exists(), reason="no worker with CUDA is built")


@pytest.fixture
def driver(monkeypatch):
    """Puts the fake driver where programs find it, with these settings."""

    def install(settings):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(FAKE_DRIVER.parent))
        monkeypatch.setenv("ZEROSHARD_FAKE_CUDA", settings)

    return install


@real
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_the_real_worker_says_what_is_missing_without_a_driver(directory):
    code, error = programs.run_daemon(directory, devices=("cuda:0",), worker=REAL_WORKER)
    assert code == 3
    assert "libcuda.so.1 cannot be opened" in error and "install the NVIDIA driver" in error and "cpu:0" in error


@real
@pytest.mark.parametrize("settings, words", [
    ("devices=1,driver=11000", ["11.0", "driver"]),
    ("devices=1,cc=7.0", ["7.0", "compute capability"]),
    ("devices=0", ["no CUDA device"]),
])
def test_gpus_that_cannot_be_used_keep_the_daemon_from_starting(directory, driver, settings, words):
    driver(settings)
    code, error = programs.run_daemon(directory, devices=("cuda:0",), worker=REAL_WORKER)
    assert code == 3
    for word in ["devices: cuda:0: ", *words]:
        assert word in error


@real
def test_the_real_worker_lists_the_drivers_gpus(start, driver):
    driver("devices=3,memory=1G")
    daemon = start(devices=("cuda:all",), worker=REAL_WORKER)
    assert daemon.json("status")["devices"] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [tier["capacity_bytes"] for tier in daemon.json("tiers")["tiers"][1:]] == 3 * [1 << 30]


@real
def test_a_full_gpu_is_refused_with_what_its_driver_says(start, driver, probe):
    driver("devices=1,memory=1G,fault=cuMemCreate:2:CUDA_ERROR_OUT_OF_MEMORY")
    daemon = start(devices=("cuda:0",), worker=REAL_WORKER)
    message = probe(daemon, job="gpt").refused("RESOURCE_EXHAUSTED")
    assert "memory of cuda:0 for job gpt" in message and "of the device's 1024 MiB 1022 MiB are free" in message
    assert daemon.json("tiers")["jobs"] == []

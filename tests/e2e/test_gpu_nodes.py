"""One job on GPUs of two daemons, on the fake driver and the fake NCCL: the bits of the host, and deaths of every part."""

import contextlib
import itertools
import json
import os
import re
import signal
import time

import gpu_jobs
import pytest
import trainers
from daemon import wait_for
from two_daemons import free_ports

pytestmark = pytest.mark.skipif(gpu_jobs.missing() is not None, reason=f"{gpu_jobs.missing()} is not built")

SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
RANKS = 4
LONG = {"steps": 24, "pause_ms": 20, "stage": 3, "dtype": "bf16"}
ORDER = {"reduction_order": "ranks_first", "ranks_per_group": 2}


def pair(node, config="", **faults):
    """Two daemons with two of the node's four GPUs each; with faults of their workers (gpu_jobs.Node.daemon)."""
    addresses = json.dumps([f"127.0.0.1:{port}" for port in free_ports(2)])
    return [node.daemon(2, first=2 * place, config=f"cluster: {{node: {place}, addresses: {addresses}}}\n{config}",
                        **faults)
            for place in range(2)]


class Job(gpu_jobs.Job):
    """Ranks 0 and 1 at the first daemon, 2 and 3 at the second."""

    def __init__(self, node, daemons, name, tier="gpu", mirror_steps=0, **options):
        config = {**gpu_jobs.tier(tier, None), "zeroshard": {**ORDER, "gpu_mirror_steps": mirror_steps}}
        super().__init__(node, daemons[0], name, RANKS, save=None, local_ranks=2, config=config, **options)
        self.daemons = daemons

    def daemon_of(self, rank):
        return self.daemons[rank // 2]

    def kill_worker(self, place, which):
        workers = self.daemons[place].job(self.name)["workers"]
        os.kill(workers[which]["pid"], signal.SIGKILL)

    def kill_workers_for_good(self, place):
        """Kills the node's first worker until the daemon starts it no more."""
        killed = set()

        def over():
            view = self.daemons[place].job(self.name)
            pid = view["workers"][0].get("pid", 0)
            if pid and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            return view["summary"]["state"] == "failed"

        wait_for(over, "the end of the job's part")


@pytest.fixture(scope="module")
def daemons(node):
    return pair(node, "rejoin_timeout: 20s\n")


@pytest.fixture
def job(node):
    """job(daemons, **options) -> a Job that is gone when the test ends."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make(daemons, **options):
            one = Job(node, daemons, f"nodes-{next(numbers)}", **options)
            stack.callback(one.close)
            return one

        yield make


@pytest.fixture(scope="module")
def expected():
    """expected(**options): what the same ranks are left with on the host, by one daemon."""
    hosts = trainers.Daemons()
    known = {}

    def of(**options):
        options.pop("pause_ms", None)
        key = json.dumps(options)
        if key not in known:
            known[key] = hosts.train(2, RANKS, config={"zeroshard": ORDER}, **options)
        return known[key]

    yield of
    hosts.close()


def check(one, wanted):
    reports, parameters, said = one.finish()
    for found, other in zip(parameters, wanted.parameters):
        assert found.tobytes() == other.tobytes()
    for report, other in zip(reports, wanted.reports):
        assert (report["step"], report["norm"]) == (other["step"], other["norm"]), (report, other)
    return reports, said


CHOICES = [(1, "host", "bf16"), (2, "gpu", "fp32"), (3, "gpu", "bf16"), (3, "gpu-host", "bf16")]
ALL = list(itertools.product((1, 2, 3), ("gpu", "host", "nvme", "gpu-host"), ("bf16", "fp32")))


@pytest.mark.parametrize("stage, tier, dtype", CHOICES if SHORT else ALL)
def test_it_ends_with_the_bits_of_the_host(daemons, job, expected, stage, tier, dtype):
    options = {"steps": 3, "stage": stage, "dtype": dtype, "micro_steps": 3, "absent": True}
    # At the end each rank gathers alone; rank 0 also while the others train.
    one = job(daemons, tier=tier, one_by_one=stage == 3, **options)
    reports, _ = check(one.start(), expected(**options))
    # Sums of a node's two ranks in fp32, or their pieces of 16 bits; and headers.
    elements = 256 * sum(-(-size // 256) for size in trainers.SIZES)
    sent = sum(report["between_nodes"] for report in reports) / (3 * 3)
    assert 4 * elements <= sent < 4.5 * elements, (sent, elements)


def test_a_worker_that_is_killed_is_not_noticed(daemons, job, expected):
    one = job(daemons, **LONG).start()
    for step, place, which in ((4, 1, 0), (9, 0, 0), (14, 1, 1)):
        one.reach(step)
        one.kill_worker(place, which)
    reports, _ = check(one, expected(**LONG))
    assert {report["generation"] for report in reports} == {1}


@pytest.mark.parametrize("tier", ["host"] if SHORT else ["gpu", "host", "nvme"])
def test_ranks_of_both_nodes_go_on_in_their_processes_when_one_is_killed(daemons, job, expected, tier):
    one = job(daemons, tier=tier, lives=5, **LONG).start()
    for step, victims in ((4, (3,)), (10, (0,)), (15, (2, 3))):
        one.reach(step)
        for victim in victims:
            one.kill(victim)
        survivors = {rank: one.processes[rank].pid for rank in range(RANKS) if rank not in victims}
        one.start(*victims)
        one.reach(step + 1)
        assert all(one.processes[rank].pid == pid for rank, pid in survivors.items())
    reports, said = check(one, expected(**LONG))
    assert len({report["generation"] for report in reports}) == 1 and reports[0]["generation"] >= 3, reports
    assert "goes on after" in said[1], said


@pytest.mark.parametrize("tier, worker", [("half", 3)] if SHORT else [("half", 3), ("gpu", 0)])
def test_a_lost_gpu_takes_all_nodes_back_to_the_same_mirror(expected, tier, worker):
    # An error that the other processes of the GPU do not see, so that trainers can go on in theirs.
    fault = f"lost:150:CUDA_ERROR_HARDWARE_STACK_ERROR,once=1,only=--worker={worker}"
    with gpu_jobs.Node() as node:
        daemons = pair(node, "rejoin_timeout: 20s\n", cuda=fault)
        with contextlib.closing(Job(node, daemons, "gpt", tier=tier, mirror_steps=5, lives=5, **LONG)) as one:
            one.start()
            wait_for(lambda: one.view().get("counters", {}).get("times_gone_back"), "the way back")
            _, said = check(one, expected(**LONG))
        told = rf"device lost on worker {worker}: the job goes back to step (\d+), the newest one that"
        steps = [set(re.findall(told, daemon.text())) for daemon in daemons]
        assert steps[0] == steps[1] and len(steps[0]) == 1, steps
    assert all("goes on after" in text and f"device lost on worker {worker}" in text for text in said), said


def test_a_collective_that_hangs_between_nodes_ends_in_time_for_all(node, job, expected):
    one = job(pair(node, "collective_timeout: 3s\nrejoin_timeout: 20s\n"), tier="host", **LONG)
    one.start(0, 1, 3)
    one.start(2, nccl="hang:40")
    start = time.monotonic()
    texts = one.errors()
    assert time.monotonic() - start < 50
    assert all("aborted" in text.lower() for text in texts.values()), texts
    check(one.start(), expected(**LONG))


def test_the_death_of_a_daemon_ends_the_job_on_the_other_one(node, job):
    daemons = pair(node, "collective_timeout: 3s\n")
    one = job(daemons, **{**LONG, "steps": 100000}).start()
    one.reach(3)
    daemons[1].process.send_signal(signal.SIGKILL)
    daemons[1].process.wait()
    one.errors()
    # It cannot go on without what that daemon held, and says so to whoever tries.
    daemons[1].start()
    one.start()
    for text in one.errors().values():
        assert "speaks of another run" in text or "no connection to the other workers" in text, text
    wait_for(lambda: one.view()["summary"]["state"] == "failed", "the end of the job")
    daemons[0].cli("remove", one.name)
    again = job(daemons, steps=2, stage=3)
    again.start().finish()


@pytest.mark.parametrize("how", ["workers"] if SHORT else ["workers", "removed"])
def test_a_node_whose_part_fails_while_ranks_regroup_is_named(daemons, job, how):
    """On node 0, whose ranks wait for a rank of the other one; nobody waits for long."""
    one = job(daemons, lives=5, **{**LONG, "steps": 100000}).start()
    one.reach(3)
    one.kill(3)
    del one.processes[3]
    wait_for(lambda: one.view()["summary"]["state"] == "starting", "ranks that wait for the next generation")
    if how == "removed":
        daemons[1].cli("remove", one.name, "--force")
    else:
        one.kill_workers_for_good(1)
    start = time.monotonic()
    texts = one.errors()
    assert time.monotonic() - start < 10
    assert all("node 1 (" in texts[rank] for rank in (0, 1)), texts
    summary = one.view()["summary"]
    assert summary["state"] == "failed" and "node 1 (" in summary["reason"], summary
    assert ("removed" if how == "removed" else "died 6 times") in summary["reason"], summary
    for daemon in daemons:
        daemon.cli("remove", one.name, check=False)

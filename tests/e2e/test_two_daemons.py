"""One job across two daemons: the same bytes as on one, whatever dies, and clear errors where it cannot be."""

import json
import os
import subprocess
import time

import nvme_jobs
import pytest
import trainers
from daemon import run_daemon, wait_for
from two_daemons import Cluster, outcomes

pytestmark = pytest.mark.skipif(trainers.missing() is not None, reason=f"{trainers.missing()} is not built")

SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
# Two groups of two ranks, on one daemon as on two.
TWO_GROUPS = {"zeroshard": {"ranks_per_group": 2}}


@pytest.fixture(scope="module")
def cluster():
    one = Cluster(config="rejoin_timeout: 20s\n", nvme=True)
    yield one
    one.close()


@pytest.fixture(scope="module")
def one_daemon():
    daemons = trainers.Daemons()
    yield daemons.of(2)
    daemons.close()


@pytest.fixture(scope="module")
def expected(one_daemon):
    """expected(**options): the reports and the exported file of the same ranks on one daemon."""
    known = {}

    def run(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            job = f"one-{len(known)}"
            lines = [trainers.command(one_daemon, job, rank, 4, keep=True, config=TWO_GROUPS, **options)
                     for rank in range(4)]
            answers = outcomes([subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                                for line in lines])
            assert all(code == 0 for code, _, _ in answers), answers
            one_daemon.cli("export", job, "--name", job)
            file = (one_daemon.directory / "exports" / f"{job}.safetensors").read_bytes()
            one_daemon.cli("remove", job)
            known[key] = ([json.loads(output.splitlines()[-1]) for _, output, _ in answers], tensors(file))
        return known[key]

    return run


def tensors(file):
    """What a safetensors file holds but for the names of job and step."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8:8 + length])
    header.pop("__metadata__")
    return header, file[8 + length:]


def compare(cluster, job, reports, expected):
    """Every rank has sent, seen and been told the same as on one daemon, and both nodes export it."""
    others, parameters = expected
    for report, other in zip(reports, others):
        for key in ("step", "checksum", "sent"):
            assert report[key] == other[key], (key, report, other)
    files = cluster.exports(job)
    assert tensors(files[0]) == parameters
    assert files[1] == files[0]


@pytest.mark.parametrize("micro_steps", [3] if SHORT else [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_ends_with_the_bytes_of_one_daemon(cluster, expected, stage, micro_steps):
    options = {"stage": stage, "micro_steps": micro_steps, "dtype": "bf16" if micro_steps == 3 else "fp32"}
    job = f"bits-{stage}-{micro_steps}"
    reports = cluster.train(job, **options)
    compare(cluster, job, reports, expected(**options))
    cluster.remove(job)


def test_both_nodes_show_their_part(cluster):
    cluster.train("parts", steps=1)
    views = [daemon.job("parts") for daemon in cluster.daemons]
    assert [[rank["rank"] for rank in view["ranks"]] for view in views] == [[0, 1], [2, 3]]
    assert [[worker["worker"] for worker in view["workers"]] for view in views] == [[0, 1], [2, 3]]
    holders = [{line["holder"] for line in view["ledger"]} for view in views]
    assert "worker 0" in holders[0] and "worker 3" in holders[1] and not holders[0] & holders[1]
    assert all(view["summary"]["step"] == 1 for view in views)
    cluster.remove("parts")


def test_each_node_moves_its_own_states_and_says_so(cluster, expected):
    options = {"stage": 1, "micro_steps": 3, "dtype": "bf16"}
    reports = cluster.train("moves", config=nvme_jobs.config(), **options)
    names = [f"node {node} ({address})" for node, address in enumerate(cluster.addresses)]
    for node, daemon in enumerate(cluster.daemons):
        assert [nvme_jobs.on_tier(one.job("moves")) > 0 for one in cluster.daemons] == [node == 0, True]
        said = daemon.cli("move", "moves", "--to", "host", "--wait").stdout
        assert f"on {names[node]}" in said and f"nothing moves on {names[1 - node]}: say the same" in said, said
    assert not any(nvme_jobs.on_tier(daemon.job("moves")) for daemon in cluster.daemons)
    compare(cluster, "moves", reports, expected(**options))
    cluster.remove("moves")


def test_the_job_ends_on_both_when_all_ranks_have_detached(cluster):
    for _ in range(3):  # the name is free again at once
        cluster.finish([cluster.rank("ends", rank, 4, steps=1) for rank in range(4)])
    for daemon in cluster.daemons:
        wait_for(lambda: not daemon.json("jobs")["jobs"], "the end of the job")


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_worker_changes_nothing(cluster, expected, stage, node):
    options = {"stage": stage, "micro_steps": 3, "steps": 60}
    job = f"worker-{stage}-{node}"
    processes = [cluster.rank(job, rank, 4, keep=True, progress=rank == 0, **options) for rank in range(4)]
    for _ in range(5):
        processes[0].stdout.readline()
    for which in (0, 1):
        cluster.kill_worker(node, job, which)
    assert all(process.poll() is None for process in processes), "the kills came too late"
    compare(cluster, job, cluster.finish(processes), expected(**options))
    cluster.remove(job)


@pytest.mark.parametrize("victims", [(2,), (0, 1, 2, 3)] if SHORT else [(1,), (2,), (2, 3), (0, 1, 2, 3)])
def test_killed_ranks_change_nothing(cluster, expected, victims):
    """Also when no rank of a node is left, or none at all: the step in flight waits for the successors."""
    options = {"stage": 3, "micro_steps": 3, "steps": 40}
    job = "rank-" + "-".join(map(str, victims))
    processes = [cluster.rank(job, rank, 4, keep=True, progress=rank == victims[0], **options) for rank in range(4)]
    for _ in range(5):
        processes[victims[0]].stdout.readline()
    assert all(process.poll() is None for process in processes), "the kill comes too late"
    for victim in victims:
        processes[victim].kill()
    for victim in victims:
        processes[victim].communicate()
        processes[victim] = cluster.rank(job, victim, 4, keep=True, **options)
    reports = cluster.finish(processes)
    assert all(reports[victim]["resumed"] for victim in victims)
    compare(cluster, job, reports, expected(**options))
    cluster.remove(job)


def test_nodes_that_disagree_are_told_on_every_rank(cluster):
    processes = [cluster.rank("odd", rank, 4, stage=3 if rank < 2 else 2) for rank in range(4)]
    for code, _, error in outcomes(processes):
        assert code != 0
        assert "zero_optimization.stage = 3" in error and "zero_optimization.stage = 2" in error, error
        assert "node 0 (" in error and "node 1 (" in error, error
    assert all(not daemon.json("jobs")["jobs"] for daemon in cluster.daemons)


def test_a_rank_at_the_wrong_daemon_is_told_the_right_one(cluster):
    [(code, _, error)] = outcomes([cluster.rank("wrong", 2, 4, node=0)])
    assert code != 0 and f"rank 2 belongs to node 1 ({cluster.addresses[1]})" in error, error


def test_more_daemons_than_configured_are_refused(cluster):
    [(code, _, error)] = outcomes([cluster.rank("many", 0, 6, local_ranks=2)])
    assert code != 0 and "needs 3 daemons" in error and "cluster of 2" in error, error


def test_a_node_that_never_comes_is_named(cluster):
    start = time.monotonic()
    answers = outcomes([cluster.rank("alone", rank, 4, timeout_ms=1500) for rank in (2, 3)])
    assert time.monotonic() - start < 15
    for code, _, error in answers:
        assert code != 0 and f"node 0 ({cluster.addresses[0]})" in error, error
    answers = outcomes([cluster.rank("alone", rank, 4, timeout_ms=1500) for rank in (0, 1)])
    for code, _, error in answers:
        assert code != 0 and f"node 1 ({cluster.addresses[1]})" in error, error


def test_checkpoints_are_refused_with_a_reason(cluster):
    processes = [cluster.rank("saves", rank, 4, steps=1, save="x", keep=True) for rank in range(4)]
    code, _, error = outcomes(processes)[0]
    assert code != 0 and "checkpoints of such jobs are not in this build" in error, error
    for daemon in cluster.daemons:
        daemon.cli("remove", "saves", "--force")


def test_daemons_with_unequal_devices_say_so():
    cluster = Cluster(devices=(2, 1))
    try:
        for code, _, error in outcomes([cluster.rank("uneven", rank, 2) for rank in range(2)]):
            assert code != 0 and "2 devices on node 0" in error and "1 on node 1" in error, error
    finally:
        cluster.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_the_death_of_a_daemon_is_told_within_the_collective_timeout(dead):
    timeout = 3
    cluster = Cluster(devices=(1, 1), config=f"collective_timeout: {timeout}s\n")
    try:
        processes = [cluster.rank("dies", rank, 4, steps=1000000, progress=True) for rank in range(4)]
        alive = [process for rank, process in enumerate(processes) if rank // 2 != dead]
        for _ in range(3):
            alive[0].stdout.readline()
        cluster.kill_daemon(dead)
        start = time.monotonic()
        for code, _, error in outcomes(alive):
            assert code != 0
            assert f"node {dead} ({cluster.addresses[dead]})" in error, error
        assert time.monotonic() - start < timeout + 5
        view = cluster.daemons[1 - dead].job("dies")
        assert view["summary"]["state"] == "failed" and cluster.addresses[dead] in view["summary"]["reason"]
        for process in processes:
            process.kill()
        outcomes(processes)
        # What is left of the job is in the way of a new one, which says so; the daemon that comes back works on.
        cluster.daemons[dead].start()
        cluster.daemons[1 - dead].cli("remove", "dies")
        cluster.train("dies", steps=2)
    finally:
        cluster.close()


def test_a_port_in_use_is_refused_by_its_key(directory, cluster):
    addresses = json.dumps(cluster.addresses)
    code, text = run_daemon(directory, worker=trainers.WORKER, config=f"cluster: {{node: 0, addresses: {addresses}}}\n")
    assert code == 1 and "cluster.addresses" in text and cluster.addresses[0] in text, text


class Namespaces:
    """Two network namespaces with one wire between them."""

    names = ("zs-node0", "zs-node1")
    hosts = ("192.0.2.1", "192.0.2.2")

    def __init__(self):
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", "zs-wire0", "netns", self.names[0], "type", "veth",
                "peer", "name", "zs-wire1", "netns", self.names[1])
        for node, (name, host) in enumerate(zip(self.names, self.hosts)):
            self.ip("-n", name, "address", "add", f"{host}/24", "dev", f"zs-wire{node}")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", f"zs-wire{node}", "up")

    def prefixes(self):
        return [("ip", "netns", "exec", name) for name in self.names]

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    @staticmethod
    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    try:
        one = Namespaces()
    except (OSError, subprocess.CalledProcessError) as error:
        Namespaces.close(Namespaces)
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield one
    one.close()


def test_it_ends_with_the_bytes_of_one_daemon_over_a_network(namespaces, expected):
    cluster = Cluster(
        addresses=[f"{host}:7401" for host in namespaces.hosts],
        cluster_config=", allow_insecure: true",
        prefixes=namespaces.prefixes(),
    )
    try:
        options = {"stage": 3, "micro_steps": 3}
        reports = cluster.train("bits", **options)
        compare(cluster, "bits", reports, expected(**options))
        cluster.remove("bits")
        assert all("without encryption or authentication" in daemon.text() for daemon in cluster.daemons)
    finally:
        cluster.close()

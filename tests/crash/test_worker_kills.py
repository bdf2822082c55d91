"""A worker killed at every one of its fault points: clients reconnect, its successor goes on, the run ends as if nobody had died.

A worker may die five times a minute, so each incarnation dies at a later hit than the one before. No rank ever dies, and
another job of the same daemon sees nothing of it.
"""

import pytest
from crash import SHORT, WORKER, Run, fault_points, kill
from jobs import JOBS

POINTS = [point for point in (fault_points(WORKER) if WORKER.exists() else []) if point.startswith("worker.")]
HITS = [[1, 2, 4]] if SHORT else [[1, 2, 4, 7], [3, 8, 13, 21], [5, 16, 40, 100]]
SHARED = ["stage0", "stage1", "stage1-ranks-first", "stage2", "stage3", "bounded"]
GLOO = ["gloo1", "gloo3"]
NVME = ["nvme", "power", "nvme3", "nvme-gloo3"]
# Points that not every job with states on drives comes to.
TIERS = {"worker.tier.after_flush": ["power"], "worker.tier.after_prepare": ["power"], "worker.tier.before_forget": [],
         "worker.tier.move": [], "worker.tier.promote.before_forget": [], "worker.tier.rebuild.before_forget": []}


def accumulates(name):
    """Whether the job adds to sums in place: not with its first micro-step."""
    return "micro-steps" in JOBS[name]


def jobs_of(point):
    """The jobs whose workers come to the point when nobody else dies."""
    if point.startswith(("worker.hello.micro", "worker.hello.contr", "worker.drop.", "worker.bridge.before_drop",
                         "worker.resume.", "worker.device.")):
        return []
    if point.startswith(("worker.window.", "worker.gather.")):
        return ["bounded"] if SHORT or point.startswith("worker.window.") else ["stage3", "bounded", "gloo3"]
    if point.startswith("worker.bridge."):
        return GLOO
    if point.startswith("worker.tier."):
        return TIERS[point] if point in TIERS else ["nvme", "power"] if SHORT else NVME
    if point == "worker.commit.before_own_counts":
        return ["sparse"]
    names = ["stage1", "bounded"] if SHORT else SHARED + GLOO + NVME
    return [name for name in names if point != "worker.merge.group" or accumulates(name)]


CASES = [(point, name) for point in POINTS for name in jobs_of(point)]


def deaths(run, expected):
    """Finishes a run in which no rank dies; returns how often each worker did."""
    assert run.finish() == expected
    assert all(rank.deaths == 0 for rank in run.ranks)
    return run.restarts


@pytest.mark.parametrize("point, name", CASES)
def test_killed_workers_leave_no_trace(daemon, undisturbed, point, name):
    expected = undisturbed(JOBS[name])
    died = [0, 0]
    for hits in HITS:
        plans = {0: kill(point, *hits), 1: kill(point, *(hit + 1 for hit in hits))}
        for worker, count in enumerate(deaths(Run(daemon, JOBS[name], worker_plans=plans), expected)):
            died[worker] += count
    assert sum(died) > 0, f"no worker came to {point}"


PASSES = [(point, name) for name in (["stage1", "stage3"] if SHORT else [*SHARED, *GLOO, *NVME])
          for point in ("worker.apply.group", "worker.merge.group") if point == "worker.apply.group" or accumulates(name)]


@pytest.mark.parametrize("point, name", PASSES)
def test_a_worker_killed_in_the_middle_of_a_pass(daemon, undisturbed, name, point):
    """At many groups of elements, one after the other."""
    expected = undisturbed(JOBS[name])
    # A sum's groups are four times as large as an update's.
    hits = range(1, 240, 6) if point == "worker.apply.group" else range(1, 60, 2)
    hits = [17, 61, 150, 233] if SHORT else hits
    died = 0
    for first in range(0, len(hits), 4):
        plan = kill(point, *hits[first : first + 4])
        died += sum(deaths(Run(daemon, JOBS[name], worker_plans={first // 4 % 2: plan}), expected))
    assert died >= len(hits) // 4


TAKEOVER = ["worker.hello.micro_end_back", "worker.hello.contribution_back", "worker.hello.before_attached",
            "worker.hello.before_reply"]


@pytest.mark.parametrize("name", ["stage1", "stage3"] if SHORT else [*SHARED, *GLOO, *NVME])
@pytest.mark.parametrize("point", TAKEOVER)
def test_a_worker_killed_while_a_successor_of_a_rank_takes_over(daemon, undisturbed, name, point):
    expected = undisturbed(JOBS[name])
    faults = kill("client.micro_end.before", 1, 2, 3) + kill("client.scatter.before", 3, 4, 2)
    run = Run(daemon, JOBS[name], plans={1: faults}, worker_plans={1: kill(point, 1, 2)})
    assert run.finish() == expected
    assert run.ranks[1].deaths > 0 and run.ranks[0].deaths == 0
    if point != "worker.hello.contribution_back":  # there may be nothing to take back
        assert run.restarts[1] > 0


@pytest.mark.parametrize("point, name, worker", [("worker.drop.before_generation", "stage3", 0),
                                                 ("worker.drop.before_generation", "gloo3", 0),
                                                 ("worker.bridge.before_drop", "gloo3", 1)])
def test_a_worker_killed_while_it_drops_a_step(daemon, undisturbed, point, name, worker):
    options = {**JOBS[name], "steps": 8}
    expected = undisturbed(options)
    run = Run(daemon, {**options, "progress": True, "pause-ms": 5}, worker_plans={worker: kill(point, 1, 1)})
    for step in (1, 3, 5):
        run.supervise(lambda: run.step() >= step)
        run.kill_all()
    assert run.finish() == expected
    assert run.restarts[worker] > 0


@pytest.mark.parametrize("point", [point for point in POINTS if jobs_of(point) and not point.endswith(".group")])
def test_a_slow_worker_changes_nothing(daemon, undisturbed, point):
    """One worker sleeps at the point: whoever waits for it must be woken by it."""
    name = jobs_of(point)[0]
    options = {**JOBS[name], "steps": 2}
    expected = undisturbed(options)
    for worker in [1] if SHORT and "worker.drop" not in point else [0, 1]:
        plan = [f"{point}=sleep:{3 if SHORT else 20}"]
        assert deaths(Run(daemon, options, worker_plans={worker: plan}), expected) == [0, 0]


def test_a_sum_over_ranks_waits_for_a_rank_whose_own_sum_is_late(daemon, undisturbed):
    """Hung: the other worker had looked before, and nobody told it to look again."""
    options = {**JOBS["stage1"], "steps": 2}
    plans = {1: ["worker.merge.before_record=sleep:100"]}
    assert deaths(Run(daemon, options, worker_plans=plans), undisturbed(options)) == [0, 0]


@pytest.mark.parametrize("name", ["stage1", "gloo3"] if SHORT else [*SHARED, *GLOO, *NVME])
def test_another_job_does_not_notice(daemon, undisturbed, name):
    other = {**JOBS["stage3"], "steps": 60}
    expected = undisturbed(other)
    bystander = Run(daemon, {**other, "pause-ms": 40})
    plans = {0: kill("worker.apply.group", 20, 40), 1: kill("worker.step.before_ready", 1, 2)}
    run = Run(daemon, JOBS[name], plans={0: kill("client.step.before", 1, 2)}, worker_plans=plans)
    assert run.finish() == undisturbed(JOBS[name])
    assert sum(run.restarts) >= 2 and run.ranks[0].deaths > 0
    assert all(rank.running for rank in bystander.ranks), "the other job was over too early to notice anything"
    assert deaths(bystander, expected) == [0, 0]
    assert [rank.result["generation"] for rank in bystander.ranks] == [1, 1]

"""A pass over the NVMe tier fails: every rank is told what; whoever starts again ends as if nothing had happened."""

import time

import pytest
from crash import SHORT, Run
from jobs import JOBS
from test_hangs import errors_of, start_again


@pytest.mark.parametrize("name", ["nvme"] if SHORT else ["nvme", "power"])
@pytest.mark.parametrize("hit", [1, 5])
def test_a_pass_that_fails_is_told_and_done_again(daemon, undisturbed, name, hit):
    """While values are put, and in steps; the pass fails once."""
    run = Run(daemon, JOBS[name], worker_plans={1: [f"worker.tier.run=return:{hit}"]})
    texts, _ = errors_of(run, [0, 1], time.monotonic() + 20)
    for text in texts:
        assert "injected failure at fault point worker.tier.run" in text, text
        whom = "values of unit", "parameters of job", "is not applied by worker 1"
        assert any(words in text for words in whom), text
    start_again(run, undisturbed(JOBS[name]))

"""What a job occupies and moves: exactly the ledger's bytes, exactly 2P or 3P elements a step, one copy on the node."""

import os
import pathlib
import re
import urllib.request

import checkpoint_reader
import daemon as programs
import pytest
import trainers

pytestmark = pytest.mark.skipif(
    (trainers.missing() or programs.missing()) is not None,
    reason=f"{trainers.missing() or programs.missing()} is not built")

SHORT = bool(os.environ.get("ZEROSHARD_TEST_SHORT"))
SIZES = (40000, 513, 7, 0, 1, 20000)
RESIDENT = 600  # the trainer's persistence threshold at stage 3


@pytest.fixture
def real(start):
    """Starts a daemon with real workers, so many."""
    def make(workers, **options):
        return start(worker=trainers.WORKER, devices=[f"cpu:{i}" for i in range(workers)], **options)
    return make


def units(sizes):
    return checkpoint_reader.units_of([(n, "bf16", True, f"m{i}") for i, n in enumerate(sizes)])


def slices(unit, workers):
    """(data elements, elements with padding) of each worker's slice."""
    result = []
    for w in range(workers):
        begin, end = (unit.grains * i // workers * 256 for i in (w, w + 1))
        data = sum(max(0, min(end, o + n) - max(begin, o)) for o, n in unit.places.values())
        result.append((data, end - begin))
    return result


def lines_of(view):
    """{(holder, state): bytes} of a job's ledger."""
    sums = {}
    for line in view["ledger"]:
        key = (line["holder"], line["state"])
        sums[key] = sums.get(key, 0) + line["bytes"]
    return sums


def memory_files(pid, job):
    """{"partition-0": (length, allocated bytes)} of the job's regions that a process holds."""
    files = {}
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.match(rf"/memfd:zeroshard:{job}:(\S+)", os.readlink(fd))
            if match:
                info = os.stat(fd)
                files[match[1]] = (info.st_size, info.st_blocks * 512)
        except FileNotFoundError:
            pass
    return files


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_stage_3_holds_each_kind_of_state_once(real, workers, master):
    """K = 10 with the split master, which is what a bf16 job gets, and 12 without; G = 4."""
    daemon = real(workers)
    config = {"zeroshard": {"master": "auto" if master == "split" else master}}
    trainers.train_and_keep(daemon, "gpt", 2, stage=3, dtype="bf16", steps=2, sizes=SIZES, config=config)
    kind, kept = ("master, low halves", 2) if master == "split" else ("master", 4)
    lines = lines_of(daemon.job("gpt"))
    for w in range(workers):
        mine = [slices(unit, workers)[w] for unit in units(SIZES)]
        data, held = sum(d for d, _ in mine), sum(h for _, h in mine)
        expected = {"parameters": 2 * data, "gradients": 4 * data, kind: kept * data, "exp_avg": 4 * data,
                    "exp_avg_sq": 4 * data, "padding": (14 + kept) * (held - data)}
        got = {state: bytes for (holder, state), bytes in lines.items()
               if holder == f"worker {w}" and state != "records"}
        assert got == {state: bytes for state, bytes in expected.items() if bytes}
    total = sum(bytes for (holder, state), bytes in lines.items() if holder.startswith("worker")
                and state not in ("padding", "records"))
    assert total == (14 + kept) * sum(SIZES)  # the terms are named in the ledger


@pytest.mark.parametrize("master, gradients, each", [("split", 4, 16), ("split", 2, 14), ("fp32", 2, 16)])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_a_parameter_over_n(real, workers, master, gradients, each):
    """16P/N on every worker with exact gradients and the split master; 14 with 16-bit ones. Grains divide evenly."""
    sizes = (65536, 32768)
    daemon = real(workers)
    config = {"zeroshard": {"master": master},
              "data_types": {"grad_accum_dtype": "fp32" if gradients == 4 else "bf16"}}
    trainers.train_and_keep(daemon, "gpt", 2, stage=3, dtype="bf16", steps=1, sizes=sizes, config=config)
    view = daemon.job("gpt")
    for w in range(workers):
        states = [line for line in view["ledger"] if line["holder"] == f"worker {w}" and line.get("formula")]
        assert sum(line["bytes"] for line in states) == each * sum(sizes) // workers
        assert all(line["bytes"] == line["formula_bytes"] for line in states)
        assert {line["formula"] for line in states} == {"2P/N", "4P/N"}
        assert (f"worker {w}", "padding") not in lines_of(view)


@pytest.mark.parametrize("k, optimizer, own", [
    (12, "AdamW", {"master": "fp32"}), (10, "AdamW", {}), (8, "AdamW", {"master": "none"}),
    (6, "AdamW8bit", {"master": "fp32"}), (6, "AdamW", {"optimizer_states": "bf16"}), (6, "Lion", {}),
    (4, "AdamW8bit", {}), (4, "SGD", {"optimizer_states": "bf16"}), (2, "AdamW8bit", {"master": "none"}),
], ids=str)
def test_bytes_of_optimizer_state_a_parameter(real, k, optimizer, own):
    """The published ledgers K = 12, 6 and 4, and those between, of a job that trains: to the byte, scales beside it."""
    sizes = (65536, 32768)
    daemon = real(2)
    trainers.train_and_keep(daemon, "gpt", 2, stage=2, dtype="bf16", steps=2, sizes=sizes, optimizer=optimizer,
                            config={"zeroshard": own})
    lines = lines_of(daemon.job("gpt"))
    states = {key: bytes for key, bytes in lines.items() if key[0].startswith("worker")
              and key[1] not in ("gradients", "padding", "records", "scales")}
    assert sum(states.values()) == k * sum(sizes)
    scales = sum(bytes for (_, state), bytes in lines.items() if state == "scales")
    assert scales == (2 * sum(sizes) // 256 * 4 if optimizer == "AdamW8bit" else 0)


@pytest.mark.parametrize("options", [
    {"stage": 3}, {"stage": 2}, {"stage": 0}, {"stage": 1, "micro_steps": 3},
    {"stage": 3, "config": {"zeroshard": {"transport": "gloo"}}},
    {"stage": 3, "config": {"zeroshard": {"window": "copy"}, "zero_optimization": {"stage3_max_live_parameters": 1}}},
], ids=str)
def test_the_ledger_is_what_the_processes_hold(real, options):
    daemon = real(2)
    trainers.train_and_keep(daemon, "gpt", 3, dtype="bf16", steps=2, sizes=SIZES, **options)
    view = daemon.job("gpt")
    files = memory_files(view_pid(daemon), "gpt")
    ledger = sum(line["bytes"] for line in view["ledger"])
    assert ledger == view["summary"]["bytes"]
    copied = "copy" in str(options) or "gloo" in str(options)
    length = sum(size for size, _ in files.values())
    allocated = sum(used for _, used in files.values())
    assert allocated <= ledger <= length
    assert ledger == length or copied
    for w in range(2):
        mine = sum(bytes for (holder, _), bytes in lines_of(view).items() if holder == f"worker {w}")
        if options["stage"] == 3 and not copied:  # the parameters at rest lie in the window
            mine -= 2 * sum(slices(unit, 2)[w][1] for unit in units(SIZES))
        assert files[f"partition-{w}"][0] == mine
    # Workers map no region that the daemon does not have, and no partition but their own.
    for worker in view["workers"]:
        maps = pathlib.Path(f"/proc/{worker['pid']}/maps").read_text()
        mapped = set(re.findall(r"/memfd:zeroshard:gpt:(\S+)", maps))
        assert mapped <= set(files)
        assert {name for name in mapped if name.startswith("partition")} == {f"partition-{worker['worker']}"}


def view_pid(daemon):
    return daemon.json("status")["pid"]


def test_a_copied_window_is_bounded_in_truth(real):
    """With room for one unit at a time the file of the window is sparse: large units are given back."""
    sizes = (300000, 300000, 300000, 300000)
    daemon = real(2)
    config = {"zeroshard": {"window": "copy"},
              "zero_optimization": {"stage3_max_live_parameters": 300000, "stage3_prefetch_bucket_size": 0}}
    trainers.train_and_keep(daemon, "gpt", 2, stage=3, dtype="bf16", steps=2, sizes=sizes, config=config)
    lines = lines_of(daemon.job("gpt"))
    bound = lines["node", "window"]
    assert bound < 1.01 * 300000 * 2 + 4096
    size, _ = memory_files(view_pid(daemon), "gpt")["parameters-0"]
    assert size >= 4 * 300000 * 2

    def allocated():
        return memory_files(view_pid(daemon), "gpt")["parameters-0"][1]

    programs.wait_for(lambda: allocated() <= bound, "released units to be given back")


def scraped(daemon):
    """{(kind, "zeroshard_collective_elements_total"): sum over workers} of the metrics endpoint."""
    address = daemon.json("status")["metrics_address"]
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    sums = {}
    for labels, value in re.findall(r"^zeroshard_collective_elements_total\{(.*)\} (\S+)$", text, re.M):
        kind = re.search(r'kind="(\w+)"', labels)[1]
        sums[kind] = sums.get(kind, 0) + float(value)
    return sums


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("exchange", ["shm", "gloo"])
@pytest.mark.parametrize("micro_steps", [1] if SHORT else [1, 2])
def test_elements_moved_are_2p_and_3p(real, stage, exchange, micro_steps):
    """Logical elements of one rank and step: P scattered a micro-step, and P gathered after the step or, at stage 3, P
    forward and P backward. Small resident units are counted apart; bytes on the wire are reported beside them."""
    ranks, steps, workers = 2, 3, 2
    daemon = real(workers, metrics="127.0.0.1:0")
    trainers.train_and_keep(daemon, "gpt", ranks, stage=stage, dtype="bf16", steps=steps, micro_steps=micro_steps,
                            sizes=SIZES, config={"zeroshard": {"transport": exchange}})
    small = sum(u.data_elements for u in units(SIZES) if u.data_elements <= RESIDENT)
    large = sum(SIZES) - small
    # The trainer reads all parameters once more at its end, and the resident ones at its begin.
    expected = {
        "scatter_elements": ranks * steps * micro_steps * sum(SIZES),
        "step_gather_elements": ranks * steps * sum(SIZES) if stage < 3 else 0,
        "gather_elements": ranks * (2 * steps * micro_steps + 1) * large if stage == 3 else 0,
        "persistent_gather_elements": ranks * 2 * small if stage == 3 else 0,
    }

    def counted():
        counters = daemon.job("gpt")["counters"]
        return {name: counters.get(name, 0) for name in expected} == expected

    programs.wait_for(counted, f"the counters to be {expected}; they are {daemon.job('gpt')['counters']}", patience=5)
    counters = daemon.job("gpt")["counters"]
    per_step = (counters["scatter_elements"] + counters["step_gather_elements"] + counters["gather_elements"]
                - (ranks * large if stage == 3 else 0)) / ranks / steps
    if micro_steps == 1:
        assert per_step == (2 * sum(SIZES) if stage < 3 else sum(SIZES) + 2 * large)
    assert (counters["wire_bytes"] > 0) == (exchange == "gloo")
    kinds = scraped(daemon)
    assert kinds == {"scatter": expected["scatter_elements"], "step_gather": expected["step_gather_elements"],
                     "gather": expected["gather_elements"],
                     "gather_persistent": expected["persistent_gather_elements"]}


def proportional_set(pid, name):
    """(Rss, Pss) in bytes of a process's mappings of one memory file."""
    rss = pss = 0
    mine = False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            mine = name in line
        elif mine and line.startswith("Rss:"):
            rss += int(line.split()[1]) * 1024
        elif mine and line.startswith("Pss:"):
            pss += int(line.split()[1]) * 1024
    return rss, pss


def test_four_ranks_share_one_copy_of_a_frozen_parameter(real, probe):
    """16 MiB frozen: every rank sees all of it, and together they hold it once."""
    daemon = real(2)
    size = 16 << 20
    spec = {"job": "gpt", "world_size": 4, "forward_only": True, "parameters": [["w", [size // 2], "bfloat16", False]],
            "config": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'}
    probes = [probe(daemon, rank=rank, **spec) for rank in range(4)]
    for one in probes:
        one.attached()
    for one in probes:
        assert one.ask("read")["bytes"] == size
    sets = [proportional_set(one.pid, "zeroshard:gpt:parameters") for one in probes]
    assert all(rss == size for rss, _ in sets)
    assert sum(pss for _, pss in sets) <= size

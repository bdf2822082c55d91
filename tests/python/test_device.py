"""Jobs on GPUs, as far as this can be tested without one: what PyTorch is given, and what the engine asks for and when.

On the fakes run: the native calls (tests/e2e/test_gpu.py), the capsules' fields (here). Nothing here has run on a GPU.
"""

import ctypes
import gc
import pathlib
import os

import pytest
import torch
from torch.utils import dlpack

import fake_gpu
import fake_native
import models
import real_daemon
import zeroshard
from zeroshard import backend, device

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("ZEROSHARD_BIN_DIR", ROOT / "bazel-bin"))
STEPS = 3


# --- Capsules ------------------------------------------------------------------------------------


class DlTensor(ctypes.Structure):
    """DLPack's own layout, written down from its specification."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


@pytest.fixture
def native():
    file = BINARIES / "client/python/_native.so"
    if not file.exists():
        pytest.skip(f"not built: {file}")
    return real_daemon.load_native(BINARIES)


def fields(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return DlTensor.from_address(pointer(capsule, b"dltensor"))


@pytest.mark.parametrize("dtype, code, bits", [("float32", 2, 32), ("float16", 2, 16), ("bfloat16", 4, 16)])
def test_a_capsule_says_where_and_what_the_memory_is(native, dtype, code, bits):
    capsule = native.dlpack(0x7F0012345600, [3, 4, 5], dtype, 2)
    tensor = fields(capsule)
    assert (tensor.data, tensor.byte_offset) == (0x7F0012345600, 0)
    assert (tensor.device_type, tensor.device_id) == (2, 2)  # kDLCUDA
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    assert tensor.ndim == 3
    assert tensor.shape[:3] == [3, 4, 5]
    assert tensor.strides[:3] == [20, 5, 1]
    del capsule
    gc.collect()  # one that nobody took cleans up after itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [[], [7], [3, 4], [2, 0]])
def test_torch_takes_a_capsule_without_a_copy(native, dtype, shape):
    """The same code with host memory, which this PyTorch can use."""
    memory = ctypes.create_string_buffer(4096)
    name = str(dtype).replace("torch.", "")
    tensor = dlpack.from_dlpack(native.dlpack(ctypes.addressof(memory), shape, name, 0, False))
    assert (tensor.dtype, list(tensor.shape)) == (dtype, shape)
    if tensor.numel():
        assert tensor.data_ptr() == ctypes.addressof(memory)
        tensor.fill_(1.0)
        assert memory.raw[: tensor.numel() * tensor.element_size()] != bytes(
            tensor.numel() * tensor.element_size())


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has a GPU")
def test_without_cuda_the_error_says_what_is_missing():
    with pytest.raises(zeroshard.ZeroShardError) as error:
        device.require_cuda()
    assert "torch.cuda cannot be used" in str(error.value)
    assert "CUDA" in str(error.value)


def test_parameters_on_two_devices_are_refused():
    with pytest.raises(zeroshard.ZeroShardError, match="several devices: cpu, meta"):
        device.of_model([torch.zeros(1), torch.zeros(1, device="meta")])
    with pytest.raises(zeroshard.ZeroShardError, match="on meta"):
        device.of_model([torch.zeros(1, device="meta")])
    assert device.of_model([torch.zeros(1)]) is None
    assert device.of_model([]) is None


# --- The engine ----------------------------------------------------------------------------------


def batch(step, rank):
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine, rank, steps=STEPS):
    while engine.global_steps < steps:
        loss = engine(batch(engine.global_steps, rank)).square().mean()
        engine.backward(loss)
        engine.step()
    return {name: values.clone() for name, values in engine.module.state_dict().items()}


def run(ranks, stage, world, body=train, factory=models.Mlp):
    """(what each rank's body returned, the engines)."""
    job, engines = ranks.job(), {}

    def rank_body(rank):
        model = models.build(factory)
        engine, *_ = zeroshard.initialize(
            model=model, config=models.config(stage), job=job, rank=rank, world_size=world, socket=ranks.socket)
        engines[rank] = engine
        return body(engine, rank)

    return ranks.run(world, rank_body), engines


@pytest.fixture
def gpu(monkeypatch):
    daemon = fake_gpu.use(monkeypatch)
    backend.use(daemon)
    yield daemon
    backend.use(None)


def ranks_of():
    from conftest import Ranks

    return Ranks()


@pytest.fixture
def expected(monkeypatch):
    """The same training on the host."""

    def of(stage, world):
        backend.use(fake_native.Daemon())
        try:
            return run(ranks_of(), stage, world)[0]
        finally:
            backend.use(None)

    return of


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_training_is_that_of_the_host_and_ordered_by_streams(monkeypatch, expected, stage, world):
    wanted = expected(stage, world)
    daemon = fake_gpu.use(monkeypatch)
    backend.use(daemon)
    try:
        found, engines = run(ranks_of(), stage, world)
    finally:
        backend.use(None)
    for rank in range(world):
        assert all(torch.equal(found[rank][name], wanted[rank][name]) for name in wanted[rank])
        calls = engines[rank].session.calls
        kinds = {call[0] for call in calls}
        assert {"wait_on", "scatter"} <= kinds and ("release" in kinds) == (stage == 3)
        # Autograd's threads have their own current stream: the number that they see is what counts.
        assert {call[-1] for call in calls} == {7}
    assert daemon.attaches == [(0, None, "")] * world


def test_calls_name_the_stream_that_is_current(gpu):
    def body(engine, rank):
        fake_gpu.on_stream(11)
        engine(batch(0, rank))
        assert {call[-1] for call in engine.session.calls if call[0] == "release"} <= {11}
        assert 11 in {call[-1] for call in engine.session.calls if call[0] == "wait_on"}

    run(ranks_of(), 3, 1, body)


def test_resident_units_are_waited_for_after_a_step(gpu):
    def body(engine, rank):
        train(engine, rank, 1)
        last = [call for call in engine.session.calls if call[0] in ("wait_on", "scatter")][-1]
        return last, [u.index for u in engine._table.units if u.resident]

    results, _ = run(ranks_of(), 2, 1, body)
    (kind, units, stream), resident = results[0]
    assert (kind, list(units), stream) == ("wait_on", resident, 7)


def test_an_aborted_step_is_taken_up_in_the_same_process(monkeypatch, expected):
    wanted = expected(3, 1)
    gpu = fake_gpu.use(monkeypatch)

    def body(engine, rank):
        train(engine, rank, 1)
        pointers = [p.zeroshard.view.data_ptr() for p in engine._managed]
        gpu.abort_next = 1
        with pytest.raises(zeroshard.ZeroShardError) as error:
            train(engine, rank)
        assert error.value.code == "ABORTED"
        engine.rejoin(error.value)
        assert engine.global_steps == 1
        assert len(pointers) == len(engine._managed)
        return train(engine, rank)

    backend.use(gpu)
    try:
        results, _ = run(ranks_of(), 3, 1, body)
    finally:
        backend.use(None)
    assert all(torch.equal(results[0][name], wanted[0][name]) for name in wanted[0])
    assert [attach[1:] for attach in gpu.attaches] == [
        (None, ""), ("the window", "step 3 aborted: rank 1 died")]


def test_rejoin_is_for_gpus(ranks):
    def body(engine, rank):
        with pytest.raises(zeroshard.ZeroShardError, match="start the process again"):
            engine.rejoin()

    run(ranks, 2, 1, body)


def test_ranks_may_run_and_read_modules_alone(monkeypatch):
    def body(engine, rank):
        for step in range(STEPS):
            which = [rank, (rank + 1 + step) % 4] if step else [rank]
            loss = engine(batch(step, rank), which).square().mean()
            engine.backward(loss)
            engine.step()
        return {name: values.clone() for name, values in engine.module.state_dict().items()} if rank == 0 else None

    found = []
    for daemon in (fake_native.Daemon, lambda: fake_gpu.use(monkeypatch)):
        backend.use(daemon())
        try:
            found.append(run(ranks_of(), 3, 2, body, models.Experts)[0][0])
        finally:
            backend.use(None)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_values_may_be_replaced_by_all_ranks_together(gpu):
    def body(engine, rank):
        state = {name: values.clone() for name, values in engine.module.state_dict().items()}
        state["a.weight"] = torch.full_like(state["a.weight"], 0.25)
        engine.module.load_state_dict(state)
        assert ("refresh",) in engine.session.calls
        return engine.module.state_dict()["a.weight"].clone()

    results, _ = run(ranks_of(), 2, 2, body)
    assert all(bool((values == 0.25).all()) for values in results)

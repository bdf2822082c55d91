"""What zeroshard.optim refuses: with a clear message, and with parameters and states as they were."""

import copy
import os

import pytest
import torch

from optim_cases import CASES, bits, give_gradients, needs_kernels, parameters, same_bits, states_of, train
from zeroshard import ZeroShardError, optim


@pytest.fixture(autouse=True)
def kernels():
    needs_kernels()
    yield
    optim.set_threads(None)


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda p: optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: optim.Adam(p, capturable=True), "capturable"),
        (lambda p: optim.SGD(p, differentiable=True), "differentiable"),
        (lambda p: optim.Adagrad(p, lr_decay=0.1), "lr_decay"),
        (lambda p: optim.Adagrad(p, initial_accumulator_value=-1.0), "initial_accumulator_value"),
        (lambda p: optim.AdamW(p, lr=-1.0), "lr"),
        (lambda p: optim.AdamW(p, lr=float("nan")), "lr"),
        (lambda p: optim.AdamW(p, lr="fast"), "not a number"),
        (lambda p: optim.AdamW(p, betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda p: optim.AdamW(p, betas=(-0.1, 0.9)), r"betas\[0\]"),
        (lambda p: optim.AdamW(p, eps=-1e-8), "eps"),
        (lambda p: optim.AdamW(p, weight_decay=-0.1), "weight_decay"),
        (lambda p: optim.SGD(p, momentum=-0.9), "momentum"),
        (lambda p: optim.SGD(p, nesterov=True), "nesterov"),
        (lambda p: optim.SGD(p, states="int8"), "8-bit"),
        (lambda p: optim.Adagrad(p, states="int8"), "8-bit"),
        (lambda p: optim.AdamW(p, states="int4"), "int4"),
        (lambda p: optim.AdamW(p, master="some"), "some"),
        (lambda p: optim.AdamW(p, rounding_seed=-1), "rounding_seed"),
        (lambda p: optim.AdamW([q.half() for q in p], master="none"), "float16"),
        (lambda p: optim.AdamW([q.double() for q in p]), "float64"),
        (lambda p: optim.AdamW([torch.empty(3, device="meta")]), "meta"),
        (lambda p: optim.AdamW([torch.zeros(4, 4)[:, :2]]), "gaps"),
        (lambda p: optim.AdamW([torch.zeros(4, 1).expand(4, 4)]), "overlaps"),
    ],
)
def test_refused_at_construction(make, words):
    with pytest.raises(ZeroShardError, match=words) as error:
        make([p.detach() for p in parameters()])
    assert error.value.code == "INVALID_ARGUMENT"


def test_a_refused_group_is_not_added():
    of = parameters()
    optimizer = optim.AdamW(of[:2])
    with pytest.raises(ZeroShardError, match="float64"):
        optimizer.add_param_group({"params": [of[2].double().detach()]})
    with pytest.raises(ZeroShardError, match="eps"):
        optimizer.add_param_group({"params": of[2:], "eps": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": of[2:]})
    train(optimizer, of, 1)


def spoil_rate(optimizer, of):
    optimizer.param_groups[-1]["lr"] = float("nan")


def spoil_option(optimizer, of):
    optimizer.param_groups[-1]["maximize"] = True


def spoil_gradient(optimizer, of):
    of[-1].grad = torch.sparse_coo_tensor([[0]], [1.0], of[-1].shape)


def spoil_type(optimizer, of):
    of[-1].grad.data = of[-1].grad.data.double()


def spoil_state(optimizer, of):
    key = "momentum_buffer"
    optimizer.state[of[-1]][key] = optimizer.state[of[-1]][key][:1]


def spoil_state_type(optimizer, of):
    key = "momentum_buffer"
    optimizer.state[of[-1]][key] = optimizer.state[of[-1]][key].double()


@pytest.mark.parametrize(
    "spoil,words,steps",
    [
        (spoil, words, steps)
        for spoil, words, after in [
            (spoil_rate, "group 1.*lr", (0, 2)),
            (spoil_option, "maximize", (0, 2)),
            (spoil_gradient, "sparse gradient", (0, 2)),
            (spoil_type, "float64", (0, 2)),
            (spoil_state, "momentum_buffer.*parameter 1 of group 1", (2,)),
            (spoil_state_type, "momentum_buffer", (2,)),
        ]
        for steps in after
    ],
)
def test_a_refused_step_changes_nothing(spoil, words, steps):
    of = parameters(shapes=((5,), (6,), (7,), (8,)))
    of[0].requires_grad_(True)
    groups = [{"params": of[:2]}, {"params": of[2:]}]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5)
    twins = copy.deepcopy(of)
    twin = optim.SGD([{"params": twins[:2]}, {"params": twins[2:]}], lr=0.1, momentum=0.9, dampening=0.5)
    train(optimizer, of, steps)
    train(twin, twins, steps)
    before = [p.detach().clone() for p in of]
    kept = {p: dict(values) for p, values in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    give_gradients(of, 2)
    spoil(optimizer, of)
    with pytest.raises(ZeroShardError, match=words) as error:
        optimizer.step()
    assert error.value.code == "INVALID_ARGUMENT"
    assert same_bits(of, before)
    # Put right, it goes on as if nothing had been.
    for group, values in zip(optimizer.param_groups, groups):
        group.update(values)
    optimizer.state.clear()
    optimizer.state.update(kept)
    train(optimizer, of, 2, first=2)
    train(twin, twins, 2, first=2)
    assert same_bits(of, twins) and same_bits(states_of(optimizer), states_of(twin))


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda s: s["param_groups"][0].update(lr=float("inf")), "lr"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(3)), "exp_avg"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(7, 5, dtype=torch.uint8)), "uint8"),
        (lambda s: s["state"][0].pop("step"), "step"),
    ],
)
def test_a_refused_state_dict_changes_nothing(change, words):
    of = parameters()
    optimizer = optim.AdamW(of)
    train(optimizer, of, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    before = [state.clone() for state in states_of(optimizer)]
    with pytest.raises(ZeroShardError, match=words):
        optimizer.load_state_dict(saved)
    assert same_bits(before, states_of(optimizer))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    train(optimizer, of, 1)


def test_states_of_8_bits_are_not_taken_for_fp32_ones_or_back():
    ours, theirs = parameters(), parameters()
    eight, whole = optim.AdamW8bit(ours), optim.AdamW(theirs)
    train(eight, ours, 1)
    train(whole, theirs, 1)
    assert eight.state[ours[0]]["exp_avg"].dtype == torch.uint8
    saved = torch.optim.AdamW(parameters()).state_dict()
    saved["state"] = whole.state_dict()["state"]
    with pytest.raises(ZeroShardError, match="float32"):
        eight.load_state_dict(saved)


def test_a_wrong_number_of_groups_is_torchs_error():
    optimizer = optim.AdamW(parameters())
    saved = optimizer.state_dict()
    saved["param_groups"] = saved["param_groups"] * 2
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("count", [0, -1, 1.5, "two"])
def test_thread_numbers_are_checked(count):
    with pytest.raises(ZeroShardError, match="set_threads"):
        optim.set_threads(count)


def test_a_step_inside_a_step_is_refused():
    of = parameters()
    optimizer = optim.AdamW(of)
    give_gradients(of, 0)
    prepare = optimizer._prepare
    seen = []

    def again(*arguments):
        optimizer._prepare = prepare
        with pytest.raises(ZeroShardError, match="another call") as error:
            optimizer.step()
        seen.append(error.value.code)
        return prepare(*arguments)

    optimizer._prepare = again
    optimizer.step()
    assert set(seen) == {"FAILED_PRECONDITION"}


def test_a_forked_child_has_threads_of_its_own():
    optim.set_threads(2)
    of = [torch.nn.Parameter(torch.ones(100_000))]
    optimizer = optim.AdamW(of)
    train(optimizer, of, 1)
    expected = copy.deepcopy((of, optimizer))
    expected = expected[1].param_groups[0]["params"], expected[1]
    train(expected[1], expected[0], 1, first=1)
    wanted = int(bits(expected[0][0]).sum())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # Gradients without torch's own threads, which a fork leaves behind too.
            torch.set_num_threads(1)
            train(optimizer, of, 1, first=1)
            os.write(write, str(int(bits(of[0]).sum())).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as result:
        text = result.read()
    os.waitpid(child, 0)
    assert text == str(wanted)


@pytest.mark.parametrize("name", list(CASES))
def test_numbers_that_are_not_finite_go_where_torch_lets_them(name):
    kind, numbers, _ = CASES[name]
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([parameter], **numbers)
    parameter.grad = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -1.0])
    optimizer.step()
    assert torch.isfinite(parameter.detach()).tolist()[0::3] == [True, True]
    assert parameter.detach()[1].isnan()

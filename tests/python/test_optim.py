"""zeroshard.optim against torch.optim: numbers, state dicts, and everything a torch optimizer is used with."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from optim_cases import CASES, give_gradients, needs_kernels, parameters, same_bits, states_of, train
from zeroshard import optim


@pytest.fixture(autouse=True)
def kernels():
    needs_kernels()
    yield
    optim.set_threads(None)


with_torch = pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[2] is not None])
every = pytest.mark.parametrize("name", list(CASES))


def pair(name, of=None):
    """The same parameters twice, and both optimizers over them."""
    ours = of or parameters()
    theirs = copy.deepcopy(ours)
    kind, numbers, twin = CASES[name]
    return ours, kind(ours, **numbers), theirs, twin(theirs, **numbers, foreach=False)


def ulps(found, wanted, floor):
    """The largest difference in units of the last place of the larger operand (an update of size `floor` and a
    parameter may cancel)."""
    worst = 0.0
    for a, b in zip(found, wanted):
        a, b = a.detach().numpy(), b.detach().numpy()
        spacing = np.spacing(np.maximum(np.abs(b), np.float32(floor)))
        worst = max(worst, float(np.max(np.abs(a.astype(np.float64) - b) / spacing)))
    return worst


@with_torch
def test_each_of_many_steps_is_within_two_ulp_of_torch(name):
    ours, optimizer, theirs, twin = pair(name)
    for step in range(60):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        twin.step()
        assert ulps(ours, theirs, 1.0) <= 2
        # The next step starts from the same numbers.
        with torch.no_grad():
            for a, b in zip(ours, theirs):
                b.copy_(a)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_lion_follows_its_paper():
    (ours,) = parameters(shapes=((64,),))
    optimizer = optim.Lion([ours], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    p, m = ours.detach().double().clone(), torch.zeros(64, dtype=torch.float64)
    for step in range(50):
        give_gradients([ours], step)
        g = ours.grad.double()
        optimizer.step()
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(ours.detach().double(), p, rtol=1e-5, atol=1e-6)


@with_torch
def test_state_dicts_go_to_torch_and_back(name):
    ours, optimizer, theirs, twin = pair(name)
    train(optimizer, ours, 3)
    train(twin, theirs, 3)
    exported = optimizer.state_dict()
    keys = {k for values in twin.state_dict()["state"].values() for k, v in values.items() if v is not None}
    found = {k for values in exported["state"].values() for k in values}
    assert found == keys
    # Each takes over from the other; both end where the other would have.
    twin_after, ours_after = copy.deepcopy(theirs), copy.deepcopy(ours)
    kind, numbers, make = CASES[name]
    from_ours = make(ours_after, **numbers, foreach=False)
    from_ours.load_state_dict(copy.deepcopy(exported))
    from_torch = kind(twin_after, **numbers)
    from_torch.load_state_dict(twin.state_dict())
    train(from_ours, ours_after, 3, first=3)
    train(from_torch, twin_after, 3, first=3)
    train(optimizer, ours, 3, first=3)
    train(twin, theirs, 3, first=3)
    assert ulps(ours_after, ours, 1.0) <= 6 and ulps(twin_after, theirs, 1.0) <= 6


FORMS = [
    {},
    {"states": "bf16"},
    {"states": "int8"},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "master": "fp32"},
    {"dtype": torch.bfloat16, "master": "none", "rounding_seed": 7},
    {"dtype": torch.bfloat16, "states": "int8"},
    {"dtype": torch.float16},
]


def form_cases():
    """Optimizers and the forms that they have; no 8-bit states are published for two of them."""
    for name in CASES:
        for form in FORMS:
            if form.get("states") != "int8" or name not in ("adagrad", "sgd"):
                yield pytest.param(name, form, id=f"{name}-{form}")


def made(name, dtype=torch.float32, **forms):
    kind, numbers, _ = CASES[name]
    of = parameters(dtype, shapes=((1000,), (7, 5), (), (257,), (2000, 3)))
    return of, kind(of, **numbers, **forms)


@pytest.mark.parametrize("name,form", form_cases())
def test_resume_at_any_step_is_bit_equal(name, form):
    of, optimizer = made(name, **form)
    for stop in range(4):
        copied, other = made(name, **form)
        for _ in range(1):  # states that must be overwritten
            train(other, copied, 1, first=77)
        saved = io.BytesIO()
        torch.save({"parameters": of, "optimizer": optimizer.state_dict()}, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()))
        with torch.no_grad():
            for a, b in zip(copied, loaded["parameters"]):
                a.copy_(b)
        other.load_state_dict(loaded["optimizer"])
        train(optimizer, of, 1, first=stop)
        train(other, copied, 1, first=stop)
        assert same_bits(of, copied) and same_bits(states_of(optimizer), states_of(other))


@pytest.mark.parametrize("name,form", form_cases())
def test_thread_counts_are_bit_equal(name, form):
    results = []
    for count in (1, 2, 3, 7):
        optim.set_threads(count)
        assert optim.threads() == count
        of, optimizer = made(name, **form)
        # Large enough for every thread to get a part of one tensor.
        large = torch.nn.Parameter(torch.linspace(-1, 1, 200_003).to(of[0].dtype))
        optimizer.add_param_group({"params": [large]})
        train(optimizer, of + [large], 3)
        results.append(of + [large] + states_of(optimizer))
    assert all(same_bits(results[0], other) for other in results[1:])


@every
def test_split_and_whole_masters_give_the_same_parameters(name):
    """The split form moves an fp32 value that lies halfway between two bf16 ones by its last bit. Elements that
    never come to such a value have the same parameter and the same master in both forms."""
    split, one = made(name, torch.bfloat16)
    whole, other = made(name, torch.bfloat16, master="fp32")
    tied = [torch.zeros_like(p, dtype=torch.bool) for p in whole]
    for step in range(20):
        train(one, split, 1, first=step)
        train(other, whole, 1, first=step)
        for a, b, ties in zip(split, whole, tied):
            master = other.state[b]["master"].view(torch.int32)
            ties |= (master & 0xFFFF) == 0x8000
            low = one.state[a]["master_low"].int() & 0xFFFF
            high = a.detach().view(torch.int16).int() << 16
            joined = (high | low) - (low > 0x8000).int() * 0x10000
            assert ((joined == master) | ties).all() and ((a == b) | ties).all()
    assert sum(int(t.sum()) for t in tied) < 0.01 * sum(t.numel() for t in tied)


def test_bf16_parameters_do_not_get_stuck():
    for master in ("split", "fp32", "none"):
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = optim.SGD([parameter], lr=1e-3, master=master)
        for _ in range(8):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert parameter.detach().float().mean().item() == pytest.approx(0.992, abs=5e-4), master


def test_gradients_of_16_bit_parameters_may_be_fp32():
    results = []
    for kind in (torch.bfloat16, torch.float32):
        (parameter,) = parameters(torch.bfloat16, shapes=((300,),))
        optimizer = optim.AdamW([parameter])
        give_gradients([parameter], 1)
        parameter.grad.data = parameter.grad.data.to(kind)
        optimizer.step()
        results.append(parameter)
    assert same_bits(results[:1], results[1:])


def test_stochastic_rounding_depends_on_the_seed():
    results = []
    for seed in (0, 0, 1):
        (parameter,) = parameters(torch.bfloat16, shapes=((3000,),))
        optimizer = optim.SGD([parameter], lr=1e-3, master="none", rounding_seed=seed)
        train(optimizer, [parameter], 3)
        results.append(parameter)
    assert same_bits(results[:1], results[1:2]) and not same_bits(results[:1], results[2:])


def test_states_take_the_bytes_of_their_form():
    def bytes_each(dtype, **forms):
        parameter = torch.nn.Parameter(torch.zeros(25_600, dtype=dtype))
        optimizer = optim.AdamW([parameter], **forms)
        train(optimizer, [parameter], 1)
        held = optimizer.state[parameter].values()
        return sum(v.numel() * v.element_size() for v in held if v.dim()) / 25_600

    scale = 2 * 4 / 256
    assert bytes_each(torch.float32) == 8
    assert bytes_each(torch.float32, states="bf16") == 4
    assert bytes_each(torch.float32, states="int8") == 2 + scale
    assert bytes_each(torch.bfloat16) == 10
    assert bytes_each(torch.bfloat16, master="fp32") == 12
    assert bytes_each(torch.bfloat16, master="none", states="int8") == 2 + scale
    assert bytes_each(torch.float16) == 12


def test_groups_and_schedulers():
    ours = parameters()
    theirs = copy.deepcopy(ours)

    def built(module, of):
        groups = [{"params": of[:1], "lr": 0.1, "weight_decay": 0.0}, {"params": of[1:3]}]
        optimizer = module.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
        optimizer.add_param_group({"params": of[3:], "eps": 1e-4})
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    one, schedule = built(optim, ours)
    other, twin = built(torch.optim, theirs)
    for step in range(7):
        train(one, ours, 1, first=step)
        train(other, theirs, 1, first=step)
        schedule.step()
        twin.step()
    assert [g["lr"] for g in one.param_groups] == [g["lr"] for g in other.param_groups]
    assert ulps(ours, theirs, 1.0) <= 16
    one.param_groups[0]["lr"] = torch.tensor(0.25)  # as some schedulers of PyTorch 2 write it
    train(one, ours, 1)


def test_closures_and_parameters_without_a_gradient():
    (moved, left) = parameters(shapes=((4,), (3,)))
    before = left.detach().clone()
    optimizer = optim.AdamW([moved, left])

    def closure():
        optimizer.zero_grad()
        loss = (moved * moved).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(left, before) and left not in optimizer.state
    assert optimizer.state[moved]["step"] == 3
    # A parameter whose gradient comes late counts its own updates.
    left.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[left]["step"] == 1 and optimizer.state[moved]["step"] == 4


def test_a_backward_through_an_updated_parameter_is_an_error():
    (parameter,) = parameters(shapes=((4,),))
    optimizer = optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        loss = (parameter * parameter).sum()
        parameter.grad = torch.ones(4)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_formats_and_moved_memory():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4, 3, 5, 5, generator=generator)
    grads = [torch.randn(4, 3, 5, 5, generator=generator) for _ in range(4)]
    last = torch.channels_last
    plain = torch.nn.Parameter(values.clone())
    strided = torch.nn.Parameter(values.clone().contiguous(memory_format=last))
    one, other = optim.AdamW([plain]), optim.AdamW([strided])
    for step, grad in enumerate(grads):
        plain.grad = grad.clone()
        strided.grad = grad.clone() if step % 2 else grad.clone().contiguous(memory_format=last)
        if step == 2:  # new memory, and a state of another order, are noticed
            strided.data = strided.data.clone(memory_format=torch.preserve_format)
            plain.data = plain.data.clone()
            one.state[plain]["exp_avg"] = one.state[plain]["exp_avg"].clone()
        one.step()
        other.step()
    assert torch.equal(plain, strided)
    taken = optim.AdamW([torch.nn.Parameter(values.clone())])
    taken.load_state_dict(other.state_dict())
    assert taken.state[taken.param_groups[0]["params"][0]]["exp_avg"].is_contiguous()


def test_copies_and_pickles_go_on_alike():
    ours, optimizer = made("adamw", torch.bfloat16)
    train(optimizer, ours, 2)
    copies = [copy.deepcopy((ours, optimizer)), pickle.loads(pickle.dumps((ours, optimizer)))]
    train(optimizer, ours, 2, first=2)
    for of, other in copies:
        of = other.param_groups[0]["params"]
        train(other, of, 2, first=2)
        assert same_bits(ours, of)


def test_masters_can_be_refreshed():
    for master in ("split", "fp32"):
        (parameter,) = parameters(torch.bfloat16, shapes=((100,),))
        optimizer = optim.SGD([parameter], lr=0.0, master=master)
        train(optimizer, [parameter], 1)
        with torch.no_grad():
            parameter.fill_(3.0)
        optimizer.refresh_masters()
        train(optimizer, [parameter], 1)
        assert (parameter == 3.0).all()


def test_deepspeed_cpu_adam():
    ours, theirs = parameters(), parameters()
    one = optim.DeepSpeedCPUAdam(ours, lr=1e-2, weight_decay=0.1)
    other = optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    train(one, ours, 3)
    train(other, theirs, 3)
    assert same_bits(ours, theirs)
    ours = parameters(shapes=((10,),))
    one = optim.DeepSpeedCPUAdam(ours, lr=1e-2, bias_correction=False, adamw_mode=False, weight_decay=0.1)
    start = ours[0].detach().double()
    give_gradients(ours, 0)
    g = ours[0].grad.double() + 0.1 * start
    one.step()
    wanted = start - 1e-2 * 0.1 * g / ((0.001 * g * g).sqrt() + 1e-8)
    torch.testing.assert_close(ours[0].detach().double(), wanted, rtol=1e-5, atol=1e-6)
    halves = optim.DeepSpeedCPUAdam(parameters(torch.bfloat16), fp32_optimizer_states=False)
    train(halves, halves.param_groups[0]["params"], 1)
    assert halves.state[halves.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.bfloat16


def test_empty_tensors_and_many_tensors():
    of = parameters(shapes=((0,), (3, 0)) + ((10,),) * 3000)
    theirs = copy.deepcopy(of)
    one, other = optim.AdamW(of), torch.optim.AdamW(theirs)
    train(one, of, 2)
    train(other, theirs, 2)
    assert ulps(of[2:], theirs[2:], 1.0) <= 4
    assert one.state[of[0]]["step"] == 2

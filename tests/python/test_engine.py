"""The engine's habits: errors that name things, born-sharded models, resumption, checkpoints,
files."""

import copy
import json

import pytest
import torch

import zeroshard
from models import Mlp, Tied, build, config
from zeroshard import state
from zeroshard.data import ShardedLoader

STAGES = [0, 1, 2, 3]


def initialize(ranks, job, rank, world, model, settings, **more):
    return zeroshard.initialize(
        model=model,
        config=settings,
        job=job,
        rank=rank,
        world_size=world,
        socket=ranks.socket,
        **more,
    )


def data(rank, step, width=24):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(engine, rank, steps):
    while engine.global_steps < steps:
        engine.backward(engine(data(rank, engine.global_steps)).float().pow(2).mean())
        engine.step()


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_touching_a_released_parameter_names_it(ranks):
    def rank_main(rank):
        engine, *_ = initialize(ranks, "job", rank, 1, build(Mlp), config(3))
        weight = engine.module.a.weight
        assert weight.shape == (96, 24) and weight.numel() == 96 * 24 and weight.requires_grad
        assert "a.weight" in repr(weight)
        for use in (
            lambda: weight + 1,
            lambda: weight.sum(),
            lambda: torch.nn.functional.linear(data(0, 0), weight),
            lambda: weight.data,
            lambda: weight.tolist(),
            lambda: copy.deepcopy(weight),
        ):
            with pytest.raises(zeroshard.ZeroShardError, match=r"'a\.weight'"):
                use()
        with zeroshard.zero.GatheredParameters(weight):
            assert torch.isfinite(weight).all()
        with pytest.raises(zeroshard.ZeroShardError):
            weight.sum()
        engine.destroy()
        with pytest.raises(zeroshard.ZeroShardError, match="destroyed"):
            weight.sum()
        with pytest.raises(zeroshard.ZeroShardError, match="destroyed"):
            engine(data(0, 0))

    ranks.run(1, rank_main)


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_may_be_modified(ranks, stage):
    job, model = ranks.job(), build(Mlp)

    def rank_main(rank):
        engine, *_ = initialize(ranks, job, rank, 2, copy.deepcopy(model), config(stage))
        with zeroshard.zero.GatheredParameters(
            engine.module.a.weight, modifier_rank=1
        ), torch.no_grad():
            engine.module.a.weight.fill_(float(rank))
        found = engine.module.state_dict()
        train(engine, rank, 1)
        engine.destroy()
        return found

    for found in ranks.run(2, rank_main):
        assert torch.equal(found["a.weight"], torch.ones(96, 24))
        assert torch.equal(found["b.weight"], model.b.weight)


@pytest.mark.parametrize("stage", [1, 3])
def test_modifying_one_parameter_leaves_the_masters_of_its_neighbours(ranks, stage):
    """bf16: what the fp32 masters know beyond the rounded values must survive a change of another
    parameter."""
    job, model = ranks.job(), build(Mlp)

    def run(rank, job, touch):
        engine, *_ = initialize(
            ranks, job, rank, 1, copy.deepcopy(model), config(stage, bf16={"enabled": True})
        )
        train(engine, rank, 6)
        if touch:
            with zeroshard.zero.GatheredParameters(
                engine.module.norm.bias, modifier_rank=0
            ), torch.no_grad():
                engine.module.norm.bias.mul_(1.0)
        train(engine, rank, 12)
        found = engine.module.state_dict()
        engine.destroy()
        return found

    same(
        ranks.run(1, lambda r: run(r, job, True))[0],
        ranks.run(1, lambda r: run(r, job + "x", False))[0],
    )


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_and_load_state_dict(ranks, stage):
    job, model, other = ranks.job(), build(lambda: Tied(False)), build(lambda: Tied(False), seed=7)

    def rank_main(rank):
        engine, *_ = initialize(ranks, job, rank, 2, copy.deepcopy(model), config(stage))
        if rank == 0:  # rank 1 may already see what rank 0 loads
            same(engine.module.state_dict(), model.state_dict())
        engine.module.load_state_dict(other.state_dict())
        found = engine.module.state_dict()
        with pytest.raises(zeroshard.ZeroShardError, match="surplus"):
            engine.module.load_state_dict({**other.state_dict(), "surplus": torch.zeros(1)})
        engine.destroy()
        return found

    for found in ranks.run(2, rank_main):
        same(found, other.state_dict())


class Initialized(torch.nn.Module):
    """Changes its children's parameters in its own constructor, as many models do."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Mlp() for _ in range(3)])
        self.big = torch.nn.Linear(300, 7)
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("b.weight"):
                torch.nn.init.normal_(parameter, std=0.01)
        with torch.no_grad():
            self.big.weight.mul_(0.5)

    def _init(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
            module.bias.data.zero_()

    def forward(self, x):
        return (
            sum(block(x) for block in self.blocks) + self.big(torch.ones(300, dtype=x.dtype)).sum()
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_models_born_sharded(ranks, world):
    """zero.Init gives the same model, and a rank keeps about 1/R of each large parameter."""
    job = ranks.job()
    plain = build(Initialized)
    expected = plain.state_dict()
    models = []
    for rank in range(world):
        with zeroshard.zero.Init(rank=rank, world_size=world):
            models.append(build(Initialized))
    kept = sum(values.numel() for _, _, values in models[0].big.weight.zeroshard.born)
    assert kept <= 2100 // world + 3 * 256
    with pytest.raises(zeroshard.ZeroShardError, match="born sharded"):
        models[0].big.weight.sum()
    assert torch.nn.Linear(2, 2).weight.sum().isfinite()  # the patch is gone

    def rank_main(rank):
        engine, *_ = initialize(
            ranks, job, rank, world, models[rank], config(3, bf16={"enabled": True})
        )
        found = engine.module.state_dict()
        train(engine, rank, 2)
        engine.destroy()
        return found

    for found in ranks.run(world, rank_main):
        same(found, {n: v.bfloat16() for n, v in expected.items()})


def test_mixing_elements_of_a_born_sharded_parameter_is_refused():
    class Mixes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(100, 100)
            with torch.no_grad():
                self.lin.weight.div_(self.lin.weight.norm())

    with pytest.raises(zeroshard.ZeroShardError, match="Linear.weight"):
        with zeroshard.zero.Init(rank=1, world_size=4):
            Mixes()


@pytest.mark.parametrize("stage", [1, 3])
def test_resume_after_all_ranks_left(ranks, stage):
    """The engine of a second attach stands at the last committed step, with everything of the
    trainer restored."""
    job, model = ranks.job(), build(Mlp)
    settings = config(
        stage,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
    )

    def part(rank, steps, leave):
        torch_state = torch.get_rng_state()
        engine, optimizer, loader, scheduler = initialize(
            ranks, leave, rank, 1, copy.deepcopy(model), settings, training_data=list(range(20))
        )
        iterator = iter(loader)
        while engine.global_steps < steps:
            if engine.global_steps == 0 and not engine.client_state:
                torch.manual_seed(3)
            engine.client_state["seen"] = engine.client_state.get("seen", []) + [
                next(iterator).tolist()
            ]
            noise = torch.randn(4, 24)
            engine.backward(engine(noise).pow(2).mean())
            engine.step()
        facts = (
            engine.module.state_dict(),
            engine.get_lr(),
            engine.client_state,
            scheduler.last_batch_iteration,
        )
        engine.destroy(keep=steps < 6)
        torch.set_rng_state(torch_state)
        return facts

    (whole,) = ranks.run(1, lambda r: part(r, 6, job))
    again = ranks.job()
    ranks.run(1, lambda r: part(r, 3, again))
    (resumed,) = ranks.run(1, lambda r: part(r, 6, again))
    same(whole[0], resumed[0])
    assert whole[1:] == resumed[1:]


@pytest.mark.parametrize("stage,after", [(0, 3), (3, 1), (2, 2)])
def test_checkpoint_restores_at_another_stage(ranks, tmp_path, stage, after):
    job, model = ranks.job(), build(Mlp)

    def first(rank):
        engine, *_ = initialize(ranks, job, rank, 2, copy.deepcopy(model), config(stage))
        train(engine, rank, 3)
        engine.save_checkpoint(str(tmp_path), client_state={"epoch": 4})
        train(engine, rank, 6)
        found = engine.module.state_dict()
        engine.destroy()
        return found

    expected = ranks.run(2, first)[0]
    assert (tmp_path / "latest").read_text() == "global_step3"
    job = ranks.job()

    def second(rank):
        engine, *_ = initialize(ranks, job, rank, 2, build(Mlp, seed=9), config(after))
        path, client_state = engine.load_checkpoint(str(tmp_path))
        assert (
            client_state == {"epoch": 4}
            and engine.global_steps == 3
            and path.endswith("global_step3")
        )
        train(engine, rank, 6)
        found = engine.module.state_dict()
        engine.destroy()
        return found

    for found in ranks.run(2, second):
        same(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_model_file_holds_every_name(ranks, tmp_path, stage):
    job, model = ranks.job(), build(lambda: Tied(False))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("mean", torch.rand(3))

    def rank_main(rank):
        engine, *_ = initialize(
            ranks, job, rank, 2, copy.deepcopy(model), config(stage, bf16={"enabled": True})
        )
        path = engine.save_16bit_model(str(tmp_path))
        train_free = engine.module.state_dict()
        engine.destroy()
        return path, train_free

    (path, expected), _ = ranks.run(2, rank_main)
    found = zeroshard.load_safetensors(path)
    same(dict(sorted(found.items())), dict(sorted(expected.items())))
    assert {"embed.weight", "head.weight", "count", "mean"} <= found.keys()
    build(lambda: Tied(False)).load_state_dict(
        {k: v.float() for k, v in found.items() if k not in ("count", "mean")}
    )


def test_swapped_gather_order_is_an_error_on_all_ranks(ranks):
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(130, 130), torch.nn.Linear(130, 130)

        def forward(self, x, swap):
            return self.a(self.b(x)) if swap else self.b(self.a(x))

    job, model, seen = ranks.job(), build(Pair), [None, None]

    def rank_main(rank):
        engine, *_ = initialize(ranks, job, rank, 2, copy.deepcopy(model), config(3))
        try:
            # The step is where ranks meet: whoever ran ahead learns it there.
            engine.backward(engine(torch.randn(2, 130), swap=rank == 1).sum())
            engine.step()
        except zeroshard.ZeroShardError as error:
            seen[rank] = error

    ranks.run(2, rank_main)
    assert all(seen), "a rank did not get an error"
    assert any("rank" in str(error) for error in seen)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_traffic_is_three_p_at_stage_three(ranks, accumulation):
    """Logical elements a micro-step: gathers 2P, scatters P."""
    if ranks.socket is not None:
        pytest.skip("counted by the stand-in; the daemon's own counters have their own test")
    from zeroshard import backend

    model = build(lambda: torch.nn.Sequential(*[torch.nn.Linear(150, 150) for _ in range(4)]))
    size = sum(p.numel() for p in model.parameters())
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = initialize(
            ranks,
            job,
            rank,
            2,
            copy.deepcopy(model),
            config(3, gradient_accumulation_steps=accumulation),
        )
        for _ in range(2 * accumulation):
            engine.backward(engine(torch.ones(2, 150)).pow(2).mean())
            engine.step()
        return dict(engine.session.job.counts)

    counts = ranks.run(2, rank_main)[0]
    assert counts["gather"] == 2 * size * 2 * accumulation
    assert counts["scatter"] == size * 2 * accumulation
    assert backend.native()


def test_prefetch_hits_from_the_second_pass_on(ranks):
    model = build(lambda: torch.nn.Sequential(*[torch.nn.Linear(150, 150) for _ in range(4)]))
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = initialize(
            ranks, job, rank, 1, copy.deepcopy(model), config(3, prefetch=100_000)
        )
        counts = []
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 150)).pow(2).mean())
            table = engine._table
            counts.append((table.gathers, table.hits + table.misses, table.order.changes))
            engine.step()
        with torch.no_grad():
            engine.eval()
            engine(torch.ones(2, 150))
            engine.train()
        assert engine._table.live_elements == 0
        engine.destroy()
        return counts

    (counts,) = ranks.run(1, rank_main)
    assert [c[0] for c in counts] == [8, 16, 24]
    assert [c[1] for c in counts] == [8, 8, 8]
    assert [c[2] for c in counts] == [0, 0, 0]


def test_torch_optimizer_and_scheduler(ranks):
    """A torch.optim object, its groups and a torch scheduler built on it are honoured every
    step."""
    job, model = ranks.job(), build(Mlp)
    plain = copy.deepcopy(model)

    def groups(m):
        return [
            {"params": [*m.a.parameters()], "lr": 1e-3},
            {"params": [*m.b.parameters(), *m.out.parameters()]},
        ]

    def make(m):
        optimizer = torch.optim.AdamW(groups(m), lr=1e-2, weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    optimizer, scheduler = make(plain)
    for step in range(5):
        optimizer.zero_grad()
        plain(data(0, step)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()

    def rank_main(rank):
        settings = config(3)
        del settings["optimizer"]
        optimizer, scheduler = make(model)
        engine, facade, _, returned = initialize(
            ranks, job, rank, 1, model, settings, optimizer=optimizer, lr_scheduler=scheduler
        )
        assert returned is scheduler and facade.param_groups is optimizer.param_groups
        train(engine, rank, 5)
        found = engine.module.state_dict()
        assert engine.get_lr() == pytest.approx([1e-5, 1e-4])
        engine.destroy()
        return found

    (found,) = ranks.run(1, rank_main)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
        if name.startswith("norm"):
            assert torch.equal(value, found[name])


def test_forward_only(ranks):
    job, model = ranks.job(), build(Mlp).eval()

    def rank_main(rank):
        settings = {k: v for k, v in config(3).items() if k != "optimizer"}
        engine, optimizer, _, _ = initialize(ranks, job, rank, 2, copy.deepcopy(model), settings)
        assert optimizer is None
        with torch.no_grad():
            found = engine(data(0, 0))
        with pytest.raises(zeroshard.ZeroShardError, match="forward-only"):
            engine.backward(found.sum())
        engine.destroy()
        return found

    for found in ranks.run(2, rank_main):
        torch.testing.assert_close(found, model(data(0, 0)))


def test_a_stale_graph_is_noticed(ranks):
    """The values change at step(); a graph from before it gives an error, as with any in-place
    optimizer."""
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = initialize(ranks, job, rank, 1, build(Mlp), config(1))
        loss = engine(data(0, 0)).pow(2).mean()
        engine.backward(loss, retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)

    ranks.run(1, rank_main)


def test_misuse_is_named(ranks):
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = initialize(
            ranks, job, rank, 1, build(Mlp), config(2, gradient_accumulation_steps=2)
        )
        with pytest.raises(zeroshard.ZeroShardError, match="backward"):
            engine.step()
        engine.backward(engine(data(0, 0)).mean())
        with pytest.raises(zeroshard.ZeroShardError, match="unfinished step"):
            engine.save_checkpoint("/nonexistent")
        with pytest.raises(zeroshard.ZeroShardError, match="weight"):
            engine.backward(engine(data(0, 0)).mean(), weight=-1)
        with pytest.raises(zeroshard.ZeroShardError, match="tag"):
            engine._gradients.reset()
            engine.save_checkpoint("/nonexistent", tag="../up")
        engine.destroy()

    ranks.run(1, rank_main)
    with pytest.raises(zeroshard.ZeroShardError, match="Lion"):

        class Lion(torch.optim.SGD):
            pass

        model = build(Mlp)
        zeroshard.initialize(model=model, optimizer=Lion(model.parameters(), lr=1), config={})


def test_loss_backward_without_the_engine(ranks):
    """loss.backward() works too when there is no loss scale."""
    job, model = ranks.job(), build(Mlp)

    def rank_main(direct):
        engine, *_ = initialize(ranks, ranks.job(), 0, 1, copy.deepcopy(model), config(3))
        loss = engine(data(0, 0)).pow(2).mean()
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        return engine.module.state_dict()

    same(rank_main(True), rank_main(False))
    assert job


def test_memory_report(ranks):
    job = ranks.job()

    def rank_main(rank):
        engine, *_ = initialize(ranks, job, rank, 1, build(Mlp), config(3))
        with engine.memory.measure():
            loss = engine(data(0, 0)).pow(2).mean()
            engine.backward(loss)
        del loss
        engine.step()
        report = engine.memory.report()
        engine.destroy()
        return report

    (report,) = ranks.run(1, rank_main)
    # tanh's output, the inputs of three linear layers and of the norm: a few times 4 x 96 and 4 x
    # 24 floats.
    assert 4 * 96 * 4 <= report["activations"] <= 6 * 4 * 96 * 4
    assert report["gradients"] > 0 and report["peak_reserved"] > 1 << 20
    assert (
        report["peak_allocated"] == report["activations"] + report["gradients"] + report["buffers"]
    )


def test_user_state_round_trip():
    rng, blobs = state.capture_rng()
    torch.manual_seed(11)
    values = {"rng": rng, "x": [1, 2.5, "é", None]}
    packed = state.pack(values, blobs)
    found, parts = state.unpack(packed)
    assert json.dumps(found) == json.dumps(values) and parts == blobs
    expected = torch.randn(3)
    torch.manual_seed(11)
    assert torch.equal(torch.randn(3), expected)
    for cut in range(len(packed)):
        if cut in (3, 10, 40, len(packed) - 1):
            with pytest.raises(zeroshard.ZeroShardError):
                state.unpack(packed[:cut])
    with pytest.raises(zeroshard.ZeroShardError):
        state.pack({"bad": {1, 2}}, {})


@pytest.mark.parametrize(
    "size,world,batch,drop", [(20, 2, 3, False), (21, 2, 4, True), (7, 3, 2, False)]
)
def test_loader_resumes_in_the_middle(size, world, batch, drop):
    loaders = [
        ShardedLoader(list(range(size)), batch, r, world, drop_last=drop) for r in range(world)
    ]
    seen = [[b.tolist() for b in loader] for loader in loaders]
    items = sorted(i for of_rank in seen for b in of_rank for i in b)
    assert set(items) <= set(range(size)) and (drop or set(items) == set(range(size)))
    other = ShardedLoader(list(range(size)), batch, 0, world, drop_last=drop)
    other.load_state_dict({"epoch": 0, "position": 1})
    assert [b.tolist() for b in other] == seen[0][1:]
    assert [b.tolist() for b in other] == [b.tolist() for b in loaders[0]]  # the second epoch

"""One rank of a training benchmark, in the environment of the peers: obeys a controller
(training_ranks.py).

Every side trains the same GPT from the same seed on the same data with the same recipe: parameters
and gradients in bf16, fp32 optimizer states, AdamW, clipping by the global norm. Commands are lines
of JSON on stdin, answers lines of JSON on stdout; between them the process sleeps in a read.

  {"do": "steps", "count": N}  N training steps -> {"seconds": S, "losses": [...]}
  {"do": "build"}              model, framework and optimizer states -> {"parameters": P}
  {"do": "ledger"}             what the engine says its job uses -> {"bytes": B}
  {"do": "warm"}               trains one layer of the model and forgets it: libraries and threads
                               are there -> {}
"""

import argparse
import gc
import json
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "python")]

import peer_environment

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


def ds_config(arguments):
    """What the engine and DeepSpeed both read."""
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": arguments.bucket},
        "optimizer": {"type": "AdamW", "params": params},
    }


def loss_of(logits, targets):
    import torch

    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Zeroshard:
    """This project's engine at stage 2."""

    def __init__(self, arguments):
        import real_daemon
        import zeroshard
        from zeroshard import backend

        self.zeroshard, self.arguments = zeroshard, arguments
        backend.use(real_daemon.load_native(pathlib.Path(arguments.binaries)))

    def build(self, model, name):
        self.engine, *_ = self.zeroshard.initialize(
            model=model, config=ds_config(self.arguments), job=name
        )

    def step(self, inputs, targets):
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def ledger(self):
        return sum(int(line["bytes"]) for line in self.engine.ledger)

    def close(self):
        self.engine.destroy()
        del self.engine


class DeepSpeed:
    """DeepSpeed ZeRO-2 with the optimizer offloaded to the CPU; its CPU operators use all vector
    instructions."""

    def __init__(self, arguments):
        peer_environment.prepare()
        import deepspeed

        deepspeed.init_distributed(
            dist_backend="gloo",
            auto_mpi_discovery=False,
            verbose=False,
            init_method=f"file://{arguments.rendezvous}",
            rank=arguments.rank,
            world_size=arguments.ranks,
        )
        self.deepspeed, self.arguments = deepspeed, arguments

    def build(self, model, name):
        del name
        config = ds_config(self.arguments)
        config["zero_optimization"].update(
            offload_optimizer={"device": "cpu"},
            reduce_bucket_size=min(self.arguments.bucket, int(5e7)),  # faster than the default
            contiguous_gradients=True,
            overlap_comm=False,
            reduce_scatter=True,
        )
        config["optimizer"]["params"]["torch_adam"] = False
        self.engine, *_ = self.deepspeed.initialize(model=model, config=config)

    def step(self, inputs, targets):
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def close(self):
        self.engine.destroy()
        del self.engine


class Fsdp:
    """PyTorch FSDP2 (fully_shard) over Gloo with the fused AdamW; parameters stay gathered until
    backward is over, as at stage 2."""

    def __init__(self, arguments):
        import torch

        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{arguments.rendezvous}",
            rank=arguments.rank,
            world_size=arguments.ranks,
        )

    def build(self, model, name):
        del name
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        shard = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": False}
        for block in model.blocks:
            fully_shard(block, **shard)
        self.model = fully_shard(model, **shard)
        self.torch = torch
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )

    def step(self, inputs, targets):
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def close(self):
        del self.model


class Plain:
    """Forward and backward alone: the bf16 module by itself, no communication, no update."""

    def __init__(self, arguments):
        del arguments

    def build(self, model, name):
        del name
        import torch

        self.model = model.to(torch.bfloat16)

    def step(self, inputs, targets):
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.item()

    def close(self):
        del self.model


SIDES = {"zeroshard": Zeroshard, "deepspeed": DeepSpeed, "fsdp": Fsdp, "plain": Plain}


class Rank:
    def __init__(self, arguments):
        import torch

        torch.set_num_threads(1)
        self.torch, self.arguments = torch, arguments
        self.done, self.built = 0, False
        self.side = SIDES[arguments.side](arguments)

    def build(self):
        from zeroshard.examples.char_gpt import CharGpt

        a = self.arguments
        self.torch.manual_seed(1)
        model = CharGpt(a.vocabulary, a.width, a.layers, a.heads, a.context)
        parameters = sum(p.numel() for p in model.parameters())
        self.side.build(model, "train")
        self.built = True
        return {"parameters": parameters}

    def warm(self):
        from zeroshard.examples.char_gpt import CharGpt

        a = self.arguments
        self.side.build(CharGpt(a.vocabulary, a.width, 1, a.heads, a.context), "warm")
        batch = self.batch(0)
        for _ in range(3):
            self.side.step(*batch)
        self.side.close()
        gc.collect()
        return {}

    def ledger(self):
        return {"bytes": self.side.ledger()}

    def steps(self, count):
        batches = [self.batch(self.done + i) for i in range(count)]
        self.done += count
        begin = time.perf_counter()
        losses = [self.side.step(*batch) for batch in batches]
        return {"seconds": time.perf_counter() - begin, "losses": losses}

    def batch(self, number):
        """Each step and rank has data of its own. Tokens are Zipf-distributed, so that there is
        something to learn."""
        a, torch = self.arguments, self.torch
        generator = torch.Generator().manual_seed(number * a.ranks + a.rank)
        uniform = torch.rand(a.batch, a.length + 1, generator=generator)
        rows = (a.vocabulary**uniform).long() - 1
        return rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    for name in "rank ranks vocabulary width layers heads context batch length bucket".split():
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--binaries", required=True)
    parser.add_argument("--rendezvous", required=True)
    arguments = parser.parse_args()
    # Whatever a framework prints goes to stderr; stdout belongs to the controller.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rank = Rank(arguments)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        print(json.dumps(getattr(rank, name)(**command)), file=answers, flush=True)
    if rank.built:
        rank.side.close()


if __name__ == "__main__":
    main()

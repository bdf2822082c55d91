"""A small character-level GPT, trained by ZeroShard (or, with --plain, by PyTorch alone with the
same recipe).

Run by deploy/quickstart, one process a rank with RANK and WORLD_SIZE set. Rank 0 shows progress and
writes into --out: loss.json, loss.png, model.safetensors, sample.txt and summary.json.

Started again with the same --job while the daemon still holds it, training goes on at the last
committed step.
"""

import argparse
import glob
import json
import os
import time

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from zeroshard.examples import report


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf")).float().softmax(-1).to(x.dtype)
        x = x + self.proj((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharGpt(nn.Module):
    """Decoder-only transformer whose output layer is the embedding itself."""

    def __init__(self, vocabulary, width, layers, heads, context, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recompute and self.training
                else block(x)
            )
        return self.head(self.norm(x))


class Text:
    """The text as numbers; batches depend on (seed, step, micro-step, rank) alone, so any of them
    can be replayed."""

    def __init__(self, paths, seed):
        text = ""
        for path in paths:
            with open(path, encoding="utf-8", errors="replace") as file:
                text += file.read()
        if len(text) < 1000:
            raise SystemExit(
                f"char_gpt: the text has {len(text)} characters; at least 1000 are needed"
            )
        self.characters = sorted(set(text))
        number = {c: i for i, c in enumerate(self.characters)}
        self.data = torch.tensor([number[c] for c in text])
        self.seed = seed

    def batch(self, size, context, step, micro, rank):
        number = ((self.seed * 1_000_003 + step) * 1_009 + micro) * 10_007 + rank
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.data) - context - 1, (size,), generator=generator)
        rows = torch.stack([self.data[s : s + context + 1] for s in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]


class PlainTrainer:
    """The same precision recipe with PyTorch alone: parameters and gradients in the compute type,
    fp32 sums over the ranks, fp32 master copies in torch.optim.AdamW, clipping by the global
    norm."""

    def __init__(self, model, config, dtype, rank, world_size, rendezvous):
        self.model = model.to(dtype)
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        params = config["optimizer"]["params"]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=params["lr"],
            betas=tuple(params["betas"]),
            weight_decay=params["weight_decay"],
        )
        self.clipping = config["gradient_clipping"]
        self.accumulation = config["gradient_accumulation_steps"]
        self.world_size = world_size
        self.global_steps = self.micro = 0
        if world_size > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{os.path.abspath(rendezvous)}",
                rank=rank,
                world_size=world_size,
            )

    def __call__(self, tokens):
        return self.model(tokens)

    def backward(self, loss):
        loss.backward()
        for parameter, master in zip(self.parameters, self.masters):
            gradient = parameter.grad.float()
            if self.world_size > 1:
                torch.distributed.all_reduce(gradient)
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None
        self.micro += 1

    def step(self):
        if self.micro < self.accumulation:
            return
        for master in self.masters:
            master.grad /= self.accumulation * self.world_size
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
        self.micro = 0
        self.global_steps += 1


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", nargs="*", help="text files (default: the licence texts of the distribution)"
    )
    parser.add_argument("--out", default="out/quickstart")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--recompute", action="store_true", help="activation checkpointing of every block"
    )
    parser.add_argument(
        "--offload",
        default="none",
        choices=["none", "cpu", "nvme"],
        help="where masters and optimizer states rest, and at stage 3 the parameters",
    )
    parser.add_argument("--plain", action="store_true", help="train with PyTorch alone")
    parser.add_argument("--config", help="a ds_config.json instead of the built-in one")
    parser.add_argument("--job", default="quickstart")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the summary to this file, too")
    parser.add_argument("--sample", type=int, default=200, help="characters of sample text")
    return parser.parse_args()


def ds_config(arguments):
    """The built-in ds_config."""
    config = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": arguments.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
    }
    if arguments.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 10_000
    if arguments.offload != "none" and arguments.stage > 0:
        offload_to(arguments.offload, config["zero_optimization"])
    if arguments.dtype != "fp32":
        config[arguments.dtype] = {"enabled": True}
    return config


def offload_to(device, zero):
    """Adds what rests on `device` to the block zero_optimization."""
    zero["offload_optimizer"] = {"device": device}
    if zero["stage"] == 3:
        zero["offload_param"] = {"device": device}
        if device == "nvme":  # by default the first 10^9 elements stay in memory
            zero["offload_param"]["max_in_cpu"] = 0


def make_trainer(arguments, model, rank, world_size):
    config = ds_config(arguments)
    if arguments.plain:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
            arguments.dtype
        ]
        return PlainTrainer(
            model, config, dtype, rank, world_size, os.path.join(arguments.out, "rendezvous")
        )
    import zeroshard

    engine, *_ = zeroshard.initialize(
        model=model, config=arguments.config or config, job=arguments.job
    )
    return engine


def train(trainer, text, arguments, rank, world_size):
    """Trains up to --steps; returns what `report` shows. Each step's loss is rank 0's mean over its
    micro-steps."""
    losses, times, progress = [], [], report.Progress(arguments.steps, enabled=rank == 0)
    tokens = arguments.micro_batch * arguments.context * arguments.accumulation * world_size
    first = trainer.global_steps
    while trainer.global_steps < arguments.steps:
        start, step, total = time.perf_counter(), trainer.global_steps, 0.0
        for micro in range(arguments.accumulation):
            inputs, targets = text.batch(
                arguments.micro_batch, arguments.context, step, micro, rank
            )
            measured = not arguments.plain and step == first + 1
            with trainer.memory.measure() if measured else report.nothing():
                loss = F.cross_entropy(trainer(inputs).float().flatten(0, 1), targets.flatten())
                trainer.backward(loss)
            trainer.step()
            total += loss.item()
        times.append(time.perf_counter() - start)
        losses.append(total / arguments.accumulation)
        progress.show(trainer.global_steps, losses[-1], tokens / times[-1])
    progress.close()
    return {"first_step": first, "losses": losses, "step_seconds": times, "tokens_per_step": tokens}


def generate(path, text, arguments):
    """Sample text by plain PyTorch from the exported file."""
    from zeroshard.checkpoint import load_safetensors

    model = CharGpt(
        len(text.characters), arguments.width, arguments.layers, arguments.heads, arguments.context
    )
    model.load_state_dict({name: value.float() for name, value in load_safetensors(path).items()})
    model.eval()
    generator = torch.Generator().manual_seed(arguments.seed)
    tokens = text.data[:16].unsqueeze(0)
    with torch.no_grad():
        for _ in range(arguments.sample):
            logits = model(tokens[:, -arguments.context :])[0, -1] / 0.8
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
    return "".join(text.characters[t] for t in tokens[0].tolist())


def main():
    arguments = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if os.environ.get("OMP_NUM_THREADS") is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    os.makedirs(arguments.out, exist_ok=True)
    paths = arguments.text or sorted(
        p for p in glob.glob("/usr/share/common-licenses/*") if not os.path.islink(p)
    )
    text = Text(paths, arguments.seed)
    torch.manual_seed(arguments.seed)
    model = CharGpt(
        len(text.characters),
        arguments.width,
        arguments.layers,
        arguments.heads,
        arguments.context,
        arguments.recompute,
    )
    size = sum(p.numel() for p in model.parameters())
    trainer = make_trainer(arguments, model, rank, world_size)
    results = train(trainer, text, arguments, rank, world_size)
    results.update(
        parameters=size,
        stage=arguments.stage,
        ranks=world_size,
        dtype=arguments.dtype,
        plain=arguments.plain,
        characters=len(text.data),
        vocabulary=len(text.characters),
    )
    if arguments.plain:
        if rank == 0:
            report.finish(arguments, results)
        return
    results["memory"] = trainer.memory.report()
    results["grad_norm"] = trainer.get_global_grad_norm()
    path = trainer.save_16bit_model(arguments.out)
    if rank == 0:
        results["ledger"] = trainer.ledger
        results["model"] = path
        results["sample"] = generate(path, text, arguments)
        report.finish(arguments, results)
    trainer.destroy()


if __name__ == "__main__":
    main()

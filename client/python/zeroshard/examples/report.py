"""What the example shows: progress while it trains, and tables, curves and files at the end."""

import contextlib
import json
import os
import sys
import time


@contextlib.contextmanager
def nothing():
    yield


class Progress:
    """A bar on a terminal; a line every tenth of the way elsewhere."""

    def __init__(self, total, enabled=True):
        self.total, self.enabled = total, enabled
        self.terminal = sys.stdout.isatty()
        self.start, self.first = time.perf_counter(), None
        self.told = -1

    def show(self, step, loss, tokens_per_second):
        if not self.enabled:
            return
        if self.first is None:
            self.first = step - 1
        done = step - self.first
        left = (time.perf_counter() - self.start) / done * (self.total - step)
        text = f"step {step}/{self.total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
        text += f"{_duration(left)} left"
        if self.terminal:
            filled = 24 * step // self.total
            print(f"\r[{'█' * filled}{'░' * (24 - filled)}] {text}   ", end="", flush=True)
        elif step == self.total or 10 * step // self.total != self.told:
            self.told = 10 * step // self.total
            print(text, flush=True)

    def close(self):
        if self.enabled and self.terminal:
            print()


def _duration(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return ""


def ledger_table(lines):
    """The ledger as text: what lies where, beside what the ZeRO formula says."""
    rows = [("state", "tier", "holder", "bytes", "formula", "says", "more than it")]
    for line in lines:
        bytes_, formula = int(line["bytes"]), int(line["formula_bytes"])
        compared = bool(line["formula"])
        rows.append(
            (
                line["state"],
                line["tier"],
                line["holder"],
                f"{bytes_:,}",
                line["formula"] or "-",
                f"{formula:,}" if compared else "-",
                f"{bytes_ - formula:+,}" if compared else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    text = []
    for number, row in enumerate(rows):
        cells = [
            c.rjust(w) if i in (3, 5, 6) else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths))
        ]
        text.append("  ".join(cells).rstrip())
        if number == 0:
            text.append("  ".join("─" * w for w in widths))
    return "\n".join(text)


def per_parameter(lines, parameters):
    """One sentence: bytes a parameter over all workers, by the terms of the ZeRO formula."""
    total = {}
    for line in lines:
        if line["holder"].startswith("worker") and line["formula"]:
            total[line["state"]] = total.get(line["state"], 0) + int(line["bytes"]) / parameters
    optimizer = sum(v for k, v in total.items() if k not in ("parameters", "gradients"))
    return (
        f"All workers together, bytes a parameter: {total.get('parameters', 0):.4g} parameters, "
        f"G = {total.get('gradients', 0):.4g} gradients, K = {optimizer:.4g} master and optimizer states."
    )


def by_tier(lines):
    """One sentence about a job with states in files; else ""."""
    on_drives = [line for line in lines if line["tier"] == "nvme"]
    if not on_drives:
        return ""
    room = sum(int(line["bytes"]) for line in on_drives if line["state"] == "slots")
    states = sum(int(line["bytes"]) for line in on_drives) - room
    memory = sum(int(line["bytes"]) for line in lines if line["tier"] == "host")
    return (
        f"On drives: {size(states)} of states, and {size(room)} of room to write the next step's beside them. "
        f"In memory: {size(memory)}, so the states on drives are {states / memory:.2g} times that.\n"
    )


def curve(values, width=64, height=12):
    """The loss curve in characters."""
    if not values:
        return ""
    columns = [
        values[i * len(values) // min(width, len(values))] for i in range(min(width, len(values)))
    ]
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    grid = [[" "] * len(columns) for _ in range(height)]
    for x, value in enumerate(columns):
        grid[round((high - value) / span * (height - 1))][x] = "•"
    lines = [f"{high - span * y / (height - 1):7.3f} │{''.join(row)}" for y, row in enumerate(grid)]
    lines.append(" " * 8 + "└" + "─" * len(columns))
    return "\n".join(lines)


def picture(values, path):
    """The loss curve as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(values) + 1), values)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def finish(arguments, results):
    """Prints and writes everything; the last line of the output names the files."""
    out = arguments.out
    losses = results["losses"]
    files = []
    print(f"\nLoss, {len(losses)} steps:\n{curve(losses)}")
    if losses and picture(losses, os.path.join(out, "loss.png")):
        files.append("loss.png")
    if "ledger" in results:
        world, stage = results["ranks"], results["stage"]
        print(
            f"\nWhere the state lives (stage {stage}, {world} ranks, "
            f"P = {results['parameters']:,} parameters):\n"
        )
        print(ledger_table(results["ledger"]))
        print("\n" + by_tier(results["ledger"]), end="")
        print(per_parameter(results["ledger"], results["parameters"]))
        memory = results["memory"]
        print(
            f"\nTrainer, rank 0 ({memory['source']}): "
            f"peak allocated {size(memory['peak_allocated'])} (activations "
            f"{size(memory['activations'])}, gradients {size(memory['gradients'])}), reserved {size(memory['peak_reserved'])}, windows {size(memory['windows'])}"
        )
    if "sample" in results:
        print(f"\nSample, by plain PyTorch from {results['model']}:\n\n{results['sample']}\n")
        with open(os.path.join(out, "sample.txt"), "w", encoding="utf-8") as file:
            file.write(results["sample"] + "\n")
        files += ["model.safetensors", "sample.txt"]
    times = sorted(results["step_seconds"])
    if times:
        results["tokens_per_second"] = results["tokens_per_step"] / times[len(times) // 2]
    for path in filter(None, (os.path.join(out, "summary.json"), arguments.json)):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
    files.append("summary.json")
    print(f"Written to {out}: {', '.join(files)}")

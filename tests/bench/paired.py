"""Paired measurements in Python; the counterpart of paired.h, with the same lines of output.

A and B run in one process tree in blocks of A B B A; a block's ratio is (A1 + A2) / (B1 + B2), so
that a slow drift cancels. A figure is the median ratio of all blocks with its bootstrap 95 %
interval, one line of JSON on stdout. With --smoke everything runs once, small, and no target is
judged.
"""

import argparse
import json
import random
import statistics
import sys


def parser(description, blocks=12):
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--smoke", action="store_true", help="once, small, nothing judged")
    options.add_argument("--blocks", type=int, default=blocks)
    return options


def interval(ratios, rounds=2000):
    """The 95 % interval of the median, from resamples with a fixed seed."""
    chooser = random.Random(1)
    medians = sorted(
        statistics.median(chooser.choices(ratios, k=len(ratios))) for _ in range(rounds)
    )
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1]]


def blocks(count, sides, first=None):
    """Runs `sides` (name -> function) `count` times there and back: A B C C B A. Returns name ->
    what each call returned, two a block. `first`: how often each runs before, unmeasured."""
    for side in sides.values():
        for _ in range(1 if first is None else first):
            side()
    found = {name: [] for name in sides}
    order = list(sides)
    for _ in range(count):
        for name in order + order[::-1]:
            found[name].append(sides[name]())
    return found


def sums(values):
    """The sum of each block's two values."""
    return [a + b for a, b in zip(values[::2], values[1::2])]


class Bench:
    """Prints figures and knows the exit status."""

    def __init__(self, name, smoke):
        self.name, self.smoke = name, smoke
        self._missed = self._broken = False

    def compare(self, figure, vs, unit, a, b, target=None, **more):
        """`a`, `b`: two values a block. `target`: "<= 0.85" or ">= 1.6", of a / b."""
        ratios = [x / y for x, y in zip(sums(a), sums(b))]
        ratio = statistics.median(ratios)
        values = {
            "vs": vs,
            "a": _short(statistics.median(a)),
            "b": _short(statistics.median(b)),
            "ratio": round(ratio, 4),
            "ci": [round(x, 4) for x in interval(ratios)],
            "blocks": len(ratios),
        }
        self._print(figure, unit, values, target, ratio, more)

    def absolute(self, figure, unit, value, target=None, **more):
        """A value that is judged by itself."""
        self._print(figure, unit, {"value": _short(value)}, target, value, more)

    def require(self, holds, what):
        """A check that a figure rests on; a failed one fails the run even with --smoke."""
        if not holds:
            print(f"{self.name}: {what}", file=sys.stderr, flush=True)
            self._broken = True

    def status(self):
        return 1 if self._broken or (self._missed and not self.smoke) else 0

    def _print(self, figure, unit, values, target, judged, more):
        line = {"bench": self.name, "figure": figure, "unit": unit, **values, **more}
        if target:
            relation, limit = target.split()
            good = judged <= float(limit) if relation == "<=" else judged >= float(limit)
            line.update(target=target, **{"pass": None if self.smoke else good})
            self._missed |= not good
        print(json.dumps(line), flush=True)


def _short(value):
    return float(f"{value:.5g}")

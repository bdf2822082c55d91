"""The threads that zeroshard.optim runs its updates on: one pool a process."""

import os

import torch

from zeroshard.backend import native
from zeroshard.errors import invalid


class _Threads:
    def __init__(self):
        self._chosen = None
        self._pool = None
        self._of_the_parent = []

    def choose(self, count):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise invalid(f"set_threads: expected a number from 1, or None, found {count!r}")
        self._chosen = count

    def count(self):
        return self._chosen or torch.get_num_threads()

    def pool(self):
        count = self.count()
        if self._pool is None or self._pool.threads != count:
            self._pool = native().KernelPool(count)
        return self._pool

    def forget(self):
        """In a forked child: the threads are not there, so nobody may wait for them."""
        if self._pool is not None:
            self._of_the_parent.append(self._pool)
            self._pool = None


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


def set_threads(count):
    """How many threads all optimizers of zeroshard.optim use together, the caller's included. None:
    as many as torch.get_num_threads() says (the default). No result depends on it."""
    _threads.choose(count)


def threads():
    return _threads.count()


def pool():
    return _threads.pool()

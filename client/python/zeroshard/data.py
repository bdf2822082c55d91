"""The loader that zeroshard.initialize makes of `training_data`: each rank its part, resumable at
any batch."""

import torch
from torch.utils.data import DataLoader, IterableDataset


class _Batches:
    """Batches of indices of one rank: a permutation by (seed, epoch), dealt out to the ranks in
    turn."""

    def __init__(self, size, batch_size, rank, world_size, seed, shuffle, drop_last):
        self.size, self.batch_size, self.rank, self.world_size = size, batch_size, rank, world_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self.start = 0

    def _per_rank(self):
        whole = self.size // self.world_size
        return whole if self.drop_last or self.size % self.world_size == 0 else whole + 1

    def __len__(self):
        count = self._per_rank()
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self):
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.size, generator=generator).tolist()
        else:
            indices = list(range(self.size))
        total = self._per_rank() * self.world_size
        while len(indices) < total:  # a last round that is not full is filled from the front
            indices += indices[: total - len(indices)]
        mine = indices[self.rank : total : self.world_size]
        for batch in range(self.start, len(self)):
            yield mine[batch * self.batch_size : (batch + 1) * self.batch_size]


class ShardedLoader:
    """Iterates over one epoch at a time; remembers (epoch, batches taken)."""

    def __init__(
        self,
        dataset,
        batch_size,
        rank,
        world_size,
        collate_fn=None,
        seed=0,
        shuffle=True,
        drop_last=False,
        num_workers=0,
    ):
        self.epoch = 0
        self.position = 0
        self._resume = None
        options = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "generator": torch.Generator(),
        }
        if isinstance(dataset, IterableDataset):
            self._batches = None
            self._loader = DataLoader(
                dataset, batch_size=batch_size, drop_last=drop_last, **options
            )
        else:
            self._batches = _Batches(
                len(dataset), batch_size, rank, world_size, seed, shuffle, drop_last
            )
            self._loader = DataLoader(dataset, batch_sampler=self._batches, **options)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self.position, self._resume = self._resume or 0, None
        if self._batches is not None:
            self._batches.epoch, self._batches.start = self.epoch, self.position
        skip = self.position if self._batches is None else 0
        for batch in self._loader:
            if skip:
                skip -= 1
                continue
            self.position += 1
            yield batch
        self.epoch += 1
        self.position = 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        self._resume = self.position

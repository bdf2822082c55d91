"""The board of a job (docs/board.md), as a killer watches it: which step is decided, and which worker has yet to apply it.

Mapped read-only, through the descriptor table of the daemon that owns it.
"""

import mmap
import os
import re
import struct

MAGIC = b"ZSOBARD1"
HEADER, RANK, WORKER = 6528, 12416, 640
ATTEMPT = 80
DECISION = 2320  # attempt u64, skip u32


class Board:
    """One island's part; the job's whole where all workers share memory."""

    def __init__(self, descriptor):
        size = os.fstat(descriptor).st_size
        self.formatted = False
        if size < HEADER:
            return
        self.memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.formatted = self.memory[:8] == MAGIC
        self.workers, self.ranks = struct.unpack_from("<2I", self.memory, 32)

    def word(self, offset):
        return struct.unpack_from("<Q", self.memory, offset)[0]

    def decided(self):
        """The step in flight if it is decided and to be applied, else 0."""
        attempt, skip = struct.unpack_from("<QI", self.memory, DECISION)
        return attempt if attempt == self.word(ATTEMPT) and not skip else 0

    def applied(self, worker):
        """The last step whose update the worker has applied."""
        return self.slot(worker, 8)

    def beats(self, worker):
        """Rises with whatever the worker does."""
        return self.slot(worker, 584)

    def slot(self, worker, offset):
        return self.word(HEADER + RANK * self.ranks + WORKER * worker + offset)


def boards(daemon_pid, job):
    """The boards of a job's islands, in order; none before all are there."""
    formatted = [board.formatted for board in find(daemon_pid, job)]
    return find(daemon_pid, job) if formatted and all(formatted) else []


def find(daemon_pid, job):
    found = {}
    folder = f"/proc/{daemon_pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        match = re.fullmatch(rf"/memfd:zeroshard:{re.escape(job)}:board-(\d+) \(deleted\)", target)
        if match and int(match[1]) not in found:
            descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
            found[int(match[1])] = Board(descriptor)
            os.close(descriptor)
    return [found[island] for island in sorted(found)]

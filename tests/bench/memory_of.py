"""Memory of a set of processes, what they share counted once."""

import os
import threading


def tree(pid):
    """`pid` and all its descendants."""
    found = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                for child in file.read().split():
                    found += tree(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended
    return found


def _lines(pids, name, keys):
    """key -> sum over the processes, in bytes, of lines "key: N kB" of /proc/PID/name."""
    total = dict.fromkeys(keys, 0)
    for pid in pids:
        try:
            with open(f"/proc/{pid}/{name}", encoding="ascii") as file:
                for line in file:
                    key = line.split(":")[0]
                    if key in total:
                        total[key] += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
    return total


def _memory_files(pids):
    """Bytes allocated to memory files that any of the processes holds open, each file once."""
    found = {}
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        for number in numbers:
            path = f"/proc/{pid}/fd/{number}"
            try:
                if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(path)
                    found[(status.st_dev, status.st_ino)] = status.st_blocks * 512
            except (FileNotFoundError, ProcessLookupError):
                continue  # closed meanwhile
    return sum(found.values())


def moving(pids):
    """What changes from moment to moment and is cheap to read: private memory, and memory files."""
    private = _lines(pids, "status", ["RssAnon"])["RssAnon"]
    return {"private": private, "shared": _memory_files(pids)}


def all_of(pids):
    """{"private", "shared", "files"} in bytes. Files (libraries, programs) by proportional set
    size; shared memory is what the open memory files have allocated or, where that is more, the
    proportional set size of shared memory."""
    parts = moving(pids)
    slow = _lines(pids, "smaps_rollup", ["Pss_File", "Pss_Shmem"])
    parts["files"] = slow["Pss_File"]
    parts["shared"] = max(parts["shared"], slow["Pss_Shmem"])
    return parts


class Peak:
    """Watches pids() until it is left: every `interval` seconds what moves, and all at both ends.
    Then `parts` is what the highest total was made of."""

    def __init__(self, pids, interval=0.002):
        self.parts, self.samples = {"private": 0, "shared": 0, "files": 0}, 0
        self._pids, self._interval = pids, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def bytes(self):
        return sum(self.parts.values())

    def __enter__(self):
        self._take(all_of(self._pids()))
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._over.set()
        self._thread.join()
        self._take(all_of(self._pids()))

    def _take(self, parts):
        self.samples += 1
        parts = {"files": self.parts["files"], **parts}
        if sum(parts.values()) > self.bytes:
            self.parts = parts

    def _run(self):
        while not self._over.wait(self._interval):
            self._take(moving(self._pids()))

"""A memory limit that the kernel keeps for some processes together: a control group below that of the test itself."""

import os
import pathlib
import re
import tempfile

ROOT = pathlib.Path("/sys/fs/cgroup")


def own_group():
    """(folder, version) of this process's memory group; (None, 0) where there is none to be seen."""
    groups = {}
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path.lstrip("/")
    for root, controllers, version in ((ROOT / "memory", "memory", 1), (ROOT, "", 2)):
        folder = root / groups.get(controllers, "")
        if controllers in groups and (folder / ("memory.max", "memory.limit_in_bytes")[version == 1]).exists():
            return folder, version
    return None, 0


class MemoryGroup:
    """Made by make(); take it as a context manager. All processes that enter it must have ended before it is left."""

    def __init__(self, folder, version):
        self.folder = folder
        self.version = version

    @classmethod
    def make(cls):
        """None where this process may not make one."""
        parent, version = own_group()
        try:
            return cls(pathlib.Path(tempfile.mkdtemp(prefix="zeroshard-", dir=parent)), version) if parent else None
        except OSError:
            return None

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.folder.rmdir()

    def enter(self):
        """For Popen's preexec_fn: the process and its children belong to the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, size):
        """Bytes that the group may have, without swap."""
        if self.version == 1:
            (self.folder / "memory.limit_in_bytes").write_text(str(size))
            both = self.folder / "memory.memsw.limit_in_bytes"
            if both.exists():
                both.write_text(str(size))
        else:
            (self.folder / "memory.swap.max").write_text("0")
            (self.folder / "memory.max").write_text(str(size))

    def unreclaimable(self):
        """Bytes that the group has now and that no file on a drive stands behind."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        if self.version == 2:
            return int(stat["anon"]) + int(stat["shmem"]) + int(stat["kernel"])
        kernel = int((self.folder / "memory.kmem.usage_in_bytes").read_text())
        return int(stat["total_rss"]) + int(stat["total_shmem"]) + kernel

    def kills(self):
        """Processes that the kernel has killed to keep the limit."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        return int(re.search(r"^oom_kill (\d+)", (self.folder / file).read_text(), re.M)[1])

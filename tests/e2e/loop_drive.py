"""A file system on a loop device that can be made to fail, and to work again. Needs root, losetup and mount."""

import contextlib
import fcntl
import os
import pathlib
import struct
import subprocess

# <linux/loop.h>: the status has its size limit at byte 32.
SET_STATUS, GET_STATUS, STATUS_BYTES, LIMIT = 0x4C04, 0x4C05, 232, 32


class NotAllowed(Exception):
    """This machine does not let us have one; the text says why."""


def command(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise NotAllowed(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


class LoopDrive:
    """An ext4 of `megabytes` in the file `image`, mounted at `path`. The image is sparse."""

    def __init__(self, image, path, megabytes):
        self.path = pathlib.Path(path)
        self.path.mkdir()
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        # Without a journal: its failure would take the file system away for good.
        command("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "nodiscard", image)
        self.device = command("losetup", "--find", "--show", image)
        try:
            command("mount", "-o", "errors=continue,nodiscard", self.device, self.path)
        except NotAllowed:
            command("losetup", "-d", self.device)
            raise

    def limit(self, size):
        descriptor = os.open(self.device, os.O_RDWR)
        try:
            status = bytearray(STATUS_BYTES)
            fcntl.ioctl(descriptor, GET_STATUS, status)
            struct.pack_into("<Q", status, LIMIT, size)
            fcntl.ioctl(descriptor, SET_STATUS, bytes(status))
        finally:
            os.close(descriptor)

    def fail(self):
        """From now on every read and write of a file's data gives EIO."""
        self.limit(1 << 20)

    def heal(self):
        self.limit(0)

    def close(self):
        for words in (["umount", "-l", self.path], ["losetup", "-d", self.device]):
            subprocess.run([str(word) for word in words], capture_output=True)


@contextlib.contextmanager
def loop_drive(directory, megabytes, image=None):
    drive = LoopDrive(image or directory / "image", directory / "drive", megabytes)
    try:
        yield drive
    finally:
        drive.heal()
        drive.close()


@contextlib.contextmanager
def small_memory(path, megabytes):
    """A tmpfs."""
    path.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True)

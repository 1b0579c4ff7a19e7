"""A small filesystem whose last file can lose its end: reads fail with EIO in the block layer, whoever asks for them.

Needs root and loop devices. Unlike a library in front of libc it also reaches io_uring.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


class NoDiskError(Exception):
    """Why this machine cannot mount one."""


@dataclass
class DyingDisk:
    """A mounted ext4, and the file that stands for its medium."""

    mount: Path
    medium: Path
    _lost: bytes = b""

    def lose(self, file: Path, offset: int) -> None:
        """Make `file` unreadable from byte `offset` on; what lies behind it on the medium is lost as well."""
        os.sync()
        at = self.medium.read_bytes().find(file.read_bytes())
        assert at >= 0, f"{file} is not in one piece on {self.medium}"
        with self.medium.open("rb") as stream:
            stream.seek(at + offset)
            self._lost = stream.read()
        os.truncate(self.medium, at + offset)

    def heal(self) -> None:
        with self.medium.open("ab") as stream:
            stream.write(self._lost)
        self._lost = b""


@contextmanager
def mounted(folder: Path, size_mb: int = 64) -> Iterator[DyingDisk]:
    """Mount an empty one under `folder`; NoDiskError says why it cannot be done."""

    def run(*command: str) -> str:
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoDiskError(f"{command[0]}: {getattr(error, 'stderr', None) or error}".strip()) from error

    disk = DyingDisk(folder / "mnt", folder / "disk.img")
    disk.mount.mkdir(parents=True)
    disk.medium.touch()
    os.truncate(disk.medium, size_mb << 20)
    run("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", str(disk.medium))
    with ExitStack() as undo:
        device = run("losetup", "--find", "--show", str(disk.medium))
        undo.callback(run, "losetup", "-d", device)
        run("mount", "-o", "noatime", device, str(disk.mount))
        undo.callback(run, "umount", "-l", str(disk.mount))
        yield disk

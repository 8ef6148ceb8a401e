"""What a hand-in left on the disk is removed, however it was made.

Folders nested ten thousand deep, folders without rights, links to elsewhere: nothing recurses,
nothing follows a link. All of its processes have ended before.
"""

import itertools
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")
"""Folders in which every account may write."""


def remove(folder: Path) -> None:
    """Remove a folder with all it holds; what cannot be removed stays, without an error."""
    if os.unlink not in os.supports_dir_fd:  # Windows
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _empty(top)
        finally:
            os.close(top)
        folder.rmdir()


def _empty(top: int) -> None:
    """Empty an open folder: what stands in a folder below it is first moved up, to a new name."""
    token = secrets.token_hex(8)
    numbers = itertools.count()
    while names := os.listdir(top):
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            below = _opened(name, top)
            try:
                for inner in os.listdir(below):  # noqa: PTH208 (an open folder, no path)
                    if _is_folder(inner, below):
                        os.chmod(inner, 0o700, dir_fd=below)
                    new = f"{token}.{next(numbers)}"
                    os.rename(inner, new, src_dir_fd=below, dst_dir_fd=top)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=top)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _opened(name: str, parent: int) -> int:
    os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def sweep(account: int) -> None:
    """Remove what an account that has ended owns in the folders that all accounts share."""
    for folder in {*SHARED, tempfile.gettempdir()}:
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == account:
                        _remove_any(entry)


def _remove_any(entry: "os.DirEntry[str]") -> None:
    if entry.is_dir(follow_symlinks=False):
        remove(Path(entry.path))
    else:
        Path(entry.path).unlink()

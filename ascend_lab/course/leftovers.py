"""Removes the files that a hand-in left on the disk, even if they are made to resist removal.

There may be folders nested ten thousand deep, folders without access rights, and links to other
places: the removal does not recurse and follows no link. It runs after all processes of the hand-in
have ended.
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
    """Remove a folder and its contents; files that cannot be removed stay, without an error."""
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
    """Empty an open folder, after moving the contents of its subfolders up into it.

    So the depth never grows, and no path becomes longer than the system allows.
    """
    token = secrets.token_hex(8)
    numbers = itertools.count()
    while names := os.listdir(top):
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            subfolder = _opened(name, top)
            try:
                for inner in os.listdir(subfolder):  # noqa: PTH208 (an open folder, no path)
                    if _is_folder(inner, subfolder):
                        os.chmod(inner, 0o700, dir_fd=subfolder)
                    new_name = f"{token}.{next(numbers)}"
                    os.rename(inner, new_name, src_dir_fd=subfolder, dst_dir_fd=top)
            finally:
                os.close(subfolder)
            os.rmdir(name, dir_fd=top)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _opened(name: str, parent: int) -> int:
    """Open a folder, and give this account all rights on it first."""
    os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def sweep(account: int) -> None:
    """Remove the files of an account in the folders in which all accounts may write."""
    for folder in {*SHARED, tempfile.gettempdir()}:
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == account:
                        _remove_any(entry)


def _remove_any(entry: "os.DirEntry[str]") -> None:
    """Remove a file, or a folder with all that is in it."""
    if entry.is_dir(follow_symlinks=False):
        remove(Path(entry.path))
    else:
        Path(entry.path).unlink()

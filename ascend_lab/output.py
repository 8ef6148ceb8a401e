"""Writes a user's file completely or not at all.

A plain `open(path, "w")` empties the file first: if the disk is full or the process is killed, the
old content is lost and the new one incomplete. Here the data goes to a temporary file in the same
folder, which then takes the old one's place in one step (`rename`, which is atomic).
"""

import errno
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ascend_lab.errors import InputError

STALE_AFTER_S = 3600.0
"""Age at which a temporary file is taken for one of a killed process and removed.

Writing takes seconds at most, as the data is already in memory.
"""
_OPEN_STREAM = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>[0-9]{1,9})")
"""Names of streams that this process has open: data is appended at their position."""
_TEMPORARY_NAMES = ".ascend_lab-*.tmp"
_REMEDIES = {errno.ENOSPC: "free some space", errno.ENOENT: "make its folder first"}


def write_whole(
    path: str | Path, data: bytes | memoryview | str, *, only_files: bool = False
) -> None:
    """Write `data` (text as UTF-8) to `path`; if that fails, the old file stays as it was.

    A link is followed and stays a link. Devices, pipes and streams such as /dev/stdout are written
    directly; folders and sockets are refused. With `only_files` everything but a regular file is
    refused, links too. Raises `InputError` if the system refuses.
    """
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        status = _status(Path(path), follow=not only_files)
        stream = _OPEN_STREAM.fullmatch(str(path))
        kind = stat.S_IFREG if status is None else stat.S_IFMT(status.st_mode)
        if not only_files and (kind in (stat.S_IFCHR, stat.S_IFIFO) or (status and stream)):
            _append(path, raw, stream)
        elif kind != stat.S_IFREG:
            raise InputError("a regular file to write", f"{path}, which is none", "name another")
        else:
            _replace(Path(os.path.realpath(path)), raw, status)
    except (OSError, ValueError) as error:  # ValueError: a name that no system call takes
        raise _refused(path, error) from None


def usable_folder(path: str | Path) -> Path:
    """Return a folder after making it if needed; raise `InputError` if files cannot go there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permission bits do not tell of full or read-only disks: try to write
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = "name another folder, or change its permissions"
        raise InputError(f"a folder to write to: {path}", reason, remedy) from None
    return folder


def check_writable(path: str | Path) -> None:
    """Raise now, before long work, the `InputError` that `write_whole` would raise at its end."""
    try:
        status = _status(Path(path), follow=True)
        kind = stat.S_IFREG if status is None else stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFCHR, stat.S_IFIFO):
            raise InputError("a regular file to write", f"{path}, which is none", "name another")
        if status and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if kind == stat.S_IFREG and not _OPEN_STREAM.fullmatch(str(path)):
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
                pass
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None


def _refused(path: str | Path, error: OSError | ValueError) -> InputError:
    """Return an `InputError` that states an error of the operating system about a path."""
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the name and the permissions")
    got = getattr(error, "strerror", None) or str(error)
    return InputError(f"to write {str(path)[:200]!r}", got, remedy)


def _status(path: Path, follow: bool) -> os.stat_result | None:
    """Return the status of the file at a path; None if nothing is there or a link is broken."""
    try:
        return path.stat(follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _append(path: str | Path, raw: bytes | memoryview, stream: re.Match[str] | None) -> None:
    """Write to a stream, device or pipe; raise at once if nobody reads the pipe."""
    if stream:
        # what `print` has buffered comes first
        if sys.stdout:
            sys.stdout.flush()
        handle = os.dup(int(stream["number"] or ("out", "err").index(stream["name"]) + 1))
    else:
        # without O_NONBLOCK, opening a pipe waits for a reader
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "wb") as out:
        os.set_blocking(handle, True)
        out.write(raw)


def _replace(file: Path, raw: bytes | memoryview, status: os.stat_result | None) -> None:
    """Write a temporary file in the folder of `file`, then rename it; keep the old permissions."""
    if status and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for leftover in file.parent.glob(_TEMPORARY_NAMES):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_AFTER_S:
                leftover.unlink()
    temporary = file.with_name(_TEMPORARY_NAMES.replace("*", secrets.token_hex(8)))
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(raw)
            out.flush()
            # onto the disk before the rename: after a crash the name leads to complete data
            os.fsync(handle)
        if status:
            temporary.chmod(stat.S_IMODE(status.st_mode))
        temporary.replace(file)
    except BaseException:  # KeyboardInterrupt, too
        temporary.unlink(missing_ok=True)
        raise

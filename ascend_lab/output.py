"""The one way this package writes a user's file: whole, or not at all."""

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

DEAD_AFTER_S = 3600.0
"""A temporary file as old as this was left by a killed process: what is written lies in memory."""
_OWN = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>[0-9]{1,9})")
"""Names of what this process has open: written from where it stands."""
_PATTERN = ".ascend_lab-*.tmp"
_REMEDIES = {errno.ENOSPC: "free some space", errno.ENOENT: "make its folder first"}


def write_whole(
    path: str | Path, data: bytes | memoryview | str, *, only_files: bool = False
) -> None:
    """Write `data` (text as UTF-8) to `path`; if that fails, what was there stays as it was.

    A link is followed and stays one; a device, a pipe and what /dev/stdout and its like name are
    written directly, folders and sockets refused; with `only_files` links and all that is no
    regular file are. Raises `InputError`, one line, for whatever the system refuses.
    """
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        found = _status(Path(path), follow=not only_files)
        own = _OWN.fullmatch(str(path))
        kind = stat.S_IFREG if found is None else stat.S_IFMT(found.st_mode)
        if not only_files and (kind in (stat.S_IFCHR, stat.S_IFIFO) or (found and own)):
            _append(path, raw, own)
        elif kind != stat.S_IFREG:
            raise InputError("a regular file to write", f"{path}, which is none", "name another")
        else:
            _replace(Path(os.path.realpath(path)), raw, found)
    except (OSError, ValueError) as error:  # ValueError: a name that no system call takes
        raise _refused(path, error) from None


def usable_folder(path: str | Path) -> Path:
    """Return a folder that files can be written to, made if it is missing; `InputError` if not."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
        found = _status(Path(path), follow=True)
        kind = stat.S_IFREG if found is None else stat.S_IFMT(found.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFCHR, stat.S_IFIFO):
            raise InputError("a regular file to write", f"{path}, which is none", "name another")
        if found and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if kind == stat.S_IFREG and not _OWN.fullmatch(str(path)):
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
                pass
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None


def _refused(path: str | Path, error: OSError | ValueError) -> InputError:
    """Return what the system says about a path as our error."""
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the name and the permissions")
    got = getattr(error, "strerror", None) or str(error)
    return InputError(f"to write {str(path)[:200]!r}", got, remedy)


def _status(path: Path, follow: bool) -> os.stat_result | None:
    """Return what lies at a path; None if nothing does, or a link that leads nowhere."""
    try:
        return path.stat(follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _append(path: str | Path, raw: bytes | memoryview, own: re.Match[str] | None) -> None:
    """Write to what takes data as it comes; a pipe that nobody reads is an error, no wait."""
    if own:
        if sys.stdout:
            sys.stdout.flush()
        handle = os.dup(int(own["number"] or ("out", "err").index(own["name"]) + 1))
    else:
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "wb") as out:
        os.set_blocking(handle, True)
        out.write(raw)


def _replace(file: Path, raw: bytes | memoryview, found: os.stat_result | None) -> None:
    """Write beside `file`, then put that in its place, with its permissions."""
    if found and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for old in file.parent.glob(_PATTERN):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > DEAD_AFTER_S:
                old.unlink()
    beside = file.with_name(_PATTERN.replace("*", secrets.token_hex(8)))
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(handle)
        if found:
            beside.chmod(stat.S_IMODE(found.st_mode))
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

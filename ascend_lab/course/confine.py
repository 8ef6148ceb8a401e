"""What a process can take from itself for good on Linux: its account, files, network, signals.

Read by `inside.py` before a hand-in runs; it imports nothing of the package. Three means, each of
which stands where the others are not granted:

    account      root becomes an account of a number of its own, of the range kept for such
    Landlock     a list of what may be opened; all else is closed, whatever the account may do
                 (Linux 5.13; needs no right; https://docs.kernel.org/userspace-api/landlock.html)
    name spaces  no network, nobody else to signal, a small disk in memory as own folder and every
                 other one read-only (Landlock alone stops no chmod)
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
FIRST_ACCOUNT = 61184
ACCOUNTS = 4336
"""Numbers that no system gives to a person: the range for accounts that exist while a task runs."""

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_NET = 0x40000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
SIGKILL = 9

CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
ASK_VERSION = 1
BENEATH = 1
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14
MAKE_DEVICES = 1 << 6 | 1 << 11
RIGHTS_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
"""All rights over files that a version of Landlock knows; later ones add one over devices."""
TCP = 0b11
SIGNALS_AND_SOCKETS = 0b11

MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
MS_REC = 0x4000
MS_PRIVATE = 0x40000
READ_ONLY = 1
DISK_BYTES = 64 << 20
DISK_FILES = 10_000
"""What a hand-in may write into its folder, where that is a disk of its own."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
SYSTEM = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/fonts",
    "/usr/share/zoneinfo",
    "/usr/share/fonts",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
)
"""What libraries look up, and holds nothing of anybody."""


def account_of(process: int) -> int:
    """Return the account that a process started by root becomes: one for each, for a while."""
    return FIRST_ACCOUNT + process % ACCOUNTS


def leave_root(account: int) -> int:
    """Become an account without rights; return which. Raises `PermissionError` if it stays root."""
    if os.getuid() != 0:
        return os.getuid()
    for number in (account, NOBODY):
        try:
            os.chown(".", number, number)
            os.chown("output.txt", number, number)
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
        except OSError:  # no such number here, or root without the right to change
            continue
        return number
    raise PermissionError("root cannot become another account here")


def into_name_spaces(libc: Any, own: str) -> tuple[bool, bool]:
    """Go on as the first process of a world of its own; return whether (network, disk) is closed.

    When it ends, the system ends all that it has started.
    """
    user = os.getuid()
    group = os.getgid()
    root = os.getuid() == 0
    apart = (0 if root else NEW_USER) | NEW_MOUNTS | NEW_NET | NEW_IPC
    if libc.unshare(apart | NEW_PID) == 0:
        _go_on_as_first(libc)
    elif libc.unshare(apart) != 0:
        return libc.unshare((0 if root else NEW_USER) | NEW_NET | NEW_IPC) == 0, False
    if not root:
        try:  # a disk in memory takes no files of an account without a number
            Path("/proc/self/setgroups").write_text("deny", "ascii")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")
        except OSError:
            return True, False
    return True, _only_own_writable(libc, own.encode())


def _go_on_as_first(libc: Any) -> None:
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
    inner = os.fork()
    if inner:
        for end in range(3, 64):  # the answers are the inner one's alone
            with suppress(OSError):
                os.close(end)
        os.waitpid(inner, 0)
        os._exit(0)


def _only_own_writable(libc: Any, own: bytes) -> bool:
    """Lay a small disk in memory over the own folder, and make every other one read-only."""
    size = b"size=%d,nr_inodes=%d,mode=0700" % (DISK_BYTES, DISK_FILES)
    set_read_only = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    clear = struct.pack("QQQQ", 0, READ_ONLY, 0, 0)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", own, b"tmpfs", 0, size),
        lambda: libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, set_read_only, 32),
        lambda: libc.syscall(MOUNT_SETATTR, AT_FDCWD, own, 0, clear, 32),
    )
    granted = all(step() == 0 for step in steps)
    os.chdir(own)
    return granted


# -- Landlock --------------------------------------------------------------------------------------
def rules(libc: Any, readable: Iterable[str], listed: Iterable[str]) -> tuple[int, int] | None:
    """Return (file of the rules, rights they govern); None where the system has no Landlock.

    `readable` are files and folders with all they hold; of `listed` only names may be read. The
    folder of this moment is the process' own.
    """
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION)
    if sys.platform != "linux" or version < 1:
        return None
    rights = RIGHTS_OF_VERSION[min(version, 3)]
    table = struct.pack("QQQ", rights, TCP, SIGNALS_AND_SOCKETS)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    made = libc.syscall(CREATE_RULESET, table, ctypes.c_size_t(size), 0)
    if made < 0:
        return None
    for path in (*readable, *SYSTEM):
        _allow(libc, made, path, READ_FILE | READ_DIR)
    for path in listed:
        _allow(libc, made, path, READ_DIR)
    for path in DEVICES:
        _allow(libc, made, path, READ_FILE | WRITE_FILE | TRUNCATE & rights)
    _allow(libc, made, ".", rights & ~MAKE_DEVICES & ~1)  # nor is anything in it executed
    return made, rights


def _allow(libc: Any, made: int, path: str, rights: int) -> None:
    """Add a rule; what is not there needs none."""
    with suppress(OSError, ValueError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                rights &= WRITE_FILE | READ_FILE | TRUNCATE
            libc.syscall(ADD_RULE, made, BENEATH, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)


def confine(libc: Any, made: tuple[int, int] | None) -> bool:
    """Give up every right that the rules do not name, for good; return whether that was granted."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)  # behind the change of account, which clears it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if made is None:
        return False
    granted = libc.syscall(RESTRICT_SELF, made[0], 0) == 0
    os.close(made[0])
    return bool(granted)


# -- places that only root can reach ---------------------------------------------------------------
FIRST_HANDLE = 30


def handles(places: Sequence[str]) -> None:
    """Open folders under numbers that stay: below them an account needs no right to what is above.

    So a Python below root's home runs for another account, and nothing else of that home is open.
    """
    for number, place in enumerate(places, FIRST_HANDLE):
        found = os.open(place, os.O_PATH | os.O_DIRECTORY)
        if found != number:
            os.dup2(found, number)
            os.close(found)


def handle_path(number: int) -> str:
    """Return the path of a folder by its place in `handles`."""
    return f"/proc/self/fd/{FIRST_HANDLE + number}"

"""Lets a process on Linux give up rights for good: its account, files, network and signals.

`inside.py` calls this before a hand-in runs; this module imports nothing of the package. There are
three independent mechanisms, each of which helps if the system does not grant the others:

    account      root becomes an account whose number belongs to no person
    Landlock     a list of files that may be opened; all others are closed, whatever the account
                 (Linux 5.13; needs no right; https://docs.kernel.org/userspace-api/landlock.html)
    name spaces  no network, no other processes to signal, a small disk in memory as working folder
                 and all others read-only (Landlock alone does not stop a chmod)
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
"""The account without files that every Linux has."""
FIRST_ACCOUNT = 61184
ACCOUNTS = 4336
"""Accounts 61184 to 65519, which systemd reserves for its `DynamicUser` services."""

# Kinds of name spaces (flags of unshare), and options of prctl.
NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_NET = 0x40000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
SIGKILL = 9

# Landlock: numbers of its three system calls, a flag and a kind of rule, and rights as bits.
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
"""Version of Landlock -> all rights over files that it knows, as bits."""
TCP = 0b11
"""Rights over the network, since version 4: to offer and to open TCP connections."""
SIGNALS_AND_SOCKETS = 0b11
"""What is closed to the outside since version 6: abstract sockets and signals."""

# Mounts: a system call and its flags.
MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
MS_REC = 0x4000
MS_PRIVATE = 0x40000
READ_ONLY = 1
DISK_BYTES = 64 << 20
"""Size of the disk in memory that is the folder of a hand-in."""
DISK_FILES = 10_000
"""Most files on that disk."""

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
"""Files that libraries read, which contain nothing private."""


def account_of(process: int) -> int:
    """Return the account that a process started by root becomes; processes have different ones."""
    return FIRST_ACCOUNT + process % ACCOUNTS


def leave_root(account: int) -> int:
    """Become an account without rights, and return its number.

    Raises `PermissionError` if this process stays root.
    """
    if os.getuid() != 0:
        return os.getuid()
    for number in (account, NOBODY):
        try:
            os.chown(".", number, number)
            os.chown("output.txt", number, number)
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
        except OSError:  # the number does not exist here, or root may not change it
            continue
        return number
    raise PermissionError("root cannot become another account here")


def into_name_spaces(libc: Any, folder: str) -> tuple[bool, bool]:
    """Continue as the first process of new name spaces; return whether (network, disk) is closed.

    `folder` stays writable. When the first process ends, the system ends all that it has started.
    """
    user = os.getuid()
    group = os.getgid()
    is_root = os.getuid() == 0
    new_spaces = (0 if is_root else NEW_USER) | NEW_MOUNTS | NEW_NET | NEW_IPC
    if libc.unshare(new_spaces | NEW_PID) == 0:
        _continue_as_first(libc)
    elif libc.unshare(new_spaces) != 0:
        return libc.unshare((0 if is_root else NEW_USER) | NEW_NET | NEW_IPC) == 0, False
    if not is_root:
        try:  # without a number in the new name space the account cannot write to a disk in memory
            Path("/proc/self/setgroups").write_text("deny", "ascii")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")
        except OSError:
            return True, False
    return True, _mount_only_writable(libc, folder.encode())


def _continue_as_first(libc: Any) -> None:
    """Fork: the child continues in the new name space, this process only waits for its end."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
    child = os.fork()
    if child:
        for descriptor in range(3, 64):  # only the child writes answers
            with suppress(OSError):
                os.close(descriptor)
        os.waitpid(child, 0)
        os._exit(0)


def _mount_only_writable(libc: Any, folder: bytes) -> bool:
    """Mount a small disk in memory on the folder, and make all others read-only."""
    size = b"size=%d,nr_inodes=%d,mode=0700" % (DISK_BYTES, DISK_FILES)
    set_read_only = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    clear = struct.pack("QQQQ", 0, READ_ONLY, 0, 0)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", folder, b"tmpfs", 0, size),
        lambda: libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, set_read_only, 32),
        lambda: libc.syscall(MOUNT_SETATTR, AT_FDCWD, folder, 0, clear, 32),
    )
    granted = all(step() == 0 for step in steps)
    os.chdir(folder)
    return granted


# -- Landlock --------------------------------------------------------------------------------------
def rules(libc: Any, readable: Iterable[str], listed: Iterable[str]) -> tuple[int, int] | None:
    """Return (descriptor of a Landlock ruleset, rights that it governs); None without Landlock.

    Files in `readable`, and all files of folders in it, may be read; of folders in `listed` only
    the names. In the working directory everything is allowed except executing and making devices.
    """
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION)
    if sys.platform != "linux" or version < 1:
        return None
    rights = RIGHTS_OF_VERSION[min(version, 3)]
    table = struct.pack("QQQ", rights, TCP, SIGNALS_AND_SOCKETS)
    size = 8  # bytes of the table that this version knows: files, then network, then signals
    if version >= 4:
        size = 24 if version >= 6 else 16
    ruleset = libc.syscall(CREATE_RULESET, table, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return None
    for path in (*readable, *SYSTEM):
        _allow(libc, ruleset, path, READ_FILE | READ_DIR)
    for path in listed:
        _allow(libc, ruleset, path, READ_DIR)
    for path in DEVICES:
        _allow(libc, ruleset, path, READ_FILE | WRITE_FILE | TRUNCATE & rights)
    _allow(libc, ruleset, ".", rights & ~MAKE_DEVICES & ~1)  # bit 0 is the right to execute
    return ruleset, rights


def _allow(libc: Any, ruleset: int, path: str, rights: int) -> None:
    """Allow rights on a file or folder; a path that does not exist is skipped."""
    with suppress(OSError, ValueError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                rights &= WRITE_FILE | READ_FILE | TRUNCATE
            libc.syscall(ADD_RULE, ruleset, BENEATH, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)


def confine(libc: Any, ruleset: tuple[int, int] | None) -> bool:
    """Give up all rights that a ruleset of `rules` does not allow; return whether that worked."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)  # set again, as the change of account clears it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if ruleset is None:
        return False
    granted = libc.syscall(RESTRICT_SELF, ruleset[0], 0) == 0
    os.close(ruleset[0])
    return bool(granted)


# -- folders that only root can reach --------------------------------------------------------------
FIRST_HANDLE = 30


def handles(places: Sequence[str]) -> None:
    """Open folders as descriptors 30, 31, ..., by which any account reaches the files in them.

    So another account can run a Python in root's home directory without access to the rest of it.
    """
    for number, place in enumerate(places, FIRST_HANDLE):
        descriptor = os.open(place, os.O_PATH | os.O_DIRECTORY)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)


def handle_path(number: int) -> str:
    """Return the path of a folder by its position in the list given to `handles`."""
    return f"/proc/self/fd/{FIRST_HANDLE + number}"

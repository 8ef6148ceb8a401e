"""One file of typed partitions, every byte of it under a checksum: what an offline model lies in.

    header   magic, version, entries, length, SHA-256 of header and table
    table    per partition: kind, gear, offset, size, checksum
    bodies   each from an address that is a multiple of 64, padded with zeros

The idea is that of CANN's offline model (`ge::ModelFileHeader` and its partitions); the format is
our own and not compatible. A checksum of megabytes has to be quick: 64-bit words in rows of 512;
products of each row with odd constants, sums of the columns, both modulo 2**64, and SHA-256 of
these. What changes one word changes its row, since odd numbers have inverses; two words that share
a row have different columns. It guards against damage, not against forgers.
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

MAGIC = b"ALMODEL\0"
VERSION = 1
SUFFIX = ".alm"
ALIGN_BYTES = 64
_HEAD = struct.Struct("<8sIIQ8x32s")
_ENTRY = struct.Struct("<IIQQ8x32s")
_ROW = 512
_ODD = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
REMEDY = "compile the model again"


class Kind(IntEnum):
    """What a partition holds; those of a gear carry its number."""

    META = 0
    WEIGHTS = 1
    GRAPH = 2
    TASKS = 3
    KERNELS = 4
    MEMORY = 5


Values = NDArray[np.uint8]
Parts = Mapping[tuple[Kind, int], memoryview]


def checksum(data: bytes | memoryview) -> bytes:
    """Return the 32-byte checksum of some bytes; see the module's text."""
    raw = np.frombuffer(data, np.uint8)
    whole = len(raw) // (8 * _ROW) * 8 * _ROW
    words = raw[:whole].view("<u8").reshape(-1, _ROW)
    found = hashlib.sha256(struct.pack("<Q", len(raw)) + raw[whole:].tobytes())
    for sums in (np.dot(words, _ODD), words.sum(0)):
        found.update(sums.astype("<u8").tobytes())
    return found.digest()


def pack_parts(parts: Sequence[tuple[Kind, int, Sequence[Values]]]) -> memoryview:
    """Return the file of some partitions: (kind, gear, arrays of bytes one behind the other)."""
    sizes = [sum(map(len, pieces)) for _, _, pieces in parts]
    start = _HEAD.size + _ENTRY.size * len(parts)
    offsets = list(accumulate((n + -n % ALIGN_BYTES for n in sizes), initial=start))
    whole = np.zeros(offsets[-1], np.uint8)
    table = b""
    for (kind, gear, pieces), size, offset in zip(parts, sizes, offsets, strict=False):
        body = whole[offset : offset + size + -size % ALIGN_BYTES]
        np.concatenate(pieces, out=body[:size])
        table += _ENTRY.pack(kind, gear, offset, size, checksum(body.data))
    front = _head(len(parts), offsets[-1], table) + table
    whole[:start] = np.frombuffer(front, np.uint8)
    return whole.data


def _head(entries: int, length: int, table: bytes) -> bytes:
    bare = _HEAD.pack(MAGIC, VERSION, entries, length, bytes(32))
    return _HEAD.pack(MAGIC, VERSION, entries, length, hashlib.sha256(bare + table).digest())


def unpack_parts(data: memoryview, where: str) -> Parts:
    """Return the partitions of a file; raise `InputError` for another version and any damage."""
    if bytes(data[:8]) != MAGIC or len(data) < _HEAD.size:
        raise InputError(f"{where}: an offline model", "other or damaged bytes", REMEDY)
    _, version, entries, length, _ = _HEAD.unpack_from(data)
    if version != VERSION:
        needed = f"{where}: an offline model of version {VERSION}"
        raise InputError(needed, f"version {version}", REMEDY)
    if length != len(data):
        raise InputError(f"{where}: {length:,} bytes", f"{len(data):,}: damaged", REMEDY)
    start = _HEAD.size + _ENTRY.size * entries
    table = bytes(data[_HEAD.size : start])
    if bytes(data[: _HEAD.size]) != _head(entries, length, table):
        raise InputError(f"{where}: a sound header", "a damaged one: its checksum differs", REMEDY)
    found = {}
    for number, gear, offset, size, stated in _ENTRY.iter_unpack(table):
        kind = Kind(number)
        if checksum(data[offset : offset + size + -size % ALIGN_BYTES]) != stated:
            got = "a damaged one: its checksum differs"
            raise InputError(f"{where}: a sound partition {kind.name}", got, REMEDY)
        found[kind, gear] = data[offset : offset + size]
    return found


def is_offline(path: str | Path) -> bool:
    """Tell whether a file says by its name or its first bytes that it is an offline model."""
    try:
        if Path(path).suffix == SUFFIX or not Path(path).is_file():
            return Path(path).suffix == SUFFIX
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_parts(path: str | Path) -> Parts:
    """Return the partitions of a file, mapped into memory; raises as `unpack_parts`."""
    try:
        with Path(path).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "an empty file" if "empty" in reason else reason
        raise InputError(f"{path}: a compiled model", reason, "check the path") from None
    return unpack_parts(data, str(path))

"""The file format of offline models: partitions of some kinds, every byte under a checksum.

    header   magic, version, entries, length, SHA-256 of header and table
    table    for each partition: kind, gear, offset, size, checksum
    bodies   each from an address that is a multiple of 64, padded with zeros

The idea is that of CANN's offline model (`ge::ModelFileHeader` and its partitions); the format is
our own and not compatible. `writer` writes such a file, `offline` reads it.

A checksum of megabytes has to be quick. The bytes are read as 64-bit words in rows of 512; the
checksum is the SHA-256 of each row's product with odd constants and of each column's sum, both
modulo 2**64. A change of one word changes its row's product, since odd numbers have inverses; of
two changed words in one row each changes its column's sum. It guards against damage, not against
forgers.
"""

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import Values
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

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


Parts = Mapping[tuple[Kind, int], memoryview]
KERNEL_BYTES = 2**27
"""Largest text of all kernels, unpacked: MobileNetV2's has 2 MB."""
_FORGED = (
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError),
    *(RecursionError, MemoryError, SyntaxError, RuntimeError, zlib.error),
)
"""Errors that the reader runs into when data are not those that `compile_offline` writes."""


@contextmanager
def as_written(where: str) -> Iterator[None]:
    """Raise `InputError` for every error that the data of a forged file cause.

    Checksums guard against damage only: whoever writes other data can write their checksums, too.
    """
    try:
        yield
    except AscendLabError:
        raise
    except _FORGED as error:
        got = f"other data ({type(error).__name__}: {shown(str(error))})"
        raise InputError(f"{where}: an offline model as `compile` writes it", got, REMEDY) from None


def need(condition: bool, thing: str) -> None:
    """Raise `ValueError`, which `as_written` turns into `InputError`, unless a condition holds."""
    if not condition:
        raise ValueError(f"no {thing}")


def json_of(data: bytes | memoryview) -> Any:
    """Return the value of JSON; raise `ValueError` for NaN, infinities and halves of characters."""
    text = bytes(data).decode()
    value = json.loads(text, parse_constant=_refuse_number)
    # \ud83d alone is half of a pair: JSON may write it, but no text can hold it
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_number(text: str) -> None:
    """Raise `ValueError`: Python's reader would accept NaN and Infinity."""
    raise ValueError(f"{text}, which is no number")


def unpacked(data: bytes | memoryview) -> bytes:
    """Return compressed bytes unpacked, never more than `KERNEL_BYTES`; raise `ValueError`."""
    # 1 MB may unpack to 1 GB of zeros: the reader stops at the limit
    reader = zlib.decompressobj()
    plain = reader.decompress(bytes(data), KERNEL_BYTES)
    need(reader.eof, f"kernels of at most {KERNEL_BYTES:,} bytes")
    return plain


def checksum(data: bytes | memoryview) -> bytes:
    """Return the 32-byte checksum of some bytes, as the text of this module defines it."""
    raw = np.frombuffer(data, np.uint8)
    # 10,000 bytes are two rows of 4,096 and 1,808 bytes, which SHA-256 takes as they are
    rows_end = len(raw) // (8 * _ROW) * 8 * _ROW
    words = raw[:rows_end].view("<u8").reshape(-1, _ROW)
    digest = hashlib.sha256(struct.pack("<Q", len(raw)) + raw[rows_end:].tobytes())
    for sums in (np.dot(words, _ODD), words.sum(0)):
        digest.update(sums.astype("<u8").tobytes())
    return digest.digest()


def pack_parts(parts: Sequence[tuple[Kind, int, Sequence[Values]]]) -> memoryview:
    """Return a file of partitions, each a kind, a gear and arrays of bytes to be joined."""
    sizes = [sum(map(len, pieces)) for _, _, pieces in parts]
    start = _HEAD.size + _ENTRY.size * len(parts)
    # -n % 64 is what n lacks to a multiple of 64: -100 % 64 = 28, and 128 follows
    offsets = list(accumulate((n + -n % ALIGN_BYTES for n in sizes), initial=start))
    image = np.zeros(offsets[-1], np.uint8)
    table = b""
    for (kind, gear, pieces), size, offset in zip(parts, sizes, offsets, strict=False):
        body = image[offset : offset + size + -size % ALIGN_BYTES]
        # joined in its place: weights of a gigabyte are not held twice
        np.concatenate(pieces, out=body[:size])
        table += _ENTRY.pack(kind, gear, offset, size, checksum(body.data))
    front_bytes = _head(len(parts), offsets[-1], table) + table
    image[:start] = np.frombuffer(front_bytes, np.uint8)
    return image.data


def _head(entries: int, length: int, table: bytes) -> bytes:
    """Return the header of a file with a table of partitions."""
    # the checksum covers the header as it is with zeros in the place of the checksum
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
    # a file that was cut short, as by a copy that did not end
    if length != len(data):
        raise InputError(f"{where}: {length:,} bytes", f"{len(data):,}: damaged", REMEDY)
    start = _HEAD.size + _ENTRY.size * entries
    table = bytes(data[_HEAD.size : start])
    if bytes(data[: _HEAD.size]) != _head(entries, length, table):
        raise InputError(f"{where}: a sound header", "a damaged one: its checksum differs", REMEDY)
    parts = {}
    kinds = set(Kind)
    for number, gear, offset, size, stated in _ENTRY.iter_unpack(table):
        if number not in kinds or offset + size > length:
            raise InputError(f"{where}: partitions inside the file", "others", REMEDY)
        kind = Kind(number)
        # the padding belongs to it: no byte of the file may change unseen
        if checksum(data[offset : offset + size + -size % ALIGN_BYTES]) != stated:
            got = "a damaged one: its checksum differs"
            raise InputError(f"{where}: a sound partition {kind.name}", got, REMEDY)
        parts[kind, gear] = data[offset : offset + size]
    return parts


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
        # mapped, not read: pages come from the disk when their checksum is taken
        with Path(path).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "an empty file" if "empty" in reason else reason
        raise InputError(f"{path}: a compiled model", reason, "check the path") from None
    return unpack_parts(data, str(path))


def chip_checksum(chip: Chip) -> str:
    """Return a checksum of a chip's numbers, without the sources they are from."""
    numbers = (
        (f.name, getattr(chip, f.name))
        for f in fields(chip)
        if f.name not in ("facts", "sources", "summary")
    )
    # sorted: two chip files may list the same links in another order
    plain = [(n, sorted(v.items()) if isinstance(v, Mapping) else v) for n, v in numbers]
    return checksum(repr(plain).encode()).hex()

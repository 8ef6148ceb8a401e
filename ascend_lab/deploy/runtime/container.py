"""Reads and writes the file format of offline models: header, table, partitions with checksums.

    header   magic, version, entries, length, SHA-256 of header and table
    table    for each partition: type (`Kind`), gear, offset, size, checksum
    bodies   each at an offset that is a multiple of 64, padded with zeros

A gear is the model compiled for one batch size. The design follows CANN's offline models
(`ge::ModelFileHeader` and its partitions), but the format is not compatible. `writer` writes such a
file, `offline` reads it.

SHA-256 of all weights would be slow. Therefore the bytes are read as 64-bit words in rows of 512,
and the checksum is the SHA-256 of each row's dot product with odd constants and of each column's
sum, both modulo 2**64. A change of one word changes its row's product, since odd numbers have
inverses, and two changed words of a row each change their column's sum. The checksum detects
damage, but not forgery.
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
_HEADER = struct.Struct("<8sIIQ8x32s")
_ENTRY = struct.Struct("<IIQQ8x32s")
_ROW_WORDS = 512
_ODD_FACTORS = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
) | np.uint64(1)
REMEDY = "compile the model again"


class Kind(IntEnum):
    """The type of a partition; graph, tasks and memory exist once for each gear."""

    META = 0
    WEIGHTS = 1
    GRAPH = 2
    TASKS = 3
    KERNELS = 4
    MEMORY = 5


Parts = Mapping[tuple[Kind, int], memoryview]
KERNEL_BYTES = 2**27
"""Largest text of all kernels, unpacked: MobileNetV2's has 2 MB."""
_FORGED_DATA_ERRORS = (
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError),
    *(RecursionError, MemoryError, SyntaxError, RuntimeError, zlib.error),
)
"""Errors that can occur when the data are not what `compile_offline` writes."""


@contextmanager
def refuse_forged_data(where: str) -> Iterator[None]:
    """Raise `InputError` in place of every error that the data of a forged file cause.

    A checksum does not help here: whoever forges data can also write their checksum.
    """
    try:
        yield
    except AscendLabError:
        raise
    except _FORGED_DATA_ERRORS as error:
        got = f"other data ({type(error).__name__}: {shown(str(error))})"
        raise InputError(f"{where}: an offline model as `compile` writes it", got, REMEDY) from None


def need(condition: bool, missing: str) -> None:
    """Raise `ValueError` unless a condition holds; callers turn it into an `InputError`."""
    if not condition:
        raise ValueError(f"no {missing}")


def json_of(data: bytes | memoryview) -> Any:
    """Return the value of JSON; raise `ValueError` for NaN, infinities and lone surrogates."""
    text = bytes(data).decode()
    value = json.loads(text, parse_constant=_refuse_number)
    # \ud83d alone is half of a surrogate pair: JSON can state it, but it is not valid text.
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_number(text: str) -> None:
    """Raise `ValueError`: Python's reader would accept NaN and Infinity."""
    raise ValueError(f"{text}, which is no number")


def unpacked(data: bytes | memoryview) -> bytes:
    """Return decompressed bytes; raise `ValueError` if they are more than `KERNEL_BYTES`."""
    # 1 MB may decompress to 1 GB of zeros: the decompressor stops at the limit.
    reader = zlib.decompressobj()
    decompressed = reader.decompress(bytes(data), KERNEL_BYTES)
    need(reader.eof, f"kernels of at most {KERNEL_BYTES:,} bytes")
    return decompressed


def checksum(data: bytes | memoryview) -> bytes:
    """Return the 32-byte checksum of some bytes that the module's docstring defines."""
    raw = np.frombuffer(data, np.uint8)
    # 10,000 bytes are two rows of 4,096 bytes and 1,808 more, which SHA-256 takes directly.
    rows_end = len(raw) // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    words = raw[:rows_end].view("<u8").reshape(-1, _ROW_WORDS)
    digest = hashlib.sha256(struct.pack("<Q", len(raw)) + raw[rows_end:].tobytes())
    for sums in (np.dot(words, _ODD_FACTORS), words.sum(0)):
        digest.update(sums.astype("<u8").tobytes())
    return digest.digest()


def pack_parts(parts: Sequence[tuple[Kind, int, Sequence[Values]]]) -> memoryview:
    """Return a file of partitions; each is given as type, gear and a list of byte arrays."""
    sizes = [sum(map(len, pieces)) for _, _, pieces in parts]
    bodies_start = _HEADER.size + _ENTRY.size * len(parts)
    # n + -n % 64 rounds n up to a multiple of 64: 100 + -100 % 64 = 100 + 28 = 128.
    offsets = list(accumulate((n + -n % ALIGN_BYTES for n in sizes), initial=bodies_start))
    file_bytes = np.zeros(offsets[-1], np.uint8)
    table = b""
    for (kind, gear, pieces), size, offset in zip(parts, sizes, offsets, strict=False):
        body = file_bytes[offset : offset + size + -size % ALIGN_BYTES]
        # Concatenated directly into the file, so that weights are not copied twice.
        np.concatenate(pieces, out=body[:size])
        table += _ENTRY.pack(kind, gear, offset, size, checksum(body.data))
    front_bytes = _header(len(parts), offsets[-1], table) + table
    file_bytes[:bodies_start] = np.frombuffer(front_bytes, np.uint8)
    return file_bytes.data


def _header(entries: int, length: int, table: bytes) -> bytes:
    """Return the header of a file with a table of partitions."""
    # The checksum is computed with zeros in its own place.
    unsigned_header = _HEADER.pack(MAGIC, VERSION, entries, length, bytes(32))
    return _HEADER.pack(
        MAGIC, VERSION, entries, length, hashlib.sha256(unsigned_header + table).digest()
    )


def unpack_parts(data: memoryview, where: str) -> Parts:
    """Return the partitions of a file; raise `InputError` for another version or damage."""
    if bytes(data[:8]) != MAGIC or len(data) < _HEADER.size:
        raise InputError(f"{where}: an offline model", "other or damaged bytes", REMEDY)
    _, version, entries, length, _ = _HEADER.unpack_from(data)
    if version != VERSION:
        needed = f"{where}: an offline model of version {VERSION}"
        raise InputError(needed, f"version {version}", REMEDY)
    # A file that was cut short, for example by an interrupted copy.
    if length != len(data):
        raise InputError(f"{where}: {length:,} bytes", f"{len(data):,}: damaged", REMEDY)
    bodies_start = _HEADER.size + _ENTRY.size * entries
    table = bytes(data[_HEADER.size : bodies_start])
    if bytes(data[: _HEADER.size]) != _header(entries, length, table):
        raise InputError(f"{where}: a sound header", "a damaged one: its checksum differs", REMEDY)
    parts = {}
    kinds = set(Kind)
    for kind_number, gear, offset, size, stated_checksum in _ENTRY.iter_unpack(table):
        if kind_number not in kinds or offset + size > length:
            raise InputError(f"{where}: partitions inside the file", "others", REMEDY)
        kind = Kind(kind_number)
        # The checksum includes the padding, so that a change of any byte is detected.
        if checksum(data[offset : offset + size + -size % ALIGN_BYTES]) != stated_checksum:
            got = "a damaged one: its checksum differs"
            raise InputError(f"{where}: a sound partition {kind.name}", got, REMEDY)
        parts[kind, gear] = data[offset : offset + size]
    return parts


def is_offline(path: str | Path) -> bool:
    """Return whether a file is an offline model, by its suffix or its first bytes."""
    try:
        if Path(path).suffix == SUFFIX or not Path(path).is_file():
            return Path(path).suffix == SUFFIX
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_parts(path: str | Path) -> Parts:
    """Return the partitions of a file; raises `InputError` if it is missing or damaged."""
    try:
        # The file is mapped into memory, not read: weights stay views of it.
        with Path(path).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "an empty file" if "empty" in reason else reason
        raise InputError(f"{path}: a compiled model", reason, "check the path") from None
    return unpack_parts(data, str(path))


def chip_checksum(chip: Chip) -> str:
    """Return a checksum of a chip's numbers, without their sources and its summary."""
    numbers = (
        (f.name, getattr(chip, f.name))
        for f in fields(chip)
        if f.name not in ("facts", "family", "sources", "summary")
    )
    # Two chip files may list the same entries in another order, so they are sorted.
    sorted_numbers = [(n, sorted(v.items()) if isinstance(v, Mapping) else v) for n, v in numbers]
    return checksum(repr(sorted_numbers).encode()).hex()

"""Reads buffers from a CSV file as MiniMalloc's (Moffitt 2023, doi:10.1145/3623278.3624752).

The file has a header, then a row for each buffer. Columns may be in any order:

* `id` (or `buffer`, `buffer_id`), `lower` (or `begin`, `start`), `upper`, `size`: always.
  They are required. Lifetimes are half-open. A column `end` in place of `upper` holds the last time
  at which the buffer is alive, upper - 1; ends of `gaps` are then last times, too.
* `alignment`: the offset is a multiple of it.
* `offset`: the given place of the buffer; -1 or an empty cell leaves it free.
* `gaps`: `6-8 11-12@0:4`, times when the buffer needs no bytes, or only those after the @.
* `hint`: an offset that a search may try first; it is checked, but not used.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ascend_lab.compiler.buffers import Buffer, Gap
from ascend_lab.errors import GraphError, InputError
from ascend_lab.limits import csv_of, read_file, whole_of

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps", "hint")
OTHER_NAMES = {
    "buffer": "id",
    "buffer_id": "id",
    "begin": "lower",
    "start": "lower",
    "end": "upper",
}
MAX_FILE_BYTES = 2**20
MAX_ROWS = 10_000
LARGEST_NUMBER = 2**40
"""Larger times and sizes are refused, so that all sums fit in 64 bits."""
MAX_ALIGNMENT = 2**30
MAX_GAPS = 1000
"""Largest number of gaps of one buffer."""
_GAP = re.compile(
    r"([+-]?[0-9]{1,18})-([+-]?[0-9]{1,18})(?:@([0-9]{1,18}):([0-9]{1,18}))?", re.ASCII
)


def read_csv(path: str | Path) -> list[Buffer]:
    """Return the buffers of a file.

    Raises InputError, with the line, for a file that cannot be read or is too large, a missing or
    unknown column, text in place of a number, an empty lifetime, and an id that occurs twice.
    """
    numbered = csv_of(read_file(path, "a CSV file", MAX_FILE_BYTES), path)
    words = numbered[0][1] if numbered else []
    names = _columns(words, path)
    if len(numbered) > MAX_ROWS + 1:
        raise InputError(f"at most {MAX_ROWS} buffers", f"{len(numbered) - 1} in {path}")
    # a column `end` holds the last time of a life; `upper` is the first time after it
    past_the_end = int("end" in words)
    buffers: dict[str, Buffer] = {}
    for line, row in numbered[1:]:
        where = f"{path} line {line}"
        if len(row) != len(names):
            raise InputError(f"{len(names)} columns", f"{len(row)} in {where}", "correct the row")
        cells = dict(zip(names, row, strict=True))
        try:
            buffer = _buffer(cells, past_the_end, where)
        # `Buffer` does not know the line of the file: it is added to the message here
        except GraphError as error:
            raise InputError(error.needed, f"{error.got} in {where}", "correct it") from error
        if buffer.id in buffers:
            raise InputError("a different id for each buffer", f"{cells['id'][:30]!r} in {where}")
        buffers[cells["id"]] = buffer
    return list(buffers.values())


def _columns(words: list[str], path: str | Path) -> list[str]:
    """Return the name of each column as REQUIRED or OPTIONAL spell it."""
    names = [OTHER_NAMES.get(word, word) for word in words]
    if not set(REQUIRED) <= set(names):
        needed = f"a header with {','.join(REQUIRED)}"
        raise InputError(needed, f"none in {path}", "name them in the first line")
    columns = (*REQUIRED, *OPTIONAL)
    unknown = [word for word, name in zip(words, names, strict=True) if name not in columns]
    if unknown:
        needed = f"columns {', '.join(columns)}"
        raise InputError(needed, f"{unknown[0][:30]!r} in {path}", "leave it out")
    if len(set(names)) < len(names):
        raise InputError("each column once", f"{','.join(words)[:60]} in {path}", "leave one out")
    return names


def _buffer(cells: Mapping[str, str], past_the_end: int, where: str) -> Buffer:
    """Return the buffer of a row; `past_the_end` is 1 if the file gives last times, else 0."""

    def number(name: str, default: str = "") -> int:
        return _number(cells.get(name) or default, name, where)

    offset = number("offset", "-1")
    alignment = number("alignment", "1")
    if alignment > MAX_ALIGNMENT:
        raise InputError(f"alignment of at most {MAX_ALIGNMENT}", f"{alignment} in {where}")
    if offset < -1:
        raise InputError("offset from 0, or -1 for any", f"{offset} in {where}", "correct it")
    # the hint is checked, so that a damaged column is reported, but not used
    number("hint", "-1")
    return Buffer(
        id=cells["id"],
        lower=number("lower"),
        upper=number("upper") + past_the_end,
        size_bytes=number("size"),
        alignment_bytes=alignment,
        gaps=_gaps(cells.get("gaps", ""), past_the_end, where),
        offset=offset if offset >= 0 else None,
    )


def _gaps(text: str, past_the_end: int, where: str) -> tuple[Gap, ...]:
    """Return the gaps of a cell, in order of time."""
    words = text.split()
    if len(words) > MAX_GAPS:
        raise InputError(f"at most {MAX_GAPS} gaps", f"{len(words)} in {where}", "join some")
    gaps = []
    for word in words:
        match = _GAP.fullmatch(word)
        if match is None:
            needed = "a gap as FROM-TO or FROM-TO@FIRST:LAST"
            raise InputError(needed, f"{word[:30]!r} in {where}", "correct it")
        lower, upper, first_byte, last_byte = (int(number or 0) for number in match.groups())
        gaps.append(Gap(lower, upper + past_the_end, first_byte, last_byte))
    return tuple(sorted(gaps, key=lambda gap: gap.lower))


def _number(text: str, name: str, where: str) -> int:
    value = whole_of(text)
    if value is None:
        raise InputError(f"{name} as a whole number", f"{text[:30]!r} in {where}", "correct it")
    # 10,000 buffers of 2**40 bytes add up to less than 2**63
    if abs(value) > LARGEST_NUMBER:
        raise InputError(
            f"{name} of at most {LARGEST_NUMBER}", f"{text[:30]} in {where}", "correct it"
        )
    return value

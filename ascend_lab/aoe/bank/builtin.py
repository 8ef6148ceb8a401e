"""The bank that comes with the package: read-only, one compressed JSON Lines file.

A line is a JSON list of an entry's fields; of the problem only a 128-bit digest is kept, so that
the file stays small. The package works without the file: the bank is empty then.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ascend_lab.aoe.bank.errors import BankError
from ascend_lab.aoe.bank.records import BankEntry, BankKey, better, canonical, digest
from ascend_lab.output import write_whole

BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl.gz")
_HEADER = {"format": "ascend_lab built-in knowledge bank", "version": 1}
_KEY = tuple(f.name for f in fields(BankKey) if f.name != "problem")
_ENTRY = tuple(f.name for f in fields(BankEntry) if f.name != "key")


def find_builtin(key: BankKey, file: Path = BUILTIN_FILE) -> BankEntry | None:
    """Return the built-in entry of exactly this key, or None; BankError if the file is damaged."""
    found = builtin_entries(file).get(short(key))
    return replace(found, key=key) if found is not None else None


@lru_cache(maxsize=4)
def builtin_entries(file: Path = BUILTIN_FILE) -> Mapping[BankKey, BankEntry]:
    """Return the built-in entries by their short keys (see `short`); none if there is no file."""
    if not file.exists():
        return MappingProxyType({})
    try:
        lines = gzip.decompress(file.read_bytes()).splitlines()
        if not lines or json.loads(lines[0]) != _HEADER:
            raise ValueError("no header, or one of another version")
        entries = [_entry(json.loads(line)) for line in lines[1:]]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, BankError) as error:
        remedy = "install ascend_lab again, or delete that file: it is not needed"
        raise BankError("damaged", f"reading built-in bank {file}", str(error), remedy) from None
    return MappingProxyType({entry.key: entry for entry in entries})


def write_builtin(entries: Iterable[BankEntry], file: Path = BUILTIN_FILE) -> int:
    """Write the built-in bank: the better one of each key, equal bytes for equal entries.

    Returns the number of entries.
    """
    best: dict[BankKey, BankEntry] = {}
    for entry in entries:
        small = replace(entry, key=short(entry.key))
        best[small.key] = better(best.get(small.key, small), small)
    rows = [canonical(_HEADER)]
    rows += sorted(_row(entry) for entry in best.values())
    data = ("\n".join(rows) + "\n").encode("ascii")
    write_whole(file, gzip.compress(data, compresslevel=9, mtime=0))
    builtin_entries.cache_clear()
    return len(best)


def short(key: BankKey) -> BankKey:
    """Return the key with the digest of its problem in place of the problem."""
    return replace(key, problem=digest(key.problem))


def _row(entry: BankEntry) -> str:
    """Return an entry as a line; the digest comes last, so that like lines sort together."""
    key = [getattr(entry.key, name) for name in _KEY]
    return canonical([*key, *(getattr(entry, name) for name in _ENTRY), entry.key.problem])


def _entry(row: list[Any]) -> BankEntry:
    """Return the entry of a line."""
    *values, problem = row
    key = dict(zip(_KEY, values, strict=False))
    rest = dict(zip(_ENTRY, values[len(_KEY) :], strict=True))
    return BankEntry(key=BankKey(problem=problem, **key), **rest)

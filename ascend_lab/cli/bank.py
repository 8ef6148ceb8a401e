"""`aoe bank`: look at the custom knowledge bank, and take it from one machine to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_lab.cli.common import Parser, check_least
from ascend_lab.cli.terminal import complain, printable, show
from ascend_lab.errors import InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import BankEntry, Store

LONGEST = 60


def bank_main(argv: Sequence[str]) -> int:
    """Run `aoe bank VERB ...` and return the exit code."""
    arguments = _parser().parse_args(argv)
    from ascend_lab.aoe.bank import Store, bank_file
    from ascend_lab.aoe.bank.records import read_file

    make = arguments.verb in ("import", "merge")
    file = bank_file(make=make) if arguments.bank is None else Path(arguments.bank)
    if arguments.verb in ("forget", "merge"):  # before a bank is made: it is there, and a bank
        Store(file if arguments.verb == "forget" else arguments.operand, write=False).close()
    elif arguments.verb == "import":
        read_file(arguments.operand)
    with Store(file, write=make or arguments.verb == "forget") as store:
        if store.skipped:
            complain("aoe", store.passed_over)
        show(_VERBS[arguments.verb](store, arguments))
    return 0


def _parser() -> Parser:
    from ascend_lab.aoe.bank.store import UNFINISHED_DAYS

    made = Parser(
        prog="aoe bank",
        description="The custom knowledge bank.",
        epilog="What killed runs left goes when a bank is opened for writing: trials that "
        f"`aoe --reload` has not asked for in {UNFINISHED_DAYS} days, and those of problems "
        "solved since.",
        allow_abbrev=False,
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    about = {
        "export": ("write all entries as JSON Lines", "FILE.jsonl"),
        "import": ("take the better entries of JSON Lines", "FILE.jsonl"),
        "merge": ("take the better entries of another bank", "FILE.db"),
        "forget": ("delete an entry, or all that the options choose", "DIGEST"),
        "list": ("show the entries", ""),
        "nearest": ("show the entries of like shapes", "DIGEST"),
    }
    for name, (text, operand) in about.items():
        verb = verbs.add_parser(name, help=text, allow_abbrev=False)
        if operand:
            nargs = "?" if name == "forget" else None
            what = _OPERANDS.get(name, "the file")
            verb.add_argument("operand", metavar=operand, help=what, nargs=nargs)
        verb.add_argument("--bank", metavar="FILE", help="the bank (default: TUNE_BANK_PATH's)")
        if name == "nearest":
            verb.add_argument("--count", type=count, default=5, metavar="N", help="so many (5)")
        if name in ("list", "nearest", "forget"):
            verb.add_argument("--soc_version", metavar="CHIP", help="of this chip only")
        if name == "forget":
            verb.add_argument("--op", metavar="PATTERN", help="of these operators, such as conv*")
            verb.add_argument("--all", action="store_true", help="more than one entry")
            verb.add_argument("--unreadable", action="store_true", help="rows that are no entries")
    return made


_NUMBER = "an entry's number, as `aoe bank list` shows it; its first digits do"
_OPERANDS = {"nearest": _NUMBER, "forget": _NUMBER}


def _export(store: Store, arguments: argparse.Namespace) -> str:
    count = store.export_jsonl(arguments.operand)
    return f"{count} entries written to {arguments.operand}"


def _import(store: Store, arguments: argparse.Namespace) -> str:
    found = store.import_jsonl(arguments.operand)
    return _counts(found["add"], found["update"], found["reserved"])


def _merge(store: Store, arguments: argparse.Namespace) -> str:
    from ascend_lab.aoe.bank import Store

    if Path(arguments.operand).resolve() == store.file.resolve():
        raise InputError("another bank than the own one", arguments.operand)
    with Store(arguments.operand, write=False) as other:
        found = store.merge(other)
        if other.skipped:
            complain("aoe", other.passed_over)
    return _counts(found["add"], found["update"], found["reserved"])


def _counts(add: int, update: int, reserved: int) -> str:
    return f"{add} added, {update} updated, {reserved} already as good"


def _list(store: Store, arguments: argparse.Namespace) -> str:
    entries = _of_chip(store.entries(), arguments.soc_version)
    return "\n".join([f"{len(entries)} entries in {store.file}", *map(_line, entries)])


def _nearest(store: Store, arguments: argparse.Namespace) -> str:
    check_least(arguments, "--count", 1)
    asked = [e for e in store.entries() if e.key.digest.startswith(arguments.operand)]
    if len(asked) != 1:
        got = f"{arguments.operand}, which {len(asked)} entries begin with"
        raise InputError("the number of an entry", got, "see `aoe bank list`")
    key, features = asked[0].key, asked[0].features
    near = _of_chip(store.nearest(key, features, arguments.count), arguments.soc_version)
    return "\n".join([_line(asked[0]), f"{len(near)} nearest:", *map(_line, near)])


def _forget(store: Store, arguments: argparse.Namespace) -> str:
    """Delete what the arguments choose; more than one entry only with --all."""
    digest, pattern = arguments.operand, arguments.op
    narrowed = any(x is not None for x in (digest, pattern, arguments.soc_version))
    if (narrowed or arguments.all) == arguments.unreadable:
        needed = "an entry's number, --soc_version, --op or --all; or --unreadable alone"
        raise InputError(needed, "both" if narrowed or arguments.all else "none of them")
    if arguments.unreadable:
        return f"{store.forget_unreadable()} unreadable rows deleted from {store.file}"
    chosen = [
        entry
        for entry in _of_chip(store.entries(), arguments.soc_version)
        if entry.key.digest.startswith(digest or "")
        and fnmatchcase(entry.key.op, "*" if pattern is None else pattern)
    ]
    if not chosen or (len(chosen) > 1 and not arguments.all):
        remedy = "see `aoe bank list`" + ("; --all deletes all of these" if chosen else "")
        raise InputError("one entry to forget", str(len(chosen)), remedy)
    store.forget(entry.key for entry in chosen)
    return "\n".join([*map(_line, chosen), f"{len(chosen)} entries deleted from {store.file}"])


def _of_chip(entries: Sequence[BankEntry], name: str | None) -> list[BankEntry]:
    return [e for e in entries if name is None or e.key.chip == name]


def _line(entry: BankEntry) -> str:
    """Return an entry as one line: number, chip, operator, cycles, how far from optimal."""
    key, gap = entry.key, entry.gap
    far = "proven" if entry.proven else "no bound" if gap is None else f"gap {gap:.2%}"
    sizes = "x".join(f"{2**f:g}" for f in entry.features)
    what = f"{key.op} {sizes}"
    what = what if len(what) <= LONGEST else f"{what[: LONGEST - 3]}..."
    return printable(
        f"{key.digest[:8]} {key.chip}/{key.core_count} {what:{LONGEST}} "
        f"{entry.before_cycles:>10} -> {entry.after_cycles:>10} cycles, {far}, "
        f"{entry.search} {entry.trials} trials"
    )


_VERBS = {
    "export": _export,
    "import": _import,
    "merge": _merge,
    "forget": _forget,
    "list": _list,
    "nearest": _nearest,
}

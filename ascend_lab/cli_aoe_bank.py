"""`aoe bank`: look at the custom knowledge bank, and take it from one machine to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_lab.cli_aoe_flags import Parser
from ascend_lab.errors import InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import BankEntry, Store

LONGEST = 60


def bank_main(argv: Sequence[str]) -> int:
    """Run `aoe bank VERB ...` and return the exit code."""
    arguments = _parser().parse_args(argv)
    from ascend_lab.aoe.bank import Store, bank_file

    file = Path(arguments.bank) if arguments.bank else bank_file()
    create = arguments.verb in ("import", "merge")
    with Store(file, create) as store:
        print(_VERBS[arguments.verb](store, arguments))
    return 0


def _parser() -> Parser:
    made = Parser(prog="aoe bank", description="The custom knowledge bank.", allow_abbrev=False)
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    about = {
        "export": ("write all entries as JSON Lines", "FILE.jsonl"),
        "import": ("take the better entries of JSON Lines", "FILE.jsonl"),
        "merge": ("take the better entries of another bank", "FILE.db"),
        "list": ("show the entries", ""),
        "nearest": ("show the entries of like shapes", "DIGEST"),
    }
    for name, (text, operand) in about.items():
        verb = verbs.add_parser(name, help=text, allow_abbrev=False)
        if operand:
            verb.add_argument("operand", metavar=operand, help=_OPERANDS.get(name, "the file"))
        verb.add_argument("--bank", metavar="FILE", help="the bank (default: TUNE_BANK_PATH's)")
        if name == "nearest":
            verb.add_argument("--count", type=count, default=5, metavar="N", help="so many (5)")
        if name in ("list", "nearest"):
            verb.add_argument("--soc_version", metavar="CHIP", help="of this chip only")
    return made


_OPERANDS = {"nearest": "an entry's number, as `aoe bank list` shows it; its first digits do"}


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
    with Store(arguments.operand, create=False) as other:
        found = store.merge(other)
    return _counts(found["add"], found["update"], found["reserved"])


def _counts(add: int, update: int, reserved: int) -> str:
    return f"{add} added, {update} updated, {reserved} already as good"


def _list(store: Store, arguments: argparse.Namespace) -> str:
    entries = _of_chip(store.entries(), arguments.soc_version)
    return "\n".join([f"{len(entries)} entries in {store.file}", *map(_line, entries)])


def _nearest(store: Store, arguments: argparse.Namespace) -> str:
    if arguments.count < 1:
        raise InputError("--count of at least 1", str(arguments.count))
    asked = [e for e in store.entries() if e.key.digest.startswith(arguments.operand)]
    if len(asked) != 1:
        got = f"{arguments.operand}, which {len(asked)} entries begin with"
        raise InputError("the number of an entry", got, "see `aoe bank list`")
    key, features = asked[0].key, asked[0].features
    near = _of_chip(store.nearest(key, features, arguments.count), arguments.soc_version)
    return "\n".join([_line(asked[0]), f"{len(near)} nearest:", *map(_line, near)])


def _of_chip(entries: Sequence[BankEntry], name: str | None) -> list[BankEntry]:
    return [e for e in entries if not name or e.key.chip == name]


def _line(entry: BankEntry) -> str:
    """Return an entry as one line: number, chip, operator, cycles, how far from optimal."""
    key, gap = entry.key, entry.gap
    far = "proven" if entry.proven else "no bound" if gap is None else f"gap {gap:.2%}"
    sizes = "x".join(f"{2**f:g}" for f in entry.features)
    what = f"{key.op} {sizes}"
    what = what if len(what) <= LONGEST else f"{what[: LONGEST - 3]}..."
    return (
        f"{key.digest[:8]} {key.chip}/{key.core_count} {what:{LONGEST}} "
        f"{entry.before_cycles:>10} -> {entry.after_cycles:>10} cycles, {far}, "
        f"{entry.search} {entry.trials} trials"
    )


_VERBS = {
    "export": _export,
    "import": _import,
    "merge": _merge,
    "list": _list,
    "nearest": _nearest,
}

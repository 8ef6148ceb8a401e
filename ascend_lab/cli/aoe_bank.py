"""The command `aoe bank`: shows the bank of tuned schedules and copies it between machines.

    aoe bank list                     a line for each entry
    aoe bank export tuned.jsonl       for another machine, where `aoe bank import` takes it
    aoe bank forget 3f2a              the entry whose number begins with 3f2a

The bank holds the best schedule found so far by chip, operator and shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.cli.common import check_least
from ascend_lab.cli.parser import Parser
from ascend_lab.cli.printing import show
from ascend_lab.errors import AscendLabError, InputError, complain, printable
from ascend_lab.limits import count
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import BankEntry, Store

LONGEST = 60
"""Characters of an operator and its sizes in a line; the end of longer ones is left out."""


def bank_main(argv: Sequence[str]) -> int:
    """Run `aoe bank VERB ...` and return the exit code."""
    arguments = bank_parser().parse_args(argv)
    if arguments.verb == "compare":
        from ascend_lab.aoe.vendor_bank import lines as vendor_lines

        comparison = _compare(arguments)
        show("\n".join(vendor_lines(comparison)))
        return 0 if comparison["timed"] else 1
    from ascend_lab.aoe.bank import Store, bank_file, records

    make = arguments.verb in ("import", "merge")  # these create a bank if there is none
    file = bank_file(make=make) if arguments.bank is None else Path(arguments.bank)
    # What is read must be there and readable before a new bank is created or one is changed.
    if arguments.verb in ("forget", "merge"):
        Store(file if arguments.verb == "forget" else arguments.operand, write=False).close()
    elif arguments.verb == "import":
        records.read_file(arguments.operand)
    with Store(file, write=make or arguments.verb == "forget") as store:
        if store.skipped_count:
            complain("aoe", store.skipped_warning)
        show(_VERBS[arguments.verb](store, arguments))
    return 0


def bank_parser() -> Parser:
    """Return the parser of `aoe bank`."""
    from ascend_lab.aoe.bank.store import UNFINISHED_DAYS

    parser_of_bank = Parser(
        prog="aoe bank",
        description="The custom knowledge bank.",
        epilog="What killed runs left goes when a bank is opened for writing: trials that "
        f"`aoe --reload` has not asked for in {UNFINISHED_DAYS} days, and those of problems "
        "solved since.",
        allow_abbrev=False,
    )
    verbs = parser_of_bank.add_subparsers(dest="verb", required=True, metavar="VERB")
    about = {
        "export": ("write all entries as JSON Lines", "FILE.jsonl"),
        "import": ("take the better entries of JSON Lines, or of CANN's bank", "FILE.jsonl"),
        "compare": ("hold a bank of CANN's, or a table of it, against our tuner", "FILE"),
        "merge": ("take the better entries of another bank", "FILE.db"),
        "forget": ("delete an entry, or all that the options choose", "DIGEST"),
        "list": ("show the entries", ""),
        "nearest": ("show the entries of like shapes", "DIGEST"),
    }
    for name, (text, operand) in about.items():
        verb = verbs.add_parser(name, help=text, allow_abbrev=False)
        if operand:
            # `forget` may choose by --soc_version or --op instead of a number.
            nargs = "?" if name == "forget" else None
            operand_help = _OPERANDS.get(name, "the file")
            verb.add_argument("operand", metavar=operand, help=operand_help, nargs=nargs)
        if name != "compare":
            verb.add_argument("--bank", metavar="FILE", help="the bank (default: TUNE_BANK_PATH's)")
        if name == "nearest":
            verb.add_argument("--count", type=count, default=5, metavar="N", help="so many (5)")
        if name in ("list", "nearest", "forget", "compare"):
            verb.add_argument("--soc_version", metavar="CHIP", help="of this chip only")
        if name == "forget":
            verb.add_argument("--op", metavar="PATTERN", help="of these operators, such as conv*")
            verb.add_argument("--all", action="store_true", help="more than one entry")
            verb.add_argument("--unreadable", action="store_true", help="rows that are no entries")
    return parser_of_bank


_NUMBER = "an entry's number, as `aoe bank list` shows it; its first digits do"
_OPERANDS = {"nearest": _NUMBER, "forget": _NUMBER}


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the times of CANN's tilings and of our tuner's, for all chips or for one."""
    from ascend_lab.aoe import vendor_bank
    from ascend_lab.machine.chip import load_chip

    chip = arguments.soc_version
    if chip is not None:
        load_chip(chip)  # raises for a name that no preset has
    decisions = vendor_bank.read_decisions(arguments.operand)
    chosen = [decision for decision in decisions if chip is None or decision.chip == chip]
    return vendor_bank.summary([*vendor_bank.held_against(chosen)])


def _of_vendor(operand: str) -> bool:
    """Tell by its name whether a file is a bank in CANN's format."""
    from ascend_lab.aoe import vendor_bank

    return operand.endswith(vendor_bank.ENDING)


def _import_of_vendor(store: Store, operand: str) -> str:
    """Import the entries of a CANN bank that beat our default schedule; count all others.

    The model times them here, because a CANN bank holds tilings without times.
    """
    from ascend_lab.aoe import vendor_bank

    entries: list[BankEntry] = []
    slower = 0
    refused = 0
    for decision in vendor_bank.read_decisions(operand):
        try:
            entry = vendor_bank.bank_entry(decision)
        except AscendLabError:  # such as one core that splits K, which none of our kernels does
            refused += 1
            continue
        if entry is None:
            slower += 1
        else:
            entries.append(entry)
    taken = store.put_all(entries)
    counts = _counts(taken["add"], taken["update"], taken["reserved"])
    return f"{counts}, {slower} no better than our default, {refused} have no kernel here"


def _export(store: Store, arguments: argparse.Namespace) -> str:
    """Write all entries, in the format of CANN's bank if the file's name asks for it."""
    if _of_vendor(arguments.operand):
        from ascend_lab.aoe.vendor_bank import written_lines

        lines = written_lines(store.entries())
        write_whole(arguments.operand, "".join(f"{line}\n" for line in lines))
        return f"{len(lines)} entries of CANN's bank written to {arguments.operand}"
    count = store.export_jsonl(arguments.operand)
    return f"{count} entries written to {arguments.operand}"


def _import(store: Store, arguments: argparse.Namespace) -> str:
    """Take the entries of a file that are better than those of the bank."""
    if _of_vendor(arguments.operand):
        return _import_of_vendor(store, arguments.operand)
    taken = store.import_jsonl(arguments.operand)
    return _counts(taken["add"], taken["update"], taken["reserved"])


def _merge(store: Store, arguments: argparse.Namespace) -> str:
    """Take the entries of another bank that are better than those of this one."""
    from ascend_lab.aoe.bank import Store

    # Links are followed: a bank merged into itself would be read while it is written.
    if Path(arguments.operand).resolve() == store.file.resolve():
        raise InputError("another bank than the own one", arguments.operand)
    with Store(arguments.operand, write=False) as source:
        taken = store.put_all(source.entries())
        if source.skipped_count:
            complain("aoe", source.skipped_warning)
    return _counts(taken["add"], taken["update"], taken["reserved"])


def _counts(add: int, update: int, reserved: int) -> str:
    return f"{add} added, {update} updated, {reserved} already as good"


def _list(store: Store, arguments: argparse.Namespace) -> str:
    """Return the entries of a chip as lines."""
    entries = _of_chip(store.entries(), arguments.soc_version)
    return "\n".join([f"{len(entries)} entries in {store.file}", *map(_line, entries)])


def _nearest(store: Store, arguments: argparse.Namespace) -> str:
    """Show an entry and those of similar shapes, from which a search for a new shape starts."""
    check_least(arguments, "--count", 1)
    # The first digits of a number suffice if no other entry begins with them.
    asked = [e for e in store.entries() if e.key.digest.startswith(arguments.operand)]
    if len(asked) != 1:
        got = f"{arguments.operand}, which {len(asked)} entries begin with"
        raise InputError("the number of an entry", got, "see `aoe bank list`")
    key = asked[0].key
    features = asked[0].features
    neighbours = _of_chip(store.nearest(key, features, arguments.count), arguments.soc_version)
    return "\n".join([_line(asked[0]), f"{len(neighbours)} nearest:", *map(_line, neighbours)])


def _forget(store: Store, arguments: argparse.Namespace) -> str:
    """Delete the chosen entries; more than one only with --all."""
    digest = arguments.operand
    pattern = arguments.op
    # A bare `aoe bank forget` must not empty the bank.
    narrowed = any(x is not None for x in (digest, pattern, arguments.soc_version))
    # Rows that are no entries have no chip and no operator to choose them by.
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
    key = entry.key
    gap = entry.gap
    # Optimal; unknown whether a better schedule exists; or at most this much can be gained.
    known_gap = "no bound" if gap is None else f"gap {gap:.2%}"
    distance = "proven" if entry.proven else known_gap
    # Features are logarithms to base 2 of the sizes: 10 stands for 1024.
    sizes = "x".join(f"{2**f:g}" for f in entry.features)
    operator = f"{key.op} {sizes}"
    operator = operator if len(operator) <= LONGEST else f"{operator[: LONGEST - 3]}..."
    return printable(
        f"{key.digest[:8]} {key.chip}/{key.core_count} {operator:{LONGEST}} "
        f"{entry.before_cycles:>10} -> {entry.after_cycles:>10} cycles, {distance}, "
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

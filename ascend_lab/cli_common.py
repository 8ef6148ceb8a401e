"""What the verbs of both commands share: their parser, what they print, which flags count."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ascend_lab.cli_guard import say
from ascend_lab.errors import InputError
from ascend_lab.output import check_writable, write_whole

OUTPUTS = ("json", "trace", "outputs", "fusion_result")
"""Arguments that name a file to write; only JSON can be printed, with -."""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, which tells the flags that were given: `arguments.given`."""

    def error(self, message: str) -> NoReturn:
        """Raise `InputError` instead of leaving the program."""
        verb = self.prog.partition(" ")[2]
        where = f"{verb}: " if verb else ""
        raise InputError(f"{where}{message}", remedy=f"see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version as all else is: argparse says nothing about a full disk."""
        say(message.rstrip("\n").split("\n"))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse without defaults first: what is found was given."""
        flags = [
            a for a in self._actions if a.option_strings and a.default is not argparse.SUPPRESS
        ]
        defaults = {flag.dest: flag.default for flag in flags}
        for flag in flags:
            flag.default = argparse.SUPPRESS
        try:
            found, rest = super().parse_known_args(args, namespace)
        finally:
            for flag in flags:
                flag.default = defaults[flag.dest]
        own = frozenset(defaults.keys() & vars(found).keys())
        found.given = own | getattr(found, "given", frozenset())
        for name in defaults.keys() - own:
            setattr(found, name, defaults[name])
        return found, rest


def add_json(verb: argparse.ArgumentParser) -> None:
    """Add --json."""
    verb.add_argument("--json", metavar="F", help="write JSON to F, or print it with -")


def refuse_idle(arguments: argparse.Namespace, when: str, *flags: str) -> None:
    """Raise `InputError` for the first of the flags that was given: it counts only `when`."""
    for flag in flags:
        if flag.lstrip("-").replace("-", "_") in arguments.given:
            raise InputError(f"{flag} only {when}", "", "drop it: it changes nothing here")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise `InputError`, before any work, for outputs that cannot be written or are inputs."""
    places: set[str] = set()
    words = {name: text for name, text in vars(arguments).items() if isinstance(text, str)}
    for name in OUTPUTS:
        target, flag = words.get(name), f"--{name.replace('_', '-')}"
        if target is None or (name, target) == ("json", "-"):
            continue
        if target == "-":
            raise InputError(f"a file name for {flag}", "-", "only --json prints")
        check_writable(target)
        if any(_same(target, text) for other, text in words.items() if other not in OUTPUTS):
            raise InputError(f"{flag} as another file than the inputs", target, "name another")
        place = os.path.realpath(target)
        if place in places and not place.startswith("/dev/"):
            raise InputError("a file for each output", f"{target} twice", "name another")
        places.add(place)


def _same(one: str, other: str) -> bool:
    try:
        return Path(one).is_file() and Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def emit(target: str | None, data: Any, lines: Iterable[str]) -> None:
    """Print the lines, or write `data` as JSON to a file or, for "-", to standard output."""
    if target is None:
        say(lines)
        return
    dump = json.dumps(_finite(data), indent=2).replace("\x7f", "\\u007f")
    if target == "-":
        say(dump.split("\n"))
    else:
        write_whole(target, dump + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity: write null instead."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

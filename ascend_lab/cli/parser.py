"""The parser of both commands: argparse with one-line errors and a record of the flags given.

argparse exits on an error, and does not say whether a value was given or is a default. Verbs need
to know that to refuse flags that change nothing: `arguments.given` holds the names of given flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from ascend_lab import limits
from ascend_lab.cli.printing import say
from ascend_lab.errors import InputError


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors that records the given flags in `arguments.given`."""

    def error(self, message: str) -> NoReturn:
        """Raise `InputError` instead of exiting."""
        verb = self.prog.partition(" ")[2]
        where = f"{verb}: " if verb else ""
        see = f"see `{self.prog} --help`"
        # "a verb; got 'simulat'; did you mean simulate? see `ascend-lab --help`"
        needed, got, suggestion = limits.choice_in(message)
        raise InputError(where + needed, got, f"{suggestion}{see}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version with `printing.say`: argparse would not report a full disk."""
        say(message.rstrip("\n").split("\n"))

    def _unknown(self, words: Sequence[str]) -> list[str]:
        """Return the words that look like a flag but are neither a flag nor an abbreviation of one.

        argparse accepts --mem for --memory-limit where abbreviations are allowed.
        """
        flags = [option for action in self._actions for option in action.option_strings]
        # --seed=3 is the flag --seed; after "--" all words are operands
        named = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
        flags_given = [name for name in named if name.startswith("--")]
        if not self.allow_abbrev:
            return [name for name in flags_given if name not in flags]
        return [name for name in flags_given if not any(flag.startswith(name) for flag in flags)]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line; `given` of the result names the flags that occur in it.

        Defaults are suppressed meanwhile, so that every value argparse stores was given.
        """
        # A parser of verbs leaves unknown flags to the verb's own parser.
        if self._subparsers is None and (unknown_flags := self._unknown(args or ())):
            self.error(f"unrecognized arguments: {' '.join(unknown_flags)}")
        flags = [
            a for a in self._actions if a.option_strings and a.default is not argparse.SUPPRESS
        ]
        defaults = {flag.dest: flag.default for flag in flags}
        for flag in flags:
            flag.default = argparse.SUPPRESS
        try:
            values, unparsed = super().parse_known_args(args, namespace)
        finally:
            for flag in flags:
                flag.default = defaults[flag.dest]
        # argparse does not assign operands after a flag: the 8x8 of `op relu --chip Toy 8x8`.
        for action in self._actions:
            if action.nargs == "*" and not action.option_strings:
                operands = [word for word in unparsed if not word.startswith("-")]
                setattr(values, action.dest, [*getattr(values, action.dest), *operands])
                unparsed = [word for word in unparsed if word not in operands]
        # Reported by the verb's parser, so that the message points to the verb's help.
        if self._subparsers is None and unparsed:
            self.error(f"unrecognized arguments: {' '.join(unparsed)}")
        # A verb's parser runs inside the command's: flags of both count.
        given_here = frozenset(defaults.keys() & vars(values).keys())
        values.given = given_here | getattr(values, "given", frozenset())
        for name in defaults.keys() - given_here:
            setattr(values, name, defaults[name])
        return values, unparsed

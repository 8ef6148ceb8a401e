"""How much of one text stands in another: fingerprints of its tokens, as a hint and no verdict.

Names, numbers and texts become kinds of tokens; the hashes of all runs of `RUN` tokens are thinned
by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of each window of `WINDOW` the least.
"""

import io
import keyword
import tokenize
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import ascend_lab

RUN, WINDOW = 12, 8
HINT = 0.5


@cache
def fingerprints(source: str) -> frozenset[int]:
    """Return the fingerprints of a Python text; of what is no Python, those of its lines so far."""
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                tokens.append(token.string if keyword.iskeyword(token.string) else "n")
            elif token.type in (tokenize.NUMBER, tokenize.STRING):
                tokens.append("c")
            elif token.type == tokenize.OP:
                tokens.append(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError, RecursionError):
        pass
    runs = [" ".join(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    hashes = [zlib.crc32(run.encode()) for run in runs]
    return frozenset(min(hashes[i : i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1))
                     if hashes[i : i + WINDOW])  # fmt: skip


def likeness(one: frozenset[int], other: frozenset[int], given: frozenset[int]) -> float:
    """Return the share of the smaller text that stands in the other, what was given left out."""
    a, b = one - given, other - given
    return len(a & b) / min(len(a), len(b)) if min(len(a), len(b)) >= WINDOW else 0.0


def hints(
    sources: Mapping[str, str], given: str, others: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """Return (student, student or other text, likeness) of at least `HINT`, the most alike first.

    `given` is what everybody was handed; `others` are texts nobody may hand in: keys, our sources.
    """
    start = fingerprints(given)
    prints = {name: fingerprints(text) for name, text in sources.items()}
    names = sorted(prints)
    found = [
        (a, b, likeness(prints[a], prints[b], start))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    for label, text in others.items():
        theirs = fingerprints(text) - start
        for name in names:
            own = prints[name] - start
            if len(own) >= WINDOW:
                found.append((name, label, len(own & theirs) / len(own)))
    kept = [hint for hint in found if hint[2] >= HINT]
    return sorted(kept, key=lambda hint: (-hint[2], hint[0], hint[1]))


@cache
def our_sources() -> dict[str, str]:
    """Return the package's own modules by path: an answer copied from there is no answer."""
    package = Path(ascend_lab.__file__).parent
    return {
        f"ascend_lab/{path.relative_to(package).as_posix()}": path.read_text("utf-8")
        for path in sorted(package.rglob("*.py"))
    }

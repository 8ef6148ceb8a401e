"""Names of operations and algorithms.

A name may say more: "hierarchical(4:mesh,nhr)*2" is mesh inside fours of each server's ranks, NHR
between the fours, in two chunks. A schedule's `algorithm` is such a name and makes it again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ascend_lab.cluster.schedule import OPS
from ascend_lab.errors import ClusterError

_SCATTERS = ("ring", "double-ring", "mesh", "halving-doubling", "nhr", "hierarchical", "pipeline")
_CASTS = ("tree", "chain", "star", "mesh", "nhr", "hierarchical")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        *("ring", "double-ring", "mesh", "halving-doubling", "recursive-doubling", "nhr"),
        *("tree", "chain", "hierarchical", "pipeline"),
    ),
    "reduce_scatter": _SCATTERS,
    "all_gather": _SCATTERS,
    "broadcast": _CASTS,
    "reduce": _CASTS,
    "all_to_all": ("mesh", "pairwise", "bruck", "hierarchical"),
}
"""The algorithms of every operation."""
LEVELS = ("hierarchical", "pipeline")
"""Algorithms that need servers."""
ALIASES = {
    "binomial": "tree",
    "binomial-tree": "tree",
    "rhd": "halving-doubling",
    "h-d-r": "halving-doubling",
    "recursive-halving-doubling": "halving-doubling",
    "direct": "mesh",
}
"""Other names people use."""
_LEVEL_PART = r"\((?:(\d+)|(?:(\d+):)?([a-z-]+),([a-z-]+))\)"
_NAME = re.compile(rf"([a-z-]+)(?:{_LEVEL_PART})?(?:\*(\d+))?")


class Name(NamedTuple):
    """What a name says; None where it does not."""

    algorithm: str
    inside: str | None = None
    between: str | None = None
    chunks: int | None = None
    split: int | None = None


def op_name(text: str) -> str:
    """Return the operation a spelling means (allreduce, all-reduce, All_Reduce)."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    for op in OPS:
        if plain == op.replace("_", ""):
            return op
    raise ClusterError(f"one of {', '.join(OPS)}", repr(text), "choose one")


def parse_name(op: str, text: str) -> Name:
    """Return what the name of an algorithm says; raise `ClusterError` if there is none such."""
    known = ALGORITHMS[op_name(op)]
    found = _NAME.fullmatch(re.sub(r"\s", "", text.lower()).replace("_", "-"))
    if found is not None:
        name = ALIASES.get(found[1], found[1])
        if name == "pipeline" and "chain" in known and name not in known:
            name = "chain"
        chunks, split = (int(n) if n else None for n in (found[6], found[2] or found[3]))
        plain = not (found[4] or split)
        if name in known and (plain or name in LEVELS) and chunks != 0 and split != 0:
            return Name(name, found[4], found[5], chunks, split)
    raise ClusterError(f"{op} by one of {', '.join(known)}", repr(text), "choose one")

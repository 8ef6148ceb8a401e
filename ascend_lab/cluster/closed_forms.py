"""Published costs of collectives: alpha a message, beta a byte sent, gamma a byte added.

From Thakur, Rabenseifner and Gropp (2005), Bruck et al. (1997) and the HCCL user guide. They hold
where every pair has a path of its own and a device sends to all others at once; `timing` agrees
there and differs where links are shared or messages queue for one link.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ascend_lab.cluster.collectives import op_name, parse_name
from ascend_lab.errors import ClusterError


class Terms(NamedTuple):
    """A cost as counts: messages one after another, tensors sent, tensors added."""

    alphas: float
    betas: float
    gammas: float = 0.0

    def then(self, other: Terms) -> Terms:
        """Return one after the other."""
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))


def closed_form_s(
    op: str,
    algorithm: str,
    ranks: int,
    size_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> float:
    """Return the published seconds of a flat algorithm; chains may say their chunks ("chain*8").

    `size_bytes` as in `time_collective`. Raises `ClusterError` for algorithms in levels.
    """
    op = op_name(op)
    name, _, _, chunks, _ = parse_name(op, algorithm)
    if ranks < 1 or not size_bytes >= 0:
        raise ClusterError("ranks >= 1 and bytes >= 0", f"{ranks}, {size_bytes}", "count")
    if ranks == 1 or size_bytes == 0:
        return 0.0
    table = _table(op, ranks, chunks or 1)
    if name not in table or ((chunks or 1) > 1 and name != "chain"):
        what = f"{op} by one of {', '.join(table)}"
        raise ClusterError(what, name, "add the costs of the levels yourself")
    alphas, betas, gammas = table[name]
    return alphas * alpha_s + size_bytes * (betas * beta_s_per_byte + gammas * gamma_s_per_byte)


def _table(op: str, p: int, chunks: int) -> dict[str, Terms]:
    if op == "all_to_all":
        return _exchange(p)
    if op in ("broadcast", "reduce"):
        return _rooted(p, chunks, adds=float(op == "reduce"))
    if op in ("all_gather", "reduce_scatter"):
        return _gather(p, adds=float(op == "reduce_scatter"))
    return _all_reduce(p, chunks)


def _gather(p: int, adds: float) -> dict[str, Terms]:
    """All-gather, or (adds = 1) reduce-scatter."""
    share, log = (p - 1) / p, math.ceil(math.log2(p))
    even = Terms(log, share, adds * share)
    return {
        "ring": Terms(p - 1, share, adds * share),
        "double-ring": Terms(p - 1, share / 2 if p > 2 else share, adds * share),
        "mesh": Terms(1, 1 / p, adds * share),
        "halving-doubling": _folded_gather(p, adds) if p & (p - 1) else even,
        "nhr": even,
    }


def _folded_gather(p: int, adds: float) -> Terms:
    """Fold in one slot, double what pairs hold, fold out all but the own."""
    kept, terms = 2 ** int(math.log2(p)), Terms(2, 1.0, adds)
    held = [2] * (p - kept) + [1] * (2 * kept - p)
    for k in reversed(range(kept.bit_length() - 1)):
        near = 2 ** (k + 1)
        most = max(sum(held[a] for a in range(a0, kept, near)) for a0 in range(min(near, kept)))
        terms = terms.then(Terms(1, most / p, adds * most / p))
    return terms


def _all_reduce(p: int, chunks: int) -> dict[str, Terms]:
    scatter, gather = _gather(p, 1.0), _gather(p, 0.0)
    found = {name: scatter[name].then(gather[name]) for name in scatter}
    log = int(math.log2(p))
    share = (2**log - 1) / 2**log
    fold = Terms(2, 2, 1) if 2**log < p else Terms(0, 0)
    hops, adding = 2 * (p - 1) + chunks - 1, p - 1 + chunks - 1
    return {
        **found,
        "halving-doubling": Terms(2 * log, 2 * share, share).then(fold),
        "recursive-doubling": Terms(log, log, log).then(fold),
        "tree": _rooted(p, 1, 1.0)["tree"].then(_rooted(p, 1, 0.0)["tree"]),
        "chain": Terms(hops, hops / chunks, adding / chunks),
    }


def _rooted(p: int, chunks: int, adds: float) -> dict[str, Terms]:
    log, share, hops = math.ceil(math.log2(p)), (p - 1) / p, p - 1 + chunks - 1
    gather = _gather(p, adds)
    return {
        "tree": Terms(log, log, adds * log),
        "chain": Terms(hops, hops / chunks, adds * hops / chunks),
        "star": Terms(1, 1, adds * (p - 1)),
        "mesh": Terms(1, 1 / p).then(gather["mesh"]),
        "nhr": Terms(log, share).then(gather["nhr"]),
    }


def _exchange(p: int) -> dict[str, Terms]:
    log = math.ceil(math.log2(p))
    moved = sum((way >> k) & 1 for k in range(log) for way in range(p)) / p
    return {
        "mesh": Terms(1, 1 / p),
        "pairwise": Terms(p - 1, (p - 1) / p),
        "bruck": Terms(log, moved),
    }

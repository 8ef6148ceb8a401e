"""Published costs of collectives: alpha a message, beta a byte sent, gamma a byte added.

From Thakur, Rabenseifner and Gropp (2005), Bruck et al. (1997) and the HCCL user guide. They hold
where every pair has a path of its own and a device sends to all others at once; `timing` agrees
there and differs where links are shared or messages queue for one link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ascend_lab.cluster.collectives import op_name, parse_name
from ascend_lab.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Terms:
    """A cost as counts: messages one after another, tensors sent, tensors added."""

    alphas: float
    betas: float
    gammas: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        """Return one after the other."""
        return Terms(
            self.alphas + other.alphas, self.betas + other.betas, self.gammas + other.gammas
        )

    def time_s(
        self, size_bytes: float, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float
    ) -> float:
        """Return alphas * alpha + size * (betas * beta + gammas * gamma)."""
        per_byte = self.betas * beta_s_per_byte + self.gammas * gamma_s_per_byte
        return self.alphas * alpha_s + size_bytes * per_byte


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
    terms = _terms(op, name, ranks, chunks or 1)
    return terms.time_s(size_bytes, alpha_s, beta_s_per_byte, gamma_s_per_byte)


def _terms(op: str, name: str, p: int, chunks: int) -> Terms:
    if op == "all_to_all":
        table = _exchange(p)
    elif op in ("broadcast", "reduce"):
        table = _rooted(p, chunks, adds=float(op == "reduce"))
    elif op == "all_gather":
        table = _gather(p, adds=0.0)
    elif op == "reduce_scatter":
        table = _gather(p, adds=1.0)
    else:
        table = _all_reduce(p, chunks)
    if name not in table or (chunks > 1 and name != "chain"):
        what = f"{op} by one of {', '.join(table)}"
        raise ClusterError(what, name, "add the costs of the levels yourself")
    return table[name]


def _gather(p: int, adds: float) -> dict[str, Terms]:
    """All-gather, or (adds = 1) reduce-scatter."""
    share, log = (p - 1) / p, math.ceil(math.log2(p))
    kept, folds = 2 ** int(math.log2(p)), p & (p - 1) != 0
    doubling = Terms(log, share, adds * share)
    if folds:
        doubling = _folded_gather(p, kept, adds)
    return {
        "ring": Terms(p - 1, share, adds * share),
        "double-ring": Terms(p - 1, share / 2 if p > 2 else share, adds * share),
        "mesh": Terms(1, 1 / p, adds * share),
        "halving-doubling": doubling,
        "nhr": Terms(log, share, adds * share),
    }


def _folded_gather(p: int, kept: int, adds: float) -> Terms:
    """Fold in one slot, double what pairs hold, fold out all but the own."""
    held, terms = [2] * (p - kept) + [1] * (2 * kept - p), Terms(2, 1.0, adds)
    for k in reversed(range(kept.bit_length() - 1)):
        near = 2 ** (k + 1)
        most = max(sum(held[a] for a in range(a0, kept, near)) for a0 in range(min(near, kept)))
        terms += Terms(1, most / p, adds * most / p)
    return terms


def _all_reduce(p: int, chunks: int) -> dict[str, Terms]:
    scatter, gather = _gather(p, 1.0), _gather(p, 0.0)
    found = {name: scatter[name] + gather[name] for name in scatter}
    kept = 2 ** int(math.log2(p))
    log, share = int(math.log2(p)), (kept - 1) / kept
    fold = Terms(2, 2, 1) if kept < p else Terms(0, 0)
    found["halving-doubling"] = Terms(2 * log, 2 * share, share) + fold
    found["recursive-doubling"] = Terms(log, log, log) + fold
    found["tree"] = _rooted(p, 1, 1.0)["tree"] + _rooted(p, 1, 0.0)["tree"]
    hops = 2 * (p - 1) + chunks - 1
    adding = p - 1 + chunks - 1
    found["chain"] = Terms(hops, hops / chunks, adding / chunks)
    return found


def _rooted(p: int, chunks: int, adds: float) -> dict[str, Terms]:
    log, share, hops = math.ceil(math.log2(p)), (p - 1) / p, p - 1 + chunks - 1
    gather = _gather(p, adds)
    return {
        "tree": Terms(log, log, adds * log),
        "chain": Terms(hops, hops / chunks, adds * hops / chunks),
        "star": Terms(1, 1, adds * (p - 1)),
        "mesh": Terms(1, 1 / p) + gather["mesh"],
        "nhr": Terms(log, share) + gather["nhr"],
    }


def _exchange(p: int) -> dict[str, Terms]:
    log = math.ceil(math.log2(p))
    moved = sum((way >> k) & 1 for k in range(log) for way in range(p)) / p
    return {
        "mesh": Terms(1, 1 / p),
        "pairwise": Terms(p - 1, (p - 1) / p),
        "bruck": Terms(log, moved),
    }

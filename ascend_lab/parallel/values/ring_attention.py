"""Attention over a sequence that is split among ranks: keys and values travel round a ring.

Each rank keeps its queries. In step i it sees the keys and values of the rank i places behind and
merges the block into a running maximum, sum and output (as flash attention does). On the way back
keys, values and their gradients travel on until they are home again.
Liu et al., "Ring attention with blockwise transformers", 2023.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.parallel.values.group import Group, Ranked, Values
from ascend_lab.parallel.values.tape import Tape, Var


def _scores(q: Values, k: Values, mine: int, theirs: int) -> Values:
    """Return scaled scores of one block; positions after the query's own are masked."""
    scores: Values = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    length = q.shape[-2]
    rows = mine * length + np.arange(length)[:, None]
    columns = theirs * length + np.arange(length)[None]
    return np.where(columns > rows, scores - 10000.0, scores)


def ring_attention(tape: Tape, q: Var, k: Var, v: Var, group: Group) -> Var:
    """Return causal attention of q, k, v (batch, heads, sequence / ranks, width)."""
    ranks = range(len(q.values))
    most = [np.full(x.shape[:-1], -np.inf) for x in q.values]
    total = [np.zeros(x.shape[:-1]) for x in q.values]
    out = [np.zeros_like(x) for x in v.values]
    keys, values = k.values, v.values
    for step in range(group.ranks):
        for r in ranks:
            behind = (group.place(r) - step) % group.ranks
            scores = _scores(q.values[r], keys[r], group.place(r), behind)
            new = np.maximum(most[r], scores.max(-1))
            old, power = np.exp(most[r] - new), np.exp(scores - new[..., None])
            total[r] = total[r] * old + power.sum(-1)
            out[r] = out[r] * old[..., None] + power @ values[r]
            most[r] = new
        if step < group.ranks - 1:
            keys, values = group.shift(keys), group.shift(values)
    out = [o / t[..., None] for o, t in zip(out, total, strict=True)]
    level = [m + np.log(t) for m, t in zip(most, total, strict=True)]
    return tape.record([q, k, v], out, lambda g: _backward(q, k, v, out, level, g, group))


def _backward(
    q: Var, k: Var, v: Var, out: Ranked, level: Ranked, grads: Ranked, group: Group
) -> list[Ranked]:
    """Return the gradients of q, k, v; probabilities are computed again from `level`."""
    dq, dk, dv = ([np.zeros_like(x) for x in one.values] for one in (q, k, v))
    shared = [(g * o).sum(-1, keepdims=True) for g, o in zip(grads, out, strict=True)]
    keys, values = k.values, v.values
    for step in range(group.ranks):
        for r, query in enumerate(q.values):
            behind = (group.place(r) - step) % group.ranks
            scores = _scores(query, keys[r], group.place(r), behind)
            chance = np.exp(scores - level[r][..., None])
            slope = chance * (grads[r] @ np.swapaxes(values[r], -1, -2) - shared[r])
            slope = slope / np.sqrt(query.shape[-1])
            dq[r] = dq[r] + slope @ keys[r]
            dk[r] = dk[r] + np.swapaxes(slope, -1, -2) @ query
            dv[r] = dv[r] + np.swapaxes(chance, -1, -2) @ grads[r]
        dk, dv = group.shift(dk), group.shift(dv)
        if step < group.ranks - 1:
            keys, values = group.shift(keys), group.shift(values)
    return [dq, dk, dv]

"""Embedding and cross-entropy with the vocabulary cut among the tensor ranks.

Logits (batch, sequence, vocabulary) are never gathered: ranks exchange three numbers a token, the
maximum, the sum of exponentials and the target's logit. Shoeybi et al., 2019, section 3.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.parallel.values.group import Group, Ranked
from ascend_lab.parallel.values.pieces import SEQUENCE, Net, Piece, Shard, norm_weights, normal
from ascend_lab.parallel.values.tape import Tape, Var


def embed(name: str, vocabulary: int, length: int, width: int, rng: np.random.Generator) -> Piece:
    """Return the piece tokens -> table[token] + position."""

    def forward(net: Net, tokens: Var, targets: Ranked) -> Var:
        y = net.leave(_rows(net.tape, net["table"], tokens, net.groups["tensor"]))
        return net.apply("add", y, _positions(net, y.shape[SEQUENCE]))

    table, position = rng.normal(size=(vocabulary, width)), normal(rng, length, width)
    weights = {"table": table, "position": position}
    return Piece(name, weights, forward, {"table": Shard("tensor", 0)})


def _rows(tape: Tape, table: Var, tokens: Var, group: Group) -> Var:
    """Return the table's rows for the tokens this rank has, zeros for the others."""
    rows = table.shape[0]
    local = [t - group.place(r) * rows for r, t in enumerate(tokens.values)]
    mine = [(n >= 0) & (n < rows) for n in local]
    found = [
        np.where(m[..., None], weights[np.where(m, n, 0)], 0)
        for weights, n, m in zip(table.values, local, mine, strict=True)
    ]

    def slope(grads: Ranked) -> list[Ranked]:
        out = [np.zeros(table.shape, grads[0].dtype) for _ in grads]
        for total, grad, n, m in zip(out, grads, local, mine, strict=True):
            np.add.at(total, n[m], grad[m])
        return [out]

    return tape.record([table], found, slope)


def _positions(net: Net, length: int) -> Var:
    """Return the rows of "position" for the part of the sequence a rank has."""
    position, ranks = net["position"], range(len(net["position"].values))
    places = [net.groups["tensor"].place(r) if net.sequence else 0 for r in ranks]
    spans = [slice(length * place, length * (place + 1)) for place in places]

    def slope(grads: Ranked) -> list[Ranked]:
        out = [np.zeros(position.shape, grads[0].dtype) for _ in ranks]
        for r in ranks:
            out[r][spans[r]] = grads[r]
        return [out]

    rows = [position.values[r][spans[r]] for r in ranks]
    return net.tape.record([position], rows, slope)


def head(name: str, width: int, vocabulary: int, rng: np.random.Generator) -> Piece:
    """Return the last piece: layer norm, logits, and the loss of each token."""

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        logits = net.linear(net.enter(net.norm(x, "norm")), "weight")
        return cross_entropy(net.tape, logits, targets, net.groups["tensor"])

    weights = {**norm_weights("norm", width, rng), "weight": normal(rng, width, vocabulary)}
    return Piece(name, weights, forward, {"weight": Shard("tensor", 1)})


def cross_entropy(tape: Tape, logits: Var, targets: Ranked, group: Group) -> Var:
    """Return ln(sum(e^l)) - l[target] of each token in fp32 or better.

    Each rank has the logits of its own words, (..., vocabulary / ranks). The gradient is softmax
    minus one at the target, again of the rank's own words.
    """
    wide = [v.astype(np.promote_types(v.dtype, np.float32)) for v in logits.values]
    words = logits.shape[-1]
    ones = [
        np.arange(words) + group.place(r) * words == t[..., None] for r, t in enumerate(targets)
    ]
    own = [v.max(-1)[None] for v in wide]
    most = [m.max(0)[..., None] for m in group.all_gather(own)]
    power = [np.exp(v - m) for v, m in zip(wide, most, strict=True)]
    total = group.all_reduce([p.sum(-1) for p in power])
    target = group.all_reduce([(v * o).sum(-1) for v, o in zip(wide, ones, strict=True)])
    losses = [np.log(s) + m[..., 0] - t for s, m, t in zip(total, most, target, strict=True)]

    def slope(grads: Ranked) -> list[Ranked]:
        rows = zip(grads, power, total, ones, logits.values, strict=True)
        return [[(g[..., None] * (p / s[..., None] - o)).astype(v.dtype) for g, p, s, o, v in rows]]

    return tape.record([logits], losses, slope)

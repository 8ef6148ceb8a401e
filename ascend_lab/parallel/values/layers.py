"""A model as a row of pieces, each a forward program over ranks; the pieces of a transformer.

Weights before the non-linearity are cut by columns, those after it by rows, so that half a layer
needs one sum forward (`leave`) and one backward (`enter`): 2 + 2 all-reduces of (batch, sequence,
width) a layer. Logits (batch, sequence, vocabulary) are never gathered: ranks exchange three
numbers a token, the maximum, the sum of exponentials and the target's logit. Shoeybi et al.,
"Megatron-LM", 2019, section 3. With `sequence` the tensor between the halves is split along the
sequence and every all-reduce becomes a reduce-scatter and an all-gather of the same bytes:
Korthikanti et al., "Reducing activation recomputation", 2022, section 4.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.group import (
    Group,
    Ranked,
    Tape,
    Values,
    Var,
    copy_in,
    gather_in,
    scatter_out,
    sum_out,
)

SEQUENCE = 1
"""Activations are (batch, sequence, width)."""
MASKED = -10000.0
"""Added to the scores of later positions."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight that is cut along an axis among the ranks of a group: "tensor" or "expert"."""

    group: str
    axis: int


@dataclass(frozen=True, slots=True)
class Net:
    """What a piece sees while it runs: the tape, its weights, the groups, and how x is split."""

    tape: Tape
    weights: Mapping[str, Var]
    groups: Mapping[str, Group]
    sequence: bool = False

    def __getitem__(self, name: str) -> Var:
        return self.weights[name]

    def apply(self, name: str, *inputs: Var, **attrs: Any) -> Var:
        """Apply an operator of the library."""
        return self.tape.apply(name, *inputs, **attrs)

    def enter(self, x: Var) -> Var:
        """Begin a tensor-parallel region: every rank gets all of x."""
        if self.sequence:
            return gather_in(self.tape, x, self.groups["tensor"], SEQUENCE)
        return copy_in(self.tape, x, self.groups["tensor"])

    def leave(self, x: Var) -> Var:
        """End it: x is each rank's part of a sum."""
        if self.sequence:
            return scatter_out(self.tape, x, self.groups["tensor"], SEQUENCE)
        return sum_out(self.tape, x, self.groups["tensor"])

    def linear(self, x: Var, weight: str, bias: str | None = None) -> Var:
        """Return x w, or x w + bias, with the rank's own columns or rows of w."""
        y = self.apply("batch_matmul", x, self[weight])
        return y if bias is None else self.apply("add", y, self[bias])

    def norm(self, x: Var, name: str) -> Var:
        """Return the layer norm of x with weights `name`.scale and `name`.bias."""
        return self.apply("layer_norm", x, self[f"{name}.scale"], self[f"{name}.bias"])


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer: full weights, how they may be cut, and its program.

    `forward(net, x, targets)` returns y; the last piece of a model returns the loss of each token.
    """

    name: str
    weights: Mapping[str, Values]
    forward: Callable[[Net, Var, Ranked], Var]
    shards: Mapping[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """Pieces in order; the first takes the inputs of a batch, the last gives losses."""

    pieces: tuple[Piece, ...]

    @property
    def weights(self) -> dict[str, Values]:
        """All weights by "piece.weight"."""
        return {f"{p.name}.{name}": w for p in self.pieces for name, w in p.weights.items()}

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(w.size for w in self.weights.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs (batch, ...) and targets, the class of each token, with the same leading axes."""

    inputs: Values
    targets: Values


# -- weights --------------------------------------------------------------------------------------
COLUMNS, ROWS, BIAS = Shard("tensor", 1), Shard("tensor", 0), Shard("tensor", 0)
MLP_SHARDS = {"up": COLUMNS, "up.bias": BIAS, "down": ROWS}
ATTENTION_SHARDS = {
    **dict.fromkeys(("query", "key", "value"), COLUMNS),
    **{f"{name}.bias": BIAS for name in ("query", "key", "value")},
    "out": ROWS,
}


def normal(rng: np.random.Generator, *shape: int) -> Values:
    """Return random matrices (..., rows, columns) of variance 1 / rows."""
    found: Values = rng.normal(size=shape) / np.sqrt(shape[-2])
    return found


def norm_weights(name: str, width: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return scale and bias of a layer norm, near 1 and 0."""
    return {
        f"{name}.scale": 1.0 + 0.1 * rng.normal(size=width),
        f"{name}.bias": 0.1 * rng.normal(size=width),
    }


def mlp_weights(width: int, hidden: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return the weights of `mlp`."""
    return {
        **norm_weights("mlp.norm", width, rng),
        "up": normal(rng, width, hidden),
        "up.bias": 0.1 * rng.normal(size=hidden),
        "down": normal(rng, hidden, width),
        "down.bias": 0.1 * rng.normal(size=width),
    }


def attention_weights(width: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return the weights of `attention`."""
    weights = norm_weights("attention.norm", width, rng)
    for name in ("query", "key", "value", "out"):
        weights[name] = normal(rng, width, width)
        weights[f"{name}.bias"] = 0.1 * rng.normal(size=width)
    return weights


# -- a transformer layer --------------------------------------------------------------------------
def mlp(net: Net, x: Var) -> Var:
    """Return x + gelu(norm(x) up + b) down + c."""
    y = net.enter(net.norm(x, "mlp.norm"))
    y = net.apply("gelu", net.linear(y, "up", "up.bias"))
    y = net.apply("add", net.leave(net.linear(y, "down")), net["down.bias"])
    return net.apply("add", x, y)


def attention(net: Net, x: Var, heads: int) -> Var:
    """Return x + causal attention(norm(x)) out + c; each rank has its own heads."""
    ranks = net.groups["tensor"].ranks
    if heads % ranks:
        raise ClusterError(f"heads divisible by {ranks} tensor ranks", str(heads), "use fewer")
    y = net.enter(net.norm(x, "attention.norm"))
    q, k, v = (
        _split_heads(net, net.linear(y, name, f"{name}.bias"), heads // ranks)
        for name in ("query", "key", "value")
    )
    length = q.shape[-2]
    mask = np.triu(np.full((length, length), MASKED), 1).astype(q.values[0].dtype)
    y = net.apply("attention", q, k, v, Var([mask] * len(q.values)))
    y = net.leave(net.linear(_join_heads(net, y), "out"))
    return net.apply("add", x, net.apply("add", y, net["out.bias"]))


def _split_heads(net: Net, x: Var, heads: int) -> Var:
    """(batch, sequence, width) -> (batch, heads, sequence, width / heads)."""
    batch, length, width = x.shape
    y = net.apply("reshape", x, shape=(batch, length, heads, width // heads))
    return net.apply("transpose", y, perm=(0, 2, 1, 3))


def _join_heads(net: Net, x: Var) -> Var:
    batch, heads, length, width = x.shape
    y = net.apply("transpose", x, perm=(0, 2, 1, 3))
    return net.apply("reshape", y, shape=(batch, length, heads * width))


def layer(name: str, width: int, heads: int, hidden: int, rng: np.random.Generator) -> Piece:
    """Return a transformer layer."""
    if width % heads:
        raise ClusterError(f"a width divisible by {heads} heads", str(width), "change one")
    weights = {**attention_weights(width, rng), **mlp_weights(width, hidden, rng)}
    shards = {**ATTENTION_SHARDS, **MLP_SHARDS}
    return Piece(name, weights, lambda net, x, _: mlp(net, attention(net, x, heads)), shards)


# -- a vocabulary that is cut among the tensor ranks ----------------------------------------------
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
    return Piece(name, weights, forward, {"weight": COLUMNS})


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

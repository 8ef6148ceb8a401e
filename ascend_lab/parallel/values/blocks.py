"""The two halves of a transformer layer, tensor parallel as in Megatron.

Weights before the non-linearity are cut by columns, those after it by rows, so that a half needs
one sum forward (`leave`) and one backward (`enter`): 2 + 2 all-reduces of (batch, sequence, width)
a layer. Shoeybi et al., "Megatron-LM", 2019, section 3. With `sequence` the tensor between the
halves is split along the sequence and every all-reduce becomes a reduce-scatter and an all-gather
of the same bytes: Korthikanti et al., "Reducing activation recomputation", 2022, section 4.2.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.group import Ranked, Values
from ascend_lab.parallel.values.pieces import Net, Piece, Shard, norm_weights, normal
from ascend_lab.parallel.values.tape import Var

COLUMNS, ROWS, BIAS = Shard("tensor", 1), Shard("tensor", 0), Shard("tensor", 0)
MLP_SHARDS = {"up": COLUMNS, "up.bias": BIAS, "down": ROWS}
ATTENTION_SHARDS = {
    **dict.fromkeys(("query", "key", "value"), COLUMNS),
    **{f"{name}.bias": BIAS for name in ("query", "key", "value")},
    "out": ROWS,
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


def mlp(net: Net, x: Var) -> Var:
    """Return x + gelu(norm(x) up + b) down + c."""
    y = net.enter(net.norm(x, "mlp.norm"))
    y = net.apply("gelu", net.linear(y, "up", "up.bias"))
    y = net.apply("add", net.leave(net.linear(y, "down")), net["down.bias"])
    return net.apply("add", x, y)


def attention_weights(width: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return the weights of `attention`."""
    weights = norm_weights("attention.norm", width, rng)
    for name in ("query", "key", "value", "out"):
        weights[name] = normal(rng, width, width)
        weights[f"{name}.bias"] = 0.1 * rng.normal(size=width)
    return weights


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
    mask = np.triu(np.full((length, length), -10000.0), 1).astype(q.values[0].dtype)
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

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        return mlp(net, attention(net, x, heads))

    if width % heads:
        raise ClusterError(f"a width divisible by {heads} heads", str(width), "change one")
    weights = {**attention_weights(width, rng), **mlp_weights(width, hidden, rng)}
    return Piece(name, weights, forward, {**ATTENTION_SHARDS, **MLP_SHARDS})


def mlp_layer(name: str, width: int, hidden: int, rng: np.random.Generator) -> Piece:
    """Return the second half alone, for models without attention."""

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        return mlp(net, x)

    return Piece(name, mlp_weights(width, hidden, rng), forward, MLP_SHARDS)

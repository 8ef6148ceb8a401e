"""Small models and data to train: transformer language models, plain and with layers of experts.

In a layer of experts each token is computed by the one or two that a router picks for it. Experts
are spread over ranks that each hold other sentences, so tokens travel to their experts and back:
two all-to-alls forward, two backward. Each sentence may send `capacity` tokens to an expert; later
ones are dropped and pass only through the residual. Counting by sentence makes the result
independent of the number of ranks. Lepikhin et al., "GShard", 2020; Fedus et al., "Switch
transformers", 2021.
"""

import math

import numpy as np

from ascend_lab.parallel.values.group import Ranked, Tape, Values, Var, exchange
from ascend_lab.parallel.values.layers import (
    ATTENTION_SHARDS,
    Batch,
    Model,
    Net,
    Piece,
    Shard,
    attention,
    attention_weights,
    embed,
    head,
    layer,
    norm_weights,
    normal,
)


def transformer(
    layers: int = 2,
    width: int = 16,
    heads: int = 4,
    vocabulary: int = 24,
    length: int = 8,
    seed: int = 0,
) -> Model:
    """Return a causal language model: embedding, layers of 4 x width hidden units, head."""
    rng = np.random.default_rng(seed)
    inner = (layer(f"layer{i}", width, heads, 4 * width, rng) for i in range(layers))
    first = embed("embed", vocabulary, length, width, rng)
    return Model((first, *inner, head("head", width, vocabulary, rng)))


def experts_transformer(
    layers: int = 1,
    width: int = 16,
    heads: int = 4,
    experts: int = 4,
    top: int = 2,
    factor: float = 1.25,
    vocabulary: int = 24,
    length: int = 8,
    seed: int = 0,
) -> Model:
    """Return a language model with `experts` in place of the second half of each layer."""
    rng = np.random.default_rng(seed)
    inner = (
        experts_layer(f"layer{i}", width, heads, 2 * width, experts, rng, top, factor)
        for i in range(layers)
    )
    first = embed("embed", vocabulary, length, width, rng)
    return Model((first, *inner, head("head", width, vocabulary, rng)))


def sentences(
    batches: int = 3, batch: int = 8, length: int = 8, vocabulary: int = 24, seed: int = 1
) -> list[Batch]:
    """Return batches of a language where word w is mostly followed by 3 w + 1 modulo the words."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        words = rng.integers(vocabulary, size=(batch, length + 1))
        for t in range(length):
            follows = rng.random(batch) < 0.9
            words[:, t + 1] = np.where(follows, (3 * words[:, t] + 1) % vocabulary, words[:, t + 1])
        found.append(Batch(words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)))
    return found


# -- a layer of experts ---------------------------------------------------------------------------
def route(chances: Values, top: int, capacity: int) -> Values:
    """Return which token goes where: (batch, sequence, expert, slot), ones and zeros.

    `chances` are (batch, sequence, expert). First choices take slots before second ones, earlier
    tokens before later ones; a token that finds all slots taken is dropped there.
    """
    experts = chances.shape[-1]
    choices = np.argsort(-chances, axis=-1, kind="stable")[..., :top]
    found = np.zeros((*chances.shape, capacity))
    taken = np.zeros((len(chances), experts), np.int64)
    for choice in range(top):
        picked = np.eye(experts, dtype=np.int64)[choices[..., choice]]
        slots = np.cumsum(picked, axis=1) - picked + taken[:, None]
        found += picked[..., None] * (slots[..., None] == np.arange(capacity))
        taken += picked.sum(axis=1)
    return found


def capacity_of(tokens: int, experts: int, top: int, factor: float) -> int:
    """Return the slots of one expert for a sentence: factor times an even share, rounded up."""
    return max(1, math.ceil(factor * top * tokens / experts))


def experts_layer(
    name: str,
    width: int,
    heads: int,
    hidden: int,
    experts: int,
    rng: np.random.Generator,
    top: int = 2,
    factor: float = 1.25,
) -> Piece:
    """Return a transformer layer whose second half is a layer of experts."""

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        x = attention(net, x, heads)
        y = net.norm(x, "experts.norm")
        chances = net.apply("softmax", net.linear(y, "router"))
        slots = capacity_of(x.shape[1], experts, top, factor)
        sent = [route(one, top, slots).astype(one.dtype) for one in chances.values]
        gates = _gates(net, chances, top)
        back = _computed(net, _dispatch(net.tape, y, sent))
        return net.apply("add", x, _combine(net.tape, back, gates, sent))

    cut = Shard("expert", 0)
    weights = {
        **attention_weights(width, rng),
        **norm_weights("experts.norm", width, rng),
        "router": normal(rng, width, experts),
        "up": normal(rng, experts, width, hidden),
        "down": normal(rng, experts, hidden, width),
    }
    return Piece(name, weights, forward, {**ATTENTION_SHARDS, "up": cut, "down": cut})


def _gates(net: Net, chances: Var, top: int) -> Var:
    """Return the weight of each expert: its chance; of several, their share of the chosen ones'."""
    if top == 1:
        return chances
    rank = [np.argsort(np.argsort(-c, axis=-1, kind="stable"), axis=-1) for c in chances.values]
    masks = [(r < top).astype(c.dtype) for r, c in zip(rank, chances.values, strict=True)]
    chosen = net.apply("mul", chances, Var(masks))
    total = net.apply("reduce_sum", chosen, axis=-1, keepdims=True)
    return net.apply("div", chosen, total)


def _dispatch(tape: Tape, y: Var, sent: Ranked) -> Var:
    """Return each expert's tokens: (expert, batch, slot, width)."""

    def slope(grads: Ranked) -> list[Ranked]:
        return [[np.einsum("bsec,ebch->bsh", m, g) for m, g in zip(sent, grads, strict=True)]]

    rows = [np.einsum("bsec,bsh->ebch", m, v) for m, v in zip(sent, y.values, strict=True)]
    return tape.record([y], rows, slope)


def _computed(net: Net, rows: Var) -> Var:
    """Send tokens to the ranks of their experts, compute them there, send them back."""
    group, (experts, batch, slots, width) = net.groups["expert"], rows.shape
    own = experts // group.ranks
    # by expert -> by sender -> by own expert, all senders' tokens in a row
    x = exchange(net.tape, rows, group)
    x = _turned(net, x, group.ranks, own, batch * slots)
    x = net.apply("reshape", x, shape=(own, group.ranks * batch * slots, width))
    y = net.apply("gelu", net.apply("batch_matmul", x, net["up"]))
    y = net.apply("batch_matmul", y, net["down"])
    y = _turned(net, y, own, group.ranks, batch * slots)
    y = net.apply("reshape", y, shape=(experts, batch, slots, width))
    return exchange(net.tape, y, group)


def _turned(net: Net, x: Var, major: int, minor: int, rows: int) -> Var:
    """Return x with its first two axes exchanged: (minor, major, rows, width)."""
    y = net.apply("reshape", x, shape=(major, minor, rows, x.shape[-1]))
    return net.apply("transpose", y, perm=(1, 0, 2, 3))


def _combine(tape: Tape, rows: Var, gates: Var, sent: Ranked) -> Var:
    """Return each token's sum of gate times expert output: (batch, sequence, width)."""
    spread = [m * g[..., None] for m, g in zip(sent, gates.values, strict=True)]

    def slope(grads: Ranked) -> list[Ranked]:
        pairs = zip(grads, spread, sent, rows.values, strict=True)
        both = [
            (np.einsum("bsec,bsh->ebch", w, g), np.einsum("bsec,bsh,ebch->bse", m, g, r))
            for g, w, m, r in pairs
        ]
        return [list(one) for one in zip(*both, strict=True)]

    out = [np.einsum("bsec,ebch->bsh", w, r) for w, r in zip(spread, rows.values, strict=True)]
    return tape.record([rows, gates], out, slope)

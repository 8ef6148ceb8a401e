"""Small transformer language models and training data, to test parallel plans on arrays.

Tensor parallelism cuts the weights before a non-linearity by columns and the weights after it by
rows. Attention and MLP then each need one sum over ranks forward (`leave`) and one backward
(`enter`): 2 + 2 all-reduces of (batch, sequence, width) per layer. Logits (batch, sequence,
vocabulary) are never gathered: ranks exchange three numbers per token: the maximum, the sum of
exponentials and the target's logit. Shoeybi et al., "Megatron-LM", 2019, section 3. With `sequence`
the tensor between attention and MLP is split along the sequence, and every all-reduce becomes a
reduce-scatter and an all-gather of the same bytes: Korthikanti et al., "Reducing activation
recomputation", 2022, section 4.2.

In a layer of experts each token is computed by the one or two that a router picks for it. The
experts are distributed over ranks with different sentences, so that tokens are sent to their
experts and back: two all-to-alls forward, two backward. Each sentence may send `capacity` tokens to
an expert; later ones are dropped and pass only through the residual. Counting by sentence makes the
result independent of the number of ranks. Lepikhin et al., "GShard", 2020; Fedus et al., "Switch
transformers", 2021.
"""

import math
from dataclasses import dataclass

import numpy as np

from ascend_lab.cluster.parallel.values import group as comm
from ascend_lab.cluster.parallel.values.group import (
    Model,
    Net,
    Piece,
    Ranked,
    Shard,
    Values,
    Var,
    exchange,
)
from ascend_lab.errors import ClusterError

MASKED = -10000.0
"""Number that is added to the attention scores of later positions, to mask them."""


def transformer(
    layers: int = 2,
    width: int = 16,
    heads: int = 4,
    vocabulary: int = 24,
    length: int = 8,
    seed: int = 0,
) -> Model:
    """Return a causal language model: embedding, layers with 4 x width hidden units, head."""
    rng = np.random.default_rng(seed)
    inner = (layer(f"layer{i}", width, heads, 4 * width, rng) for i in range(layers))
    embedding = embed("embed", vocabulary, length, width, rng)
    return Model((embedding, *inner, head("head", width, vocabulary, rng)))


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are distributed: each token goes to its `top` likeliest of `experts` experts.

    An expert takes at most `factor` times an even share of a sequence's tokens.
    """

    experts: int = 4
    top: int = 2
    factor: float = 1.25


TWO_OF_FOUR = Routing()
VOCABULARY = 24
LENGTH = 8
"""Default vocabulary and sequence length of the models and of `sentences`."""


def experts_transformer(
    layers: int = 1,
    width: int = 16,
    heads: int = 4,
    routing: Routing = TWO_OF_FOUR,
    seed: int = 0,
) -> Model:
    """Return a language model whose layers have experts in place of the two-layer MLP."""
    rng = np.random.default_rng(seed)
    inner = (
        experts_layer(f"layer{i}", width, heads, 2 * width, routing, rng) for i in range(layers)
    )
    embedding = embed("embed", VOCABULARY, LENGTH, width, rng)
    return Model((embedding, *inner, head("head", width, VOCABULARY, rng)))


def sentences(
    batches: int = 3, batch: int = 8, length: int = 8, vocabulary: int = 24, seed: int = 1
) -> list[comm.Batch]:
    """Return batches of a language in which word (3 w + 1) mod `vocabulary` mostly follows w."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(batches):
        words = rng.integers(vocabulary, size=(batch, length + 1))
        for t in range(length):
            follows = rng.random(batch) < 0.9
            words[:, t + 1] = np.where(follows, (3 * words[:, t] + 1) % vocabulary, words[:, t + 1])
        sequences.append(comm.Batch(words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)))
    return sequences


# -- weights --------------------------------------------------------------------------------------
COLUMNS = Shard("tensor", 1)
ROWS = Shard("tensor", 0)
BIAS = Shard("tensor", 0)
MLP_SHARDS = {"up": COLUMNS, "up.bias": BIAS, "down": ROWS}
ATTENTION_SHARDS = {
    **dict.fromkeys(("query", "key", "value"), COLUMNS),
    **{f"{name}.bias": BIAS for name in ("query", "key", "value")},
    "out": ROWS,
}


def normal(rng: np.random.Generator, *shape: int) -> Values:
    """Return random matrices of shape (..., rows, columns) whose entries have variance 1 / rows."""
    # Then x w has about the variance of x: a sum of `rows` products, each of variance 1 / rows.
    weights: Values = rng.normal(size=shape) / np.sqrt(shape[-2])
    return weights


def norm_weights(name: str, width: int, rng: np.random.Generator) -> dict[str, Values]:
    """Return the scale (near 1) and the bias (near 0) of a layer norm."""
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
    # (length, length): -10000 above the diagonal, so that position i sees positions 0 .. i only.
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


# -- a layer of experts ---------------------------------------------------------------------------
def route(chances: Values, top: int, capacity: int) -> Values:
    """Return the routing as an array of ones and zeros: (batch, sequence, expert, slot).

    `chances` are (batch, sequence, expert). First choices take slots before second ones, earlier
    tokens before later ones; a token that finds all slots of an expert taken is not computed by it.
    """
    experts = chances.shape[-1]
    choices = np.argsort(-chances, axis=-1, kind="stable")[..., :top]
    # (batch, sequence, expert, slot); 8 tokens, 4 experts, 5 slots: at most 16 ones for top 2.
    dispatch = np.zeros((*chances.shape, capacity))
    taken = np.zeros((len(chances), experts), np.int64)
    for choice in range(top):
        picked = np.eye(experts, dtype=np.int64)[choices[..., choice]]
        # The token's place in its expert's queue: the third token for an expert gets slot 2. A
        # place beyond the capacity equals no slot, so the token is dropped.
        slots = np.cumsum(picked, axis=1) - picked + taken[:, None]
        dispatch += picked[..., None] * (slots[..., None] == np.arange(capacity))
        taken += picked.sum(axis=1)
    return dispatch


def capacity_of(tokens: int, experts: int, top: int, factor: float) -> int:
    """Return the slots of an expert per sentence: `factor` times an even share, rounded up."""
    # 8 tokens, each to 2 of 4 experts, factor 1.25: 1.25 * 2 * 8 / 4 = 5 slots.
    return max(1, math.ceil(factor * top * tokens / experts))


def experts_layer(
    name: str,
    width: int,
    heads: int,
    hidden: int,
    routing: Routing,
    rng: np.random.Generator,
) -> Piece:
    """Return a transformer layer with experts, `hidden` units each, in place of the MLP."""
    experts = routing.experts
    top = routing.top

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        x = attention(net, x, heads)
        y = net.norm(x, "experts.norm")
        chances = net.apply("softmax", net.linear(y, "router"))
        slots = capacity_of(x.shape[1], experts, top, routing.factor)
        sent = [route(chance, top, slots).astype(chance.dtype) for chance in chances.values]
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
    """Return each token's weight per expert: chances, normalised if several experts are chosen."""
    if top == 1:
        return chances
    masks = []
    for values in chances.values:
        # argsort twice gives ranks: chances 0.2, 0.5, 0.3 have the ranks 2, 0, 1
        order = np.argsort(-values, axis=-1, kind="stable")
        masks.append((np.argsort(order, axis=-1) < top).astype(values.dtype))
    # Chances 0.5, 0.3, 0.2 with top 2: (0.5, 0.3, 0) / 0.8 = (0.625, 0.375, 0).
    chosen = net.apply("mul", chances, Var(masks))
    total = net.apply("reduce_sum", chosen, axis=-1, keepdims=True)
    return net.apply("div", chosen, total)


def _dispatch(tape: comm.Tape, y: Var, sent: Ranked) -> Var:
    """Return the tokens of each expert as an array (expert, batch, slot, width)."""

    def gradient(grads: Ranked) -> list[Ranked]:
        pairs = zip(sent, grads, strict=True)
        return [[np.einsum("bsec,ebch->bsh", routing, grad) for routing, grad in pairs]]

    # b batch, s position, e expert, c slot, h width: slot c of expert e gets the one token sent
    # there.
    pairs = zip(sent, y.values, strict=True)
    rows = [np.einsum("bsec,bsh->ebch", routing, tokens) for routing, tokens in pairs]
    return tape.record([y], rows, gradient)


def _computed(net: Net, rows: Var) -> Var:
    """Send tokens to the ranks of their experts, compute them there, send them back."""
    group = net.groups["expert"]
    (experts, batch, slots, width) = rows.shape
    local_experts = experts // group.ranks
    # With 4 experts on 2 ranks, the exchange brings (sender, expert of this rank, ...) in rows.
    # The batched product needs the order (expert of this rank, tokens of all senders).
    x = exchange(net.tape, rows, group)
    # 4 experts on 2 ranks: (2 senders, 2 experts, tokens) becomes (2 experts, 2 senders, tokens).
    x = _axes_exchanged(net, x, group.ranks, local_experts, batch * slots)
    x = net.apply("reshape", x, shape=(local_experts, group.ranks * batch * slots, width))
    y = net.apply("gelu", net.apply("batch_matmul", x, net["up"]))
    y = net.apply("batch_matmul", y, net["down"])
    y = _axes_exchanged(net, y, local_experts, group.ranks, batch * slots)
    y = net.apply("reshape", y, shape=(experts, batch, slots, width))
    return exchange(net.tape, y, group)


def _axes_exchanged(net: Net, x: Var, major: int, minor: int, rows: int) -> Var:
    """Return x with its first two axes exchanged: (minor, major, rows, width)."""
    y = net.apply("reshape", x, shape=(major, minor, rows, x.shape[-1]))
    return net.apply("transpose", y, perm=(1, 0, 2, 3))


def _combine(tape: comm.Tape, rows: Var, gates: Var, sent: Ranked) -> Var:
    """Return the sum of gate x expert output for each token: (batch, sequence, width)."""
    # the routing with the gate of each token in place of its ones
    weighted = [r * gate[..., None] for r, gate in zip(sent, gates.values, strict=True)]

    def gradient(grads: Ranked) -> list[Ranked]:
        row_grads = []
        gate_grads = []
        for rank, grad in enumerate(grads):
            row_grads.append(np.einsum("bsec,bsh->ebch", weighted[rank], grad))
            gate_grads.append(np.einsum("bsec,bsh,ebch->bse", sent[rank], grad, rows.values[rank]))
        return [row_grads, gate_grads]

    pairs = zip(weighted, rows.values, strict=True)
    out = [np.einsum("bsec,ebch->bsh", weight, values) for weight, values in pairs]
    return tape.record([rows, gates], out, gradient)


# -- a vocabulary that is cut among the tensor ranks ----------------------------------------------
def embed(name: str, vocabulary: int, length: int, width: int, rng: np.random.Generator) -> Piece:
    """Return the first piece, which maps a token to table[token] + position."""

    def forward(net: Net, tokens: Var, targets: Ranked) -> Var:
        y = net.leave(_rows(net.tape, net["table"], tokens, net.groups["tensor"]))
        return net.apply("add", y, _positions(net, y.shape[comm.SEQUENCE]))

    table = rng.normal(size=(vocabulary, width))
    position = normal(rng, length, width)
    weights = {"table": table, "position": position}
    return Piece(name, weights, forward, {"table": Shard("tensor", 0)})


def _rows(tape: comm.Tape, table: Var, tokens: Var, group: comm.Group) -> Var:
    """Return the table's row for each token whose row this rank holds, and zeros for the others."""
    rows = table.shape[0]
    # 24 words on 2 ranks: word 15 is row 3 of rank 1; rank 0 does not have it.
    row_numbers = [t - group.place(r) * rows for r, t in enumerate(tokens.values)]
    is_local = [(numbers >= 0) & (numbers < rows) for numbers in row_numbers]
    selected = []
    for weights, numbers, local in zip(table.values, row_numbers, is_local, strict=True):
        token_rows = weights[np.where(local, numbers, 0)]
        selected.append(np.where(local[..., None], token_rows, 0))

    def gradient(grads: Ranked) -> list[Ranked]:
        totals = [np.zeros(table.shape, grads[0].dtype) for _ in grads]
        for total, grad, numbers, local in zip(totals, grads, row_numbers, is_local, strict=True):
            # A word that occurs twice gets both gradients; total[numbers] += grad would keep only
            # one.
            np.add.at(total, numbers[local], grad[local])
        return [totals]

    return tape.record([table], selected, gradient)


def _positions(net: Net, length: int) -> Var:
    """Return the rows of "position" for each rank's part of the sequence."""
    position = net["position"]
    ranks = range(len(net["position"].values))
    numbers = [net.groups["tensor"].place(r) if net.sequence else 0 for r in ranks]
    # Sequences of 8 cut among 2 ranks: rank 1 adds positions 4 .. 7.
    spans = [slice(length * number, length * (number + 1)) for number in numbers]

    def gradient(grads: Ranked) -> list[Ranked]:
        out = [np.zeros(position.shape, grads[0].dtype) for _ in ranks]
        for r in ranks:
            out[r][spans[r]] = grads[r]
        return [out]

    rows = [position.values[r][spans[r]] for r in ranks]
    return net.tape.record([position], rows, gradient)


def head(name: str, width: int, vocabulary: int, rng: np.random.Generator) -> Piece:
    """Return the last piece: layer norm, logits, and the loss of each token."""

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        logits = net.linear(net.enter(net.norm(x, "norm")), "weight")
        return cross_entropy(net.tape, logits, targets, net.groups["tensor"])

    weights = {**norm_weights("norm", width, rng), "weight": normal(rng, width, vocabulary)}
    return Piece(name, weights, forward, {"weight": COLUMNS})


def cross_entropy(tape: comm.Tape, logits: Var, targets: Ranked, group: comm.Group) -> Var:
    """Return ln(sum(e^l)) - l[target] of each token in fp32 or better.

    Each rank has the logits of its own words, (..., vocabulary / ranks). The gradient is softmax
    minus one at the target, again of the rank's own words.
    """
    wide = [v.astype(np.promote_types(v.dtype, np.float32)) for v in logits.values]
    words = logits.shape[-1]
    # (..., words): True at the target, if it is one of the rank's words
    is_target = []
    for rank, rank_targets in enumerate(targets):
        rank_words = np.arange(words) + group.place(rank) * words
        is_target.append(rank_words == rank_targets[..., None])
    # Without subtracting the maximum of all ranks, exp of a logit above 88 overflows fp32.
    local_max = [values.max(-1)[None] for values in wide]
    global_max = [maxima.max(0)[..., None] for maxima in group.all_gather(local_max)]
    power = [np.exp(values - m) for values, m in zip(wide, global_max, strict=True)]
    # Three numbers per token are sent: the maximum, the sum of exponentials, the target's logit.
    # With 24 words on 2 ranks, the 12 logits of each rank are not sent.
    total = group.all_reduce([p.sum(-1) for p in power])
    rank_logits = [(values * t).sum(-1) for values, t in zip(wide, is_target, strict=True)]
    target_logit = group.all_reduce(rank_logits)
    losses = [
        np.log(total[rank]) + global_max[rank][..., 0] - target_logit[rank]
        for rank in range(len(targets))
    ]

    def gradient(grads: Ranked) -> list[Ranked]:
        logit_grads = []
        for rank, grad in enumerate(grads):
            softmax = power[rank] / total[rank][..., None]
            logit_grad = grad[..., None] * (softmax - is_target[rank])
            logit_grads.append(logit_grad.astype(logits.values[rank].dtype))
        return [logit_grads]

    return tape.record([logits], losses, gradient)

"""Builds the graphs that one device computes for a layer of a decoder.

A layer is two graphs, attention and feed-forward part, and the results of each are added up over
the devices. A graph begins by adding that sum to the residual stream (AddRmsNorm in the vendor's
library). Weights are inputs, so that one graph serves all layers and devices. Those of linear
layers are stored as in PyTorch, (columns, depth).

Keys and values are stored in pages anywhere in memory. The cache is one table of slots, one token a
slot; with pages of 4 tokens, slot s is place s mod 4 of page s // 4. A block table lists the pages
of each sequence in order. An example with four pages and two sequences of 6 and 3 tokens:

    block table   sequence 0: pages 2, 0       page 0: tokens 4, 5 of sequence 0, two free slots
                  sequence 1: page 3           page 1: free
                                               page 2: tokens 0, 1, 2, 3 of sequence 0
                                               page 3: tokens 0, 1, 2 of sequence 1, one free slot

Token 5 of sequence 0 is at place 5 mod 4 = 1 of its page number 5 // 4 = 1, which is page 0: slot
0 * 4 + 1 = 1. Its successor goes to slot 2, the next token of sequence 1 to slot 3 * 4 + 3 = 15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ascend_lab.compiler import Graph, GraphBuilder
from ascend_lab.compiler.draft import Value
from ascend_lab.llm.models import Decoder, Experts, GroupedAttention, LatentAttention
from ascend_lab.llm.plan import Shard

LOWEST = -10000.0
"""A number below every score and within the range of fp16; softmax turns it into 0."""
CACHED_GRAPHS = 256
"""Graphs of each kind that are kept: those of one shape are built once."""


@dataclass(frozen=True, slots=True)
class Paged:
    """The sizes of a step of one group.

    `phase` is "decode" or "prefill", `batch` the number of sequences, `tokens` the new tokens of
    each. A sequence's block table has `table_pages` entries, and the cache has `pages` pages of
    `page_tokens` tokens each.
    """

    phase: str
    batch: int
    tokens: int
    table_pages: int
    pages: int
    page_tokens: int

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.tokens

    @property
    def keys(self) -> int:
        """Keys of a sequence: a prefill has just computed them, a decode step reads its pages."""
        # Sequences of 6 and 3 tokens on pages of 4: the longer one has 2 pages, so both have 8
        # keys, and the mask hides those that are not written.
        return self.tokens if self.phase == "prefill" else self.table_pages * self.page_tokens


# -- pieces ----------------------------------------------------------------------------------------
def _normed_sum(net: GraphBuilder, rows: int, hidden: int) -> Value:
    """Return the norm of residual stream plus update, and output their sum as the new stream."""
    residual = net.input("residual", (rows, hidden))
    total = net.add(residual, net.input("update", (rows, hidden)), name="stream")
    net.output(total)
    normed: Value = net.rms_norm(total, net.input("norm", (hidden,)))
    return normed


def _linear(net: GraphBuilder, x: Value, columns: int, name: str) -> Value:
    """Return the product of rows with weights that are an input of the graph."""
    weights = net.input(name, (columns, x.shape[-1]))
    product: Value = net.matmul(x, weights, trans_b=True, name=f"{name}.product")
    return product


def _silu_gate(net: GraphBuilder, gate_up: Value) -> Value:
    """Return silu(gate) up; the left half of the columns is gate, the right half up."""
    width = gate_up.shape[-1] // 2
    gate, up = net.split(gate_up, sizes=(width, width), axis=len(gate_up.shape) - 1)
    product: Value = net.mul(net.silu(gate), up)
    return product


def _block(net: GraphBuilder, x: Value, width: int, name: str) -> Value:
    """Return down(silu(gate x) (up x)): gate and up are one product."""
    gate_up = _linear(net, x, 2 * width, f"{name}.gate_up")
    hidden = x.shape[-1]
    return _linear(net, _silu_gate(net, gate_up), hidden, f"{name}.down")


def _rotated(net: GraphBuilder, x: Value, cos: Value, sin: Value) -> Value:
    """Return x (rows, heads, dim) rotated by position, in pairs of elements i and i + dim / 2."""
    # A pair (a, b) becomes (a cos - b sin, b cos + a sin): `swapped_halves` is (-b, a).
    half = x.shape[-1] // 2
    low, high = net.split(x, sizes=(half, half), axis=2)
    swapped_halves = net.concat(net.neg(high), low, axis=2)
    rotated: Value = net.add(net.mul(x, cos), net.mul(swapped_halves, sin))
    return rotated


def _update_cache(net: GraphBuilder, step: Paged, entries: Value) -> Value:
    """Write new rows (rows, numbers) to their slots; return all rows that queries attend to."""
    numbers = entries.shape[-1]
    slots = net.input("slots", (step.rows,), "int32")
    cache = net.input("cache", (step.pages * step.page_tokens, numbers))
    written = net.scatter_update(cache, slots, entries, name="written")
    net.output(written)
    if step.phase == "prefill":
        computed: Value = net.reshape(entries, shape=(step.batch, step.tokens, numbers))
        return computed
    table = net.input("table", (step.batch, step.table_pages), "int32")
    # A page is one row of this view, so one gather fetches all of its tokens.
    page = net.reshape(written, shape=(step.pages, step.page_tokens * numbers))
    gathered = net.gather(page, table)
    keys: Value = net.reshape(gathered, shape=(step.batch, step.keys, numbers))
    return keys


def _by_head(net: GraphBuilder, x: Value, batch: int, heads: int) -> Value:
    """Return rows, or a tensor (batch, tokens, numbers), as (batch, heads, tokens, dim)."""
    dim = math.prod(x.shape) // (math.prod(x.shape[:-1]) * heads)
    cut = net.reshape(x, shape=(batch, -1, heads, dim))
    ordered: Value = net.transpose(cut, perm=(0, 2, 1, 3))
    return ordered


def _attention(
    net: GraphBuilder, step: Paged, operands: tuple[Value, Value, Value], scale: float
) -> Value:
    """Return softmax(q k^T) v as (rows, heads value_dim); operands are (batch, heads, tokens, dim).

    Query heads that share a head of keys are rows of one product with it.
    """
    q, k, v = operands
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    value_dim = v.shape[-1]
    # qwen3_8b decodes with 32 heads on 8 heads of keys: (batch, 8, 4, 128) times (batch, 8, 128,
    # keys) reads each key once for 4 heads.
    grouped = (batch, kv_heads, heads // kv_heads * tokens)
    grouped_q = net.reshape(net.muls(q, number=scale), shape=(*grouped, dim))
    # (batch, kv_heads, heads / kv_heads * tokens, keys)
    grouped_scores = net.batch_matmul(grouped_q, k, trans_b=True, name="attention.scores")
    scores = net.reshape(grouped_scores, shape=(batch, heads, tokens, step.keys))
    mask = net.input("mask", (batch, 1, tokens, step.keys))
    weights = net.reshape(net.softmax(net.add(scores, mask)), shape=(*grouped, step.keys))
    results = net.batch_matmul(weights, v, name="attention.results")
    by_head = net.reshape(results, shape=(batch, heads, tokens, value_dim))
    by_token = net.transpose(by_head, perm=(0, 2, 1, 3))
    rows: Value = net.reshape(by_token, shape=(step.rows, heads * value_dim))
    return rows


# -- attention -------------------------------------------------------------------------------------
@lru_cache(CACHED_GRAPHS)
def attention_graph(decoder: Decoder, shard: Shard, step: Paged) -> Graph:
    """Return the graph of norm and attention.

    Outputs: residual stream, cache with the new tokens, and this device's term of the sum.
    """
    net = GraphBuilder(f"{decoder.name}.attention.{step.phase}")
    x = _normed_sum(net, step.rows, decoder.hidden)
    if isinstance(decoder.attention, GroupedAttention):
        results = _grouped(net, x, decoder.attention, shard, step)
    else:
        results = _latent(net, x, decoder.attention, shard, step)
    net.output(_linear(net, results, decoder.hidden, "out"))
    return net.build()


def _angles(net: GraphBuilder, rows: int, dim: int) -> tuple[Value, Value]:
    """Declare the inputs with the cosines and sines of the rows' positions."""
    return net.input("cos", (rows, 1, dim)), net.input("sin", (rows, 1, dim))


def _grouped(
    net: GraphBuilder, x: Value, attention: GroupedAttention, shard: Shard, step: Paged
) -> Value:
    """Return the results of query heads that share heads of keys in groups."""
    rows = step.rows
    dim = attention.head_dim
    width = shard.heads * dim
    kv_width = shard.kv_heads * dim
    qkv = _linear(net, x, width + 2 * kv_width, "qkv")
    if attention.bias:
        qkv = net.add(qkv, net.input("qkv.bias", (width + 2 * kv_width,)))
    new_q, new_k, new_v = net.split(qkv, sizes=(width, kv_width, kv_width), axis=1)
    # (rows, heads, dim), as norms and rotations treat each head by itself
    q_heads = net.reshape(new_q, shape=(rows, shard.heads, dim))
    k_heads = net.reshape(new_k, shape=(rows, shard.kv_heads, dim))
    if attention.qk_norm:
        q_heads = net.rms_norm(q_heads, net.input("q.norm", (dim,)))
        k_heads = net.rms_norm(k_heads, net.input("k.norm", (dim,)))
    cos, sin = _angles(net, rows, dim)
    q_rotated = _rotated(net, q_heads, cos, sin)
    k_rows = net.reshape(_rotated(net, k_heads, cos, sin), shape=(rows, kv_width))
    cached = _update_cache(net, step, net.concat(k_rows, new_v, axis=1))
    k, v = net.split(cached, sizes=(kv_width, kv_width), axis=2)
    operands = (
        _by_head(net, net.reshape(q_rotated, shape=(rows, width)), step.batch, shard.heads),
        _by_head(net, k, step.batch, shard.kv_heads),
        _by_head(net, v, step.batch, shard.kv_heads),
    )
    return _attention(net, step, operands, dim**-0.5)


def _latent(
    net: GraphBuilder, x: Value, attention: LatentAttention, shard: Shard, step: Paged
) -> Value:
    """Return the results of heads that share one cached latent vector c per token.

    Without the part with positions, the scores are q (W_k c) = (q W_k) c. A prefill computes the
    left side, with the keys of every head. A decode step computes the right side, so that it reads
    latent vectors only. Values are treated in the same way.
    """
    rows = step.rows
    heads = shard.heads
    rank = attention.kv_rank
    nope_dim = attention.nope_dim
    rope_dim = attention.rope_dim
    q_input = x
    if attention.q_rank:
        q_down = _linear(net, x, attention.q_rank, "q.down")
        q_input = net.rms_norm(q_down, net.input("q.norm", (attention.q_rank,)))
    q_rows = _linear(net, q_input, heads * (nope_dim + rope_dim), "q.up")
    q = net.reshape(q_rows, shape=(rows, heads, nope_dim + rope_dim))
    # deepseek_v3: 128 numbers of a head without positions, and 64 that rotate with the position.
    q_nope, q_unrotated = net.split(q, sizes=(nope_dim, rope_dim), axis=2)
    down = _linear(net, x, rank + rope_dim, "kv.down")
    unnormed, k_unrotated = net.split(down, sizes=(rank, rope_dim), axis=1)
    latent = net.rms_norm(unnormed, net.input("kv.norm", (rank,)))
    cos, sin = _angles(net, rows, rope_dim)
    q_rope = _rotated(net, q_unrotated, cos, sin)
    # All heads share the rotated part of a key: for `_rotated` it is one head.
    k_head = _rotated(net, net.reshape(k_unrotated, shape=(rows, 1, rope_dim)), cos, sin)
    k_rope = net.reshape(k_head, shape=(rows, rope_dim))
    cached = _update_cache(net, step, net.concat(latent, k_rope, axis=1))
    if step.phase == "prefill":
        keys = (latent, k_rope)
        return _latent_in_full(net, attention, step, (q_nope, q_rope), keys)
    return _latent_absorbed(net, attention, step, (q_nope, q_rope), cached)


def _latent_in_full(
    net: GraphBuilder,
    attention: LatentAttention,
    step: Paged,
    queries: tuple[Value, Value],
    keys: tuple[Value, Value],
) -> Value:
    """Return the results of a prompt, with keys W_k c and values W_v c computed for every head.

    `queries` are the parts without and with positions, `keys` the latent vectors c and the part
    with positions, which all heads share.
    """
    q_nope, q_rope = queries
    latent, k_rope = keys
    rows, heads, nope_dim = q_nope.shape
    rope_dim = attention.rope_dim
    value_dim = attention.value_dim
    up_rows = _linear(net, latent, heads * (nope_dim + value_dim), "kv.up")
    up = net.reshape(up_rows, shape=(rows, heads, nope_dim + value_dim))
    k_nope, v = net.split(up, sizes=(nope_dim, value_dim), axis=2)
    k_one_head = net.reshape(k_rope, shape=(rows, 1, rope_dim))
    # All heads share the part with the position: (rows, 1, 64) is repeated for each.
    k_all_heads = net.expand(k_one_head, shape=(rows, heads, rope_dim))
    q = net.concat(q_nope, q_rope, axis=2)
    k = net.concat(k_nope, k_all_heads, axis=2)
    flat_q, flat_k, flat_v = (net.reshape(operand, shape=(rows, -1)) for operand in (q, k, v))
    operands = (
        _by_head(net, flat_q, step.batch, heads),
        _by_head(net, flat_k, step.batch, heads),
        _by_head(net, flat_v, step.batch, heads),
    )
    return _attention(net, step, operands, (nope_dim + rope_dim) ** -0.5)


def _latent_absorbed(
    net: GraphBuilder,
    attention: LatentAttention,
    step: Paged,
    queries: tuple[Value, Value],
    cached: Value,
) -> Value:
    """Return the results of a decode step, with scores (q W_k) c.

    W_k is applied to the queries before attention, and W_v to the results after it.
    """
    q_nope, q_rope = queries
    rows, heads, nope_dim = q_nope.shape
    rank = attention.kv_rank
    rope_dim = attention.rope_dim
    value_dim = attention.value_dim
    scale = (nope_dim + rope_dim) ** -0.5
    up_matrix = net.input("kv.up", (heads * (nope_dim + value_dim), rank))
    up = net.reshape(up_matrix, shape=(heads, nope_dim + value_dim, rank))
    w_k, w_v = net.split(up, sizes=(nope_dim, value_dim), axis=1)
    # (heads, rows, nope_dim) times (heads, nope_dim, rank): each head has a matrix of its own.
    q_by_head = net.transpose(q_nope, perm=(1, 0, 2))
    absorbed = net.batch_matmul(q_by_head, w_k, name="q.absorb")
    q_heads = net.concat(net.transpose(absorbed, perm=(1, 0, 2)), q_rope, axis=2)
    q = net.reshape(q_heads, shape=(rows, heads * (rank + rope_dim)))
    k = _by_head(net, cached, step.batch, 1)
    # The cached row (c, k_rope) is the key, and c alone is the value.
    v, _ = net.split(k, sizes=(rank, rope_dim), axis=3)
    results = _attention(net, step, (_by_head(net, q, step.batch, heads), k, v), scale)
    latents = net.reshape(results, shape=(rows, heads, rank))
    latents_by_head = net.transpose(latents, perm=(1, 0, 2))
    # (heads, rows, rank) times (heads, value_dim, rank) transposed: (heads, rows, value_dim).
    values_by_head = net.batch_matmul(latents_by_head, w_v, trans_b=True, name="v.absorb")
    values = net.transpose(values_by_head, perm=(1, 0, 2))
    by_token: Value = net.reshape(values, shape=(rows, heads * value_dim))
    return by_token


# -- feed-forward part -----------------------------------------------------------------------------
@lru_cache(CACHED_GRAPHS)
def dense_graph(decoder: Decoder, shard: Shard, rows: int) -> Graph:
    """Return the graph of norm and SwiGLU block.

    Outputs: residual stream, and this device's term of the sum.
    """
    net = GraphBuilder(f"{decoder.name}.dense")
    x = _normed_sum(net, rows, decoder.hidden)
    net.output(_block(net, x, shard.dense_width, "ffn"))
    return net.build()


@lru_cache(CACHED_GRAPHS)
def router_graph(decoder: Decoder, shard: Shard, rows: int) -> Graph:
    """Return the graph of norm, router and shared block.

    Outputs: residual stream, normed tokens, weights (rows, experts) that are 0 for experts not
    chosen, and this device's term of the shared block if there is one.
    """
    experts = decoder.experts
    assert experts is not None
    net = GraphBuilder(f"{decoder.name}.router")
    x = _normed_sum(net, rows, decoder.hidden)
    net.output(x, _expert_weights(net, _linear(net, x, experts.count, "router"), experts))
    if shard.shared_width:
        net.output(_block(net, x, shard.shared_width, "shared"))
    return net.build()


def _expert_weights(net: GraphBuilder, logits: Value, experts: Experts) -> Value:
    """Return the weights of the chosen experts, which add up to 1, and 0 for the others.

    The expert with the largest score is chosen, `experts.chosen` times in a row. Experts with equal
    scores are chosen together.
    """
    if experts.corrected:
        scores = net.sigmoid(logits)
        # The bias balances the load: it changes which experts are chosen, but not their weights.
        ranked = net.add(scores, net.input("router.bias", (experts.count,)))
    else:
        scores = net.softmax(logits)
        ranked = scores
    lowest = net.fill(logits.shape, LOWEST, "lowest")
    # Scores 0.1, 0.4, 0.2, 0.3 and 2 to choose: 0.4 becomes LOWEST, then 0.3, and `chosen_mask` is
    # 0, 1, 0, 1.
    for _ in range(experts.chosen):
        largest = net.reduce_max(ranked, axis=-1, keepdims=True)
        ranked = net.select(net.greater_equal(ranked, largest), lowest, ranked)
    # Chosen scores equal LOWEST now: the mask is 1 for them and 0 elsewhere.
    chosen_mask = net.less_equal(ranked, lowest)
    weights = net.mul(scores, chosen_mask)
    total = net.reduce_sum(weights, axis=-1, keepdims=True)
    normalised: Value = net.div(weights, total)
    return normalised


@lru_cache(CACHED_GRAPHS)
def experts_graph(decoder: Decoder, shard: Shard, tokens: int, experts: int, rows: int) -> Graph:
    """Return the graph of `experts` blocks with `rows` rows each, which are copies of tokens.

    The input `places` has the token of each row, to which the weighted result is added. Unused rows
    have weight 0 and may name any token.
    """
    net = GraphBuilder(f"{decoder.name}.experts")
    hidden = decoder.hidden
    width = shard.expert_width
    # 2 experts with 3 rows each: rows 0 to 2 are tokens of expert 0, rows 3 to 5 those of expert 1.
    expert_rows = experts * rows
    x = net.input("tokens", (tokens, hidden))
    places = net.input("places", (expert_rows,), "int32")
    weights = net.input("weights", (expert_rows, 1))
    grouped = net.reshape(net.gather(x, places), shape=(experts, rows, hidden))
    gate_up = net.batch_matmul(
        grouped, net.input("experts.gate_up", (experts, hidden, 2 * width)), name="gate_up"
    )
    down = net.input("experts.down", (experts, width, hidden))
    results = net.batch_matmul(_silu_gate(net, gate_up), down, name="down")
    weighted = net.mul(net.reshape(results, shape=(expert_rows, hidden)), weights)
    net.output(net.scatter_add(net.fill((tokens, hidden), 0.0), places, weighted))
    return net.build()


# -- the ends of the model -------------------------------------------------------------------------
@lru_cache(CACHED_GRAPHS)
def embedding_graph(decoder: Decoder, rows: int) -> Graph:
    """Return the graph of the words' embeddings; every device has the whole table."""
    net = GraphBuilder(f"{decoder.name}.embedding")
    table = net.input("embedding", (decoder.vocabulary, decoder.hidden))
    net.output(net.embedding(table, net.input("words", (rows,), "int32")))
    return net.build()


@lru_cache(CACHED_GRAPHS)
def head_graph(decoder: Decoder, shard: Shard, rows: int, scored: int) -> Graph:
    """Return the graph of the last norm and of the scores of a device's words for some rows."""
    net = GraphBuilder(f"{decoder.name}.head")
    x = _normed_sum(net, rows, decoder.hidden)
    # A prompt of 100 words needs only the scores after its last word: one of its 100 rows.
    chosen = net.gather(x, net.input("last", (scored,), "int32"))
    net.output(_linear(net, chosen, shard.words, "head"))
    return net.build()

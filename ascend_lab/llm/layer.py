"""The kernels of one layer on one device, in order, and those of the head.

A layer is: norm, attention, sum over the devices, norm, feed-forward part, sum over the devices.
Additions to the residual stream are done by the norm's kernel (AddRmsNorm), as the library does.
"""

from __future__ import annotations

import math

from ascend_lab.llm.formats import WIDE_BYTES, Call, Caller
from ascend_lab.llm.models import Decoder, Experts, GroupedAttention, LatentAttention
from ascend_lab.llm.plan import Load, Plan, Shard

ROTARY = "rotary"
"""Not a row of any table: `times` knows its kernel."""
PAGE_TOKENS = 128
"""Tokens of a page of the cache (the block size of vLLM on Ascend)."""


def group_batch(load: Load, plan: Plan) -> int:
    """Return the sequences of the fullest data-parallel group."""
    return math.ceil(load.batch / plan.dp)


def pages_of(tokens: int) -> int:
    """Return the pages that hold some tokens; the last one may have room left."""
    return math.ceil(tokens / PAGE_TOKENS)


class LayerCalls:
    """The calls of one device of a plan, for a load."""

    def __init__(
        self, caller: Caller, decoder: Decoder, plan: Plan, shard: Shard, load: Load
    ) -> None:
        self.caller = caller
        self.decoder = decoder
        self.plan = plan
        self.shard = shard
        self.load = load
        self.batch = group_batch(load, plan)
        self.rows = self.batch * load.tokens

    # -- attention ---------------------------------------------------------------------------------
    def attention(self) -> list[Call]:
        """Return norm, projections, rotary positions, attention and the output projection."""
        caller = self.caller
        hidden = self.decoder.hidden
        norm = caller.call("attention.norm", "rms_norm", (self.rows, hidden), (hidden,))
        if isinstance(self.decoder.attention, GroupedAttention):
            return [norm, *self._grouped(self.decoder.attention)]
        if self.load.phase == "decode":
            return [norm, *self._latent_decode(self.decoder.attention)]
        return [norm, *self._latent_prefill(self.decoder.attention)]

    def _grouped(self, attention: GroupedAttention) -> list[Call]:
        """Return attention in which several heads of queries share one of keys."""
        caller = self.caller
        heads = self.shard.heads
        kv_heads = self.shard.kv_heads
        dim = attention.head_dim
        width = heads * dim
        calls = caller.linear("qkv", self.rows, self.decoder.hidden, width + 2 * kv_heads * dim)
        if attention.qk_norm:
            for name, count in (("q", heads), ("k", kv_heads)):
                calls.append(
                    caller.call(f"{name}.norm", "rms_norm", (self.rows * count, dim), (dim,))
                )
        calls.append(self._rotary(heads, kv_heads, dim))
        calls.append(self._write_cache(2 * kv_heads * dim))
        shared_by = heads // kv_heads  # heads of queries that read the same keys
        calls.append(self._flash(shared_by, kv_heads, dim, dim))
        calls += caller.linear("out", self.rows, width, self.decoder.hidden)
        return calls

    def _flash(self, shared_by: int, kv_heads: int, dim: int, value_dim: int) -> Call:
        """Return softmax(q k^T) v over the cache; queries of a prompt see the keys before them."""
        load = self.load
        keys = (self.batch, kv_heads, load.keys, dim)
        values = (self.batch, kv_heads, load.keys, value_dim)
        queries = (self.batch, kv_heads, shared_by * load.tokens, dim)
        attributes: dict[str, object] = {
            "heads": shared_by * kv_heads,
            "kv_heads": kv_heads,
            "queries": load.tokens,
            "keys": load.keys,
        }
        if load.tokens > 1:
            attributes["causal"] = True
        work = self.caller.work(
            "flash_attention", (queries, keys, values), (self.caller.format.main,), attributes
        )
        heads = shared_by * kv_heads
        return Call(
            "attention",
            work,
            "cube",
            cache_bytes=self._cache_read(2 * kv_heads * dim),
            macs=self._attention_macs(heads, dim + value_dim),
        )

    def _attention_macs(self, heads: int, widths: int) -> float:
        """Return the multiplications of q k^T and p v, for the keys that each query sees."""
        tokens = self.load.tokens
        seen = tokens * self.load.context + tokens * (tokens + 1) / 2
        return self.batch * heads * seen * widths

    def _cache_read(self, numbers: int) -> float:
        """Return the bytes of pages that a decode step reads; a prefill has just written them."""
        if self.load.phase == "prefill":
            return 0.0
        pages = self.batch * pages_of(self.load.keys)
        return float(pages * PAGE_TOKENS * numbers * WIDE_BYTES)

    def _rotary(self, heads: int, kv_heads: int, dim: int) -> Call:
        """Return the kernel that turns pairs of queries and keys by their positions."""
        shapes = ((self.rows, heads, dim), (self.rows, kv_heads, dim))
        return self.caller.call("rotary", ROTARY, *shapes)

    def _write_cache(self, numbers: int) -> Call:
        """Return the kernel that scatters new keys and values to their places in the pages."""
        main = self.caller.format.main
        pages = self.batch * pages_of(self.load.keys)
        table = (pages * PAGE_TOKENS, numbers)
        shapes = (table, (self.rows,), (self.rows, numbers))
        return Call(
            "cache.write", self.caller.work("scatter_update", shapes, (main, "int32", main))
        )

    def _latent_queries(self, attention: LatentAttention) -> list[Call]:
        """Return the projections from a token to its queries and to its latent vector."""
        caller = self.caller
        hidden = self.decoder.hidden
        width = self.shard.heads * (attention.nope_dim + attention.rope_dim)
        calls: list[Call] = []
        if attention.q_rank:
            calls += caller.linear("q.down", self.rows, hidden, attention.q_rank)
            shape = (self.rows, attention.q_rank)
            calls.append(caller.call("q.norm", "rms_norm", shape, shape[1:]))
            calls += caller.linear("q.up", self.rows, attention.q_rank, width)
        else:
            calls += caller.linear("q", self.rows, hidden, width)
        latent_width = attention.kv_rank + attention.rope_dim
        calls += caller.linear("kv.down", self.rows, hidden, latent_width)
        shape = (self.rows, attention.kv_rank)
        calls.append(caller.call("kv.norm", "rms_norm", shape, shape[1:]))
        calls.append(self._rotary(self.shard.heads, 1, attention.rope_dim))
        calls.append(self._write_cache(latent_width))
        return calls

    def _latent_decode(self, attention: LatentAttention) -> list[Call]:
        """Return attention on latent vectors: the projection of keys is applied to queries.

        The scores are (q W_k) c instead of q (W_k c), so that the cache is read as it lies.
        """
        caller = self.caller
        heads = self.shard.heads
        rank = attention.kv_rank
        calls = self._latent_queries(attention)
        calls.append(self._per_head("q.absorb", attention.nope_dim, rank))
        queries = self.load.tokens
        keys = self.load.keys
        shapes = (
            (self.batch, queries, heads, rank),
            (self.batch, queries, heads, attention.rope_dim),
            (self.batch, keys, 1, rank),
            (self.batch, keys, 1, attention.rope_dim),
            (self.batch, keys, 1, rank),
        )
        attributes: dict[str, object] = {"layout": "BSND"}
        if queries > 1:
            attributes["causal"] = True
        work = caller.work("mla", shapes, (caller.format.main,), attributes)
        cache_bytes = self._cache_read(attention.cached_numbers)
        macs = self._attention_macs(heads, attention.cached_numbers + rank)
        calls.append(Call("attention", work, "cube", cache_bytes=cache_bytes, macs=macs))
        calls.append(self._per_head("v.up", rank, attention.value_dim))
        width = heads * attention.value_dim
        calls += caller.linear("out", self.rows, width, self.decoder.hidden)
        return calls

    def _per_head(self, name: str, depth: int, columns: int) -> Call:
        """Return a product with a matrix of its own for each head, in the main format."""
        heads = self.shard.heads
        shapes = ((heads, self.rows, depth), (heads, depth, columns))
        work = self.caller.work("batch_matmul", shapes, (self.caller.format.main,))
        weights = float(heads) * depth * columns
        weight_bytes = WIDE_BYTES * weights
        return Call(name, work, "cube", weight_bytes=weight_bytes, macs=self.rows * weights)

    def _latent_prefill(self, attention: LatentAttention) -> list[Call]:
        """Return attention of a prompt: each head's keys and values are computed in full."""
        caller = self.caller
        heads = self.shard.heads
        calls = self._latent_queries(attention)
        width = heads * (attention.nope_dim + attention.value_dim)
        calls += caller.linear("kv.up", self.rows, attention.kv_rank, width)
        dim = attention.nope_dim + attention.rope_dim
        calls.append(self._flash(1, heads, dim, attention.value_dim))
        calls += caller.linear("out", self.rows, heads * attention.value_dim, self.decoder.hidden)
        return calls

    # -- feed-forward part -------------------------------------------------------------------------
    def feed_forward(self, dense: bool) -> list[Call]:
        """Return norm and block, or norm, router, experts and the shared block."""
        hidden = self.decoder.hidden
        norm = self.caller.call("ffn.norm", "rms_norm", (self.rows, hidden), (hidden,))
        if dense or self.decoder.experts is None:
            return [norm, *self._block("ffn", self.shard.dense_width)]
        calls = [norm, *self._experts(self.decoder.experts)]
        if self.shard.shared_width:
            calls += self._block("shared", self.shard.shared_width)
        return calls

    def _block(self, name: str, width: int) -> list[Call]:
        """Return down(silu(gate x) (up x)): gate and up are one product."""
        caller = self.caller
        hidden = self.decoder.hidden
        return [
            *caller.linear(f"{name}.gate_up", self.rows, hidden, 2 * width),
            caller.call(f"{name}.swiglu", "swi_glu", (self.rows, 2 * width), axis=-1),
            *caller.linear(f"{name}.down", self.rows, width, hidden),
        ]

    def _experts(self, experts: Experts) -> list[Call]:
        """Return router, choice, the move of tokens to experts, their blocks, and the sum back."""
        caller = self.caller
        hidden = self.decoder.hidden
        router = caller.product("router", self.rows, hidden, experts.count)
        scores = caller.work("softmax", ((self.rows, experts.count),), ("fp32",))
        reached, rows = self.rows_of_experts(experts)
        moved = reached * rows
        width = self.shard.expert_width
        main = caller.format.main
        to_experts = caller.work("gather", ((self.rows, hidden), (moved,)), (main, "int32"))
        places = (self.rows * experts.chosen,)
        weights = (self.rows, experts.chosen)
        shapes = ((moved, hidden), places, (self.rows, hidden), weights)
        back = caller.work("moe_finalize_routing", shapes, (main, "int32", main, main))
        return [
            router,
            Call("choice", scores, fetches_code=True),
            Call("tokens.to", to_experts, fetches_code=True),
            *caller.grouped("experts.gate_up", reached, rows, hidden, 2 * width),
            caller.call("experts.swiglu", "swi_glu", (moved, 2 * width), axis=-1),
            *caller.grouped("experts.down", reached, rows, width, hidden),
            Call("tokens.back", back, fetches_code=True),
        ]

    def rows_of_experts(self, experts: Experts) -> tuple[int, int]:
        """Return how many experts of the device get tokens, and how many each, if all get as many.

        A tokens dealt at random to E experts reach E (1 - (1 - 1/E)^A) of them on average: the 8
        choices of one token reach 7.8 of 128 experts, those of 32 tokens 111.
        """
        tokens = self.rows * self.plan.dp  # of all groups
        assigned = max(1, round(tokens * experts.chosen / self.plan.ep))
        count = self.shard.experts
        on_average = count * (1 - (1 - 1 / count) ** assigned)
        reached = max(1, min(count, assigned, round(on_average)))
        return reached, math.ceil(assigned / reached)

    # -- the ends of the model ---------------------------------------------------------------------
    def head(self) -> list[Call]:
        """Return the last norm and the scores of all words, for tokens that need a successor."""
        hidden = self.decoder.hidden
        rows = self.rows if self.load.phase == "decode" else self.batch
        return [
            self.caller.call("head.norm", "rms_norm", (rows, hidden), (hidden,)),
            self.caller.product("head", rows, hidden, self.shard.words),
        ]

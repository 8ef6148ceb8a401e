"""Lists the kernels that one layer of a decoder starts on one device, in order.

A layer is: norm, attention, sum over the devices, norm, feed-forward part, sum over the devices.
The norm's kernel also adds to the residual stream (AddRmsNorm of CANN's library), so the list has
no kernel of its own for that. The kernels of the head follow the last layer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ascend_lab.llm.formats import WIDE_BYTES, Call, Caller, Format
from ascend_lab.llm.models import Decoder, Experts, GroupedAttention, LatentAttention
from ascend_lab.llm.plan import Load, Plan, Shard
from ascend_lab.llm.routing import GATING, INIT_ROUTING, LISTED_GROUPS, expected_largest_load

ROTARY = "rotary"
"""The operator of rotary positions: `times` simulates its kernel."""
LATENT = "mla"
"""The operator of attention on latent vectors, named as in the measured rows."""
PAGE_TOKENS = 128
"""Tokens of a page of the cache (the block size of vLLM on Ascend)."""


def group_batch(load: Load, plan: Plan) -> int:
    """Return the sequences of the fullest data-parallel group."""
    return math.ceil(load.batch / plan.dp)


def pages_of(tokens: int) -> int:
    """Return the number of pages for some tokens; the last page may be partly free."""
    # 4096 tokens take 32 pages of 128, 4097 take 33.
    return math.ceil(tokens / PAGE_TOKENS)


def latent_bytes(attention: LatentAttention, number_format: Format) -> int:
    """Return the bytes of a token in a layer's cache; the part with the position has two bytes."""
    # deepseek_v3: 512 * 2 + 64 * 2 = 1152 bytes in w8a8, 512 * 1 + 64 * 2 = 640 in w8a8c8.
    return attention.kv_rank * number_format.cache_bytes + attention.rope_dim * WIDE_BYTES


class LayerCalls:
    """The kernels that one device of a plan starts for a load."""

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
        """Return the kernels of attention in which several query heads share one head of keys."""
        caller = self.caller
        heads = self.shard.heads
        kv_heads = self.shard.kv_heads
        dim = attention.head_dim
        width = heads * dim
        # qwen3_8b on one device: (32 + 2 * 8) * 128 = 6144 columns, one product instead of three.
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
        """Return the kernel of softmax(q k^T) v; queries attend to keys up to their own."""
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

    def _attention_macs(self, heads: int, numbers_per_key: int) -> float:
        """Return the multiplications of q k^T and p v over the keys that queries attend to."""
        tokens = self.load.tokens
        # A prompt of 4 tokens: 1 + 2 + 3 + 4 = 10 keys. One new token after 4095: 4095 + 1 = 4096
        # keys; for 8 sequences, 32 heads and 128 + 128 numbers a key that is 268 million
        # multiplications.
        visible_keys = tokens * self.load.context + tokens * (tokens + 1) / 2
        return self.batch * heads * visible_keys * numbers_per_key

    def _cache_read(self, numbers: float) -> float:
        """Return the bytes of cache that a decode step reads; a prefill reads none from memory."""
        if self.load.phase == "prefill":
            return 0.0
        pages = self.batch * pages_of(self.load.keys)
        # qwen3_8b, 8 sequences of 4096 tokens: 8 * 4096 * 2 * 8 * 128 * 2 = 134 MB a layer.
        return float(pages * PAGE_TOKENS * numbers * WIDE_BYTES)

    def _rotary(self, heads: int, kv_heads: int, dim: int) -> Call:
        """Return the kernel that rotates the numbers of queries and keys by their positions."""
        shapes = ((self.rows, heads, dim), (self.rows, kv_heads, dim))
        return self.caller.call("rotary", ROTARY, *shapes)

    def _write_cache(self, numbers: int) -> Call:
        """Return the kernel that writes new keys and values to their slots in the cache."""
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
        # deepseek_v3 undivided: 128 * (128 + 64) = 24576 numbers of queries a token.
        width = self.shard.heads * (attention.nope_dim + attention.rope_dim)
        calls: list[Call] = []
        if attention.q_rank:
            calls += caller.linear("q.down", self.rows, hidden, attention.q_rank)
            q_shape = (self.rows, attention.q_rank)
            calls.append(caller.call("q.norm", "rms_norm", q_shape, q_shape[1:]))
            calls += caller.linear("q.up", self.rows, attention.q_rank, width)
        else:
            calls += caller.linear("q", self.rows, hidden, width)
        # In w8a8 the first projection has already quantised x: only the product is added.
        latent_width = attention.kv_rank + attention.rope_dim
        calls.append(caller.linear("kv.down", self.rows, hidden, latent_width)[-1])
        kv_shape = (self.rows, attention.kv_rank)
        calls.append(caller.call("kv.norm", "rms_norm", kv_shape, kv_shape[1:]))
        calls.append(self._rotary(self.shard.heads, 1, attention.rope_dim))
        calls.append(self._write_cache(latent_width))
        return calls

    def _latent_decode(self, attention: LatentAttention) -> list[Call]:
        """Return the kernels of a decode step's attention on latent vectors c.

        The scores are (q W_k) c instead of q (W_k c), so that the cache is read without expanding
        it to the keys of all heads.
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
        dtypes: tuple[str, ...] = (caller.format.main,)
        if caller.format.cache_bytes < WIDE_BYTES:
            dtypes = (caller.format.main, "int8")
        work = caller.work(LATENT, shapes, dtypes, attributes)
        numbers_bytes = latent_bytes(attention, caller.format)
        cache_bytes = self._cache_read(numbers_bytes / WIDE_BYTES)
        # deepseek_v3: q k^T multiplies 512 + 64 numbers a key, p v the 512 of the latent vector
        # again.
        macs = self._attention_macs(heads, attention.cached_numbers + rank)
        calls.append(Call("attention", work, "cube", cache_bytes=cache_bytes, macs=macs))
        calls.append(self._per_head("v.up", rank, attention.value_dim))
        width = heads * attention.value_dim
        calls += caller.linear("out", self.rows, width, self.decoder.hidden)
        return calls

    def _per_head(self, name: str, depth: int, columns: int) -> Call:
        """Return a batched product in two bytes, in which each head has its own matrix."""
        heads = self.shard.heads
        shapes = ((heads, self.rows, depth), (heads, depth, columns))
        work = self.caller.work("batch_matmul", shapes, (self.caller.format.main,))
        weights = float(heads) * depth * columns
        weight_bytes = WIDE_BYTES * weights
        return Call(name, work, "cube", weight_bytes=weight_bytes, macs=self.rows * weights)

    def _latent_prefill(self, attention: LatentAttention) -> list[Call]:
        """Return the kernels of a prompt's attention, which computes the keys of all heads."""
        caller = self.caller
        heads = self.shard.heads
        calls = self._latent_queries(attention)
        # deepseek_v3 undivided: 128 * (128 + 128) = 32,768 columns of keys and values a token.
        width = heads * (attention.nope_dim + attention.value_dim)
        calls += caller.linear("kv.up", self.rows, attention.kv_rank, width)
        dim = attention.nope_dim + attention.rope_dim
        calls.append(self._flash(1, heads, dim, attention.value_dim))
        calls += caller.linear("out", self.rows, heads * attention.value_dim, self.decoder.hidden)
        return calls

    # -- feed-forward part -------------------------------------------------------------------------
    def feed_forward(self, dense: bool) -> list[Call]:
        """Return the kernels of norm and dense block, or of norm, router, experts, shared block."""
        hidden = self.decoder.hidden
        norm = self.caller.call("ffn.norm", "rms_norm", (self.rows, hidden), (hidden,))
        if dense or self.decoder.experts is None:
            return [norm, *self._block("ffn", self.shard.dense_width)]
        calls = [norm, *self._experts(self.decoder.experts)]
        if self.shard.shared_width:
            calls += self._block("shared", self.shard.shared_width)
        return calls

    def _block(self, name: str, width: int) -> list[Call]:
        """Return the kernels of down(silu(gate x) (up x)), with gate and up as one product."""
        caller = self.caller
        hidden = self.decoder.hidden
        return [
            *caller.linear(f"{name}.gate_up", self.rows, hidden, 2 * width),
            caller.call(f"{name}.swiglu", "swi_glu", (self.rows, 2 * width), axis=-1),
            *caller.linear(f"{name}.down", self.rows, width, hidden),
        ]

    def _experts(self, experts: Experts) -> list[Call]:
        """Return the kernels of router, choice, sorting of tokens by expert, blocks, and sums.

        In int8, the activation between the two products is one kernel (DequantSwigluQuant).
        """
        caller = self.caller
        hidden = self.decoder.hidden
        reached, rows = self.rows_of_experts(experts)
        expert_rows = reached * rows
        width = self.shard.expert_width
        if caller.format.in_bytes:
            activation = caller.call(
                "experts.swiglu", "dequant_swiglu_quant", (expert_rows, 2 * width)
            )
        else:
            activation = caller.call("experts.swiglu", "swi_glu", (expert_rows, 2 * width), axis=-1)
        return [
            caller.product("router", self.rows, hidden, experts.count),
            self._expert_choice(experts),
            *self._to_experts(experts, expert_rows),
            self._with_group_list(
                caller.grouped("experts.gate_up", reached, rows, hidden, 2 * width)
            ),
            activation,
            self._with_group_list(caller.grouped("experts.down", reached, rows, width, hidden)),
            *self._from_experts(experts, expert_rows),
        ]

    def _with_group_list(self, product: Call) -> Call:
        """Return a grouped product with the length of its list: all experts of the device.

        Experts without tokens are in the list, too (see `routing.group_list_s`).
        """
        work = replace(product.work, attributes={LISTED_GROUPS: self.shard.experts})
        return replace(product, work=work)

    def _expert_choice(self, experts: Experts) -> Call:
        """Return the kernel that selects the best experts of each token and their weights."""
        shapes = ((self.rows, experts.count), (self.rows, experts.chosen))
        return Call("choice", self.caller.work(GATING, shapes, ("fp32",)), fetches_code=True)

    @property
    def uses_dispatch(self) -> bool:
        """Whether dispatch and combine kernels send tokens to experts and add up the results.

        Decoding uses them (MoeDistributeDispatch, MoeDistributeCombine); they are timed as
        collectives. A prefill uses two all-to-alls, with sorting kernels before and after them.
        Source: hicann/cann-recipes-infer, docs/models/deepseek-r1, decode and prefill.
        """
        return self.sends_tokens and self.load.phase == "decode"

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens of several groups are sent to experts on other devices."""
        return self.plan.dp > 1 and self.plan.ep > 1

    @property
    def routed_tokens(self) -> int:
        """Tokens that this device sorts by expert: a tp-th of the group's if they are sent."""
        return max(1, self.rows // self.plan.tp) if self.sends_tokens else self.rows

    def _to_experts(self, experts: Experts, expert_rows: int) -> list[Call]:
        """Return the kernels that sort tokens by expert, with one copy of a token for each choice.

        In int8 formats a token is quantised before it is copied. With several groups, received
        rows are in the order of the devices that sent them, and a second kernel sorts them.
        """
        if self.uses_dispatch:
            return []
        caller = self.caller
        hidden = self.decoder.hidden
        dtype = "int8" if caller.format.in_bytes else caller.format.main
        tokens = self.routed_tokens
        calls = []
        if caller.format.in_bytes:
            calls.append(caller.call("tokens.quantise", "dynamic_quant", (tokens, hidden)))
        copied = tokens * experts.chosen if self.sends_tokens else expert_rows
        shapes = ((tokens, hidden), (copied,))
        pairs: dict[str, object] = {"pairs": tokens * experts.chosen}
        work = caller.work(INIT_ROUTING, shapes, (dtype, "int32"), pairs)
        calls.append(Call("tokens.to", work, fetches_code=True))
        if self.sends_tokens:
            counts = (self.plan.ep, self.shard.experts)
            received = ((expert_rows, hidden), counts)
            order_work = caller.work("moe_re_routing", received, (dtype, "int32"))
            calls.append(Call("tokens.order", order_work, fetches_code=True))
        return calls

    def _from_experts(self, experts: Experts, expert_rows: int) -> list[Call]:
        """Return the kernels that bring results back into the order of tokens and add them up."""
        if self.uses_dispatch:
            return []
        caller = self.caller
        hidden = self.decoder.hidden
        main = caller.format.main
        tokens = self.routed_tokens
        calls = []
        if self.sends_tokens:
            results = ((expert_rows, hidden), (expert_rows,))
            unsort_work = caller.work("gather", results, (main, "int32"))
            calls.append(Call("tokens.unsort", unsort_work, fetches_code=True))
        copied = tokens * experts.chosen if self.sends_tokens else expert_rows
        places = (tokens * experts.chosen,)
        shapes = ((copied, hidden), places, (tokens, hidden), (tokens, experts.chosen))
        work = caller.work("moe_finalize_routing", shapes, (main, "int32", main, main))
        calls.append(Call("tokens.back", work, fetches_code=True))
        return calls

    def rows_of_experts(self, experts: Experts) -> tuple[int, int]:
        """Return the number of experts with tokens on the fullest device, and the tokens of each.

        A token that chooses k of E experts misses one with probability 1 - k/E, and T tokens all
        miss it with (1 - k/E)^T: with k = 8 and E = 128, one token reaches 8 experts and 32 tokens
        112. The fullest of several devices counts, as all others wait for it, unless the load
        states that tokens are spread evenly.
        """
        tokens = self.rows * self.plan.dp  # tokens of all groups
        devices = 1 if self.load.even else self.plan.ep
        # 128 tokens, 8 experts each, 16 devices: 1024 choices, 64 a device on average, 78 on the
        # fullest.
        choices = expected_largest_load(tokens * experts.chosen, 1 / self.plan.ep, devices)
        assigned = max(1, round(choices))
        count = self.shard.experts
        reach_probability = 1 - (1 - experts.chosen / experts.count) ** tokens
        reached = max(
            1, min(count, assigned, round(expected_largest_load(count, reach_probability, devices)))
        )
        return reached, math.ceil(assigned / reached)

    # -- the ends of the model ---------------------------------------------------------------------
    def head(self) -> list[Call]:
        """Return the kernels of the last norm and of the scores of a device's words.

        A decode step scores all new tokens, a prefill only the last token of each prompt.
        """
        hidden = self.decoder.hidden
        rows = self.rows if self.load.phase == "decode" else self.batch
        return [
            self.caller.call("head.norm", "rms_norm", (rows, hidden), (hidden,)),
            self.caller.product("head", rows, hidden, self.shard.words),
        ]

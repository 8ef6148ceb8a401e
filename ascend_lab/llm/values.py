"""Values of a decoder under a plan: every device's slices, pages and graphs, token by token.

This computes what `step` times. The devices' shapes are those of `plan.shard_of`, and what they
exchange goes through the schedules of collectives, message by message.

>>> from ascend_lab.llm.models import load_decoder
>>> decoder = load_decoder("tiny")
>>> prompts = [[5, 6, 7], [8]]
>>> alone = Runner(decoder, Plan()).generate(prompts, 3)
>>> alone == Runner(decoder, Plan(tp=2, pp=2)).generate(prompts, 3)
True
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster import execute, make
from ascend_lab.compiler import Graph, evaluate
from ascend_lab.deploy.serving.language import BlockCache
from ascend_lab.errors import InputError
from ascend_lab.llm import graphs
from ascend_lab.llm.graphs import LOWEST, Paged
from ascend_lab.llm.models import Decoder, GroupedAttention
from ascend_lab.llm.plan import Plan, Shard, shard_of

Array = NDArray[Any]
Weights = Mapping[str, Array]
ROTARY_BASE = 10000.0
"""Pair i of n turns by base^(-i / n) a token (Su et al., 2021, arXiv 2104.09864)."""
ALGORITHM = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "tree",
}


# -- weights ---------------------------------------------------------------------------------------
def weights_of(decoder: Decoder, seed: int = 0) -> dict[str, Array]:
    """Return the full tensors of a decoder; those of layer 1 are named "1.q", "1.ffn.down", ..."""
    hidden = decoder.hidden
    words = (decoder.vocabulary, hidden)
    shapes: dict[str, tuple[int, ...]] = {"embedding": words, "head": words, "norm": (hidden,)}
    for layer in range(decoder.layers):
        named = _attention_shapes(decoder) | _feed_forward_shapes(decoder, layer)
        shapes |= {f"{layer}.{name}": shape for name, shape in named.items()}
    tensors = {name: _seeded(name, shape, seed) for name, shape in shapes.items()}
    if decoder.tied:
        tensors["head"] = tensors["embedding"]
    return tensors


def _seeded(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return a tensor of its own seed; a norm scales by about 1, a product keeps the variance."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape)
    if name.endswith("norm"):
        values = 1 + values / 10
    elif name.endswith("bias"):
        values = values / 10
    else:
        depth = shape[1] if len(shape) > 1 else shape[0]
        values = values / math.sqrt(depth)
    return values.astype(np.float32)


def _attention_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's attention; linear layers are (columns, depth)."""
    hidden = decoder.hidden
    attention = decoder.attention
    shapes: dict[str, tuple[int, ...]] = {"attention.norm": (hidden,)}
    if isinstance(attention, GroupedAttention):
        shapes["q"] = (attention.query_width, hidden)
        shapes["k"] = (attention.key_width, hidden)
        shapes["v"] = (attention.key_width, hidden)
        shapes["out"] = (hidden, attention.query_width)
        if attention.bias:
            shapes |= {f"{name}.bias": shapes[name][:1] for name in "qkv"}
        if attention.qk_norm:
            shapes |= {f"{name}.norm": (attention.head_dim,) for name in "qk"}
        return shapes
    rank = attention.kv_rank
    if attention.q_rank:
        shapes["q.down"] = (attention.q_rank, hidden)
        shapes["q.norm"] = (attention.q_rank,)
    shapes["q.up"] = (attention.query_width, attention.q_rank or hidden)
    shapes["kv.down"] = (rank + attention.rope_dim, hidden)
    shapes["kv.norm"] = (rank,)
    shapes["kv.up"] = (attention.heads * (attention.nope_dim + attention.value_dim), rank)
    shapes["out"] = (hidden, attention.value_width)
    return shapes


def _feed_forward_shapes(decoder: Decoder, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's feed-forward part; those of experts are (depth, columns)."""
    hidden = decoder.hidden
    experts = decoder.experts
    norm = {"ffn.norm": (hidden,)}
    if experts is None or layer < decoder.dense_layers:
        return norm | _block_shapes("ffn", hidden, decoder.dense_width)
    shapes: dict[str, tuple[int, ...]] = {**norm, "router": (experts.count, hidden)}
    if experts.corrected:
        shapes["router.bias"] = (experts.count,)
    shapes["experts.gate"] = (experts.count, hidden, experts.width)
    shapes["experts.up"] = (experts.count, hidden, experts.width)
    shapes["experts.down"] = (experts.count, experts.width, hidden)
    if experts.shared_width:
        shapes |= _block_shapes("shared", hidden, experts.shared_width)
    return shapes


def _block_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a SwiGLU block."""
    columns = (width, hidden)
    return {f"{name}.gate": columns, f"{name}.up": columns, f"{name}.down": (hidden, width)}


# -- slices ----------------------------------------------------------------------------------------
def _cut(tensor: Array, axis: int, size: int, part: int) -> Array:
    """Return one of the equal parts of a tensor along an axis."""
    return tensor.take(range(part * size, (part + 1) * size), axis)


class Slices:
    """The inputs of graphs that are weights, for each layer and device of a stage.

    Device d is number d mod tp of data-parallel group d // tp, and holds part d mod parts of the
    experts of set d // parts, where parts = tp dp / ep.
    """

    def __init__(self, decoder: Decoder, plan: Plan, weights: Weights) -> None:
        self.decoder = decoder
        self.plan = plan
        self.shard = shard_of(decoder, plan)
        self.weights = weights

    def attention(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of attention: whole heads, the output projection by its depth."""
        shard = self.shard
        attention = self.decoder.attention
        rank = device % self.plan.tp
        tensors = self._of_layer(layer)
        slices = {"norm": tensors["attention.norm"]}
        if isinstance(attention, GroupedAttention):
            dim = attention.head_dim
            # 4 devices, 2 heads of keys: devices 0 and 1 hold the first, 2 and 3 the second
            copies = max(1, self.plan.tp // attention.kv_heads)
            q_cut = (shard.heads * dim, rank)
            kv_cut = (shard.kv_heads * dim, rank // copies)
            cuts = {"q": q_cut, "k": kv_cut, "v": kv_cut}
            joined = [_cut(tensors[name], 0, *cut) for name, cut in cuts.items()]
            slices["qkv"] = np.concatenate(joined)
            if attention.bias:
                biases = [_cut(tensors[f"{name}.bias"], 0, *cut) for name, cut in cuts.items()]
                slices["qkv.bias"] = np.concatenate(biases)
            norms = ("q.norm", "k.norm") if attention.qk_norm else ()
            out_depth = shard.heads * dim
        else:
            query_width = shard.heads * (attention.nope_dim + attention.rope_dim)
            slices["q.up"] = _cut(tensors["q.up"], 0, query_width, rank)
            up_width = shard.heads * (attention.nope_dim + attention.value_dim)
            slices["kv.up"] = _cut(tensors["kv.up"], 0, up_width, rank)
            norms = ("kv.down", "kv.norm", *(("q.down", "q.norm") if attention.q_rank else ()))
            out_depth = shard.heads * attention.value_dim
        slices |= {name: tensors[name] for name in norms}
        slices["out"] = _cut(tensors["out"], 1, out_depth, rank)
        return slices

    def feed_forward(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of norm and dense block, or of norm, router and shared block."""
        tensors = self._of_layer(layer)
        slices = {"norm": tensors["ffn.norm"]}
        if layer < self.decoder.dense_layers:
            return slices | self._block(tensors, "ffn", self.shard.dense_width, device)
        slices |= {name: tensors[name] for name in ("router", "router.bias") if name in tensors}
        if self.shard.shared_width:
            slices |= self._block(tensors, "shared", self.shard.shared_width, device)
        return slices

    def experts(self, layer: int, device: int) -> dict[str, Array]:
        """Return the weights of a device's experts, cut along their width."""
        tensors = self._of_layer(layer)
        number, part = divmod(device, self.plan.expert_parts)
        local = {
            name: _cut(tensors[f"experts.{name}"], 0, self.shard.experts, number)
            for name in ("gate", "up", "down")
        }
        width = self.shard.expert_width
        gate_up = [_cut(local[name], 2, width, part) for name in ("gate", "up")]
        return {
            "experts.gate_up": np.concatenate(gate_up, axis=2),
            "experts.down": _cut(local["down"], 1, width, part),
        }

    def head(self, device: int) -> dict[str, Array]:
        """Return the last norm and a device's words; words that fill up the last device are 0."""
        missing = self.shard.words * self.plan.tp - self.decoder.vocabulary
        table = np.pad(self.weights["head"], ((0, missing), (0, 0)))
        words = _cut(table, 0, self.shard.words, device % self.plan.tp)
        return {"norm": self.weights["norm"], "head": words}

    def _of_layer(self, layer: int) -> dict[str, Array]:
        """Return the full tensors of a layer, without its number in their names."""
        prefix = f"{layer}."
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}

    def _block(self, tensors: Weights, name: str, width: int, device: int) -> dict[str, Array]:
        """Return the slices of a SwiGLU block: columns of gate and up, and the depth of down."""
        rank = device % self.plan.tp
        gate_up = [_cut(tensors[f"{name}.{half}"], 0, width, rank) for half in ("gate", "up")]
        down = _cut(tensors[f"{name}.down"], 1, width, rank)
        return {f"{name}.gate_up": np.concatenate(gate_up), f"{name}.down": down}


# -- what a group is asked to do -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Feed:
    """A step of one data-parallel group: its sizes, words, and where keys come from and go."""

    step: Paged
    words: Array
    positions: Array
    attention: Mapping[str, Array]
    last: Array


def feed_of(
    cache: BlockCache, new: Mapping[int, Sequence[int]], shape: tuple[int, int], phase: str
) -> Feed:
    """Return the inputs of (sequences, tokens), and make room for new tokens in the cache.

    Rows fill up where a sequence is shorter than the longest, or a group has fewer sequences than
    another. Their keys go to a page behind those of the cache, which no table of a sequence names.
    """
    size, tokens = shape
    spare = cache.blocks
    words = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    slots = np.full(shape, spare * cache.block_tokens, np.int32)
    last = np.arange(size) * tokens
    tables = []
    for row, (sequence, added) in enumerate(new.items()):
        start = cache.lengths.get(sequence, 0)
        cache.append(sequence, len(added))
        table = cache.tables[sequence]
        tables.append(table)
        for column, word in enumerate(added):
            position = start + column
            words[row, column] = word
            positions[row, column] = position
            page = table[position // cache.block_tokens]
            slots[row, column] = page * cache.block_tokens + position % cache.block_tokens
        last[row] += len(added) - 1
    table_pages = max(map(len, tables), default=1)
    step = Paged(phase, size, tokens, table_pages, cache.blocks + 1, cache.block_tokens)
    inputs = {"slots": slots.ravel()}
    # query at position p sees keys 0 .. p: those before it, and no place that is not written yet
    hidden_keys = np.arange(step.keys) > positions[:, None, :, None]
    inputs["mask"] = np.where(hidden_keys, LOWEST, 0.0)
    if phase == "decode":
        inputs["table"] = np.full((size, table_pages), spare, np.int32)
        for row, table in enumerate(tables):
            inputs["table"][row, : len(table)] = table
    return Feed(step, words.ravel(), positions.ravel(), inputs, last)


def angles(positions: Array, dim: int) -> dict[str, Array]:
    """Return cosines and sines (rows, 1, dim) of positions, one for both elements of a pair."""
    half = dim // 2
    turned = positions[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    both = np.concatenate([turned, turned], axis=1)[:, None, :]
    return {"cos": np.cos(both), "sin": np.sin(both)}


# -- the devices -----------------------------------------------------------------------------------
def _outputs(graph: Graph, *inputs: Weights) -> list[Array]:
    """Return what a device's graph computes."""
    joined: dict[str, Array] = {}
    for part in inputs:
        joined |= part
    results = evaluate(graph, joined)
    return [results[name].astype(np.float32) for name in graph.outputs]


def _exchanged(operation: str, groups: Sequence[Sequence[int]], arrays: list[Array]) -> list[Array]:
    """Return what a collective leaves on every device, flat; each group exchanges by itself."""
    results = [array.ravel() for array in arrays]
    for ranks in groups:
        schedule = make(operation, ALGORITHM[operation], len(ranks))
        left = execute(schedule, [arrays[rank].ravel() for rank in ranks])
        for rank, array in zip(ranks, left, strict=True):
            results[rank] = array
    return results


@dataclass(slots=True)
class _Streams:
    """Residual streams of a stage's devices, and the sums that the next graph adds to them."""

    residual: list[Array]
    update: list[Array]

    def of(self, device: int) -> dict[str, Array]:
        """Return a device's two inputs."""
        return {"residual": self.residual[device], "update": self.update[device]}


class Runner:
    """All devices of a plan, with their weights and pages; generates words greedily."""

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        weights: Weights | None = None,
        pages: int = 32,
        page_tokens: int = 4,
    ) -> None:
        self.decoder = decoder
        self.plan = plan
        self.shard: Shard = shard_of(decoder, plan)
        self.weights = weights_of(decoder) if weights is None else weights
        self.slices = Slices(decoder, plan, self.weights)
        self.devices = range(plan.stage_devices)
        tp = plan.tp
        parts = plan.expert_parts
        self.tensor_groups = [[*range(g * tp, (g + 1) * tp)] for g in range(plan.dp)]
        self.expert_sets = [[*range(e * parts, (e + 1) * parts)] for e in range(plan.ep)]
        self.across_sets = [[*range(p, plan.stage_devices, parts)] for p in range(parts)]
        self.caches = [BlockCache(pages, page_tokens) for _ in range(plan.dp)]
        rng = np.random.default_rng(1)
        for cache in self.caches:
            # after some hours of serving the free pages lie in any order: begin like that
            rng.shuffle(cache.free)
        attention = decoder.attention
        numbers = attention.cached_numbers
        if isinstance(attention, GroupedAttention):
            numbers = 2 * self.shard.kv_heads * attention.head_dim
        empty = np.zeros(((pages + 1) * page_tokens, numbers), np.float32)
        self.pages = [[empty for _ in self.devices] for _ in range(decoder.layers)]
        self.batch = 0

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the next `count` words of each prompt, each the one of the highest score."""
        scores = self.prefill(prompts)
        words = [scores.argmax(axis=1)]
        while len(words) < count:
            words.append(self.decode(words[-1].tolist()).argmax(axis=1))
        columns: list[list[int]] = np.stack(words, axis=1).tolist()
        return columns

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Array:
        """Return the scores (batch, vocabulary) of the words that follow prompts, read in full."""
        if self.batch:
            raise InputError("a new runner", "one that has read prompts", "make another")
        if not prompts or not all(map(len, prompts)):
            raise InputError("prompts of at least a word", "an empty one", "leave it out")
        self.batch = len(prompts)
        return self._step("prefill", prompts)

    def decode(self, words: Sequence[int]) -> Array:
        """Return the scores of the words that follow one more word of each sequence."""
        if len(words) != self.batch:
            raise InputError(
                f"a word for each of {self.batch} prompts", str(len(words)), "add them"
            )
        return self._step("decode", [[word] for word in words])

    def _step(self, phase: str, new: Sequence[Sequence[int]]) -> Array:
        """Run all layers on all devices, stage after stage; return the scores of all sequences."""
        size = math.ceil(self.batch / self.plan.dp)
        tokens = max(map(len, new))
        feeds = []
        for group, cache in enumerate(self.caches):
            numbered = dict(enumerate(new))
            mine = {n: numbered[n] for n in numbered if n // size == group}
            feeds.append(feed_of(cache, mine, (size, tokens), phase))
        streams = self._embedded(feeds)
        for layer in range(self.decoder.layers):
            if layer and layer % self.shard.layers == 0:
                streams = self._sent(streams)
            streams = self._attention(layer, feeds, streams)
            if layer < self.decoder.dense_layers:
                streams = self._dense(layer, streams)
            else:
                streams = self._mixture(layer, streams)
        return self._scores(feeds, streams)

    def _feed(self, feeds: list[Feed], device: int) -> Feed:
        """Return what the group of a device is asked to do."""
        return feeds[device // self.plan.tp]

    def _embedded(self, feeds: list[Feed]) -> _Streams:
        """Return the streams of the first stage: rows of the embedding, and nothing to add."""
        table = {"embedding": self.weights["embedding"]}
        residual = []
        for device in self.devices:
            words = self._feed(feeds, device).words
            graph = graphs.embedding_graph(self.decoder, len(words))
            residual += _outputs(graph, table, {"words": words})
        return _Streams(residual, [np.zeros_like(x) for x in residual])

    def _sent(self, streams: _Streams) -> _Streams:
        """Send each device's stream to the device of its number in the next stage."""
        received = []
        for device in self.devices:
            total = streams.residual[device] + streams.update[device]
            ends = _exchanged("broadcast", [[0, 1]], [total, np.zeros_like(total)])
            received.append(ends[1].reshape(total.shape))
        return _Streams(received, [np.zeros_like(x) for x in received])

    def _attention(self, layer: int, feeds: list[Feed], streams: _Streams) -> _Streams:
        """Run attention; the devices of a group add up what their heads give."""
        attention = self.decoder.attention
        dim = attention.head_dim if isinstance(attention, GroupedAttention) else attention.rope_dim
        residual = []
        partial = []
        for device in self.devices:
            feed = self._feed(feeds, device)
            graph = graphs.attention_graph(self.decoder, self.shard, feed.step)
            moving = {"cache": self.pages[layer][device], **streams.of(device), **feed.attention}
            moving |= angles(feed.positions, dim)
            stream, written, result = _outputs(graph, moving, self.slices.attention(layer, device))
            self.pages[layer][device] = written
            residual.append(stream)
            partial.append(result)
        return _Streams(residual, self._summed(partial))

    def _summed(self, partial: list[Array]) -> list[Array]:
        """Return the sums over the devices of each tensor-parallel group."""
        sums = _exchanged("all_reduce", self.tensor_groups, partial)
        return [x.reshape(part.shape) for x, part in zip(sums, partial, strict=True)]

    def _dense(self, layer: int, streams: _Streams) -> _Streams:
        """Run the block that all tokens pass."""
        rows = len(streams.residual[0])
        graph = graphs.dense_graph(self.decoder, self.shard, rows)
        outputs = [
            _outputs(graph, streams.of(device), self.slices.feed_forward(layer, device))
            for device in self.devices
        ]
        residual, partial = map(list, zip(*outputs, strict=True))
        return _Streams(residual, self._summed(partial))

    # -- experts -----------------------------------------------------------------------------------
    def _mixture(self, layer: int, streams: _Streams) -> _Streams:
        """Run router, experts and shared block.

        One group: each device has all tokens, and the sum over devices is one all-reduce. Several
        groups send tokens to their experts and back.
        """
        rows = len(streams.residual[0])
        graph = graphs.router_graph(self.decoder, self.shard, rows)
        residual = []
        routed = []
        shared = []
        for device in self.devices:
            weights = self.slices.feed_forward(layer, device)
            stream, x, chosen, *block = _outputs(graph, streams.of(device), weights)
            residual.append(stream)
            routed.append((x, chosen))
            shared.append(block[0] if block else np.zeros_like(x))
        if self.plan.dp > 1:
            return _Streams(residual, self._dispatched(layer, routed, shared))
        partial = []
        for device, (x, chosen) in enumerate(routed):
            number = device // self.plan.expert_parts
            mine = _cut(chosen, 1, self.shard.experts, number)
            partial.append(self._by_experts(layer, device, x, mine) + shared[device])
        return _Streams(residual, self._summed(partial))

    def _by_experts(self, layer: int, device: int, x: Array, chosen: Array) -> Array:
        """Return what a device's experts add to tokens; `chosen`: weights (tokens, its experts).

        Each expert has as many rows as the busiest one: left-over rows have weight 0.
        """
        experts = self.shard.experts
        rows = max(1, int((chosen != 0).sum(axis=0).max()))
        places = np.zeros((experts, rows), np.int32)
        weights = np.zeros((experts, rows), np.float32)
        for expert in range(experts):
            tokens = np.flatnonzero(chosen[:, expert])
            places[expert, : len(tokens)] = tokens
            weights[expert, : len(tokens)] = chosen[tokens, expert]
        graph = graphs.experts_graph(self.decoder, self.shard, len(x), experts, rows)
        moving = {"tokens": x, "places": places.ravel(), "weights": weights.reshape(-1, 1)}
        (result,) = _outputs(graph, moving, self.slices.experts(layer, device))
        return result

    def _dispatched(
        self, layer: int, routed: list[tuple[Array, Array]], shared: list[Array]
    ) -> list[Array]:
        """Send tokens of all groups to the sets of experts, and results back.

        Each device sends its share of its group's tokens. For plainness a set gets all of them,
        with weight 0 where none of its experts is chosen; a library leaves those out.

            all-to-all across sets, all-gather within a set, experts,
            reduce-scatter within a set, all-to-all back, all-gather within a group

        A group's sums of the shared block are scattered to the same shares before that.
        """
        tp, ep = self.plan.tp, self.plan.ep
        rows, hidden = routed[0][0].shape
        share = math.ceil(rows / tp)
        filled = ((0, share * tp - rows), (0, 0))
        width = hidden + self.shard.experts
        outgoing = []
        for device, (x, chosen) in enumerate(routed):
            tokens = _cut(np.pad(x, filled), 0, share, device % tp)
            weights = _cut(np.pad(chosen, filled), 0, share, device % tp)
            by_set = np.split(weights, ep, axis=1)
            outgoing.append(np.stack([np.hstack([tokens, columns]) for columns in by_set]))
        arrived = _exchanged("all_to_all", self.across_sets, outgoing)
        gathered = _exchanged("all_gather", self.expert_sets, arrived)
        partial = []
        for device, message in enumerate(gathered):
            x, chosen = np.split(message.reshape(-1, width), [hidden], axis=1)
            partial.append(self._by_experts(layer, device, x, chosen))
        sums = _exchanged("reduce_scatter", self.expert_sets, partial)
        returned = _exchanged("all_to_all", self.across_sets, sums)
        shares = [x.reshape(ep, share, hidden).sum(axis=0) for x in returned]
        if self.shard.shared_width:
            blocks = [np.pad(block, filled) for block in shared]
            sums = _exchanged("reduce_scatter", self.tensor_groups, blocks)
            shares = [x + block.reshape(x.shape) for x, block in zip(shares, sums, strict=True)]
        updates = _exchanged("all_gather", self.tensor_groups, shares)
        return [x.reshape(-1, hidden)[:rows] for x in updates]

    # -- scores ------------------------------------------------------------------------------------
    def _scores(self, feeds: list[Feed], streams: _Streams) -> Array:
        """Return the scores of all words; the devices of a group gather each other's words."""
        rows = len(streams.residual[0])
        size = len(feeds[0].last)
        graph = graphs.head_graph(self.decoder, self.shard, rows, size)
        partial = []
        for device in self.devices:
            last = {"last": self._feed(feeds, device).last}
            partial.append(_outputs(graph, streams.of(device), last, self.slices.head(device))[1])
        gathered = _exchanged("all_gather", self.tensor_groups, partial)
        scores = []
        for group in range(self.plan.dp):
            words = gathered[group * self.plan.tp].reshape(self.plan.tp, size, -1)
            scores.append(np.concatenate(list(words), axis=1)[:, : self.decoder.vocabulary])
        return np.concatenate(scores)[: self.batch]

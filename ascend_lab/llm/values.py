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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.cluster import execute, make
from ascend_lab.compiler import Graph, evaluate
from ascend_lab.deploy.serving.paged_cache import BlockCache
from ascend_lab.errors import InputError
from ascend_lab.llm import graphs
from ascend_lab.llm.graphs import LOWEST, Paged
from ascend_lab.llm.models import Decoder, GroupedAttention
from ascend_lab.llm.plan import Plan, Shard, shard_of
from ascend_lab.llm.weights import Array, Slices, Weights, slice_of, weights_of

ROTARY_BASE = 10000.0
"""Pair i of n turns by base^(-i / n) a token (Su et al., 2021, arXiv 2104.09864)."""
ALGORITHM = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "tree",
}


# -- what a group is asked to do -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Feed:
    """A step of one data-parallel group: its sizes, words, and where keys come from and go."""

    step: Paged
    words: Array
    positions: Array
    attention: Mapping[str, Array]
    last_rows: Array


def feed_of(
    cache: BlockCache, additions: Mapping[int, Sequence[int]], shape: tuple[int, int], phase: str
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
    last_rows = np.arange(size) * tokens
    tables = []
    for row, (sequence, added) in enumerate(additions.items()):
        start = cache.lengths.get(sequence, 0)
        cache.append(sequence, len(added))
        table = cache.tables[sequence]
        tables.append(table)
        for column, word in enumerate(added):
            position = start + column
            words[row, column] = word
            positions[row, column] = position
            # Pages of 4 tokens, position 5: page 1 of the table, place 1 in it.
            page = table[position // cache.block_tokens]
            slots[row, column] = page * cache.block_tokens + position % cache.block_tokens
        last_rows[row] += len(added) - 1
    table_pages = max(map(len, tables), default=1)
    step = Paged(phase, size, tokens, table_pages, cache.blocks + 1, cache.block_tokens)
    inputs = {"slots": slots.ravel()}
    # query at position p sees keys 0 .. p: those before it, and no place that is not written yet
    # positions (2, 3) at keys 0 .. 7: the first query sees keys 0 .. 2, the second 0 .. 3.
    hidden_keys = np.arange(step.keys) > positions[:, None, :, None]
    inputs["mask"] = np.where(hidden_keys, LOWEST, 0.0)
    if phase == "decode":
        inputs["table"] = np.full((size, table_pages), spare, np.int32)
        for row, table in enumerate(tables):
            inputs["table"][row, : len(table)] = table
    return Feed(step, words.ravel(), positions.ravel(), inputs, last_rows)


def angles(positions: Array, dim: int) -> dict[str, Array]:
    """Return cosines and sines (rows, 1, dim) of positions, one for both elements of a pair."""
    # dim 4: pair 0 (elements 0 and 2) turns by 1 a token, pair 1 (elements 1 and 3) by 10000^(-1/2)
    # = 0.01.
    half = dim // 2
    turned = positions[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    doubled = np.concatenate([turned, turned], axis=1)[:, None, :]
    return {"cos": np.cos(doubled), "sin": np.sin(doubled)}


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
        exchanged = execute(schedule, [arrays[rank].ravel() for rank in ranks])
        for rank, array in zip(ranks, exchanged, strict=True):
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
        # tp 2, dp 2, ep 2: tensor groups [0, 1], [2, 3]; expert sets [0, 1], [2, 3]; and across the
        # sets, for each part of an expert, [0, 2] and [1, 3].
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

    def _step(self, phase: str, additions: Sequence[Sequence[int]]) -> Array:
        """Run all layers on all devices, stage after stage; return the scores of all sequences."""
        words = [word for sequence in additions for word in sequence]
        if not 0 <= min(words) <= max(words) < self.decoder.vocabulary:
            needed = f"words from 0 to {self.decoder.vocabulary - 1}"
            raise InputError(needed, f"{min(words)} to {max(words)}", "mend them")
        # sequences 0, 1 go to group 0 and 2 to group 1 if three are dealt to two groups
        size = math.ceil(self.batch / self.plan.dp)
        tokens = max(map(len, additions))
        feeds = []
        for group, cache in enumerate(self.caches):
            numbered = dict(enumerate(additions))
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
            # tp 4, ep 2: experts are cut in 2, devices 0 and 1 hold set 0, devices 2 and 3 set 1.
            number = device // self.plan.expert_parts
            mine = slice_of(chosen, 1, self.shard.experts, number)
            partial.append(self._by_experts(layer, device, x, mine) + shared[device])
        return _Streams(residual, self._summed(partial))

    def _by_experts(self, layer: int, device: int, x: Array, chosen: Array) -> Array:
        """Return what a device's experts add to tokens; `chosen`: weights (tokens, its experts).

        Each expert has as many rows as the busiest one: left-over rows have weight 0.
        """
        experts = self.shard.experts
        rows = max(1, int((chosen != 0).sum(axis=0).max()))
        # 2 experts with 3 tokens and 1: (2, 3) places, of which the second has two left over.
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
        tp = self.plan.tp
        ep = self.plan.ep
        rows, hidden = routed[0][0].shape
        # 5 rows on tp 2: shares of 3, the last one filled up by a row of zeros.
        share = math.ceil(rows / tp)
        filled = ((0, share * tp - rows), (0, 0))
        # A message's row is a token (hidden numbers) and its weights for the experts of the
        # receiving set.
        width = hidden + self.shard.experts
        outgoing = []
        for device, (x, chosen) in enumerate(routed):
            tokens = slice_of(np.pad(x, filled), 0, share, device % tp)
            weights = slice_of(np.pad(chosen, filled), 0, share, device % tp)
            # 4 experts in 2 sets: columns 0, 1 go to set 0 and 2, 3 to set 1.
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
        size = len(feeds[0].last_rows)
        graph = graphs.head_graph(self.decoder, self.shard, rows, size)
        partial = []
        for device in self.devices:
            scored = {"last": self._feed(feeds, device).last_rows}
            partial.append(_outputs(graph, streams.of(device), scored, self.slices.head(device))[1])
        gathered = _exchanged("all_gather", self.tensor_groups, partial)
        scores = []
        for group in range(self.plan.dp):
            words = gathered[group * self.plan.tp].reshape(self.plan.tp, size, -1)
            scores.append(np.concatenate(list(words), axis=1)[:, : self.decoder.vocabulary])
        return np.concatenate(scores)[: self.batch]

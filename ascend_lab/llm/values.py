"""Generates the words of a decoder that is divided among devices by a plan.

A word here is a token's number in the vocabulary, as a tokenizer gives it.
`step` gives the time of a step, this module its values: it evaluates the graphs of every device on
that device's slices of the weights and its pages of the cache. Devices exchange their results by
the schedules of `cluster`, message by message. Every plan generates the same words:

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
"""Pair i of n rotates by base^(-i / n) per token (Su et al., 2021, arXiv 2104.09864)."""
COLLECTIVE_ALGORITHMS = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "tree",
}


# -- inputs of a step ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Feed:
    """The inputs of a step of one data-parallel group.

    `words` and `positions` have one entry for each new token, `attention` has the inputs of the
    attention graph (slots, mask, block table), and `last_rows` are the rows of the last tokens.
    """

    step: Paged
    words: Array
    positions: Array
    attention: Mapping[str, Array]
    last_rows: Array


def feed_of(
    cache: BlockCache, additions: Mapping[int, Sequence[int]], shape: tuple[int, int], phase: str
) -> Feed:
    """Return the inputs of a step of shape (sequences, tokens), and reserve slots for new tokens.

    `additions` maps a sequence's number to its new words. The rows of shorter sequences and of
    missing sequences are padded; the keys of padding go to a spare page after those of the cache.
    """
    size, tokens = shape
    spare_page = cache.blocks
    words = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    slots = np.full(shape, spare_page * cache.block_tokens, np.int32)
    last_rows = np.arange(size) * tokens
    tables = []  # the pages of each sequence, in the order of the rows
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
    # A query at position p attends to keys 0 .. p. With positions (2, 3) and keys 0 .. 7, the first
    # query attends to keys 0 .. 2 and the second to keys 0 .. 3.
    hidden_keys = np.arange(step.keys) > positions[:, None, :, None]
    inputs["mask"] = np.where(hidden_keys, LOWEST, 0.0)
    if phase == "decode":
        inputs["table"] = np.full((size, table_pages), spare_page, np.int32)
        for row, pages in enumerate(tables):
            inputs["table"][row, : len(pages)] = pages
    return Feed(step, words.ravel(), positions.ravel(), inputs, last_rows)


def angles(positions: Array, dim: int) -> dict[str, Array]:
    """Return the cosines and sines (rows, 1, dim) of rotary positions.

    Elements i and i + dim / 2 are a pair and have the same angle.
    """
    # dim 4: pair 0 (elements 0 and 2) rotates by 1 per token, pair 1 (elements 1 and 3) by
    # 10000^(-1/2) = 0.01.
    half = dim // 2
    angle = positions[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    pair_angles = np.concatenate([angle, angle], axis=1)[:, None, :]
    return {"cos": np.cos(pair_angles), "sin": np.sin(pair_angles)}


# -- the devices -----------------------------------------------------------------------------------
def _outputs(graph: Graph, *inputs: Weights) -> list[Array]:
    """Return the outputs of a device's graph, in fp32."""
    named_inputs: dict[str, Array] = {}
    for tensors in inputs:
        named_inputs |= tensors
    results = evaluate(graph, named_inputs)
    return [results[name].astype(np.float32) for name in graph.outputs]


def _exchange(operation: str, groups: Sequence[Sequence[int]], arrays: list[Array]) -> list[Array]:
    """Return the result of a collective within each group, as a flat array for each device."""
    results = [array.ravel() for array in arrays]
    for ranks in groups:
        schedule = make(operation, COLLECTIVE_ALGORITHMS[operation], len(ranks))
        exchanged = execute(schedule, [arrays[rank].ravel() for rank in ranks])
        for rank, array in zip(ranks, exchanged, strict=True):
            results[rank] = array
    return results


@dataclass(slots=True)
class _Streams:
    """The residual streams of a stage's devices, and the sums that the next graph adds to them."""

    residual: list[Array]
    update: list[Array]

    def of(self, device: int) -> dict[str, Array]:
        """Return these two inputs of a device's graph."""
        return {"residual": self.residual[device], "update": self.update[device]}


def _consecutive(groups: int, size: int) -> list[list[int]]:
    """Return groups of consecutive devices: 2 groups of size 3 are [0, 1, 2] and [3, 4, 5]."""
    return [[*range(group * size, (group + 1) * size)] for group in range(groups)]


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
        parts = plan.expert_parts
        self.tensor_groups = _consecutive(plan.dp, plan.tp)
        self.expert_sets = _consecutive(plan.ep, parts)
        self.across_sets = [[*range(part, plan.stage_devices, parts)] for part in range(parts)]
        self.caches = [BlockCache(pages, page_tokens) for _ in range(plan.dp)]
        rng = np.random.default_rng(1)
        for cache in self.caches:
            # The free pages of a server that has run for hours are in arbitrary order.
            rng.shuffle(cache.free)
        attention = decoder.attention
        if isinstance(attention, GroupedAttention):
            numbers = 2 * self.shard.kv_heads * attention.head_dim
        else:
            numbers = attention.cached_numbers
        # One page more than the cache has: the spare page takes the keys of padding.
        empty = np.zeros(((pages + 1) * page_tokens, numbers), np.float32)
        # self.cached[layer][device]: a step replaces an array and never writes into it, so all
        # may begin as the same one.
        self.cached = [[empty] * len(self.devices) for _ in range(decoder.layers)]
        self.batch = 0

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the next `count` >= 1 words of each prompt, always that of the highest score."""
        scores = self.prefill(prompts)
        words = [scores.argmax(axis=1)]
        while len(words) < count:
            words.append(self.decode(words[-1].tolist()).argmax(axis=1))
        # (sequences, count): a row for each prompt
        answers: list[list[int]] = np.stack(words, axis=1).tolist()
        return answers

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Array:
        """Return the scores (batch, vocabulary) of the words that follow whole prompts."""
        if self.batch:
            raise InputError("a new runner", "one that has read prompts", "make another")
        if not prompts or not all(map(len, prompts)):
            raise InputError("prompts of at least a word", "an empty one", "leave it out")
        self.batch = len(prompts)
        return self._step("prefill", prompts)

    def decode(self, words: Sequence[int]) -> Array:
        """Add one word to each sequence, and return the scores of the words that follow."""
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
            raise InputError(needed, f"{min(words)} to {max(words)}", "correct them")
        # 3 sequences in 2 groups: sequences 0 and 1 are in group 0, sequence 2 is in group 1.
        size = math.ceil(self.batch / self.plan.dp)
        tokens = max(map(len, additions))
        feeds = []
        for group, cache in enumerate(self.caches):
            end = min((group + 1) * size, len(additions))
            own = {sequence: additions[sequence] for sequence in range(group * size, end)}
            feeds.append(feed_of(cache, own, (size, tokens), phase))
        streams = self._embed(feeds)
        for layer in range(self.decoder.layers):
            if layer and layer % self.shard.layers == 0:
                streams = self._send_to_next_stage(streams)
            streams = self._attention(layer, feeds, streams)
            if layer < self.decoder.dense_layers:
                streams = self._dense(layer, streams)
            else:
                streams = self._mixture(layer, streams)
        return self._scores(feeds, streams)

    def _feed(self, feeds: list[Feed], device: int) -> Feed:
        """Return the inputs of a device's group."""
        return feeds[device // self.plan.tp]

    def _embed(self, feeds: list[Feed]) -> _Streams:
        """Return the streams of the first stage: the words' embeddings, with updates of 0."""
        table = {"embedding": self.weights["embedding"]}
        residual = []
        for device in self.devices:
            words = self._feed(feeds, device).words
            graph = graphs.embedding_graph(self.decoder, len(words))
            residual += _outputs(graph, table, {"words": words})
        return _Streams(residual, [np.zeros_like(x) for x in residual])

    def _send_to_next_stage(self, streams: _Streams) -> _Streams:
        """Send each device's stream to the device of its number in the next stage."""
        received = []
        for device in self.devices:
            total = streams.residual[device] + streams.update[device]
            ends = _exchange("broadcast", [[0, 1]], [total, np.zeros_like(total)])
            received.append(ends[1].reshape(total.shape))
        return _Streams(received, [np.zeros_like(x) for x in received])

    def _attention(self, layer: int, feeds: list[Feed], streams: _Streams) -> _Streams:
        """Run attention, and add up the results of all heads within each group."""
        attention = self.decoder.attention
        dim = attention.head_dim if isinstance(attention, GroupedAttention) else attention.rope_dim
        residual = []
        terms = []
        for device in self.devices:
            feed = self._feed(feeds, device)
            graph = graphs.attention_graph(self.decoder, self.shard, feed.step)
            activations = {
                "cache": self.cached[layer][device],
                **streams.of(device),
                **feed.attention,
            }
            activations |= angles(feed.positions, dim)
            stream, written, result = _outputs(
                graph, activations, self.slices.attention(layer, device)
            )
            self.cached[layer][device] = written
            residual.append(stream)
            terms.append(result)
        return _Streams(residual, self._sum_over_groups(terms))

    def _sum_over_groups(self, terms: list[Array]) -> list[Array]:
        """Return the sums over the devices of each tensor-parallel group."""
        sums = _exchange("all_reduce", self.tensor_groups, terms)
        return [x.reshape(part.shape) for x, part in zip(sums, terms, strict=True)]

    def _dense(self, layer: int, streams: _Streams) -> _Streams:
        """Run the dense feed-forward block."""
        rows = len(streams.residual[0])
        graph = graphs.dense_graph(self.decoder, self.shard, rows)
        outputs = [
            _outputs(graph, streams.of(device), self.slices.feed_forward(layer, device))
            for device in self.devices
        ]
        residual, terms = map(list, zip(*outputs, strict=True))
        return _Streams(residual, self._sum_over_groups(terms))

    # -- experts -----------------------------------------------------------------------------------
    def _mixture(self, layer: int, streams: _Streams) -> _Streams:
        """Run router, experts and shared block.

        In a single group each device has all tokens, and one all-reduce adds up the results.
        Several groups send tokens to their experts and the results back.
        """
        rows = len(streams.residual[0])
        graph = graphs.router_graph(self.decoder, self.shard, rows)
        residual = []
        routed = []
        shared = []
        for device in self.devices:
            weights = self.slices.feed_forward(layer, device)
            stream, tokens, expert_weights, *block = _outputs(graph, streams.of(device), weights)
            residual.append(stream)
            routed.append((tokens, expert_weights))
            shared.append(block[0] if block else np.zeros_like(tokens))
        if self.plan.dp > 1:
            return _Streams(residual, self._dispatch_and_combine(layer, routed, shared))
        terms = []
        for device in self.devices:
            x, chosen = routed[device]
            # tp 4, ep 2: each expert is cut in 2; devices 0 and 1 are set 0, devices 2 and 3 set 1.
            number = device // self.plan.expert_parts
            own_weights = slice_of(chosen, 1, self.shard.experts, number)
            terms.append(self._run_experts(layer, device, x, own_weights) + shared[device])
        return _Streams(residual, self._sum_over_groups(terms))

    def _run_experts(self, layer: int, device: int, x: Array, chosen: Array) -> Array:
        """Return the weighted results of a device's experts for all tokens.

        `chosen` has the weights (tokens, experts of the device). Each expert has as many rows as
        the one with most tokens: its unused rows have weight 0.
        """
        experts = self.shard.experts
        rows = max(1, int((chosen != 0).sum(axis=0).max()))
        # 2 experts with 3 tokens and 1 token: `places` is (2, 3), and expert 1 has 2 unused rows.
        places = np.zeros((experts, rows), np.int32)
        weights = np.zeros((experts, rows), np.float32)
        for expert in range(experts):
            tokens = np.flatnonzero(chosen[:, expert])
            places[expert, : len(tokens)] = tokens
            weights[expert, : len(tokens)] = chosen[tokens, expert]
        graph = graphs.experts_graph(self.decoder, self.shard, len(x), experts, rows)
        activations = {"tokens": x, "places": places.ravel(), "weights": weights.reshape(-1, 1)}
        (result,) = _outputs(graph, activations, self.slices.experts(layer, device))
        return result

    def _dispatch_and_combine(
        self, layer: int, routed: list[tuple[Array, Array]], shared: list[Array]
    ) -> list[Array]:
        """Send tokens of all groups to the sets of experts, and the results back.

        Each device sends its share of its group's tokens. For simplicity a set receives all
        tokens, with weight 0 for experts that were not chosen; a library would not send those.

            all-to-all across sets, all-gather within a set, experts,
            reduce-scatter within a set, all-to-all back, all-gather within a group

        Before the last all-gather, the results of the shared block are added to the same shares.
        """
        tp = self.plan.tp
        ep = self.plan.ep
        rows, hidden = routed[0][0].shape
        # 5 rows on tp 2: shares of 3 rows, the last one padded with a row of zeros.
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
        arrived = _exchange("all_to_all", self.across_sets, outgoing)
        gathered = _exchange("all_gather", self.expert_sets, arrived)
        terms = []
        for device, message in enumerate(gathered):
            all_tokens, own_weights = np.split(message.reshape(-1, width), [hidden], axis=1)
            terms.append(self._run_experts(layer, device, all_tokens, own_weights))
        sums = _exchange("reduce_scatter", self.expert_sets, terms)
        returned = _exchange("all_to_all", self.across_sets, sums)
        shares = [x.reshape(ep, share, hidden).sum(axis=0) for x in returned]
        if self.shard.shared_width:
            blocks = [np.pad(block, filled) for block in shared]
            block_sums = _exchange("reduce_scatter", self.tensor_groups, blocks)
            for device, block_sum in enumerate(block_sums):
                shares[device] = shares[device] + block_sum.reshape(shares[device].shape)
        updates = _exchange("all_gather", self.tensor_groups, shares)
        return [x.reshape(-1, hidden)[:rows] for x in updates]

    # -- scores ------------------------------------------------------------------------------------
    def _scores(self, feeds: list[Feed], streams: _Streams) -> Array:
        """Return the scores of all words, gathered from the devices of each group."""
        rows = len(streams.residual[0])
        size = len(feeds[0].last_rows)
        graph = graphs.head_graph(self.decoder, self.shard, rows, size)
        terms = []
        for device in self.devices:
            scored = {"last": self._feed(feeds, device).last_rows}
            terms.append(_outputs(graph, streams.of(device), scored, self.slices.head(device))[1])
        gathered = _exchange("all_gather", self.tensor_groups, terms)
        scores = []
        for group in range(self.plan.dp):
            words = gathered[group * self.plan.tp].reshape(self.plan.tp, size, -1)
            scores.append(np.concatenate(list(words), axis=1)[:, : self.decoder.vocabulary])
        return np.concatenate(scores)[: self.batch]

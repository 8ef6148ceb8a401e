"""Values of language models: each plan equals a reference in plain loops, token by token."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ascend_lab import llm
from ascend_lab.compiler import Graph, compile_graph, evaluate
from ascend_lab.compiler.counts import node_macs
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy.serving.paged_cache import BlockCache
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.llm import graphs, step, values
from ascend_lab.llm.graphs import Paged
from ascend_lab.llm.layer import PAGE_TOKENS, pages_of
from ascend_lab.llm.models import Decoder, GroupedAttention, LatentAttention
from ascend_lab.llm.plan import Load, Plan, shard_of
from ascend_lab.llm.times import KernelTimer
from ascend_lab.llm.values import Feed, Runner, angles, feed_of
from ascend_lab.llm.weights import Slices, weights_of

Array = NDArray[Any]
PROMPTS = [[5, 6, 7, 9, 11, 200], [8], [3, 77, 1]]
"""Two pages of 4 tokens, one, and one that is full after the first step."""
DECODES = 3
CLOSE = 5e-6
"""Scores are about 1, and each of some 100 nodes in a row rounds to fp32, by at most 6e-8 of it."""


# -- the reference: one token after another, no cache, no batch, fp64 ------------------------------
def normed(x: Array, scale: Array) -> Array:
    result: Array = x / math.sqrt(float(np.mean(x * x)) + 1e-5) * scale
    return result


def turned(x: Array, position: int) -> Array:
    half = len(x) // 2
    y = np.empty(len(x))
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return y


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    result: Array = e / e.sum()
    return result


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def attended(queries: list[Array], keys: list[Array], values: list[Array]) -> Array:
    """Return the result of the last token's query over all keys."""
    q = queries[-1]
    scores = np.array([q @ k / math.sqrt(len(q)) for k in keys])
    result: Array = softmax(scores) @ np.array(values)
    return result


def grouped_attention(decoder: Decoder, w: dict[str, Array], xs: list[Array]) -> list[Array]:
    a = decoder.attention
    assert isinstance(a, GroupedAttention)
    d = a.head_dim
    results = []
    queries: list[list[Array]] = [[] for _ in range(a.heads)]
    keys: list[list[Array]] = [[] for _ in range(a.kv_heads)]
    values: list[list[Array]] = [[] for _ in range(a.kv_heads)]
    for position, x in enumerate(xs):
        q, k, v = (w[n] @ x + (w[f"{n}.bias"] if a.bias else 0) for n in "qkv")
        for head in range(a.heads):
            part = q[head * d : (head + 1) * d]
            part = normed(part, w["q.norm"]) if a.qk_norm else part
            queries[head].append(turned(part, position))
        for head in range(a.kv_heads):
            part = k[head * d : (head + 1) * d]
            part = normed(part, w["k.norm"]) if a.qk_norm else part
            keys[head].append(turned(part, position))
            values[head].append(v[head * d : (head + 1) * d])
        shared_by = a.heads // a.kv_heads
        heads = [
            attended(queries[head], keys[head // shared_by], values[head // shared_by])
            for head in range(a.heads)
        ]
        results.append(w["out"] @ np.concatenate(heads))
    return results


def latent_attention(decoder: Decoder, w: dict[str, Array], xs: list[Array]) -> list[Array]:
    a = decoder.attention
    assert not isinstance(a, GroupedAttention)
    results = []
    queries: list[list[Array]] = [[] for _ in range(a.heads)]
    keys: list[list[Array]] = [[] for _ in range(a.heads)]
    values: list[list[Array]] = [[] for _ in range(a.heads)]
    width = a.nope_dim + a.rope_dim
    up_width = a.nope_dim + a.value_dim
    for position, x in enumerate(xs):
        q = w["q.up"] @ (normed(w["q.down"] @ x, w["q.norm"]) if a.q_rank else x)
        down = w["kv.down"] @ x
        up = w["kv.up"] @ normed(down[: a.kv_rank], w["kv.norm"])
        k_rope = turned(down[a.kv_rank :], position)
        heads = []
        for head in range(a.heads):
            part = q[head * width : (head + 1) * width]
            q_rope = turned(part[a.nope_dim :], position)
            queries[head].append(np.concatenate([part[: a.nope_dim], q_rope]))
            part = up[head * up_width : (head + 1) * up_width]
            keys[head].append(np.concatenate([part[: a.nope_dim], k_rope]))
            values[head].append(part[a.nope_dim :])
            heads.append(attended(queries[head], keys[head], values[head]))
        results.append(w["out"] @ np.concatenate(heads))
    return results


def block(w: dict[str, Array], name: str, x: Array) -> Array:
    result: Array = w[f"{name}.down"] @ (silu(w[f"{name}.gate"] @ x) * (w[f"{name}.up"] @ x))
    return result


def feed_forward(decoder: Decoder, w: dict[str, Array], x: Array) -> Array:
    if "router" not in w:
        return block(w, "ffn", x)
    assert decoder.experts is not None
    logits = w["router"] @ x
    scores = 1 / (1 + np.exp(-logits)) if decoder.experts.corrected else softmax(logits)
    ranked = scores + (w["router.bias"] if decoder.experts.corrected else 0)
    chosen = np.argsort(-ranked)[: decoder.experts.chosen]
    y = block(w, "shared", x) if decoder.experts.shared_width else np.zeros(len(x))
    for e in chosen:
        inner = silu(x @ w["experts.gate"][e]) * (x @ w["experts.up"][e])
        y = y + scores[e] / scores[chosen].sum() * (inner @ w["experts.down"][e])
    return y


def reference(decoder: Decoder, weights: dict[str, Array], words: list[int]) -> Array:
    """Return the scores of the word after `words`."""
    wide = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    xs = [wide["embedding"][word] for word in words]
    grouped = isinstance(decoder.attention, GroupedAttention)
    attention = grouped_attention if grouped else latent_attention
    for layer in range(decoder.layers):
        w = {n.split(".", 1)[1]: t for n, t in wide.items() if n.startswith(f"{layer}.")}
        sums = attention(decoder, w, [normed(x, w["attention.norm"]) for x in xs])
        xs = [x + y for x, y in zip(xs, sums, strict=True)]
        xs = [x + feed_forward(decoder, w, normed(x, w["ffn.norm"])) for x in xs]
    scores: Array = wide["head"] @ normed(xs[-1], wide["norm"])
    return scores


# -- every plan ------------------------------------------------------------------------------------
def decoder_of_kind(name: str) -> Decoder:
    """Return a tiny decoder; `tiny_bias` as Qwen2.5, with biases, one table and odd sizes."""
    if name != "tiny_bias":
        return llm.load_decoder(name)
    decoder = llm.load_decoder("tiny")
    assert isinstance(decoder.attention, GroupedAttention)
    attention = replace(decoder.attention, bias=True, qk_norm=False)
    return replace(decoder, name=name, attention=attention, tied=True, vocabulary=255, layers=3)


def check_against_reference(decoder: Decoder, plan: Plan) -> None:
    """Compare the scores of a prefill and of three decode steps that follow it."""
    weights = weights_of(decoder, seed=3)
    runner = Runner(decoder, plan, weights)
    sequences = [list(prompt) for prompt in PROMPTS]
    scores = runner.prefill(sequences)
    for decoded in range(DECODES + 1):
        expected = np.array([reference(decoder, weights, words) for words in sequences])
        np.testing.assert_allclose(scores, expected, rtol=0, atol=CLOSE)
        if decoded < DECODES:
            words = expected.argmax(axis=1).tolist()
            sequences = [[*s, word] for s, word in zip(sequences, words, strict=True)]
            scores = runner.decode(words)


DENSE_PLANS = [
    Plan(),
    Plan(tp=2),
    Plan(tp=4),
    Plan(pp=2),
    Plan(dp=2),
    Plan(tp=2, dp=2, pp=2),
]
SPARSE_PLANS = [
    *DENSE_PLANS,
    Plan(dp=2, ep=2),
    Plan(tp=2, ep=2),
    Plan(tp=4, ep=2),
    Plan(tp=2, dp=2, ep=2),
    Plan(tp=2, dp=2, ep=4, pp=2),
    Plan(dp=4, ep=2),
]
CASES = [
    *(("tiny", plan) for plan in DENSE_PLANS),
    *(("tiny_bias", plan) for plan in (Plan(), Plan(tp=2, pp=2))),
    *(("tiny_moe", plan) for plan in SPARSE_PLANS),
    *(("tiny_mla", plan) for plan in SPARSE_PLANS),
]


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_a_plan_equals_the_reference_token_by_token(name: str, plan: Plan) -> None:
    check_against_reference(decoder_of_kind(name), plan)


def test_queries_without_a_latent_vector_of_their_own() -> None:
    decoder = llm.load_decoder("tiny_mla")
    assert isinstance(decoder.attention, LatentAttention)
    decoder = replace(decoder, attention=replace(decoder.attention, q_rank=0))
    check_against_reference(decoder, Plan(tp=2))


def test_pages_lie_out_of_order_and_hold_what_a_sequence_has_written() -> None:
    decoder = llm.load_decoder("tiny")
    alone = Runner(decoder, Plan())
    alone.generate(PROMPTS, 4)
    table = alone.caches[0].tables[0]
    assert len(table) == 3 and table != sorted(table)
    # the last word is not read, so that 6 + 3 tokens have keys
    assert alone.caches[0].lengths == {0: 9, 1: 4, 2: 6}
    together = Runner(decoder, Plan(dp=3))
    together.generate(PROMPTS, 4)
    for layer in range(decoder.layers):
        for sequence in range(3):
            caches = (alone.caches[0], together.caches[sequence])
            pages = (alone.cached[layer][0], together.cached[layer][sequence])
            one, other = (
                np.concatenate([page.reshape(-1, 4, 64)[p] for p in cache.tables[sequence]])
                for cache, page in zip(caches, pages, strict=True)
            )
            length = alone.caches[0].lengths[sequence]
            np.testing.assert_allclose(one[:length], other[:length], rtol=0, atol=CLOSE)


def test_what_a_runner_refuses() -> None:
    runner = Runner(llm.load_decoder("tiny"), Plan(), pages=2)
    with pytest.raises(InputError, match="at least a word"):
        runner.prefill([[1], []])
    with pytest.raises(InputError, match="words from 0 to 255"):
        Runner(llm.load_decoder("tiny"), Plan()).prefill([[1, 256]])
    with pytest.raises(CapacityError, match="free blocks"):
        runner.prefill([list(range(9))])
    runner = Runner(llm.load_decoder("tiny"), Plan())
    runner.prefill([[1]])
    with pytest.raises(InputError, match="new runner"):
        runner.prefill([[1]])
    with pytest.raises(InputError, match="a word for each of 1"):
        runner.decode([1, 2])


# -- what is timed is what is computed -------------------------------------------------------------
def graphs_of_step(decoder: Decoder, plan: Plan, load: Load) -> list[tuple[Graph, int]]:
    """Return the graphs of a step on one device, and how many layers have each."""
    model = llm.Model(decoder, llm.machine_of("Ascend910B2", "", plan), plan)
    calls = model._layers(load)
    shard = shard_of(decoder, plan)
    table_pages = pages_of(load.keys)
    pages = calls.batch * table_pages
    step = Paged(load.phase, calls.batch, load.tokens, table_pages, pages, PAGE_TOKENS)
    scored = calls.rows if load.phase == "decode" else calls.batch
    found = [
        (graphs.attention_graph(decoder, shard, step), decoder.layers),
        (graphs.head_graph(decoder, shard, calls.rows, scored), 1),
    ]
    if decoder.dense_layers:
        found.append((graphs.dense_graph(decoder, shard, calls.rows), decoder.dense_layers))
    if decoder.experts is not None:
        sparse_layers = decoder.layers - decoder.dense_layers
        reached, rows = calls.rows_of_experts(decoder.experts)
        tokens = calls.rows * plan.dp
        found += [
            (graphs.router_graph(decoder, shard, calls.rows), sparse_layers),
            (graphs.experts_graph(decoder, shard, tokens, reached, rows), sparse_layers),
        ]
    return found


LOADS = [llm.decode(8, 2 * PAGE_TOKENS), llm.decode(5, 130), llm.prefill(3, 24)]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.phase}-{load.batch}")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("tiny", Plan(tp=4)),
        ("tiny_moe", Plan(tp=2, ep=2)),
        ("tiny_mla", Plan(tp=2, dp=2, ep=2)),
        ("qwen3_8b", Plan(tp=2)),
        ("qwen3_30b_a3b", Plan(tp=4, ep=2)),
        ("deepseek_v2_lite", Plan(tp=4, dp=2, ep=8)),
    ],
    ids=str,
)
def test_timed_multiplications_are_those_of_the_graphs(name: str, plan: Plan, load: Load) -> None:
    """Outside attention they are equal.

    In attention graphs multiply each query with all places of its pages, also those that the mask
    hides; the timing counts the keys that are seen. Both are equal where pages are full and each
    sequence has one query.
    """
    decoder = llm.load_decoder(name)
    timed = {"attention": 0.0, "other": 0.0}
    model = llm.Model(decoder, llm.machine_of("Ascend910B2", "", plan), plan)
    for calls, repeats in model.calls(load):
        for call in calls:
            timed["attention" if call.name == "attention" else "other"] += repeats * call.macs
    computed = {"attention": 0.0, "other": 0.0}
    for graph, repeats in graphs_of_step(decoder, plan, load):
        for node in graph.nodes:
            kind = "attention" if node.name.startswith("attention.") else "other"
            computed[kind] += repeats * node_macs(graph, node)
    assert computed["other"] == timed["other"]
    if load.phase == "decode" and load.keys % PAGE_TOKENS == 0:
        assert computed["attention"] == timed["attention"]
    else:
        assert computed["attention"] > timed["attention"]


@pytest.mark.parametrize(("name", "plan"), [case for case in CASES if case[1].pp == 1], ids=str)
def test_timed_collectives_are_those_that_move_values(
    name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step of four words has the same collectives, among as many devices.

    With one group the bytes are equal, too. Several groups send their experts all tokens in values,
    but only those that are chosen in the timing.
    """
    decoder = decoder_of_kind(name)
    moved: list[tuple[str, int, float]] = []
    timed: list[tuple[str, int, float]] = []

    def exchanged(operation: str, groups: list[list[int]], arrays: list[Array]) -> list[Array]:
        ranks = len(groups[0])
        size = arrays[0].size * (ranks if operation == "all_gather" else 1)
        moved.append((operation, ranks, 2.0 * size))
        return exchange(operation, groups, arrays)

    def collective(
        _: KernelTimer, operation: str, size_bytes: float, ranks: int
    ) -> tuple[Any, float]:
        return (operation, ranks, size_bytes), 0.0

    def add_links(_: object, entry: tuple[str, int, float], bound_s: float, count: int) -> None:
        timed.extend([entry] * count)

    runner = Runner(decoder, plan)
    runner.prefill([[1], [2], [3], [4]])
    exchange = values._exchange
    monkeypatch.setattr(values, "_exchange", exchanged)
    runner.decode([5, 6, 7, 8])
    monkeypatch.setattr(KernelTimer, "collective_seconds", collective)
    monkeypatch.setattr(step._Account, "add_links", add_links)
    model = llm.Model(decoder, llm.machine_of("Ascend910B2", "", plan), plan)
    model.time_step(llm.decode(4, 2))
    compared = 3 if plan.dp == 1 else 2
    found, expected = (
        sorted(entry[:compared] for entry in entries if entry[1] > 1) for entries in (timed, moved)
    )
    assert found == expected


# -- on a chip -------------------------------------------------------------------------------------
def attention_inputs(decoder: Decoder, feed: Feed, dim: int) -> dict[str, Array]:
    """Return a device's inputs: random tokens, random pages, and the weights of layer 0."""
    rng = np.random.default_rng(1)
    step = feed.step
    numbers = decoder.attention.cached_numbers
    stream = (step.rows, decoder.hidden)
    moving = {
        "residual": rng.standard_normal(stream),
        "update": rng.standard_normal(stream),
        "cache": rng.standard_normal((step.pages * step.page_tokens, numbers)),
    }
    weights = Slices(decoder, Plan(), weights_of(decoder)).attention(0, 0)
    return {**moving, **feed.attention, **angles(feed.positions, dim), **weights}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "tiny_mla"])
def test_graphs_of_a_prefill_and_a_decode_step_run_on_a_chip(name: str, dtype: str) -> None:
    decoder = llm.load_decoder(name)
    cache = BlockCache(8, 16)
    shard = shard_of(decoder, Plan())
    prompts = dict(enumerate(PROMPTS))
    tolerance = {"fp16": 0.02, "bf16": 0.15}[dtype]
    for phase, new, tokens in (("prefill", prompts, 6), ("decode", {0: [1], 1: [2], 2: [3]}, 1)):
        feed = feed_of(cache, new, (3, tokens), phase)
        graph = graphs.attention_graph(decoder, shard, feed.step)
        inputs = attention_inputs(decoder, feed, 16)
        expected = evaluate(graph, inputs)
        compiled = compile_graph(graph, "Ascend910B2", dtype=dtype)
        found = run_tasks(compiled, inputs, graph.outputs)
        for output in graph.outputs:
            np.testing.assert_allclose(found[output], expected[output], rtol=0.02, atol=tolerance)


def test_graphs_of_router_and_experts_run_on_a_chip() -> None:
    decoder = llm.load_decoder("tiny_mla")
    shard = shard_of(decoder, Plan())
    slices = Slices(decoder, Plan(), weights_of(decoder))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, decoder.hidden))
    router = graphs.router_graph(decoder, shard, 8)
    experts = graphs.experts_graph(decoder, shard, 8, 8, 2)
    stream = {"residual": x, "update": np.zeros_like(x)}
    moving = {"tokens": x, "places": np.arange(16) % 8, "weights": rng.random((16, 1))}
    for graph, inputs in (
        (router, stream | slices.feed_forward(1, 0)),
        (experts, moving | slices.experts(1, 0)),
    ):
        expected = evaluate(graph, inputs)
        found = run_tasks(compile_graph(graph, "Ascend910B2"), inputs, graph.outputs)
        for output in graph.outputs:
            np.testing.assert_allclose(found[output], expected[output], rtol=0.02, atol=0.02)

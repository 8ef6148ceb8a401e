"""Continuous batching and the paged cache: invariants, published sizes, processor sharing."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import evaluate
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.zoo import build
from ascend_lab.deploy.serving import interval, language as lm, model, paged_cache, theory
from ascend_lab.errors import CapacityError, InputError


# -- sizes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layers", "heads", "depth", "published"),
    [(40, 40, 128, 819_200), (32, 32, 128, 524_288), (32, 8, 128, 131_072)],
    ids=["OPT-13B", "Llama-2-7B", "Llama-3-8B"],
)
def test_a_token_takes_the_published_bytes(layers, heads, depth, published):
    """OPT-13B: 800 KB a token, 1.6 GB for 2048 (arXiv 2309.06180); the others by its rule."""
    assert paged_cache.token_bytes(layers, heads, depth) == published


def test_blocks_follow_mindies_rule():
    bytes_of_token = paged_cache.token_bytes(32, 8, 128)
    assert paged_cache.blocks_in(10 * 2**30, 128, bytes_of_token) == 640
    assert paged_cache.blocks_in(10 * 2**30, 128, bytes_of_token, cards=4) == 2560


# -- the cache ------------------------------------------------------------------------------------
@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("afd"), st.integers(0, 5), st.integers(0, 5),
                          st.integers(1, 9)), max_size=60), st.integers(1, 4))  # fmt: skip
def test_every_sequence_reads_what_it_wrote(program, block_tokens):
    """Appends, forks and drops against plain lists; the memory is written only through tables."""
    cache = paged_cache.BlockCache(12, block_tokens)
    plain = dict[int, list[int]]()
    memory = np.zeros((12, block_tokens), int)
    token = 0
    for act, one, other, number in program:
        if act == "a":
            before = (list(cache.free), {k: list(t) for k, t in cache.tables.items()})
            try:
                copied = cache.append(one, number)
            except CapacityError:
                assert before == (cache.free, cache.tables)
                continue
            if copied:
                memory[copied[1]] = memory[copied[0]]
            for _ in range(number):
                token += 1
                place = len(plain.setdefault(one, []))
                plain[one].append(token)
                block = cache.tables[one][place // block_tokens]
                assert cache.readers[block] == 1  # nobody else reads what is written
                memory[block, place % block_tokens] = token
        elif act == "f" and one in plain and other not in plain:
            cache.fork(one, other)
            plain[other] = list(plain[one])
        elif act == "d" and one in plain:
            cache.drop(one)
            del plain[one]
        entries = [block for table in cache.tables.values() for block in table]
        assert sum(cache.readers) == len(entries)
        assert len(cache.free) + len(set(entries)) == 12
        assert not set(entries) & set(cache.free)
    for one, tokens in plain.items():
        read = [memory[b, k] for b in cache.tables[one] for k in range(block_tokens)]
        assert read[: len(tokens)] == tokens
        assert len(cache.tables[one]) == paged_cache.blocks_of(len(tokens), block_tokens)


def test_a_cache_refuses_what_cannot_be():
    for blocks, tokens in ((0, 1), (1, 0)):
        with pytest.raises(InputError):
            paged_cache.BlockCache(blocks, tokens)
    cache = paged_cache.BlockCache(2, 4)
    cache.append(0)
    with pytest.raises(InputError, match="new sequence"):
        cache.fork(0, 0)


# -- the scheduler --------------------------------------------------------------------------------
def some(n, seed=0, rate=1.0, longest=40):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, n))
    return [lm.Request(t, p, o) for t, p, o in zip(times.tolist(),
            rng.integers(1, longest, n).tolist(), rng.integers(1, longest, n).tolist(),
            strict=True)]  # fmt: skip


TIME = model.StepTime(0.02, 0.0005, 0.001, 0.00001)


@settings(max_examples=100)
@given(seed=st.integers(0, 999), policy=st.sampled_from(lm.POLICIES), blocks=st.integers(20, 60),
       batch=st.integers(1, 9), budget=st.integers(1, 90))  # fmt: skip
def test_everybody_gets_all_tokens_in_the_end(seed, policy, blocks, batch, budget):
    requests = some(25, seed, 5.0)
    engine = lm.Engine(policy, blocks, 4, batch, 3, budget)
    found = lm.converse(requests, engine, TIME)
    again = sum(one.prompt for one in requests)
    for one in found.requests:
        assert one.produced == one.output
        assert one.arrival_s < one.first_s <= one.end_s
    assert found.prompt_tokens == again or (found.preemptions and found.prompt_tokens > again)
    assert policy != "static" or not found.preemptions
    assert all(0 <= share < 1 for share in found.wasted)


def test_a_preempted_request_is_read_again_with_what_it_was_given():
    """Two of 4 + 8 tokens in 5 blocks of 4: the second yields, and reads 4 + 4 tokens again."""
    found = lm.converse(
        [lm.Request(0, 4, 8), lm.Request(0, 4, 8)], lm.Engine("prefill", 5, 4, 2), TIME
    )
    assert found.preemptions == 1
    assert found.prompt_tokens == 4 + 4 + 4 + 5
    first, second = found.requests
    assert first.end_s < second.end_s


def test_one_request_takes_the_sum_of_its_steps():
    for policy in lm.POLICIES:
        found = lm.converse([lm.Request(3.0, 10, 4)], lm.Engine(policy, 8, 16), TIME)
        steps = [TIME.seconds_of(10, 0, 0), *(TIME.seconds_of(0, 1, 10 + n) for n in (1, 2, 3))]
        assert found.end_s == pytest.approx(3 + sum(steps))
    split = lm.converse(
        [lm.Request(0, 10, 4)], lm.Engine("split", 8, 16, max_prefill_tokens=4), TIME
    )
    assert split.steps == 3 + 3
    assert split.requests[0].first_s == pytest.approx(3 * 0.02 + 10 * 0.0005)


def test_static_batches_wait_for_their_longest_member():
    """Idle places of a batch: 1 - mean/max of the decoded tokens."""
    outputs = (3, 9, 5, 33)
    requests = [lm.Request(0, 2, output) for output in outputs]
    found = lm.converse(requests, lm.Engine("static", 99, 4, 4), TIME)
    decoded = np.array(outputs) - 1
    assert found.summary()["idle_places"] == pytest.approx(1 - decoded.mean() / decoded.max())


def test_all_share_a_step_as_a_processor_is_shared():
    """M/G/1-PS: E[R | x] = x / (1 - r), whatever the law of x; a token is a small slice."""
    rng = np.random.default_rng(4)
    n = 6000
    slice_s = 0.01
    r = 0.6
    sizes = rng.choice([20, 100, 400], n, p=[0.6, 0.3, 0.1])
    rate = r / (sizes.mean() * slice_s)
    times = np.cumsum(rng.exponential(1 / rate, n))
    requests = [
        lm.Request(t, 1, x + 1) for t, x in zip(times.tolist(), sizes.tolist(), strict=True)
    ]
    engine = lm.Engine("prefill", 10**6, 16, 10**6, 10**6, 10**6)
    found = lm.converse(requests, engine, model.StepTime(decode_s=slice_s))
    took_s = np.array([one.end_s - one.arrival_s for one in found.requests])
    for size in (20, 100, 400):
        measured = interval(took_s[sizes == size])
        exact = theory.shared(rate, sizes.mean() * slice_s, size * slice_s)
        assert abs(measured.mean - exact) <= measured.half + 5 * slice_s  # up to a step too late


def test_policies_differ_as_they_are_meant_to():
    def of(policy, **how):
        engine = lm.Engine(policy, 4000, 16, 32, **{"max_prefill_tokens": 512, **how})
        return lm.converse(some(400, 7, 8.0, 300), engine, TIME).summary()

    static = of("static")
    prefill = of("prefill")
    split = of("split", max_prefill_tokens=64)
    assert prefill["latency_s"]["mean"] < static["latency_s"]["mean"]
    assert split["between_tokens_s"]["p99"] < prefill["between_tokens_s"]["p99"]
    select = of("select")
    assert select["first_token_s"]["mean"] > prefill["first_token_s"]["mean"]


def test_what_can_never_fit_is_refused():
    for request, engine in (
        (lm.Request(0, 10, 10), lm.Engine(blocks=4, block_tokens=4)),
        (lm.Request(0, 0, 10), lm.Engine()),
        (lm.Request(0, 1, 1), lm.Engine("random")),
        (lm.Request(0, 1, 1), lm.Engine(max_batch=0)),
    ):
        with pytest.raises(InputError):
            lm.converse([request], engine, TIME)
    assert isinstance(lm.converse([lm.Request(0, 1, 1)], lm.Engine(), TIME), lm.Conversation)


# -- our own step times ---------------------------------------------------------------------------
def test_a_decoding_step_computes_what_the_whole_prompt_does():
    """The last row of GPT-2 on six tokens, from the caches of all six."""
    whole = build("gpt2_small", 2, 6, layers=2, vocabulary=40)
    ids = np.random.default_rng(0).integers(0, 40, (2, 6)).astype(np.int32)
    seen = evaluate_all(whole, {"input_ids": ids})
    step = model.decode_graph(2, 6, 2, 40)
    inputs = {"x": seen["embedded"][:, -1]}
    for i in range(2):
        inputs |= {f"h{i}.keys": seen[f"h{i}.attn.k.transpose"],
                   f"h{i}.values": seen[f"h{i}.attn.v.transpose"]}  # fmt: skip
    scores, *new = evaluate(step, inputs).values()
    np.testing.assert_allclose(scores, seen["logits"][:, -1], rtol=1e-4, atol=1e-5)
    keys = inputs["h0.keys"][:, :, :, -1].reshape(2, -1)
    np.testing.assert_allclose(new[0], keys, rtol=1e-4, atol=1e-5)

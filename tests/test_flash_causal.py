"""Attention of grouped, causal, wide and bf16 heads: values against NumPy, work, times."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cube_checks import run_checked
from hypothesis import example, given, strategies as st
from message_lists import assert_messages

from ascend_lab.compiler import GraphBuilder, bound_of, compile_stages
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.compiler.values import run_tasks
from ascend_lab.fused.flash_attention import flash_kernel
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel
from ascend_lab.machine.layout import address_map, pack, unpack
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import ops
from ascend_lab.operators.kernels.flash import flash_launch
from ascend_lab.operators.kernels.flash_causal import blocks_of_cores, causal_grid
from ascend_lab.operators.kernels.flash_shape import FlashShape
from ascend_lab.operators.kernels.flash_split import SplitTiling, flash_pipeline_launch
from ascend_lab.operators.ops.expressions import prepare

FLASH = ops.get("flash_attention")
B2 = load_chip("Ascend910B2")
CLOSE = {"float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Results are means of values below 5: two roundings of weights and one of the mean."""


def attended(q, k, v, mask=None, *, causal=False):
    """Attention in float64, written out query by query."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if q.ndim > 2:
        k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
        v = np.repeat(v, q.shape[-3] // v.shape[-3], axis=-3)
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask.astype(np.float64)
    queries, keys = scores.shape[-2:]
    result = np.zeros((*scores.shape[:-1], v.shape[-1]))
    for i in range(queries):
        seen = keys - queries + i + 1 if causal else keys
        weights = np.exp(scores[..., i, :seen] - scores[..., i, :seen].max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result[..., i, :] = np.einsum("...t,...te->...e", weights, v[..., :seen, :])
    return result


def drawn(*shapes, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, shape).astype(dtype) for shape in shapes]


def check(arrays, *, causal=False, chip=B2):
    ready = prepare(FLASH, *arrays, chip=chip, causal=causal)
    got = ready.fetch(run_checked(ready.kernel, ready.tensors, chip, filled=ready.tensors))[0]
    wanted = attended(*arrays, causal=causal)
    assert got.shape == wanted.shape
    assert got.dtype == arrays[0].dtype
    off = np.abs(got.astype(np.float64) - wanted).max()
    assert off < CLOSE[got.dtype.name], off


# -- values ----------------------------------------------------------------------------------------
@given(
    st.tuples(*(st.integers(1, n) for n in (3, 3, 4, 70, 60, 40, 40))),
    st.booleans(),
    st.sampled_from((np.float16, ml_dtypes.bfloat16)),
)
@example((1, 1, 1, 64, 0, 32, 32), True, np.float16)
@example((1, 2, 4, 1, 299, 64, 64), True, np.float16)
@example((2, 1, 8, 4, 296, 64, 64), True, np.float16)
@example((1, 1, 4, 200, 300, 64, 64), True, np.float16)
@example((1, 2, 1, 300, 0, 16, 16), True, np.float16)
@example((2, 1, 32, 3, 37, 32, 32), True, np.float16)
def test_any_heads_queries_and_keys(sizes, causal, dtype):
    b, groups, heads, s, more, d, e = sizes
    t = s + more
    shapes = (b, groups * heads, s, d), (b, groups, t, d), (b, groups, t, e)
    check(drawn(*shapes, dtype=dtype), causal=causal)


@pytest.mark.parametrize("shape", [(40, 70), (2, 6, 40, 70), (2, 1, 1, 70), (2, 6, 1, 70), (70,)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_grouped_heads(shape, causal):
    q, k, v = drawn((2, 6, 40, 16), (2, 2, 70, 16), (2, 2, 70, 24))
    mask = np.where(np.random.default_rng(1).random(shape) < 0.3, -10000, 0).astype(np.float16)
    mask[..., 0] = 0  # the first query sees this key alone, or with others
    check([q, k, v, mask], causal=causal)


@pytest.mark.parametrize("sizes", [(272, 16), (16, 272), (512, 512), (576, 512), (1040, 48)])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_heads(sizes, causal):
    d, e = sizes
    check(drawn((1, 90, d), (1, 200, d), (1, 200, e)), causal=causal)


def fractals(x):
    return pack(address_map("FRACTAL_NZ", x.shape), x).reshape(-1)


TILINGS = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(1, 2))


SIZES = st.tuples(*(st.integers(1, n) for n in (3, 5, 60, 80, 40)))


@given(SIZES, TILINGS, st.sampled_from((1, 3, 8)))
def test_any_causal_pipeline_is_right_and_timed_alike(sizes, cut, cores):
    chip = replace(B2, core_count=cores)
    b, heads, s, more, e = sizes
    rows = s * heads
    t = s + more - 1
    q, k, v = drawn((b, rows, 16), (b, t, 16), (b, t, e))
    shape = FlashShape(b, rows, t, 16, e, 0.25, causal=heads)
    tiling = SplitTiling(16 * cut[0], 16 * cut[1], *cut[2:])
    kernel = as_kernel(flash_pipeline_launch(shape, chip, tiling))
    given = {"q": fractals(q), "k": fractals(k), "v": fractals(v)}
    y = run_checked(kernel, given, chip, filled=given)["y"].reshape(-1)
    got = unpack(address_map("FRACTAL_NZ", (b, rows, e)), y)
    apart = q.reshape(b, s, heads, 16).transpose(0, 2, 1, 3)
    wanted = attended(apart, k[:, None], v[:, None], causal=True).transpose(0, 2, 1, 3)
    assert np.abs(got - wanted.reshape(b, rows, e)).max() < CLOSE["float16"]


# -- work and time ---------------------------------------------------------------------------------
def cycles(shape):
    return simulate_kernel(flash_kernel(shape, B2), B2).cycles


@pytest.mark.parametrize(("batch", "length"), [(1, 8192), (24, 2048), (128, 1024)])
def test_long_causal_rows_cost_about_half(batch, length):
    """Half of the tiles, and half of those on the diagonal."""
    full = FlashShape(batch, length, length, 128, 128, 0.1)
    causal = replace(full, causal=1)
    tiles = length // 256
    least = (tiles + 1) / (2 * tiles)
    assert causal.ops == full.ops * (length + 1) // (2 * length)
    assert 0.45 < cycles(causal) / cycles(full) < 1.15 * least


def test_blocks_are_dealt_so_that_cores_end_together():
    shape = FlashShape(1, 4096, 4096, 64, 64, 0.1, causal=1)
    own = blocks_of_cores(shape, 8, 4)
    starts = sorted(piece.start.const for some in own for piece in some)
    assert starts == list(range(0, 256, 8))
    work = [sum(piece.start.const + 8 for piece in some) for some in own]
    assert max(work) <= 1.02 * min(work)
    assert causal_grid(replace(shape, batch=24), 8, 24) == (24, 1, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_counts_what_queries_see(causal):
    net = GraphBuilder("bound", "fp16")
    q, k, v = (net.input(name, (24, 8, 2048, 128)) for name in "qkv")
    net.output(net.flash_attention(q, k, v, causal=causal))
    bound = bound_of(net.build(), B2)
    products = 24 * 8 * (2048 * 2049 // 2 if causal else 2048**2) * 256
    least_s = products / (16**3 * 24 * B2.clock_hz)
    assert least_s <= bound.cube < 1.01 * least_s


# -- graphs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", ["Ascend910B2", "Ascend910A"])
@pytest.mark.parametrize(
    ("q", "kv", "causal"),
    [
        ((2, 4, 32, 16), (2, 1, 48, 16), False),
        ((2, 4, 32, 16), (2, 2, 48, 16), True),
        ((2, 4, 30, 16), (2, 4, 45, 16), True),
        ((1, 4, 30, 16), (1, 1, 45, 16), True),
    ],
    ids=str,
)
def test_graphs_of_grouped_and_causal_heads(q, kv, causal, chip):
    net = GraphBuilder("heads", "fp16")
    names = (net.input("q", q), net.input("k", kv), net.input("v", kv))
    net.output(net.flash_attention(*names, causal=causal))
    arrays = drawn(q, kv, kv)
    stages = compile_stages(net.build(), load_chip(chip))
    (got,) = run_tasks(stages.compiled, dict(zip("qkv", arrays, strict=True))).values()
    assert np.abs(got - attended(*arrays, causal=causal)).max() < CLOSE["float16"]


# -- refusals --------------------------------------------------------------------------------------
def test_what_is_refused_says_what_is_needed(tmp_path):
    square = FlashShape(1, 20, 20, 16, 16, 1.0, causal=1)
    first = load_chip("Ascend910A")
    net = GraphBuilder("causal", "fp16")
    x = net.input("x", (1, 1, 20, 16))
    net.output(net.flash_attention(x, x, x, causal=True))
    arrays = drawn(*((20, 16),) * 3)
    calls = {
        "more queries than keys": lambda: FLASH.infer((20, 16), (19, 16), (19, 16), causal=True),
        "5 heads on 2": lambda: FLASH.infer((2, 5, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)),
        "more rows than keys": lambda: FlashShape(1, 20, 19, 16, 16, 1.0, causal=1),
        "one causal launch": lambda: flash_launch(square, first),
        "coupled cores": lambda: ops.run(FLASH, *arrays, chip=first, causal=True),
        "heads of 8192": lambda: flash_pipeline_launch(replace(square, width=8192), B2),
        "a file of ONNX": lambda: save_onnx(net.build(), tmp_path / "causal.onnx"),
    }
    assert_messages("cube", "test_flash_causal", calls)

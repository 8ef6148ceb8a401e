"""Chains of row kernels that `compare` times: what they compute, against NumPy, and what of them.

Every shape and number here is made up.
"""

import numpy as np
import pytest
from test_compare import one

from ascend_lab.compare.chains import CHAINS
from ascend_lab.compare.programs import Programs
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import run_compiled
from ascend_lab.errors import AscendLabError, CapacityError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import execute
from ascend_lab.operators.kernels.group_norm import TILE, GroupNorm, group_norm_launch
from ascend_lab.operators.kernels.rerouting import Rerouting, rerouting_kernel
from ascend_lab.operators.kernels.rotary import Rotary, rotary_launch
from ascend_lab.operators.ops.formats import numpy_type

B2 = load_chip("Ascend910B2")
SEEDS = range(4)


def work_of(operator, shapes, dtype="fp32", **attributes):
    return Work(operator, B2.name, tuple(shapes), None, (dtype,), attributes)


def run(work, **inputs):
    """Return the outputs of the chain's kernels on a chip, those of programs in a row."""
    made = CHAINS[work.operator](work)
    if isinstance(made, Programs):
        memory = {name: array.reshape(-1) for name, array in inputs.items()}
        for kernel in made.write(B2):
            own = {tensor.name: memory.get(tensor.name) for tensor in kernel.tensors}
            given = {name: array for name, array in own.items() if array is not None}
            memory |= execute(kernel, given, B2)
        outputs = [memory[name] for name in made.outputs]
    else:
        outputs = [*run_compiled(made, inputs, B2, dtype="").values()]
    return outputs if len(outputs) > 1 else outputs[0]


def normal(rng, shape, dtype="fp32"):
    return rng.normal(size=shape).astype({"fp32": np.float32, "fp16": np.float16}[dtype])


def close(found, wanted, dtype="fp32"):
    slack = {"fp32": 2e-5, "fp16": 1e-2}[dtype]
    np.testing.assert_allclose(np.float64(found), wanted, rtol=slack, atol=slack)


# -- values ----------------------------------------------------------------------------------------
def silu(y):
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("images", "groups", "channels", "pixels"),
    [
        (2, 3, 5, 7),
        (1, 2, 9, 16),  # several channels in a tile
        (3, 2, 5, 24),
        (50, 3, 1, 9),  # more images than cores
        (1, 1, 300, 3),  # more channels than factors in UB at once
        (1, 2, 3, 5000),
        (1, 1, 2, TILE + 13),  # a channel in two tiles
    ],
)
def test_group_norm(images, groups, channels, pixels, dtype):
    rng = np.random.default_rng(0)
    shape = (images, groups * channels, pixels)
    kinds = (shape, (shape[1],), (shape[1],))
    x, scale, bias = (rng.normal(size=s).astype(numpy_type(dtype)) for s in kinds)
    work = work_of("group_norm", kinds, dtype, groups=groups)
    found = np.float64(run(work, x=x, scale=scale, bias=bias)).reshape(shape)
    rows = np.float64(x).reshape(images, groups, -1)
    normal_rows = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2) + 1e-5)[..., None]
    factors = (np.float64(f)[:, None] for f in (scale, bias))
    y = normal_rows.reshape(shape) * next(factors) + next(factors)
    slack = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}[dtype]
    np.testing.assert_allclose(found, silu(y), rtol=slack, atol=slack)
    launch = group_norm_launch(GroupNorm(images, groups, channels, pixels, dtype), B2)
    assert sanitize(launch, B2) == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_add_rms_norm_dynamic_quant(seed, dtype):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 70, 2).tolist())
    x1, x2, gamma = (normal(rng, s, dtype) for s in (shape, shape, shape[1:]))
    work = work_of("add_rms_norm_dynamic_quant", (shape, shape, shape[1:]), dtype)
    total, scale, q = run(work, x1=x1, x2=x2, gamma=gamma)
    summed = np.float64(x1) + np.float64(x2)
    rms = np.sqrt((summed**2).mean(1, keepdims=True) + 1e-5)
    wanted = summed / rms * np.float64(gamma)
    largest = np.abs(wanted).max(1, keepdims=True)
    close(total, summed, dtype)
    close(scale, largest / 127, dtype)
    assert q.dtype == np.int8
    # A step of int8 is the scale; halves are rounded before: half a step and what fp16 loses.
    steps = 0.51 if dtype == "fp32" else 0.75
    assert np.all(np.abs(q * (largest / 127) - wanted) <= steps * largest / 127)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_cross_entropy_loss(seed, reduction):
    rng = np.random.default_rng(seed)
    rows, classes = rng.integers(2, 60, 2).tolist()
    x = normal(rng, (rows, classes))
    labels = rng.integers(0, classes, rows, dtype=np.int32)
    work = work_of("cross_entropy_loss", (x.shape, labels.shape), reduction=reduction)
    found = run(work, x=x, labels=labels)
    shifted = np.float64(x) - x.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    losses = -logs[np.arange(rows), labels]
    wanted = losses.mean() if reduction == "mean" else losses
    close(np.squeeze(found), wanted)


def turned(x, cos, sin, neighbours):
    """A pair (a, b) as the complex number a + b i, times cos + sin i."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    pairs = (np.float64(a) + 1j * np.float64(b)) * (np.float64(cos) + 1j * np.float64(sin))
    parts = (pairs.real, pairs.imag)
    return np.stack(parts, -1).reshape(x.shape) if neighbours else np.concatenate(parts, -1)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("mode", ["half", "interleaved"])
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "half"),
    [(1, 3, (2, 2), 32), (2, 50, (1, 3), 8), (3, 7, (5, 2), 40), (1, 60, (40, 8), 64)],
)
def test_apply_rotary_pos_emb(batch, length, heads, half, layout, mode, dtype):
    rng = np.random.default_rng(0)
    kind = numpy_type(dtype)
    inner = [(length, n) if layout == "BSND" else (n, length) for n in heads]
    q, k = (rng.normal(size=(batch, *axes, 2 * half)).astype(kind) for axes in inner)
    angles = rng.uniform(0, 2 * np.pi, (length, half))
    cos = np.cos(angles).astype(kind)
    sin = np.sin(angles).astype(kind)
    shapes = (q.shape, k.shape, cos.shape, sin.shape)
    work = work_of("apply_rotary_pos_emb", shapes, dtype, layout=layout, mode=mode)
    found = run(work, q=q, k=k, cos=cos, sin=sin)
    tables = (cos[:, None], sin[:, None]) if layout == "BSND" else (cos, sin)
    slack = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 2e-2}[dtype]
    for got, x in zip(found, (q, k), strict=True):
        wanted = turned(x, *tables, mode == "interleaved")
        np.testing.assert_allclose(np.float64(got).reshape(x.shape), wanted, slack, slack)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "heads", "size", "neighbours"),
    [(7, (5, 2), 22, False), (2, (300, 1), 128, False), (9, (3, 3), 48, True)],
)
def test_a_turn_of_any_heads_has_no_fault(rows, heads, size, neighbours, dtype):
    shape = Rotary(rows, heads, size, dtype, neighbours)
    launch = rotary_launch(shape, B2)
    tables = ("q", "k", "cos", "sin")
    assert sanitize(launch, B2, filled=tables) == []
    rng = np.random.default_rng(0)
    kind = numpy_type(dtype)
    q, k = (rng.normal(size=(rows, n, size)).astype(kind) for n in heads)
    half = rng.uniform(-1, 1, (2, rows, 1, size // 2)).astype(kind)
    cos, sin = (np.repeat(t, 2, -1) if neighbours else np.concatenate((t, t), -1) for t in half)
    given = {name: a.reshape(-1) for name, a in zip(tables, (q, k, cos, sin), strict=True)}
    memory = execute(launch, given, B2)
    slack = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 2e-2}[dtype]
    for name, x in (("q", q), ("k", k)):
        got = np.float64(memory[name]).reshape(x.shape)
        np.testing.assert_allclose(got, turned(x, *half, neighbours), slack, slack)


def test_a_turn_that_cannot_be_written_is_refused():
    with pytest.raises(UnsupportedError, match="whole blocks of 32 bytes"):
        rotary_launch(Rotary(4, (2, 2), 22, "fp16", neighbours=True), B2)
    with pytest.raises(CapacityError, match="of UB for a head of 20000"):
        rotary_launch(Rotary(4, (2, 2), 20000, "fp32"), B2)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("tokens", "hidden", "ranks", "experts", "dtype"),
    [
        (100, 33, 4, 4, "fp16"),
        (500, 72, 64, 3, "bf16"),  # more ranks than cores
        (5, 16, 4, 4, "int8"),  # fewer tokens than counts
        (64, 128, 4, 4, "fp32"),  # nothing left over
        (2 * 3000, 32, 2, 1, "fp16"),  # runs of several tiles
        (90, 32, 1, 8, "fp16"),  # one core
    ],
)
def test_moe_re_routing(tokens, hidden, ranks, experts, dtype, scaled):
    x = np.arange(tokens * hidden).reshape(tokens, hidden) % 97
    x = x.astype(numpy_type(dtype))
    scale = np.arange(tokens, dtype=np.float32)
    shapes = (x.shape, (ranks, experts), (tokens,))[: 2 + scaled]
    inputs = {"x": x, "scale": scale} if scaled else {"x": x}
    found = run(work_of("moe_re_routing", shapes, dtype), **inputs)
    each = tokens // (ranks * experts)
    order = np.arange(tokens)
    equal = order[: each * ranks * experts].reshape(ranks, experts, each)
    order[: equal.size] = equal.transpose(1, 0, 2).reshape(-1).copy()
    moved, moved_scale = found if scaled else (found, None)
    np.testing.assert_array_equal(moved.reshape(x.shape), x[order])
    if scaled:
        np.testing.assert_array_equal(moved_scale, scale[order])
    shape = Rerouting(tokens, hidden, ranks, experts, dtype, scaled)
    assert sanitize(rerouting_kernel(shape, B2), B2) == []


def test_a_token_beyond_ub_is_refused():
    with pytest.raises(CapacityError, match="of UB for a token"):
        rerouting_kernel(Rerouting(8, 2**20, 2, 2, "fp16"), B2)


@pytest.mark.parametrize("skips", [1, 2])
@pytest.mark.parametrize(
    ("bias", "scaled"), [(True, True), (False, True), (True, False)], ids=["all", "plain", "bias"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_moe_finalize_routing(seed, bias, scaled, skips):
    rng = np.random.default_rng(seed)
    tokens = 5 + seed
    experts = 3
    picks = int(rng.integers(1, 5))
    hidden = int(rng.integers(8, 40))
    x = normal(rng, (picks * tokens, hidden))
    places = rng.permutation(picks * tokens).astype(np.int32)
    inputs = {"x": x, "places": places}
    shapes = [x.shape, places.shape, *[(tokens, hidden)] * skips]
    wanted = np.float64(x)[places].reshape(picks, tokens, hidden)
    if bias:
        inputs["bias"] = normal(rng, (experts, hidden))
        inputs["experts"] = rng.integers(0, experts, (tokens, picks), dtype=np.int32)
        wanted = wanted + inputs["bias"][inputs["experts"].T]
        shapes.append((experts, hidden))
    if scaled:
        inputs["scales"] = normal(rng, (tokens, picks))
        wanted = wanted * inputs["scales"].T[:, :, None]
        shapes.append((tokens, picks))
    if bias:
        shapes.append((tokens, picks))
    wanted = wanted.sum(0)
    for number in range(skips):
        inputs[f"skip{number}"] = normal(rng, (tokens, hidden))
        wanted = wanted + inputs[f"skip{number}"]
    close(run(work_of("moe_finalize_routing", shapes), **inputs), wanted)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_resize_bilinear(seed, aligned, dtype):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, top) for top in (3, 4, 20, 20))
    shape = tuple(map(int, shape))
    out = tuple(rng.integers(1, 20, 2).tolist())
    x = normal(rng, shape, dtype)
    work = work_of("resize_bilinear", (shape,), dtype, output_size=out, align_corners=aligned)
    found = run(work, x=x)
    wanted = np.float64(x)
    for axis, size in zip((2, 3), out, strict=True):
        wanted = _resized(wanted, axis, size, aligned)
    close(found, wanted, dtype)


def _resized(x, axis, out, aligned):
    """Mix along one axis pixel by pixel, as the definition says it."""
    size = x.shape[axis]
    mixed = []
    for i in range(out):
        at = i * (size - 1) / (out - 1) if aligned and out > 1 else 0.0
        if not aligned:
            at = min(max((i + 0.5) * size / out - 0.5, 0.0), size - 1)
        low = int(at)
        high = min(low + 1, size - 1)
        share = at - low
        mixed.append(x.take(low, axis) * (1 - share) + x.take(high, axis) * share)
    return np.stack(mixed, axis)


@pytest.mark.parametrize("dtype", ["fp32", "int32"])
@pytest.mark.parametrize("seed", SEEDS)
def test_unsorted_segment_sum(seed, dtype):
    rng = np.random.default_rng(seed)
    segments, count, width = rng.integers(1, 40, 3).tolist()
    kind = np.float32 if dtype == "fp32" else np.int32
    u = rng.integers(-9, 9, (count, width)).astype(kind)  # sums are exact in any order
    index = rng.integers(0, segments, count, dtype=np.int32)
    shapes = ((segments, width), (count,), u.shape)
    found = run(work_of("unsorted_segment_sum", shapes, dtype, segments=segments), u=u, index=index)
    wanted = np.zeros((segments, width), kind)
    np.add.at(wanted, index, u)
    np.testing.assert_array_equal(found, wanted)


def test_sums_of_segments_write_their_zeros(tmp_path):
    said = {"operator": "scatter_add", "inputs": "512x1024;512;512x1024", "dtype": "fp32"}
    plain = one(tmp_path, **said)
    segments = one(tmp_path, attributes="segments=512", **said)
    assert segments.model_s > plain.model_s
    assert "kernels of ours" in segments.marks[-1]
    wrong = one(tmp_path, attributes="segments=100", **said)
    assert "segments equal to the first size, 512" in wrong.refused


@pytest.mark.parametrize("seed", range(12))
def test_gather_elements(seed):
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))
    axis = int(rng.integers(-rank, rank))
    shape = rng.integers(1, 12, rank).tolist()
    picks = [int(rng.integers(1, size + 1)) for size in shape]
    picks[axis] = int(rng.integers(1, 30))
    x = rng.integers(-99, 99, shape, dtype=np.int32)
    index = rng.integers(0, shape[axis], picks, dtype=np.int32)
    work = work_of("gather_elements", (x.shape, index.shape), "int32", axis=axis)
    found = run(work, x=x, index=index)
    front = x[tuple(slice(None) if d == axis % rank else slice(n) for d, n in enumerate(picks))]
    np.testing.assert_array_equal(found, np.take_along_axis(front, index, axis))


# -- rows of a table -------------------------------------------------------------------------------
CASES = {
    "group_norm": ("4x16x12x13;16;16", "fp16", "groups=4"),
    "cross_entropy_loss": ("100x511;100", "fp32;int64", "reduction=mean"),
    "add_rms_norm_dynamic_quant": ("100x511;100x511;511", "bf16", ""),
    "apply_rotary_pos_emb": ("2x31x4x64;2x31x4x64;31x32;31x32", "fp16", "layout=BSND;mode=half"),
    "moe_re_routing": ("500x72;8x4;500", "bf16;int32;fp32", ""),
    "moe_finalize_routing": ("400x64;400;100x64;100x4", "fp32;int32;fp32;fp32", ""),
    "resize_bilinear": ("1x3x40x50", "fp32", "output_size=(20,30);align_corners=False"),
    "gather": ("100x200;50x200", "int32", "axis=0"),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kernel", CASES)
def test_every_kernel_is_timed_in_every_float(tmp_path, kernel, dtype):
    inputs, formats, attributes = CASES[kernel]
    said = {"operator": "", "inputs": inputs, "attributes": attributes}
    formats = ";".join((dtype, *formats.split(";")[1:]))
    found = one(tmp_path, case=f"made/{kernel}/1", **said, dtype=formats)
    assert found.refused is None


@pytest.mark.parametrize("kernel", CASES)
def test_a_row_names_its_kernel_by_its_case(tmp_path, kernel):
    inputs, dtype, attributes = CASES[kernel]
    said = {"operator": "", "inputs": inputs, "dtype": dtype, "attributes": attributes}
    found = one(tmp_path, case=f"made/{kernel}/1", **said)
    assert found.refused is None
    assert 0 <= found.bound_s <= found.model_s
    strange = f"{attributes};colour=1".removeprefix(";")
    found = one(tmp_path, case=f"made/{kernel}/1", **{**said, "attributes": strange})
    assert "colour=1" in found.refused


def test_a_gather_of_rows_is_still_the_operator(tmp_path):
    said = {"inputs": "100x64;32", "dtype": "fp16;int32", "attributes": "axis=0"}
    found = one(tmp_path, operator="gather", **said)
    assert found.refused is None
    assert found.marks == ()  # one kernel, no chain


_ROTARY = {length: ((2, 3, 4, 8),) * 2 + ((length, 4),) * 2 for length in (3, 9)}


def test_a_transpose_of_int64_moves_its_bytes_as_pairs(tmp_path):
    said = {"operator": "transpose", "dtype": "int64"}
    wide = one(tmp_path, inputs="96x200x3", attributes="perm=(1,2,0)", **said)
    assert "int64 moved as pairs of int32" in wide.marks
    pairs = {"inputs": "96x200x3x2", "dtype": "int32", "attributes": "perm=(1,2,0,3)"}
    assert wide.model_s == one(tmp_path, operator="transpose", **pairs).model_s
    unsaid = one(tmp_path, inputs="96x200x3", **said)
    reversed_axes = one(tmp_path, inputs="96x200x3", attributes="perm=(2,1,0)", **said)
    assert unsaid.model_s == reversed_axes.model_s
    for perm in ("(1,0)", "(1,1,0)", "word"):
        row = one(tmp_path, inputs="96x200x3", attributes=f"perm={perm}", **said)
        assert "perm with each of 0..2 once" in row.refused


@pytest.mark.parametrize(
    "work",
    [
        work_of("group_norm", ((2, 6, 4, 4), (6,), (6,)), groups=4),
        work_of("group_norm", ((2, 6, 4, 4), (6,)), groups=2),
        work_of("cross_entropy_loss", ((4, 4), (4,)), reduction="sum"),
        work_of("apply_rotary_pos_emb", _ROTARY[9], layout="BSND", mode="half"),
        work_of("apply_rotary_pos_emb", _ROTARY[3], layout="TND", mode="half"),
        work_of("apply_rotary_pos_emb", _ROTARY[3], layout="BSND", mode="quarter"),
        work_of("moe_re_routing", ((2, 3, 4), (2, 2))),
        work_of("moe_finalize_routing", ((8, 4), (8,), (2, 4), (2, 4))),
        work_of("resize_bilinear", ((2, 3, 4, 8),), output_size=4, align_corners=False),
        work_of("gather_elements", ((4, 4), (4, 4)), axis=2),
        work_of("gather_elements", ((4, 4), (4, 5)), axis=0),
        work_of("unsorted_segment_sum", ((4, 4), (5,), (4, 4)), segments=4),
    ],
)  # fmt: skip
def test_what_a_chain_cannot_do_is_refused(work):
    with pytest.raises(AscendLabError):
        CHAINS[work.operator](work)

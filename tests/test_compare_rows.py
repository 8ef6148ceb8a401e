"""Chains of row kernels that `compare` times: what they compute, against NumPy, and what of them.

Every shape and number here is made up.
"""

import numpy as np
import pytest
from test_compare import one

from ascend_lab.compare.chains import CHAINS
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import run_compiled
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import load_chip

B2 = load_chip("Ascend910B2")
SEEDS = range(4)


def work_of(operator, shapes, dtype="fp32", **attributes):
    return Work(operator, B2.name, tuple(shapes), None, (dtype,), attributes)


def run(work, **inputs):
    """Return the outputs of the chain's kernels on a chip."""
    found = run_compiled(CHAINS[work.operator](work), inputs, B2, dtype="")
    outputs = [*found.values()]
    return outputs if len(outputs) > 1 else outputs[0]


def normal(rng, shape, dtype="fp32"):
    return rng.normal(size=shape).astype({"fp32": np.float32, "fp16": np.float16}[dtype])


def close(found, wanted, dtype="fp32"):
    slack = {"fp32": 2e-5, "fp16": 1e-2}[dtype]
    np.testing.assert_allclose(np.float64(found), wanted, rtol=slack, atol=slack)


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_norm(seed, dtype):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 5))
    channels = groups * int(rng.integers(1, 5))
    shape = (int(rng.integers(1, 4)), channels, *rng.integers(1, 20, 2).tolist())
    x, scale, bias = (normal(rng, s, dtype) for s in (shape, (channels,), (channels,)))
    work = work_of("group_norm", (shape, scale.shape, bias.shape), dtype, groups=groups)
    found = run(work, x=x, scale=scale, bias=bias)
    rows = np.float64(x).reshape(shape[0], groups, -1)
    centred = rows - rows.mean(2, keepdims=True)
    rows = centred / np.sqrt((centred**2).mean(2, keepdims=True) + 1e-5)
    y = rows.reshape(shape) * np.float64(scale)[:, None, None] + np.float64(bias)[:, None, None]
    wanted = y / (1 + np.exp(-y))
    close(found, wanted, dtype)


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
    x, labels = normal(rng, (rows, classes)), rng.integers(0, classes, rows, dtype=np.int32)
    work = work_of("cross_entropy_loss", (x.shape, labels.shape), reduction=reduction)
    found = run(work, x=x, labels=labels)
    shifted = np.float64(x) - x.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    losses = -logs[np.arange(rows), labels]
    wanted = losses.mean() if reduction == "mean" else losses
    close(np.squeeze(found), wanted)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("BSND", "half"), ("BNSD", "half"), ("BSND", "interleaved"), ("BNSD", "interleaved")],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_apply_rotary_pos_emb(seed, layout, mode):
    rng = np.random.default_rng(seed)
    batch, length, heads, half = (int(rng.integers(1, top)) for top in (4, 20, 6, 20))
    ends = (batch, length, heads) if layout == "BSND" else (batch, heads, length)
    q, k = (normal(rng, (*ends, 2 * half)) for _ in "qk")
    angles = rng.uniform(0, 2 * np.pi, (length, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    shapes = (q.shape, k.shape, cos.shape, sin.shape)
    work = work_of("apply_rotary_pos_emb", shapes, layout=layout, mode=mode)
    found = run(work, q=q, k=k, cos=cos, sin=sin)
    turn = np.exp(1j * angles)  # a pair (a, b) is the complex number a + b i
    turn = turn[None, :, None] if layout == "BSND" else turn[None, None]
    for got, x in zip(found, (q, k), strict=True):
        pairs = x[..., :half] + 1j * x[..., half:]
        if mode == "interleaved":
            pairs = x[..., 0::2] + 1j * x[..., 1::2]
        turned = pairs * turn
        wanted = np.concatenate((turned.real, turned.imag), -1)
        if mode == "interleaved":
            wanted = np.stack((turned.real, turned.imag), -1).reshape(x.shape)
        close(got, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_moe_re_routing(seed):
    rng = np.random.default_rng(seed)
    count, hidden = rng.integers(1, 60, 2).tolist()
    tokens, scales = normal(rng, (count, hidden), "fp16"), normal(rng, (count, 1))
    places = rng.permutation(count).astype(np.int32)
    shapes = ((count, hidden), (2, 4), (count,))
    work = Work("moe_re_routing", B2.name, shapes, None, ("fp16", "int64", "fp32"))
    moved, moved_scales = run(work, tokens=tokens, places=places, scales=scales)
    np.testing.assert_array_equal(moved, tokens[places])
    np.testing.assert_array_equal(moved_scales, scales[places])


@pytest.mark.parametrize("skips", [1, 2])
@pytest.mark.parametrize(
    ("bias", "scaled"), [(True, True), (False, True), (True, False)], ids=["all", "plain", "bias"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_moe_finalize_routing(seed, bias, scaled, skips):
    rng = np.random.default_rng(seed)
    tokens, experts = 5 + seed, 3
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
    plain, segments = one(tmp_path, **said), one(tmp_path, attributes="segments=512", **said)
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

"""Measured kernels around products: the graphs that stand for them compute what they say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_compare import one

from ascend_lab.compare.chained import ends_as_given, grouped as grouped_time
from ascend_lab.compare.chains import CHAINS, GROUPS, groups, products
from ascend_lab.compare.model import estimate
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import Graph, random_inputs
from ascend_lab.compiler.compile import Layouts, Road
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import AscendLabError, InputError, PathError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.machine.sim import DeviceMemory, execute, simulate_kernel
from ascend_lab.operators.kernels.weight_quant import WeightQuantShape, weight_quant_launch
from ascend_lab.operators.ops.grouped import grouped_kernel

B2 = load_chip("Ascend910B2")


def work(operator: str, shapes: str, dtypes: str, **attributes: object) -> Work:
    """Return the work of a row."""
    sizes = tuple(tuple(map(int, part.split("x"))) for part in shapes.split(";"))
    return Work(operator, "Ascend910B2", sizes, None, tuple(dtypes.split(";")), attributes)


def constant(graph: Graph, name: str) -> np.ndarray:
    """Return the values of the constant whose name begins so."""
    (found,) = (c for n, c in graph.constants.items() if n.startswith(name))
    return found.array().astype(np.float64)


def computed(graph: Graph) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return inputs drawn at random, and what the kernels of a graph make of them, wide."""
    inputs = random_inputs(graph)
    stages = Road(dtype="", layouts=Layouts(ends_as_given)).stages(graph, B2)
    got = run_tasks(stages.compiled, inputs, stages.laid_out.outputs)
    wide = {name: np.asarray(x).astype(np.float64) for name, x in inputs.items()}
    return wide, [np.asarray(got[n]).astype(np.float64) for n in stages.laid_out.outputs]


QUANT = [
    ("33x70;70x40;40", "int8;int8;fp32", "scale", "fp16"),
    ("33x70;70x40;1", "int8;int8;fp32", "scale", "bf16"),
    ("5x64;64x33;33;33", "int8;int8;bf16;int32", "scale+bias", "bf16"),
    ("17x64;64x48;48;17", "int8;int8;fp32;fp32", "scale+pertoken", "fp16"),
    ("17x64;64x48;48;48;17", "int8;int8;fp32;bf16;fp32", "scale+bias+pertoken", "bf16"),
    ("3x17x64;3x64x48;48", "int8;int8;fp32", "scale", "fp16"),
    ("3x5x64;64x48;48", "int8;int8;fp32", "scale", "fp16"),
]


@pytest.mark.parametrize(("shapes", "dtypes", "parts", "out"), QUANT)
def test_a_product_of_bytes_is_scaled_by_column_and_row(shapes, dtypes, parts, out):
    row = work("quant_matmul", shapes, dtypes, out_dtype=out, **{"with": parts})
    graph = products.quant_matmul(row)
    x, (got,) = computed(graph)
    sums = x["x"] @ x["w"]
    whole = "int32" in dtypes
    sums = sums + constant(graph, "bias") if whole else sums
    wanted = sums * constant(graph, "scale") * x.get("token", 1.0)
    if "bias" in parts and not whole:
        wanted = wanted + constant(graph, "bias")
    np.testing.assert_allclose(got, wanted, rtol=2.0**-7 if out == "bf16" else 2.0**-10, atol=1e-2)


def test_queries_and_keys_of_latent_attention():
    shapes = "2x3x64;64x48;48x96;4x16x32;64x40;48;32;2x3x8;2x3x8"
    graph = products.mla_prolog(work("mla_prolog", shapes, "fp16", heads=4))
    x, got = computed(graph)

    def normed(y):
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-5)

    def rotated(y):
        other = np.concatenate([-y[..., 4:], y[..., :4]], -1)
        return y * x["cosine"] + other * x["sine"]

    weights = {name: constant(graph, name) for name in ("up", "latent", "down_key")}
    short = normed(x["x"] @ graph.constants["down"].array().astype(np.float64))
    queries = (short @ weights["up"]).reshape(6, 4, 24)
    keys = x["x"] @ weights["down_key"]
    wanted = [
        np.einsum("thd,hdl->thl", queries[..., :16], weights["latent"]),
        rotated(queries[..., 16:]),
        normed(keys[:, :32]),
        rotated(keys[:, None, 32:]),
    ]
    for found, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-2, atol=2e-2)


GRADIENTS = [
    ("2x5x4x7x7;2x17x4x7x7", (1, 1, 1), (1,) * 6, (1, 1, 1)),
    ("2x16x5x8x8;2x16x3x4x4", (2, 2, 2), (1,) * 6, (1, 1, 1)),
    ("1x16x6x9x9;1x32x4x7x7", (1, 1, 1), (1,) * 6, (2, 2, 2)),
]


@pytest.mark.parametrize(("shapes", "strides", "pads", "dilations"), GRADIENTS)
def test_a_filter_gradient_is_planes_of_taps(shapes, strides, pads, dilations):
    (n, c, d, h, w), (_, k, *small) = (tuple(map(int, s.split("x"))) for s in shapes.split(";"))
    words = {"strides": strides, "pads": pads, "dilations": dilations, "filter": (k, c, 3, 3, 3)}
    graph = products.filter_gradient(work("conv_3d_backprop_filter", shapes, "fp16", **words))
    x, got = computed(graph)
    image = x["x"].reshape(d, n, c, h, w).transpose(1, 2, 0, 3, 4)
    slope = x["dy"].reshape(small[0], n, k, *small[1:]).transpose(1, 2, 0, 3, 4)
    image = np.pad(image, ((0, 0), (0, 0), *((p, p) for p in pads[::2])))
    wanted = np.zeros((k, c, 3, 3, 3))
    for tap in np.ndindex(3, 3, 3):
        cut = tuple(
            slice(t * e, t * e + s * (size - 1) + 1, s)
            for t, e, s, size in zip(tap, dilations, strides, small, strict=True)
        )
        wanted[(..., *tap)] = np.einsum("nkdhw,ncdhw->kc", slope, image[(..., *cut)])
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(np.stack(got, 2), wanted, rtol=2.0**-9, atol=scale * 2.0**-9)


# -- groups of rows --------------------------------------------------------------------------------
def fractals(layout: str, x: np.ndarray, dtype: str, c0: int | None = None) -> np.ndarray:
    """Return a matrix as it lies in memory."""
    return pack(address_map(layout, x.shape, dtype, c0=c0), x).reshape(-1)


def grouped(found: groups.Groups, beside: int, x: np.ndarray, w: np.ndarray, **columns: np.ndarray):
    """Return what the kernel makes of x and w: rows of groups, one after another."""
    shape = found.shape
    dtype = found.shape.dtype
    kernel = grouped_kernel(shape, B2, beside, found.epilogue)
    filled = np.zeros((shape.whole.m, shape.k), x.dtype)
    kept = [
        np.arange(first, first + rows)
        for (first, _), rows in zip(groups.spans(shape), shape.rows, strict=True)
    ]
    filled[np.concatenate(kept)] = x
    tensors = {"a": fractals("FRACTAL_NZ", filled, dtype)}
    tensors["b"] = np.concatenate([fractals("FRACTAL_ZN", matrix, dtype) for matrix in w])
    width = -(-shape.n // 16) * 16
    for name, numbers in columns.items():
        for group, row in enumerate(numbers):
            tensors[f"{name}{group}"] = np.pad(row, (0, width - shape.n)).astype(np.float32)
    memory = execute(
        kernel, {b.name: tensors[b.name] for b in kernel.tensors if b.name in tensors}, B2
    )
    c = np.asarray(memory["c"], np.float64).reshape(-1, shape.whole.m, 16)
    return c.transpose(1, 0, 2).reshape(shape.whole.m, -1)[np.concatenate(kept), : shape.n]


def many_groups(rows: tuple[int, ...], x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the rows of each group times its matrix."""
    parts = np.split(x.astype(np.float64), np.cumsum(rows)[:-1])
    return np.concatenate([p @ m.astype(np.float64) for p, m in zip(parts, w, strict=True)])


@pytest.mark.parametrize("beside", [1, 2, 3, 4])
def test_groups_of_rows_have_a_matrix_each(beside):
    rows = (22, 0, 17, 1, 40)
    rng = np.random.default_rng(beside)
    row = work("grouped_matmul", "80x70;5x70x40;5x40", "fp16;fp16;fp32", groups=5, rows=rows)
    found = groups.grouped_matmul(row)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((80, 70), (5, 70, 40)))
    bias = rng.standard_normal((5, 40)).astype(np.float32)
    got = grouped(found, beside, x, w, bias=bias)
    wanted = many_groups(rows, x, w) + np.repeat(bias, rows, 0)
    np.testing.assert_allclose(got, wanted, rtol=2.0**-10, atol=2.0**-6)


@pytest.mark.parametrize("beside", [1, 2])
def test_gated_groups_in_bytes(beside):
    rows = (16, 5)
    rng = np.random.default_rng(beside)
    shapes = "21x64;2x64x64;2x64;21"
    row = work("grouped_matmul_swiglu_quant", shapes, "int8;int8;fp32;fp32", groups=2, rows=rows)
    found = groups.swiglu_quant(row)
    x, w = (rng.integers(-99, 99, shape, np.int8) for shape in ((21, 64), (2, 64, 64)))
    scale = rng.uniform(1e-5, 2e-5, (2, 64)).astype(np.float32)
    sums = grouped(found, beside, x, w, scale=scale)
    wanted = many_groups(rows, x, w) * np.repeat(scale, rows, 0)
    np.testing.assert_allclose(sums, wanted, rtol=2.0**-20, atol=1e-6)
    assert found.result_graph is not None
    given, (q, step) = computed(found.result_graph)
    left, right = np.split(given["y"] * given["token"], 2, 1)
    gated = left / (1 + np.exp(-left)) * right
    np.testing.assert_allclose(step[:, 0], np.abs(gated).max(1) / 127, rtol=1e-4)
    assert np.abs(q * step - gated).max() <= 0.51 * step.max()


WEIGHTS = [
    ("1x64;64x48;48;48;48", "fp16;int8;fp16;fp16;fp16"),
    ("4x70;70x33;33;33", "bf16;int8;bf16;fp32"),
    ("17x300;300x1100;1100;1100", "fp16;int8;fp16;fp16"),
    ("300x64;64x40;1", "bf16;int8;bf16"),
    ("2x3x512;512x40;40;40;40", "bf16;int8;bf16;bf16;fp32"),
]


@pytest.mark.parametrize(("shapes", "dtypes"), WEIGHTS)
def test_weights_in_bytes_are_made_wide_while_the_cube_multiplies(shapes, dtypes):
    found = groups.weight_quant(work("weight_quant_batch_matmul", shapes, dtypes))
    shape = found.shape
    rng = np.random.default_rng(len(shapes))
    kinds = dtypes.split(";")
    assert shape.offset == (len(kinds) == 5 or kinds[3:] == ["fp16"])
    assert shape.bias == (len(kinds) == 5 or kinds[3:] == ["fp32"])
    main = numpy_type(shape.dtype)
    (_, k1, n1) = shape.fractals
    (m, k, n) = (shape.m, shape.k, shape.n)
    x = rng.standard_normal((m, k)).astype(main)
    w = rng.integers(-127, 128, (k, n), np.int8)
    columns = {
        "scale": rng.uniform(1e-3, 1e-2, n).astype(np.float16),
        "offset": rng.integers(-9, 10, n).astype(np.float16),
        "bias": rng.standard_normal(n).astype(np.float32),
    }
    wanted = w.astype(np.float64) + shape.offset * columns["offset"].astype(np.float64)
    wanted = x.astype(np.float64) @ (wanted * columns["scale"])
    wanted = wanted + shape.bias * columns["bias"]
    tensors = {name: np.pad(v, (0, n1 * 16 - n)) for name, v in columns.items()}
    tensors["x"] = fractals("FRACTAL_NZ", x, shape.dtype)
    tensors["w"] = np.pad(w, ((0, k1 * 16 - k), (0, n1 * 16 - n))).reshape(-1)
    kernel = found.kernel(B2)
    given = {b.name: tensors[b.name] for b in kernel.tensors if b.name in tensors}
    given["scale"] = given["scale"].astype(main if shape.dtype == "fp16" else np.float32)
    assert not sanitize(kernel.phases[0], B2)
    y = np.asarray(execute(kernel, given, B2)["y"], np.float64).reshape(n1, -1, 16)
    got = y.transpose(1, 0, 2).reshape(y.shape[1], -1)[:m, :n]
    # both factors are rounded to x's format: 8 bits of bf16, 11 of fp16
    ulp = 2.0**-8 if shape.dtype == "bf16" else 2.0**-11
    np.testing.assert_allclose(got, wanted, rtol=4 * ulp, atol=16 * ulp)


def test_weights_in_bytes_need_vector_cores_of_their_own():
    with pytest.raises(PathError, match="Ascend310P3"):
        weight_quant_launch(WeightQuantShape(4, 64, 64), load_chip("Ascend310P3"))
    with pytest.raises(InputError, match="fp32"):
        WeightQuantShape(4, 64, 64, "fp32")


def test_bytes_of_weights_cross_the_memory_interface_once():
    shape = WeightQuantShape(8, 4096, 8192)
    line = simulate_kernel(weight_quant_launch(shape, B2), B2, DeviceMemory.of(B2))
    (phase,) = line.phases
    read = 4096 * 8192 + 16 * 4096 * 2 + 2 * 8192
    assert phase.memory_bytes == read
    assert phase.cycles >= read / B2.device_memory.rate_bytes_per_s * B2.clock_hz
    # each weight is stored once as two bytes, in L2 only, and loaded once by the cube
    assert phase.path_bytes["UB", "GM"] == 2 * 4096 * 8192


def test_even_groups_of_a_batch_are_timed_as_grouped_and_start_as_a_mix_kernel():
    batch = work("batch_matmul", "4x32x256;4x256x512", "fp16", groups=4, trans_b=False)
    batch = replace(batch, timing="kernel")
    made = groups.as_groups(batch)
    assert (made.operator, made.shapes) == ("grouped_matmul", ((128, 256), (4, 256, 512)))
    assert groups.grouped_matmul(made).shape.rows == (32,) * 4
    alone = replace(batch, attributes={"trans_b": False})
    assert groups.as_groups(alone) is alone
    assert estimate(batch).model_s > B2.queued_launch_s + B2.mix_start_s
    assert estimate(alone).model_s < B2.queued_launch_s + B2.mix_start_s
    with pytest.raises(InputError, match="grouped_matmul"):
        groups.as_groups(replace(batch, shapes=((32, 256), (256, 512))))


def test_groups_in_rows_of_no_whole_blocks_are_converted_in_their_launch():
    def row(k, n, **more):
        sides = f"{n}x{k}" if more else f"{k}x{n}"
        words = {"groups": 2, "rows": (16, 33), **more}
        made = work("grouped_matmul", f"49x{k};2x{sides}", "bf16", **words)
        return replace(made, timing="kernel")

    whole = row(512, 512)
    ragged = row(511, 511)
    assert groups.grouped_matmul(whole).operand_graph is None
    found = groups.grouped_matmul(ragged)
    assert found.operand_graph is not None and found.together
    assert found.operand_graph.outputs == ("a", "b")
    assert found.operand_graph.types["b"].layout == "FRACTAL_ZN"
    turned = groups.grouped_matmul(row(511, 512, trans_b=True)).operand_graph
    assert turned is not None and turned.types["b"].layout == "FRACTAL_NZ"
    moved_s = 2 * 511 * 511 * 2 / B2.device_memory.rate_bytes_per_s
    times = [grouped_time(one_row, B2) for one_row in (whole, ragged)]
    assert times[1].model_s - times[0].model_s > moved_s / 2
    # what is converted in the launch is no kernel of its own
    assert times[1].marks == times[0].marks
    quantised = work("quant_matmul", "64x64;64x65;65", "int8;int8;fp32", out_dtype="bf16")
    layouts = {name: kind.layout for name, kind in products.quant_matmul(quantised).types.items()}
    assert (layouts["x"], layouts["w"]) == ("FRACTAL_NZ", "ND")


def test_a_product_and_the_steps_it_names():
    row = work("grouped-int8", "33x64;64x48", "int8", epilogue="dequantise+gelu+cast", mac_us=1.0)
    graph = products.with_epilogue(row)
    x, (got,) = computed(graph)
    y = x["x"] @ x["w"] * constant(graph, "scale")
    wanted = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)
    plain = products.with_epilogue(work("matmul-relu", "33x64;64x48", "bf16", epilogue="relu"))
    x, (got,) = computed(plain)
    np.testing.assert_allclose(got, np.maximum(x["x"] @ x["w"], 0), rtol=2.0**-7, atol=2e-2)


ROWS = [
    ("grouped_matmul", "70x64;3x64x48;3x48", "bf16;bf16;fp32", "groups=3;rows=40,0,30"),
    (
        "grouped_matmul_swiglu_quant",
        "64x512;2x512x1024;2x1024;64",
        "int8;int8;fp32;fp32",
        "groups=2;rows=40,24",
    ),
    ("grouped-int8", "512x256;256x512", "int8", "epilogue=dequantise+gelu+cast;mix=1:2;cores=8"),
    ("matmul-relu", "512x512;512x512", "fp16", "epilogue=relu;base=128,128,64"),
    ("quant_matmul", "1024x2048;2048x2048;2048", "int8;int8;fp32", "out_dtype=fp16;with=scale"),
    ("weight_quant_batch_matmul", "8x2048;2048x2048;2048", "bf16;int8;bf16", ""),
    (
        "mla_prolog",
        "4x1x1024;1024x512;512x768;4x128x512;1024x576;512;512;4x1x64;4x1x64",
        "bf16",
        "heads=4",
    ),
    (
        "conv_3d_backprop_filter",
        "1x16x4x16x16;1x32x4x16x16",
        "fp16",
        "strides=(1,1,1);pads=(1,1,1,1,1,1);dilations=(1,1,1);filter=(32,16,3,3,3)",
    ),
]


@pytest.mark.parametrize(("name", "shapes", "dtypes", "attributes"), ROWS)
def test_a_row_is_timed_by_the_name_in_its_case(tmp_path: Path, name, shapes, dtypes, attributes):
    row = {"case": f"source/{name}/1", "operator": "", "inputs": shapes, "dtype": dtypes}
    found = one(tmp_path, **row, attributes=attributes)
    assert found.refused is None
    assert found.model_s is not None
    assert found.bound_s is not None
    assert 0 <= found.bound_s <= found.model_s
    wrong = one(tmp_path, **row, attributes=f"{attributes};colour=red".strip(";"))
    assert "colour" in (wrong.refused or "")


WRONG = [
    work("quant_matmul", "4x8;9x8;8", "int8;int8;fp32"),
    work("quant_matmul", "4x8;8x8;7", "int8;int8;fp32"),
    work("quant_matmul", "4x8;8x8;8", "fp16;int8;fp32"),
    work("quant_matmul", "4x8;8x8;8;4", "int8;int8;fp32;fp32", **{"with": "scale"}),
    work("weight_quant_batch_matmul", "4x8;8x8;8", "int8;int8;fp32"),
    work("mla_prolog", "4x8;8x8;8", "fp16"),
    work("grouped_matmul", "9x8;2x8x8", "fp16", groups=2, rows=(4, 4)),
    work("grouped_matmul", "9x8;2x8x8", "fp16", groups=3, rows=(4, 5)),
    work("grouped_matmul", "9x8;2x8x8", "int8", groups=2, rows=(4, 5)),
    work("grouped_matmul_swiglu_quant", "9x8;2x8x8", "int8;int8", groups=2, rows=(4, 5)),
    work("grouped-int8", "9x8;8x8", "int8", epilogue="relu"),
    work("matmul-relu", "9x8;8x8", "fp16", epilogue="dance"),
    work("conv_3d_backprop_filter", "1x16x4x8x8;1x16x4x8x8", "fp16", strides=(1, 1, 1)),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_such_product_is_refused_by_name(wrong):
    with pytest.raises(AscendLabError, match=wrong.operator):
        {**CHAINS, **GROUPS}[wrong.operator](wrong)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_changes_of_layout_are_timed_where_they_were_measured(tmp_path: Path, dtype: str):
    row = {
        "operator": "conv2d",
        "inputs": "2x32x16x16;32x32x3x3",
        "dtype": dtype,
        "attributes": "stride=(1,1);pad=((1,1),(1,1))",
    }
    kernels = ("Conv2D", "TransData+Conv2D", "TransData*3+MemSet+Conv2D")
    found = [one(tmp_path, **row, kernels=names) for names in kernels]
    times = [line.model_s or 0.0 for line in found]
    told = " ".join(found[2].marks)
    if dtype == "fp16":
        assert 0 < times[0] < times[1] < times[2]
        assert "with 3 changes of layout, as measured" in told
    else:  # ours of 4 bytes moves single elements
        assert 0 < times[0] == times[1] == times[2]
        assert "3 changes of layout not timed" in told

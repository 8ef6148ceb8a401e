"""From nodes to kernels: compiled values equal NumPy's, and nothing leaks out of padding."""

import math
from dataclasses import replace

import numpy as np
import pytest
from graph_strategies import smooth_graphs, whole_graphs, whole_inputs
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import (
    Graph,
    GraphBuilder,
    Node,
    TensorType,
    compile_stages,
    evaluate,
    random_inputs,
    run_compiled,
)
from ascend_lab.compiler.canonical import canonical
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.fusion import fuse
from ascend_lab.compiler.ir import Constant, infer, verify
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.compiler.lower import lower, piece_of
from ascend_lab.compiler.switches import Switches
from ascend_lab.compiler.tasks import compile_tasks
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import AscendLabError, TypeMismatchError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops
from ascend_lab.operators.ops.verify import check_within, sample

CHIPS = {name: load_chip(name) for name in ("Toy", "Ascend910A", "Ascend910B2")}
NAMES = tuple(CHIPS)
EACH = (pytest.param("Toy", marks=pytest.mark.full), *NAMES[1:])
"""A coupled and a split chip in every run, the small one besides in a full one."""
rng = np.random.default_rng(5)


def compiled_values(graph, inputs, chip, *, fusion=True, passes=(), dtype="fp16"):
    """Return the graph with layouts, and its outputs as NumPy and as the kernels compute them."""
    stages = compile_stages(graph, CHIPS[chip], passes=passes, fusion=fusion, dtype=dtype)
    laid = stages.laid_out
    return laid, evaluate(laid, inputs), run_tasks(stages.compiled, inputs)


def assert_close(graph, inputs, chip, *, fusion=True, share=2e-3, dtype="fp16"):
    """Assert that compiled values differ by no more than a share of the largest."""
    laid, wanted, got = compiled_values(graph, inputs, chip, fusion=fusion, dtype=dtype)
    for name in laid.outputs:
        one, two = (v[name].astype(np.float64) for v in (wanted, got))
        assert np.isfinite(one).all()
        assert np.abs(one - two).max() <= share * max(np.abs(one).max(), 1.0), (name, chip)
    return laid


def half(*shape):
    return rng.standard_normal(shape).astype(np.float16)


def whole(*shape):
    return rng.integers(-1, 2, shape).astype(np.float16)


# -- every operator on its own --------------------------------------------------------------------
def one_node(name, example, dtype="fp16", fixed=()):
    """Return a graph of one node, and arrays for its inputs; those in `fixed` are constants."""
    operator = ops.get(name)
    main = dtype if dtype in operator.types.allowed else operator.types.allowed[0]
    arrays = sample(operator, example.shapes, main, example.attrs, 0)
    kinds = operator.input_types(len(arrays), main, **example.attrs)
    types = [TensorType(a.shape, kind) for a, kind in zip(arrays, kinds, strict=True)]
    results = infer(name, types, example.attrs)
    reads = tuple(f"x{i}" for i in range(len(types)))
    writes = tuple(f"y{i}" for i in range(len(results)))
    constants = {f"x{i}": Constant(types[i], arrays[i]) for i in fixed if i < len(types)}
    known = dict(zip((*reads, *writes), (*types, *results), strict=True))
    node = Node("node", name, reads, writes, dict(example.attrs))
    inputs = tuple(n for n in reads if n not in constants)
    graph = verify(Graph(name, inputs, writes, (node,), known, constants))
    return graph, {n: a for n, a in zip(reads, arrays, strict=True) if n in inputs}


def check_node(name, example, chip, fixed=(), dtype="fp16"):
    graph, inputs = one_node(name, example, dtype, fixed)
    laid, wanted, got = compiled_values(graph, inputs, chip)
    check_within(
        ops.get(name), *(tuple(v[n] for n in laid.outputs) for v in (got, wanted))
    )  # a tuple each


def examples_of(name):
    return [e for e in ops.get(name).examples if all(0 not in shape for shape in e.shapes)]


MANY = [n for n, o in ops.OPERATORS.items() if examples_of(n) and len(o.outputs) > 1]


@pytest.mark.parametrize("name", [*MANY, "split"])
def test_results_that_nobody_reads(name):
    """A kernel writes all its results; those not asked for go to a workspace."""
    graph, inputs = one_node(name, examples_of(name)[-1])
    for place, own in enumerate(graph.outputs):
        alone = replace(graph, outputs=(own,))
        laid, wanted, got = compiled_values(alone, inputs, NAMES[place % 3])
        values = tuple(v[laid.outputs[0]].astype(np.float64) for v in (got, wanted))
        assert np.allclose(*values, rtol=1e-2, atol=1e-2)


COMPUTED_WEIGHTS = ("conv_transpose2d",)
"""Operators that need constant weights on a chip; see test_weights_that_are_computed."""


@pytest.mark.parametrize("name", [n for n in ops.OPERATORS if n not in COMPUTED_WEIGHTS])
def test_every_operator_alone(name):
    """Every example on one of the chips in turn, the first on all of them."""
    checked = 0
    for i, example in enumerate(examples_of(name)):
        if name == "conv2d" and example.attrs.get("groups", 1) > 1:
            continue
        for chip in NAMES if i == 0 else (NAMES[i % 3],):
            check_node(name, example, chip)
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize(
    "name", ["conv2d", "depthwise_conv2d", *COMPUTED_WEIGHTS, "matmul", "batch_matmul", "attention"]
)
def test_operators_with_constant_weights(name, chip):
    for example in examples_of(name):
        check_node(name, example, chip, fixed=range(1, 9))


def test_a_bias_is_added_before_the_only_rounding_on_split_chips():
    """One rounding where the nodes alone make two: the kernel is nearer to the true sum."""
    net = GraphBuilder("fc", "fp16")
    x = net.input("x", (17, 33))
    w = half(33, 16)
    bias = half(16)
    net.output(net.gemm(x, net.constant(w), net.constant(bias)))
    graph = net.build()
    inputs = {"x": half(17, 33)}
    exact = inputs["x"].astype(np.float64) @ w.astype(np.float64) + bias
    errors = {}
    for chip in NAMES:
        laid, wanted, got = compiled_values(graph, inputs, chip)
        (name,) = laid.outputs
        errors[chip] = np.abs(got[name] - exact).max()
        assert np.abs(got[name] - wanted[name]).max() <= 2**-6
    assert errors["Ascend910B2"] < errors["Ascend910A"] == errors["Toy"]


REFUSED = {
    "computed weights of groups": (
        one_node("conv2d", ops.Example(((1, 4, 5, 5), (6, 2, 3, 3)), {"groups": 2}))[0],
        "Toy",
        UnsupportedError,
        "node: constant weights",
    ),
    "computed weights of phases": (
        one_node("conv_transpose2d", ops.Example(((1, 4, 5, 5), (4, 6, 3, 3))))[0],
        "Toy",
        UnsupportedError,
        "node: constant weights",
    ),
    "bf16 where there is none": (
        one_node("relu", ops.Example(((4, 4),)), "bf16")[0],
        "Ascend910A",
        TypeMismatchError,
        r"node: y0 \(relu\) on the vector unit of Ascend910A: .*got bf16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused_by_name(name):
    graph, chip, kind, message = REFUSED[name]
    laid = cancel_trans_data(assign_layouts(canonical(graph, CHIPS[chip])))
    with pytest.raises(kind, match=message):
        compile_tasks(laid, CHIPS[chip], [(node,) for node in laid.nodes])


def test_fp32_products_are_refused_unless_converted():
    net = GraphBuilder("wide")
    net.output(net.matmul(net.input("x", (4, 4)), net.weight((4, 4)), name="fc"))
    laid = assign_layouts(net.build())
    with pytest.raises(TypeMismatchError, match=r"fc: fc \(matmul\) on the cube unit of Toy"):
        compile_tasks(laid, CHIPS["Toy"], [(laid.node("fc"),)])
    assert_close(net.build(), {"x": half(4, 4)}, "Toy")


# -- random graphs --------------------------------------------------------------------------------
def small(graph, inputs):
    """Tell whether all numbers are such that fp16 counts them exactly."""
    found = evaluate_all(graph, inputs).values()
    return max(np.abs(v.astype(np.float64)).max() for v in found) < 1000


@pytest.mark.parametrize("chip", EACH)
@settings(max_examples=40)
@given(graph=whole_graphs(), fusion=st.booleans())
def test_whole_numbers_come_out_bit_for_bit(graph, fusion, chip):
    inputs = whole_inputs(graph)
    if not small(graph, inputs):
        return
    wanted = evaluate(graph, inputs)
    laid, as_laid, got = compiled_values(graph, inputs, chip, fusion=fusion)
    for name, own in zip(graph.outputs, laid.outputs, strict=True):
        assert np.array_equal(as_laid[own], wanted[name]), name
        assert np.array_equal(got[own], wanted[name]), name


@given(graph=smooth_graphs(), chip=st.sampled_from(NAMES), fusion=st.booleans())
def test_graphs_with_exponentials(graph, chip, fusion):
    inputs = whole_inputs(graph)
    if small(graph, inputs):
        assert_close(graph, inputs, chip, fusion=fusion, share=2e-2)


# -- padding --------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("fusion", [True, False])
def test_rows_that_pad_do_not_become_columns_that_count(batch, fusion):
    """Ones in the rows that pad e reach the columns that pad c and d, over which c d^T sums."""
    net = GraphBuilder("net", "fp16")
    op = net.batch_matmul if batch else net.matmul
    x, a, b = (net.input(n, (*batch, rows, 16)) for n, rows in (("x", 5), ("a", 7), ("b", 9)))
    e = net.adds(op(x, net.constant(whole(16, 16))), number=1.0)
    c = op(a, e, trans_b=True)
    d = op(b, e, trans_b=True)
    net.output(op(c, d, trans_b=True), op(d, net.constant(whole(5, 3))))
    inputs = {n: whole(*batch, rows, 16) for n, rows in (("x", 5), ("a", 7), ("b", 9))}
    for chip in NAMES:
        _, wanted, got = compiled_values(net.build(), inputs, chip, fusion=fusion)
        assert all(np.array_equal(got[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("chip", EACH)
def test_channels_that_pad_stay_finite(fusion, chip):
    """(conv + 300)^2 is small where the bias is -300, and 90000 where there is no channel."""
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (1, 3, 4, 5))
    y = net.conv2d(x, net.constant(whole(3, 3, 1, 1)), net.fill((3,), -300.0))
    y = net.max_pool2d(net.square(net.adds(y, number=300.0)), kernel=2)
    net.output(net.conv2d(y, net.constant(whole(2, 3, 1, 1))))
    _, wanted, got = compiled_values(net.build(), {"x": whole(1, 3, 4, 5)}, chip, fusion=fusion)
    assert all(np.array_equal(got[n], wanted[n]) for n in wanted)


def test_exponentials_of_padding_are_bounded_step_by_step():
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (1, 3, 4, 5))
    y = net.conv2d(x, net.constant(whole(3, 3, 1, 1)), net.fill((3,), -30.0))
    for _ in range(5):
        y = net.exp(y)  # of 0: 1, 2.7, 15, 3 million; of -30: 0, 1, 2.7, 15, 3 million
    net.output(net.conv2d(net.clip(y, low=0.0, high=9.0), net.constant(whole(2, 3, 1, 1))))
    laid = assert_close(net.build(), {"x": whole(1, 3, 4, 5)}, "Toy")
    layouts = [laid.types[n.output].layout for n in laid.nodes if n.op == "exp"]
    assert layouts == ["NC1HWC0"] * 3 + ["ND"] * 2


@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize("n", [5, 16, 33])
def test_attention_of_ragged_lengths(chip, n):
    net = GraphBuilder("attention", "fp16")
    x = net.input("x", (2, n, 32))
    q, k, v = (net.batch_matmul(x, net.constant(half(32, 16) / 4)) for _ in range(3))
    k = net.sigmoid(net.add(k, net.constant(half(16))))
    scores = net.batch_matmul(q, k, trans_b=True)
    y = net.batch_matmul(net.softmax(net.exp(net.tanh(scores))), v)
    net.output(y, net.batch_matmul(scores, v))
    assert_close(net.build(), {"x": half(2, n, 32)}, chip, share=1e-2)


@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize("n", [5, 40])
def test_one_kernel_of_attention_on_operands_with_dirty_padding(n, chip):
    """Rows that pad keys and values hold halves and fifties; the kernel must not count them."""
    net = GraphBuilder("flash", "fp16")
    x = net.input("x", (n, 32))
    q, k = (net.sigmoid(net.matmul(x, net.constant(half(32, 16) / 4))) for _ in range(2))
    v = net.adds(net.matmul(x, net.constant(half(32, 16) / 4)), number=50.0)
    both = net.matmul(q, k, trans_b=True), net.matmul(k, q, trans_b=True)
    net.output(net.attention(q, k, v), net.attention(*both, v))
    laid = assert_close(net.build(), {"x": half(n, 32)}, chip)
    assert sum(node.op == "flash_attention" for node in laid.nodes) == 2


def test_layers_of_attention_share_one_mask_for_all_heads():
    net = GraphBuilder("layers", "fp16")
    x = net.input("x", (2, 3, 32, 16))
    mask = net.input("mask", (2, 1, 1, 32))
    net.output(net.attention(net.attention(x, x, x, mask), x, x, mask))
    feed = {"x": half(2, 3, 32, 16), "mask": np.float16(-8) * (half(2, 1, 1, 32) > 0)}
    laid = assert_close(net.build(), feed, "Ascend910B2", share=1e-2)
    ops = [node.op for node in laid.nodes]
    assert (ops.count("expand"), ops.count("flash_attention")) == (1, 2)


def by_heads(moved, batch=2, heads=3, rows=32, keys=48, width=32, masks=()):
    """Return attention whose operands, or result, as `moved` says are columns of a matrix."""
    net = GraphBuilder("heads", "fp16")
    given = []
    both = heads * width
    for name, length in (("q", rows), ("k", keys), ("v", keys)):
        if name in moved:
            x = net.matmul(net.input(name, (batch * length, both)), net.weight((both, both)))
            x = net.reshape(x, shape=(batch, length, heads, width))
            given.append(net.transpose(x, perm=(0, 2, 1, 3)))
        else:
            given.append(net.input(name, (batch, heads, length, width)))
    y = net.attention(*given, *(net.input("mask", shape) for shape in masks))
    if "y" in moved:
        y = net.reshape(net.transpose(y, perm=(0, 2, 1, 3)), shape=(batch * rows, both))
        y = net.matmul(y, net.weight((both, both)))
    net.output(y)
    return net.build()


STRIDES = "FlashAttentionTransposeFusionPass"


@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize("moved", ["qkvy", "qkv", "y", "v", "qy"])
def test_attention_does_the_moves_of_heads_around_it(moved, chip):
    graph = by_heads(moved, masks=[(2, 1, 1, 48)])
    assert_close(graph, random_inputs(graph, 1), chip, share=1e-2)
    stages = compile_stages(graph, CHIPS[chip])
    assert stages.fused.counts[STRIDES].effect_times == 1
    (task,) = (task for task in stages.compiled.tasks if task.op == "flash_attention")
    chains = 4 * len(moved)  # to rows, reshape, transpose, to fractals; or back
    assert len(task.nodes) == 1 + chains
    apart = sum("transpose" in task.op for task in stages.compiled.tasks)
    assert apart == 0
    off = Switches({("UBFusion", STRIDES): False})
    before = compile_stages(graph, CHIPS[chip], switches=off)
    assert len(before.compiled.tasks) == len(stages.compiled.tasks) + len(moved)
    assert before.timeline().time_s > stages.timeline().time_s


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 50), st.integers(1, 50),
    st.integers(1, 40), st.sampled_from(NAMES), st.sampled_from(["qkvy", "ky", "q"]),
)  # fmt: skip
def test_heads_of_any_size(batch, heads, rows, keys, width, chip, moved):
    """Ragged ones are moved by kernels of their own."""
    graph = by_heads(moved, batch, heads, rows, keys, width)
    assert_close(graph, random_inputs(graph, 1), chip, share=1e-2)


def test_moves_that_others_read_or_that_tear_rows_apart_stay():
    graph = by_heads("qkvy")
    moved = (n.output for n in graph.nodes if n.op == "transpose")
    keys = (name for name in moved if graph.types[name].shape[2] == 48)
    shared = replace(graph, outputs=(*graph.outputs, next(keys)))
    counts = [compile_stages(g, CHIPS["Ascend910A"]).compiled.tasks for g in (graph, shared)]
    assert len(counts[1]) > len(counts[0])
    assert_close(shared, random_inputs(shared, 1), "Ascend910A", share=1e-2)
    net = GraphBuilder("rows first", "fp16")  # (rows, batch): those of a matrix lie apart
    x = net.matmul(net.input("x", (32 * 2, 96)), net.weight((96, 96)))
    x = net.transpose(net.reshape(x, shape=(32, 2, 3, 32)), perm=(1, 2, 0, 3))
    net.output(net.attention(x, *(net.input(n, (2, 3, 32, 32)) for n in "kv")))
    graph = net.build()
    assert STRIDES not in compile_stages(graph, CHIPS["Ascend910A"]).fused.counts
    assert_close(graph, random_inputs(graph, 1), "Ascend910A", share=1e-2)


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [True, False])
def test_both_ways_of_a_depthwise_convolution_agree(fixed):
    """Weights that are known may be packed for the cube; computed ones go to the vector unit."""
    by_cube = set()
    for channels, side, kernel in ((16, 20, 3), (33, 4, 3), (512, 7, 5), (3, 9, 2)):
        net = GraphBuilder("depthwise", "fp16")
        x = net.input("x", (1, channels, side, side))
        shape = (channels, 1, kernel, kernel)
        weight = net.constant(whole(*shape)) if fixed else net.input("w", shape)
        net.output(net.depthwise_conv2d(x, weight))
        graph = net.build()
        inputs = {"x": whole(1, channels, side, side)}
        inputs |= {} if fixed else {"w": whole(*shape)}
        for chip in ("Ascend910A", "Ascend910B2"):
            stages = compile_stages(graph, CHIPS[chip], passes=())
            task = next(t for t in stages.compiled.tasks if t.op == "depthwise_conv2d")
            listing = str(task.lowered.kernel.phases[-1].parts[0].program)
            by_cube.add("mmad" in listing)
            got = run_tasks(stages.compiled, inputs)
            wanted = evaluate(stages.laid_out, inputs)
            assert all(np.array_equal(got[n], wanted[n]) for n in wanted)
    assert by_cube == ({True, False} if fixed else {False})


def test_weights_that_are_computed():
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (1, 17, 5, 4))
    w = net.input("w", (33, 17, 3, 3))
    b = net.input("b", (33,))
    net.output(net.relu(net.conv2d(x, net.neg(w), b, pad=1)))
    inputs = {"x": whole(1, 17, 5, 4), "w": whole(33, 17, 3, 3), "b": whole(33)}
    for chip in NAMES:
        laid, wanted, got = compiled_values(net.build(), inputs, chip)
        assert all(np.array_equal(got[n], wanted[n]) for n in wanted)
    assert "FRACTAL_Z" in {kind.layout for kind in laid.types.values()}


@pytest.mark.parametrize("fusion", [True, False])
def test_casts_in_blocks(fusion):
    """To fp32 and back, and to the format that is there already: a copy of whole blocks."""
    net = GraphBuilder("net", "fp16")
    y = net.conv2d(net.input("x", (1, 3, 4, 5)), net.constant(whole(9, 3, 1, 1)))
    wide = net.muls(net.cast(net.cast(y, dtype="fp16"), dtype="fp32"), number=0.5)
    net.output(net.conv2d(net.cast(wide, dtype="fp16"), net.constant(whole(2, 9, 1, 1))), wide)
    for chip in NAMES:
        _, wanted, got = compiled_values(net.build(), {"x": whole(1, 3, 4, 5)}, chip, fusion=fusion)
        assert all(np.array_equal(got[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize("channels", [3, 17, 40])
def test_int8_networks(channels, chip):
    """Quantised layers behind each other; a byte may round to its neighbour in a kernel."""
    net = GraphBuilder("int8")
    x = net.input("x", (2, channels, 6, 5))
    y = net.relu(net.conv2d(x, net.weight((33, channels, 3, 3)), net.weight((33,)), pad=1))
    y = net.add(net.conv2d(y, net.weight((channels, 33, 1, 1))), x)
    y = net.reshape(net.max_pool2d(y, kernel=2, stride=2), shape=(2, -1))
    net.output(net.gemm(y, net.weight((y.shape[1], 10)), net.weight((10,))))
    inputs = {n: v.astype(np.float16) for n, v in random_inputs(net.build()).items()}
    laid = assert_close(net.build(), inputs, chip, share=0.04, dtype="int8")
    assert {t.dtype for t in laid.types.values()} >= {"int8", "int32"}


# -- products -------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", EACH)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 40, 10), (5, 17, 33), (16, 16, 16), (35, 1, 1)])
def test_products_every_way_round(m, k, n, fixed, chip):
    net = GraphBuilder("products", "fp16")
    inputs = {}

    def side(name, shape, constant):
        if constant:
            return net.constant(whole(*shape))
        inputs[name] = whole(*shape)
        return net.input(name, shape)

    for i, (ta, tb) in enumerate([(a, b) for a in (False, True) for b in (False, True)]):
        for batch in ((), (2, 3)):
            op = net.batch_matmul if batch else net.matmul
            a = side(f"a{i}{len(batch)}", (*batch, k, m) if ta else (*batch, m, k), False)
            b = side(f"b{i}{len(batch)}", (*batch[1:], n, k) if tb else (*batch[1:], k, n), fixed)
            y = op(a, b, trans_a=ta, trans_b=tb)
            net.output(y, net.adds(net.relu(y), number=1.0))
    _, wanted, got = compiled_values(net.build(), inputs, chip)
    assert len(wanted) == 16 and all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_a_constant_that_is_packed_in_two_ways():
    """A fused kernel would read weights as an operand of the cube and of the vector unit."""
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (16, 16))
    w = net.constant(whole(16, 16))
    image = net.input("i", (1, 16, 2, 2))
    b = net.constant(whole(16))
    y = net.conv2d(image, net.constant(whole(16, 16, 1, 1)), b)
    net.output(net.relu(net.add(net.matmul(x, w), w)), net.mul(net.reshape(y, shape=(4, 16)), b))
    inputs = {"x": whole(16, 16), "i": whole(1, 16, 2, 2)}
    for chip in NAMES:
        _, wanted, got = compiled_values(net.build(), inputs, chip)
        assert all(np.array_equal(got[n], wanted[n]) for n in wanted)


# -- moves ----------------------------------------------------------------------------------------
@st.composite
def chains(draw):
    """A tensor in fractals, ND or blocks of channels, and moves behind it."""
    shape = draw(st.sampled_from([(2, 32, 48), (4, 16, 3, 16), (32, 64), (2, 32, 4, 6), (6, 35)]))
    net = GraphBuilder("moves", "fp16")
    y = x = net.input("x", shape)
    for _ in range(draw(st.integers(2, 5))):
        kind = draw(st.sampled_from(("transpose", "reshape", "trans_data")))
        total = math.prod(y.shape)
        sizes = y.shape
        if kind == "transpose":
            y = net.transpose(y, perm=tuple(draw(st.permutations(range(len(sizes))))))
        elif kind == "reshape":
            split = draw(st.sampled_from([n for n in (2, 3, 16, 32) if total % n == 0] or [1]))
            choices = [(split, total // split), (total // split, split), (-1, *sizes[1:])]
            if len(sizes) > 2:
                choices += [(sizes[0] * sizes[1], *sizes[2:]), (*sizes[:-2], -1)]
            y = net.reshape(y, shape=draw(st.sampled_from(choices)))
        elif y.type.layout != "ND":
            y = net.trans_data(y, layout="ND")
        elif len(sizes) > 1:
            y = net.trans_data(y, layout=draw(st.sampled_from(("FRACTAL_NZ", "FRACTAL_ZN"))))
    net.output(net.trans_data(y, layout="ND") if y.type.layout != "ND" else y)
    assert x is not y
    return with_layouts(net.build())


def with_layouts(graph):
    """Let reshapes and transposes read row-major memory only: convert before them."""
    net = GraphBuilder(graph.name, "fp16")
    known = {n: net.input(n, graph.types[n].shape) for n in graph.inputs}
    for node in graph.nodes:
        x = known[node.inputs[0]]
        if node.op != "trans_data" and x.type.layout != "ND":
            x = net.trans_data(x, layout="ND")
        known[node.output] = net.add_node(node.op, x, **node.attrs)
    net.output(known[graph.outputs[0]])
    return net.build()


COUNTS = {"one copy": 0, "refused": 0}


@given(graph=chains(), chip=st.sampled_from(NAMES))
def test_chains_of_moves(graph, chip):
    """One kernel for the whole chain, or a typed refusal; then the nodes one by one."""
    x = np.arange(math.prod(graph.types["x"].shape)) % 1999
    inputs = {"x": x.reshape(graph.types["x"].shape).astype(np.float16)}
    groups = [tuple(graph.nodes)] if len(graph.nodes) > 1 else [graph.nodes]
    (wanted,) = evaluate(graph, inputs).values()
    try:
        compiled = compile_tasks(graph, CHIPS[chip], groups)
        COUNTS["one copy"] += 1
    except UnsupportedError:
        COUNTS["refused"] += 1
        compiled = compile_tasks(graph, CHIPS[chip], [(node,) for node in graph.nodes])
    (got,) = run_tasks(compiled, inputs).values()
    assert np.array_equal(got, wanted)


def test_chains_of_moves_were_seen_both_ways():
    if not sum(COUNTS.values()):
        pytest.skip("runs behind test_chains_of_moves")
    assert min(COUNTS.values()) >= 3, COUNTS


@pytest.mark.parametrize(
    ("shape", "moves", "message"),
    [
        ((5, 16), ["FRACTAL_NZ", (1, 0)], "whole blocks"),
        ((1, 3, 4, 4), ["NC1HWC0", (0, 2, 3, 1)], "whole blocks"),
        ((32, 32), [[5, -1]], None),
        ((6, 35), [(1, 0), [14, 15], (1, 0)], "digits that divide"),
    ],
)
def test_moves_that_are_no_copy(shape, moves, message):
    net = GraphBuilder("moves", "fp16")
    y = net.input("x", shape)
    if message is None:
        with pytest.raises(AscendLabError, match="reshape"):
            net.reshape(y, shape=tuple(moves[0]))
        return
    for move in moves:
        if isinstance(move, str):
            y = net.trans_data(y, layout=move)
        elif isinstance(move, list):
            y = net.reshape(y, shape=tuple(move))
        else:
            y = net.transpose(y, perm=move)
    net.output(y)
    graph = net.build()
    if isinstance(moves[0], str):  # the other way round, so that the source is what pads
        first = graph.nodes[0].output
        graph = Graph("moves", (first,), graph.outputs, graph.nodes[1:], graph.types)
        extra = Node("end", "trans_data", graph.outputs, ("end",), {"layout": "ND"})
        kinds = {**graph.types, "end": graph.types[graph.outputs[0]]}
        graph = Graph("moves", (first,), ("end",), (*graph.nodes, extra), kinds)
    with pytest.raises(UnsupportedError, match=message):
        lower(piece_of(graph, graph.nodes), CHIPS["Toy"])


# -- pieces ---------------------------------------------------------------------------------------
def test_equal_pieces_share_one_kernel():
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (1, 16, 8, 8))
    for _ in range(3):
        x = net.relu(net.conv2d(x, net.weight((16, 16, 3, 3)), pad=1))
    net.output(x)
    chip = CHIPS["Toy"]
    laid = cancel_trans_data(assign_layouts(canonical(net.build(), chip)))
    tasks = compile_tasks(laid, chip, fuse(laid, chip).groups).tasks
    kernels = {id(t.lowered.kernel) for t in tasks if t.op == "conv2d+relu"}
    assert [t.op for t in tasks].count("conv2d+relu") == 3 and len(kernels) == 1


def test_a_piece_writes_what_is_read_outside():
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (4,))
    z = net.input("z", (4,))
    a = net.add(z, x)
    b = net.mul(a, x)
    c = net.relu(b)
    net.output(c, net.neg(a))
    graph = net.build()
    piece = piece_of(graph, graph.nodes[:3])
    assert piece.graph.inputs == ("x0", "x1") and piece.graph.outputs == ("y0", "y1")
    assert [piece.names[n] for n in ("x0", "x1", "y0", "y1")] == ["z", "x", "add", "relu"]
    assert piece.key == piece_of(graph.renamed("other"), graph.nodes[:3]).key


def test_an_operator_registered_anew_is_lowered_anew():
    chip = load_chip("Toy")
    old = ops.get("relu")
    net = GraphBuilder("own", "fp16")
    x = net.input("x", (32,))
    net.output(net.relu(x))
    graph = net.build()
    inputs = {"x": np.full(32, -3, np.float16)}
    assert run_compiled(graph, inputs, chip)["relu"].max() == 0
    ops.register(replace(ops.get("abs"), name="relu"), replace=True)
    try:
        assert run_compiled(graph, inputs, chip)["relu"].max() == 3
    finally:
        ops.register(old, replace=True)
    assert run_compiled(graph, inputs, chip)["relu"].max() == 0


@pytest.mark.parametrize("name", ["Toy", "Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("stride", [2, (3, 1), (1, 3)])
def test_one_channel_may_be_read_with_a_stride(name, stride):
    """1 x 1 weights of one channel are a convolution and a group for every channel at once."""
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (2, 1, 5, 5))
    net.output(net.conv2d(x, net.constant(np.full((1, 1, 1, 1), 3, np.float16)), stride=stride))
    graph = net.build()
    inputs = {"x": np.arange(50, dtype=np.float16).reshape(2, 1, 5, 5)}
    (found,) = run_compiled(graph, inputs, name).values()
    np.testing.assert_array_equal(found, evaluate(graph, inputs)[graph.outputs[0]])

"""What models of real exporters taught: sizes without names, whole numbers, operators without a
kernel, parts that exporters leave out, batches."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import BOOL, INT64, model_of, node, run_onnx

from ascend_lab.aoe.bank import chip_digest
from ascend_lab.cli import ascend_lab as lab
from ascend_lab.compiler import compile_graph, evaluate, run_compiled, simulate_graph
from ascend_lab.compiler.network import network_events
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.tasks import CpuKernel
from ascend_lab.compiler.zoo import ZOO
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

INT32 = TensorProto.INT32


# -- parts that exporters leave out ----------------------------------------------------------------
MAKERS = {
    "Conv": ((1, 4, 6, 6), (4, 4, 3, 3), {}),
    "Depthwise": ((1, 4, 6, 6), (4, 1, 3, 3), {"group": 4}),
    "ConvTranspose": ((1, 4, 6, 6), (4, 4, 2, 2), {"strides": [2, 2]}),
    "Gemm": ((3, 4), (4, 4), {}),
    "MatMul": ((3, 4), (4, 4), {}),
}
AFTER = ("BatchNormalization", "Mul", "Add", "Sub", "Div", "Mul Add", "Add Mul Add", "Div Mul")


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(("bias", "scalar"), [*itertools.product((True, False), repeat=2)])
def test_scales_and_shifts_melt_into_products_with_and_without_each_part(
    maker, after, bias, scalar
):
    """Catches passes that take a bias, or a source of a derived constant, for granted."""
    rng = np.random.default_rng(0)
    shape, weight, attrs = MAKERS[maker]
    side = () if scalar else (4, *(1,) * (len(shape) - 2))
    weights = {"w": rng.standard_normal(weight, np.float32)}
    reads = ["x", "w"]
    if bias and maker != "MatMul":
        reads = [*reads, "b"]
        weights["b"] = rng.standard_normal(4).astype(np.float32)
    op = "Conv" if maker == "Depthwise" else maker
    nodes = [helper.make_node(op, reads, ["t0"], **attrs)]
    for i, name in enumerate(after.split()):
        count = 4 if name == "BatchNormalization" else 1
        own = [f"c{i}{k}" for k in range(count)]
        kind = (4,) if count == 4 else side
        weights |= {c: np.asarray(rng.uniform(0.5, 2.0, kind), np.float32) for c in own}
        nodes.append(node(f"{name} t{i} {' '.join(own)} -> t{i + 1}"))
    nodes.append(node(f"Relu t{len(nodes) - 1} -> y"))
    model = model_of(nodes, {"x": shape}, ["y"], weights)
    x = rng.standard_normal(shape, np.float32)
    got = run_compiled(import_onnx(model), {"x": x}, "Toy")["y"]
    np.testing.assert_allclose(got, run_onnx(model, {"x": x})["y"], rtol=0.02, atol=0.05)


# -- sizes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", ["?", "unk__12", "", "None", "unk_1", "-1", "unknown", -1, 0])
def test_a_size_without_a_name_is_a_size_of_its_own(size):
    """Catches placeholders that are taken for one symbol, and -1 or 0 for a number."""
    model = model_of("MatMul a b -> y", {"a": (size, 8), "b": (8, size)}, ["y"])
    assert import_onnx(model, shapes={"a": (2, 8), "b": (8, 5)}).types["y"].shape == (2, 5)
    with pytest.raises(UnsupportedError, match="input a"):
        import_onnx(model, shapes={"b": (8, 5)})


@pytest.mark.parametrize("size", ["batch", "N", "seq_len"])
def test_a_size_with_a_name_is_one_size_and_the_message_says_where(size):
    model = model_of("Add a b -> y", {"a": (size, 8), "b": (8, size)}, ["y"])
    with pytest.raises(InputError, match=rf"{size}; got 64 \(a axis 0\) and 192 \(b axis 1\)"):
        import_onnx(model, shapes={"a": (64, 8), "b": (8, 192)})
    with pytest.raises(InputError, match=r"input a: a size of 8 at axis 1 .*got 9"):
        import_onnx(model, shapes={"a": (8, 9)})
    with pytest.raises(InputError, match=r"input a: 2 sizes.*got 1"):
        import_onnx(model, shapes={"a": (8,)})


# -- batches ---------------------------------------------------------------------------------------
def two_inputs(a, b):
    nodes = "Relu a -> y; Relu b -> z"
    return model_of(nodes, {"a": a, "b": b}, ["y", "z"])


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (("N", 3), ("N", 5), ((4, 3), (4, 5))),
        (("?", 3), ("?", 5), ((4, 3), (4, 5))),
        (("a_dynamic_axes_1", 3), ("b_dynamic_axes_1", 5), ((4, 3), (4, 5))),
        (("batch", 3), (2, "batch"), ((4, 3), (2, 4))),
        ((1, 3), (1, 5), ((4, 3), (4, 5))),
        (("batch", 3), (7,), ((4, 3), (7,))),
    ],
)
def test_a_batch_is_obeyed_where_it_is_clear_what_it_means(a, b, found):
    graph = import_onnx(two_inputs(a, b), batch=4)
    assert (graph.types["a"].shape, graph.types["b"].shape) == found


@pytest.mark.parametrize(
    ("a", "b"), [((1, 3), (2, 5)), (("rows", 3), ("columns", 5)), (("n", 3), ("batch", 5))]
)
def test_a_batch_that_nobody_can_obey_is_refused_in_every_verb(a, b, tmp_path, capsys):
    """Catches reports of batch 64 with the times of batch 1."""
    file = tmp_path / "two.onnx"
    file.write_bytes(two_inputs(a, b).SerializeToString())
    with pytest.raises(InputError, match=r"one first size for a batch; got a \(.*, b \("):
        import_onnx(file, batch=64)
    for verb in (["simulate", file, "--chip", "Toy"], ["run", file]):
        assert lab([*map(str, verb), "--batch", "64"]) == 2
        error = capsys.readouterr().err
        assert "one first size" in error and error.count("\n") == 1


def test_a_batch_leaves_a_sequence_alone():
    """Catches positions of shape (seq,) that are given the batch as their length."""
    model = two_inputs(("batch", "seq"), ("seq",))
    graph = import_onnx(model, batch=4, shapes={"b": (9,)})
    assert graph.types["a"].shape == (4, 9)
    with pytest.raises(UnsupportedError, match="seq"):
        import_onnx(model, batch=4)


# -- operators without a kernel --------------------------------------------------------------------
def token_model():
    """Return masks and positions as exporters write them: no kernel takes int32 as these do."""
    nodes = (
        "Not keep -> padded; Cast keep -> ones to=INT64; CumSum ones one -> counts; "
        "Mul counts ones -> places; Gather table places -> rows; "
        "Unsqueeze padded two -> wide; Where wide low rows -> masked; MatMul masked w -> y; "
        "Equal places one -> firsts; ReduceSum places -> total keepdims=0"
    )
    rng = np.random.default_rng(0)
    weights = {
        "one": np.array(1), "two": np.array([2]), "low": np.array(-1.0, np.float32),
        "table": rng.standard_normal((16, 32), np.float32),
        "w": rng.standard_normal((32, 16), np.float32),
    }  # fmt: skip
    return model_of(nodes, {"keep": (("batch", "seq"), BOOL)}, ["y", "firsts", "total"], weights)


KEEP = np.arange(14).reshape(2, 7) % 5 > 0


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_compiled_values_of_whole_numbers_are_those_of_the_model(chip):
    model = token_model()
    graph = import_onnx(model, shapes={"keep": (2, 7)})
    got = run_compiled(graph, {"keep": KEEP}, chip)
    want = run_onnx(model, {"keep": KEEP})
    for name, values in evaluate(graph, {"keep": KEEP}).items():
        np.testing.assert_allclose(values, want[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[name], want[name], rtol=0.01, atol=0.02)


def test_the_ai_cpu_takes_launch_and_bytes_over_its_rate():
    chip = load_chip("Ascend310")
    compiled = compile_graph(import_onnx(token_model(), shapes={"keep": (2, 7)}), chip)
    times = simulate_graph(compiled)
    assert times.on_ai_cpu and times.on_ai_cpu != times.operators
    for op in times.on_ai_cpu:
        moved = sum(op.timeline.path_bytes.values())
        cycles = moved / chip.ai_cpu_rate_bytes_per_s * chip.clock_hz
        assert op.timeline.cycles - 1 < cycles <= op.timeline.cycles
        assert op.time_s == pytest.approx(chip.ai_cpu_overhead_s + op.timeline.cycles / 5e8)
        assert op.type.endswith("on the AI CPU") and times.by_type()[op.type] >= op.time_s
    totals = times.summary()["totals"]
    assert totals["ai_cpu_operators"] == [op.name for op in times.on_ai_cpu]
    assert totals["ai_cpu_share"] == pytest.approx(times.ai_cpu_s / times.time_s)
    assert sum(op.time_s for op in times.operators) == times.time_s
    spans = {event["name"] for event in network_events(times)}
    assert {op.name for op in times.on_ai_cpu} <= spans


def test_simulate_names_what_has_no_kernel(tmp_path, capsys):
    file = tmp_path / "tokens.onnx"
    file.write_bytes(token_model().SerializeToString())
    arguments = ["simulate", str(file), "--chip", "Ascend310", "--input-shape", "keep:2,7"]
    assert lab(arguments) == 0 and lab([*arguments, "--json", str(tmp_path / "j")]) == 0
    shown = capsys.readouterr().out
    totals = json.loads((tmp_path / "j").read_text())["totals"]
    assert f"AI CPU: {len(totals['ai_cpu_operators'])} without a kernel (equal" in shown
    assert f"{totals['ai_cpu_share']:.1%} of the time (launch and rate: assumed)" in shown


@pytest.mark.parametrize("chip", ["Ascend310", pytest.param("Ascend910B2", marks=pytest.mark.full)])
def test_no_network_of_the_zoo_needs_the_ai_cpu(chip):
    """Catches kernels that are lost without anybody noticing: only the time would grow."""
    for name in ("resnet18", "bert_base", "gpt2_small", "mobilevit_block"):
        shape = {"layers": 1} if name in ("bert_base", "gpt2_small") else {}
        compiled = compile_graph(ZOO[name](**shape), chip)
        kernels = [task.lowered.kernel for task in compiled.tasks if task.lowered]
        assert not any(isinstance(kernel, CpuKernel) for kernel in kernels), name


def test_products_of_whole_numbers_read_both_factors_of_every_multiplication():
    shapes = {"a": ((8, 32), TensorProto.INT32)}
    weight = np.ones((32, 16), np.int32)
    graph = import_onnx(model_of("MatMul a b -> y", shapes, ["y"], {"b": weight}))
    times = simulate_graph(compile_graph(graph, "Ascend310")).on_ai_cpu
    product = next(op.timeline for op in times if op.type.startswith("matmul"))
    written = 16 * 16 * 4  # in fractals
    assert product.cycles == (8 * 32 * 16 * (4 + 4) + written) / 2e9 * 5e8


def test_scalars_and_empty_tensors_of_whole_numbers():
    nodes = "Add n one -> m; Equal n m -> same; Slice x one one -> none; Add none none -> y"
    inputs = {"n": ((), INT64), "x": ((4,), INT32)}
    model = model_of(nodes, inputs, ["m", "same", "y"], {"one": np.array([1])})
    model.graph.initializer[0].dims[:] = [1]
    given = {"n": np.array(3), "x": np.arange(4, dtype=np.int32)}
    graph = import_onnx(model)
    got = run_compiled(graph, given, "Ascend310")
    assert got["m"].tolist() == [4] and got["same"].tolist() == [0] and got["y"].shape == (0,)
    assert simulate_graph(compile_graph(graph, "Ascend310")).time_s > 0


def test_a_chip_without_an_ai_cpu_refuses_and_its_numbers_change_no_bank():
    graph = import_onnx(token_model(), shapes={"keep": (2, 7)})
    chip = load_chip("Ascend310")
    bare = replace(chip, ai_cpu_rate_bytes_per_s=0.0)
    with pytest.raises(AscendLabError, match="int32"):
        compile_graph(graph, bare)
    assert chip_digest(bare) == chip_digest(chip)


def test_shapes_are_computed_while_importing():
    """Catches folds that stop at an operator: the reshape's sizes depend on shapes only."""
    nodes = (
        "Shape x -> s; Gather s pair -> two; ReduceProd two -> flat keepdims=1; "
        "Neg one -> rest; Concat flat rest -> shape axis=0; Reshape x shape -> y"
    )
    weights = {"pair": np.array([0, 1]), "one": np.array([1])}
    graph = import_onnx(model_of(nodes, {"x": (2, 3, 4)}, ["y"], weights))
    assert [node.op for node in graph.nodes] == ["reshape"]
    assert graph.types["y"].shape == (6, 4)

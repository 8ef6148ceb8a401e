"""Whom the table of evaluators calls right agree, for every operator of the standard.

Expected values come from evaluators that the table does not accuse: ONNX Runtime, the reference
evaluator, our own graphs. Where it accuses one, a case shows that it is wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
from command_lines import refused
from hypothesis import given, settings, strategies as st
from onnx import NodeProto, helper, save
from onnx_models import FLOAT, model_of, one_node, run_onnx
from onnx_nodes import FAMILIES, Case, drawn, versions

from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.migrate import migrate
from ascend_lab.compiler.onnx import host, import_onnx, witnesses
from ascend_lab.compiler.onnx.sound import check_sound
from ascend_lab.compiler.onnx.witnesses import FAULTS, GRAPH, REFERENCE, RUNTIME
from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

CHIP = load_chip("Ascend310")
RUN = {RUNTIME: host._onnxruntime, REFERENCE: host._reference, GRAPH: host._own_graph}
ROUNDED = ("QLinearConv", "QLinearMatMul", "QuantizeLinear", "DynamicQuantizeLinear")
"""Operators whose bytes differ by one where a number lies halfway: fp32 decides."""
UNSEEN = (
    "limits sums of two products to 16 bits on processors without a dot product of bytes",
    "makes pieces of sizes that are not allowed",
    "copies what half_pixel_symmetric mixes where no size changes",
)
"""Rows of other processors, of what all others refuse, and one that has a test of its own."""


def computed(case: Case, evaluator: str):
    """Return what an evaluator computes for a case, or None if it refuses."""
    model = case.model()
    feed = {name: host._as_array(value) for name, value in case.feed.items()}
    try:
        return RUN[evaluator](model, [entry.name for entry in model.graph.output], feed)
    except Exception:
        return None


def same(case: Case, one, two) -> bool:
    """Tell whether two evaluators agree: equal types and shapes, numbers near in their format."""
    for a, b in zip(map(np.asarray, one), map(np.asarray, two), strict=True):
        if a.dtype.kind in "OUS":
            if a.astype(str).tolist() != b.astype(str).tolist():
                return False
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind in "biu":
            most = 1 if case.op in ROUNDED else 0
            if a.size and np.abs(a.astype(np.int64) - b.astype(np.int64)).max() > most:
                return False
            continue
        limit = 2e-2 if a.dtype == np.float16 else 2e-4
        finite = np.abs(b[np.isfinite(b)].astype(np.float64)).max(initial=1.0)
        if not np.allclose(a, b, rtol=limit, atol=limit * finite, equal_nan=True):
            return False
    return True


# Windows, cuts and pads have the most attributes: 20 times the share of another operator.
MANY_FORMS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "Slice", "Pad", "LSTM", "GRU")
DRAWN = [*sorted(FAMILIES), *MANY_FORMS * 20]


@settings(max_examples=800)
@given(st.sampled_from(DRAWN), st.integers(0, 2**32 - 1))
def test_evaluators_that_the_table_calls_right_agree(op, seed):
    case = drawn(op, seed)
    right = witnesses.evaluators(case.model().graph.node[0], case.opset)
    found = {name: values for name in right if (values := computed(case, name)) is not None}
    for name, values in found.items():
        first = next(iter(found))
        assert same(case, found[first], values), (first, name, case.opset, case.attrs)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.ops[0]}-{f.does}".replace(" ", "_"))
def test_whom_the_table_accuses_is_wrong_in_a_case(fault):
    """Each row is needed: some node it names has other values than the others have."""
    if fault.does in UNSEEN:
        pytest.skip("shown on other processors, or refused")
    for seed in range(400):
        case = drawn(fault.ops[seed % len(fault.ops)], seed)
        node = case.model().graph.node[0]
        if witnesses.fault_of(node, case.opset, fault.evaluator) is not fault:
            continue
        right = witnesses.evaluators(node, case.opset)
        wanted = next((v for name in right if (v := computed(case, name)) is not None), None)
        got = computed(case, fault.evaluator)
        if wanted is not None and got is not None and not same(case, got, wanted):
            return
    pytest.fail(f"no case shows it: {fault.does}")


def test_every_operator_of_the_table_is_drawn():
    named = {op for fault in FAULTS for op in fault.ops}
    assert named <= set(FAMILIES)
    assert len(FAMILIES) > 150


# -- recurrent layers: a witness of the standard's text -------------------------------------------
def lstm(x, w, r, b, lengths):
    """Return the hidden states of an LSTM, zeros behind each sequence's end (steps, 1, n, h)."""
    steps, batch, _ = x.shape
    hidden = r.shape[-1]
    bias = b[0, : 4 * hidden] + b[0, 4 * hidden :]
    states = np.zeros((steps, 1, batch, hidden))
    for n in range(batch):
        h = np.zeros(hidden)
        c = np.zeros(hidden)
        for step in range(lengths[n]):
            gates = w[0] @ x[step, n] + r[0] @ h + bias
            enter, leave, forget, fresh = np.split(gates, 4)
            enter, leave, forget = (1 / (1 + np.exp(-gate)) for gate in (enter, leave, forget))
            c = forget * c + enter * np.tanh(fresh)
            h = leave * np.tanh(c)
            states[step, 0, n] = h
    return states


@pytest.mark.parametrize("opset", [7, 14, 22])
@pytest.mark.parametrize("hidden", [3, 96])
def test_states_behind_a_sequences_end_are_zero_in_every_version_and_size(opset, hidden):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((5, 3, 4)).astype(np.float32),
        "w": rng.standard_normal((1, 4 * hidden, 4)).astype(np.float32) / 2,
        "r": rng.standard_normal((1, 4 * hidden, hidden)).astype(np.float32) / hidden,
        "b": rng.standard_normal((1, 8 * hidden)).astype(np.float32) / 2,
        "lengths": np.array([5, 2, 3], np.int32),
    }
    model = one_node("LSTM", arrays, opset=opset, hidden_size=hidden)
    wanted = lstm(*arrays.values())
    for found in (host.run_on_host(model, arrays), place_model(model, CHIP, inputs=arrays).run()):
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-4, atol=1e-5)
        assert not found["y"][2:, 0, 1].any()


def test_without_the_runtime_a_node_is_refused_by_name_or_is_right(monkeypatch):
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.standard_normal((4, 2, 3)).astype(np.float32),
        "w": rng.standard_normal((1, 8, 3)).astype(np.float32),
        "r": rng.standard_normal((1, 8, 2)).astype(np.float32),
        "b": np.zeros((1, 16), np.float32),
        "lengths": np.array([4, 2], np.int32),
    }
    model = one_node("LSTM", arrays, hidden_size=2)
    pool = model_of(
        "MaxPool x -> p kernel_shape=[3,3] strides=[2,2] ceil_mode=1; NonZero p -> y",
        {"x": (1, 2, 8, 8)}, ["p", "y"],
    )  # fmt: skip
    feed = {"x": rng.standard_normal((1, 2, 8, 8)).astype(np.float32)}
    wanted = run_onnx(pool, feed)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"_node \(LSTM\).*behind.*pip install onnxruntime"):
        host.run_on_host(model, arrays)
    found = host.run_on_host(pool, feed)
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_each_node_of_a_mixed_model_is_computed_by_whom_has_it_right():
    """A size that stays and half_pixel_symmetric: the runtime copies, the standard mixes."""
    nodes = (
        "Resize x _ s -> a mode=linear coordinate_transformation_mode=half_pixel_symmetric; "
        "Softplus a -> b; NonZero b -> y"
    )
    model = model_of(nodes, {"x": (1, 1, 2, 2)}, ["a", "y"], {"s": np.array([1, 1, 1.2, 1.2], "f")})
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    found = place_model(model, CHIP, inputs={"x": x}).run()
    # one axis: offset (2 / 2)(1 - 2 / 2.4) + 0.5 / 1.2 - 0.5 = 1/12; the next 5/6 further on
    places = np.array([1 / 12, 11 / 12])
    wanted = 2 * places[:, None] + places[None]
    np.testing.assert_allclose(found["a"][0, 0], wanted, atol=1e-6)
    assert found["y"].shape == (4, 4)


def test_models_newer_than_the_runtime_run_in_older_words():
    boxes = np.array([[0, 0, 3, 3]], np.float32)
    arrays = {"x": np.ones((1, 1, 4, 4), np.float32), "b": boxes, "i": np.zeros(1, np.int64)}
    model = one_node("RoiAlign", arrays, opset=28, output_height=2, output_width=2)
    np.testing.assert_allclose(host.run_on_host(model, arrays)["y"], np.ones((1, 1, 2, 2)))


# -- resizing, on the core ------------------------------------------------------------------------
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric",
               "tf_half_pixel_for_nn")  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SCALES = (0.5, 0.6, 0.7, 1.0, 1.3, 1.5, 2.0, 2.3)


@settings(max_examples=150)
@given(st.data(), st.tuples(st.integers(2, 40), st.integers(2, 40)))
def test_resizing_is_the_runtimes_in_every_version_mode_and_scale(data, size):
    opset = data.draw(st.sampled_from((10, 11, 13, 19)))
    scales = [1.0, 1.0, *(data.draw(st.sampled_from(SCALES)) for _ in range(2))]
    modes = ("nearest", "linear", "cubic") if opset > 10 else ("nearest", "linear")
    attrs = {"mode": data.draw(st.sampled_from(modes))}
    x = np.random.default_rng(0).standard_normal((1, 2, *size)).astype(np.float32)
    reads = "x s"
    if opset > 10:
        known = COORDINATES if opset == 11 else COORDINATES[:-1]
        attrs["coordinate_transformation_mode"] = data.draw(st.sampled_from(known))
        attrs["nearest_mode"] = data.draw(st.sampled_from(ROUNDINGS))
        reads = "x r s"
    node = helper.make_node("Resize", reads.split(), ["y"], **attrs)
    weights = {"s": np.array(scales, np.float32), "r": np.zeros(0, np.float32)}
    model = model_of([node], {"x": x.shape}, ["y"], weights, opset)
    (got,) = host._own_graph(model, ["y"], {"x": x})
    wanted = run_onnx(model, {"x": x})["y"]
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_mode_of_another_version_is_refused_by_name():
    node = "Resize x _ s -> y coordinate_transformation_mode=tf_half_pixel_for_nn"
    model = model_of(node, {"x": (1, 1, 4, 4)}, ["y"], {"s": np.array([1, 1, 2, 2], "f")}, 13)
    with pytest.raises(
        UnsupportedError, match=r"y \(Resize\): coordinates half_pixel,.*got tf_half"
    ):
        import_onnx(model)


@pytest.mark.parametrize("op", ["Celu", "Mish", "Shrink", "Softsign", "ThresholdedRelu"])
def test_functions_of_a_number_have_no_axes(op):
    x = np.array(0.75, np.float32)
    model = one_node(op, {"x": x}, opset=versions(op)[0])
    (got,) = host._own_graph(model, ["y"], {"x": x})
    wanted = run_onnx(model, {"x": x})["y"]
    assert got.shape == wanted.shape == ()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# -- nodes that end the process in C++ ------------------------------------------------------------
UNSOUND = {
    "Split x -> a b c axis=1 num_outputs=2": "2 outputs, one for each piece; got 3",
    "Split x two -> a b c axis=1": "2 outputs, one for each piece; got 3",
    "Einsum x _ -> a equation='ij,jk->ik'": "input 1, Inputs; got none",
    "GatherND x i -> a batch_dims=-9": "batch_dims from 0 to 16",
    "Relu x -> a b": "1 output; got 2",
    "Relu x x -> a": "1 input; got 2",
    "Add x _ -> a": "input 1, B; got none",
}


@pytest.mark.parametrize("text", UNSOUND)
def test_nodes_that_end_the_process_are_refused_before(text, tmp_path, capsys):
    weights = {"two": np.array([1, 2]), "i": np.array([[0]])}
    model = model_of(text, {"x": (4, 3)}, ["a"], weights, 18)
    with pytest.raises((GraphError, InputError)) as found:
        check_sound(model, model.graph.node)
    assert UNSOUND[text] in str(found.value)
    feed = {"x": np.ones((4, 3), np.float32)}
    with pytest.raises((GraphError, InputError)):
        host.run_on_host(model, feed)


def test_a_product_of_a_tensor_with_itself_is_placed():
    model = model_of("MatMul x x -> a; NonZero a -> y", {"x": (4, 4)}, ["y"])
    x = np.eye(4, dtype=np.float32)
    found = place_model(model, CHIP, inputs={"x": x}).run()
    np.testing.assert_array_equal(found["y"], np.array(np.nonzero(x)))


# -- messages and reports -------------------------------------------------------------------------
def test_a_refusal_of_compiled_runs_names_node_and_operator(tmp_path, capsys):
    model = model_of("sampler: GridSample x g -> y", {"x": (1, 2, 5, 6), "g": (1, 3, 4, 2)}, ["y"])
    file = tmp_path / "m.onnx"
    save(model, file)
    said = refused(capsys, "run", file, "--compiled", "--chip", "Ascend310")
    assert "sampler" in said and "GridSample" in said and "--compiled" in said


def test_equal_infinities_are_no_error_of_a_migration(capsys):
    nodes = "Where c zero low -> m; Add x m -> a; Softmax a -> y axis=-1"
    entries = {"x": (1, 8, 8), "c": ((8, 8), 9)}
    weights = {"zero": np.float32(0), "low": np.float32(-np.inf)}
    report = migrate(model_of(nodes, entries, ["y"], weights).SerializeToString(), CHIP).report
    errors = [row["max_error"] for row in report["rows"] if row["max_error"] is not None]
    assert errors and max(errors) < 1e-3
    assert all(value < 1e-3 for value in report["max_error"].values())


def test_a_body_is_computed_by_whom_has_all_its_nodes_right():
    """The node of a branch decides for the whole node: here one that only the runtime has right."""
    inner = helper.make_node("GlobalMaxPool", ["x"], ["b"])
    branch = helper.make_graph(
        [inner], "then", [], [helper.make_tensor_value_info("b", FLOAT, None)]
    )
    node: NodeProto = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    assert witnesses.evaluators(node, 17) == (RUNTIME,)

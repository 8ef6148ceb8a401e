"""Quantised models as files: they stay as they are, but for the pairs written into them."""

import numpy as np
import onnx
import pytest
from command_lines import refused, run, run_json
from onnx_models import INT64, model_of, run_onnx

from ascend_lab.compiler import evaluate
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.deploy import compress as c
from ascend_lab.deploy.compress.samples import batch_of, feeds_of
from ascend_lab.errors import InputError


def numbers(*shape, seed=0, size=1.0):
    drawn = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (size * drawn).astype(np.float32)


def norm(seed, channels):
    """Return scale, bias, mean and variance of a batch norm."""
    rows = numbers(4, channels, seed=seed)
    return {f"n{seed}{i}": np.abs(row) + 0.5 if i in (0, 3) else row for i, row in enumerate(rows)}


def off(wanted, got):
    """Return the error of an output as a share of it, both in full shape and type."""
    assert (wanted.shape, wanted.dtype) == (got.shape, got.dtype)
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted))


STATE = model_of(
    "Shape x -> s; Gather s zero -> n; Unsqueeze n first -> n1; Concat n1 width -> hs axis=0; "
    "ConstantOfShape hs -> h0; MatMul x w -> a; Gemm h0 u b -> r; Add a r -> t; Tanh t -> y",
    {"x": ("batch", 8)}, ["y"],
    {"zero": np.array(0), "first": np.array([0]), "width": np.array([6]), "w": numbers(8, 6),
     "u": numbers(6, 6), "b": numbers(6)},
)  # fmt: skip
ROWS = model_of(
    "c1: Conv x w b -> a pads=[2,2]; BatchNormalization a n00 n01 n02 n03 -> e; Relu e -> f; "
    "c2: Conv f v -> g group=12 auto_pad=SAME_UPPER; BatchNormalization g n00 n01 n02 n03 -> h; "
    "Relu h -> i; c3: ConvTranspose i t -> y strides=[2]",
    {"x": ("N", 6, "length")}, ["y"],
    {"w": numbers(12, 6, 5), "b": numbers(12), "v": numbers(12, 1, 3), "t": numbers(12, 4, 4),
     **norm(0, 12)},
)  # fmt: skip
STEPS_FIRST = model_of(
    "MatMul x w -> a; Relu a -> b; LSTM b W R _ _ h h -> l hidden_size=5; "
    "Squeeze l one -> m; m2: MatMul m v -> y",
    {"x": (7, "batch", 8), "h": (1, "batch", 5)}, ["y"],
    {"w": numbers(8, 8), "W": numbers(1, 20, 8), "R": numbers(1, 20, 5), "one": np.array([1]),
     "v": numbers(5, 3)},
)  # fmt: skip
TOKENS = model_of(
    "Gather table ids -> e; Cast rate -> r to=FLOAT; Mul e r -> f; "
    "Transpose turned -> w perm=[1,0]; MatMul f w -> g; Relu g -> h; MatMul h v -> y",
    {"ids": (("batch", "seq"), INT64), "rate": ((), INT64)}, ["y"],
    {"table": numbers(40, 8), "turned": numbers(16, 8), "v": numbers(16, 5)},
)  # fmt: skip
IMAGES = model_of(
    "Conv x w -> a pads=[1,1,1,1]; BatchNormalization a n00 n01 n02 n03 -> b; Relu b -> d; "
    "Conv d v -> e pads=[1,1,1,1]; Add d e -> f; Relu f -> g; GlobalAveragePool g -> h; "
    "Flatten h -> i; Gemm i u k -> y transB=1",
    {"x": ("N", 3, 8, 8)}, ["y"],
    {"w": numbers(6, 3, 3, 3), "v": numbers(6, 6, 3, 3, size=0.3), "u": numbers(4, 6),
     "k": numbers(4), **norm(0, 6)},
    opset=9,
)  # fmt: skip
CASES = {
    "a constant of the batch's size": (STATE, {"x": (8,)}, 1),
    "rows and their norms": (ROWS, {"x": (6, 40)}, 3),
    "an operator set without scales per channel": (IMAGES, {"x": (3, 8, 8)}, 3),
}


def quantised(capsys, tmp_path, model, samples, *more):
    """Return the written model and what the command says of it."""
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", **samples)
    words = ("quantize", tmp_path / "m.onnx", "--calibration", tmp_path / "c.npz")
    data = run_json(capsys, *words, "--output", tmp_path / "q.onnx", *more)
    return onnx.load(tmp_path / "q.onnx"), data


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_written_model_takes_any_batch(name, capsys, tmp_path):
    model, inputs, layers = CASES[name]
    samples = {key: numbers(32, *shape, seed=1) for key, shape in inputs.items()}
    written, data = quantised(capsys, tmp_path, model, samples)
    assert (len(data["layers"]), data["batch"]) == (layers, "any")
    told = [row["reason"] for row in data["unquantised"]]
    assert told == ["what it computes is known before the network runs"] * (model is STATE)
    assert not any(node.op_type == "BatchNormalization" for node in written.graph.node)
    for rows in (1, 7):
        feed = {key: value[:rows] for key, value in samples.items()}
        assert off(*(run_onnx(one, feed)["y"] for one in (model, written))) < 0.05
    assert 0 < data["output_error"] < 0.05


def test_the_batch_may_be_a_later_axis_and_recurrent_layers_stay_as_they_are(capsys, tmp_path):
    samples = {"x": numbers(7, 40, 8), "h": numbers(1, 40, 5)}
    written, data = quantised(capsys, tmp_path, STEPS_FIRST, samples)
    assert [(row["op"], row["reason"]) for row in data["unquantised"]] == [
        ("LSTM", "a file has no form of LSTM in eight bits")
    ]
    assert data["batches"] == 2 and len(data["layers"]) == 2
    feed = {name: value[:, :3] for name, value in samples.items()}
    assert off(*(run_onnx(one, feed)["y"] for one in (STEPS_FIRST, written))) < 0.05


def test_types_of_inputs_stay_and_what_has_no_batch_is_given_once(capsys, tmp_path):
    rng = np.random.default_rng(0)
    samples = {"ids": rng.integers(0, 40, (32, 6)), "rate": np.array(2)}
    written, data = quantised(capsys, tmp_path, TOKENS, samples)
    assert [entry.type.tensor_type.elem_type for entry in written.graph.input] == [INT64, INT64]
    feed = {"ids": rng.integers(0, 40, (3, 11)), "rate": np.array(2)}
    assert off(*(run_onnx(one, feed)["y"] for one in (TOKENS, written))) < 0.05
    assert len(data["layers"]) == 2


def test_the_error_says_where_it_was_measured(capsys, tmp_path):
    samples = {"x": numbers(48, 3, 8, 8)}
    _, data = quantised(capsys, tmp_path, IMAGES, samples)
    assert (data["batches"], data["held_out_batches"], data["held_out_error"]) == (3, 0, None)
    np.savez(tmp_path / "h.npz", x=numbers(16, 3, 8, 8, seed=9, size=4.0))
    words = ["quantize", tmp_path / "m.onnx", "--calibration", tmp_path / "c.npz", "--output",
             tmp_path / "q.onnx"]  # fmt: skip
    _, out, _ = run(capsys, *words)
    assert (
        "measured on the calibration samples (3 batches)" in out
        and "no samples were held out" in out
    )
    held = run_json(capsys, *words, "--held-out", tmp_path / "h.npz")
    assert held["held_out_batches"] == 1
    assert held["held_out_error"] > 3 * held["output_error"], "four times as large: cut off"
    (tmp_path / "one.cfg").write_text("batch_num: 1")
    _, out, _ = run(capsys, *words, "--config", tmp_path / "one.cfg")
    assert "calibration samples (1 batch)" in out and "held-out samples (2 batches)" in out
    np.savez(tmp_path / "h.npz", x=numbers(5, 3, 8, 8))
    assert "feeds of (16, 3, 8, 8)" in refused(capsys, *words, "--held-out", tmp_path / "h.npz")


def test_what_stays_in_floating_point_is_told_with_the_reason(capsys, tmp_path):
    model = model_of(
        "one: MatMul x w -> a; two: MatMul a b -> d; three: MatMul d v -> e; Einsum e v -> y "
        "equation='nij,jk->nik'",
        {"x": ("N", 4, 8), "b": ("N", 8, 8)}, ["y"], {"w": numbers(8, 8), "v": numbers(8, 8)},
    )  # fmt: skip
    (tmp_path / "skip.cfg").write_text('skip_layers: "three"')
    samples = {"x": numbers(16, 4, 8), "b": numbers(16, 8, 8)}
    _, data = quantised(capsys, tmp_path, model, samples, "--config", tmp_path / "skip.cfg")
    assert {row["name"]: row["reason"] for row in data["unquantised"]} == {
        "two": "its weights are computed, not constant",
        "three": "the configuration skips it",
        "y": "a file has no form of Einsum in eight bits",
    }
    halves = model_of("m: MatMul x w -> y", {"x": (("N", 8), onnx.TensorProto.FLOAT16)}, ["y"],
                      {"w": numbers(8, 6).astype(np.float16)})  # fmt: skip
    onnx.save(halves, tmp_path / "h.onnx")
    np.savez(tmp_path / "x.npz", x=numbers(4, 8).astype(np.float16))
    message = refused(capsys, "quantize", tmp_path / "h.onnx", "--calibration", tmp_path / "x.npz",
                      "--output", tmp_path / "q.onnx")  # fmt: skip
    assert "m: it computes in fp16, not in fp32" in message


@pytest.mark.parametrize("channel_wise", [True, False])
def test_channels_of_zeros_of_tiny_weights_and_of_large_biases_are_right(channel_wise):
    weights = numbers(6, 4, 3, 3)
    weights[0], weights[1], weights[2] = 0, weights[1] * 1e-9, weights[2] * 1e-4
    if not channel_wise:
        weights *= 1e-6
    bias = np.array([5, 4e4, 3e5, 1e6, -7, 0], np.float32)
    model = model_of("Conv x w b -> y", {"x": (4, 4, 6, 6)}, ["y"], {"w": weights, "b": bias})
    feed = {"x": numbers(4, 4, 6, 6, size=50.0)}
    graph = import_onnx(model)
    plan = c.Plan(c.LayerPlan("minmax", channel_wise=channel_wise))
    found = c.quantise_graph(graph, [feed], plan)
    wanted = run_onnx(model, feed)["y"]
    spread = np.abs(wanted - bias[:, None, None]).max(axis=(0, 2, 3))
    for got in (
        run_onnx(c.qdq_model(found), feed)["y"],
        *evaluate(c.fake_quantised(found), feed).values(),
        *evaluate(c.deploy(found.graph, found.layers), feed).values(),
    ):
        gap = np.abs(got - wanted).max(axis=(0, 2, 3))
        assert np.all(gap <= 0.05 * spread + 1e-6 * np.abs(bias) + 1e-6 * spread.max()), gap


def test_a_bias_beyond_int32_by_records_stays_in_floats():
    model = model_of("m: Gemm x w b -> y", {"x": (4, 8)}, ["y"],
                     {"w": numbers(8, 3), "b": np.full(3, 1e6, np.float32)})  # fmt: skip
    feed = {"x": numbers(4, 8)}
    found = c.with_records(import_onnx(model), [c.LayerScales("m", 0.03, 0, (1e-6,))])
    written = c.qdq_model(found)
    assert not any(t.data_type == onnx.TensorProto.INT32 for t in written.graph.initializer)
    for graph in (c.fake_quantised(found), c.deploy(found.graph, found.layers)):
        (got,) = evaluate(graph, feed).values()
        np.testing.assert_allclose(got, run_onnx(written, feed)["y"], atol=0.2)


@pytest.mark.parametrize("method", ["minmax", "ifmr", "hfmg"])
def test_numbers_below_the_least_scale_of_the_rules_are_not_lost(method):
    model = model_of("m: MatMul x w -> y", {"x": (16, 8)}, ["y"], {"w": numbers(8, 3, size=1e-7)})
    feed = {"x": numbers(16, 8, size=1e-7)}
    found = c.quantise_graph(import_onnx(model), [feed], c.Plan(c.LayerPlan(method)))
    assert off(run_onnx(model, feed)["y"], run_onnx(c.qdq_model(found), feed)["y"]) < 0.05


def test_weights_of_several_matrices_have_one_scale():
    model = model_of("m: MatMul x w -> y", {"x": (4, 3, 5, 8)}, ["y"], {"w": numbers(3, 8, 6)})
    feed = {"x": numbers(4, 3, 5, 8)}
    found = c.quantise_graph(import_onnx(model), [feed])
    assert len(found.layers[0].weight_scales) == 1
    assert off(run_onnx(model, feed)["y"], run_onnx(c.qdq_model(found), feed)["y"]) < 0.05


# -- residuals ------------------------------------------------------------------------------------
def residual(size=1.0):
    return model_of(
        "Relu x -> t; Conv t w -> a pads=[1,1,1,1]; Add a t -> y",
        {"x": (4, 16, 6, 6)}, ["y"], {"w": numbers(16, 16, 3, 3, size=0.05 * size)},
    )  # fmt: skip


def test_a_residual_is_bytes_only_where_the_file_says_so():
    """Sixteen times what was calibrated on: a layer's bytes end, a residual in floats does not."""
    graph = import_onnx(residual())
    calm = {"x": numbers(4, 16, 6, 6)}
    loud = {"x": numbers(4, 16, 6, 6, seed=3, size=16.0)}
    for method, shared in (("minmax", True), ("percentile", False)):
        options = {} if shared else {"percent": 90.0}
        plan = c.Plan(c.LayerPlan(method, options=options))
        found = c.quantise_graph(graph, [calm], plan)
        assert found.layers[0].shared == shared, "what calibration cuts off is no residual"
        written = c.qdq_model(found)
        for feed in (calm, loud):
            wanted = run_onnx(written, feed)["y"]
            step = found.layers[0].scale
            (fake,) = evaluate(c.fake_quantised(found), feed).values()
            (whole,) = evaluate(c.deploy(found.graph, found.layers), feed).values()
            (read,) = evaluate(import_onnx(written), feed).values()
            for got in (fake, whole, read):
                assert np.abs(got - wanted).max() <= step
    assert np.abs(wanted).max() > 20, "no limit on the residual"


# -- samples --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inputs", "outputs", "axes"),
    [
        ({"x": ("n", 8)}, [None], {"x": 0}),
        ({"x": ("time", "batch", 8), "h": (2, "batch", 4)}, [None], {"x": 1, "h": 1}),
        ({"x": ("seq", 8), "m": ("seq", "seq")}, [("seq", 4)], {"x": None, "m": None}),
        ({"x": ("", 3, 8, 8), "r": ()}, [None], {"x": 0, "r": None}),
        ({"x": (4, 8)}, [(4, 2)], {"x": None}),
        ({"x": ("rows", 8)}, [(8, 8)], {"x": None}),
        ({"x": (1, "width")}, [(1, "width")], {"x": None}),
    ],
)
def test_the_batch_is_found_by_its_name_and_place(inputs, outputs, axes):
    assert batch_of(inputs, outputs).axes == axes


def test_samples_are_cut_along_the_batch_wherever_it_stands():
    inputs = {"x": (3, "batch", 2), "h": (4,), "m": ("batch", 5)}
    batch = batch_of(inputs, [None])
    arrays = {"x": numbers(3, 40, 2), "h": numbers(4), "m": numbers(40, 5)}
    one, two = feeds_of(inputs, batch, arrays)
    assert (one["x"].shape, two["m"].shape, one["h"].shape) == ((3, 16, 2), (16, 5), (4,))
    np.testing.assert_array_equal(two["x"], arrays["x"][:, 16:32])
    fixed = batch_of({"x": (1, 5)}, [None])
    assert [f["x"].shape for f in feeds_of({"x": (1, 5)}, fixed, {"x": numbers(3, 5)})] == [
        (1, 5)
    ] * 3
    assert len(feeds_of({"x": (2, 5)}, fixed, {"x": numbers(7, 2, 5)})) == 7
    for change in ({"m": numbers(41, 5)}, {"h": numbers(3)}, {"x": numbers(3, 40, 3)},
                   {"x": numbers(3, 0, 2), "m": numbers(0, 5)}):  # fmt: skip
        with pytest.raises(InputError):
            feeds_of(inputs, batch, arrays | change)

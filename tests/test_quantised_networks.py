"""Random quantised networks: every way to a value gives what the standard's text says.

QUANTISED_NETWORKS=700 in the environment draws so many; the first few are the usual ones.
"""

import os
from importlib import import_module

import numpy as np
import onnxruntime
import pytest
from onnx_models import model_of
from quantised_strategies import network
from quantised_witness import FP16, FP32, Tensor, witness

from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.engine import tune
from ascend_lab.compiler import compile_stages, evaluate
from ascend_lab.compiler.migrate import migrate
from ascend_lab.compiler.onnx import import_model
from ascend_lab.compiler.onnx.host import run_on_host
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy.runtime import OfflineModel, compile_offline, unpack_parts
from ascend_lab.machine.chip import load_chip

NETWORKS = int(os.environ.get("QUANTISED_NETWORKS", "30"))
CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2", "Ascend310P3")
TUNED = 10
"""One network in so many is tuned and compiled into a file, too."""
SMALL = Settings(budget=4, early_stop=None)


@pytest.fixture(autouse=True)
def rewriting_pays(monkeypatch):
    """Let `migrate` always write what it rewrote: where that is slower it would keep the source."""
    module = import_module("ascend_lab.compiler.migrate")
    monkeypatch.setattr(module, "_time_s", lambda *arguments: 0.0)


def as_written(model, feed):
    """Return what ONNX Runtime computes node by node: fused, it is off itself in some networks."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def assert_within(found: np.ndarray, wanted: Tensor, way: str) -> None:
    """Assert that each number is as near as the witness says one may ask."""
    off = np.abs(found.astype(np.float64) - wanted.value)
    beyond = off > wanted.bound * (1 + 1e-9) + 1e-30
    assert found.shape == wanted.value.shape, way
    if beyond.any():
        worst = np.unravel_index(np.argmax(np.where(beyond, off, 0.0)), off.shape)
        raise AssertionError(f"{way}: {off[worst]:g} off, {wanted.bound[worst]:g} is allowed")


@pytest.mark.parametrize("seed", range(NETWORKS))
def test_every_way_computes_what_the_standard_says(seed):
    model, feed = network(seed)
    (name,) = (entry.name for entry in model.graph.output)
    wide, half = (witness(model, feed, form)[name] for form in (FP32, FP16))
    saturates = any(node.op_type.endswith("Integer") for node in model.graph.node)
    if not saturates:  # ONNX Runtime limits those sums to int16 on processors without VNNI
        assert_within(as_written(model, feed)[name], wide, "ONNX Runtime")
    chip = load_chip(CHIPS[seed % len(CHIPS)])
    imported = import_model(model)
    graph = imported.graph
    assert_within(evaluate(graph, feed)[name], wide, "run")
    compiled = compile_stages(graph, chip).compiled
    assert_within(run_tasks(compiled, feed, graph.outputs)[name], half, "run --compiled")
    migrated = migrate(model.SerializeToString(), chip).model
    assert migrated is not None
    found = as_written(migrated, feed)[name]  # the file is one that ONNX Runtime takes
    assert found.shape == wide.value.shape
    assert_within(run_on_host(migrated, feed)[name], wide, "migrate")
    if seed % TUNED == 0:
        parts = unpack_parts(compile_offline({None: imported}, chip), "drawn.alm")
        gear = OfflineModel("drawn.alm", parts).gear({k: v.shape for k, v in feed.items()})
        assert_within(gear.run(feed, kernels=True)[name], half, "a compiled file")
        assert_within(gear.run(feed)[name], wide, "the graph of a compiled file")
        tuned = tune(graph, chip, "1,2", settings=SMALL).compiled
        assert_within(run_tasks(tuned, feed, graph.outputs)[name], half, "aoe")


# -- one fault each -------------------------------------------------------------------------------
def drawn(*shape, size=1.0):
    numbers = np.random.default_rng(shape).normal(size=shape)
    return (size * numbers).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scale", [1.4e-5, 1e-6, 70000.0])
def test_scales_whose_reciprocal_fp16_does_not_hold(chip, scale):
    """It overflows below 1.5e-5, and loses bits beyond 16,384."""
    model = model_of("QuantizeLinear x s z -> q; Cast q -> y to=FLOAT", {"x": (2, 3, 8, 40)}, ["y"],
                     {"s": np.float32(scale), "z": np.int8(-9)})  # fmt: skip
    feed = {"x": drawn(2, 3, 8, 40, size=min(60 * scale, 6e4 / 4))}
    graph = import_model(model).graph
    got = run_tasks(compile_stages(graph, chip).compiled, feed, graph.outputs)["y"]
    assert_within(got, witness(model, feed, FP16)["y"], "run --compiled")
    assert np.unique(got).size > (50 if scale < 1 else 1)


def test_a_migrated_convolution_has_its_zero_point_around_the_image():
    weights = np.random.default_rng(0).integers(-128, 128, (4, 3, 3, 3)).astype(np.int8)
    model = model_of(
        "QuantizeLinear x s z -> q; DequantizeLinear q s z -> d; DequantizeLinear w t n -> v; "
        "Conv d v -> y pads=[1,0,2,1]",
        {"x": (1, 3, 6, 6)}, ["y"],
        {"s": np.float32(0.03), "z": np.int8(-100), "w": weights, "t": np.float32(0.01),
         "n": np.int8(0)},
    )  # fmt: skip
    feed = {"x": np.abs(drawn(1, 3, 6, 6))}
    migrated = migrate(model.SerializeToString(), load_chip("Ascend310")).model
    assert any(node.op_type == "ConvInteger" for node in migrated.graph.node)
    assert_within(run_on_host(migrated, feed)["y"], witness(model, feed, FP32)["y"], "migrate")


WHOLE = {
    "w": np.random.default_rng(1).integers(-128, 128, (6, 4, 3, 3)).astype(np.int8),
    "m": np.random.default_rng(2).integers(0, 256, (8, 6)).astype(np.uint8),
    "each": np.abs(drawn(6)) * np.float32(0.01),
    "points": np.random.default_rng(3).integers(0, 256, 6).astype(np.uint8),
    "three": np.int8(3),
    "none": np.zeros(6, np.int8),
    "s": np.float32(0.02),
    "z": np.uint8(120),
    "t": np.float32(0.05),
    "b": np.random.default_rng(4).integers(-1000, 1000, 6).astype(np.int32),
}
INTEGER_OPERATORS = {
    "ConvInteger, zero point computed": (
        ("DynamicQuantizeLinear x -> q r o; ConvInteger q w o three -> i pads=[1,1,1,1]; "
        "Cast i -> f to=FLOAT; Mul f r -> y"), (2, 4, 6, 6)),
    "MatMulInteger, zero point computed": (
        ("DynamicQuantizeLinear x -> q r o; MatMulInteger q m o points -> i; "
        "Cast i -> f to=FLOAT; Mul f r -> y"), (2, 5, 8)),
    "QLinearConv": (
        ("QuantizeLinear x s z -> q; QLinearConv q s z w each none t z b -> p pads=[1,1,1,1]; "
        "DequantizeLinear p t z -> y"), (2, 4, 6, 6)),
    "QLinearMatMul": (
        ("QuantizeLinear x s z -> q; QLinearMatMul q s z m each points t z -> p; "
        "DequantizeLinear p t z -> y"), (2, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(INTEGER_OPERATORS))
def test_integer_operators_multiply_bytes_and_are_migrated_to_what_others_run(name):
    text, shape = INTEGER_OPERATORS[name]
    read = {word for word in text.replace(";", " ").split() if word in WHOLE}
    model = model_of(text, {"x": shape}, ["y"], {key: WHOLE[key] for key in read})
    feed = {"x": drawn(*shape)}
    wanted = run_on_host(model, feed)["y"]
    graph = import_model(model).graph
    products = [n for n in graph.nodes if n.op in ("conv2d", "matmul", "batch_matmul")]
    assert products
    assert all(graph.types[n.inputs[0]].dtype == "int8" for n in products)
    close = 1e-6 * np.abs(wanted).max()
    np.testing.assert_allclose(evaluate(graph, feed)["y"], wanted, atol=close)
    migrated = migrate(model.SerializeToString(), load_chip("Ascend310")).model
    assert as_written(migrated, feed)["y"].shape == wanted.shape
    np.testing.assert_allclose(run_on_host(migrated, feed)["y"], wanted, atol=close)

"""Random quantised networks: every way to a value gives what the standard's text says.

QUANTISED_NETWORKS=700 in the environment draws so many; the first few are the usual ones.
"""

import os

import numpy as np
import pytest
from onnx_models import run_onnx
from quantised_strategies import network
from quantised_witness import FP16, FP32, Tensor, witness

from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.engine import tune
from ascend_lab.chip import load_chip
from ascend_lab.graph import compile_stages, evaluate, run_tasks
from ascend_lab.graph.migrate import migrate
from ascend_lab.graph.onnx import import_model
from ascend_lab.graph.onnx.host import run_on_host
from ascend_lab.runtime import OfflineModel, compile_offline, unpack_parts

NETWORKS = int(os.environ.get("QUANTISED_NETWORKS", "30"))
CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2", "Ascend310P3")
TUNED = 10
"""One network in so many is tuned and compiled into a file, too."""
SMALL = Settings(budget=4, early_stop=None)


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
        assert_within(run_onnx(model, feed)[name], wide, "ONNX Runtime")
    chip = load_chip(CHIPS[seed % len(CHIPS)])
    imported = import_model(model)
    graph = imported.graph
    assert_within(evaluate(graph, feed)[name], wide, "run")
    compiled = compile_stages(graph, chip).compiled
    assert_within(run_tasks(compiled, feed, graph.outputs)[name], half, "run --compiled")
    migrated = migrate(model.SerializeToString(), chip).model
    assert migrated is not None
    found = run_onnx(migrated, feed)[name]  # the file is one that ONNX Runtime takes
    assert found.shape == wide.value.shape
    assert_within(run_on_host(migrated, feed)[name], wide, "migrate")
    if seed % TUNED == 0:
        parts = unpack_parts(compile_offline({None: imported}, chip), "drawn.alm")
        gear = OfflineModel("drawn.alm", parts).gear({k: v.shape for k, v in feed.items()})
        assert_within(gear.run(feed, kernels=True)[name], half, "a compiled file")
        assert_within(gear.run(feed)[name], wide, "the graph of a compiled file")
        tuned = tune(graph, chip, "1,2", settings=SMALL).compiled
        assert_within(run_tasks(tuned, feed, graph.outputs)[name], half, "aoe")

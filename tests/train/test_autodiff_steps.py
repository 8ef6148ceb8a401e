"""Whole steps: equal to loops in NumPy, in fp32 and in mixed precision; the scale of the loss."""

from typing import Any

import numpy as np
import pytest
from grad_cases import attention, convolutions, given, mlp

from ascend_lab.errors import InputError
from ascend_lab.graph import evaluate
from ascend_lab.train import (
    DynamicLossScale,
    at_step,
    first_values,
    found_inf,
    run_step,
    training_graph,
)

STEPS = 6


def _data(step: Any) -> dict[str, Any]:
    inputs = given(step, seed=5)
    return {name: inputs[name] for name in (*step.data, *step.targets)}


def _loop(settings: dict[str, float], adam: bool) -> list[float]:
    """Train the small network in NumPy, in fp64; return the losses."""
    step = training_graph(mlp())
    data = _data(step)
    weights = {n: v.astype(np.float64) for n, v in first_values(step).items() if "." not in n}
    one = {n: np.zeros_like(v) for n, v in weights.items()}
    two = {n: np.zeros_like(v) for n, v in weights.items()}
    losses = []
    for t in range(1, STEPS + 1):
        hidden = np.maximum(data["x"] @ weights["w1"].T + weights["b1"], 0)
        logits = hidden @ weights["w2"].T + weights["b2"]
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        losses.append(float(-(data["target"] * np.log(shares)).sum(axis=1).mean()))
        slope = (shares - data["target"]) / len(logits)
        inner = slope @ weights["w2"] * (hidden > 0)
        grads = {"w2": slope.T @ hidden, "b2": slope.sum(axis=0),
                 "w1": inner.T @ data["x"], "b1": inner.sum(axis=0)}  # fmt: skip
        for name, grad in grads.items():
            if adam:
                one[name] = 0.9 * one[name] + 0.1 * grad
                two[name] = 0.999 * two[name] + 0.001 * grad**2
                top = one[name] / (1 - 0.9**t)
                move = top / (np.sqrt(two[name] / (1 - 0.999**t)) + 1e-8)
            else:
                one[name] = settings["momentum"] * one[name] + grad
                move = one[name]
            weights[name] -= settings["lr"] * move
    return losses


def _losses(step: Any) -> list[float]:
    values, data, found = first_values(step), _data(step), []
    for number in range(1, STEPS + 1):
        result = run_step(step, values, data, number)
        values = dict(result.values)
        assert not result.overflow
        found.append(result.loss)
    return found


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("sgd", {"lr": 0.1, "momentum": 0.8}), ("adam", {"lr": 0.02})],
)
def test_steps_equal_a_numpy_loop(optimizer: str, settings: dict[str, float]) -> None:
    wanted = _loop(settings, optimizer == "adam")
    found = _losses(training_graph(mlp(), optimizer=optimizer, settings=settings))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert found[-1] < found[0] - 0.05
    narrow = training_graph(
        mlp(), optimizer=optimizer, settings=settings, dtype="fp16", loss_scale=256.0
    )
    np.testing.assert_allclose(_losses(narrow), wanted, rtol=5e-3)


@pytest.mark.parametrize("build", [convolutions, attention])
def test_training_lowers_the_loss_in_mixed_precision(build: Any) -> None:
    step = training_graph(
        build(), dtype="fp16", loss_scale=512.0, settings={"lr": 0.05, "momentum": 0.5}
    )
    found = _losses(step)
    assert found[-1] < found[0] - 0.01


# -- mixed precision ------------------------------------------------------------------------------
def test_masters_are_wide_and_the_step_computes_narrow() -> None:
    step = training_graph(mlp(), dtype="fp16", loss_scale=1024.0)
    types = step.graph.types
    assert {types[n].dtype for n in (*step.parameters, *step.states)} == {"fp32"}
    assert {types[n].dtype for n in step.gradients.values()} == {"fp16"}
    products = [n for n in step.graph.nodes if n.op in ("matmul", "gemm")]
    assert {types[n.output].dtype for n in products} == {"fp16"}
    assert types[step.loss].dtype == "fp32"
    same = training_graph(mlp(), dtype="fp16", master="fp16")
    assert same.graph.types["w1"].dtype == "fp16"
    assert not any(n.op == "cast" and n.inputs[0] in same.parameters for n in same.graph.nodes)


def test_a_graph_that_is_narrow_already_trains_the_same() -> None:
    wide, narrow = (training_graph(mlp(d), dtype="fp16", optimizer=None) for d in ("fp32", "fp16"))
    inputs = given(wide)
    one, two = evaluate(wide.graph, inputs), evaluate(narrow.graph, inputs)
    for name in wide.graph.outputs:
        np.testing.assert_allclose(one[name], two[name], rtol=4e-3, atol=2e-4)


def test_gradients_carry_the_loss_scale_and_updates_do_not() -> None:
    plain, scaled = (training_graph(mlp(), loss_scale=s) for s in (1.0, 256.0))
    inputs = given(plain)
    one, two = evaluate(plain.graph, inputs), evaluate(scaled.graph, inputs)
    for name in plain.parameters:
        np.testing.assert_allclose(one[f"{name}.new"], two[f"{name}.new"], rtol=1e-6, atol=1e-7)
    slopes = [training_graph(mlp(), optimizer=None, loss_scale=s) for s in (1.0, 256.0)]
    small, large = (evaluate(s.graph, {n: inputs[n] for n in s.graph.inputs}) for s in slopes)
    np.testing.assert_allclose(large["w1.grad"], 256 * small["w1.grad"], rtol=1e-5)
    np.testing.assert_allclose(large["loss"], small["loss"])


def test_small_gradients_survive_only_with_a_scale() -> None:
    """Beside a target that the network already meets, fp16 gradients without a scale are lost."""
    found = []
    for scale in (1.0, 2.0**15):
        step = training_graph(mlp(), dtype="fp16", optimizer=None, loss_scale=scale)
        inputs = given(step)
        inputs["x"] = inputs["x"] * np.float16(0.01)
        inputs["w2"] = inputs["w2"] * np.float32(1e-5)
        inputs["target"] = np.full((4, 5), 0.2, np.float32)
        slope = evaluate(step.graph, inputs)[step.gradients["w1"]]
        found.append(np.count_nonzero(slope))
    assert found[0] < found[1]


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    step = training_graph(mlp(), dtype="fp16", loss_scale=2.0**24)
    values = first_values(step)
    result = run_step(step, values, {**_data(step), "x": np.full((4, 8), 1000.0, np.float16)})
    assert result.overflow
    for name, value in values.items():
        np.testing.assert_array_equal(result.values[name], value)
    scale = DynamicLossScale(2.0**24, good_steps=7)
    assert scale.next(result.overflow) == DynamicLossScale(2.0**23)


def test_dynamic_scale_grows_after_good_steps() -> None:
    scale = DynamicLossScale(1024.0, growth_interval=3)
    seen = []
    for overflow in (False, False, False, False, True, False):
        scale = scale.next(overflow)
        seen.append((scale.scale, scale.good_steps))
    assert seen == [(1024, 1), (1024, 2), (2048, 0), (2048, 1), (1024, 0), (1024, 1)]
    assert DynamicLossScale(1.0).next(True).scale == 1.0
    assert DynamicLossScale(2.0**24, growth_interval=1).next(False).scale == 2.0**24


def test_found_inf() -> None:
    assert not found_inf({"a": np.ones(3, np.float16)})
    assert found_inf({"a": np.ones(3), "b": np.array([1.0, np.inf])})
    assert found_inf({"a": np.array([np.nan], np.float16)})


@pytest.mark.parametrize(
    "settings", [{"scale": 0.0}, {"growth_interval": 0}, {"backoff": 1.0}, {"growth": 0.5}]
)
def test_bad_scales(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DynamicLossScale(**settings)


def test_running_needs_an_optimiser_and_adam_counts_steps() -> None:
    step = training_graph(mlp(), optimizer=None)
    with pytest.raises(InputError, match="with an optimiser"):
        run_step(step, first_values(step), _data(step))
    adam = training_graph(mlp(), optimizer="adam")
    counts = {n.attr("step", 1) for n in at_step(adam, 4).graph.nodes if n.op == "adam"}
    assert counts == {4}
    assert at_step(adam, 1) is adam

"""Gradients: rules, steps, recomputation and compiled graphs."""

from typing import Any

import numpy as np
import pytest
from grad_cases import (
    NETWORKS,
    attention,
    check_gradients,
    convolutions,
    doubled,
    given,
    mlp,
    norm,
)

from ascend_lab.cluster.train import (
    DynamicLossScale,
    Optimiser,
    at_step,
    compile_step,
    compile_training,
    cut_tensors,
    first_values,
    run_step,
    tensors_between_cuts,
    training_graph,
)
from ascend_lab.cluster.train.autodiff import Tape, gradients
from ascend_lab.cluster.train.compile import (
    TRAINING,
    as_convolutions,
    casts_apart,
)
from ascend_lab.cluster.train.step import trainable
from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType, evaluate, zoo
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.ir import Constant, Fill, infer, verify
from ascend_lab.compiler.memory import peak_live_bytes
from ascend_lab.compiler.passes import DEFAULT, run_passes
from ascend_lab.compiler.placement import buffers_of
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.operators import ops
from ascend_lab.operators.ops import OPERATORS, verify as verify_ops


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_central_differences(name: str) -> None:
    step = training_graph(NETWORKS[name](), optimizer=None)
    check_gradients(step, given(step))


def test_loss_is_the_mean_cross_entropy_of_rows() -> None:
    step = training_graph(mlp())
    inputs = given(step)
    hidden = np.maximum(inputs["x"] @ inputs["w1"].T + inputs["b1"], 0)
    logits = (hidden @ inputs["w2"].T + inputs["b2"]).astype(np.float64)
    shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = -(inputs["target"] * shares).sum(axis=1).mean()
    np.testing.assert_allclose(evaluate(step.graph, inputs)[step.loss], [wanted], rtol=1e-6)


def test_phases_come_in_order_and_cover_all_nodes() -> None:
    step = training_graph(convolutions(), dtype="fp16", optimizer="adam")
    phases = [step.phases[node.name] for node in step.graph.nodes]
    ranks = {"forward": 0, "backward": 1, "update": 2}
    assert [ranks[p] for p in phases] == sorted(ranks[p] for p in phases)
    assert set(phases) == set(ranks)


def test_names_inputs_and_outputs() -> None:
    step = training_graph(mlp(), optimizer="adam")
    assert step.data == ("x",)
    assert step.targets == ("target",)
    assert set(step.states) == {f"{p}.{s}" for p in step.parameters for s in ("mean", "square")}
    assert set(step.graph.inputs) == {*step.data, *step.targets, *step.parameters, *step.states}
    assert step.graph.outputs == (step.loss, *step.updates.values())
    assert step.updates["w1"] == "w1.new"
    assert set(step.updates) == set(step.initial) == {*step.parameters, *step.states}
    assert step.parameter_count == 16 * 8 + 16 + 5 * 16 + 5
    slopes = training_graph(mlp(), optimizer=None)
    assert slopes.graph.outputs == ("loss", "b2.grad", "w2.grad", "b1.grad", "w1.grad")
    assert slopes.states == ()


def test_batch_norms_use_and_average_the_batchs_statistics() -> None:
    step = training_graph(convolutions())
    inputs = given(step)
    found = evaluate_all(step.graph, inputs)
    conv = found["conv0"].astype(np.float64)
    new = 0.9 * inputs["bn0.mean"] + 0.1 * conv.mean(axis=(0, 2, 3))
    np.testing.assert_allclose(found[step.updates["bn0.mean"]], new, rtol=1e-5, atol=1e-6)
    assert {"bn0.mean", "bn0.var"} <= set(step.states)
    assert "bn0.mean" not in step.parameters
    # the statistics that backward reads are the batch's only with momentum 0, as forward has
    norms = [node for node in step.graph.nodes if node.op == "batch_norm_training"]
    assert {node.attr("momentum") for node in norms} == {0.0}


# -- which constants are parameters ---------------------------------------------------------------
def _arrays() -> Any:
    """A network whose weights are arrays, as an ONNX importer gives them."""
    net = GraphBuilder("arrays")
    rng = np.random.default_rng(0)

    def array(*shape: int, name: str) -> Any:
        return net.constant(rng.standard_normal(shape).astype(np.float32), name=name)

    x = net.matmul(net.input("x", (3, 4)), array(4, 4, name="w"), name="product")
    x = net.add(x, array(4, name="bias"), name="biased")
    x = net.add(x, array(3, 4, name="places"), name="placed")
    x = net.mul(x, net.fill((4,), 2.0, "twice"), name="doubled")
    net.output(net.gather(x, net.constant(np.array([0, 2], np.int32), name="rows"), name="picked"))
    return net.build()


def test_arrays_are_parameters_where_weights_stand() -> None:
    assert trainable(_arrays()) == ("w", "bias")
    assert trainable(_arrays(), ["places", "w"]) == ("w", "places")
    step = training_graph(_arrays(), optimizer=None)
    check_gradients(step, given(step))


def test_constants_that_no_output_hangs_on_are_left_out() -> None:
    net = GraphBuilder("loose")
    x = net.input("x", (3, 4))
    net.greater(net.matmul(x, net.weight((4, 4), "w0"), name="unused"), x, name="ends")
    net.output(net.matmul(x, net.weight((4, 2), "w1"), name="used"))
    step = training_graph(net.build())
    assert step.parameters == ("w1",)
    assert set(step.graph.inputs) == {"x", "target", "w1", "w1.velocity"}
    with pytest.raises(GraphError, match="a gradient of w0"):
        training_graph(net.build(), parameters=["w0", "w1"])


# -- errors ---------------------------------------------------------------------------------------
def _vector() -> Any:
    net = GraphBuilder("vector")
    net.output(net.mul(net.input("x", (4,)), net.weight((4,), "w")))
    return net.build()


def _nothing() -> Any:
    net = GraphBuilder("nothing")
    net.output(net.relu(net.input("x", (4, 4))))
    return net.build()


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (InputError, "optimizer sgd, adam or None", {"optimizer": "lamb"}),
        (InputError, "a loss scale above 0", {"loss_scale": 0.0}),
        (InputError, "dtype fp16, bf16, fp32", {"dtype": "int8"}),
        (InputError, "attributes lr", {"optimizer": Optimiser("sgd", {"rate": 0.1})}),
        (InputError, "parameter w9", {"parameters": ["w9"]}),
        (InputError, "recompute: nodes", {"recompute": ["fc9"]}),
        (InputError, "every n-th block", {"recompute": 0}),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        training_graph(mlp(), **settings)


def test_graphs_that_cannot_be_trained() -> None:
    with pytest.raises(GraphError, match="parameters to train"):
        training_graph(_nothing())
    with pytest.raises(GraphError, match=r"as \(\.\.\., classes\)"):
        training_graph(_vector())


def test_fills_are_no_parameters_unless_named() -> None:
    net = GraphBuilder("filled")
    x = net.matmul(net.input("x", (3, 4)), net.weight((4, 5), "w"), name="product")
    scale = net.fill((5,), 1.0, "scale")
    bias = net.fill((5,), 0.0, "bias")
    net.output(net.layer_norm(x, scale, bias, name="norm"))
    assert training_graph(net.build()).parameters == ("w",)
    step = training_graph(net.build(), parameters=["w", "scale", "bias"], optimizer=None)
    assert step.parameters == ("w", "scale", "bias")
    assert isinstance(step.initial["scale"], Constant)
    assert step.initial["scale"].data == Fill(1.0)
    assert step.initial["scale"].type == TensorType((5,), "fp32")
    check_gradients(step, given(step))


NAMES = sorted(name for name, operator in OPERATORS.items() if operator.backward and name != "cast")


@pytest.mark.parametrize("name", NAMES)
def test_nodes_compute_what_the_rule_says(name: str) -> None:
    operator = OPERATORS[name]
    example = OPERATORS[name].examples[-1]
    if 0 in example.shapes[0]:
        example = operator.examples[-2]
    attrs = dict(example.attrs)
    kinds = operator.input_types(len(example.shapes), "fp32", **attrs)
    arrays = verify_ops.sample(operator, example.shapes, "fp64", attrs, seed=3)
    net = Tape("rule", "fp32")
    inputs = [f"x{i}" for i in range(len(arrays))]
    for title, shape, kind in zip(inputs, example.shapes, kinds, strict=True):
        net.input(title, shape, kind)
    outs = infer(name, [net.kind(n) for n in inputs], attrs)
    node = Node("node", name, tuple(inputs), tuple(f"y{i}" for i in range(len(outs))), attrs)
    net.copy(node)
    used = 1 if len(operator.outputs) > 1 else len(outs)
    slopes = [net.input(f"g{i}", outs[i].shape, outs[i].dtype) for i in range(used)]
    wanted = tuple(kind == "fp32" for kind in kinds)
    found = gradients(net, node, (*slopes, *(None,) * (len(outs) - used)), wanted)
    net.output(*(value for value in found if value is not None))
    if all(value is None for value in found):
        net.output(net.value("y0"))
    graph = doubled(net.build())
    rng = np.random.default_rng(4)
    cotangents = [rng.standard_normal(o.shape) for o in outs[:used]]
    given = dict(zip(inputs, arrays, strict=True)) | {f"g{i}": c for i, c in enumerate(cotangents)}
    got = evaluate(graph, given)
    many = operator.reference(*arrays, **attrs)
    many = many if isinstance(many, tuple) else (many,)
    grads = [*cotangents, *(None,) * (len(outs) - used)]
    wants = ops.gradient(operator, grads, arrays, many, **attrs)
    for one, two in zip(found, wants, strict=True):
        if one is None or two is None:
            assert one is two
        else:
            np.testing.assert_allclose(got[one.name], two, rtol=1e-9, atol=1e-9)


def test_operator_without_a_rule_is_named() -> None:
    net = GraphBuilder("product")
    x = net.matmul(net.input("x", (3, 4)), net.weight((4, 4), "w"))
    net.output(net.mul(x, net.reduce_prod(x, axis=(1,), keepdims=True, name="all")))
    with pytest.raises(UnsupportedError, match="reduce_prod of node all"):
        training_graph(net.build())


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
    values = first_values(step)
    data = _data(step)
    found = []
    for number in range(1, STEPS + 1):
        result = run_step(step, values, data, number)
        values = dict(result.values)
        assert not result.overflow
        found.append(result.loss)
    return found


@pytest.mark.parametrize(
    ("optimizer", "settings"), [("sgd", {"lr": 0.1, "momentum": 0.8}), ("adam", {"lr": 0.02})]
)
def test_steps_equal_a_numpy_loop(optimizer: str, settings: dict[str, float]) -> None:
    wanted = _loop(settings, optimizer == "adam")
    found = _losses(training_graph(mlp(), optimizer=Optimiser(optimizer, settings)))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert found[-1] < found[0] - 0.05
    narrow = training_graph(
        mlp(), optimizer=Optimiser(optimizer, settings), dtype="fp16", loss_scale=256.0
    )
    np.testing.assert_allclose(_losses(narrow), wanted, rtol=5e-3)


# -- mixed precision ------------------------------------------------------------------------------
def test_masters_are_wide_and_the_step_computes_narrow() -> None:
    step = training_graph(mlp(), dtype="fp16", loss_scale=1024.0)
    types = step.graph.types
    assert {types[n].dtype for n in (*step.parameters, *step.states)} == {"fp32"}
    assert {types[n].dtype for n in step.gradients.values()} == {"fp16"}
    products = [n for n in step.graph.nodes if n.op in ("matmul", "gemm")]
    assert {types[n.output].dtype for n in products} == {"fp16"}
    assert types[step.loss].dtype == "fp32"


def test_gradients_carry_the_loss_scale_and_updates_do_not() -> None:
    plain, scaled = (training_graph(mlp(), loss_scale=s) for s in (1.0, 256.0))
    inputs = given(plain)
    one = evaluate(plain.graph, inputs)
    two = evaluate(scaled.graph, inputs)
    for name in plain.parameters:
        np.testing.assert_allclose(one[f"{name}.new"], two[f"{name}.new"], rtol=1e-6, atol=1e-7)
    slopes = [training_graph(mlp(), optimizer=None, loss_scale=s) for s in (1.0, 256.0)]
    small, large = (evaluate(s.graph, {n: inputs[n] for n in s.graph.inputs}) for s in slopes)
    np.testing.assert_allclose(large["w1.grad"], 256 * small["w1.grad"], rtol=1e-5)
    np.testing.assert_allclose(large["loss"], small["loss"])


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


def _chain(layers: int, dtype: str = "fp32") -> Graph:
    """Linear layers with GELU, wide enough that activations outweigh weights."""
    net = GraphBuilder("chain", dtype)
    x = net.input("x", (512, 32))
    for i in range(layers):
        x = net.gelu(net.matmul(x, net.weight((32, 32), f"w{i}"), name=f"fc{i}"), name=f"act{i}")
    net.output(x)
    return net.build()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_values_are_equal_to_the_last_bit(name: str, dtype: str) -> None:
    forward = NETWORKS[name]()
    plain = training_graph(forward, dtype=dtype)
    nodes = [n.name for n in forward.nodes if n.output not in forward.outputs]
    again = training_graph(forward, dtype=dtype, recompute=nodes)
    assert "recompute" in again.phases.values()
    assert "recompute" not in plain.phases.values()
    inputs = given(plain)
    wanted = evaluate(plain.graph, inputs)
    found = evaluate(again.graph, inputs)
    for name_ in plain.graph.outputs:
        np.testing.assert_array_equal(wanted[name_], found[name_])


def test_peak_memory_falls() -> None:
    forward = _chain(16)
    peaks = []
    for recompute in ((), 4):
        step = training_graph(forward, dtype="fp16", optimizer=None, recompute=recompute)
        compiled = compile_training(step, "Ascend910A").compiled
        peaks.append(peak_live_bytes(buffers_of(compiled)))
    assert peaks[1] < 0.7 * peaks[0]


def test_cuts_part_residual_blocks() -> None:
    forward = zoo.build("resnet18", size=32)
    found = cut_tensors(forward, trainable(forward))
    blocks = {f"layer{stage}.{i}.relu" for stage in range(1, 5) for i in range(2)}
    assert blocks <= set(found)
    # inside a block the shortcut is alive too
    assert "layer1.0.1.relu" not in found
    assert "layer2.0.1.conv" not in found


def test_every_nth_block_keeps_the_cuts_between() -> None:
    forward = _chain(6)
    weights = trainable(forward)
    assert cut_tensors(forward, weights)[:4] == ("fc0", "act0", "fc1", "act1")
    assert tensors_between_cuts(forward, 2, weights) == ("fc0", "fc1", "fc2", "fc3", "fc4")
    assert tensors_between_cuts(forward, 4, weights)[:4] == ("fc0", "act0", "fc1", "fc2")
    assert tensors_between_cuts(forward, 100, weights) == ()


def test_merging_equal_nodes_would_undo_it() -> None:
    step = training_graph(attention(), optimizer=None, recompute=["norm", "act", "qkv"])
    merged, _ = run_passes(step.graph, ["CommonSubexpressionEliminationPass"])
    assert not any(step.phases.get(n.name) == "recompute" for n in merged.nodes)
    kept = compile_training(training_graph(
        attention(), dtype="fp16", optimizer=None, recompute=["norm", "act", "qkv"]
    ), "Ascend910A").rewritten  # fmt: skip
    assert any(n.name.endswith(".again") for n in kept.nodes)


CHIP = "Ascend910A"
NOISE = {"b0"}
"""A bias in front of a batch norm changes nothing: its gradient is rounding alone."""


def _close(step: Any, one: Any, two: Any, tolerance: float) -> None:
    """Compare all outputs, relative to the largest number of each."""
    updates = step.updates if step else {}
    skipped = {o for n, o in updates.items() if n.partition(".")[0] in NOISE}
    for left, right, name in zip(one.values(), two.values(), one, strict=True):
        wide = left.astype(np.float64)
        if name not in skipped:
            np.testing.assert_allclose(
                right.astype(np.float64), wide, atol=tolerance * np.abs(wide).max(), rtol=0,
                err_msg=name,
            )  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_kernels_compute_what_the_graph_says(name: str, optimizer: str) -> None:
    step = training_graph(NETWORKS[name](), dtype="fp16", loss_scale=128.0, optimizer=optimizer)
    compiled = compile_training(step, CHIP).compiled
    inputs = given(step)
    # Adam's first step divides gradients by their size: signs, however small they are
    tolerance = 0.02 if optimizer == "sgd" else 0.2
    _close(step, evaluate(step.graph, inputs), run_tasks(compiled, inputs), tolerance)


@pytest.mark.parametrize("name", NETWORKS)
def test_default_passes_keep_the_values(name: str) -> None:
    step = training_graph(NETWORKS[name](), optimizer="sgd")
    inputs = given(step)
    wanted = evaluate(step.graph, inputs)
    for one in (*((p,) for p in DEFAULT), DEFAULT):
        changed, _ = run_passes(step.graph, one)
        _close(step, wanted, evaluate(changed, inputs), 1e-4)


def _strided(kernel: Any, stride: Any, pad: Any, dilation: int, size: tuple[int, int]) -> Graph:
    net = GraphBuilder("strided")
    x = net.conv2d(net.input("x", (2, 3, *size)), net.weight((4, 3, 1, 1), "first"), name="one")
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    weight = net.weight((5, 4, *kernel), "second")
    y = net.conv2d(x, weight, stride=stride, pad=pad, dilation=dilation, name="two")
    net.output(net.reshape(net.global_avg_pool(net.square(y)), shape=(2, 5)))
    return net.build()


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation", "size"),
    [
        (1, 2, 0, 1, (7, 8)),
        (3, 2, 1, 1, (8, 7)),
        ((3, 2), (2, 3), ((1, 0), (0, 1)), 1, (9, 8)),
        (3, 1, 2, 2, (7, 7)),
        (2, 4, 0, 1, (10, 11)),
        (1, 1, 1, 1, (5, 5)),
    ],
)
def test_images_gradients_as_convolutions(
    kernel: Any, stride: Any, pad: Any, dilation: int, size: tuple[int, int]
) -> None:
    step = training_graph(_strided(kernel, stride, pad, dilation, size), optimizer=None)
    changed = as_convolutions(step.graph)
    left = [n.op for n in changed.nodes].count("conv_transpose2d")
    assert left == (1 if (kernel, pad) == (1, 1) else 0)  # padding beyond the kernel stays
    inputs = given(step)
    _close(step, evaluate(step.graph, inputs), evaluate(changed, inputs), 1e-6)


@pytest.mark.parametrize("chip", [CHIP, "Ascend910B2"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2), (1, 2)])
def test_a_join_and_relus_gradient_follow_an_images_gradient(
    kernel: int, stride: int, chip: str
) -> None:
    """Whole numbers: equal to the last bit, on images whose channels and pixels pad."""
    rng = np.random.default_rng(kernel + stride)
    net = GraphBuilder("join", "fp16")
    size = (2, 33, 9, 7)
    small = tuple((n + stride - 1) // stride for n in size[2:])
    weight = net.constant(rng.integers(-1, 2, (20, 33, kernel, kernel)).astype(np.float16))
    other = net.input("other", size)
    mask = net.input("mask", size)
    settings = {"stride": stride, "pad": kernel // 2}
    grad = net.conv_transpose2d(net.input("grad", (2, 20, *small)), weight, **settings)
    zero = net.constant(np.zeros(1, np.float16))
    net.output(net.select(mask, net.add(other, grad), zero))
    graph = net.build()
    stages = TRAINING.stages(graph, load_chip(chip))
    groups = [[n.op for n in group] for group in stages.fused.groups]
    whole = (kernel, stride) != (1, 2)  # else it is convolved first, then stretched
    assert (["conv_transpose2d", "add", "select"] in groups) == (whole and chip == CHIP)
    kinds = graph.types.items()
    inputs = {
        n: rng.integers(-1, 2, t.shape).astype(np.float16) for n, t in kinds if n in graph.inputs
    }
    _close(None, evaluate(graph, inputs), run_tasks(stages.compiled, inputs), 0.0)
    for task in stages.compiled.tasks:
        assert task.lowered is None or sanitize(task.lowered.kernel, load_chip(chip)) == []


def test_groups_with_weights_that_change_are_refused() -> None:
    net = GraphBuilder("groups")
    x = net.conv2d(net.input("x", (1, 32, 8, 8)), net.weight((32, 8, 3, 3), "w"), groups=4, pad=1)
    net.output(net.reshape(net.global_avg_pool(x), shape=(1, 32)))
    with pytest.raises(UnsupportedError, match="constant weights"):
        compile_training(training_graph(net.build(), dtype="fp16"), CHIP)


SMALL: dict[str, dict[str, Any]] = {
    "bert_base": {"layers": 2},
    "bert_large": {"layers": 2},
    "gpt2_small": {"layers": 2},
    "vit_b16": {"layers": 2},
}
"""What makes a model of equal layers quick to build."""


CORE = ("alexnet", "resnet18", "mobilenet_v3_large", "shufflenet_v2", "densenet121", "unet",
        "gpt2_small", "vit_b16", "ghostnet_v2", "mobile_former_26m", "efficientformer_v2_s0",
        "resnext50")  # fmt: skip
"""One of each way to be built; the others only on demand."""
FIXED = ("ghostnet_v2", "efficientformer_v2")
"""They resample by fixed kernels, which a training graph takes for weights like any other."""
ZOO_NAMES = [pytest.param(n, marks=() if n in CORE else pytest.mark.full) for n in zoo.ZOO]


@pytest.mark.parametrize("name", ZOO_NAMES)
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("fp32", marks=pytest.mark.full)])
def test_networks_train_all_their_parameters(name: str, dtype: str) -> None:
    forward = zoo.build(name, **SMALL.get(name, {}))
    step = training_graph(forward, dtype=dtype, optimizer="adam", loss_scale=1024.0)
    verify(step.graph)
    extra = step.parameter_count - zoo.parameters(forward)
    assert extra > 0 if name.startswith(FIXED) else extra == 0
    assert set(step.gradients) == set(step.parameters)
    for parameter, slope in step.gradients.items():
        kind = step.graph.types[parameter]
        assert kind.dtype == "fp32"
        assert step.graph.types[slope].shape == kind.shape


def test_inputs_that_are_images_become_narrow_and_tokens_stay() -> None:
    images = training_graph(zoo.build("resnet18", size=32), dtype="fp16")
    assert images.graph.types["x"].dtype == "fp16"
    tokens = training_graph(zoo.build("bert_base", layers=1), dtype="fp16")
    assert tokens.graph.types["input_ids"].dtype == "int32"
    assert len(tokens.targets) == 2  # one for the rows of tokens, one for the pooled ones


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mobilenet_v2", {"batch": 3, "size": 64, "classes": 5}),
        ("shufflenet_v2", {"batch": 3, "size": 64, "classes": 5}),
        ("unet", {"size": 16, "width": 4}),
    ],
)
def test_gradients_of_whole_networks_point_uphill(name: str, settings: dict[str, Any]) -> None:
    """The change of the loss along the gradient itself is the gradient's squared length."""
    step = training_graph(zoo.build(name, **settings), optimizer=None)
    graph = doubled(step.graph)
    start = given(step)
    found = evaluate(graph, start)
    slopes = {n: found[slope] for n, slope in step.gradients.items()}
    squared = sum(float((s**2).sum()) for s in slopes.values())
    length = 1e-7 / np.sqrt(squared)
    ends = [
        evaluate(graph, {**start, **{n: start[n] + sign * length * s for n, s in slopes.items()}})
        for sign in (1.0, -1.0)
    ]
    change = float(ends[0][step.loss][0] - ends[1][step.loss][0]) / (2 * length)
    assert change == pytest.approx(squared, rel=1e-4)


def _residual(c: int = 32) -> Graph:
    """A block whose skip path has a norm of its own: both norms read one gradient."""
    net = GraphBuilder("residual")
    x = net.input("x", (2, c, 6, 6))
    main = norm(net, net.conv2d(x, net.weight((c, c, 3, 3), "w"), pad=1, name="conv"), "bn")
    skip = norm(net, net.conv2d(x, net.weight((c, c, 1, 1), "v"), name="skip"), "skip_bn")
    y = net.relu6(net.add(main, skip, name="sum"), name="relu")
    net.output(net.reshape(net.global_avg_pool(y), shape=(2, c)))
    return net.build()


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (2, 17, 1, 6), (6, 4)])
def test_batch_norm_gradients_equal_central_differences(shape: tuple[int, ...]) -> None:
    """Images, whose sums are one operator, and rows of features, whose sums are nodes."""
    net = GraphBuilder("norm")
    x = net.mul(net.input("x", shape), net.weight(shape, "w"), name="product")
    y = net.square(norm(net, x, "bn"))
    net.output(net.reshape(y, shape=(shape[0], int(np.prod(shape[1:])))))
    step = training_graph(net.build(), optimizer=None)
    ops = {node.op for node in step.graph.nodes}
    assert ("bn_training_update_grad" in ops) == (len(shape) == 4)
    check_gradients(step, given(step))


@pytest.mark.parametrize(("c", "chip"), [(32, CHIP), (20, CHIP), (20, "Ascend910B2")])
def test_batch_norm_kernels_compute_what_the_graph_says(c: int, chip: str) -> None:
    step = training_graph(_residual(c), optimizer=None, dtype="fp16", loss_scale=64.0)
    compiled = compile_training(step, chip).compiled
    assert [node.op for node in compiled.graph.nodes].count("bn_training_reduce") == 2
    inputs = given(step)
    _close(step, evaluate(step.graph, inputs), run_tasks(compiled, inputs), 0.02)


def test_nothing_between_convolutions_leaves_the_blocks() -> None:
    """What is converted is the image, the gradient behind the mean, and the weights' gradients."""
    step = training_graph(_residual(), optimizer=None, dtype="fp16")
    compiled = compile_step(step, load_chip(CHIP))
    image = (2, 32, 6, 6)
    moved = [n for n in compiled.graph.nodes if n.op == "trans_data"]
    large = [n.name for n in moved if compiled.graph.types[n.output].shape == image]
    assert sorted(large) == ["global_avg_pool.grad.expand.NC1HWC0", "x.NC1HWC0"]
    norms = [t.nodes for t in compiled.tasks if t.lowered and any("bn" in n for n in t.nodes)]
    # statistics, y twice (the second with sum and relu6), gradients of scale and bias, dx twice
    kernels = [names for names in norms if not any(".update." in n for n in names)]
    assert len(kernels) <= 9


def test_shared_casts_are_made_once_per_reader() -> None:
    step = training_graph(_residual(), optimizer=None, dtype="fp16", loss_scale=64.0)
    merged, _ = run_passes(step.graph, DEFAULT)
    changed = casts_apart(merged)
    assert len(changed.nodes) > len(merged.nodes)
    inputs = given(step)
    _close(step, evaluate(merged, inputs), evaluate(changed, inputs), 0.0)

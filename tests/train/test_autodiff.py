"""Training graphs of small networks: gradients, names, phases, order, parameters, errors."""

from typing import Any

import numpy as np
import pytest
from grad_cases import NETWORKS, check_gradients, convolutions, given, mlp, words

from ascend_lab.errors import GraphError, InputError
from ascend_lab.graph import Constant, Fill, GraphBuilder, TensorType, evaluate, evaluate_all
from ascend_lab.train import training_graph
from ascend_lab.train.step import trainable


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


def test_a_weight_read_twice_gets_one_gradient_of_both_uses() -> None:
    step = training_graph(words(), optimizer=None)
    slope = step.graph.producers[step.gradients["table"]]
    assert slope.op == "add"
    ops = {step.graph.producers[name].op for name in slope.inputs}
    assert ops == {"matmul", "scatter_add"}


def test_phases_come_in_order_and_cover_all_nodes() -> None:
    step = training_graph(convolutions(), dtype="fp16", optimizer="adam")
    phases = [step.phases[node.name] for node in step.graph.nodes]
    ranks = {"forward": 0, "backward": 1, "update": 2}
    assert [ranks[p] for p in phases] == sorted(ranks[p] for p in phases)
    assert set(phases) == set(ranks)


def test_gradients_appear_in_the_reverse_order_of_forward() -> None:
    step = training_graph(mlp(), optimizer=None)
    assert step.parameters == ("w1", "b1", "w2", "b2")
    assert list(step.gradients) == ["b2", "w2", "b1", "w1"]
    place = {name: i for i, n in enumerate(step.graph.nodes) for name in n.outputs}
    ready = [place[name] for name in step.gradients.values()]
    assert ready == sorted(ready)
    # the weight's gradient does not wait for the activation's
    assert place["w2.grad"] < place["fc2.grad.matmul_1"]


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


def test_initial_values_are_those_of_the_forward_graph() -> None:
    forward = mlp()
    step = training_graph(forward)
    for name in step.parameters:
        np.testing.assert_array_equal(step.initial[name].array(), forward.constants[name].array())
    assert not step.initial["w1.velocity"].array().any()


def test_batch_norms_use_and_average_the_batchs_statistics() -> None:
    step = training_graph(convolutions())
    inputs = given(step)
    found = evaluate_all(step.graph, inputs)
    conv = found["conv0"].astype(np.float64)
    new = 0.9 * inputs["bn0.mean"] + 0.1 * conv.mean(axis=(0, 2, 3))
    np.testing.assert_allclose(found[step.updates["bn0.mean"]], new, rtol=1e-5, atol=1e-6)
    assert {"bn0.mean", "bn0.var"} <= set(step.states)
    assert "bn0.mean" not in step.parameters


# -- which constants are parameters ---------------------------------------------------------------
def _arrays() -> Any:
    """A network whose weights are arrays, as an ONNX importer gives them."""
    net, rng = GraphBuilder("arrays"), np.random.default_rng(0)

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
        (InputError, "loss cross_entropy", {"loss": "hinge"}),
        (InputError, "a loss scale above 0", {"loss_scale": 0.0}),
        (InputError, "dtype fp16, bf16, fp32", {"dtype": "int8"}),
        (InputError, "master fp16, bf16, fp32", {"master": "fp8"}),
        (InputError, "attributes lr", {"settings": {"rate": 0.1}}),
        (InputError, "settings of an optimiser", {"optimizer": None, "settings": {"lr": 0.1}}),
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
    scale, bias = net.fill((5,), 1.0, "scale"), net.fill((5,), 0.0, "bias")
    net.output(net.layer_norm(x, scale, bias, name="norm"))
    assert training_graph(net.build()).parameters == ("w",)
    step = training_graph(net.build(), parameters=["w", "scale", "bias"], optimizer=None)
    assert step.parameters == ("w", "scale", "bias")
    assert isinstance(step.initial["scale"], Constant)
    assert step.initial["scale"].data == Fill(1.0)
    assert step.initial["scale"].type == TensorType((5,), "fp32")
    check_gradients(step, given(step))

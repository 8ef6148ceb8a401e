"""Every rule written as nodes, against the same rule carried out at once on arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grad_cases import doubled

from ascend_lab import ops
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import GraphBuilder, Node, TensorType, evaluate
from ascend_lab.graph.ir import infer
from ascend_lab.ops import OPERATORS
from ascend_lab.train import training_graph
from ascend_lab.train.tape import Tape, gradients

NAMES = sorted(name for name, operator in OPERATORS.items() if operator.backward and name != "cast")


def _arrays(name: str, shapes: Any, kinds: tuple[str, ...], attrs: Any) -> list[Any]:
    operator, rng = OPERATORS[name], np.random.default_rng(3)
    limits = operator.index_limits(shapes, operator.settings(attrs))
    found = []
    for place, (title, shape) in enumerate(zip(operator.names(len(shapes)), shapes, strict=True)):
        if kinds[place] == "int32":
            found.append(rng.integers(0, limits[place], shape).astype(np.int32))
            continue
        domain = operator.domains.get(title)
        low, high = (domain.low, domain.high) if domain else (-2.0, 2.0)
        found.append(rng.uniform(low, high, shape))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_nodes_compute_what_the_rule_says(name: str) -> None:
    operator, example = OPERATORS[name], OPERATORS[name].examples[-1]
    if 0 in example.shapes[0]:
        example = operator.examples[-2]
    attrs = dict(example.attrs)
    kinds = operator.input_types(len(example.shapes), "fp32", **attrs)
    arrays = _arrays(name, example.shapes, kinds, attrs)
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
    graph = doubled(_finished(net, found))
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


def _finished(net: Tape, found: list[Any]) -> Any:
    net.output(*(value for value in found if value is not None))
    if all(value is None for value in found):
        net.output(net.value("y0"))
    return net.build()


def test_batch_norm_example_uses_momentum_zero() -> None:
    """The statistics that backward reads are the batch's only with momentum 0, as forward has."""
    net = GraphBuilder("norm")
    x = net.input("x", (3, 4, 2, 2))
    rows = [net.weight((4,), key) for key in ("s", "b")]
    rows += [net.fill((4,), 0.0), net.fill((4,), 1.0)]
    y = net.global_avg_pool(net.batch_norm(net.conv2d(x, net.weight((4, 4, 1, 1), "w")), *rows))
    net.output(net.reshape(y, shape=(3, 4)))
    step = training_graph(net.build())
    norms = [node for node in step.graph.nodes if node.op == "batch_norm_training"]
    assert [node.attr("momentum") for node in norms] == [0.0]


def test_operator_without_a_rule_is_named() -> None:
    net = GraphBuilder("product")
    x = net.matmul(net.input("x", (3, 4)), net.weight((4, 4), "w"))
    net.output(net.mul(x, net.reduce_prod(x, axis=(1,), keepdims=True, name="all")))
    with pytest.raises(UnsupportedError, match="reduce_prod of node all"):
        training_graph(net.build())


def test_a_cast_takes_the_gradient_back() -> None:
    net = GraphBuilder("cast", "fp16")
    x = net.matmul(net.input("x", (3, 4)), net.weight((4, 5), "w"), name="product")
    net.output(net.cast(x, dtype="fp32", name="wide"))
    step = training_graph(net.build(), dtype="fp16", optimizer=None)
    assert step.graph.types[step.gradients["w"]] == TensorType((4, 5), "fp16")
    assert replace(step.graph.types["w"], dtype="fp16") == step.graph.types[step.gradients["w"]]

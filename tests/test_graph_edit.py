"""Rewriting graphs: replacements, insertions, sorting, pruning, cycles."""

import numpy as np
import pytest
from graph_strategies import whole_graphs, whole_inputs
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType, evaluate
from ascend_lab.compiler.draft import Draft, ordered, pruned
from ascend_lab.compiler.ir import Constant, Fill, to_text, verify
from ascend_lab.compiler.text_form import from_text
from ascend_lab.errors import GraphError, ShapeError

CHAIN = """graph g (x: fp32[2, 3]) -> (c) {
  a: fp32[2, 3] = relu(x) a
  b: fp32[2, 3] = neg(a) b
  c: fp32[2, 3] = add(b, a) c
}
"""


def test_nothing_changed_is_the_same_object():
    graph = from_text(CHAIN)
    assert Draft(graph).finish() is graph
    edit = Draft(graph)
    edit.replace("a", "a")
    assert edit.finish() is graph and not edit.changes


def test_replacements_chain():
    edit = Draft(from_text(CHAIN))
    edit.replace("b", "a")
    edit.replace("a", "x")
    assert edit.resolve("b") == "x"
    assert [n.inputs for n in edit] == [("x",), ("x",), ("x", "x")]
    assert str(edit.finish()) == (
        "graph g (x: fp32[2, 3]) -> (c) {\n  c: fp32[2, 3] = add(x, x) c\n}\n"
    )


def test_insert_infers_types_and_names_apart():
    edit = Draft(from_text(CHAIN))
    name = edit.insert("transpose", ("c",), {"perm": (1, 0)}, "a")
    halves = edit.insert("split", (name,), {"sizes": [1, 2], "axis": 0}, "a")
    assert name == "a_1" and edit.types[name].shape == (3, 2)
    assert edit.nodes[halves].outputs == ("a_2", "a_2_1")
    assert edit.nodes[halves].attrs == {"sizes": (1, 2)}  # axis 0 is the default
    edit.replace("c", edit.nodes[halves].outputs[1])
    with pytest.raises(GraphError, match="cycle"):
        edit.finish()  # the transpose reads c, which is now what it makes


def test_what_is_written_late_is_sorted_before_its_reader():
    edit = Draft(from_text(CHAIN))
    bias = edit.add(Constant(TensorType((3,), "fp32"), Fill(2.0)), "bias")
    late = edit.insert("add", ("x", bias))
    edit.replace("a", late)
    graph = edit.finish()
    assert [n.op for n in graph.nodes] == ["add", "neg", "add"]
    assert "a" not in graph.types and graph.constants.keys() == {"bias"}
    x = np.ones((2, 3), np.float32)
    assert not evaluate(graph, {"x": x})["c"].any()


def test_put_infers_types_again():
    edit = Draft(from_text(CHAIN))
    edit.put(Node("a", "reduce_sum", ("x",), ("a",), {"axis": 1, "keepdims": True}))
    assert edit.types["a"].shape == (2, 1)
    with pytest.raises(GraphError, match=r"node b \(neg\): b as"):
        edit.finish()  # the readers' types are stale
    with pytest.raises(ShapeError):
        edit.put(Node("a", "matmul", ("x", "x"), ("a",)))


def test_removing_what_is_still_read():
    edit = Draft(from_text(CHAIN))
    edit.remove("a")
    assert [n.name for n in edit] == ["b", "c"]
    with pytest.raises(GraphError, match="input a; got nothing writes it"):
        edit.finish()


def shuffled(graph, order):
    nodes = tuple(graph.nodes[i] for i in order)
    return Graph(graph.name, graph.inputs, graph.outputs, nodes, graph.types, graph.constants)


@given(graph=whole_graphs(), data=st.data())
def test_any_order_can_be_sorted(graph, data):
    order = data.draw(st.permutations(range(len(graph.nodes))))
    found = verify(ordered(shuffled(graph, order)))
    assert sorted(n.name for n in found.nodes) == sorted(n.name for n in graph.nodes)
    assert ordered(graph) is graph
    inputs = whole_inputs(graph)
    one = evaluate(graph, inputs)
    two = evaluate(found, inputs)
    assert all(np.array_equal(one[n], two[n], equal_nan=True) for n in graph.outputs)


@settings(max_examples=100)
@given(graph=whole_graphs())
def test_pruning_keeps_values_and_leaves_nothing_unread(graph):
    small = verify(pruned(graph))
    read = {n for node in small.nodes for n in node.inputs} | set(small.outputs)
    assert all(read.intersection(node.outputs) for node in small.nodes)
    assert small.constants.keys() <= read and small.inputs == graph.inputs
    assert to_text(pruned(small)) == to_text(small)
    inputs = whole_inputs(graph)
    one = evaluate(graph, inputs)
    two = evaluate(small, inputs)
    assert all(np.array_equal(one[n], two[n], equal_nan=True) for n in graph.outputs)


def test_a_cycle_is_named():
    kind = TensorType((2,), "fp32")
    nodes = (
        Node("p", "add", ("x", "c"), ("a",)),
        Node("q", "relu", ("a",), ("b",)),
        Node("r", "neg", ("b",), ("c",)),
    )
    graph = Graph("g", ("x",), ("c",), nodes, dict.fromkeys("xabc", kind))
    with pytest.raises(
        GraphError, match=r"without cycles; got .*(p -> q -> r|r -> q -> p)"
    ) as info:
        ordered(graph)
    assert all(name in info.value.got for name in "pqr")


def test_ten_thousand_nodes_in_reverse():
    net = GraphBuilder("deep")
    x = net.input("x", (2,))
    for _ in range(10_000):
        x = net.neg(x)
    net.output(x)
    graph = net.build()
    found = ordered(shuffled(graph, range(9_999, -1, -1)))
    assert found.nodes == graph.nodes

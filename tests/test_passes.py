"""Passes: text in, text out; graphs they leave alone; the manager, its report and its cost."""

import dataclasses

import numpy as np
import pytest
from pass_cases import CASES, CHANGING, NOTHING, Case, text

from ascend_lab.compiler import Graph, GraphBuilder, Node
from ascend_lab.compiler.passes import (
    DEFAULT,
    PASSES,
    Draft,
    Pass,
    get_pass,
    match,
    register_pass,
    run_passes,
    sweep,
)
from ascend_lab.compiler.text_form import from_text
from ascend_lab.errors import InputError

ORDINARY = [one for one in PASSES if one != "Int8ConversionPass"]


def name_of(case: Case) -> str:
    return case.name


def fixpoint(name: str, graph: Graph) -> Graph:
    return run_passes(graph, [name])[0]


@pytest.mark.parametrize("case", [*CASES, *CHANGING], ids=name_of)
def test_a_pass_turns_one_text_into_another(case: Case) -> None:
    before = from_text(text(case, case.before))
    assert str(fixpoint(case.name, before)) == str(from_text(text(case, case.after)))


@pytest.mark.parametrize("case", NOTHING, ids=name_of)
def test_a_pass_that_finds_nothing_returns_the_same_graph(case: Case) -> None:
    graph = from_text(text(case, case.before))
    found, matches = PASSES[case.name].apply(graph)
    assert found is graph
    assert matches == 0
    assert PASSES[case.name].run(graph) is graph


@pytest.mark.parametrize("case", [*CASES, *CHANGING], ids=name_of)
def test_a_pass_finds_nothing_in_what_it_made(case: Case) -> None:
    graph = fixpoint(case.name, from_text(text(case, case.before)))
    assert PASSES[case.name].run(graph) is graph


def test_every_pass_has_a_text_of_what_it_does_and_of_what_it_leaves() -> None:
    assert {case.name for case in (*CASES, *CHANGING)} == set(ORDINARY)
    assert {case.name for case in NOTHING} == set(PASSES)


def test_passes_that_change_values_run_only_when_asked_for() -> None:
    assert not any(PASSES[name].changes_values for name in DEFAULT)
    assert {one.name for one in PASSES.values() if one.changes_values} == {
        *(case.name for case in CHANGING),
        "Int8ConversionPass",
    }
    assert {one.stage for one in PASSES.values()} == {"prepare", "fuse", "opt-in", "precision"}
    assert all(name == one.name and one.summary for name, one in PASSES.items())


def test_the_manager_repeats_until_nothing_matches_and_reports() -> None:
    net = GraphBuilder("chain")
    x = net.input("x", (2, 3))
    value = x
    for _ in range(64):
        value = net.relu(net.transpose(value))
    net.output(net.exp(value))
    after, report = run_passes(net.build())
    assert [node.op for node in after.nodes] == ["relu", "exp"]
    assert report.steps[-1].after is after
    assert report.matches == {
        name: sum(s.matches for s in report.steps if s.name == name) for name in report.matches
    }
    for one, two in zip(report.steps, report.steps[1:], strict=False):
        assert one.after is two.before
    lines = str(report).splitlines()
    assert len(lines) == len(report.steps) + 2
    assert f"129 -> {len(after.nodes)} nodes" in lines[-1]


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(InputError, match="did you mean ConvBatchnormFusionPass"):
        run_passes(from_text(text(CASES[0], CASES[0].before)), ["ConvBatchNormFusion"])
    with pytest.raises(InputError, match="see PASSES"):
        get_pass("%")


def test_a_pass_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(rw: Draft, node: Node) -> bool:
        found = match(rw, node, ("sqrt", ("square", "x")))
        return found is not None and rw.become(node, "abs", [found["x"]])

    monkeypatch.setattr("ascend_lab.compiler.passes.rewrite.PASSES", dict(PASSES))
    mine = Pass("SqrtOfSquarePass", "prepare", sweep(rule, "sqrt"), "sqrt(x^2) is |x|")
    assert register_pass(mine) is mine
    with pytest.raises(InputError, match="a new name for a pass; got SqrtOfSquarePass"):
        register_pass(dataclasses.replace(mine, summary="again"))
    net = GraphBuilder("g")
    x = net.input("x", (4,))
    net.output(net.sqrt(net.square(x, name="s"), name="y"))
    after, report = run_passes(net.build(), ["SqrtOfSquarePass"])
    assert [(n.op, n.inputs, n.outputs) for n in after.nodes] == [("abs", ("x",), ("y",))]
    assert report.matches == {"SqrtOfSquarePass": 1}


FACTORS = np.array([1.0, 2.0, 0.5, 1.5], np.float32).reshape(4, 1, 1)


def thousand() -> Graph:
    """Return 1000 nodes: blocks of convolution, batch norm, scale, relu, casts, transposes."""
    net = GraphBuilder("thousand")
    value = net.input("x", (1, 4, 8, 8))
    for _ in range(100):
        start = value
        value = net.conv2d(value, net.weight((4, 4, 3, 3)), pad=1)
        given = [net.fill((4,), number) for number in (1.0, 0.1, 0.2, 1.0)]
        value = net.batch_norm(value, *given)
        value = net.mul(value, net.constant(FACTORS, name="scale"))
        value = net.transpose(net.transpose(value, perm=(0, 2, 3, 1)), perm=(0, 3, 1, 2))
        value = net.cast(net.reshape(value, shape=(0, 4, 8, 8)), dtype="fp32")
        value = net.add(net.relu(net.muls(value, number=1.0)), start)
    net.output(net.global_avg_pool(value))
    return net.build()


def test_a_thousand_nodes_become_three_hundred() -> None:
    graph = thousand()
    assert len(graph.nodes) == 1001
    after, report = run_passes(graph)
    assert len(after.nodes) == 301
    assert {node.op for node in after.nodes} == {"conv2d", "relu", "add", "global_avg_pool"}
    # each pass edits the graph a few times at most: the cost is linear in the nodes
    assert len(report.steps) <= 8

"""Fusion: who dominates whom, which rules fire, what switches say, and that values stay."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, evaluate, fusion, lower, random_inputs, run_compiled
from ascend_lab.compiler.compile import Road, compile_stages
from ascend_lab.compiler.fusion import (
    AUTOMATIC,
    MAX_GROUP,
    RULES,
    Count,
    Fused,
    between,
    fuse,
    fusion_rule,
    immediate_post_dominators,
    rules_restored,
    unfused,
)
from ascend_lab.compiler.switches import Switches, parse_switches, read_switches
from ascend_lab.compiler.tasks import cycles_started
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim.timeline import start_cycles

TOY, A910, B2 = (load_chip(name) for name in ("Toy", "Ascend910A", "Ascend910B2"))


def ops_of(fused: Fused) -> list[str]:
    return ["+".join(n.op for n in group) for group in fused.groups]


# -- dominators ------------------------------------------------------------------------------------
def net_of(edges: dict[str, str], outputs: str, width: int = 16):
    """A graph of additions: `edges` maps a node to the nodes it reads, "x" is the input."""
    net = GraphBuilder("dag", "fp16")
    live = {"x": net.input("x", (width,))}
    for name, reads in edges.items():
        operands = [live[r] for r in reads]
        value = net.relu(operands[0], name=name) if len(reads) == 1 else None
        for n, other in enumerate(operands[1:]):
            last = n == len(operands) - 2
            value = net.add(value or operands[0], other, name=name if last else f"{name}{n}")
        live[name] = value
    net.output(*(live[n] for n in outputs))
    return net.build()


@given(st.data())
def test_dominators_are_those_of_the_definition(data):
    """d post-dominates n if no path from n to an output is left when d is taken out."""
    size = data.draw(st.integers(1, 9))
    names = "abcdefghi"[:size]
    edges = {}
    for i, name in enumerate(names):
        reads = data.draw(st.sets(st.sampled_from("x" + names[:i]), max_size=2))
        edges[name] = "".join(sorted(reads or "x"))
    outputs = data.draw(st.sets(st.sampled_from(names), min_size=1)) | {names[-1]}
    unread = {n for n in names if not any(n in r for r in edges.values())}
    graph = net_of(edges, sorted(outputs | unread))
    found = immediate_post_dominators(graph)

    def escapes(start: str, without: str) -> bool:
        ahead = [start]
        seen = set()
        while ahead:
            name = ahead.pop()
            if name == without or name in seen:
                continue
            seen.add(name)
            if name in graph.outputs:
                return True
            ahead += [r.name for r in graph.readers[name]]
        return False

    every = [n.name for n in graph.nodes]
    after = {n: {d for d in every if d != n and not escapes(n, d)} for n in every}
    for name, dominator in found.items():
        assert (dominator in after[name]) == bool(after[name])
        if dominator is not None:
            assert after[name] == {dominator} | after[dominator]
            path = {
                n.name for n in between(graph, graph.node(name), dominator, len(graph.nodes) + 1)
            }
            assert {n for n in path if n != dominator} == {
                n for n in every if n != dominator and _reaches(graph, name, n, dominator)
            }


def _reaches(graph, start: str, goal: str, without: str) -> bool:
    ahead = [r.name for r in graph.readers[start]]
    while ahead:
        name = ahead.pop()
        if name == goal:
            return name != without
        if name != without:
            ahead += [r.name for r in graph.readers[name]]
    return False


# -- switches --------------------------------------------------------------------------------------

PLAIN = "# fusion\n\nTbeConvElemwiseFusionPass:off\n DeadCodeEliminationPass : ON \n"
JSON = """{"Switch": {"GraphFusion": {"ALL": "off", "DeadCodeEliminationPass": "on"},
                      "UBFusion": {"AutomaticUbFusion": "off"}}}"""


def test_lines_switch_both_scopes(tmp_path):
    path = tmp_path / "fusion_switch.cfg"
    path.write_text(PLAIN, "utf-8")
    for on in (parse_switches(PLAIN), read_switches(path)):
        assert not on.is_on("TbeConvElemwiseFusionPass")
        assert not on.is_on("TbeConvElemwiseFusionPass", "GraphFusion")
        assert on.is_on("DeadCodeEliminationPass", "GraphFusion")
        assert on.is_on("what no line names")
    assert Switches().is_on("anything")
    assert not parse_switches("ALL:off\n").is_on("anything")
    assert parse_switches("ALL:off\nA:on").is_on("A")


def test_json_switches_by_scope():
    on = parse_switches(JSON)
    assert not on.is_on("AnyPass", "GraphFusion")
    assert on.is_on("DeadCodeEliminationPass", "GraphFusion")
    assert not on.is_on(AUTOMATIC)
    assert on.is_on("TbeConvElemwiseFusionPass")
    assert on.is_on(AUTOMATIC, "GraphFusion") is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A:on\nB", "line 2: on or off"),
        ("A:maybe", "maybe"),
        ("{", "correct the JSON"),
        ('{"Switches": {}}', "correct the JSON"),
        ('{"Switch": ["A"]}', "correct the JSON"),
        ('{"Switch": {"Fusion": {"A": "on"}}}', "GraphFusion or UBFusion"),
        ('{"Switch": {"UBFusion": {"A": true}}}', "A: on or off"),
        ('{"Switch": {"UBFusion": "off"}}', "correct the JSON"),
    ],
)
def test_wrong_switches_are_named(text, message):
    with pytest.raises(InputError, match=message):
        parse_switches(text)


def conv_net(tail: str):
    """conv2d and elementwise nodes behind it; "add" reads a second image."""
    net = GraphBuilder("tail", "fp16")
    y = net.conv2d(net.input("x", (1, 16, 8, 8)), net.weight((16, 16, 3, 3)), pad=1)
    other = net.input("other", (1, 16, 8, 8))
    for op in tail.split():
        y = net.add_node(op, y, other) if op in ("add", "mul") else _unary(net, op, y)
    net.output(y)
    return net.build()


def _unary(net, op, y):
    return net.add_node(op, y, number=1.5) if op in ("adds", "muls") else net.add_node(op, y)


@pytest.mark.parametrize(
    ("tail", "rule"),
    [
        ("relu", "TbeConvElemwiseFusionPass"),
        ("add relu", "TbeConvDoubleInFusionPass"),
        ("adds relu6 mul muls", "TbeConv2dAddRelu6MulMulFusionPass"),
    ],
)
def test_published_names_fire_and_can_be_switched_off(tail, rule):
    graph = conv_net(tail)
    stages = compile_stages(graph, TOY, passes=())
    assert stages.fused.counts == {rule: Count(1, 1)}
    whole = "+".join(["conv2d", *tail.split()])
    assert whole in ops_of(stages.fused)
    off = compile_stages(graph, TOY, passes=(), switches=parse_switches(f"{rule}:off"))
    assert rule not in off.fused.counts
    none = compile_stages(graph, TOY, passes=(), switches=parse_switches("ALL:off"))
    assert none.fused.counts == {}
    assert none.fused.groups == unfused(none.laid_out).groups


def test_the_report_is_the_vendors_file():
    fused = compile_stages(conv_net("add relu"), TOY, passes=()).fused
    (entry,) = json.loads(fused.result_json())
    assert entry["session_and_graph_id"] == "0_0"
    assert entry["ub_fusion"] == {
        "TbeConvDoubleInFusionPass": {"effect_times": "1", "match_times": "1"}
    }


# -- rules of one's own ----------------------------------------------------------------------------
def adds(count: int, width: int = 4096):
    net = GraphBuilder("adds", "fp16")
    y = net.input("x0", (width,))
    for i in range(count):
        y = net.add(y, net.input(f"x{i + 1}", (width,)), name=f"a{i}")
    net.output(y)
    return net.build()


def pairs(graph, node):
    """Propose a node and its only reader, the reader first."""
    readers = graph.readers[node.output]
    return [readers[0], node] if len(readers) == 1 else None


def test_a_rule_by_decorator_comes_first_and_goes_with_its_block():
    before = list(RULES)
    with rules_restored():
        fusion_rule("Pairs")(pairs)
        assert [r.name for r in RULES] == ["Pairs", *(r.name for r in before)]
        fused = compile_stages(adds(4), TOY).fused
        assert [[n.name for n in g] for g in fused.groups] == [["a0", "a1"], ["a2", "a3"]]
        assert fused.counts == {"Pairs": Count(2, 2)}
        off = compile_stages(adds(4), TOY, switches=parse_switches("Pairs:off")).fused
        assert off.counts == {AUTOMATIC: Count(1, 1)}
        fusion_rule("Later")(pairs)
        assert compile_stages(adds(4), TOY).fused.counts == {"Later": Count(2, 2)}
        with pytest.raises(InputError, match="a new rule name"):
            fusion_rule("Pairs")
    assert before == RULES
    assert "Pairs" not in compile_stages(adds(4), TOY).fused.counts


@pytest.mark.parametrize("name", [r.name for r in RULES])
def test_a_published_name_is_taken(name):
    with pytest.raises(InputError, match="switch the old one off"):
        fusion_rule(name)


def test_what_a_rule_must_not_propose():
    graph = adds(4)
    with rules_restored():
        fusion_rule("Foreign")(lambda graph, node: [node, replace(node, name="elsewhere")])
        with pytest.raises(InputError, match="Foreign: nodes of the graph adds; got elsewhere"):
            compile_stages(graph, TOY)
    for proposal in (lambda g, n: [n, n], lambda g, n: [n], lambda g, n: []):
        with rules_restored():
            fusion_rule("Nothing")(proposal)
            assert set(compile_stages(graph, TOY).fused.counts) == {AUTOMATIC}


def test_a_gap_or_a_second_result_has_no_effect():
    with rules_restored():
        fusion_rule("Gap")(lambda g, n: [g.nodes[0], g.nodes[2]] if n is g.nodes[0] else None)
        fused = compile_stages(adds(4), TOY).fused
    assert fused.counts["Gap"] == Count(1, 0)
    assert [len(g) for g in fused.groups] == [4]


# -- automatic groups ------------------------------------------------------------------------------


def test_a_diamond_is_one_kernel():
    graph = net_of({"a": "x", "b": "a", "c": "ax", "d": "bc"}, "d", 4096)
    fused = fuse(graph, TOY)
    assert [[n.name for n in g] for g in fused.groups] == [["a", "b", "c", "d"]]


def test_what_others_want_ends_a_group():
    graph = net_of({"a": "x", "b": "ax", "c": "bx", "d": "cx"}, "bd", 4096)
    fused = fuse(graph, TOY)
    assert [[n.name for n in g] for g in fused.groups] == [["a", "b"], ["c", "d"]]


def test_moves_in_a_row_are_one_copy():
    """What splits the heads of attention: fractals to rows, reshape, transpose."""
    net = GraphBuilder("heads", "fp16")
    y = net.matmul(net.input("x", (16, 32)), net.weight((32, 32), scale=0.2))
    y = net.transpose(net.reshape(y, shape=(2, 8, 4, 8)), perm=(0, 2, 1, 3), name="y")
    net.output(y)
    graph = net.build()
    stages = compile_stages(graph, A910)
    assert stages.fused.counts == {"ConfusionTransposeTransDataFusionPass": Count(1, 1)}
    assert ops_of(stages.fused)[-1].endswith("transpose")
    inputs = random_inputs(graph, 0)
    found = run_compiled(graph, inputs, A910)["y"]
    np.testing.assert_allclose(found, evaluate(graph, inputs)["y"], rtol=0, atol=0.02)


def test_groups_end_at_the_longest():
    fused = fuse(adds(MAX_GROUP + 3), A910)
    assert max(len(g) for g in fused.groups) <= MAX_GROUP
    assert sum(len(g) for g in fused.groups) == MAX_GROUP + 3
    assert len(fused.groups) == 2


def test_a_group_that_does_not_pay_as_a_whole_is_split(monkeypatch):
    graph = adds(12)
    inputs = random_inputs(adds(12), 0)
    monkeypatch.setattr(fusion, "pays", lambda _, group, *__: len(group) <= 5)
    stages = compile_stages(graph, TOY)
    assert [len(group) for group in stages.fused.groups] == [5, 5, 2]
    got = run_tasks(stages.compiled, inputs)
    wanted = evaluate(graph, inputs)
    np.testing.assert_array_equal(got["a11"], wanted["a11"])


@pytest.mark.parametrize(("chip", "within"), [("Ascend910B2", "across"), ("Ascend310", "inside")])
def test_inside_a_launch_borders_cost_a_barrier(chip, within):
    """The vector unit's convolution saves a later start; a barrier buys the cube's before it."""
    net = GraphBuilder("depthwise", "fp16")
    chip = load_chip(chip)
    y = net.depthwise_conv2d(net.input("x", (1, 64, 28, 28)), net.weight((64, 1, 3, 3)), pad=1)
    net.output(net.silu(y, name="y"))
    graph = net.build()
    queued, inside = (Road(start=start).stages(graph, chip) for start in ("queued", within))
    assert ops_of(queued.fused)[1] == ops_of(inside.fused)[1] == "depthwise_conv2d+silu"
    both = [stages.compiled.tasks[1].lowered.kernel.phases for stages in (queued, inside)]
    assert [any(phase.mix for phase in phases) for phases in both] == [False, not chip.combined]
    pieces = [task.piece for task in queued.compiled.tasks if task.lowered is not None]
    costs = [sum(cycles_started(p, chip, s) for p in pieces) for s in ("queued", within)]
    saved = start_cycles(chip, "queued") - start_cycles(chip, within)
    gained = costs[0] - costs[1] - len(pieces) * saved
    assert gained == 0 if chip.combined else gained > 0
    inputs = random_inputs(graph, 0)
    wanted = evaluate(graph, inputs)["y"]
    (found,) = run_tasks(inside.compiled, inputs).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())


# -- values and time -------------------------------------------------------------------------------

UNARY = ("relu", "relu6", "abs", "neg", "sigmoid", "tanh", "gelu", "silu", "hard_swish")
BINARY = ("add", "sub", "mul", "max")


def step(net, rng, live):
    """Append a random node of images or matrices."""
    v = rng.choice(live[-2:])
    choice = rng.random()
    image = len(v.shape) == 4
    if choice < 0.25 and image:
        k = rng.choice((8, 16, 24))
        side = rng.choice((1, 3))
        return net.conv2d(v, net.weight((k, v.shape[1], side, side)), pad=side // 2)
    if choice < 0.25:
        return net.matmul(v, net.weight((v.shape[1], rng.choice((16, 24, 32))), scale=0.2))
    if choice < 0.35 and image:
        return net.depthwise_conv2d(v, net.weight((v.shape[1], 1, 3, 3)), pad=1)
    if choice < 0.35:
        return net.softmax(v, axis=-1)
    if choice < 0.6:
        return net.add_node(rng.choice(UNARY), v)
    if choice < 0.8:
        same = [w for w in live if w.shape == v.shape]
        return net.add_node(rng.choice(BINARY), v, rng.choice(same))
    channel = (v.shape[1], 1, 1) if image else (v.shape[1],)
    return net.add_node(rng.choice(("add", "mul")), v, net.weight(channel))


def random_net(rng):
    net = GraphBuilder("random", "fp16")
    image = rng.random() < 0.5
    shape = (1, rng.choice((3, 16, 20)), 8, 8) if image else (rng.choice((5, 16, 33)), 32)
    live = [net.input("x", shape)]
    for _ in range(rng.randint(2, 7)):
        live.append(step(net, rng, live))
    net.output(*live[-rng.choice((1, 1, 2)) :][-(len(live) - 1) :])
    return net.build()


@settings(max_examples=12)
@given(st.randoms(use_true_random=False), st.sampled_from([A910, B2]))
def test_fused_values_are_right_and_never_slower(rng, chip):
    graph = random_net(rng)
    together = compile_stages(graph, chip)
    apart = compile_stages(graph, chip, fusion=False)
    inputs = random_inputs(graph, rng.randint(0, 99))
    wanted = evaluate(graph, inputs)
    for stages in (together, apart):
        found = run_tasks(stages.compiled, inputs)
        for name, own in zip(graph.outputs, stages.compiled.graph.outputs, strict=True):
            # fp16 between kernels, fp32 or less inside: errors of a few steps of the largest value
            scale = np.abs(wanted[name].astype(np.float64)).max(initial=0.1)
            np.testing.assert_allclose(found[own], wanted[name], rtol=0, atol=0.01 * scale)
    assert _cycles(together) <= _cycles(apart)
    nodes = [n.name for group in together.fused.groups for n in group]
    assert sorted(nodes) == sorted(n.name for n in together.laid_out.nodes)


def _cycles(stages) -> int:
    pieces = [t.piece for t in stages.compiled.tasks if t.lowered is not None]
    return sum(cycles_started(piece, stages.compiled.chip, "queued") for piece in pieces)


@pytest.mark.parametrize(("channels", "size", "kernel"), [(16, 28, 3), (64, 7, 1), (40, 56, 3)])
def test_what_the_fix_pipe_does_in_passing_takes_no_cycle(channels, size, kernel):
    net = GraphBuilder("net", "fp16")
    chip = load_chip("Ascend910B2")
    x = net.input("x", (2, channels, size, size))
    weight = net.weight((48, channels, kernel, kernel))
    net.output(net.relu(net.conv2d(x, weight, net.weight((48,)), pad=kernel // 2)))
    graph = compile_stages(net.build(), chip).compiled.graph
    group = tuple(node for node in graph.nodes if node.op in ("conv2d", "relu"))
    piece, alone = (lower.piece_of(graph, some) for some in (group, group[:1]))
    assert lower.conv.follows_free(piece, alone, chip)
    assert not lower.conv.follows_free(piece, alone, load_chip("Ascend910A"))
    together, apart = (cycles_started(one, chip, "queued", warm=True) for one in (piece, alone))
    assert together == apart

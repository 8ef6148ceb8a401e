"""Checks of chapters 13 and 14.

13: a Gemm of a model file as nodes, a rule of a verifier, a cut of a graph.
14: transposes, dead code, folded channels; its pass manager is among the evenings.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph import Graph, GraphBuilder, evaluate, random_inputs, to_text
from ascend_lab.graph.passes import Draft, sweep
from ascend_lab.lab.checks import core as ex

DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
"""What the attributes of ONNX's Gemm are where a node does not say."""


# -- cases ----------------------------------------------------------------------------------------
def _gemm(given: dict[str, Any], attributes: dict[str, Any]) -> Any:
    full = {**DEFAULTS, **attributes}
    a = given["a"].T if full["transA"] else given["a"]
    b = given["b"].T if full["transB"] else given["b"]
    product = full["alpha"] * (a.astype(np.float64) @ b)
    return product + full["beta"] * given["c"] if "c" in given else product


def _draw_gemm(rng: np.random.Generator) -> ex.Case:
    m, k, n = (int(s) for s in rng.integers(2, 6, 3))
    options = {"alpha": 0.25, "beta": 2.0, "transA": 1, "transB": 1}
    said = {key: value for key, value in options.items() if rng.random() < 0.5}
    forms: tuple[Any, ...] = (None, (n,), (m, n), (1, n), (m, 1))
    return {
        "a": (k, m) if "transA" in said else (m, k),
        "b": (n, k) if "transB" in said else (k, n),
        "c": forms[int(rng.integers(len(forms)))],
        "attributes": said,
    }


def _chain(length: int, rng: np.random.Generator | None = None) -> Graph:
    """Return a sound graph of additions: each node reads the one before, and an earlier tensor."""
    net = GraphBuilder("chain")
    there = [net.input("x", (4,)), net.fill((4,), 1.0, "w")]
    for i in range(length):
        other = there[int(rng.integers(len(there)))] if rng is not None else there[1]
        there.append(net.add(there[-1] if i else there[0], other, name=f"n{i}"))
    net.output(there[-1])
    return net.build()


def _draw_graph(rng: np.random.Generator) -> ex.Case:
    graph = _chain(int(rng.integers(2, 9)), rng)
    nodes = list(graph.nodes)
    if rng.random() < 0.6:
        one, two = rng.choice(len(nodes), 2, replace=False)
        nodes[one], nodes[two] = nodes[two], nodes[one]
    return {"graph": replace(graph, nodes=tuple(nodes))}


def _draw_cut(rng: np.random.Generator) -> ex.Case:
    count = int(rng.integers(2, 12))
    return {
        "times_s": [float(t) for t in rng.uniform(0.5, 3.0, count)],
        "bytes_over": [int(n) for n in rng.integers(1, 20, count)],
        "rate": float(rng.choice([1.0, 4.0])),
        "latency_s": float(rng.choice([0.0, 1.0])),
    }


# -- chapter 14 ------------------------------------------------------------------------------------
Values = NDArray[Any]
Step = tuple[Any, ...]
PERMS = tuple(itertools.permutations(range(3)))
PLAIN = ("exp", "relu", "neg")


# -- two transposes are one -----------------------------------------------------------------------
def merge_transposes(rw: Draft, node: Any) -> bool:
    """Let a transpose of a transpose read what the first one reads; drop it if nothing moves."""
    first = rw.maker(node.inputs[0])
    if first is None or first.op != "transpose":
        return False
    perm = tuple(first.attr("perm")[axis] for axis in node.attr("perm"))
    if perm == tuple(range(len(perm))):
        return rw.forward(node, first.inputs[0])
    return rw.become(node, "transpose", first.inputs, {"perm": perm})


def chain_graph(steps: Sequence[int], reads: Sequence[int]) -> Graph:
    """Return a chain: steps 0 to 5 transpose, the others are `PLAIN`; `reads` are outputs, too."""
    net = GraphBuilder("chain")
    value = net.input("x", (2, 3, 4))
    for place, step in enumerate(steps):
        if step < len(PERMS):
            value = net.transpose(value, perm=PERMS[step], name=f"t{place}")
        else:
            value = getattr(net, PLAIN[step - len(PERMS)])(value, name=f"e{place}")
        if place in reads:
            net.output(net.tanh(value, name=f"out{place}"))
    net.output(net.tanh(value, name="y"))
    return net.build()


def rewritten(rule: Any, graph: Graph) -> Graph:
    """Return what a rule for transposes makes of a graph, in 12 sweeps at most."""
    for _ in range(12):
        graph, matches = sweep(rule, "transpose")(graph)
        if not matches:
            break
    return graph


def _count(graph: Graph) -> int:
    return sum(node.op == "transpose" for node in graph.nodes)


# -- dead code with effects -----------------------------------------------------------------------
def needed(
    nodes: Sequence[tuple[str, str, tuple[str, ...]]], outputs: Sequence[str], effects: set[str]
) -> list[str]:
    """Return the nodes that an output or a node with an effect depends on, in order."""
    wanted, kept = set(outputs), []
    for name, op, inputs in reversed(nodes):
        if name in wanted or op in effects:
            kept.append(name)
            wanted.update(inputs)
    return kept[::-1]


# -- a chain of scales and shifts -----------------------------------------------------------------
def fold(weight: Values, bias: Values, steps: Sequence[Step]) -> tuple[Values, Values]:
    """Return weights and bias of one convolution that computes the convolution and the steps."""
    w, b = weight.astype(np.float64), bias.astype(np.float64)
    for kind, *numbers in steps:
        if kind == "bn":
            scale, offset, mean, variance, epsilon = numbers
            a = scale / np.sqrt(variance + epsilon)
            c = offset - mean * a
        else:
            a, c = (numbers[0], 0.0) if kind == "mul" else (1.0, numbers[0])
        w = w * np.reshape(a, (-1, 1, 1, 1))
        b = a * b + c
    return w, b


def draw_steps(rng: np.random.Generator) -> ex.Case:
    """Return weights, bias and up to four steps for two to five channels."""
    k, c = (int(n) for n in rng.integers(2, 6, 2))
    steps: list[Step] = []
    for kind in rng.choice(["mul", "add", "bn"], rng.integers(0, 5)):
        if kind == "bn":
            rest = [rng.standard_normal(k) for _ in range(3)]
            steps.append(("bn", *rest, rng.uniform(0.1, 2.0, k), 1e-5))
        else:
            steps.append((str(kind), rng.standard_normal(k)))
    weight, bias = rng.standard_normal((k, c, 3, 3)), rng.standard_normal(k)
    return {"weight": weight, "bias": bias, "steps": steps}


def _answer_13_3(graph: Graph) -> str | None:
    ready = {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        if not ready.issuperset(node.inputs):
            return node.name
        ready.update(node.outputs)
    return None


def _split_chain() -> Graph:
    """Return a sound graph in which a node reads the second output of another."""
    net = GraphBuilder("split")
    first, second = net.split(net.input("x", (4,)), sizes=(2, 2), name="halves")
    net.output(net.add(net.relu(second), first))
    return net.build()


SOUND_3, SPLIT_3 = _chain(5), _split_chain()


@ex.against(
    _answer_13_3,
    edges=[
        {"graph": SOUND_3},
        {"graph": replace(SOUND_3, nodes=(SOUND_3.nodes[1], SOUND_3.nodes[0], *SOUND_3.nodes[2:]))},
        {
            "graph": replace(
                SOUND_3,
                nodes=(*SOUND_3.nodes[:-1], replace(SOUND_3.nodes[-1], inputs=("nobody", "w"))),
            )
        },
        {"graph": SPLIT_3},
        {
            "graph": replace(
                SOUND_3,
                nodes=(
                    *SOUND_3.nodes[:2],
                    replace(
                        SOUND_3.nodes[2],
                        inputs=(*SOUND_3.nodes[2].inputs[:1], SOUND_3.nodes[2].output),
                    ),
                    *SOUND_3.nodes[3:],
                ),
            )
        },
    ],
)
def check_ex_13_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(graph)`: the first node that reads what is not there yet, or None."""
    return _draw_graph(rng)


CHAIN_3 = [(f"n{i}", "relu", (f"n{i - 1}" if i else "x",)) for i in range(5)]


@ex.against(
    needed,
    edges=ex.rows(
        "nodes outputs effects",
        (CHAIN_3, ["n2"], set()),
        (CHAIN_3, ["x"], set()),
        ([("a", "exp", ("x",)), ("b", "print", ("a",)), ("c", "relu", ("x",))], ["c"], {"print"}),
    ),
    cases=30,
)
def check_ex_14_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(nodes, outputs, effects)`: dead code elimination that keeps effects."""
    ops = ("add", "relu", "scatter", "print", "exp")
    names, nodes = ["x"], []
    for i in range(int(rng.integers(1, 12))):
        inputs = tuple(names[int(k)] for k in rng.integers(0, len(names), rng.integers(1, 3)))
        nodes.append((f"n{i}", ops[int(rng.integers(len(ops)))], inputs))
        names.append(f"n{i}")
    outputs = [names[int(k)] for k in rng.integers(0, len(names), rng.integers(1, 3))]
    return {"nodes": nodes, "outputs": outputs, "effects": {"scatter", "print"}}


def _building(fn: Any) -> Any:
    def build(a: Any, b: Any, c: Any, attributes: dict[str, Any]) -> Graph:
        net = GraphBuilder("gemm")
        given = [net.input(n, s) for n, s in zip("abc", (a, b, c), strict=True) if s is not None]
        net.output(fn(net, *given, *([None] if c is None else []), dict(attributes)))
        return net.build()

    return build


def _judge_13_2(got: Graph, case: ex.Case) -> str | None:
    if "gemm" in [node.op for node in got.nodes]:
        return "which has a gemm in it; use matmul, muls and add"
    given = random_inputs(got, 13)
    (found,) = evaluate(got, given).values()
    expected = _gemm(given, case["attributes"])
    if found.shape != expected.shape:
        return f"of shape {found.shape}, expected {expected.shape}"
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        shown = [ex.show(values.ravel()[:3]) for values in (found, expected)]
        return f"which computes {shown[0]}, expected {shown[1]}"
    return None


@ex.judged(
    _judge_13_2,
    edges=ex.rows(
        "a b c attributes",
        ((2, 3), (3, 4), (4,), {}),
        ((2, 3), (3, 4), None, {}),
        ((3, 2), (4, 3), (2, 4), {"transA": 1, "transB": 1}),
        ((2, 3), (3, 4), (2, 1), {"alpha": 0.5, "beta": 0.0}),
    ),
    cases=20,
    wrap=_building,
)
def check_ex_13_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(net, a, b, c, attributes)`: a Gemm of ONNX from nodes that are no `gemm`."""
    return _draw_gemm(rng)


def _judge_13_4(got: Any, case: ex.Case) -> str | None:
    times, over, rate, wait = case.values()
    if not isinstance(got, int | np.integer) or not 0 < got < len(times):
        return f"expected a position from 1 to {len(times) - 1}"
    found = [
        max(sum(times[:at]), wait + over[at] / rate, sum(times[at:])) for at in range(1, len(times))
    ]
    own, best = found[got - 1], min(found)
    if own <= best * (1 + 1e-9):
        return None
    position = found.index(best) + 1
    return f"an image every {own:.4g} s; a cut at {position} gives one every {best:.4g} s"


@ex.judged(
    _judge_13_4,
    edges=ex.rows(
        "times_s bytes_over rate latency_s",
        ([1.0, 1.0], [8, 8], 8.0, 0.0),
        ([1.0, 1.0], [1, 100], 1.0, 0.0),
        ([4.0, 1.0, 1.0, 1.0], [1] * 4, 8.0, 0.0),
        ([1.0] * 4, [9, 2, 9, 1], 1.0, 0.5),
        ([1.0] * 4, [9, 2, 3, 9], 2.0, 2.0),
        ([1.0] * 4, [9, 1, 3, 9], 2.0, 1.0),
    ),
)
def check_ex_13_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(times_s, bytes_over, rate, latency_s)`: where to cut a graph for two devices."""
    return _draw_cut(rng)


def _judge_14_2(got: Graph, case: ex.Case) -> str | None:
    before = chain_graph(case["steps"], case["reads"])
    best = rewritten(merge_transposes, before)
    inputs = random_inputs(before, 14)
    wanted, found = evaluate(before, inputs), evaluate(got, inputs)
    for name, values in wanted.items():
        if found[name].shape != values.shape or not np.array_equal(found[name], values):
            return f"which computes another {name}; every bit should stay"
    if best is before and to_text(got) != to_text(before):
        return "expected the same graph: no transpose reads another"
    if _count(got) != _count(best):
        return f"with {_count(got)} transposes, expected {_count(best)}"
    return None


@ex.judged(
    _judge_14_2,
    edges=ex.rows("steps reads", ([2, 5], []), ([3, 4], []), ([3, 6, 4], []), ([3, 3, 3], [1])),
    cases=20,
    wrap=lambda fn: lambda steps, reads: rewritten(fn, chain_graph(steps, reads)),
)
def check_ex_14_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(rw, node)`, a rule that merges transposes of transposes."""
    steps = rng.integers(0, 7, rng.integers(1, 8)).tolist()
    return {"steps": steps, "reads": rng.integers(0, 8, rng.integers(0, 3)).tolist()}


def _read_only(fn: Any) -> Any:
    def folded(weight: Values, bias: Values, steps: Any) -> Any:
        for array in (weight, bias):
            array.flags.writeable = False  # whoever writes in place is told so
        return fn(weight, bias, steps)

    return folded


RNG_14_4 = np.random.default_rng(3)
WEIGHT, BIAS = RNG_14_4.standard_normal((2, 1, 1, 1)), RNG_14_4.standard_normal(2)
ONES, ZEROS, FACTORS = np.ones(2), np.zeros(2), np.array([2.0, 3.0])


@ex.against(
    fold,
    edges=ex.rows(
        "weight bias steps",
        (WEIGHT, BIAS, []),
        (WEIGHT, BIAS, [("mul", FACTORS)]),
        (WEIGHT, BIAS, [("add", ONES), ("mul", FACTORS)]),
        (WEIGHT, BIAS, [("bn", ONES, ZEROS, ONES, 4 * ONES, 0.0)]),
    ),
    cases=20,
    rel_tol=1e-9,
    wrap=_read_only,
)
def check_ex_14_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(weight, bias, steps)`: scales, shifts and batch norms folded into a convolution."""
    return draw_steps(rng)

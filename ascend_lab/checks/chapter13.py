"""Checks of chapter 13: a Gemm of a model file as nodes, a rule of a verifier, a cut of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.checks.core import (
    DEFAULT_SEED,
    Case,
    CheckResult,
    check_against,
    check_property,
    show,
)
from ascend_lab.graph import Graph, GraphBuilder, evaluate, random_inputs

DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
"""What the attributes of ONNX's Gemm are where a node does not say."""


def check_ex_13_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(net, a, b, c, attributes)`: a Gemm of ONNX from nodes that are no `gemm`."""

    def build(a: Any, b: Any, c: Any, attributes: dict[str, Any]) -> Graph:
        net = GraphBuilder("gemm")
        given = [net.input(n, s) for n, s in zip("abc", (a, b, c), strict=True) if s is not None]
        net.output(fn(net, *given, *([None] if c is None else []), dict(attributes)))
        return net.build()

    def judge(got: Graph, case: Case) -> str | None:
        used = [node.op for node in got.nodes]
        if "gemm" in used:
            return "which has a gemm in it; use matmul, muls and add"
        given = random_inputs(got, 13)
        (found,) = evaluate(got, given).values()
        expected = _gemm(given, case["attributes"])
        if found.shape != expected.shape:
            return f"of shape {found.shape}, expected {expected.shape}"
        if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return (
                f"which computes {show(found.ravel()[:3])}, expected {show(expected.ravel()[:3])}"
            )
        return None

    edges: list[Case] = [
        {"a": (2, 3), "b": (3, 4), "c": (4,), "attributes": {}},
        {"a": (2, 3), "b": (3, 4), "c": None, "attributes": {}},
        {"a": (3, 2), "b": (4, 3), "c": (2, 4), "attributes": {"transA": 1, "transB": 1}},
        {"a": (2, 3), "b": (3, 4), "c": (2, 1), "attributes": {"alpha": 0.5, "beta": 0.0}},
    ]
    if not callable(fn):
        return check_property("ex_13_2", fn, judge, _draw_gemm, seed=seed)
    result = check_property("ex_13_2", build, judge, _draw_gemm, edge_cases=edges, cases=20,
                            seed=seed)  # fmt: skip
    return replace(result, subject=fn)


def check_ex_13_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(graph)`: the first node that reads what is not there yet, or None."""

    def reference(graph: Graph) -> str | None:
        ready = {*graph.inputs, *graph.constants}
        for node in graph.nodes:
            if not ready.issuperset(node.inputs):
                return node.name
            ready.update(node.outputs)
        return None

    sound = _chain(5)
    swapped = replace(sound, nodes=(sound.nodes[1], sound.nodes[0], *sound.nodes[2:]))
    nobody = replace(sound.nodes[-1], inputs=("nobody", "w"))
    own = replace(sound.nodes[2], inputs=(*sound.nodes[2].inputs[:1], sound.nodes[2].output))
    edges = [
        {"graph": sound},
        {"graph": swapped},
        {"graph": replace(sound, nodes=(*sound.nodes[:-1], nobody))},
        {"graph": replace(sound, nodes=(*sound.nodes[:2], own, *sound.nodes[3:]))},
    ]
    return check_against("ex_13_3", fn, reference, _draw_graph, edge_cases=edges, seed=seed)


def check_ex_13_4(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(times_s, bytes_over, rate, latency_s)`: where to cut a graph for two devices."""

    def interval(times: Sequence[float], over: Sequence[int], rate: float, wait: float, at: int
                 ) -> float:  # fmt: skip
        return max(sum(times[:at]), wait + over[at] / rate, sum(times[at:]))

    def judge(got: Any, case: Case) -> str | None:
        times, over, rate, wait = case.values()
        if not isinstance(got, int | np.integer) or not 0 < got < len(times):
            return f"expected a position from 1 to {len(times) - 1}"
        found = [interval(times, over, rate, wait, at) for at in range(1, len(times))]
        own, best = found[got - 1], min(found)
        if own <= best * (1 + 1e-9):
            return None
        position = found.index(best) + 1
        return f"an image every {own:.4g} s; a cut at {position} gives one every {best:.4g} s"

    edges = [
        {"times_s": [1.0, 1.0], "bytes_over": [8, 8], "rate": 8.0, "latency_s": 0.0},
        {"times_s": [4.0, 1.0, 1.0, 1.0], "bytes_over": [1] * 4, "rate": 8.0, "latency_s": 0.0},
        {"times_s": [1.0] * 4, "bytes_over": [9, 2, 9, 1], "rate": 1.0, "latency_s": 0.5},
    ]
    return check_property("ex_13_4", fn, judge, _draw_cut, edge_cases=edges, seed=seed)


# -- cases ----------------------------------------------------------------------------------------
def _gemm(given: dict[str, Any], attributes: dict[str, Any]) -> Any:
    full = {**DEFAULTS, **attributes}
    a = given["a"].T if full["transA"] else given["a"]
    b = given["b"].T if full["transB"] else given["b"]
    product = full["alpha"] * (a.astype(np.float64) @ b)
    return product + full["beta"] * given["c"] if "c" in given else product


def _draw_gemm(rng: np.random.Generator) -> Case:
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


def _draw_graph(rng: np.random.Generator) -> Case:
    graph = _chain(int(rng.integers(2, 9)), rng)
    nodes = list(graph.nodes)
    if rng.random() < 0.6:
        one, two = rng.choice(len(nodes), 2, replace=False)
        nodes[one], nodes[two] = nodes[two], nodes[one]
    return {"graph": replace(graph, nodes=tuple(nodes))}


def _draw_cut(rng: np.random.Generator) -> Case:
    count = int(rng.integers(2, 12))
    return {
        "times_s": [float(t) for t in rng.uniform(0.5, 3.0, count)],
        "bytes_over": [int(n) for n in rng.integers(1, 20, count)],
        "rate": float(rng.choice([1.0, 4.0])),
        "latency_s": float(rng.choice([0.0, 1.0])),
    }

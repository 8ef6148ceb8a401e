"""Checks of chapter 14a: heads, transposes, chains of conversions and operators, propagation."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from ascend_lab.graph import Graph
from ascend_lab.graph.layout import assign_layouts, cancel_trans_data
from ascend_lab.lab import layout_choices as layouts
from ascend_lab.lab.checks import core as ex


# -- 14a.1 to 14a.4: heads, transposes, chains of conversions, a chain of operators ----------------
def _behind(count: int, channels: int, pixels: int) -> tuple[int, int]:
    once = 2 * pixels * (channels + -(-channels // 16) * 16)
    return count * once, once


@ex.against(
    _behind,
    edges=ex.rows("count channels pixels", (1, 16, 4), (3, 64, 1024), (2, 1, 9), (4, 17, 1)),
)
def check_ex_14a_1(rng: ex.Rng) -> ex.Case:
    """Compare the bytes converted behind a convolution by the rule, and at best."""
    draws = {"count": 6, "channels": 130, "pixels": 3000}
    return {name: int(rng.integers(1, most)) for name, most in draws.items()}


def _combined(perms: Sequence[Sequence[int]], shape: Sequence[int]) -> tuple[int, ...] | None:
    one = tuple(range(len(shape)))
    for perm in perms:
        one = tuple(one[axis] for axis in perm)
    moved = [axis for axis in one if shape[axis] > 1]
    return None if moved == sorted(moved) else one


@ex.against(
    _combined,
    edges=ex.rows(
        "perms shape",
        ([(0, 2, 3, 1), (0, 3, 1, 2)], (1, 4, 5, 6)),
        ([(0, 2, 3, 1), (0, 2, 3, 1)], (2, 8, 8, 8)),
        ([(0, 2, 3, 1)], (1, 64, 1, 1)),
        ([(1, 2, 0)], (2, 3, 4)),
        ([(1, 0), (1, 0), (1, 0)], (3, 3)),
    ),
)
def check_ex_14a_2(rng: ex.Rng) -> ex.Case:
    """Compare transposes one after another with the one that does the same, or None."""
    rank = int(rng.integers(2, 5))
    perms = [tuple(map(int, rng.permutation(rank))) for _ in range(rng.integers(1, 4))]
    return {"perms": perms, "shape": tuple(int(n) for n in rng.choice([1, 1, 2, 3], rank))}


def left_over(layouts: Sequence[str], reads: set[int], padded: bool) -> list[tuple[str, str]]:
    """Return the conversions that a chain of them needs when each starts from the first tensor."""
    found: list[tuple[str, str]] = []
    for place in sorted(reads - {0}):
        pair = layouts[0], layouts[place]
        if pair not in found and (padded or pair[0] != pair[1]):
            found.append(pair)
    return found


@ex.against(
    left_over,
    edges=ex.rows(
        "layouts reads padded",
        (["ND", "NC1HWC0", "ND"], {2}, False),
        (["NC1HWC0", "ND", "NC1HWC0"], {2}, True),
        (["NC1HWC0", "ND", "NC1HWC0"], {2}, False),
        (["ND", "NC1HWC0", "ND", "NC1HWC0"], {1, 3}, False),
        (["ND", "NC1HWC0", "FRACTAL_NZ"], {0, 2}, False),
    ),
)
def check_ex_14a_3(rng: ex.Rng) -> ex.Case:
    """Compare the conversions that are left of a chain."""
    layouts, count = ["ND", "NC1HWC0", "FRACTAL_NZ"], int(rng.integers(2, 7))
    chain = [str(rng.choice(layouts))]
    while len(chain) < count:
        chain.append(str(rng.choice([x for x in layouts if x != chain[-1]])))
    reads = {place for place in range(count) if rng.random() < 0.6}
    return {"layouts": chain, "reads": reads, "padded": chain[0] != "ND" and rng.random() < 0.5}


def _chain(kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> int:
    best = {layout: 0 for layout in ("ND", "NC1HWC0") if kinds[0] in (layout, "any")}
    for kind, (plain, blocked) in zip(kinds[1:], sizes, strict=True):
        best = {
            to: min(cost + (plain + blocked) * (to != at) for at, cost in best.items())
            for to in ("ND", "NC1HWC0")
            if kind in (to, "any")
        }
    return min(best.values())


@ex.against(
    _chain,
    edges=ex.rows(
        "kinds sizes",
        (["ND", "NC1HWC0"], [(6, 32)]),
        (["ND", "any", "NC1HWC0"], [(64, 64), (16, 16)]),
        (["ND", "any", "NC1HWC0"], [(16, 16), (64, 64)]),
        (["ND", "any", "ND"], [(16, 16), (64, 64)]),
        (["NC1HWC0", "any", "NC1HWC0", "ND"], [(1, 1), (1, 1), (9, 9)]),
        (["any", "any"], [(5, 5)]),
    ),
)
def check_ex_14a_4(rng: ex.Rng) -> ex.Case:
    """Compare the fewest bytes of a chain of operators with a walk over all choices."""
    count = int(rng.integers(2, 9))
    kinds = [str(k) for k in rng.choice(["ND", "NC1HWC0", "any", "any"], count)]
    plain = [int(n) for n in rng.integers(1, 100, count - 1)]
    return {"kinds": kinds, "sizes": [(n, n * int(rng.integers(1, 4))) for n in plain]}


# -- 14a.5: propagation ----------------------------------------------------------------------------
NETWORKS = ("block", "heads", "sampler", "shufflenet_v2", "mobilevit_xxs", "efficientformer_l1")


@cache
def rule_bytes(graph: Graph) -> int:
    """Return what the package's assignment converts."""
    return layouts.converted_bytes(cancel_trans_data(assign_layouts(graph)))


def _judge_choice(got: Any, case: ex.Case) -> str | None:
    graph, allowed = case["graph"], case["options"]
    if not isinstance(got, dict) or set(got) != {node.name for node in graph.nodes}:
        return "expected a dict with an option for every node"
    wrong = next((name for name, option in got.items() if option not in allowed[name]), None)
    if wrong is not None:
        return f"expected one of {len(allowed[wrong])} options for {wrong}"
    moved = layouts.converted_bytes(layouts.laid_out(graph, got))
    goal = min(rule_bytes(graph), layouts.fewest_bytes(graph, allowed) * 1.005)
    return None if moved <= goal else f"expected at most {goal:,.0f} bytes, it converts {moved:,}"


def _case_of(graph: Graph) -> ex.Case:
    return {"graph": graph, "options": layouts.options(graph)}


def check_ex_14a_5(fn: Any, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Judge a choice of layouts by what it converts, on networks and on random graphs."""
    return ex.check_property(
        "ex_14a_5",
        fn,
        _judge_choice,
        lambda rng: _case_of(layouts.random_graph(rng)),
        edge_cases=[_case_of(layouts.prepared(name)) for name in NETWORKS],
        cases=12,
        seed=seed,
    )

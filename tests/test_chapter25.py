"""The checks and figures of chapter 25, the compiler with switches, and what the prose claims."""

import math
from itertools import permutations

import pytest

from ascend_lab.compiler import GraphBuilder, bound_of, compile_graph, simulate_graph
from ascend_lab.compiler.compile import TERMS, ledger
from ascend_lab.lab import tuning as tq
from ascend_lab.lab.figures import fig_ledger
from ascend_lab.lab.figures.tuned_networks import TERM_STYLE, one_block
from ascend_lab.machine.chip import load_chip

CHIP = load_chip("Ascend310")


@pytest.fixture(scope="module")
def small():
    build = GraphBuilder("small")
    x = build.input("x", (256, 512))
    build.output(build.relu(build.matmul(x, build.weight((512, 256), "w")), name="y"))
    return build.build()


# -- credit ----------------------------------------------------------------------------------------
def test_shares_are_the_mean_over_all_orders():
    names = ("a", "b", "c")
    worth = {frozenset(): 0.0, frozenset("a"): 1, frozenset("b"): 3, frozenset("c"): -1}
    worth |= {frozenset("ab"): 7, frozenset("ac"): 2, frozenset("bc"): 2.5, frozenset("abc"): 11}
    found = tq.shares(worth.__getitem__, names)
    for name in names:
        gains = []
        for order in permutations(names):
            before = frozenset(order[: order.index(name)])
            gains.append(worth[before | {name}] - worth[before])
        assert found[name] == pytest.approx(sum(gains) / len(gains))
    assert sum(found.values()) == pytest.approx(11)


# -- the compiler with switches --------------------------------------------------------------------
@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_all_techniques_are_the_default_compiler(chip):
    device = load_chip(chip)
    found = simulate_graph(tq.compile_with(one_block(2), device, tq.TECHNIQUES))
    default = simulate_graph(compile_graph(one_block(2), device))
    assert [o.name for o in found.operators] == [o.name for o in default.operators]
    assert found.time_s == default.time_s


def test_credits_of_a_small_network_multiply_to_the_whole(small):
    times = tq.all_times(small, CHIP)
    assert len(times) == 2 ** len(tq.TECHNIQUES)
    whole = times[frozenset()] / times[frozenset(tq.TECHNIQUES)]
    assert math.prod(tq.factors(times, tq.TECHNIQUES).values()) == pytest.approx(whole)
    rows = tq.ladder(small, CHIP)
    assert [name for name, _, _ in rows] == ["naive", *tq.TECHNIQUES]
    assert rows[0][2] == times[frozenset()]
    assert rows[-1][2] == times[frozenset(tq.TECHNIQUES)]


# -- figures ---------------------------------------------------------------------------------------
def test_every_term_of_a_ledger_is_drawn():
    found = ledger(simulate_graph(compile_graph(one_block(), CHIP)), bound_of(one_block(), CHIP))
    assert TERM_STYLE.keys() == TERMS.keys() == found.keys()
    even = fig_ledger({"block": dict.fromkeys(TERMS, 1e-3)}).alt_text
    assert "block 10 ms: " in even and all(f"{name} 10%" in even for name in TERMS)
    assert "bound" in fig_ledger({"block": found}).alt_text

"""The contest solver: legal, bounded on both sides, repeatable, exact where it says so."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contest_cost import EXAMPLE_3, NATIVE
from test_contest_problem import FOLDER

from ascend_lab.cli import ascend_lab as main
from ascend_lab.errors import CapacityError
from ascend_lab.lab.contest import Problem, Step, read_problem, schedule_latencies, solve
from ascend_lab.lab.contest.merge import intervals, merge, resident_tensors
from ascend_lab.lab.contest.price import Prices
from ascend_lab.lab.contest.problem import parse_problem
from ascend_lab.lab.contest.solve import best_sequence

KEYS = {
    "subgraphs",
    "granularities",
    "tensors_to_retain",
    "traversal_orders",
    "subgraph_latencies",
    "cost",
    "lower_bound",
}


def check(problem: Problem, found) -> None:
    """Price the schedule again and hold it against both bounds."""
    assert schedule_latencies(problem, found.steps) == pytest.approx(found.latencies)
    assert found.lower_bound <= found.cost * (1 + 1e-9)
    assert found.cost <= found.unfused * (1 + 1e-9)


@pytest.mark.parametrize(("name", "most"), [("mlsys-2026-1", 1.53), ("mlsys-2026-9", 1.02)])
def test_the_instances_end_below_the_unfused_floor(name, most):
    problem = read_problem(FOLDER / f"{name}.json")
    found = solve(problem, None, 150)
    check(problem, found)
    assert found.cost < found.floor
    assert found.ratio < most


def test_no_budget_still_gives_a_schedule():
    problem = read_problem(FOLDER / "mlsys-2026-9.json")
    found = solve(problem, 0.0)
    check(problem, found)
    assert len(found.steps) == 32
    assert found.cost == pytest.approx(found.unfused)


def test_a_budget_of_evaluations_repeats_exactly():
    problem = read_problem(FOLDER / "mlsys-2026-9.json")
    assert solve(problem, None, 60, seed=3) == solve(problem, None, 60, seed=3)


def test_the_published_example_solves():
    problem = read_problem(FOLDER / "example_problem.json")
    found = solve(problem, None)
    check(problem, found)
    assert found.proven


@st.composite
def problems(draw, most: int = 6, chain: bool = False) -> Problem:
    """Return a graph of products and element-wise operations on a few matrix shapes."""
    sizes = st.sampled_from([8, 16, 32])
    rows = draw(sizes)
    widths, heights, outputs, inputs, kinds = [draw(sizes)], [rows], [], [], []
    live = [0]
    for _ in range(draw(st.integers(1, most))):
        left = live[-1] if chain else draw(st.sampled_from(live))
        kind = draw(st.sampled_from(["MatMul", "Pointwise"]))
        if kind == "MatMul":
            wide = draw(sizes)
            widths.append(wide)
            heights.append(widths[left])
            reads = [left, len(widths) - 1]
        else:
            wide = widths[left]
            same = [t for t in live if widths[t] == wide]
            reads = [left] if chain else [left, draw(st.sampled_from(same))]
        widths.append(wide)
        heights.append(rows)
        live.append(len(widths) - 1)
        inputs.append(reads)
        outputs.append([live[-1]])
        kinds.append(kind)
    return parse_problem(
        {
            "widths": widths,
            "heights": heights,
            "inputs": inputs,
            "outputs": outputs,
            "base_costs": draw(
                st.lists(st.integers(0, 90), min_size=len(kinds), max_size=len(kinds))
            ),
            "op_types": kinds,
            "fast_memory_capacity": draw(st.sampled_from([64, 300, 1200, 5000])),
            "slow_memory_bandwidth": draw(st.sampled_from([1, 8])),
            "native_granularity": [8, 8],
        }
    )


@settings(max_examples=20, deadline=None)
@given(problem=problems())
def test_any_graph_gets_a_legal_schedule_between_the_bounds(problem):
    check(problem, solve(problem, None, 60))


@settings(max_examples=15, deadline=None)
@given(problem=problems(most=4))
def test_no_search_beats_the_exact_one(problem):
    prices = Prices(problem)
    path = best_sequence(prices)
    assert path is not None
    best, resident = 0.0, frozenset()
    for group, retain in path:
        best += prices.price(group, resident, retain)
        resident = retain
    singles = prices.singles()
    for groups in (singles, merge(prices, singles), intervals(prices, problem.order)):
        assert best <= prices.total(groups) * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(problem=problems(most=5, chain=True))
def test_cutting_a_chain_is_exact(problem):
    prices = Prices(problem)
    count = len(problem.order)
    best = math.inf
    for length in range(count):
        for cuts in itertools.combinations(range(1, count), length):
            ends = [0, *cuts, count]
            groups = [
                sum(1 << op for op in problem.order[a:b]) for a, b in itertools.pairwise(ends)
            ]
            best = min(best, prices.total(groups))
    assert prices.total(intervals(prices, problem.order)) == pytest.approx(best)


def test_what_only_the_next_subgraph_reads_stays_resident():
    # Tensor 1 is read by two later subgraphs, so only tensor 2 may stay: the very times that the
    # JSON of example 3 lists.
    order = [1, 2, 4]
    kept = resident_tensors(Prices(EXAMPLE_3), order)
    assert kept == [frozenset(), frozenset({2}), frozenset()]
    steps = [Step((op,), NATIVE, tuple(keep)) for op, keep in enumerate(kept)]
    assert schedule_latencies(EXAMPLE_3, steps) == pytest.approx([3276.8, 1638.4, 3276.8])


@pytest.mark.parametrize(
    ("allowed", "cost", "path"),
    [
        ({1, 2, 4, 6}, 4638.4, [(1, {1}), (6, set())]),
        ({3, 5}, 6276.8, [(3, {2}), (5, set())]),
        ({1, 2, 4, 7}, 4500.0, [(7, set())]),
    ],
)
def test_the_exact_search_finds_the_published_ways(monkeypatch, allowed, cost, path):
    # Subgraphs as bit masks of operations. With those of the text alone the search comes to what
    # the text shows: keeping tensor 1, or computing it twice; one subgraph of all three beats both.
    prices = Prices(EXAMPLE_3)
    monkeypatch.setattr(prices, "legal", lambda group: group in allowed)
    found = best_sequence(prices)
    assert [(group, set(retain)) for group, retain in found] == path
    before = [frozenset(), *(retain for _, retain in found)]
    total = sum(
        prices.price(group, resident, retain)
        for (group, retain), resident in zip(found, before, strict=False)
    )
    assert total == pytest.approx(cost)


def test_a_memory_too_small_for_one_element_is_refused():
    problem = parse_problem(
        {
            "widths": [4] * 3,
            "heights": [4] * 3,
            "inputs": [[0, 1]],
            "outputs": [[2]],
            "base_costs": [1],
            "op_types": ["Pointwise"],
            "fast_memory_capacity": 2,
            "slow_memory_bandwidth": 1,
            "native_granularity": [4, 4],
        }
    )
    with pytest.raises(CapacityError, match="every tensor of operation 0"):
        solve(problem)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["subgraph", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_the_contract(capsys):
    code, out, err = run(capsys, FOLDER / "mlsys-2026-1.json", "--time-limit", 2, "--json", "-")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data.keys() >= KEYS
    assert data["cost"] == pytest.approx(sum(data["subgraph_latencies"]))
    assert {op for group in data["subgraphs"] for op in group} == set(range(5))
    assert len({len(data[key]) for key in KEYS - {"cost", "lower_bound"}}) == 1


def test_the_table_names_both_bounds(capsys, tmp_path):
    code, out, _ = run(capsys, FOLDER / "mlsys-2026-9.json", "--evaluations", 50)
    assert code == 0
    assert "cost / bound" in out
    assert "unfused, ideal        16950886.4" in out
    target = tmp_path / "found.json"
    assert run(capsys, FOLDER / "mlsys-2026-1.json", "--json", target)[0] == 0
    assert json.loads(target.read_text()).keys() >= KEYS


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.json"],
        [FOLDER / "README.md"],
        [FOLDER / "mlsys-2026-1.json", "--time-limit", "-1"],
        [FOLDER / "mlsys-2026-1.json", "--time-limit", "nan"],
        [FOLDER / "mlsys-2026-1.json", "--evaluations", "-1"],
        [FOLDER / "mlsys-2026-1.json", "--seed", "-1"],
        [FOLDER / "mlsys-2026-1.json", "--evaluations", "0", "--json", "/nonexistent/x"],
        [],
    ],
)
def test_errors_are_one_line_and_exit_2(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ascend-lab: ")

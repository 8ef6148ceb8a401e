"""Strategies: the problem, its graph, and solvers against brute force."""

import copy
import gzip
import itertools
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.cli import ascend_lab as main
from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.cluster.parallel.strategy import (
    FORBIDDEN,
    Edge,
    GraphProblem,
    Node,
    Problem,
    data_parallel,
    evaluate,
    halving,
    on_topology,
    parse_problem,
    problem_of,
    read_problem,
    roofline,
    solve,
)
from ascend_lab.cluster.parallel.strategy.graph_problem import STATE_BYTES, cuttable
from ascend_lab.cluster.parallel.strategy.problem import Reduced, reduce_problem
from ascend_lab.compiler import Graph, GraphBuilder, Node as GraphNode, zoo
from ascend_lab.errors import ClusterError, InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

DATA = Path(__file__).parent.parent / "data" / "iopddl"
EXAMPLE = DATA / "example.json"
BENCHMARK = DATA / "asplos-2025-iopddl-B.json.gz"


def best(problem: Problem) -> float:
    """Return the least cost of an allowed choice; inf where there is none."""
    options = (range(len(node.costs)) for node in problem.nodes)
    found = (evaluate(problem, choice) for choice in itertools.product(*options))
    return min((e.cost for e in found if e.feasible), default=math.inf)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw up to five nodes of up to three strategies, edges (parallel ones, loops), memory."""
    cost = st.one_of(st.integers(0, 30), st.integers(-5, 5), st.just(10**12), st.just(FORBIDDEN))
    nodes = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 3))
        lower = draw(st.integers(0, 6))
        upper = draw(st.integers(lower, 7))
        costs = draw(st.lists(cost, min_size=count, max_size=count))
        used = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        nodes.append(Node(lower, upper, tuple(costs), tuple(used)))
    place = st.integers(0, len(nodes) - 1)
    edges = []
    for source, target in draw(st.lists(st.tuples(place, place), max_size=7)):
        size = len(nodes[source].costs) * len(nodes[target].costs)
        table = draw(st.lists(cost, min_size=size, max_size=size))
        edges.append(Edge(source, target, tuple(table)))
    limit = draw(st.none() | st.integers(0, 25))
    return Problem("random", tuple(nodes), tuple(edges), limit)


def example() -> Any:
    return json.loads(EXAMPLE.read_text("utf-8"))


def changed(path: str, value: Any) -> Any:
    """Return the example with one place replaced; None removes it."""
    data = copy.deepcopy(example())
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = data
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


def test_the_example_is_priced_as_published() -> None:
    problem = read_problem(EXAMPLE)
    cheap = evaluate(problem, [0, 0, 2, 1, 0])
    assert (cheap.cost, cheap.peak_usage, cheap.feasible) == (445, 50, True)
    dear = evaluate(problem, [0, 0, 2, 0, 0])
    assert (dear.cost, dear.feasible) == (545, True)
    full = evaluate(problem, [0, 0, 1, 1, 0])
    assert (full.peak_usage, full.peak_at, full.feasible) == (55, 50, False)


def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    assert read_problem(packed) == read_problem(EXAMPLE)
    large = read_problem(BENCHMARK)
    assert (len(large.nodes), len(large.edges), large.usage_limit) == (816, 1096, 14_392_528)


def test_costs_add_up_beyond_64_bits() -> None:
    data = changed("problem.nodes.costs.0", [2**63 - 1])
    data["problem"]["nodes"]["costs"][4] = [2**63 - 1]
    found = evaluate(parse_problem(data), [0, 0, 2, 1, 0])
    assert found.cost == 445 - 15 - 95 + 2 * (2**63 - 1)
    assert (found.forbidden, found.feasible) == (2, False)
    assert FORBIDDEN == 10**17


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("problem", None, "the whole file as a JSON object with the key problem; got no problem"),
        ("problem", [], "problem as a JSON object"),
        ("problem.nodes", None, "no nodes"),
        ("problem.nodes.usages", None, "no usages"),
        ("problem.edges.costs", None, "no costs"),
        ("problem.nodes.costs.1", None, "5 entries in nodes.costs"),
        ("problem.nodes.intervals.2", [5], r"2 entries in nodes.intervals\[2\]"),
        ("problem.nodes.intervals.2", [9, 5], "lower <= upper"),
        ("problem.nodes.intervals.2", [9.5, 11], "whole numbers"),
        ("problem.nodes.costs.3", [], "3 entries|at least one strategy"),
        ("problem.nodes.usages.1", [25], r"2 entries in nodes.usages\[1\]"),
        ("problem.nodes.usages.1", [25, -1], r"nodes.usages\[1\] from 0"),
        ("problem.nodes.costs.1", [25, True], r"nodes.costs\[1\] in whole"),
        ("problem.nodes.costs.1", [25, 2**63], r"nodes.costs\[1\] from"),
        ("problem.nodes.costs.1", [25, 1e400], "whole numbers"),
        ("problem.edges.nodes.1", [0, 5], r"edges.nodes\[1\] among the 5 nodes"),
        ("problem.edges.nodes.1", [0, -1], r"edges.nodes\[1\] from 0"),
        ("problem.edges.nodes.1", [0, 1, 2], r"2 entries in edges.nodes\[1\]"),
        ("problem.edges.costs.2", [90, 10, 20], r"4 entries in edges.costs\[2\]"),
        ("problem.edges.costs.2", "free", r"edges.costs\[2\] as a list"),
        ("problem.edges.costs.0", None, "5 entries in edges.costs"),
        ("problem.usage_limit", -1, "usage_limit from 0"),
        ("problem.usage_limit", "50", "usage_limit in whole"),
    ],
)
def test_malformed_problems_are_refused_with_the_place(
    path: str, value: Any, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_problem(changed(path, value))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\x1f\x8b\x08garbage",
        gzip.compress(b"{}", mtime=0)[:-9],
        b"\xff\xfe\x00",
        b"[" * 9999,
    ],
)
def test_broken_files_are_one_line_on_the_command_line(
    raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.json.gz"
    file.write_bytes(raw)
    assert main(["strategy", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["strategy", str(tmp_path)]) == 2


@pytest.mark.parametrize("chosen", [[0], [0, 0, 3, 0, 0], [0, 0, -1, 0, 0]])
def test_choices_that_are_none_are_refused(chosen: list[int]) -> None:
    with pytest.raises(InputError):
        evaluate(read_problem(EXAMPLE), chosen)


def test_the_command_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategy", str(EXAMPLE), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["cost"], data["lower_bound"], data["proven"]) == (445, 445, True)
    assert data["strategies"] == [0, 0, 2, 1, 0]
    assert main(["strategy", str(EXAMPLE), "--method", "heuristic", "--time-limit", "5"]) == 0
    assert "445" in capsys.readouterr().out


ROWS = 16
INNER = 8
COLUMNS = 32


def seconds(operation: str, devices: int, size_bytes: float) -> float:
    """Charge a nanosecond a byte, twice for an all-reduce: costs then count bytes."""
    return (2e-9 if operation == "all_reduce" else 1e-9) * size_bytes


def thousand_ns(graph: Graph, node: GraphNode) -> float:
    return 1e-6


def two_products() -> Graph:
    """Return y = relu(x w1) w2 with a small batch and larger weights, in fp16."""
    net = GraphBuilder("products", "fp16")
    x = net.input("x", (ROWS, INNER))
    hidden = net.relu(net.matmul(x, net.weight((INNER, COLUMNS), name="w1"), name="first"))
    net.output(net.matmul(hidden, net.weight((COLUMNS, INNER), name="w2"), name="second"))
    return net.build()


def cost_of(given: GraphProblem, node: int, counts: tuple[int, ...]) -> tuple[int, int]:
    """Return (nanoseconds, bytes) of a node's sharding."""
    index = given.shardings[node].index(counts)
    own = given.problem.nodes[node]
    return own.costs[index], own.usages[index]


def test_costs_of_a_product_by_hand() -> None:
    given = problem_of(two_products(), 2, seconds, thousand_ns)
    assert [way.name for way in given.operators[2].ways] == ["axis 0", "axis 1", "sum"]
    a = 2 * ROWS * COLUMNS
    w = 2 * COLUMNS * INNER
    c = 2 * ROWS * INNER
    state = STATE_BYTES // 2 * w
    # whole; rows: gradient of w2; columns: gradient of the hidden layer; sum: partial results
    assert cost_of(given, 2, (0, 0, 0)) == (1000, state + c)
    assert cost_of(given, 2, (1, 0, 0)) == (500 + 2 * w, state + c // 2)
    assert cost_of(given, 2, (0, 1, 0)) == (500 + 2 * a, (state + c) // 2)
    assert cost_of(given, 2, (0, 0, 1)) == (500 + 2 * c, state // 2 + c)
    # the data need no gradient, so cutting the first product's columns costs nothing inside
    assert cost_of(given, 0, (0, 1, 0))[0] == 500


def test_an_edge_pays_both_directions() -> None:
    given = problem_of(two_products(), 2, seconds, thousand_ns)
    edge = next(e for e in given.problem.edges if (e.source, e.target) == (1, 2))
    left = given.shardings[1]
    right = given.shardings[2]

    def pays(source: tuple[int, ...], target: tuple[int, ...]) -> int:
        return edge.costs[left.index(source) * len(right) + right.index(target)]

    a = 2 * ROWS * COLUMNS
    assert pays((1, 0), (1, 0, 0)) == 0  # rows to rows
    assert pays((0, 1), (0, 0, 1)) == 0  # columns are what the sum cuts
    assert pays((1, 0), (0, 0, 1)) == 2 * (a // 2)  # rows to columns: all-to-all and back
    assert pays((1, 0), (0, 0, 0)) == a  # gathered; back a slice
    assert pays((0, 0), (1, 0, 0)) == a  # sliced; the gradient is gathered


def test_the_pair_of_cuts_of_megatron_is_found() -> None:
    """With few samples: columns of the first weight, rows (the sum) of the second."""
    given = problem_of(two_products(), 4, seconds, lambda graph, node: 1e-3)
    best = solve(given.problem)
    assert best.proven
    chosen = given.chosen(best.strategies)
    assert chosen["first"] == {"axis 1": 4} and chosen["second"] == {"sum": 4}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_no_search_beats_the_optimum(devices: int) -> None:
    given = problem_of(two_products(), devices, seconds, thousand_ns)
    best = solve(given.problem, method="exact")
    options = (range(len(node.costs)) for node in given.problem.nodes)
    costs = [evaluate(given.problem, s).cost for s in itertools.product(*options)]
    assert best.cost == min(costs)
    for choice in (halving(given), halving(given, own_costs=True), data_parallel(given)):
        worth = evaluate(given.problem, choice)
        assert worth.feasible and worth.cost in costs
        assert all(sum(given.shardings[v][s]) <= devices for v, s in enumerate(choice))


def test_halving_takes_the_published_cuts() -> None:
    """The second weight is the smallest tensor: rows cost a quarter of half of it."""
    given = problem_of(two_products(), 2, seconds, thousand_ns)
    chosen = given.chosen(halving(given))
    assert chosen["second"] == {"axis 0": 2} and chosen["first"] == {"axis 0": 2}


def test_convolutions_are_cut_like_data_and_large_products_are_not() -> None:
    graph = zoo.build("alexnet", batch=64, dtype="fp16")
    cost = on_topology(load_topology("910b-server"))
    work = roofline(load_chip("Ascend910B2"))
    given = problem_of(graph, 4, cost, work)
    best = solve(given.problem)
    chosen = given.chosen(best.strategies)
    assert best.proven
    assert all(chosen[f"conv{i}"] == {"axis 0": 4} for i in range(1, 6))
    assert all("axis 0" not in chosen[f"fc{i}"] for i in (1, 2))
    plain = evaluate(given.problem, data_parallel(given))
    cut = evaluate(given.problem, halving(given))
    assert best.cost < cut.cost < plain.cost
    assert given.chosen(data_parallel(given))["fc1"] == {"axis 0": 4}


def test_a_memory_limit_changes_the_plan() -> None:
    graph = two_products()
    free = problem_of(graph, 2, seconds, lambda g, n: 0.0)
    loose = solve(free.problem)
    least = sum(min(node.usages) for node in free.problem.nodes)
    tight = problem_of(graph, 2, seconds, lambda g, n: 0.0, usage_limit_bytes=least)
    found = solve(tight.problem)
    assert found.proven and found.peak_usage <= least < loose.peak_usage
    assert found.cost > loose.cost
    with pytest.raises(ClusterError, match="usage limit"):
        solve(problem_of(graph, 2, seconds, thousand_ns, usage_limit_bytes=least - 1).problem)


@pytest.mark.parametrize("devices", [0, -2, 3, 64])
def test_device_counts_that_cannot_be_are_refused(devices: int) -> None:
    with pytest.raises(ClusterError, match="power of two"):
        problem_of(two_products(), devices, seconds, thousand_ns)


def test_costs_on_a_topology_are_those_of_its_collectives() -> None:
    topology = load_topology("910b-server")
    cost = on_topology(topology)
    wanted = collective_time("all_reduce", topology, 1e6, placement=range(4)).time_s
    assert cost("all_reduce", 4, 1e6) == wanted
    with pytest.raises(ClusterError, match="at most 8"):
        cost("all_reduce", 16, 1e6)


@pytest.mark.parametrize("network", ["resnet18", "bert_base"])
def test_shardings_divide_every_tensor(network: str) -> None:
    settings = {"layers": 1} if network == "bert_base" else {}
    graph = zoo.build(network, batch=8, **settings)
    for node in graph.nodes:
        op = cuttable(graph, node)
        seen = list(op.shardings(3))
        assert len(set(seen)) == len(seen) and (0,) * len(op.ways) in seen
        for counts in seen:  # a layout that does not divide evenly would be refused
            for side, shapes in (("inputs", op.inputs), ("outputs", op.outputs)):
                for index in range(len(shapes)):
                    own = op.layout(counts, 3, side, index)
                    parts = op.parts(counts, side, index)
                    assert (1 << sum(counts)) % parts == 0
                    assert own.slice_elements * parts == math.prod(own.shape)


EMPTY = Problem("empty", (), (), 0)


@given(problems())
def test_exact_equals_brute_force(problem: Problem) -> None:
    optimum = best(problem)
    if math.isinf(optimum):
        with pytest.raises(ClusterError):
            solve(problem, method="exact")
        return
    found = solve(problem, method="exact")
    again = evaluate(problem, found.strategies)
    assert found.proven and again.feasible
    assert (found.cost, found.lower_bound, found.cost) == (again.cost, optimum, optimum)
    assert found.peak_usage == again.peak_usage


@settings(max_examples=100)
@given(problems())
def test_the_heuristic_is_allowed_and_never_better_than_the_optimum(problem: Problem) -> None:
    optimum = best(problem)
    try:
        found = solve(problem, method="heuristic")
    except ClusterError:
        return
    assert evaluate(problem, found.strategies).feasible
    assert found.lower_bound <= optimum <= found.cost
    assert not found.proven or found.cost == optimum


@settings(max_examples=100)
@given(problems())
def test_reduction_keeps_the_optimum(problem: Problem) -> None:
    try:
        small = reduce_problem(problem)
    except ClusterError:
        assert math.isinf(best(problem))
        return
    assert set(small.costs) | {node for node, *_ in small.folded} == set(range(len(problem.nodes)))
    assert all(len(small.links[u]) == len({*small.links[u]} - {u}) for u in small.links)
    if not small.costs:  # everything folded: what is restored is optimal
        assert evaluate(problem, small.restore({})).cost == best(problem)


@cache
def benchmark() -> tuple[Problem, Reduced]:
    problem = read_problem(BENCHMARK)
    return problem, reduce_problem(problem)


def test_the_example_has_its_published_optimum() -> None:
    problem = read_problem(EXAMPLE)
    found = solve(problem)
    assert (found.cost, found.strategies, found.proven) == (445, (0, 0, 2, 1, 0), True)
    assert (found.peak_usage, found.usage_limit) == (50, 50)
    free = solve(replace(problem, usage_limit=None))
    assert (free.cost, free.proven) == (415, True)
    assert evaluate(problem, free.strategies).peak_usage > 50


def test_benchmark_b_is_solved_to_the_proven_optimum() -> None:
    problem, _ = benchmark()
    reference = json.loads((DATA / "reference_optimum_B.json").read_text("utf-8"))
    known = evaluate(problem, reference["solution"])
    assert (known.cost, known.feasible) == (532_843, True)
    found = solve(problem, method="exact")
    assert (found.cost, found.lower_bound, found.proven) == (532_843, 532_843, True)
    assert evaluate(problem, found.strategies).feasible


def test_no_time_still_gives_an_allowed_answer_and_a_bound() -> None:
    problem, _ = benchmark()
    found = solve(problem, time_limit_s=0.0)
    assert evaluate(problem, found.strategies).feasible
    assert not found.proven and found.lower_bound <= 532_843 <= found.cost
    assert found.gap > 0


def test_problems_without_an_answer_are_refused() -> None:
    node = Node(0, 1, (1, 2), (5, 9))
    with pytest.raises(ClusterError, match="usage limit"):
        solve(Problem("large", (node,), (), 4))
    banned = Node(0, 1, (FORBIDDEN,), (0,))
    with pytest.raises(ClusterError, match="forbidden"):
        solve(Problem("banned", (banned,), (), None))
    # a triangle in which any two can agree, but never all three, and memory asks for it
    pair = Node(0, 1, (0, 0), (0, 1))
    differ = (FORBIDDEN, 0, 0, FORBIDDEN)
    edges = tuple(Edge(u, v, differ) for u, v in ((0, 1), (1, 2), (0, 2)))
    with pytest.raises(ClusterError):
        solve(Problem("triangle", (pair,) * 3, edges, 2), method="exact")


def test_an_empty_problem_costs_nothing() -> None:
    for method in ("exact", "heuristic"):
        found = solve(EMPTY, method=method)
        assert (found.cost, found.strategies, found.proven) == (0, (), True)


def test_without_scipy_the_heuristic_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_lab.cluster.parallel.strategy.find_spec", lambda name: None)
    found = solve(read_problem(EXAMPLE))
    assert (found.cost, found.method) == (445, "messages")
    with pytest.raises(UnsupportedError, match="exact"):
        solve(read_problem(EXAMPLE), method="exact")

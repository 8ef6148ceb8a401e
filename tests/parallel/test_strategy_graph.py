"""Strategy problems of networks: costs by hand, the searches against the optimum."""

import itertools
import math

import pytest

from ascend_lab.chip import load_chip
from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.errors import ClusterError
from ascend_lab.graph import Graph, GraphBuilder, Node, zoo
from ascend_lab.parallel.strategy import (
    GraphProblem,
    data_parallel,
    evaluate,
    halving,
    on_topology,
    problem_of,
    roofline,
    solve,
)
from ascend_lab.parallel.strategy.graph_problem import STATE_BYTES, cuttable

ROWS, INNER, COLUMNS = 16, 8, 32


def seconds(operation: str, devices: int, size_bytes: float) -> float:
    """Charge a nanosecond a byte, twice for an all-reduce: costs then count bytes."""
    return (2e-9 if operation == "all_reduce" else 1e-9) * size_bytes


def thousand_ns(graph: Graph, node: Node) -> float:
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
    a, w, c = 2 * ROWS * COLUMNS, 2 * COLUMNS * INNER, 2 * ROWS * INNER
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
    left, right = given.shardings[1], given.shardings[2]

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
    cost, work = on_topology(load_topology("910b-server")), roofline(load_chip("Ascend910B2"))
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

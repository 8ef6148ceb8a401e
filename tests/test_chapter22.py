"""The checks and figures of chapter 22, and what its prose claims."""

import pytest

from ascend_lab.cluster import collective_time, load_topology, make, ring, star, time_collective
from ascend_lab.lab.checks.chapter21_22 import best_chunks, chain_s, crossover_bytes


# -- exercises -------------------------------------------------------------------------------------
def test_the_crossover_is_where_the_simulated_times_meet():
    size = crossover_bytes(8, 1e-5, 1e-10)
    net = star(8, 1e-5, 1e-10)
    times = [
        time_collective(make("all_reduce", name, 8), net, size).time_s
        for name in ("ring", "recursive-doubling")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


def test_best_chunks_by_trying_all():
    case = (9, 10_000, 1e-6, 1e-10)
    assert best_chunks(*case) == min(range(1, 100), key=lambda k: chain_s(k, *case))


def test_a_chain_takes_what_the_exercise_says():
    chain = make("broadcast", "chain*5", 6)
    line = ring(6, 1e-5, 1e-10)
    assert time_collective(chain, line, 1e6).time_s == pytest.approx(
        chain_s(5, 6, 1e6, 1e-5, 1e-10)
    )


# -- figures and claims ----------------------------------------------------------------------------
def test_few_rounds_win_small_and_few_bytes_win_large():
    cluster = load_topology("910a-roce:64")
    small = collective_time("all_reduce", cluster, 1e3).algorithm
    large = collective_time("all_reduce", cluster, 1e9).algorithm
    assert small == "recursive-doubling"
    assert large.startswith("hierarchical")


def test_the_leader_is_slow_for_large_and_quicker_than_the_ring_for_small():
    server = load_topology("910a-server")

    def leader(size):
        return sum(
            collective_time(op, server, size, "star").time_s for op in ("reduce", "broadcast")
        )

    assert leader(1e8) > 4 * collective_time("all_reduce", server, 1e8).time_s
    assert leader(1e3) < collective_time("all_reduce", server, 1e3, "ring").time_s / 2


def test_contention_is_why_the_ring_exists():
    circle = ring(8, 1e-5, 1e-10)
    size = 1e8
    times = {
        name: time_collective(make("all_reduce", name, 8), circle, size).time_s
        for name in ("ring", "halving-doubling")
    }
    assert times["ring"] < 0.7 * times["halving-doubling"]

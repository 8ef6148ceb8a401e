"""The checks and figures of chapter 22, and what its prose claims."""

import pytest

from ascend_lab.cluster import collective_time, load_topology, make, star, time_collective
from ascend_lab.lab.checks.chapter21_22 import crossover_bytes


# -- exercises -------------------------------------------------------------------------------------
def test_the_crossover_is_where_the_simulated_times_meet():
    size = crossover_bytes(8, 1e-5, 1e-10)
    net = star(8, 1e-5, 1e-10)
    times = [
        time_collective(make("all_reduce", name, 8), net, size).time_s
        for name in ("ring", "recursive-doubling")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


# -- figures and claims ----------------------------------------------------------------------------


def test_the_leader_is_slow_for_large_and_quicker_than_the_ring_for_small():
    server = load_topology("910a-server")

    def leader(size):
        return sum(
            collective_time(op, server, size, "star").time_s for op in ("reduce", "broadcast")
        )

    assert leader(1e8) > 4 * collective_time("all_reduce", server, 1e8).time_s
    assert leader(1e3) < collective_time("all_reduce", server, 1e3, "ring").time_s / 2

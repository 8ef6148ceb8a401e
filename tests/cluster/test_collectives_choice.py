"""The choice by size and topology, and that asking again is cheap."""

import numpy as np
import pytest
from collective_cases import check, inputs, slowed

from ascend_lab.cluster import (
    ALGORITHMS,
    choice,
    collective_time,
    compare,
    full_mesh,
    load_topology,
    make,
    ring,
    star,
    time_collective,
)

COSTS = (5e-6, 1e-10, 1e-12)


@pytest.mark.parametrize("op", sorted(ALGORITHMS))
@pytest.mark.parametrize("name", ["910a-server", "910b-roce:16", "star:6", "ring:5"])
def test_auto_is_the_least_of_all(op: str, name: str) -> None:
    topology = load_topology(name)
    for size_bytes in (100.0, 1e5, 1e8):
        best = collective_time(op, topology, size_bytes)
        table = compare(op, topology, size_bytes)
        assert best.time_s == table[0].time_s == min(one.time_s for one in table)
        assert len(table) >= 2 and len({one.algorithm for one in table}) == len(table)
        schedule = make(op, best.algorithm, topology)
        assert schedule.algorithm == best.algorithm
        assert np.isclose(time_collective(schedule, topology, size_bytes).time_s, best.time_s)
        check(schedule, inputs(op, topology.size, 13, seed=1))


def test_which_wins_depends_on_size_and_topology() -> None:
    def winner(topology: object, size_bytes: float) -> str:
        return collective_time("all_reduce", topology, size_bytes).algorithm  # type: ignore[arg-type]

    assert winner(star(8, *COSTS), 1e3) == "recursive-doubling"
    assert winner(star(8, *COSTS), 1e9) in ("halving-doubling", "nhr")
    assert winner(star(7, *COSTS), 1e9) == "nhr"
    assert winner(full_mesh(8, *COSTS), 1e9) == "mesh"
    assert winner(ring(8, *COSTS), 1e9) == "double-ring"
    cluster = load_topology("910b-roce:64")
    assert winner(cluster, 1e3) == "recursive-doubling"
    assert winner(cluster, 1e6).startswith("hierarchical(mesh,")
    assert winner(cluster, 1e9) == "pipeline"


def test_more_sizes_prepare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = slowed(load_topology("910b-roce:32"), 0, 1.0)
    first = collective_time("all_reduce", topology, 1e6)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("prepared again")

    monkeypatch.setattr(choice, "make", never)
    monkeypatch.setattr(choice, "prepare", never)
    assert collective_time("all_reduce", topology, 1e6) == first
    times = [collective_time("all_reduce", topology, n).time_s for n in np.geomspace(1, 1e9, 50)]
    assert times == sorted(times)
    with pytest.raises(AssertionError, match="prepared again"):
        collective_time("all_gather", topology, 1e6)


def test_placement_decides_over_servers() -> None:
    topology = load_topology("910b-roce:32")
    close = collective_time("all_reduce", topology, 1e8, placement=range(8))
    spread = collective_time("all_reduce", topology, 1e8, placement=range(0, 32, 4))
    assert close.algorithm == "mesh" and close.time_s < spread.time_s / 3
    assert choice.servers_of(topology, np.array([9, 1, 0, 8])) == ((2, 1), (3, 0))
    uneven = collective_time("all_reduce", topology, 1e8, placement=range(12))
    assert not uneven.algorithm.startswith(("hierarchical", "pipeline"))


def test_the_two_meshes_of_a_910_server_are_levels_of_their_own() -> None:
    server, places = load_topology("910a-server"), np.arange(8)
    assert choice.islands(server, places, choice.servers_of(server, places)) == 4
    best = collective_time("all_reduce", server, 1e8)
    assert best.algorithm.startswith("hierarchical(4:mesh,")
    assert best.time_s < collective_time("all_reduce", server, 1e8, "double-ring").time_s
    for name in ("910b-server", "star:8", "ring:8", "mesh:8"):
        topology = load_topology(name)
        assert choice.islands(topology, places, choice.servers_of(topology, places)) is None
    crossed = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    rows = choice.servers_of(server, crossed)
    assert rows == ((0, 2, 4, 6, 1, 3, 5, 7),)
    assert choice.islands(server, crossed, rows) == 4
    some = np.array([0, 1, 2, 4])
    assert choice.islands(server, some, choice.servers_of(server, some)) is None


def test_a_thousand_devices() -> None:
    topology = load_topology("910b-roce:1024")
    times = [
        collective_time("all_reduce", topology, n, "hierarchical(mesh,halving-doubling)")
        for n in np.geomspace(1e3, 1e9, 16)
    ]
    assert len(times[0].rounds_s) == 2 + 2 * 7
    assert all(one.time_s >= one.lower_bound_s for one in times)
    assert times[-1].time_s < collective_time("all_reduce", topology, 1e9, "ring").time_s / 3

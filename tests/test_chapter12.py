"""The figures and checks of the transpose and scatter chapter, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.lab.checks.chapter11_12 import moved_bytes
from ascend_lab.lab.figures.many_cores import conflicts, draw_indices
from ascend_lab.lab.kernels import group_indices, grouped_launch
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import scatter_launch

A910 = load_chip("Ascend910A")


# -- figures ---------------------------------------------------------------------------------------
def test_drawn_indices_repeat_as_often_as_asked():
    for share, fresh in ((0.0, 16), (0.25, 12), (0.5, 8), (0.9, 2)):
        index = draw_indices(16, 16, share, seed=3)
        assert len(index) == 16
        assert len(set(index.tolist())) == fresh
        assert index.min() >= 0
        assert index.max() < 16


def test_conflicts_are_rows_of_several_cores():
    assert conflicts(np.array([0, 1, 1, 2, 3, 0]), 2) == {0: [0, 1]}
    assert conflicts(np.array([0, 1, 1, 2, 3, 0]), 1) == {}
    assert conflicts(np.array([5, 5, 5]), 3) == {5: [0, 1, 2]}


# -- what the chapter says -------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 8, 64])
def test_bytes_of_the_ways_follow_the_formulas(times):
    picks = 1024
    columns = 64
    rows = picks // times
    index = np.random.default_rng(0).permutation(np.arange(picks) % rows)
    table = (rows, columns, picks, "fp32")
    cores = A910.core_count
    lists = group_indices(index, rows, cores)
    said = moved_bytes(picks, rows, 4 * columns, cores)
    launches = {"sorted": grouped_launch(A910, lists, *table)}
    for way in ("owner", "atomic"):
        launches[way] = scatter_launch(A910, *table, mode="add", method=way)
    for way, launch in launches.items():
        moved = sum(simulate(launch, A910).path_bytes.values())
        if way == "sorted":
            # The check charges the sort as well: reading the indices, writing both lists.
            moved += 4 * picks + 4 * (picks + rows)
        if way == "owner":
            # Only as many cores own columns as there are blocks of 32 bytes in a row.
            moved += (cores - launch.core_count) * picks * 4
        assert moved == said[way]

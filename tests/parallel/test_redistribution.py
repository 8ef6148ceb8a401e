"""Redistribution: values of every pair of layouts, costs by hand, greedy against the optimum."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ascend_lab.cluster.parallel.redistribution import (
    Layout,
    all_layouts,
    cheapest,
    compare,
    execute,
    greedy,
    price,
    redistribute,
    step,
    steps_from,
)
from ascend_lab.errors import LayoutError

CASES = (((2, 2), (4, 4)), ((3, 2), (6, 12)), ((1, 2), (2, 2)))


def layout(matrix: tuple[int, ...], axes: tuple, shape: tuple[int, ...]) -> Layout:
    """Return a layout from one axis (-1: whole) or several for each dimension."""
    maps = tuple(a if isinstance(a, tuple) else () if a == -1 else (a,) for a in axes)
    return Layout(matrix, maps, shape)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def test_slices_are_those_of_the_definition() -> None:
    # axis 1 (4 devices) cuts rows, axis 0 (2 devices) cuts columns; device 5 = (2, 1)
    own = layout((4, 2), (1, 0), (8, 6))
    assert (own.devices, own.slice_shape) == (8, (2, 3))
    assert own.slices(5) == (slice(4, 6), slice(3, 6))
    assert own.group(5, 0) == (4, 5) and own.group(5, 1) == (1, 3, 5, 7)
    # one dimension cut by both axes, the second axis first: place = 1 * 4 + 2
    both = layout((4, 2), ((0, 1), -1), (8, 6))
    assert both.slices(5) == (slice(6, 7), slice(0, 6))
    same = layout((4, 2), (-1, -1), (8, 6))
    assert all(same.slices(device) == (slice(0, 8), slice(0, 6)) for device in range(8))


def held(own: Layout, whole: np.ndarray) -> list[np.ndarray]:
    """Return what every device holds of an array."""
    return [whole[own.slices(device)] for device in range(own.devices)]


@pytest.mark.parametrize(("matrix", "shape"), CASES)
def test_every_pair_of_layouts_moves_the_right_values(
    matrix: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    whole = numbered(shape)
    layouts = list(all_layouts(matrix, shape))
    assert len(layouts) > 2
    for source, target in itertools.product(layouts, repeat=2):
        goal = held(target, whole)
        for steps in (greedy(source, target), redistribute(source, target)):
            found = execute(steps, held(source, whole))
            assert all(map(np.array_equal, found, goal)), (source, target, steps)


@given(st.data())
def test_larger_matrices_move_the_right_values(data: st.DataObject) -> None:
    matrix = (2, 2, 2)
    shape = (8, 16, 8)
    layouts = list(all_layouts(matrix, shape))
    source, target = (data.draw(st.sampled_from(layouts)) for _ in range(2))
    whole = numbered(shape)
    for steps in (greedy(source, target), redistribute(source, target)):
        found = execute(steps, held(source, whole))
        assert all(map(np.array_equal, found, held(target, whole)))
        assert all(a.after == b.before for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(("matrix", "shape"), CASES[:-1])
def test_greedy_never_beats_the_cheapest(matrix: tuple[int, ...], shape: tuple[int, ...]) -> None:
    cost = price(2)
    layouts = list(all_layouts(matrix, shape))
    for source in layouts:
        paths = cheapest(source, cost)
        assert set(paths) == {own.tensor_map for own in layouts}
        for target in layouts:
            best = paths[target.tensor_map]
            assert best.total == pytest.approx(sum(map(cost, best.steps)))
            assert best.total <= sum(map(cost, greedy(source, target))) + 1e-9


def test_bytes_of_the_steps_by_hand() -> None:
    rows = layout((4,), (0, -1), (8, 8))  # 2 x 8 numbers a device
    columns = layout((4,), (-1, 0), (8, 8))
    same = layout((4,), (-1, -1), (8, 8))
    assert [str(one) for one in redistribute(rows, columns)] == ["all_to_all(dim 0 -> 1, axis 0)"]
    swap = redistribute(rows, columns)[0]
    assert swap.received_bytes(2) == 16 * 2 * 3 / 4
    (gather,) = redistribute(rows, same)
    assert (gather.kind, gather.received_bytes(2)) == ("all_gather", 16 * 2 * 3)
    (cut,) = redistribute(same, rows)
    assert (cut.kind, cut.received_bytes(2)) == ("slice", 0.0)
    assert redistribute(rows, rows) == ()


def test_seconds_come_from_the_cost_model() -> None:
    calls = []

    def cost(operation: str, devices: int, size_bytes: float) -> float:
        calls.append((operation, devices, size_bytes))
        return 1.0 if operation == "all_gather" else 99.0

    rows = layout((4,), (0, -1), (8, 8))
    columns = layout((4,), (-1, 0), (8, 8))
    # an all-to-all is dear here: gather everything, then slice
    steps = redistribute(rows, columns, item_bytes=2, cost=cost)
    assert [one.kind for one in steps] == ["all_gather", "slice"]
    assert sum(one.time_s(2, cost) for one in steps) == 1.0
    assert ("all_gather", 4, 128.0) in calls and ("all_to_all", 4, 32.0) in calls


def test_the_greedy_rule_gathers_where_an_exchange_is_cheaper() -> None:
    source = layout((2, 2), (0, 1), (4, 4))
    target = layout((2, 2), (-1, (0, 1)), (4, 4))
    assert [one.kind for one in greedy(source, target)] == ["all_gather"] * 2 + ["slice"] * 2
    found = compare((2, 2), (4, 4))
    assert (found.pairs, found.worse) == (121, 14)
    assert found.worst == 1.5 and found.excess == pytest.approx(1 / 18)
    assert found.example is not None


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "shape", "complaint"),
    [
        ((2, 2), (0,), (4, 4), "2 dimensions"),
        ((2, 2), (0, 2), (4, 4), "axes 0 to 1"),
        ((2, 2), (0, -2), (4, 4), "axes 0 to 1"),
        ((2, 2), (0, 0), (4, 4), "at most once"),
        ((2, 4), (0, 1), (6, 4), "4 equal parts"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    matrix: tuple[int, ...], tensor_map: tuple[int, ...], shape: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(LayoutError, match=complaint):
        layout(matrix, tensor_map, shape)


def test_steps_that_cannot_be_are_refused() -> None:
    own = layout((2,), (0, -1), (4, 3))
    with pytest.raises(LayoutError):
        step(own, "all_gather", 1)
    with pytest.raises(LayoutError):
        step(own, "all_to_all", 0, to_dim=1)  # 3 columns do not halve
    assert [one.kind for one in steps_from(own)] == ["all_gather"]
    with pytest.raises(LayoutError, match="target of shape"):
        redistribute(own, layout((2,), (0, -1), (4, 6)))

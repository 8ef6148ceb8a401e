"""Spaces and moves: prefixes are rows, options never lead to a dead end, moves stay legal."""

from collections import Counter
from inspect import ismodule

import numpy as np
import pytest
import search_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab import aoe
from ascend_lab.aoe.space import (
    TableSpace,
    completed,
    crossed,
    mutated,
    nearest,
    neighbours,
    random_completion,
)
from ascend_lab.errors import InputError

TABLES = st.lists(
    st.tuples(st.integers(-3, 9), st.sampled_from(["x", "y"]), st.sampled_from([1, 2, 4, 16])),
    min_size=1,
    max_size=20,
)


def space_of(points) -> TableSpace:
    return TableSpace(("a", "b", "c"), list(zip(*points, strict=True)))


@given(TABLES)
@settings(max_examples=20, deadline=None)
def test_options_lead_to_all_points_and_to_no_others(points):
    space = space_of(points)
    found = [()]
    for _ in space.names:
        found = [(*prefix, value) for prefix in found for value in space.options(prefix)]
    assert found == sorted(set(points)) == list(space.points())
    assert space.size == len(found)
    assert [space.point(space.row(point)) for point in found] == found


@given(TABLES, st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_moves_are_legal_and_do_what_they_say(points, seed):
    space, rng, legal = space_of(points), np.random.default_rng(seed), set(points)
    one, two = space.sample(rng), space.sample(rng)
    assert {one, crossed(space, one, two, rng), random_completion(space, one[:1], rng)} <= legal
    assert random_completion(space, one[:2], rng)[:2] == one[:2]
    changed = mutated(space, one, rng)
    assert changed in legal and (changed != one or len(legal) == 1)
    near = neighbours(space, one)
    assert set(near) <= legal and one not in near
    assert {p for p in legal if sum(a != b for a, b in zip(p, one, strict=True)) == 1} <= set(near)
    assert crossed(space, one, one, rng) == one == completed(space, one)
    assert completed(space, two, one[:1])[0] == one[0]


def test_a_wanted_value_moves_to_the_nearest_one():
    assert nearest((1, 4, 64), 16) == 4 and nearest((1, 4, 64), 40) == 64
    assert nearest((2, 4), 4) == 4 and nearest(("x", "y"), "z") == "x"
    space = space_of([(1, "x", 2), (8, "y", 16), (8, "y", 1)])
    assert completed(space, (6, "x", 8)) == (8, "y", 16)


def test_samples_are_even():
    space, rng = cases.table(), np.random.default_rng(0)
    counts = Counter(space.sample(rng) for _ in range(200 * space.size))
    assert len(counts) == space.size and min(counts.values()) > 140


def test_tables_that_cannot_be():
    for names, columns in ((("a",), []), ((), []), (("a", "b"), [(1,), (1, 2)]), (("a",), [()])):
        with pytest.raises(InputError, match="a column of equal length"):
            TableSpace(names, columns)
    space = cases.table()
    for point in ((2, 3, "z"), (2, 3), (5, 3, "x"), (2, 1, "w")):
        with pytest.raises(InputError, match="a point of the space"):
            space.row(point)


def test_the_facade_gives_every_word_and_no_module():
    for word in aoe.__all__:
        found = getattr(aoe, word)
        assert not ismodule(found), word
    with pytest.raises(AttributeError, match="nothing"):
        _ = aoe.nothing

"""Memory plans: every method is valid, the search is exact, and the checks find wrong plans."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import memory as planner_module
from ascend_lab.compiler.memory import (
    METHODS,
    Buffer,
    Plan,
    lowered_by_search,
    peak_live_bytes,
    plan,
    reuse_distance_bytes,
    share,
    simulate_writes,
    verify,
)
from ascend_lab.compiler.memory_file import read_csv
from ascend_lab.compiler.packing import cpsat_available, pack_cpsat
from ascend_lab.data import data_path
from ascend_lab.errors import GraphError, UnsupportedError
from ascend_lab.lab.packing import exact_plan, pack
from bench.graph import CAPACITY_BYTES, measure, report

INSTALLED = [m for m in METHODS if m != "exact" or cpsat_available()]


@st.composite
def instances(draw, most: int = 12) -> list[Buffer]:
    found = []
    for k in range(draw(st.integers(0, most))):
        lower = draw(st.integers(0, 9))
        found.append(Buffer(k, lower, lower + draw(st.integers(1, 6)), draw(st.integers(0, 9))))
    return found


def brute_force(buffers: list[Buffer]) -> int:
    """Return the lowest height: some order of placing each as low as it can reaches it."""
    best = sum(b.size_bytes for b in buffers)
    for order in permutations(b for b in buffers if b.size_bytes):
        placed: list[tuple[Buffer, int]] = []
        for b in order:
            meets = [(p, at) for p, at in placed if p.lower < b.upper and b.lower < p.upper]
            places = [0, *(at + p.size_bytes for p, at in meets)]
            free = (
                at
                for at in sorted(places)
                if all(at >= q + p.size_bytes or q >= at + b.size_bytes for p, q in meets)
            )
            placed.append((b, next(free)))
        best = min(best, max((at + p.size_bytes for p, at in placed), default=0))
    return best


@pytest.mark.parametrize("method", INSTALLED)
@given(buffers=instances(), alignment=st.sampled_from([1, 4, 512]))
def test_every_method_gives_a_valid_plan(method, buffers, alignment):
    found = plan(buffers, method=method, alignment_bytes=alignment, time_limit_s=2)
    verify(found, buffers, alignment)
    simulate_writes(buffers, found)
    assert found.height_bytes >= found.lower_bound_bytes >= peak_live_bytes(buffers)
    assert found.height_bytes % alignment == 0
    if found.height_bytes == found.lower_bound_bytes:
        assert found.optimal
        assert found.gap == 0


@settings(max_examples=100)
@given(buffers=instances(most=6))
def test_the_search_is_exact(buffers):
    lowest = brute_force(buffers)
    offsets = pack(buffers, lowest, 60)
    assert offsets is not None
    verify(Plan(offsets, lowest, 0, "", False), buffers)
    if lowest:
        assert pack(buffers, lowest - 1, 60) is None
    found = exact_plan(buffers, time_limit_s=60)
    assert (found.height_bytes, found.optimal) == (lowest, True)


FRAGMENTED = [
    (1, 4, 3), (5, 6, 1), (0, 2, 4), (4, 5, 4), (3, 6, 4),
    (0, 1, 2), (5, 6, 3), (2, 4, 1), (0, 1, 2), (1, 3, 1),
]  # fmt: skip


def test_a_height_above_the_peak_is_proven():
    """At most 8 bytes live at once, and yet no plan takes 8; CP-SAT says so too."""
    buffers = [Buffer(k, *row) for k, row in enumerate(FRAGMENTED)]
    found = exact_plan(buffers)
    assert (found.height_bytes, found.lower_bound_bytes, found.optimal) == (9, 8, True)
    assert found.gap == pytest.approx(1 / 8)
    assert pack(buffers, 8, 60) is None
    if cpsat_available():
        assert pack_cpsat(buffers, 8, 60) is None
        assert plan(buffers, method="exact").height_bytes == 9


@pytest.mark.skipif(not cpsat_available(), reason="OR-tools is optional")
@pytest.mark.parametrize("name", ["B", "F"])
def test_hard_instances_are_packed(name):
    (row,) = measure(name, 60.0)
    assert row.over <= 0
    assert "packed" in report([row])


# D takes 40 s, A and B two together.
@pytest.mark.parametrize("name", ["A", "B", pytest.param("D", marks=pytest.mark.full)])
def test_the_search_of_the_chapter_packs_hard_instances(name):
    buffers = read_csv(data_path(f"minimalloc/{name}.{CAPACITY_BYTES}.csv"))
    found = exact_plan(buffers, 60.0)
    verify(found, buffers)
    assert found.height_bytes <= CAPACITY_BYTES
    greedy = plan(buffers, method="greedy-by-size")
    assert greedy.height_bytes > CAPACITY_BYTES, "the instance is hard"


def test_without_time_the_best_rule_is_returned():
    buffers = read_csv(data_path(f"minimalloc/A.{CAPACITY_BYTES}.csv"))
    rules = (plan(buffers, method=m).height_bytes for m in planner_module.HEURISTICS)
    found = plan(buffers, CAPACITY_BYTES, time_limit_s=0)
    assert found.height_bytes == min(rules)
    assert not found.optimal


@pytest.mark.parametrize("installed", [False, True])
def test_what_no_rule_reaches_goes_to_cpsat_if_there(monkeypatch, installed):
    asked = []

    def answer(buffers, *_, **__):
        asked.append(len(buffers))
        return {"a": 0, "b": 6, "c": 10, "d": 0}

    # Greedy by any order leaves this one above its peak of 16.
    buffers = [
        Buffer("a", 0, 3, 6),
        Buffer("b", 0, 9, 4),
        Buffer("c", 2, 9, 6),
        Buffer("d", 3, 9, 6),
    ]
    rule = {"bad": lambda bs: {b.id: 20 * k for k, b in enumerate(bs)}}
    monkeypatch.setattr(planner_module, "HEURISTICS", rule)
    monkeypatch.setattr(planner_module, "pack_cpsat", answer)
    monkeypatch.setattr(planner_module, "cpsat_available", lambda: installed)
    found = plan(buffers, time_limit_s=0.2)
    verify(found, buffers)
    assert found.optimal is installed
    assert found.method == ("exact (CP-SAT)" if installed else "bad")
    assert bool(asked) is installed
    if not installed:
        with pytest.raises(UnsupportedError, match="OR-tools"):
            plan(buffers, method="exact")


@pytest.mark.parametrize("least", range(4, 21))
def test_halving_ends_at_the_least_height(least):
    """The oracle packs one buffer of 4 under the roof of any target that is high enough."""

    def under(_buffers, target, _seconds):
        return {0: target - 4} if target >= least else None

    high = Plan({0: 16}, 20, 4, "high", False)
    found = lowered_by_search(high, [Buffer(0, 0, 1, 4)], 4, under, "oracle", 10.0)
    assert (found.height_bytes, found.optimal) == (least, True)


@pytest.mark.skipif(not cpsat_available(), reason="OR-tools is optional")
@given(buffers=instances(most=6))
def test_cpsat_agrees_with_the_search(buffers):
    lowest = brute_force(buffers)
    filled = [b for b in buffers if b.size_bytes]
    offsets = pack_cpsat(filled, lowest, 60)
    assert offsets is not None
    verify(Plan(offsets, lowest, 0, "", False), filled)
    if lowest:
        assert pack_cpsat(filled, lowest - 1, 60) is None


# -- checks that must catch wrong plans ------------------------------------------------------------

TWO = [Buffer("a", 0, 2, 8), Buffer("b", 1, 3, 8)]


@pytest.mark.parametrize("offsets", [{"a": 0, "b": 7}, {"a": 0, "b": 0}, {"a": 0, "b": 9}])
def test_overlap_and_overrun_are_caught_on_paper_and_on_bytes(offsets):
    wrong = Plan(offsets, 16, 16, "", False)
    with pytest.raises(GraphError):
        verify(wrong, TWO)
    with pytest.raises(GraphError):
        simulate_writes(TWO, wrong)


@settings(max_examples=100)
@given(buffers=instances(), data=st.data())
def test_bytes_and_paper_judge_alike(buffers, data):
    offsets = {b.id: data.draw(st.integers(0, 20)) for b in buffers}
    guess = Plan(offsets, 24, 0, "", False)
    verdicts = []
    for check in (lambda: verify(guess, buffers), lambda: simulate_writes(buffers, guess)):
        try:
            check()
            verdicts.append(True)
        except GraphError:
            verdicts.append(False)
    assert verdicts[0] == verdicts[1]


def test_missing_extra_and_misaligned_offsets_are_caught():
    good = plan(TWO)
    for offsets in ({"a": 0}, {"a": 0, "b": 8, "c": 20}, {"a": -8, "b": 0}):
        with pytest.raises(GraphError):
            verify(replace(good, offsets=offsets), TWO)
    with pytest.raises(GraphError):
        verify(good, TWO, alignment_bytes=16)


def test_bad_buffers_and_questions_are_refused():
    with pytest.raises(GraphError, match="lifetime"):
        Buffer("a", 3, 3, 1)
    with pytest.raises(GraphError, match="size"):
        Buffer("a", 0, 1, -1)
    with pytest.raises(GraphError, match="twice"):
        plan([TWO[0], TWO[0]])
    with pytest.raises(GraphError, match="greedy-by-size"):
        plan(TWO, method="magic")
    with pytest.raises(GraphError, match="alignment"):
        plan(TWO, alignment_bytes=0)


# -- sharing and L2 --------------------------------------------------------------------------------
def test_shared_buffers_become_one_and_chain():
    chain = [Buffer(k, k, k + 2, 10 + k) for k in range(3)]
    assert peak_live_bytes(chain) == 23
    merged = share(chain, [(0, 1), (1, 2), (0, 2)])
    assert merged == [Buffer(0, 0, 4, 12)]
    assert plan(merged).height_bytes == 12
    with pytest.raises(GraphError, match="nobody"):
        share(chain, [(0, "nobody")])


def test_reuse_distance_by_hand():
    """Byte ranges: fresh costs all written before; a byte just freed costs nothing."""
    buffers = [Buffer("a", 0, 1, 4), Buffer("b", 1, 2, 4), Buffer("c", 2, 3, 4)]
    assert reuse_distance_bytes(buffers, {"a": 0, "b": 0, "c": 0}) == 0
    assert reuse_distance_bytes(buffers, {"a": 0, "b": 4, "c": 8}) == pytest.approx((0 + 4 + 8) / 3)
    assert reuse_distance_bytes(buffers, {"a": 0, "b": 4, "c": 0}) == pytest.approx((0 + 4 + 4) / 3)

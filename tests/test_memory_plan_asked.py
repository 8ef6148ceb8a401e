"""Buffers that ask for an alignment, an offset or gaps: plans held against all plans there are."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler.buffers import Buffer, Gap
from ascend_lab.compiler.memory import (
    HEURISTICS,
    Plan,
    height,
    peak_live_bytes,
    plan,
    simulate_writes,
    verify,
)
from ascend_lab.compiler.memory_file import read_csv
from ascend_lab.compiler.packing import cpsat_available
from ascend_lab.errors import GraphError

MAX_BYTES = 14
"""The oracle looks no higher; a case that needs more is not drawn."""


@st.composite
def asking(draw: st.DrawFn) -> list[Buffer]:
    """Up to four small buffers; each may have an alignment, a given offset, a gap with a window."""
    buffers = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        lower = draw(st.integers(0, 3))
        upper = lower + draw(st.integers(1, 5))
        size = draw(st.integers(0, 4))
        alignment = draw(st.sampled_from((1, 1, 2, 4)))
        gaps = ()
        if upper - lower > 2 and draw(st.booleans()):
            begin = draw(st.integers(lower, upper - 2))
            first = draw(st.integers(0, size))
            last = draw(st.sampled_from((first, size)))
            gaps = (Gap(begin, begin + draw(st.integers(1, 2)), first, last),)
        offset = draw(st.sampled_from((None, None, None, 0, 1))) if size else None
        offset = None if offset is None else offset * alignment
        buffers.append(Buffer(name, lower, upper, size, alignment, gaps, offset))
    return buffers


def uses(buffer: Buffer, at: int) -> set[tuple[int, int]]:
    """Every (time, byte) that a buffer takes, written down one by one."""
    taken = set()
    for time in range(buffer.lower, buffer.upper):
        window = (0, buffer.size_bytes)
        for gap in buffer.gaps:
            if gap.lower <= time < gap.upper:
                window = (gap.first, gap.last)
        taken |= {(time, at + byte) for byte in range(*window)}
    return taken


def least_height(buffers: list[Buffer]) -> int | None:
    """The lowest height of all plans, by trying every offset of every buffer."""
    places = [
        [b.offset] if b.offset is not None else range(0, MAX_BYTES, b.alignment_bytes)
        for b in buffers
    ]
    heights = []
    for offsets in itertools.product(*places):
        sets = [uses(b, at) for b, at in zip(buffers, offsets, strict=True)]
        if sum(map(len, sets)) == len(set().union(*sets)):
            heights.append(height(buffers, dict(zip("abcd", offsets, strict=False))))
    return min(heights, default=None)


@settings(max_examples=60)
@given(asking())
def test_plans_are_right_and_the_search_finds_the_lowest(buffers):
    least = least_height(buffers)
    if least is None:  # given offsets that overlap
        with pytest.raises(GraphError, match="bytes of their own"):
            plan(buffers)
        return
    for method in HEURISTICS:
        found = plan(buffers, method=method)
        verify(found, buffers)
        simulate_writes(buffers, found)
        assert found.lower_bound_bytes <= least <= found.height_bytes
        assert found.height_bytes == least or not found.optimal
    if cpsat_available():
        found = plan(buffers, method="exact")
        verify(found, buffers)
        assert (found.height_bytes, found.optimal) == (least, True)


def test_bytes_in_gaps_are_free_for_others_and_windows_are_not():
    long = Buffer("long", 0, 10, 8, gaps=(Gap(3, 6, 2, 5),))
    guest = Buffer("guest", 3, 6, 3)
    assert peak_live_bytes([long, guest]) == 8
    found = plan([long, guest])
    assert found.height_bytes == 8
    assert (found.offsets["guest"] - found.offsets["long"]) == 5
    inside = Plan({"long": 0, "guest": 4}, 8, 8, "by hand", True)
    with pytest.raises(GraphError, match="overlap"):
        verify(inside, [long, guest])
    with pytest.raises(GraphError, match="overwritten"):
        simulate_writes([long, guest], inside)


def test_offsets_that_are_given_hold_and_bind_others():
    buffers = [Buffer("a", 0, 4, 4, offset=6), Buffer("b", 2, 6, 4), Buffer("c", 3, 5, 4)]
    found = plan(buffers)
    assert found.offsets["a"] == 6
    assert found.height_bytes == 14
    moved = Plan({**found.offsets, "a": 10}, 14, 10, "by hand", False)
    with pytest.raises(GraphError, match="as given"):
        verify(moved, buffers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment_bytes": 0}, "alignment of at least 1"),
        ({"offset": -4}, "from 0"),
        ({"alignment_bytes": 4, "offset": 6}, "multiple of 4"),
        ({"gaps": (Gap(4, 4),)}, "gaps one after"),
        ({"gaps": (Gap(2, 4), Gap(3, 5))}, "gaps one after"),
        ({"gaps": (Gap(8, 12),)}, "gaps one after"),
        ({"gaps": (Gap(2, 4, 0, 9),)}, "window from 0 to 8"),
    ],
)
def test_buffers_that_cannot_be_are_refused(fields, message):
    with pytest.raises(GraphError, match=message):
        Buffer("a", 0, 10, 8, **fields)


# -- the file -------------------------------------------------------------------------------------
def test_every_column_of_the_format_counts(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text(
        "buffer_id,begin,end,size,alignment,hint,gaps,offset\n"
        "a,0,9,8,4,16,2-3 5-6@0:4,8\nb,0,4,2,1,-1,,-1\nc,0,4,2,,,,\n"
    )
    gaps = (Gap(2, 4), Gap(5, 7, 0, 4))
    assert read_csv(file) == [
        Buffer("a", 0, 10, 8, 4, gaps, 8),
        Buffer("b", 0, 5, 2),
        Buffer("c", 0, 5, 2),
    ]

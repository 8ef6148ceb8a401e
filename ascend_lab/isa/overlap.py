"""Vector instructions that write what they still have to read.

An instruction works repeat by repeat: a repeat reads its blocks, then writes its own, while the
next one may be on its way. So a destination begins where the source does, which is in place, or
shares no byte with it; in place no repeat reads what an earlier one has written,
and where it works lane by lane no lane writes what another one reads in the same repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ascend_lab.isa.memory import Region
from ascend_lab.isa.opcodes import REDUCING, VECTOR_OPS, WHOLE_BLOCKS
from ascend_lab.isa.program import Instruction
from ascend_lab.isa.rules_blocks import BLOCKS_PER_REPEAT

Lanes = tuple[tuple[int, ...], tuple[int, ...], int, int, int, bool]
"""Sizes, strides in bytes, bytes of an element, elements a repeat, mask (-1: all lanes), and
whether a lane of the destination depends on its own lane of the source only."""


def overlaps(instruction: Instruction, env: Mapping[str, int]) -> Iterator[str]:
    """Yield what is wrong with each source that the destination partly overlaps."""
    dst = instruction.dst
    if dst is None or instruction.op not in VECTOR_OPS:
        return
    written, start = _lanes(instruction, dst), dst.byte_at(env)
    for src in instruction.srcs:
        if src.space == dst.space:
            shared = _shared(written, _lanes(instruction, src), src.byte_at(env) - start)
            if shared is not None:
                yield (
                    f"{instruction.op}: a destination that begins where its source does, or "
                    f"shares no byte with it; got {dst.space} byte {start + shared} of both; "
                    "write to another buffer"
                )


def _lanes(instruction: Instruction, region: Region) -> Lanes:
    op, item = instruction.op, region.buffer.itemsize
    main = instruction.srcs[0] if op in REDUCING else instruction.dst
    assert main is not None
    each = max(region.elements // main.sizes[0], 1)
    if op == "vbrcb":
        each *= BLOCKS_PER_REPEAT
    elif op == "vtranspose":
        each = region.elements
    mask = instruction.number("mask", -1)
    if op == "vsel" or (op in REDUCING and region is instruction.dst):
        mask = -1
    lane_by_lane = op not in (*REDUCING, *WHOLE_BLOCKS, "vconv")
    return region.sizes, tuple(s * item for s in region.strides), item, each, mask, lane_by_lane


@lru_cache(4096)
def _shared(written: Lanes, read: Lanes, gap: int) -> int | None:
    """Return the first byte, from the destination's start on, at fault; the source is `gap` on."""
    (start, end), (begin, stop) = _reach(written), _reach(read)
    if gap + begin >= end or start >= gap + stop:
        return None
    (stored, first), (loaded, last) = _touched(written), _touched(read)
    loaded = loaded + gap
    low = min(stored.min(), loaded.min())
    span = int(max(stored.max(), loaded.max()) - low + 1)
    writes = np.full(span, -1)
    writes[(stored - low)[::-1]] = first[::-1]
    before = writes[loaded - low]
    bad = before >= 0
    if gap == 0:
        each = written[3] if written[5] else 1
        bad &= (last > before) | ((last < before) & (last // each == before // each))
    return int(loaded[bad].min()) if bad.any() else None


def _reach(lanes: Lanes) -> tuple[int, int]:
    """Return the bytes from the first to behind the last, counted from where lane 0 begins."""
    ends = [(size - 1) * stride for size, stride in zip(*lanes[:2], strict=True)]
    return sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends) + lanes[2]


def _touched(lanes: Lanes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of all active lanes, and which lane, or only which repeat, each is of."""
    sizes, strides, item, each, mask, lane_by_lane = lanes
    starts = np.zeros(1, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = np.add.outer(starts, np.arange(size) * stride).ravel()
    index = np.arange(len(starts))
    if mask >= 0:
        active = np.array([mask >> i & 1 for i in range(each)], bool)[index % each]
        starts, index = starts[active], index[active]
    index = index if lane_by_lane else index // each
    return np.add.outer(starts, np.arange(item)).ravel(), np.repeat(index, item)

"""One vector instruction: an operation, a mask, a repeat count and a stride, on a local buffer.

One repeat works on up to 256 bytes, 8 blocks of 32 bytes; `mask` switches off lanes at its end;
the next repeat starts `stride_blocks` blocks further on; one instruction repeats at most 255 times
(Ascend C documentation, vector instructions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.program import OPS, Array

BLOCK_BYTES = 32
REPEAT_BYTES = 256
MAX_REPEATS = 255


@dataclass(frozen=True, slots=True)
class VectorOp:
    """`dst = op(a, b)` on `repeats` groups of `mask` elements, `stride_blocks` blocks apart.

    `dst`, `a` and `b` are element offsets into the same buffer.
    """

    op: str
    dst: int
    a: int
    b: int
    mask: int
    repeats: int = 1
    stride_blocks: int = REPEAT_BYTES // BLOCK_BYTES


def lanes_of(dtype: np.dtype[np.generic] | str) -> int:
    """Return how many elements of a format one repeat holds: 64 of float32, 128 of float16."""
    return REPEAT_BYTES // np.dtype(dtype).itemsize


def elements(op: VectorOp, dtype: np.dtype[np.generic]) -> Array:
    """Return the element numbers an instruction touches, relative to an operand's start.

    Shape (repeats, mask). Raises `MachineError` for a mask, repeat count or stride that the
    instruction has no room for.
    """
    lanes, block = lanes_of(dtype), BLOCK_BYTES // dtype.itemsize
    limits = {
        "mask": (op.mask, 1, lanes),
        "repeats": (op.repeats, 1, MAX_REPEATS),
        "stride_blocks": (op.stride_blocks, 0, MAX_REPEATS),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise MachineError(
                f"a vector instruction needs {name} from {low} to {high}",
                str(value),
                "split the work over several instructions",
            )
    step = op.stride_blocks * block
    return np.arange(op.repeats)[:, None] * step + np.arange(op.mask)[None, :]


def run_vector(ops: Sequence[VectorOp], buffer: Array) -> Array:
    """Return the buffer after the instructions; the one handed in stays as it is.

    Raises `MachineError` if an operand leaves the buffer or starts off a 32-byte block.
    """
    result = buffer.copy()
    for op in ops:
        touched = elements(op, buffer.dtype)
        for start in (op.dst, op.a, op.b):
            _check_operand(start, int(touched.max()), result)
        value = OPS[op.op].apply(result[op.a + touched], result[op.b + touched])
        result[op.dst + touched] = value
    return result


def _check_operand(start: int, last: int, buffer: Array) -> None:
    if start < 0 or start + last >= buffer.size:
        raise MachineError(
            f"an operand needs elements {start} to {start + last}",
            f"a buffer of {buffer.size}",
            "reduce repeats or mask, or enlarge the buffer",
        )
    if start * buffer.itemsize % BLOCK_BYTES:
        raise MachineError(
            f"an operand must start at a multiple of {BLOCK_BYTES} bytes",
            f"byte {start * buffer.itemsize}",
            "align it",
        )


def plain_ops(
    op: str, n: int, dst: int, a: int, b: int, dtype: np.dtype[np.generic] | str
) -> list[VectorOp]:
    """Return the usual cover of n elements: full repeats, 255 at most, then one masked tail."""
    lanes = lanes_of(dtype)
    full, tail = divmod(n, lanes)
    result = []
    for first in range(0, full, MAX_REPEATS):
        skip = first * lanes
        repeats = min(MAX_REPEATS, full - first)
        result.append(VectorOp(op, dst + skip, a + skip, b + skip, lanes, repeats))
    if tail:
        skip = full * lanes
        result.append(VectorOp(op, dst + skip, a + skip, b + skip, tail))
    return result


def instruction_count(n: int, lanes: int) -> int:
    """Return how many instructions `plain_ops` issues for n elements, without building them."""
    full, tail = divmod(n, lanes)
    return -(-full // MAX_REPEATS) + (tail > 0)

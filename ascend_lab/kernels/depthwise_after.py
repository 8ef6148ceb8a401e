"""An epilogue behind a depthwise convolution: the sums lie in UB already, one channel block a time.

It runs on the vector cores of every chip; operands per channel come with the taps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import PathError, TypeMismatchError
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Queue, Tile
from ascend_lab.kernels.epilogue import Epilogue, Operand, step_formats
from ascend_lab.kernels.epilogue_plan import Plan, pattern, plan_of
from ascend_lab.kernels.epilogue_steps import Piece, load_channels, write_steps
from ascend_lab.kernels.gemm_schedule import FRACTAL

SUM = "fp16"
"""The format of sums on the vector unit."""


def supported_after(epilogue: Epilogue) -> str:
    """Return "" if a depthwise convolution can fuse the epilogue, otherwise the reason."""
    try:
        step_formats(epilogue, SUM)
    except TypeMismatchError as error:
        return str(error)
    if epilogue.of_kind("tile"):
        return "a depthwise kernel keeps rows with gaps in UB, a tile operand has none"
    if epilogue.out_dtype != SUM:
        return f"a depthwise kernel stores {SUM}, not {epilogue.out_dtype}"
    return ""


def check_after(epilogue: Epilogue | None, chip: Chip) -> None:
    """Raise `PathError` with the reason `supported_after` gives."""
    reason = supported_after(epilogue) if epilogue else ""
    if reason:
        wanted = f"an epilogue of a depthwise kernel on {chip.name}"
        raise PathError(wanted, reason, "run the steps as a kernel of their own")


def after_blocks(epilogue: Epilogue | None) -> tuple[int, int]:
    """Return 32-byte blocks of UB: (per output pixel, once) that the epilogue adds."""
    if epilogue is None:
        return 0, 0
    scratch = sum(DTYPE_BYTES[dtype] for dtype in plan_of(epilogue, SUM).tiles[1:])
    fixed = sum(2 * pattern(o.dtype) * DTYPE_BYTES[o.dtype] for o in epilogue.operands)
    return scratch * FRACTAL // BLOCK_BYTES, fixed // BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class After:
    """An epilogue in one kernel: its operands share the slots of the taps."""

    plan: Plan
    operands: tuple[tuple[Operand, Buffer, Buffer], ...]
    scratch: tuple[Buffer, ...]

    def load(self, k: KernelBuilder, taps: Tile, channel: Affine) -> None:
        """Bring the numbers of one channel block beside its taps."""
        for operand, tensor, slots in self.operands:
            slot = Tile(slots, taps.slot)
            load_channels(k, slot, tensor, (channel, 1), pattern(operand.dtype))

    def write(self, k: KernelBuilder, sums: Tile, taps: Tile, elements: int) -> None:
        """Write the steps on the sums of one block of rows, in place."""
        rates = {operand.name: Tile(slots, taps.slot) for operand, _, slots in self.operands}
        piece = Piece((sums, *self.scratch), {}, rates, Affine(), 1, elements)
        write_steps(k, self.plan, piece)


def new_after(
    k: KernelBuilder, epilogue: Epilogue | None, taps: Queue, c1: int, elements: int
) -> After | None:
    """Allocate operands and scratch tiles for blocks of `elements` sums."""
    if epilogue is None:
        return None
    plan = plan_of(epilogue, SUM)
    operands = tuple(
        (
            o,
            k.tensor(o.name, o.dtype, c1 * FRACTAL),
            taps.join(f"{o.name}_ub", o.dtype, pattern(o.dtype)),
        )
        for o in epilogue.operands
    )
    scratch = tuple(
        k.buffer(f"value.{i}", "UB", dtype, elements) for i, dtype in enumerate(plan.tiles[1:], 1)
    )
    return After(plan, operands, scratch)

"""What attention costs: the FlashAttention kernel against three kernels that store the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import Kernel
from ascend_lab.kernels.flash_shape import FlashShape, FlashTiling, default_tiling, tile_bytes
from ascend_lab.ops.attention import DTYPE, flash_kernel
from ascend_lab.ops.build import compile as compile_operator
from ascend_lab.sim import simulate_kernel


@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Cost of one attention on a chip, counted from the programs of all cores.

    `gm_bytes` cross between the cores and L2 or device memory, `memory_bytes` the device memory's
    own interface, where no phase finds in L2 what another left; `ub_bytes` is what the kernel keeps
    in UB (None where it is no single launch).
    """

    gm_bytes: int
    memory_bytes: int
    cycles: int
    ub_bytes: int | None = None


def flash_traffic(
    shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None
) -> AttentionTraffic:
    """Return the cost of the FlashAttention kernel; raises as `flash_kernel`."""
    tiling = default_tiling(shape, chip) if chip.combined and tiling is None else tiling
    line = simulate_kernel(flash_kernel(shape, chip, tiling), chip)
    used = tile_bytes(shape, tiling)["UB"] if tiling and chip.combined else None
    return AttentionTraffic(_gm(line.path_bytes), line.memory_bytes, line.cycles, used)


def separate_kernels(shape: FlashShape, chip: Chip) -> tuple[Kernel, ...]:
    """Return the kernels of attention as three operators: scores, softmax, weighted sum."""
    n, t = shape.rows, shape.keys
    q, k, v = (shape.batch, n, shape.depth), (shape.batch, t, shape.depth), (t, shape.width)
    scores, both = (shape.batch, n, t), (DTYPE, DTYPE)
    masks = {"": [], "rows": [(shape.batch, 1, t)], "full": [scores]}[shape.mask]
    name = "masked_softmax" if masks else "softmax"
    return (
        compile_operator("attention_scores", [q, k], both, chip, scale=shape.scale),
        compile_operator(name, [scores, *masks], both[: 1 + len(masks)], chip),
        compile_operator("attention_context", [scores, (shape.batch, *v)], both, chip),
    )


def separate_traffic(shape: FlashShape, chip: Chip) -> AttentionTraffic:
    """Return the cost of attention as three operators, whose scores pass through GM."""
    lines = [simulate_kernel(kernel, chip) for kernel in separate_kernels(shape, chip)]
    return AttentionTraffic(
        sum(_gm(line.path_bytes) for line in lines),
        sum(line.memory_bytes for line in lines),
        sum(line.cycles for line in lines),
    )


def _gm(path_bytes: Mapping[tuple[str, str], int]) -> int:
    return sum(size for path, size in path_bytes.items() if "GM" in path)

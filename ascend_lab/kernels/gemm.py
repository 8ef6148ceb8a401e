"""A hand-written matrix multiplication for every chip: C = A @ B on all cores.

Operands lie in GM in the private layouts the cube reads fastest (16 x C0 fractals, C0 = 32 bytes):
A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as (N1, M1, 16, 16).
Converting from row-major is not part of the time. The tiling is the published one of the PTO GEMM
example: base tiles in L0, `step_k` of them staged in L1, double buffers, cores in a grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.isa import (
    Affine,
    KernelBuilder,
    Launch,
    Part,
    Program,
    binding_of,
)
from ascend_lab.kernels.epilogue import Epilogue, check_epilogue
from ascend_lab.kernels.epilogue_emit import (
    held_channels,
)
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import (
    ACCUMULATOR,
    FRACTAL,
    GemmSchedule,
    GemmShape,
    check_schedule,
)
from ascend_lab.kernels.gemm_tile import Share, Span, kept_tile, new_kernel, tile
from ascend_lab.kernels.tiles import (
    by_size,
    chunks,
    segments,
)


def gemm_launch(
    shape: GemmShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    epilogue: Epilogue | None = None,
) -> Launch:
    """Return the kernel as a launch: full cores and tail cores are separate parts.

    `epilogue` is done to the sums before they are stored; its operands are tensors of the launch.
    """
    check_epilogue(epilogue, chip, ACCUMULATOR[shape.dtype])
    schedule = schedule or default_schedule(shape, chip, epilogue)
    if schedule.window:
        raise InputError("no window for a matrix product", schedule.window, "convolutions have it")
    check_schedule(shape, schedule, chip)
    m1, _, n1 = shape.fractals
    rows = chunks(m1, schedule.base_m // FRACTAL, schedule.grid_rows)
    cols = chunks(n1, schedule.base_n // FRACTAL, schedule.grid_cols)
    parts = []
    for row_size, row_ids in by_size(rows).items():
        for col_size, col_ids in by_size(cols).items():
            own = ((row_size, rows[0], row_ids[-1] + 1), (col_size, cols[0], col_ids[-1] + 1))
            program = _program(shape, schedule, chip, own, epilogue)
            cores = [binding_of({"row": r, "col": c}) for r in row_ids for c in col_ids]
            parts.append(Part(program, tuple(cores)))
    return Launch(f"gemm_{shape.m}x{shape.k}x{shape.n}", tuple(parts))


def _program(
    shape: GemmShape,
    schedule: GemmSchedule,
    chip: Chip,
    own: tuple[Share, Share],
    epilogue: Epilogue | None,
) -> Program:
    kernel = new_kernel(shape, schedule, chip, own, epilogue)
    k = kernel.builder
    (m_own, m_pitch, m_count), (n_own, n_pitch, n_count) = own
    m_base = k.param("row", m_count) * m_pitch
    n_base = k.param("col", n_count) * n_pitch
    m_axis = _Axis("m", m_base, m_own, schedule.base_m // FRACTAL)
    n_axis = _Axis("n", n_base, n_own, schedule.base_n // FRACTAL)
    with held_channels(kernel.finish, (n_base, n_own), Affine(), None) as held:
        if schedule.order == "mn":
            for m in m_axis.tiles(k):
                with kept_tile(kernel, 0, m) as a:
                    for n in n_axis.tiles(k):
                        tile(kernel, (m, n), (a, None), held)
        else:
            for n in n_axis.tiles(k):
                with (
                    held_channels(kernel.finish, n, Affine(), held) as channels,
                    kept_tile(kernel, 1, n) as b,
                ):
                    for m in m_axis.tiles(k):
                        tile(kernel, (m, n), (None, b), channels)
    return k.finish()


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of C on one core: its first fractal, how many it owns, fractals of a tile."""

    name: str
    base: Affine
    own: int
    tile: int

    def tiles(self, k: KernelBuilder) -> Iterator[Span]:
        """Loop over the tiles, the tail last."""
        for at, size in segments(k, self.name, self.own, self.tile):
            yield self.base + at, size

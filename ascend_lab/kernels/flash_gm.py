"""The GM tensors of FlashAttention and their blocks, in FRACTAL_NZ: (columns / 16, rows, 16)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.isa import Affine, Buffer, KernelBuilder, Region
from ascend_lab.kernels.flash_grid import Span
from ascend_lab.kernels.flash_shape import AREA, FlashShape
from ascend_lab.kernels.gemm_schedule import FRACTAL


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of a program by name: q, k, v, y and mask (a vector where it has one row)."""

    shape: FlashShape
    buffers: Mapping[str, Buffer]

    @classmethod
    def declare(cls, k: KernelBuilder, shape: FlashShape, names: Sequence[str]) -> Tensors:
        """Declare the named tensors in GM; a mask only where the shape has one."""
        rows, keys, _, _ = shape.fractals
        buffers = {}
        for name in names:
            if name != "mask":
                height, columns = _matrix(shape, name)
                each = height * columns * AREA
            elif shape.mask:
                each = keys * FRACTAL if shape.mask == "rows" else rows * keys * AREA
            else:
                continue
            buffers[name] = k.tensor(name, "fp16", _copies(shape, name) * each)
        return cls(shape, buffers)

    def start(self, name: str, matrix: Affine) -> Affine:
        """Return where the matrix of one batch entry begins."""
        if name in self.shape.shared:
            return Affine()
        return matrix * (self.buffers[name].elements // self.shape.batch)

    def block(self, name: str, matrix: Affine, rows: Span) -> Region:
        """Return rows of q, k, v or y: (columns / 16, rows x 16)."""
        (height, columns), (at, size) = _matrix(self.shape, name), rows
        start = self.start(name, matrix) + at * AREA
        return self.buffers[name].region(start, (columns, size * AREA), (height * AREA, 1))

    def mask(self, matrix: Affine, rows: Span, keys: Span) -> Region:
        """Return the mask of a block of scores: (keys / 16, rows x 16), or one row of keys."""
        source, start, (at, size) = self.buffers["mask"], self.start("mask", matrix), keys
        if self.shape.mask == "rows":
            return source.region(start + at * FRACTAL, size * FRACTAL)
        pitch = self.shape.fractals[0] * AREA
        start = start + at * pitch + rows[0] * AREA
        return source.region(start, (size, rows[1] * AREA), (pitch, 1))


def _matrix(shape: FlashShape, name: str) -> tuple[int, int]:
    rows, keys, depth, width = shape.fractals
    return {"q": (rows, depth), "k": (keys, depth), "v": (keys, width), "y": (rows, width)}[name]


def _copies(shape: FlashShape, name: str) -> int:
    return 1 if name in shape.shared else shape.batch


def cut_keys(shape: FlashShape, block: int) -> tuple[int, int, int]:
    """Return full blocks of keys, fractals of the last one, and keys in its last fractal.

    The last is a block of its own where it is shorter (0: it is not) or ends inside a fractal (0:
    it does not).
    """
    full, rest = divmod(shape.fractals[1], block)
    ragged = shape.keys % FRACTAL
    return (full - 1, block, ragged) if ragged and not rest else (full, rest, ragged)


def key_blocks(k: KernelBuilder, shape: FlashShape, block: int) -> Iterator[tuple[Span, int]]:
    """Yield (span, keys in the last fractal if ragged) of every block of keys, in a loop."""
    full, rest, ragged = cut_keys(shape, block)
    if full:
        with k.loop("key", full) as j:
            yield (j * block, block), 0
    if rest:
        yield (Affine(full * block), rest), ragged

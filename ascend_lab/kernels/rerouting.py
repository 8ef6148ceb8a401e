"""Tokens in the order of ranks put in that of experts: runs of them copied by vector cores.

A core has whole ranks. Where the tokens of rank r for expert e come from, and where they go, are
sums of the counts n (ranks, experts),

    from = sum of n[i, j] over i < r, and n[r, j] over j < e
    to   = sum of n[i, j] over j < e, and n[i, e] over i < r

which its scalar unit adds up, one trip to L2 a number. Programs do not depend on data, so that here
all counts are equal; tokens that are left over lie behind, and one core moves them at the end.

Source of the division into ranks, of the sums and of the moves: CANN toolkit 8.1, Ascend C operator
MoeReRouting (moe_re_routing.h). The places of tokens, which it writes as well, are left out.
"""

from dataclasses import dataclass

from ascend_lab import isa
from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import Affine, KernelBuilder, Tile
from ascend_lab.kernels.indexed_rows import l2_steps
from ascend_lab.kernels.tiles import chunks, repeat, segments

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rerouting:
    """Tokens of `hidden` elements from ranks for experts; with `scaled` a number in fp32 each."""

    tokens: int
    hidden: int
    ranks: int
    experts: int
    dtype: str
    scaled: bool = False

    @property
    def run(self) -> int:
        """Tokens of a rank for an expert."""
        return self.tokens // (self.ranks * self.experts)

    @property
    def left(self) -> int:
        """Tokens that are left over."""
        return self.tokens % (self.ranks * self.experts)


def rerouting_kernel(shape: Rerouting, chip: Chip) -> isa.Kernel:
    """Return the kernel: counts (ranks experts), x, y, and with scales scale and scale_out.

    Raises `CapacityError` where no token fits UB, `PathError` for ragged tokens on coupled cores.
    """
    phases = []
    if shape.run:
        axes = {"rank": chunks(shape.ranks, 1, chip.cores_of("vector"))}
        phases.append(isa.spread("runs", axes, lambda own: _Writer(shape, chip).program(own)))
    if shape.left:
        program = _Writer(shape, chip).left()
        phases.append(isa.Launch("left", (isa.Part(program),)))
    return isa.Kernel("rerouting", tuple(phases))


class _Writer:
    """The program of cores with equal shares."""

    def __init__(self, shape: Rerouting, chip: Chip) -> None:
        """Declare tensors; allocate two slots for as many tokens as fit."""
        self.shape = shape
        k = self.k = KernelBuilder("rerouting", chip)
        whole = shape.tokens * shape.hidden
        self.pairs = [(k.tensor("x", shape.dtype, whole), k.tensor("y", shape.dtype, whole))]
        self.widths = [shape.hidden]
        if shape.scaled:
            names = ("scale", "scale_out")
            given, moved = (k.tensor(name, "fp32", shape.tokens) for name in names)
            self.pairs.append((given, moved))
            self.widths.append(1)
        self.counts = k.tensor("counts", "int32", shape.ranks * shape.experts)
        self.count = k.buffer("count", "UB", "int32", 1)
        # A run of tokens, and one of scales behind it, may end within a block.
        room = chip.buffers["UB"] // 2 - 3 * BLOCK_BYTES
        token_bytes = shape.hidden * DTYPE_BYTES[shape.dtype] + SCALE_BYTES * shape.scaled
        self.tile = min(room // token_bytes, max(shape.run, shape.ranks * shape.experts))
        if not self.tile:
            needed = f"rerouting: {token_bytes} bytes of UB for a token"
            raise CapacityError(needed, f"{room} bytes", "use shorter tokens")
        self.queue = k.queue(
            "rows", "UB", shape.dtype, self.tile * shape.hidden, src="MTE2", dst="MTE3"
        )
        self.buffers = [self.queue.buffer]
        if shape.scaled:
            self.buffers.append(self.queue.join("scales", "fp32", self.tile))
        self.known = k.queue("known", "UB", "int32", 1, src="S", dst="MTE2", depth=1)

    def program(self, own: isa.Share) -> isa.Program:
        """Write the ranks of a core."""
        k, shape = self.k, self.shape
        first = k.param("rank", own[2]) * own[1]
        with repeat(k, "r", own[0]) as r:
            rank = first + r
            # Counts before a rank are fewer; the last one, which waits longest, reads all.
            self._add_up(shape.ranks * shape.experts)
            with repeat(k, "expert", shape.experts) as expert:
                self.known.alloc()
                self._add_up(shape.ranks)
                self.known.enqueue()
                self.known.dequeue()
                source = (rank * shape.experts + expert) * shape.run
                target = (expert * shape.ranks + rank) * shape.run
                self._move("tile", source, target, shape.run)
                self.known.free()
        return k.finish()

    def left(self) -> isa.Program:
        """Write the tokens that are left over."""
        behind = Affine(self.shape.tokens - self.shape.left)
        self._move("tile", behind, behind, self.shape.left)
        return self.k.finish()

    def _add_up(self, count: int) -> None:
        """Read numbers of GM, a trip to L2 each; only the first is in the program."""
        steps = count * l2_steps(self.k.chip)
        self.k.scalar(self.count.region(0, 1), self.counts.region(0, 1), steps=steps)

    def _move(self, name: str, source: Affine, target: Affine, tokens: int) -> None:
        """Copy a run of tokens, and their scales."""
        k = self.k
        for at, some in segments(k, name, tokens, self.tile):
            places = list(zip(self.pairs, self.widths, self.buffers, strict=True))
            slot = self.queue.alloc().slot
            for (given, _), width, buffer in places:
                near = Tile(buffer, slot).region(0, some * width)
                k.copy(near, given.region((source + at) * width, near.elements), pad=_ragged(near))
            self.queue.enqueue()
            slot = self.queue.dequeue().slot
            for (_, moved), width, buffer in places:
                near = Tile(buffer, slot).region(0, some * width)
                k.copy(moved.region((target + at) * width, near.elements), near, pad=_ragged(near))
            self.queue.free()


def _ragged(region: isa.Region) -> bool:
    """Tell whether a run of neighbours ends within a block of 32 bytes."""
    return region.elements * DTYPE_BYTES[region.buffer.dtype] % BLOCK_BYTES != 0

"""Reorder tokens from the order of ranks to the order of experts, as copies by vector cores.

In a mixture of experts on several devices (ranks), tokens arrive rank by rank, and an expert needs
its tokens from all ranks. Core i does the ranks i, i + cores, and so on. Where the tokens of rank r
for expert e come from, and where they go, are sums of the counts n (ranks, experts):

    from = sum of n[i, j] over i < r, and n[r, j] over j < e
    to   = sum of n[i, j] over j < e, and n[i, e] over i < r

The core's scalar unit adds up the counts, with one access to L2 per number. Core 0 also adds up the
tokens of each expert. Programs here do not depend on data, so that all counts are equal; tokens
that are left over lie behind the others, and one core moves them at the end.

Source of the division into ranks, of the sums and of the moves: CANN toolkit 8.1, Ascend C operator
MoeReRouting (moe_re_routing.h). That operator also writes the places of tokens; this one does not.
"""

from dataclasses import dataclass

from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Affine, KernelBuilder, Tile
from ascend_lab.operators.kernels.indexed_rows import l2_trip_steps
from ascend_lab.operators.kernels.tiles import repeat, segments

SCALE_BYTES = 4
"""Bytes of the fp32 scale of a token."""


@dataclass(frozen=True, slots=True)
class Rerouting:
    """Tokens of `hidden` elements from ranks for experts; with `scaled` each has an fp32 scale."""

    tokens: int
    hidden: int
    ranks: int
    experts: int
    dtype: str
    scaled: bool = False

    @property
    def run_tokens(self) -> int:
        """Tokens of a rank for an expert."""
        return self.tokens // (self.ranks * self.experts)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are left over."""
        return self.tokens % (self.ranks * self.experts)


def rerouting_kernel(shape: Rerouting, chip: Chip) -> isa.Kernel:
    """Return the kernel on tensors counts (ranks experts), x, y and, if scaled, scale, scale_out.

    Raises `CapacityError` if no token fits UB, and `PathError` if a token is not whole blocks of 32
    bytes on chips whose copies need whole blocks.
    """
    phases = []
    if shape.run_tokens:
        phases.append(isa.Launch("runs", _parts(shape, chip)))
    if shape.remaining_tokens:
        program = _Writer(shape, chip).remaining_program()
        phases.append(isa.Launch("left", (isa.Part(program),)))
    return isa.Kernel("rerouting", tuple(phases))


def _parts(shape: Rerouting, chip: Chip) -> tuple[isa.Part, ...]:
    """Return the parts: core 0, which also adds up the totals, and groups of cores alike."""
    cores = min(shape.ranks, chip.cores_of("vector"))
    groups: dict[int, list[int]] = {}
    for core in range(1, cores):
        # 10 ranks on 4 cores: cores 0 and 1 have 3 ranks, cores 2 and 3 have 2.
        groups.setdefault(isa.ceil_div(shape.ranks - core, cores), []).append(core)
    parts = []
    for turns, core_ids in [(isa.ceil_div(shape.ranks, cores), [0]), *groups.items()]:
        program = _Writer(shape, chip).program(turns, cores, core_ids[-1])
        bindings = tuple((("core", core),) for core in core_ids)
        parts.append(isa.Part(program, bindings))
    return tuple(parts)


class _Writer:
    """The program of cores with equal shares."""

    def __init__(self, shape: Rerouting, chip: Chip) -> None:
        """Declare tensors; allocate two slots for as many tokens as fit."""
        self.shape = shape
        k = self.k = KernelBuilder("rerouting", chip)
        elements = shape.tokens * shape.hidden
        self.pairs = [(k.tensor("x", shape.dtype, elements), k.tensor("y", shape.dtype, elements))]
        self.widths = [shape.hidden]
        if shape.scaled:
            names = ("scale", "scale_out")
            scales, moved_scales = (k.tensor(name, "fp32", shape.tokens) for name in names)
            self.pairs.append((scales, moved_scales))
            self.widths.append(1)
        self.counts = k.tensor("counts", "int32", shape.ranks * shape.experts)
        self.count = k.buffer("count", "UB", "int32", 1)
        # A run of tokens, and one of scales behind it, may end within a block.
        room = chip.buffers["UB"] // 2 - 3 * BLOCK_BYTES
        token_bytes = shape.hidden * DTYPE_BYTES[shape.dtype] + SCALE_BYTES * shape.scaled
        self.tile = min(room // token_bytes, max(shape.run_tokens, shape.ranks * shape.experts))
        if not self.tile:
            needed = f"rerouting: {token_bytes} bytes of UB for a token"
            raise CapacityError(needed, f"{room} bytes", "use shorter tokens")
        self.queue = k.queue(
            "rows", "UB", shape.dtype, self.tile * shape.hidden, src="MTE2", dst="MTE3"
        )
        self.buffers = [self.queue.buffer]
        if shape.scaled:
            self.buffers.append(self.queue.join("scales", "fp32", self.tile))
        # The scalar unit works on the next run while the copies of one run proceed.
        self.known = k.queue("known", "UB", "int32", 1, src="S", dst="MTE2", depth=2)

    def program(self, turns: int, cores: int, last: int) -> isa.Program:
        """Return the program for `turns` ranks per core; core `last` reads the most counts."""
        k = self.k
        shape = self.shape
        core = k.param("core", last + 1)
        for turn in range(turns):
            rank = core + turn * cores
            self._add_up((turn * cores + last) * shape.experts)
            with repeat(k, f"expert{turn}", shape.experts) as expert:
                self.known.alloc()
                self._add_up(shape.ranks)
                self.known.enqueue()
                self.known.dequeue()
                # 2 ranks, 3 experts, runs of 5: the tokens of rank 1 for expert 0 go from 15 to 5.
                source = (rank * shape.experts + expert) * shape.run_tokens
                target = (expert * shape.ranks + rank) * shape.run_tokens
                self._move(f"tile{turn}", source, target, shape.run_tokens)
                self.known.free()
        if last == 0:
            # The totals of the experts lie in GM: for each count, the count and its sum are read.
            self._add_up(2 * shape.ranks * shape.experts)
        return k.finish()

    def remaining_program(self) -> isa.Program:
        """Return the program that moves the tokens that are left over."""
        # 23 tokens, 2 ranks, 3 experts: runs of 3, and 5 tokens are left over from token 18 on.
        first_token = Affine(self.shape.tokens - self.shape.remaining_tokens)
        self._move("tile", first_token, first_token, self.shape.remaining_tokens)
        return self.k.finish()

    def _add_up(self, count: int) -> None:
        """Read `count` numbers of GM, one access to L2 each; the program loads only the first."""
        if not count:  # there are no counts before the first rank
            return
        # Each number waits for its own access to L2.
        steps = count * l2_trip_steps(self.k.chip)
        self.k.scalar(self.count.region(0, 1), self.counts.region(0, 1), steps=steps)

    def _move(self, name: str, source: Affine, target: Affine, tokens: int) -> None:
        """Copy a run of tokens, and their scales."""
        k = self.k
        for at, tile_tokens in segments(k, name, tokens, self.tile):
            places = list(zip(self.pairs, self.widths, self.buffers, strict=True))
            slot = self.queue.alloc().slot
            for (source_tensor, _), width, buffer in places:
                in_tile = Tile(buffer, slot).region(0, tile_tokens * width)
                k.copy(
                    in_tile,
                    source_tensor.region((source + at) * width, in_tile.elements),
                    pad=_ragged(in_tile),
                )
            self.queue.enqueue()
            slot = self.queue.dequeue().slot
            for (_, target_tensor), width, buffer in places:
                in_tile = Tile(buffer, slot).region(0, tile_tokens * width)
                k.copy(
                    target_tensor.region((target + at) * width, in_tile.elements),
                    in_tile,
                    pad=_ragged(in_tile),
                )
            self.queue.free()


def _ragged(region: isa.Region) -> bool:
    """Tell whether a run of neighbours ends within a block of 32 bytes."""
    # 100 numbers in fp16 are 200 bytes, six blocks and a quarter.
    return region.elements * DTYPE_BYTES[region.buffer.dtype] % BLOCK_BYTES != 0

"""A conversion as a program: strided copies through UB, the boxes shared out over all cores.

The rule for ragged shapes. A chip whose copies need whole 32-byte blocks in UB gets, out of every
tile, the largest part that is whole blocks; the few elements left over go one by one through the
scalar unit. A chip with padding copies moves the ragged end like the rest. Padding of the target
is written from a tile of zeros in UB. The copies gather: they read short runs and write long ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.isa import Launch, Part, binding_of
from ascend_lab.layout.boxes import Box, Dim, copy_boxes, zero_boxes
from ascend_lab.layout.formats import c0_of
from ascend_lab.layout.maps import AddressMap, address_map
from ascend_lab.layout.writer import write_program


@dataclass(frozen=True, slots=True)
class Share:
    """A box cut over cores along its dim `along`: `per` steps each, the last core may have less.

    Cores are counted from the first one, or from the last if `backwards`, so that short jobs meet
    idle cores.
    """

    box: Box
    zero: bool
    along: int
    per: int
    backwards: bool

    def count_on(self, core: int, cores: int) -> int:
        """Return how many steps core `core` of `cores` takes."""
        left = self.box.dims[self.along].count - self.turn(core, cores) * self.per
        return max(min(left, self.per), 0)

    def turn(self, core: int, cores: int) -> int:
        """Return the place of a core in the order in which the box is dealt out."""
        return cores - 1 - core if self.backwards else core

    def box_of(self, count: int) -> Box:
        """Return the piece of a core that takes `count` steps, where the box begins."""
        dims = list(self.box.dims)
        dims[self.along] = replace(dims[self.along], count=count)
        return replace(self.box, dims=tuple(dims))


def conversion_launch(
    shape: Sequence[int], dtype: str, source: str, target: str, chip: Chip
) -> Launch:
    """Convert tensor `x` (layout `source`) into tensor `y` (layout `target`) on all vector cores.

    `shape` is the logical shape. Values equal `convert`, padding of `y` is zero. Raises
    `LayoutError`, and `CapacityError` where UB cannot hold a tile.
    """
    maps = address_map(source, shape, dtype), address_map(target, shape, dtype)
    return maps_launch(*maps, chip, f"{source}_to_{target}")


def maps_launch(source: AddressMap, target: AddressMap, chip: Chip, name: str) -> Launch:
    """Move every element of tensor `x` from its address in one map to that in another, in `y`."""
    maps = source, target
    cores = chip.core_count * chip.vector_cores_per_core
    jobs = [(box, False) for box in copy_boxes(*maps)]
    jobs += [(box, True) for box in zero_boxes(maps[1])]
    shares = [share(b, z, cores, c0_of(maps[0].dtype), i % 2 == 1) for i, (b, z) in enumerate(jobs)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in range(cores):
        work = tuple(s.count_on(core, cores) for s in shares)
        if any(work):
            groups.setdefault(work, []).append(core)
    return Launch(name, tuple(_part(name, chip, maps, shares, w, c) for w, c in groups.items()))


def share(box: Box, zero: bool, cores: int, c0: int, backwards: bool = False) -> Share:
    """Cut a box over cores along its longest counter, in steps that leave whole blocks."""
    sizes = [d.count for d in box.dims]
    inner = len(sizes) - 1
    along = max(range(len(sizes)), key=lambda i: (i != inner or len(sizes) == 1, sizes[i]))
    if sizes[along] < cores and sizes[inner] > 8 * c0 * cores:
        along = inner
    others = math.prod(sizes) // sizes[along]
    step = c0 // math.gcd(c0, others)
    per = -(-sizes[along] // cores)
    if step <= sizes[along]:
        per = -(-per // step) * step
    return Share(box, zero, along, per, backwards)


def _part(
    name: str,
    chip: Chip,
    maps: tuple[AddressMap, AddressMap],
    shares: Sequence[Share],
    work: tuple[int, ...],
    cores: Sequence[int],
) -> Part:
    """Return the program of the neighbouring cores that take the same `work`."""
    total = chip.core_count * chip.vector_cores_per_core
    pieces = []
    for job, count in zip(shares, work, strict=True):
        if count:
            dim = job.box.dims[job.along]
            box, start = job.box_of(count), job.turn(cores[0], total) * job.per
            target = box.target + start * dim.target
            box = replace(box, source=box.source + start * dim.source, target=target)
            each = Dim(-job.per if job.backwards else job.per, dim.source, dim.target)
            pieces.append((box, each, job.zero))
    sizes = (maps[0].elements, maps[1].elements)
    program = write_program(name, chip, maps[0].dtype, sizes, pieces, len(cores))
    return Part(program, tuple(binding_of({"core": i}) for i in range(len(cores))))

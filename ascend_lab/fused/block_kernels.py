"""Images whose blocks of channels are outermost, and kernels that find them there.

In NC1HWC0 the blocks of one image lie together; joined images lie between each other's blocks. In
C1NHWC0 a block of all images is one run, so that joins and cuts at whole blocks are views. Kernels
are written for the former, and only addresses in memory tell both apart. An address is a sum, its
terms those of loops and axes; of each the digits are known:

    (image, block, place in the plane)    n S + c B + i   ->   c N B + n B + i

As long as no digit reaches the next one the sum may be taken digit by digit. Lane by lane, and
plane by plane, kernels are right as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascend_lab.compiler.ir import BLOCKS, IMAGES, JOINS, MOVES, Node
from ascend_lab.compiler.layout import images_outermost
from ascend_lab.compiler.lower.piece import Lowered, Piece, maps_between
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip

Steps = tuple[tuple[int, int, int], ...]
"""Of every stored axis: elements from one to the next, how many, and elements where it is moved."""


def alike(node: Node) -> bool:
    """Tell whether a node does the same to every block of channels, in whatever order they lie."""
    return node.op in (*JOINS, *MOVES) or node.has("lanes", "image fold", "pooling")


def plain_piece(piece: Piece) -> Piece | None:
    """Return the piece for which a kernel of images with blocks outermost is written.

    None if the piece has no such images, or does the same to every block.
    """
    found = any(kind.layout == BLOCKS for kind in piece.graph.types.values())
    if not found or all(map(alike, piece.graph.nodes)):
        return None
    return replace(piece, graph=images_outermost(piece.graph))


def among_blocks(piece: Piece, plain: Piece, found: Lowered, chip: Chip) -> Lowered:
    """Return `found`, the kernel of the piece with `images_outermost`, for the piece itself.

    It addresses images where they are; where it cannot, they are converted, in phases before and
    after its own.
    """
    try:
        phases = [readdressed(piece, phase) for phase in found.kernel.phases]
    except UnsupportedError:
        phases = _converted(piece, plain, found.kernel, chip)
    return replace(found, kernel=replace(found.kernel, phases=tuple(phases)), near=None)


def _converted(piece: Piece, plain: Piece, kernel: isa.Kernel, chip: Chip) -> list[isa.Launch]:
    """Return the phases of a kernel, images in blocks converted before, results after."""
    names = [
        n for n in (*piece.graph.inputs, *piece.graph.outputs) if piece.type(n).layout == BLOCKS
    ]
    own = {n: f"images_{n}" for n in names}
    before = []
    after = []
    for name in names:
        maps = maps_between(piece.type(name), plain.type(name))
        if name in piece.graph.inputs:
            launch = layout.maps_launch(*maps, chip, "images")
            before.append(isa.renamed(launch, {"x": name, "y": own[name]}))
        else:
            launch = layout.maps_launch(*maps[::-1], chip, "blocks")
            after.append(isa.renamed(launch, {"x": own[name], "y": name}))
    return [*before, *(isa.renamed(phase, own) for phase in kernel.phases), *after]


def readdressed(piece: Piece, launch: isa.Launch) -> isa.Launch:
    """Return a launch for `images_outermost` that finds and leaves images as the piece has them.

    Only addresses in memory change. Raises `UnsupportedError` where a copy, or a loop, runs on from
    one plane to the next.
    """
    moved = dict[str, Steps]()
    for name, kind in piece.graph.types.items():
        if kind.layout == BLOCKS:
            moved[name] = _steps(replace(kind, layout=IMAGES).map, kind.map)

    def node(old: isa.Node, ranges: Mapping[str, int]) -> isa.Node:
        if isinstance(old, isa.Loop):
            inner = {**ranges, old.var: old.count}
            return replace(old, body=tuple([node(one, inner) for one in old.body]))
        for place, region in enumerate(old.regions):
            if region.space == "GM" and len(steps := moved.get(region.buffer.name, ())) > 1:
                old = _moved(old, place, steps, ranges)
        return old

    def part(old: isa.Part) -> isa.Part:
        ranges = dict(old.program.params)
        body = tuple([node(one, ranges) for one in old.program.body])
        return replace(old, program=replace(old.program, body=body))

    return replace(launch, parts=tuple(map(part, launch.parts)))


def _steps(one: layout.AddressMap, two: layout.AddressMap) -> Steps:
    """Return the stored axes of a map, joined where they stay together in another one."""
    strides = {(p.axis, p.step): p.stride for p in two.pieces}
    steps: list[tuple[int, int, int]] = []
    for p in one.pieces:
        there = strides[p.axis, p.step]
        if steps and (steps[-1][0], steps[-1][2]) == (p.stride * p.count, there * p.count):
            steps[-1] = (p.stride, steps[-1][1] * p.count, there)
        elif p.count > 1:
            steps.append((p.stride, p.count, there))
    return tuple(steps)


def _moved(
    old: isa.Instruction, place: int, steps: Steps, ranges: Mapping[str, int]
) -> isa.Instruction:
    """Return an instruction with one region elsewhere.

    An axis that runs over several planes is cut in two, in all its regions.
    """
    regions = list(old.regions)
    for axis in reversed(range(len(regions[place].sizes))):
        for plane, _, _ in reversed(steps):
            size = regions[place].sizes[axis]
            step = regions[place].strides[axis]
            inner = plane // step if step > 0 and plane % step == 0 else 1
            if 1 < inner < size and size % inner == 0:
                regions = [_cut(region, axis, inner) for region in regions]
    cut = len(regions[place].sizes) > len(old.regions[place].sizes)
    if (cut and old.op not in ("data_copy", "fixpipe")) or old.number("bound"):
        raise UnsupportedError("copies in one plane", str(old), "convert the image")
    regions[place] = _moved_region(regions[place], steps, ranges)
    dst = None if old.dst is None else regions.pop(0)
    return replace(old, dst=dst, srcs=tuple(regions))


def _cut(region: isa.Region, axis: int, inner: int) -> isa.Region:
    sizes = list(region.sizes)
    strides = list(region.strides)
    sizes[axis : axis + 1] = sizes[axis] // inner, inner
    strides[axis : axis + 1] = strides[axis] * inner, strides[axis]
    return replace(region, sizes=tuple(sizes), strides=tuple(strides))


def _moved_region(region: isa.Region, steps: Steps, ranges: Mapping[str, int]) -> isa.Region:
    """Return a region elsewhere: an address is a sum, its digits are those of what it adds up.

    That holds as long as no digit reaches the next axis. Of something that is added once at most
    the digits may be any: those of both places are known.
    """
    first = _digits(region.offset.const, steps)
    low = list(first)
    high = list(first)

    def there(digits: Sequence[int]) -> int:
        return sum(digit * stride for digit, (_, _, stride) in zip(digits, steps, strict=True))

    def added(value: int, times: int) -> int:
        digits = _digits(value, steps)
        if times == 1:
            second = _digits(region.offset.const + value, steps)
            digits = [after - before for before, after in zip(first, second, strict=True)]
        for i, digit in enumerate(digits):
            low[i] += min(digit, 0) * times
            high[i] += max(digit, 0) * times
        return there(digits)

    terms = tuple([(name, added(c, ranges[name] - 1)) for name, c in region.offset.terms])
    axes = zip(region.strides, region.sizes, strict=True)
    strides = tuple([added(stride, size - 1) for stride, size in axes])
    if min(low) < 0 or any(n >= count for n, (_, count, _) in zip(high, steps, strict=True)):
        raise UnsupportedError("copies in one plane", str(region), "convert the image")
    offset = isa.Affine(there(first), terms)
    return replace(region, offset=offset, strides=strides)


def _digits(value: int, steps: Steps) -> list[int]:
    """Return how many steps of each axis an address is made of."""
    digits = []
    for stride, _, _ in steps:
        digit, value = divmod(value, stride)
        digits.append(digit)
    return digits

"""Kernels for NC1HWC0 rewritten for C1NHWC0, where the channel blocks are outermost.

A block is 16 channels. Two images of two blocks (image.block) lie in memory as

    NC1HWC0    0.0  0.1  1.0  1.1        the blocks of one image are one run of bytes
    C1NHWC0    0.0  1.0  0.1  1.1        a block of all images is one run of bytes

    in NC1HWC0    concat(a, b) is a copy: b's blocks go between those of a, image by image
    in C1NHWC0    concat(a, b) is no work: b simply lies behind a in memory
    saved         reading and writing all operands of a concatenation (DenseNet has one per layer)

Kernels are written for NC1HWC0; in C1NHWC0 they differ only in their addresses. So this file takes
the finished kernel and changes its addresses. With B elements in a plane, C blocks and N images:

    n (C B) + c B + i    ->    c (N B) + n B + i        n: image, c: block, i: place in the plane

A kernel's address is a constant plus one term per loop or axis, a stride times the loop's counter.
Only the values of the strides are known, 200 for instance, and not what they stand for. Where
C B = 100 and B = 50, 200 is two images; where C B = 400 and B = 50, it is four blocks.
Each term is written in the mixed radix (n, c, i), and its digits are multiplied by the new strides.
That is right as long as sums of digits never carry: c stays below C and i below B whatever the
loops do.
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
"""For each stored axis (old stride, count, new stride), in elements, the outermost first.

Of 3 images of 2 blocks of 50 elements: (100, 3, 50), (50, 2, 150), (1, 50, 1).
"""


def treats_blocks_alike(node: Node) -> bool:
    """Tell whether a node treats all channel blocks alike, so that their order does not matter.

    A relu or a pooling does, so it works in either layout. A convolution sums over the blocks.
    """
    return node.op in (*JOINS, *MOVES) or node.has("lanes", "image fold", "pooling")


def in_nc1hwc0(piece: Piece) -> Piece | None:
    """Return the piece with its C1NHWC0 images in NC1HWC0, for which kernels are written.

    None if the piece has no such images, or treats all blocks alike.
    """
    has_block_images = any(
        tensor_type.layout == BLOCKS for tensor_type in piece.graph.types.values()
    )
    if not has_block_images or all(map(treats_blocks_alike, piece.graph.nodes)):
        return None
    return replace(piece, graph=images_outermost(piece.graph))


def rewritten_for_c1nhwc0(piece: Piece, plain: Piece, lowered: Lowered, chip: Chip) -> Lowered:
    """Return the kernel `lowered` of the piece in NC1HWC0 (`plain`), rewritten for the piece.

    Where addresses cannot be rewritten, further phases convert images before and after the kernel.
    """
    try:
        phases = [readdressed(piece, phase) for phase in lowered.kernel.phases]
    except UnsupportedError:
        phases = _converted(piece, plain, lowered.kernel, chip)
    return replace(lowered, kernel=replace(lowered.kernel, phases=tuple(phases)), near=None)


def _converted(piece: Piece, plain: Piece, kernel: isa.Kernel, chip: Chip) -> list[isa.Launch]:
    """Return launches that convert images to NC1HWC0, run the kernel, and convert results back."""
    names = [
        n for n in (*piece.graph.inputs, *piece.graph.outputs) if piece.type(n).layout == BLOCKS
    ]
    workspace_of = {n: f"images_{n}" for n in names}
    conversions_in = []
    conversions_out = []
    for name in names:
        maps = maps_between(piece.type(name), plain.type(name))
        if name in piece.graph.inputs:
            launch = layout.maps_launch(*maps, chip, "images")
            conversions_in.append(isa.renamed(launch, {"x": name, "y": workspace_of[name]}))
        else:
            # results go the other way: from NC1HWC0 in the workspace to where the piece wants them
            launch = layout.maps_launch(*maps[::-1], chip, "blocks")
            conversions_out.append(isa.renamed(launch, {"x": workspace_of[name], "y": name}))
    own_phases = [isa.renamed(phase, workspace_of) for phase in kernel.phases]
    return [*conversions_in, *own_phases, *conversions_out]


def readdressed(piece: Piece, launch: isa.Launch) -> isa.Launch:
    """Return a launch for NC1HWC0 that reads and writes the piece's C1NHWC0 images in place.

    Only addresses in GM change. Raises `UnsupportedError` where a copy or a loop runs on from one
    plane into the next: in C1NHWC0 the next plane lies elsewhere.
    """
    steps_of = dict[str, Steps]()
    for name, tensor_type in piece.graph.types.items():
        if tensor_type.layout == BLOCKS:
            steps_of[name] = _steps(replace(tensor_type, layout=IMAGES).map, tensor_type.map)

    def moved_node(original: isa.Node, ranges: Mapping[str, int]) -> isa.Node:
        if isinstance(original, isa.Loop):
            inner_ranges = {**ranges, original.var: original.count}
            body = tuple([moved_node(child, inner_ranges) for child in original.body])
            return replace(original, body=body)
        instruction = original
        for index, region in enumerate(original.regions):
            steps = steps_of.get(region.buffer.name, ())
            # with one step only (a single image, say) both layouts place the numbers alike
            if region.space == "GM" and len(steps) > 1:
                instruction = _instruction_at_new_addresses(instruction, index, steps, ranges)
        return instruction

    def moved_part(original: isa.Part) -> isa.Part:
        ranges = dict(original.program.params)
        body = tuple([moved_node(child, ranges) for child in original.program.body])
        return replace(original, program=replace(original.program, body=body))

    return replace(launch, parts=tuple(map(moved_part, launch.parts)))


def _steps(old_map: layout.AddressMap, new_map: layout.AddressMap) -> Steps:
    """Return the stored axes of `old_map` as (stride there, count, stride in `new_map`).

    Neighbouring axes that are contiguous in both maps become one: rows and columns of a plane, say.
    """
    strides = {(piece.axis, piece.step): piece.stride for piece in new_map.pieces}
    steps: list[tuple[int, int, int]] = []
    for piece in old_map.pieces:
        new_stride = strides[piece.axis, piece.step]
        spans = piece.stride * piece.count, new_stride * piece.count
        # the axis outside steps over exactly this axis, before and after the move
        if steps and (steps[-1][0], steps[-1][2]) == spans:
            steps[-1] = (piece.stride, steps[-1][1] * piece.count, new_stride)
        elif piece.count > 1:
            steps.append((piece.stride, piece.count, new_stride))
    return tuple(steps)


def _instruction_at_new_addresses(
    original: isa.Instruction, index: int, steps: Steps, ranges: Mapping[str, int]
) -> isa.Instruction:
    """Return an instruction whose region `index` lies at the new addresses.

    An axis of a copy that runs over several planes is cut in two, planes and places in a plane, in
    all regions of the instruction: 150 elements over planes of 50 become (3, 50).
    """
    regions = list(original.regions)
    for axis in reversed(range(len(regions[index].sizes))):
        # innermost steps first
        for old_stride, _, _ in reversed(steps):
            size = regions[index].sizes[axis]
            step = regions[index].strides[axis]
            # elements of the axis that fit one plane: 50 of 150, with a step of 1
            fits_plane = step > 0 and old_stride % step == 0
            elements_in_plane = old_stride // step if fits_plane else 1
            if 1 < elements_in_plane < size and size % elements_in_plane == 0:
                regions = [_cut(region, axis, elements_in_plane) for region in regions]
    # Only copies may have more axes. A copy with a "bound" picks its row at run time, so that
    # its address is not known here.
    cut = len(regions[index].sizes) > len(original.regions[index].sizes)
    if (cut and original.op not in ("data_copy", "fixpipe")) or original.int_attr("bound"):
        raise UnsupportedError("copies in one plane", str(original), "convert the image")
    regions[index] = _region_at_new_addresses(regions[index], steps, ranges)
    dst = None if original.dst is None else regions.pop(0)
    return replace(original, dst=dst, srcs=tuple(regions))


def _cut(region: isa.Region, axis: int, inner_size: int) -> isa.Region:
    """Return the same region with one axis split in two, the inner one of `inner_size` elements."""
    sizes = list(region.sizes)
    strides = list(region.strides)
    sizes[axis : axis + 1] = sizes[axis] // inner_size, inner_size
    # (150,) with stride 1 becomes (3, 50) with strides (50, 1)
    strides[axis : axis + 1] = strides[axis] * inner_size, strides[axis]
    return replace(region, sizes=tuple(sizes), strides=tuple(strides))


def _region_at_new_addresses(
    region: isa.Region, steps: Steps, ranges: Mapping[str, int]
) -> isa.Region:
    """Return a region at its new addresses; raise `UnsupportedError` where digits would carry.

    The digits of the constant and of each term are translated one by one. `low` and `high` hold the
    least and greatest digits that any sum of terms reaches: each must stay in 0 .. count - 1.
    """
    base_digits = _digits(region.offset.const, steps)
    low = list(base_digits)
    high = list(base_digits)

    def address(digits: Sequence[int]) -> int:
        return sum(digit * stride for digit, (_, _, stride) in zip(digits, steps, strict=True))

    def new_stride(value: int, times: int) -> int:
        """Return the new stride of a term that is added up to `times` times; widen low and high."""
        digits = _digits(value, steps)
        # A term that is added at most once (a loop of 2) gives two possible addresses. Both are
        # known, so the term's digits are their difference and may be negative.
        if times == 1:
            sum_digits = _digits(region.offset.const + value, steps)
            digits = [total - base for base, total in zip(base_digits, sum_digits, strict=True)]
        for i, digit in enumerate(digits):
            low[i] += min(digit, 0) * times
            high[i] += max(digit, 0) * times
        return address(digits)

    # a loop of 4 adds its term 0 to 3 times
    terms = tuple([(name, new_stride(c, ranges[name] - 1)) for name, c in region.offset.terms])
    axes = zip(region.strides, region.sizes, strict=True)
    strides = tuple([new_stride(stride, size - 1) for stride, size in axes])
    if min(low) < 0 or any(n >= count for n, (_, count, _) in zip(high, steps, strict=True)):
        raise UnsupportedError("copies in one plane", str(region), "convert the image")
    offset = isa.Affine(address(base_digits), terms)
    return replace(region, offset=offset, strides=strides)


def _digits(value: int, steps: Steps) -> list[int]:
    """Return an address as digits, one per axis: 230 is 2 x 100 + 0 x 50 + 30 x 1."""
    digits = []
    remainder = value
    for stride, _, _ in steps:
        digit, remainder = divmod(remainder, stride)
        digits.append(digit)
    return digits

"""A piece of a graph that becomes one kernel, the kernel, and how a tuner may choose it.

Names inside a piece are canonical (x0, x1, ... read; y0, ... written; v0, ... between), so that
equal pieces, such as the repeated blocks of a residual network, print the same text and are lowered
once.

An operand that broadcasts along an axis has one element there, so that in a layout, which cuts
every axis into pieces, all its pieces of that axis have length 1: NumPy's rule holds for the stored
shapes as it does for the logical ones, and elementwise work needs no other.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ascend_lab import errors, isa, kernels, layout, sim
from ascend_lab.chip import Chip
from ascend_lab.graph.ir import Graph, Node, TensorType, Values, to_text
from ascend_lab.isa.program import index_of

Form = Callable[[Values], Values]
"""From the logical array of a constant to the flat array that lies in device memory."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A small graph, which of its inputs are constants, and what its names are in the network.

    Pieces are equal if their keys are, whatever they are called in a network.
    """

    graph: Graph
    constants: frozenset[str]
    names: Mapping[str, str]

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal pieces."""
        return to_text(self.graph) + " ".join(sorted(self.constants))

    def __eq__(self, other: object) -> bool:
        """Tell whether both become the same kernel."""
        return isinstance(other, Piece) and self.key == other.key

    def __hash__(self) -> int:
        """Return the hash of the key."""
        return hash(self.key)

    @property
    def output(self) -> TensorType:
        """Type of the last tensor written."""
        return self.graph.types[self.graph.outputs[-1]]

    def type(self, name: str) -> TensorType:
        """Return the type of a canonical name."""
        return self.graph.types[name]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The kernel of a piece: GM tensors bear canonical names.

    `forms` says how constants are stored where that is not their type's layout; `extra` are small
    tensors of the kernel's own; `tiling` is a product's, or one of stacked tiles.
    """

    kernel: isa.Kernel
    forms: Mapping[str, Form] = field(default_factory=dict)
    extra: Mapping[str, Values] = field(default_factory=dict)
    tiling: kernels.GemmSchedule | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a tuner decides: a tiling of the cube's kernel, or the steps of a schedule in JSON."""

    tiling: kernels.GemmSchedule | None = None
    steps: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        if self.tiling is not None:
            return {"tiling": self.tiling.as_dict()}
        return {"steps": json.loads(self.steps)["steps"]}


def choice_of(data: Mapping[str, Any], chip_name: str) -> Choice:
    """Return the choice that `Choice.as_dict` wrote; raise `InputError` for anything else."""
    try:
        if "tiling" in data:
            return Choice(tiling=kernels.GemmSchedule(**data["tiling"]))
        return Choice(steps=json.dumps({"chip": chip_name, "steps": data["steps"]}))
    except (KeyError, TypeError) as error:
        raise errors.InputError(
            "a tiling or the steps of a schedule", str(data)[:80], "tune it again"
        ) from error


def read_outside(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """Return what nodes write that other nodes, or the graph's outputs, need."""
    inside = {node.name for node in nodes}
    return [
        name
        for node in nodes
        for name in node.outputs
        if name in graph.outputs or any(r.name not in inside for r in graph.readers[name])
    ]


def piece_of(graph: Graph, nodes: Sequence[Node]) -> Piece:
    """Return the nodes, given in order, as a piece; it writes what is read outside."""
    written = [name for node in nodes for name in node.outputs]
    leaves = read_outside(graph, nodes)
    reads = [n for node in nodes for n in node.inputs if n not in written]
    names = {old: f"x{i}" for i, old in enumerate(dict.fromkeys(reads))}
    constants = frozenset(new for old, new in names.items() if old in graph.constants)
    inputs = tuple(names.values())
    for old in written:
        names[old] = f"y{leaves.index(old)}" if old in leaves else f"v{len(names)}"
    canonical = tuple(
        replace(
            node,
            name=f"n{i}",
            inputs=tuple(names[n] for n in node.inputs),
            outputs=tuple(names[n] for n in node.outputs),
        )
        for i, node in enumerate(nodes)
    )
    types = {new: graph.types[old] for old, new in names.items()}
    small = Graph("piece", inputs, tuple(names[n] for n in leaves), canonical, types)
    return Piece(small, constants, {new: old for old, new in names.items()})


def near_memory(kernel: isa.Kernel, piece: Piece, chip: Chip) -> sim.DeviceMemory:
    """Return L2 with what other kernels wrote for this one; no tensor fills half of it."""
    written = {*piece.graph.inputs} - piece.constants
    near = [b for b in kernel.tensors if 2 * b.size_bytes <= chip.l2.size_bytes]
    return sim.DeviceMemory.holding(chip, near, written)


def maps_between(one: TensorType, two: TensorType) -> tuple[layout.AddressMap, layout.AddressMap]:
    """Return the maps of two layouts of one tensor, as of plain arrays.

    Here an axis is known by its place: channels of an image may be a batch of matrices.
    """
    return replace(one.map, format="ND"), replace(two.map, format="ND")


def packed(kind: TensorType, array: Values) -> Values:
    """Return a logical array as it lies in memory, flat."""
    stored = np.ascontiguousarray(array) if kind.layout == "ND" else layout.pack(kind.map, array)
    return stored.reshape(-1)


def beside(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of an operand of logical `shape` beside a tensor of type `main`."""
    sizes = _aligned(shape, main)
    return tuple(p.count if sizes[p.axis] == main.shape[p.axis] else 1 for p in main.map.pieces)


def pack_beside(array: Values, main: TensorType) -> Values:
    """Return an operand's elements in the order of `beside`, flat; padding is zero."""
    sizes = _aligned(array.shape, main)
    pads, split, place = [], [], []
    for axis, size in enumerate(sizes):
        own = main.map.of_axis(axis)
        counts = [p.count if size == main.shape[axis] else 1 for p in own]
        pads.append((0, int(np.prod(counts)) - size))
        place += [main.map.pieces.index(p) for p in own]
        split += counts
    cut = np.pad(array.reshape(sizes), pads).reshape(split)
    return np.ascontiguousarray(cut.transpose(np.argsort(place))).reshape(-1)


def _aligned(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    return (1,) * (len(main.shape) - len(shape)) + tuple(shape)


# -- images whose blocks of channels are outermost -------------------------------------------------
IMAGES, BLOCKS = "NC1HWC0", "C1NHWC0"
Steps = tuple[tuple[int, int, int], ...]
"""Of every stored axis: elements from one to the next, how many, and elements where it is moved."""


def images_outermost(graph: Graph) -> Graph:
    """Return a graph in which no image has its blocks of channels outermost."""
    types = {
        name: replace(kind, layout=IMAGES) if kind.layout == BLOCKS else kind
        for name, kind in graph.types.items()
    }
    nodes = tuple(
        replace(node, attrs={"layout": IMAGES}) if node.attr("layout") == BLOCKS else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, types=types)


def among_blocks(piece: Piece, plain: Piece, found: Lowered, chip: Chip) -> Lowered:
    """Return `found`, the kernel of the piece with `images_outermost`, for the piece itself.

    It addresses images where they are; where it cannot, they are converted, in phases before and
    after its own.
    """
    try:
        phases = [blocks_outermost(piece, phase) for phase in found.kernel.phases]
    except errors.UnsupportedError:
        phases = _converted(piece, plain, found.kernel, chip)
    return replace(found, kernel=replace(found.kernel, phases=tuple(phases)))


def _converted(piece: Piece, plain: Piece, kernel: isa.Kernel, chip: Chip) -> list[isa.Launch]:
    """Return the phases of a kernel, images in blocks converted before, results after."""
    names = [
        n for n in (*piece.graph.inputs, *piece.graph.outputs) if piece.type(n).layout == BLOCKS
    ]
    own, before, after = {n: f"images_{n}" for n in names}, [], []
    for name in names:
        maps = maps_between(piece.type(name), plain.type(name))
        if name in piece.graph.inputs:
            launch = layout.maps_launch(*maps, chip, "images")
            before.append(isa.renamed(launch, {"x": name, "y": own[name]}))
        else:
            launch = layout.maps_launch(*maps[::-1], chip, "blocks")
            after.append(isa.renamed(launch, {"x": own[name], "y": name}))
    return [*before, *(isa.renamed(phase, own) for phase in kernel.phases), *after]


def blocks_outermost(piece: Piece, launch: isa.Launch) -> isa.Launch:
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
            size, step = regions[place].sizes[axis], regions[place].strides[axis]
            inner = plane // step if step > 0 and plane % step == 0 else 1
            if 1 < inner < size and size % inner == 0:
                regions = [_cut(region, axis, inner) for region in regions]
    cut = len(regions[place].sizes) > len(old.regions[place].sizes)
    if (cut and old.op not in ("data_copy", "fixpipe")) or index_of(old):
        raise errors.UnsupportedError("copies in one plane", str(old), "convert the image")
    regions[place] = _moved_region(regions[place], steps, ranges)
    dst = None if old.dst is None else regions.pop(0)
    return replace(old, dst=dst, srcs=tuple(regions))


def _cut(region: isa.Region, axis: int, inner: int) -> isa.Region:
    sizes, strides = list(region.sizes), list(region.strides)
    sizes[axis : axis + 1] = sizes[axis] // inner, inner
    strides[axis : axis + 1] = strides[axis] * inner, strides[axis]
    return replace(region, sizes=tuple(sizes), strides=tuple(strides))


def _moved_region(region: isa.Region, steps: Steps, ranges: Mapping[str, int]) -> isa.Region:
    """Return a region elsewhere: an address is a sum, its digits are those of what it adds up.

    That holds as long as no digit reaches the next axis. Of something that is added once at most
    the digits may be any: those of both places are known.
    """
    first = _digits(region.offset.const, steps)
    low, high = list(first), list(first)

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
        raise errors.UnsupportedError("copies in one plane", str(region), "convert the image")
    offset = isa.Affine(there(first), terms)
    return replace(region, offset=offset, strides=strides)


def _digits(value: int, steps: Steps) -> list[int]:
    """Return how many steps of each axis an address is made of."""
    digits = []
    for stride, _, _ in steps:
        digit, value = divmod(value, stride)
        digits.append(digit)
    return digits

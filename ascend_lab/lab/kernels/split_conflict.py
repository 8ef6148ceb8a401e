"""Operators in a row in one kernel: what the second wants to own decides what may stay on chip.

The worked case is reduce, transpose, scatter, which split over cores along different axes:

    h[p, c] = max over g of x[p, g, c],    u = h transposed,    y[index[c], :] = u[c, :]

Alone, the reduction deals out points, the transpose channels (the rows it writes), the scatter
points again: no core knows which rows the others' indices name, so each owns a piece of every row.
So each hands over through device memory. One split along the points suits all three; then every
piece stays on its core. `common_split` finds such splits: from an axis of the last result backwards
through slice rules.
Source: practitioner's article on operator fusion on many-core chips.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, Node, rules_of
from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.l2 import ALIGN_BYTES, L2
from ascend_lab.operators import ops
from ascend_lab.operators.kernels import elementwise_launch, indexed_rows, transpose

Values = np.ndarray
BLOCK = 16
HALF = 8
AREA = 256
"""Side of a block, the points of it that one repeat of 256 bytes covers, its elements."""
CHANNELS = 64
"""Channels of a tile: loads have runs of 128 bytes, and points enough fit for long stores."""
TILES = 2
"""Tiles a core should have at least, so that loads and stores overlap; more make short rows."""


# -- one split for several operators ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Agreement:
    """What comes of every axis of the last output: a split, or the reason why there is none.

    A split is the cut axis of every tensor it names; others are read whole.
    """

    splits: Mapping[int, Mapping[str, int]]
    refusals: Mapping[int, str]

    def __str__(self) -> str:
        """Return a line per axis."""
        lines = {a: f"no: {why}" for a, why in self.refusals.items()}
        for a, split in self.splits.items():
            lines[a] = f"cut {', '.join(f'{name} along axis {n}' for name, n in split.items())}"
        return "\n".join(f"axis {a}: {lines[a]}" for a in sorted(lines))


def common_split(graph: Graph, nodes: Sequence[Node]) -> Agreement:
    """Return along which axes of the last node's output all `nodes`, in order, may be cut.

    Every core is to keep its pieces from the first operator to the last. Pieces that overlap
    (halos) or come in grains are refused: a core would compute some of its neighbour's.
    """
    rank = len(graph.types[nodes[-1].output].shape)
    found = {axis: _axes(graph, nodes, axis) for axis in range(rank)}
    splits = {axis: cut for axis, cut in found.items() if not isinstance(cut, str)}
    return Agreement(splits, {axis: why for axis, why in found.items() if isinstance(why, str)})


def _axes(graph: Graph, nodes: Sequence[Node], axis: int) -> dict[str, int] | str:
    """Return the cut axis of every tensor, or why `axis` of the last output cannot be cut."""
    made = {name for node in nodes for name in node.outputs}
    wanted = {nodes[-1].output: axis}
    for node in reversed(nodes):
        if not any(name in wanted for name in node.outputs):
            continue
        rule = _free_rule(graph, node, wanted)
        if isinstance(rule, str):
            return rule
        for index, name in enumerate(node.inputs):
            axes = {s.axis for s in rule.sources if s.input == index}
            if not axes and name in made:
                return f"{node.name} ({node.op}): every piece needs all of {name}"
            for own in axes:
                if wanted.setdefault(name, own) != own:
                    return f"{name} is wanted along axis {wanted[name]} and along axis {own}"
    return wanted


def _free_rule(graph: Graph, node: Node, wanted: Mapping[str, int]) -> ops.AxisRule | str:
    """Return the rule of the axis that readers want a node cut along, or why it cannot be."""
    rules = rules_of(graph, node)
    found = [
        rule
        for number, name in enumerate(node.outputs)
        for rule in rules.axes
        if name in wanted and rule.joins[number] == wanted[name]
    ]
    rule = found[0]
    place = f"{node.name} ({node.op}): axis {rule.axis}"
    if any(r is not rule for r in found):
        return f"{place} for one reader, axis {found[-1].axis} for another"
    if graph.types[node.output].shape[rule.axis] == 1:
        return f"{place} has one element"
    if not rule.splits:
        return f"{place} does not split: {rule.reason or rule.kind}"
    plain = all(s.window == ops.Window() and s.grain == 1 for s in rule.sources)
    if rule.kind != "free" or rule.grain != 1 or not plain:
        return f"{place} splits, but pieces overlap or come in grains"
    return rule


def relu_transpose_kernel(chip: Chip, shape: Sequence[int], dtype: str, split: str) -> isa.Kernel:
    """y[b] = relu(x[b]).T for x (B, M, N): tensors x and y, and h between two phases.

    `split` "outer": each core owns whole matrices, both operators run on its tiles in UB. "moved":
    each core owns rows of x for the ReLU and rows of y afterwards, so everything passes through the
    GM tensor h and all cores wait for each other; B * M * N must then be whole vector repeats per
    core.
    """
    perm = (0, 2, 1)
    elements = math.prod(shape)
    if split == "outer":
        launch = transpose.block_launch(
            chip, dtype, transpose.permutation(shape, perm), elements, elements, relu=True
        )
        return isa.Kernel("relu_transpose", (launch,))
    most = 1 << (chip.buffers["UB"] // (4 * layout.item_bytes(dtype))).bit_length() - 1
    tile = math.gcd(elements // chip.cores_of("vector"), most)
    relu = elementwise_launch(chip, elements, op="vrelu", tile=tile, dtype=dtype)
    turn = transpose.transpose_launch(chip, shape, perm, dtype)
    phases = isa.renamed(relu, {"x1": "x", "y": "h"}), isa.renamed(turn, {"x": "h"})
    return isa.Kernel("relu_transpose", phases)


# -- the fused kernel: maximum, transpose and scatter ----------------------------------------------
@dataclass(frozen=True, slots=True)
class Points:
    """The sizes: x is (points, group, channels), y (rows, points); fp16 in blocks of 16 x 16."""

    points: int
    group: int
    channels: int
    rows: int


def turn_scatter_launch(chip: Chip, sizes: Points) -> isa.Launch:
    """Return the kernel y[index[c], p] = max over g of x[p, g, c]: tensors x, index, y; fp16.

    x is (points, group, channels), y (rows, points), both row-major, index has an int32 per
    channel. A core owns points all the way: it loads a tile of them, some channels at a time, V
    takes the maximum over the group and leaves it in blocks of 16 x 16, turns the blocks, and MTE3
    stores each channel's points in the row of y that its index names. Rows of y that no index names
    stay as they are; of equal indices the last channel wins. Raises `CapacityError` if 16 points do
    not fit UB.
    """
    units = sizes.points // BLOCK
    per = -(-units // chip.cores_of("vector"))
    shares = [min(per, units - start) for start in range(0, units, per)]
    grid = {"core": shares}
    return isa.spread("turn_scatter", grid, lambda own: _Writer(chip, sizes, own).program())


def tile_units(chip: Chip, sizes: Points, own: int) -> int:
    """Return how many times 16 points a tile of a core with `own` such units has."""
    channels = min(CHANNELS, sizes.channels)
    per_unit = 2 * BLOCK * channels * (2 * sizes.group + 3)
    most = (chip.buffers["UB"] - 4 * sizes.channels) // per_unit
    if most < 1:
        needed = f"{per_unit} bytes of UB for {BLOCK} points"
        got = f"{chip.buffers['UB']} on {chip.name}"
        raise CapacityError(needed, got, "use smaller groups or fewer channels")
    across = -(-sizes.channels // channels)
    return min(most, max(own // -(-TILES // across), 1), chip.max_repeat // 2)


class _Writer:
    """The program of cores that own equally many units of 16 points."""

    def __init__(self, chip: Chip, sizes: Points, own: isa.Share) -> None:
        k = self.k = isa.KernelBuilder("turn_scatter", chip)
        self.sizes = sizes
        self.own = own[0]
        self.units = tile_units(chip, sizes, own[0])
        self.start = k.param("core", own[2]) * (own[1] * BLOCK)
        points = self.units * BLOCK
        most = min(CHANNELS, sizes.channels)
        self.x = k.tensor("x", "fp16", sizes.points * sizes.group * sizes.channels)
        index = k.tensor("index", "int32", sizes.channels)
        self.y = k.tensor("y", "fp16", sizes.rows * sizes.points)
        # all indices at once: MTE2 would wait with a second batch for the stores of the first
        self.feed = indexed_rows.IndexFeed.make(k, index, "MTE3", most=sizes.channels)
        tile = points * sizes.group * most
        self.load = k.queue("tile", "UB", "fp16", tile, src="MTE2", dst="V")
        self.most = k.buffer("most", "UB", "fp16", points * most)
        self.store = k.queue("turned", "UB", "fp16", points * most, src="V", dst="MTE3")

    def program(self) -> isa.Program:
        """Walk the channels, and the points in tiles of as many units as fit."""
        count, rest = divmod(self.own, self.units)
        self.feed.open(0, self.sizes.channels)
        for low in range(0, self.sizes.channels, CHANNELS):
            channels = low, min(CHANNELS, self.sizes.channels - low)
            with self.k.loop(f"i{low}", count) as i:
                at = self.start + i * (self.units * BLOCK)
                self._move(at, self.units, channels, f"a{low}")
            if rest:
                at = self.start + count * self.units * BLOCK
                self._move(at, rest, channels, f"b{low}")
        self.feed.close()
        return self.k.finish()

    def _move(self, at: isa.Affine, units: int, channels: tuple[int, int], name: str) -> None:
        """Load a tile of points and channels (first, count), reduce, turn and store it."""
        k = self.k
        group = self.sizes.group
        pitch = self.sizes.channels
        (low, wide) = channels
        start = at * (group * pitch) + low
        shape = (units * BLOCK * group, wide)
        source = self.x.region(start, shape, (pitch, 1))
        k.copy(self.load.alloc().region(0, source.sizes), source)
        self.load.enqueue()
        self._reduce(self.load.dequeue(), units, wide)
        self.load.free()
        turned = self.store.alloc()
        side = (BLOCK, BLOCK)
        with k.loop(f"{name}_block", wide // BLOCK * units) as j:
            k.vector("vtranspose", turned.region(j * AREA, side), self.most.region(j * AREA, side))
        self.store.enqueue()
        turned = self.store.dequeue()
        for block in range(wide // BLOCK):
            with k.loop(f"{name}_row{block}", BLOCK) as r:
                place = r * BLOCK + block * units * AREA
                row = turned.region(place, (units, BLOCK), (AREA, 1))
                target = self.y.region(at, (units, BLOCK))
                pick = self.feed.index_region(r + (low + block * BLOCK))
                k.copy_row(target, row, pick, self.sizes.points, self.sizes.rows)
        self.store.free()

    def _reduce(self, loaded: isa.Tile, units: int, wide: int) -> None:
        """Leave the maximum over the group as blocks (channel block, point block, 16, 16)."""
        group = self.sizes.group
        shape = (2 * units, HALF, BLOCK)
        steps = (HALF * group * wide, group * wide, 1)
        for block in range(wide // BLOCK):
            out = self.most.region(block * units * AREA, shape)
            parts = [loaded.region(g * wide + block * BLOCK, shape, steps) for g in range(group)]
            self.k.vector("vmax", out, parts[0], parts[min(1, group - 1)])
            for part in parts[2:]:
                self.k.vector("vmax", out, out, part)


# -- the case -------------------------------------------------------------------------------------
def case_graph(sizes: Points) -> Graph:
    """Return the three operators as a graph; `table` is y before the scatter."""
    net = GraphBuilder("split_conflict", "fp16")
    x = net.input("x", (sizes.points, sizes.group, sizes.channels))
    table = net.input("table", (sizes.rows, sizes.points))
    index = net.input("index", (sizes.channels,), "int32")
    h = net.reduce_max(x, axis=1, name="h")
    u = net.transpose(h, perm=(1, 0), name="u")
    net.output(net.scatter_update(table, index, u, name="y"))
    return net.build()


def apart_kernels(sizes: Points, chip: Chip) -> tuple[isa.Kernel, ...]:
    """Return the library's kernels, each with its own split; tensors x, h, u, index, y."""
    kernels = []
    written = {"h": "y", "u": "y"}
    graph = case_graph(sizes)
    for node in graph.nodes:
        types = graph.in_types(node)
        shapes = [t.shape for t in types]
        dtypes = [t.dtype for t in types]
        kernel = ops.compile(node.op, shapes, dtypes, chip, **node.attrs)
        names = {"x": node.inputs[0], written.get(node.output, ""): node.output}
        phases = tuple(isa.renamed(phase, names) for phase in kernel.phases)
        kernels.append(isa.Kernel(node.op, phases))
    return tuple(kernels)


def in_one_launch(kernels: Sequence[isa.Kernel]) -> isa.Kernel:
    """Return kernels as the phases of one: launched once, all cores wait between them."""
    return isa.Kernel("phases", tuple(phase for kernel in kernels for phase in kernel.phases))


def fused_kernel(sizes: Points, chip: Chip) -> isa.Kernel:
    """Return the kernel with one split along the points; tensors x, index, y."""
    return isa.as_kernel(turn_scatter_launch(chip, sizes))


@dataclass(frozen=True, slots=True)
class Cost:
    """What kernels in a row cost: cycles on the device, launches; bytes moved to and from cores."""

    cycles: int
    launch_cycles: int
    core_bytes: int
    memory_bytes: int

    @property
    def total_cycles(self) -> int:
        """Cycles with launches."""
        return self.cycles + self.launch_cycles


def cost(kernels: Sequence[isa.Kernel], chip: Chip) -> Cost:
    """Return what kernels cost one after the other; L2, empty at first, keeps what they leave."""
    l2 = L2.of(chip)
    places = {}
    top = 0
    for buffer in (b for kernel in kernels for b in kernel.tensors):
        if buffer.name not in places:
            places[buffer.name] = (top, buffer.size_bytes)
            top += -(-buffer.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    runs = []
    for kernel in kernels:
        own = {b.name: places[b.name] for b in kernel.tensors}
        runs.append(sim.simulate_kernel(kernel, chip, sim.DeviceMemory(l2, own)))
    return Cost(
        sum(run.cycles for run in runs),
        sum(run.launch_cycles for run in runs),
        sum(sum(run.path_bytes.values()) for run in runs),
        sum(run.memory_bytes for run in runs) + l2.flush(),
    )


def owners(
    kernel: isa.Kernel, tensors: Mapping[str, Values], name: str, like: Values, chip: Chip
) -> np.ndarray:
    """Return which core writes each element of tensor `name`, shaped as `like`; -1: none."""
    found = np.full(like.shape, -1)
    core = 0
    for launch in kernel.phases:
        for part in launch.parts:
            for binding in part.bindings:
                alone = isa.Launch(launch.name, (isa.Part(part.program, (binding,)),))
                before = {**tensors, name: np.full(like.size, np.nan, like.dtype)}
                after = sim.execute(alone, before, chip)[name].reshape(like.shape)
                found[~np.isnan(after)] = core
                core += 1
    return found


def owner_maps(sizes: Points, chip: Chip) -> dict[str, np.ndarray]:
    """Return which core makes every number on the way: arrays (points, channels) of core numbers.

    Keys: h, u and y of the kernels apart, and "fused". Channel c goes to row c of y.
    """
    shape = sizes.points, sizes.group, sizes.channels
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    h = x.max(axis=1)
    u = np.ascontiguousarray(h.T)
    index = np.arange(sizes.channels, dtype=np.int32)
    y = np.zeros((sizes.rows, sizes.points), np.float16)
    reads = ({"x": x}, {"h": h}, {"u": u, "index": index})
    found = {
        name: owners(kernel, given, name, like, chip)
        for kernel, given, name, like in zip(
            apart_kernels(sizes, chip), reads, "huy", (h, u, y), strict=True
        )
    }
    fused = owners(fused_kernel(sizes, chip), {"x": x, "index": index}, "y", y, chip)
    turned = {"u": found["u"].T, "y": found["y"][index].T, "fused": fused[index].T}
    return {"h": found["h"], **turned}

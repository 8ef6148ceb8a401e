"""Fuses operators that, alone, would divide their work over the cores along different axes.

The worked case is reduce, transpose, scatter:

    h[p, c] = max over g of x[p, g, c],    u = h transposed,    y[index[c], :] = u[c, :]

Alone, the reduction gives each core some points p, and the transpose some channels c, the rows it
writes. The scatter gives each core some points again: no core knows which rows the others' indices
name, so each has a piece of every row. Between operators that divide differently, all data passes
through device memory. One split along the points suits all three; then every piece stays on its
core. `common_split` finds such splits: it goes backwards from an axis of the last result through
the rules of the operators. Source: practitioner's article on operator fusion on many-core chips.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, Node
from ascend_lab.compiler.ir import rules_of
from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.l2 import ALIGN_BYTES, L2
from ascend_lab.operators import ops
from ascend_lab.operators.kernels import elementwise_launch, indexed_rows, transpose

Values = np.ndarray
BLOCK = 16
"""Side of a block that V transposes."""
HALF = 8
"""Points of a block that one repeat of 256 bytes covers."""
AREA = 256
"""Elements of a block."""
CHANNELS = 64
"""Channels of a tile: loads have runs of 128 bytes, and enough points fit for long stores."""
TILES = 2
"""Tiles a core should have at least, so that loads and stores overlap; more make short rows."""


# -- one split for several operators ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Agreement:
    """For every axis of the last output a split, or the reason why there is none.

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
    outcomes = {axis: _axes(graph, nodes, axis) for axis in range(rank)}
    splits = {axis: cut for axis, cut in outcomes.items() if not isinstance(cut, str)}
    return Agreement(splits, {axis: why for axis, why in outcomes.items() if isinstance(why, str)})


def _axes(graph: Graph, nodes: Sequence[Node], axis: int) -> dict[str, int] | str:
    """Return the cut axis of every tensor, or why `axis` of the last output cannot be cut."""
    made_inside = {name for node in nodes for name in node.outputs}
    cut_axes = {nodes[-1].output: axis}
    for node in reversed(nodes):
        if not any(name in cut_axes for name in node.outputs):
            continue
        rule = _free_rule(graph, node, cut_axes)
        if isinstance(rule, str):
            return rule
        for index, name in enumerate(node.inputs):
            axes = {s.axis for s in rule.sources if s.input == index}
            if not axes and name in made_inside:
                return f"{node.name} ({node.op}): every piece needs all of {name}"
            for input_axis in axes:
                if cut_axes.setdefault(name, input_axis) != input_axis:
                    both_axes = f"along axis {cut_axes[name]} and along axis {input_axis}"
                    return f"{name} is wanted {both_axes}"
    return cut_axes


def _free_rule(graph: Graph, node: Node, cut_axes: Mapping[str, int]) -> ops.AxisRule | str:
    """Return the rule of the axis that readers want a node cut along, or why it cannot be."""
    rules = rules_of(graph, node)
    matching_rules = [
        rule
        for number, name in enumerate(node.outputs)
        for rule in rules.axes
        if name in cut_axes and rule.joins[number] == cut_axes[name]
    ]
    rule = matching_rules[0]
    place = f"{node.name} ({node.op}): axis {rule.axis}"
    if any(r is not rule for r in matching_rules):
        return f"{place} for one reader, axis {matching_rules[-1].axis} for another"
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
    max_elements = 1 << (chip.buffers["UB"] // (4 * layout.item_bytes(dtype))).bit_length() - 1
    tile = math.gcd(elements // chip.cores_of("vector"), max_elements)
    relu = elementwise_launch(chip, elements, op="vrelu", tile=tile, dtype=dtype)
    transposing = transpose.transpose_launch(chip, shape, perm, dtype)
    phases = isa.renamed(relu, {"x1": "x", "y": "h"}), isa.renamed(transposing, {"x": "h"})
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
    channel. A core has the same points from load to store: it loads a tile of them, some channels
    at a time; V writes the maximum over the group in blocks of 16 x 16 and transposes the blocks;
    MTE3 stores each channel's points in the row of y that its index names. Rows that no index names
    stay as they are; of equal indices the last channel wins. Raises `CapacityError` if 16 points do
    not fit UB.
    """
    units = sizes.points // BLOCK
    units_per_core = -(-units // chip.cores_of("vector"))
    shares = [min(units_per_core, units - start) for start in range(0, units, units_per_core)]
    grid = {"core": shares}
    return isa.spread("turn_scatter", grid, lambda share: _Writer(chip, sizes, share).program())


def tile_units(chip: Chip, sizes: Points, core_units: int) -> int:
    """Return the units (of 16 points) in a tile of a core that has `core_units` of them."""
    channels = min(CHANNELS, sizes.channels)
    per_unit = 2 * BLOCK * channels * (2 * sizes.group + 3)
    max_units = (chip.buffers["UB"] - 4 * sizes.channels) // per_unit
    if max_units < 1:
        needed = f"{per_unit} bytes of UB for {BLOCK} points"
        got = f"{chip.buffers['UB']} on {chip.name}"
        raise CapacityError(needed, got, "use smaller groups or fewer channels")
    across = -(-sizes.channels // channels)
    return min(max_units, max(core_units // -(-TILES // across), 1), chip.max_repeat // 2)


class _Writer:
    """The program of cores with equally many units of 16 points.

    `units` is how many of them a tile has, and `start` the core's first point.
    """

    def __init__(self, chip: Chip, sizes: Points, share: isa.Share) -> None:
        k = isa.KernelBuilder("turn_scatter", chip)
        self.k = k
        self.sizes = sizes
        self.core_units = share[0]
        self.units = tile_units(chip, sizes, share[0])
        self.start = k.param("core", share[2]) * (share[1] * BLOCK)
        points = self.units * BLOCK
        tile_channels = min(CHANNELS, sizes.channels)
        self.x = k.tensor("x", "fp16", sizes.points * sizes.group * sizes.channels)
        index = k.tensor("index", "int32", sizes.channels)
        self.y = k.tensor("y", "fp16", sizes.rows * sizes.points)
        # all indices at once: MTE2 would wait with a second batch for the stores of the first
        self.feed = indexed_rows.IndexFeed.make(k, index, "MTE3", most=sizes.channels)
        tile = points * sizes.group * tile_channels
        self.load = k.queue("tile", "UB", "fp16", tile, src="MTE2", dst="V")
        self.maxima = k.buffer("most", "UB", "fp16", points * tile_channels)
        self.store = k.queue("turned", "UB", "fp16", points * tile_channels, src="V", dst="MTE3")

    def program(self) -> isa.Program:
        """Go through the channels, and for each through the points, in tiles that fit."""
        count, last_units = divmod(self.core_units, self.units)
        self.feed.open(0, self.sizes.channels)
        for first_channel in range(0, self.sizes.channels, CHANNELS):
            channels = first_channel, min(CHANNELS, self.sizes.channels - first_channel)
            with self.k.loop(f"i{first_channel}", count) as i:
                first_point = self.start + i * (self.units * BLOCK)
                self._move(first_point, self.units, channels, f"a{first_channel}")
            if last_units:
                first_point = self.start + count * self.units * BLOCK
                self._move(first_point, last_units, channels, f"b{first_channel}")
        self.feed.close()
        return self.k.finish()

    def _move(
        self, first_point: isa.Affine, units: int, channels: tuple[int, int], name: str
    ) -> None:
        """Load a tile of points and channels (first, count), reduce, turn and store it."""
        k = self.k
        group = self.sizes.group
        pitch = self.sizes.channels
        (first_channel, channel_count) = channels
        start = first_point * (group * pitch) + first_channel
        shape = (units * BLOCK * group, channel_count)
        source = self.x.region(start, shape, (pitch, 1))
        k.copy(self.load.alloc().region(0, source.sizes), source)
        self.load.enqueue()
        self._reduce(self.load.dequeue(), units, channel_count)
        self.load.free()
        turned = self.store.alloc()
        side = (BLOCK, BLOCK)
        with k.loop(f"{name}_block", channel_count // BLOCK * units) as j:
            source_block = self.maxima.region(j * AREA, side)
            k.vector("vtranspose", turned.region(j * AREA, side), source_block)
        self.store.enqueue()
        turned = self.store.dequeue()
        for block in range(channel_count // BLOCK):
            with k.loop(f"{name}_row{block}", BLOCK) as r:
                place = r * BLOCK + block * units * AREA
                row = turned.region(place, (units, BLOCK), (AREA, 1))
                target = self.y.region(first_point, (units, BLOCK))
                pick = self.feed.index_region(r + (first_channel + block * BLOCK))
                k.copy_row(target, row, pick, self.sizes.points, self.sizes.rows)
        self.store.free()

    def _reduce(self, loaded: isa.Tile, units: int, channel_count: int) -> None:
        """Write the maximum over the group as blocks (channel block, point block, 16, 16)."""
        group = self.sizes.group
        shape = (2 * units, HALF, BLOCK)
        steps = (HALF * group * channel_count, group * channel_count, 1)
        for block in range(channel_count // BLOCK):
            out = self.maxima.region(block * units * AREA, shape)
            members = [
                loaded.region(g * channel_count + block * BLOCK, shape, steps) for g in range(group)
            ]
            # the first two members; a group of one is compared with itself
            self.k.vector("vmax", out, members[0], members[min(1, group - 1)])
            for member in members[2:]:
                self.k.vector("vmax", out, out, member)


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
    """What kernels in a row cost: cycles on the device and of launches; bytes moved to and from
    cores, and to and from device memory."""

    cycles: int
    launch_cycles: int
    core_bytes: int
    memory_bytes: int

    @property
    def total_cycles(self) -> int:
        """Cycles with launches."""
        return self.cycles + self.launch_cycles


def cost(kernels: Sequence[isa.Kernel], chip: Chip) -> Cost:
    """Return what kernels cost one after the other; L2 is empty at first, and stays filled."""
    l2 = L2.of(chip)
    places = {}  # tensor -> (address, bytes)
    top = 0
    for kernel in kernels:
        for buffer in kernel.tensors:
            if buffer.name not in places:
                places[buffer.name] = (top, buffer.size_bytes)
                top += -(-buffer.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    runs = []
    for kernel in kernels:
        kernel_places = {b.name: places[b.name] for b in kernel.tensors}
        runs.append(sim.simulate_kernel(kernel, chip, sim.DeviceMemory(l2, kernel_places)))
    return Cost(
        cycles=sum(run.cycles for run in runs),
        launch_cycles=sum(run.launch_cycles for run in runs),
        core_bytes=sum(sum(run.path_bytes.values()) for run in runs),
        memory_bytes=sum(run.memory_bytes for run in runs) + l2.flush(),
    )


def owners(
    kernel: isa.Kernel, tensors: Mapping[str, Values], name: str, like: Values, chip: Chip
) -> np.ndarray:
    """Return which core writes each element of tensor `name`, shaped as `like`; -1: none."""
    owner_of = np.full(like.shape, -1)
    core = 0
    for launch in kernel.phases:
        for part in launch.parts:
            for binding in part.bindings:
                core_launch = isa.Launch(launch.name, (isa.Part(part.program, (binding,)),))
                before = {**tensors, name: np.full(like.size, np.nan, like.dtype)}
                after = sim.execute(core_launch, before, chip)[name].reshape(like.shape)
                owner_of[~np.isnan(after)] = core
                core += 1
    return owner_of


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
    maps = {
        name: owners(kernel, inputs, name, like, chip)
        for kernel, inputs, name, like in zip(
            apart_kernels(sizes, chip), reads, "huy", (h, u, y), strict=True
        )
    }
    fused = owners(fused_kernel(sizes, chip), {"x": x, "index": index}, "y", y, chip)
    turned = {"u": maps["u"].T, "y": maps["y"][index].T, "fused": fused[index].T}
    return {"h": maps["h"], **turned}

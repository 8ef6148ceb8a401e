"""A worked case: reduce, transpose, scatter, which split over cores along different axes.

    h[p, c] = max over g of x[p, g, c],    u = h transposed,    y[index[c], :] = u[c, :]

Alone, the reduction deals out points, the transpose channels (the rows it writes), the scatter
points again: no core knows which rows the others' indices name, so each owns a piece of every row.
So each hands over through device memory. One split along the points suits all three; then every
piece stays on its core. `common_split` finds such splits: from an axis of the last result backwards
through slice rules.
Source: practitioner's article on operator fusion on many-core chips.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import ops
from ascend_lab.chip import Chip
from ascend_lab.errors import GraphError, ShapeError
from ascend_lab.graph import Graph, GraphBuilder, Node
from ascend_lab.graph.slice import rules_of
from ascend_lab.isa import Kernel, Launch, Part, as_kernel
from ascend_lab.isa.launch import renamed
from ascend_lab.lab.kernels.fused_turns import Points, turn_scatter_launch
from ascend_lab.ops.slicing import AxisRule, Window
from ascend_lab.sim import DeviceMemory, execute, simulate_kernel
from ascend_lab.sim.l2 import ALIGN_BYTES, L2

Values = NDArray[Any]


# -- one split for several operators ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Split:
    """A split all operators agree on: the cut axis of every tensor; others are read whole."""

    axes: Mapping[str, int]

    def __str__(self) -> str:
        """Return it on one line."""
        return ", ".join(f"{name} along axis {axis}" for name, axis in self.axes.items())


@dataclass(frozen=True, slots=True)
class Agreement:
    """What comes of every axis of the last output: a split, or the reason why there is none."""

    splits: Mapping[int, Split]
    refusals: Mapping[int, str]

    def __str__(self) -> str:
        """Return a line per axis."""
        lines = {a: f"cut {s}" for a, s in self.splits.items()}
        lines |= {a: f"no: {why}" for a, why in self.refusals.items()}
        return "\n".join(f"axis {a}: {lines[a]}" for a in sorted(lines))


def common_split(graph: Graph, nodes: Sequence[Node]) -> Agreement:
    """Return along which axes of the last node's output all `nodes`, in order, may be cut.

    Every core is to keep its pieces from the first operator to the last. Pieces that overlap
    (halos) or come in grains are refused: a core would compute some of its neighbour's. Raises
    `GraphError` for no nodes.
    """
    if not nodes:
        raise GraphError("one node or more", "none", "pass the nodes in order")
    splits, refusals = {}, {}
    for axis in range(len(graph.types[nodes[-1].output].shape)):
        found = _axes(graph, nodes, axis)
        if isinstance(found, str):
            refusals[axis] = found
        else:
            splits[axis] = Split(found)
    return Agreement(splits, refusals)


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


def _free_rule(graph: Graph, node: Node, wanted: Mapping[str, int]) -> AxisRule | str:
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
    plain = all(s.window == Window() and s.grain == 1 for s in rule.sources)
    if rule.kind != "free" or rule.grain != 1 or not plain:
        return f"{place} splits, but pieces overlap or come in grains"
    return rule


# -- the case --------------------------------------------------------------------------------------
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


def apart_kernels(sizes: Points, chip: Chip) -> tuple[Kernel, ...]:
    """Return the library's kernels, each with its own split; tensors x, h, u, index, y (in place).

    Raises what compiling the operators raises.
    """
    kernels, written = [], {"h": "y", "u": "y"}
    graph = case_graph(sizes)
    for node in graph.nodes:
        types = graph.in_types(node)
        shapes, dtypes = [t.shape for t in types], [t.dtype for t in types]
        kernel = ops.compile(node.op, shapes, dtypes, chip, **node.attrs)
        names = {"x": node.inputs[0], written.get(node.output, ""): node.output}
        phases = tuple(renamed(phase, names) for phase in kernel.phases)
        kernels.append(Kernel(node.op, phases))
    return tuple(kernels)


def in_one_launch(kernels: Sequence[Kernel]) -> Kernel:
    """Return kernels as the phases of one: launched once, all cores wait between them."""
    return Kernel("phases", tuple(phase for kernel in kernels for phase in kernel.phases))


def fused_kernel(sizes: Points, chip: Chip) -> Kernel:
    """Return the kernel with one split along the points; tensors x, index, y."""
    return as_kernel(turn_scatter_launch(chip, sizes))


@dataclass(frozen=True, slots=True)
class Cost:
    """What kernels in a row cost: cycles on the device, launches; bytes moved to and from cores.

    `memory_bytes` cross the memory interface, what is dirty in L2 at the end included.
    """

    cycles: int
    launch_cycles: int
    core_bytes: int
    memory_bytes: int

    @property
    def total_cycles(self) -> int:
        """Cycles with launches."""
        return self.cycles + self.launch_cycles


def cost(kernels: Sequence[Kernel], chip: Chip) -> Cost:
    """Return what kernels cost one after the other; L2, empty at first, keeps what they leave."""
    l2, places, top = L2.of(chip), {}, 0
    for buffer in (b for kernel in kernels for b in kernel.tensors):
        if buffer.name not in places:
            places[buffer.name] = (top, buffer.size_bytes)
            top += -(-buffer.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    runs = []
    for kernel in kernels:
        own = {b.name: places[b.name] for b in kernel.tensors}
        runs.append(simulate_kernel(kernel, chip, DeviceMemory(l2, own)))
    return Cost(
        sum(run.cycles for run in runs),
        sum(run.launch_cycles for run in runs),
        sum(sum(run.path_bytes.values()) for run in runs),
        sum(run.memory_bytes for run in runs) + l2.flush(),
    )


def owners(
    kernel: Kernel, tensors: Mapping[str, Values], name: str, like: Values, chip: Chip
) -> NDArray[np.int64]:
    """Return which core writes each element of tensor `name`, an array shaped as `like`; -1: none.

    Every core's program runs alone on a tensor full of NaN. `tensors` are the others the kernel
    reads. Cores are counted in the order of the launch.
    """
    found, core = np.full(like.shape, -1), 0
    for launch in kernel.phases:
        for part in launch.parts:
            for binding in part.bindings:
                alone = Launch(launch.name, (Part(part.program, (binding,)),))
                before = {**tensors, name: np.full(like.size, np.nan, like.dtype)}
                after = execute(alone, before, chip)[name].reshape(like.shape)
                found[~np.isnan(after)] = core
                core += 1
    return found


def owner_maps(sizes: Points, chip: Chip) -> dict[str, NDArray[np.int64]]:
    """Return which core makes every number on the way: arrays (points, channels) of core numbers.

    Keys: h, u and y of the kernels apart, and "fused". Channel c goes to row c of y. Raises
    `ShapeError` if y has fewer rows than there are channels.
    """
    if sizes.rows < sizes.channels:
        raise ShapeError(f"{sizes.channels} rows or more", str(sizes.rows), "one per channel")
    shape = sizes.points, sizes.group, sizes.channels
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    h = x.max(axis=1)
    u, index = np.ascontiguousarray(h.T), np.arange(sizes.channels, dtype=np.int32)
    y = np.zeros((sizes.rows, sizes.points), np.float16)
    reads = ({"x": x}, {"h": h}, {"u": u, "index": index})
    found = {
        name: owners(kernel, given, name, like, chip)
        for kernel, given, (name, like) in zip(
            apart_kernels(sizes, chip), reads, (("h", h), ("u", u), ("y", y)), strict=True
        )
    }
    fused = owners(fused_kernel(sizes, chip), {"x": x, "index": index}, "y", y, chip)
    turned = {"u": found["u"].T, "y": found["y"][index].T, "fused": fused[index].T}
    return {"h": found["h"], **turned}

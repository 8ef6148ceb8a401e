"""Makes decisions that need times before the network is lowered: which groups to fuse, and whether
row-wise operators such as a layer norm read fractals.

The candidates are lowered and timed here, with the start that they have in a network: a launch from
the device's queue, or a barrier inside a super kernel. Kernels are cached, so that the candidate
that is taken is not lowered again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ascend_lab.compiler import aliases, ir, lower, tasks
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.layout import image_and_scale
from ascend_lab.compiler.lower.vector import ROW_WISE
from ascend_lab.compiler.rules import special_form
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Kernel
from ascend_lab.machine.sim.timeline import Start, start_cycles

Group = Sequence[ir.Node]
"""Nodes that would be one kernel."""
NEVER = float("inf")
"""Cycles of a kernel that cannot be written."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How candidates are timed.

    With `warm`, L2 holds what other kernels wrote for a kernel, as `lower.piece.near_memory` says;
    otherwise it is empty.
    """

    chip: Chip
    start: Start
    warm: bool = False

    def kernel_cycles(self, piece: lower.Piece) -> float:
        """Return the cycles of a piece's kernel with its start, or NEVER if there is none."""
        try:
            return tasks.cycles_started(piece, self.chip, self.start, warm=self.warm)
        except AscendLabError:
            return NEVER

    def least_cycles(self, graph: ir.Graph, group: Group) -> int:
        """Return a lower bound: a kernel's start and the writing of its last result."""
        result = graph.types[group[-1].output]
        to_memory = [
            p.rate_bytes_per_cycle for (_, dst), p in self.chip.paths.items() if dst == "GM"
        ]
        # all cores write at once
        bytes_per_cycle = max(to_memory) * self.chip.cores_of("vector")
        written = result.elements * DTYPE_BYTES[result.dtype] / bytes_per_cycle
        return start_cycles(self.chip, self.start) + int(written)

    def total_cycles(self, graph: ir.Graph, groups: Sequence[Group], limit: float = NEVER) -> float:
        """Return the cycles of kernels one after another, or a number of at least `limit`.

        Lowering takes long: kernels are lowered only until their cycles, plus lower bounds for the
        kernels that remain, reach the limit.
        """
        bounds = [self.least_cycles(graph, group) for group in groups]
        cycles: float = sum(bounds)
        for group, bound in zip(groups, bounds, strict=True):
            if cycles >= limit:
                break
            cycles += self.kernel_cycles(lower.piece_of(graph, group)) - bound
        return cycles

    def quickest(
        self,
        graph: ir.Graph,
        ways: Iterable[Sequence[Group]],
        *,
        compare_all: bool,
        limit: float = NEVER,
    ) -> float:
        """Return the cycles of the fastest way to compute nodes in several kernels.

        Without `compare_all`, the first of the `ways` that the chip has kernels for is taken. With
        it, ways are compared until one takes less than `limit`: that decides.
        """
        best = NEVER
        for groups in ways:
            best = min(best, self.total_cycles(graph, groups, limit))
            # without `compare_all`, any way that the chip has kernels for is enough
            enough = limit if compare_all else NEVER
            if best < enough:
                break
        return best


# -- groups that become one kernel -----------------------------------------------------------------
def pays(graph: ir.Graph, group: Group, chip: Chip, start: Start = "queued") -> bool:
    """Tell whether one kernel for a group is no slower than several, starts included.

    Before anything is timed, groups that cannot be one kernel, or must not be, are refused.
    """
    if not _may_fuse(graph, group):
        return False
    main_group = _without_extra_result(graph, group)
    if main_group and not pays(graph, main_group, chip, start):
        return False
    piece = lower.piece_of(graph, group)
    try:
        kernel = tasks.lowered_once(piece, chip, start=start).kernel
        if lower.conv.follows_free(piece, lower.piece_of(graph, group[:1]), chip):
            return True
    except AscendLabError:
        return False  # the chip has no kernel for the group
    return _is_no_slower(graph, group, kernel, Clock(chip, start))


def _without_extra_result(graph: ir.Graph, group: Group) -> Group:
    """Return the group without its second result, () if it has none: see `rules.Fusion`."""
    special = special_form(graph, group)
    if special is None:
        return ()
    fusion, parts = special
    return fusion.without_extra_result(parts)


def _may_fuse(graph: ir.Graph, group: Group) -> bool:
    """Tell whether a group may become one kernel, as far as the graph alone decides."""
    if not aliases.moves_inside_chains(graph).isdisjoint(n.name for n in group):
        # a move that is part of a view costs nothing, but would cost cycles in a kernel
        return False
    outputs = lower.piece_of(graph, group).graph.outputs
    if len(outputs) > 1 and not _without_extra_result(graph, group):
        return False
    reader = ir.only_reader(graph, group[-1])
    is_followed = reader and reader.has("lanes") and not image_and_scale(graph, reader)
    products = sum(node.has("convolution", "product") for node in group)
    # the elementwise node after two products would need a kernel of its own, which the comparison
    # of times leaves out; in separate kernels it joins the second product
    return not (is_followed and products > 1)


def _is_no_slower(graph: ir.Graph, group: Group, kernel: Kernel, cold: Clock) -> bool:
    """Tell whether a group's kernel takes no more cycles than the kernels that it would replace.

    Starts count. `cold` times with an empty L2.
    """
    special = special_form(graph, group)
    # the definition of a special kernel says what it is timed against
    mixed = special is None and any(phase.mix for phase in kernel.phases)
    # a mix kernel starts later and saves little but trips to L2, and a convolution alone may run on
    # cube or vector cores: both are judged as they run in a network, on a warm L2
    warm = mixed or any(node.has("convolution") for node in group)
    clock = replace(cold, warm=warm)
    fused_cycles = clock.kernel_cycles(lower.piece_of(graph, group))
    splits = chain(_splits(graph, group), _halves(group) if mixed else ())
    compare_all = mixed or (special is not None and special[0].times_all_unfused)
    split_cycles = clock.quickest(graph, splits, compare_all=compare_all, limit=fused_cycles)
    if split_cycles == NEVER:
        # alone, an operator between bytes in blocks of 32 channels and floats in blocks of 16 has
        # no kernel in blocks: it runs in its group or row-major
        return any(node.has("bytes") for node in group)
    return fused_cycles <= split_cycles


def _splits(graph: ir.Graph, group: Group) -> Iterator[Sequence[Group]]:
    """Yield divisions of a group into the kernels that would replace it, the likeliest first."""
    special = special_form(graph, group)
    if special is None:
        views = aliases.view_nodes(graph)
        yield [(n,) for n in group if n.name not in views]
    else:
        fusion, parts = special
        yield from fusion.unfused(parts)


def _halves(group: Group) -> Iterator[Sequence[Group]]:
    """Yield a chain cut in two at each place: a, b, c are (a), (b, c) and (a, b), (c)."""
    for cut in range(1, len(group)):
        yield group[:cut], group[cut:]


# -- layouts ---------------------------------------------------------------------------------------
def stay_in_fractals(graph: ir.Graph, chip: Chip, start: Start = "queued") -> ir.Graph:
    """Return the graph with row-wise operators on fractals where that is faster.

    A layer norm between two matrix products may be faster row-major, but that takes two conversions
    of layout, each a kernel. If it reads row-major memory and products read its result, the
    conversion may come before or after it. Both ways are timed.
    """
    clock = Clock(chip, start)
    current = graph
    for name in [node.name for node in graph.nodes if node.op in ROW_WISE]:
        on_fractals = _on_fractals(current, current.node(name))
        if on_fractals and is_quicker(clock, on_fractals, (current, name)):
            current = on_fractals[0]
    return current


def _on_fractals(graph: ir.Graph, node: ir.Node) -> tuple[ir.Graph, str] | None:
    """Return the graph with one operator on fractals, and its name there.

    Returns None if a row has padding, if another operand is computed, or if the operator works
    along another axis than the last. Otherwise the operand must come from fractals through a
    conversion, or, if no conversion writes it, some reader must convert the result to fractals.
    """
    x = node.inputs[0]
    kind = graph.types[node.output]
    draft = Draft(graph)
    rank = len(kind.shape)
    source = graph.producers.get(x)
    constants = all(n in graph.constants for n in node.inputs[1:])
    # rows are reduced along the last axis; zeros that pad it to 16 would be included
    if kind.shape[-1] % 16 or not constants or node.attr("axis", -1) % rank != rank - 1:
        return None
    goes_to = {n.attr("layout") for n in graph.readers[node.output] if n.op == "trans_data"}
    if source and source.op == "trans_data":
        fractal = source.inputs[0]
    elif "FRACTAL_NZ" in goes_to:
        fractal = draft.insert("trans_data", (x,), {"layout": "FRACTAL_NZ"}, f"{x}.rows")
    else:
        return None
    if draft.type(fractal).layout != "FRACTAL_NZ":
        return None
    y = draft.new_name(f"{node.output}.rows")
    moved = replace(node, name=y, inputs=(fractal, *node.inputs[1:]), outputs=(y,))
    draft.put(moved, replace(kind, layout="FRACTAL_NZ"))
    for reader in graph.readers[node.output]:
        if reader.op == "trans_data" and reader.attr("layout") == "FRACTAL_NZ":
            draft.replace(reader.output, y)
    # row-major readers read a conversion; without such readers `finish` removes it as unused
    draft.replace(node.output, draft.insert("trans_data", (y,), {"layout": "ND"}, f"{y}.ND"))
    return draft.finish(), y


def is_quicker(
    clock: Clock, candidate: tuple[ir.Graph, str], current: tuple[ir.Graph, str]
) -> bool:
    """Tell whether an operator takes fewer cycles in one graph than in another.

    Each is timed with its conversions: see `_with_conversions`.
    """
    cycles = clock.total_cycles(candidate[0], _with_conversions(*candidate))
    limit = cycles + 1  # equally many cycles do not make it faster
    return cycles < clock.total_cycles(current[0], _with_conversions(*current), limit)


def _with_conversions(graph: ir.Graph, name: str) -> list[tuple[ir.Node, ...]]:
    """Return the kernels of an operator and of the conversions that it alone needs.

    A quantise before a conversion runs in the conversion's kernel, and the scaling of int8 sums in
    the operator's. Conversions come first: they are fast to lower, and may reach the limit alone.
    """
    node = graph.node(name)
    maker = graph.producers.get(node.inputs[0])
    reader = ir.only_reader(graph, node)
    groups: list[tuple[ir.Node, ...]] = [
        (n,) for n in graph.readers[node.output] if n.op == "trans_data"
    ]
    if maker is not None and maker.op == "trans_data" and len(graph.readers[maker.output]) == 1:
        source = graph.producers.get(maker.inputs[0])
        if source and source.op == "quantise" and ir.only_reader(graph, source):
            groups.append((source, maker))
        else:
            groups.append((maker,))
    is_scaled = reader is not None and reader.op in ("dequantise", "requantise")
    groups.append((node, reader) if reader and is_scaled else (node,))
    return groups

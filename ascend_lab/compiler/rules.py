"""Defines fusion rules (which nodes one kernel may compute) and how special kernels plug in.

Fusion saves trips through global memory (GM). A convolution and its relu on 1 MB of sums:

    two kernels    GM -> conv -> 1 MB to GM -> 1 MB from GM -> relu -> GM      two starts
    one kernel     GM -> conv -> relu on the core -> GM                        one start

A `Rule` says which nodes may run together; the first node's usual kernel computes them. A special
kernel (`Fusion`) brings its own lowering, too. Modules of `ascend_lab.fused` hold these lists:

    FUSIONS             groups of nodes that become one kernel
    RULES               groups of nodes that the head's own kernel computes
    PIECE_KERNELS       kernels in place of the usual ones
    ROW_KERNELS         kernels that compete with those of the vector unit
    OPERATOR_REWRITES   graphs in other operators, before layouts
    LAYOUT_REWRITES     graphs in other layouts

Another list, TEMPLATES (`operators.ops.operator`), is for single operators, in a graph or not.

If a module is missing, its groups are not proposed, and each of their nodes becomes one kernel: the
network is slower, its values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.plugins import listed, plugins

if TYPE_CHECKING:
    from ascend_lab.compiler.lower.piece import Lowered, Piece
    from ascend_lab.operators.kernels import GemmSchedule

Group = Sequence[Node]
"""Nodes, in the order of the graph, that one kernel may compute, e.g. (conv2d, relu)."""
Match = Callable[[Graph, Node], Group | None]
"""Returns, for a node, the group that begins with or contains it; None if there is none."""
RowKernels = Callable[["Piece", Chip], Iterator["Lowered"]]
"""Yields special kernels for a piece that the vector unit computes row by row.

The compiler times them and the vector unit's kernel, and takes the fastest.
"""
PieceKernel = Callable[["Piece", Chip, Callable[["Piece"], "Lowered"]], "Lowered | None"]
"""Returns, for a piece, a special kernel that replaces the usual one, without comparing times.

The callable among the arguments lowers a piece in the usual way. None means the usual kernel.
"""
OperatorRewrite = Callable[[Graph, Chip, bool], Graph]
"""Returns, for a graph, an equal graph of other operators.

The flag says whether two convolutions and the addition of their results may be one kernel (rule
`JOINT`): some rewrites are faster only then.
"""
JOINT = "JointConvolutionFusionPass"
"""The name of the rule that makes two convolutions and their addition one kernel."""
SMALL_FIRST_LAYERS = "SmallFirstLayers"
"""The name of the rewrite that lets first layers read images with 4 channels a pixel."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A fusion rule: the name by which a switch file turns it off, and the groups it proposes.

    `needs_shared_launch`: the rule applies only where several kernels share one launch, which the
    vendor's compiler does not do by default.
    """

    name: str
    match: Match
    needs_shared_launch: bool = False

    def propose(self, graph: Graph, node: Node) -> Group:
        """Return the proposed group, () for none; raise `InputError` unless it lists nodes."""
        # rules may come from users: what they return is checked before the compiler relies on it
        proposed = self.match(graph, node) or ()
        if not isinstance(proposed, list | tuple) or not all(isinstance(n, Node) for n in proposed):
            needed = f"{self.name}: a list of nodes of the graph, or None"
            raise InputError(needed, repr(proposed)[:60], "return node objects, not names")
        return proposed


@dataclass(frozen=True, slots=True)
class Fusion:
    """A special kernel: the nodes it computes, its lowering, the kernels it is timed against.

    For example, a kernel for a 1 x 1 convolution, a relu, a depthwise convolution and a relu has
    these fields:

        parts                  returns (1 x 1, relu), (depthwise, relu), (); the third part holds
                               the nodes of channel means if the kernel computes these, too;
                               returns () for a group that the kernel does not compute
        lower                  writes the kernel of a piece from these parts
        unfused                yields the same nodes as separate kernels, one division after the
                               other: [(1 x 1, relu), (depthwise, relu)], then each node alone
        times_all_unfused      True: compare with the fastest of these divisions; False: with the
                               first one for which the chip has kernels
        without_extra_result   the group without the result that it has besides the main one (the
                               means), which must pay by itself; () if no result was added
        no_tuning_reason       why the operator tuner cannot choose anything here; "" if it can
        lower_tiled            writes the kernel with a tiling that the tuner chose; may be None
    """

    rule: Rule
    parts: Callable[[Graph, Group], Sequence[Group]]
    lower: Callable[[Piece, Chip, Sequence[Group]], Lowered]
    unfused: Callable[[Sequence[Group]], Iterator[Sequence[Group]]]
    no_tuning_reason: str = ""
    lower_tiled: Callable[[Piece, Chip, Sequence[Group], GemmSchedule], Lowered] | None = None
    times_all_unfused: bool = False
    # by default (): the kernel has no second result
    without_extra_result: Callable[[Sequence[Group]], Group] = lambda _: ()


@dataclass(frozen=True, slots=True)
class LayoutRewrite:
    """A named function that returns, for a graph with layouts, a faster one.

    `apply` also gets how kernels start, e.g. "queued": if starts cost more, fewer kernels are
    faster.
    """

    name: str
    apply: Callable[[Graph, Chip, Start], Graph]


def fusions() -> tuple[Fusion, ...]:
    """Return the special kernels for groups of nodes, in the order of their rules."""
    return listed("FUSIONS")


def special_rules() -> tuple[Rule, ...]:
    """Return the rules of special kernels in order of priority."""
    rules = list[Rule]()
    for module in plugins():
        # in each module, groups for the first node's usual kernel come before special kernels
        rules += getattr(module, "RULES", ())
        rules += [fusion.rule for fusion in getattr(module, "FUSIONS", ())]
    return tuple(rules)


def piece_kernels() -> tuple[PieceKernel, ...]:
    """Return the functions that may replace a usual kernel; the first result is taken."""
    return listed("PIECE_KERNELS")


def row_kernels() -> tuple[RowKernels, ...]:
    """Return the functions that yield kernels to compare with the vector unit's for rows."""
    return listed("ROW_KERNELS")


def operator_rewrites() -> tuple[OperatorRewrite, ...]:
    """Return the rewrites that apply before layouts are assigned."""
    return listed("OPERATOR_REWRITES")


def layout_rewrites() -> tuple[LayoutRewrite, ...]:
    """Return the rewrites that apply once every tensor has a layout."""
    return listed("LAYOUT_REWRITES")


def special_form(graph: Graph, group: Group) -> tuple[Fusion, Sequence[Group]] | None:
    """Return the special kernel that computes a group, and the group cut into its parts."""
    # a group may fit several special kernels: the first in the list computes it
    for fusion in fusions():
        parts = fusion.parts(graph, group)
        # () means that this special kernel does not compute the group
        if parts:
            return fusion, parts
    return None

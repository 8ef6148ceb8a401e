"""Records of fusion: rules that propose nodes for one kernel, and special kernels that plug in.

A rule says which nodes may run together; what lowers them is the head's own kernel. A special
kernel brings its own lowering, too. It is a module of `ascend_lab.fused` with lists:

    FUSIONS             groups of nodes that become one kernel
    RULES               groups of nodes that the head's own kernel computes
    PIECE_KERNELS       kernels in place of the usual ones
    ROW_KERNELS         kernels that compete with those of the vector unit
    OPERATOR_REWRITES   graphs in other operators, before layouts
    LAYOUT_REWRITES     graphs in other layouts

Without the module the rest works as before: nothing proposes the group, so its nodes become kernels
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start

if TYPE_CHECKING:
    from ascend_lab.compiler.lower.piece import Lowered, Piece

Group = Sequence[Node]
"""Nodes, in order, that may be one kernel."""
Match = Callable[[Graph, Node], Group | None]
"""From a node to the nodes, itself included, that should run with it, or None."""
RowKernels = Callable[["Piece", Chip], Iterator["Lowered"]]
"""From a piece that the vector unit computes row by row to other kernels for it, if there are."""
PieceKernel = Callable[["Piece", Chip, Callable[["Piece"], "Lowered"]], "Lowered | None"]
"""From a piece, and what lowers other pieces, to the kernel that is taken without asking the clock.

None for pieces that the special kernel does not know.
"""
OperatorRewrite = Callable[[Graph, Chip, bool], Graph]
"""From a graph to one in other operators; told whether two added convolutions may be one kernel."""
PACKAGE = "ascend_lab.fused"
JOINT = "JointConvolutionFusionPass"
"""The name of the rule that makes two convolutions that are added one kernel."""
SMALL_FIRST_LAYERS = "SmallFirstLayers"
"""The name of the rewriting that lets first layers read pixels of 4 channels."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A fusion rule: the name a switch file knows it by, and what it proposes.

    `inside`: only where kernels share a launch, which the vendor's compiler does not do by default.
    """

    name: str
    match: Match
    inside: bool = False

    def propose(self, graph: Graph, node: Node) -> Group:
        """Return what the rule proposes; raise `InputError` naming it if that is no nodes."""
        # a rule of a reader's may return anything; a name in place of a node is the usual mistake
        proposed = self.match(graph, node) or ()
        if not isinstance(proposed, list | tuple) or not all(isinstance(n, Node) for n in proposed):
            needed = f"{self.name}: a list of nodes of the graph, or None"
            raise InputError(needed, repr(proposed)[:60], "return node objects, not names")
        return proposed


@dataclass(frozen=True, slots=True)
class Fusion:
    """A special kernel: which nodes it takes, who writes it, what it competes with.

    A tandem, say, takes a 1 x 1 convolution, a relu, a depthwise convolution and another relu. Its
    `parts` are (1 x 1, relu), (depthwise, relu) and (), the channel means that it might add up as
    well; for groups of another form `parts` returns ().
    `lower` writes the kernel of a piece of these parts. `apart` yields what would be kernels
    without it; `compares_all`: all of these ways are timed, not only the first that the chip has.
    `smaller` returns the group without what may be added beside it (which is one more result): that
    group must pay by itself; () if nothing was added. `untuned` says why no tuner chooses anything.
    """

    rule: Rule
    parts: Callable[[Graph, Group], Sequence[Group]]
    lower: Callable[[Piece, Chip, Sequence[Group]], Lowered]
    apart: Callable[[Sequence[Group]], Iterator[Sequence[Group]]]
    untuned: str
    compares_all: bool = False
    smaller: Callable[[Sequence[Group]], Group] = lambda _: ()


@dataclass(frozen=True, slots=True)
class LayoutRewrite:
    """A rewriting of graphs with layouts to quicker ones, for kernels started so; and its name."""

    name: str
    apply: Callable[[Graph, Chip, Start], Graph]


_switched_off: list[bool] = []
"""An item for each `without_special_kernels` that is open."""


@contextmanager
def without_special_kernels() -> Iterator[None]:
    """Compile as if this installation had no special kernels, to see what they are worth."""
    _switched_off.append(True)
    try:
        yield
    finally:
        _switched_off.pop()


def plugins() -> tuple[ModuleType, ...]:
    """Return the modules with special kernels that are in use."""
    return () if _switched_off else _installed()


@cache
def _installed() -> tuple[ModuleType, ...]:
    """Return the modules with special kernels that this installation has.

    A module that is not there is left out; one that fails to import raises what it raises.
    """
    package = _module(PACKAGE)
    names = getattr(package, "PLUGINS", ())  # a folder left empty is a package without names
    modules = (_module(f"{PACKAGE}.{name}") for name in names)
    return tuple(module for module in modules if module is not None)


def _module(name: str) -> ModuleType | None:
    """Return a module, or None if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, and what it imports is missing
            raise
        return None


@cache
def _listed(modules: tuple[ModuleType, ...], name: str) -> tuple[Any, ...]:
    """Return the items of the lists that modules have under one name, in order."""
    # a module without FUSIONS, say, has only rules
    return tuple(item for module in modules for item in getattr(module, name, ()))


def fusions() -> tuple[Fusion, ...]:
    """Return the special kernels for groups of nodes, in the order of their rules."""
    return _listed(plugins(), "FUSIONS")


def special_rules() -> tuple[Rule, ...]:
    """Return the rules of special kernels in order of priority."""
    # module by module, so that the order of PLUGINS is the order of priority
    rules = list[Rule]()
    for module in plugins():
        rules += getattr(module, "RULES", ())
        rules += [fusion.rule for fusion in getattr(module, "FUSIONS", ())]
    return tuple(rules)


def piece_kernels() -> tuple[PieceKernel, ...]:
    """Return what writes special kernels in place of the usual ones; the first that does counts."""
    return _listed(plugins(), "PIECE_KERNELS")


def row_kernels() -> tuple[RowKernels, ...]:
    """Return what writes special kernels for rows."""
    return _listed(plugins(), "ROW_KERNELS")


def operator_rewrites() -> tuple[OperatorRewrite, ...]:
    """Return the rewritings of graphs in operators that have kernels."""
    return _listed(plugins(), "OPERATOR_REWRITES")


def layout_rewrites() -> tuple[LayoutRewrite, ...]:
    """Return the rewritings of graphs with layouts."""
    return _listed(plugins(), "LAYOUT_REWRITES")


def special_form(graph: Graph, group: Group) -> tuple[Fusion, Sequence[Group]] | None:
    """Return the special kernel whose form a group has, and the group's parts, if there is one."""
    # asked of a group, not of the rule that proposed it: a part of a proposal may have the form
    for fusion in fusions():
        parts = fusion.parts(graph, group)
        if parts:
            return fusion, parts
    return None

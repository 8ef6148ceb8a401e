"""Records of fusion: rules that propose nodes for one kernel, and special kernels that plug in.

A rule says which nodes may run together; what lowers them is the head's own kernel. A special
kernel brings its own lowering, too. It is a module of `ascend_lab.fused` with a list `FUSIONS` of
records, or `ROW_KERNELS`. Without the module the rest works as before: nothing proposes the group,
so its nodes become kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.compiler.lower.piece import Lowered, Piece

Group = Sequence[Node]
"""Nodes, in order, that may be one kernel."""
Match = Callable[[Graph, Node], Group | None]
"""From a node to the nodes, itself included, that should run with it, or None."""
RowKernels = Callable[["Piece", Chip], Iterator["Lowered"]]
"""From a piece that the vector unit computes row by row to other kernels for it, if there are."""
PACKAGE = "ascend_lab.fused"


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


@cache
def _plugins() -> tuple[ModuleType, ...]:
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
def fusions() -> tuple[Fusion, ...]:
    """Return the special kernels for groups of nodes, in the order of their rules."""
    return tuple(fusion for module in _plugins() for fusion in getattr(module, "FUSIONS", ()))


@cache
def row_kernels() -> tuple[RowKernels, ...]:
    """Return what writes special kernels for rows."""
    return tuple(write for module in _plugins() for write in getattr(module, "ROW_KERNELS", ()))


def special_form(graph: Graph, group: Group) -> tuple[Fusion, Sequence[Group]] | None:
    """Return the special kernel whose form a group has, and the group's parts, if there is one."""
    for fusion in fusions():
        parts = fusion.parts(graph, group)
        if parts:
            return fusion, parts
    return None

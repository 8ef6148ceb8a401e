"""Measured kernels that are no operator of ours, as small graphs of operators that are.

A builder takes a row's work and returns the graph that computes the same function. The graph is
compiled and fused as a network is. Its time is that of its kernels, each with its start on the
device and without the host, because the sources add up the tasks of a chain in the same way. Where
our fusion makes one kernel of it, one kernel is timed. A builder may also return the work of one
operator, which is timed as that.

Some chains are cut into kernels as the source's was, not by our fusion: `KERNELS` says where.
"""

from collections.abc import Callable, Mapping, Sequence

from ascend_lab.compare.chains import attention, groups, products, rows, vector
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import Graph, Node

Builder = Callable[[Work], Graph | Work]
"""Work of a row -> a graph, or a call of an operator, that computes the same.

Raises `AscendLabError` for what it cannot.
"""

Cut = Callable[[Work, Graph], Sequence[Sequence[Node]]]
"""Work of a row, its graph with layouts -> the nodes of each kernel, in an order that can run."""

CHAINS: Mapping[str, Builder] = {
    **attention.BUILDERS,
    **products.BUILDERS,
    **rows.BUILDERS,
    **vector.BUILDERS,
}
"""The table's name for a kernel, as in `cb/swi_glu/3` -> its builder."""
KERNELS: Mapping[str, Cut] = {**vector.KERNELS}
"""The table's name -> what cuts the graph into kernels; without one our fusion does."""
GROUPS: Mapping[str, Callable[[Work], groups.Groups]] = groups.BUILDERS
"""The table's name for a kernel that multiplies groups of rows -> its builder."""
CASE_NAMES = {"gather": "gather_elements"}
"""Names that a case has for a kernel, where an operator of ours with that name does otherwise."""
ALSO_OPERATORS: Mapping[str, Sequence[str]] = {**vector.ALSO_OPERATORS}
"""Names that operators of ours have, too -> the words, one of which makes a row a chain."""


def is_chain(work: Work) -> bool:
    """Tell whether a row is timed as a chain."""
    words = ALSO_OPERATORS.get(work.operator)
    return work.operator in CHAINS and (
        words is None or not work.attributes.keys().isdisjoint(words)
    )

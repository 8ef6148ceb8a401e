"""Builds small graphs for measured kernels that are not operators of this package (chains).

A builder takes a row's work and returns the graph that computes the same function. The graph is
compiled and fused like a network. Its time is that of its kernels, each with its launch on the
device and without the host, because the sources add up the tasks of a chain in the same way. If
our fusion makes one kernel of the graph, one kernel is timed. A builder may also return the work
of one operator, which is timed as that operator.

Some chains are cut into the kernels of the source instead of by our fusion: `KERNELS` says how.
"""

from collections.abc import Callable, Mapping, Sequence

from ascend_lab.compare.chains import attention, groups, products, rows, vector
from ascend_lab.compare.programs import Programs
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import Graph, Node

Builder = Callable[[Work], Graph | Programs | Work]
"""Work of a row -> a graph, programs or a call of an operator that computes the same.

Raises `AscendLabError` for work that it cannot express.
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
"""The table's name -> the function that cuts the graph into kernels; our fusion is the default."""
ESTIMATES = attention.ESTIMATES
"""The table's name for a kernel that is neither operator nor graph here -> what times it."""
GROUPS: Mapping[str, Callable[[Work], groups.Groups | groups.WidenedWeights]] = groups.BUILDERS
"""The table's name for a product whose kernel is written by hand -> its builder."""
CASE_NAMES = {"gather": "gather_elements"}
"""A case's name for a kernel -> our name, where our operator of the case's name differs."""
ALSO_OPERATORS: Mapping[str, Sequence[str]] = {**vector.ALSO_OPERATORS}
"""Names that our operators have, too -> the attributes, any of which makes a row a chain."""


def is_chain(work: Work) -> bool:
    """Tell whether a row is timed as a chain of kernels, built by one of these builders."""
    words = ALSO_OPERATORS.get(work.operator)
    return work.operator in CHAINS and (
        words is None or not work.attributes.keys().isdisjoint(words)
    )

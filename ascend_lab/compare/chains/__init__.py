"""Measured kernels that are no operator of ours, as small graphs of operators that are.

A builder takes a row's work and returns the graph that computes the same function. The graph is
compiled and fused as a network is; its time is that of its kernels, launches left out, because the
sources add up the tasks of a chain in the same way. Where our fusion makes one kernel of it, one
kernel is timed. A builder may also return the work of one operator, which is timed as that.
"""

from collections.abc import Callable, Mapping

from ascend_lab.compare.chains import attention
from ascend_lab.compare.rows import Work
from ascend_lab.graph import Graph

Builder = Callable[[Work], Graph | Work]
"""Work of a row -> a graph, or a call of an operator, that computes the same.

Raises `AscendLabError` for what it cannot.
"""

CHAINS: Mapping[str, Builder] = {**attention.BUILDERS}
"""The table's name for a kernel, as in `cb/swi_glu/3` -> its builder."""

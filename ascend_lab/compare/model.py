"""What the model says of a measured row.

`timing` says what counts. `kernel` is a profiler's task on the device, from the start of the task
there (`queued_launch_s` of the chip, more on cores of two kinds) to its end. `wall` is with all of
a launch by the host, `step` that of a whole network. `l2` says where operands lie.

The bound is that of memory's peak rate (`memory_peak_bytes_per_s`), whatever rate kernels reach: no
board may beat it. Where a source does not print which bin it measured, there is none.
"""

from dataclasses import replace

from ascend_lab.compare.chained import chain, grouped
from ascend_lab.compare.chains import CHAINS, ESTIMATES, GROUPS, is_chain
from ascend_lab.compare.chains.groups import as_groups
from ascend_lab.compare.collectives import collective
from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.networks import network
from ascend_lab.compare.operators import as_library, in_pairs, operator_alone
from ascend_lab.compare.programs import Programs, programs
from ascend_lab.compare.rows import Work
from ascend_lab.compare.table import COLLECTIVES
from ascend_lab.compare.words import NOT_PRINTED, chip_of
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip

ZOO = "zoo:"
LIKE = ("cann",)
"""What can be timed in place of ours: networks and products (`graph.like_cann`), row kernels."""


def estimate(work: Work, own: Chip | None = None, like: str = "") -> Estimate:
    """Return what the model says of a work; `own` is a chip of one's own, used by its name.

    A kernel whose structure in the vendor's library is known is timed in that structure, whatever
    ours would take (`row_kernels`). With `like` "cann" networks and products are compiled as by
    that compiler, too. Raises an `AscendLabError` that says what the model cannot do.
    """
    if "metric" in work.attributes:
        needed = "a time of the whole work"
        raise InputError(needed, f"metric={work.attributes['metric']}", "it is a time per unit")
    if work.operator in COLLECTIVES:
        return collective(work, own)
    if work.size_bytes is not None:
        needed = f"a collective of {' and '.join(COLLECTIVES)}"
        raise UnsupportedError(needed, work.operator or "no operator", "others are not timed here")
    chip, marks = chip_of(work.chip, own)
    if work.operator == "scatter_add" and "segments" in work.attributes:
        # Sums of segments start from zeros that the measured kernels write: no x is read.
        work = replace(work, operator="unsorted_segment_sum")
    work = as_groups(work)
    if work.operator == "transpose" and work.dtypes == ("int64",):
        work = in_pairs(work)
        marks = (*marks, "int64 moved as pairs of int32")
    found = _timed(work, chip, like)
    if any(NOT_PRINTED in mark for mark in marks):
        found = replace(found, bound_s=None)  # another bin may be quicker
    return replace(found, marks=(*marks, *found.marks))


def _timed(work: Work, chip: Chip, like: str) -> Estimate:
    """Return the time of a work by what knows it: a network, a chain of kernels, an operator."""
    if work.operator.startswith(ZOO):
        return network(work, chip, like)
    if work.operator in GROUPS:
        return grouped(work, chip)
    if work.operator in ESTIMATES:
        return ESTIMATES[work.operator](work, chip)
    if not is_chain(work):
        return as_library(work, chip, operator_alone(work, chip, like), like)
    made = CHAINS[work.operator](work)
    if isinstance(made, Programs):
        return programs(work, made, chip)
    if isinstance(made, Work):
        return as_library(made, chip, operator_alone(made, chip, like), like)
    return as_library(work, chip, chain(work, made, chip), like)

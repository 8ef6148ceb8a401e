"""What the model says of a measured row.

`timing` says what counts. `kernel` is a profiler's task on the device, from the start of the task
there (`queued_launch_s` of the chip, more on cores of two kinds) to its end. `wall` is with all of
a launch by the host, `step` that of a whole network. `l2` says where operands lie.

The bound is that of memory's peak rate (`memory_peak_bytes_per_s`), whatever rate kernels reach: no
board may beat it. Where a source does not print which bin it measured, there is none.
"""

from dataclasses import replace

from ascend_lab.compare.chained import chain, grouped
from ascend_lab.compare.chains import CHAINS, GROUPS, is_chain
from ascend_lab.compare.collectives import collective
from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.networks import network
from ascend_lab.compare.operators import in_pairs, operator_alone
from ascend_lab.compare.rows import Work
from ascend_lab.compare.table import COLLECTIVES
from ascend_lab.compare.words import NOT_PRINTED, chip_of
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip

ZOO = "zoo:"
LIKE = ("cann",)
"""Compilers that networks and products can be compiled as by, beside ours (`graph.like_cann`)."""


def estimate(work: Work, own: Chip | None = None, like: str = "") -> Estimate:
    """Return what the model says of a work; `own` is a chip of one's own, used by its name.

    With `like` "cann" networks and products are compiled as by that compiler. Raises an
    `AscendLabError` that says what the model cannot do.
    """
    if "metric" in work.attributes:
        needed = "a time of the whole work"
        raise InputError(needed, f"metric={work.attributes['metric']}", "it is a time per unit")
    if work.operator in COLLECTIVES:
        return collective(work, own)
    chip, marks = chip_of(work.chip, own)
    if work.operator == "scatter_add" and "segments" in work.attributes:
        # Sums of segments start from zeros that the measured kernels write: no x is read.
        work = replace(work, operator="unsorted_segment_sum")
    if work.operator.startswith(ZOO):
        found = network(work, chip, like)
    elif is_chain(work):
        made = CHAINS[work.operator](work)
        if isinstance(made, Work):
            found = operator_alone(made, chip, like)
        else:
            found = chain(work, made, chip)
    elif work.operator in GROUPS:
        found = grouped(work, chip)
    elif work.operator == "transpose" and work.dtypes == ("int64",):
        found = operator_alone(in_pairs(work), chip, like)
        marks = (*marks, "int64 moved as pairs of int32")
    else:
        found = operator_alone(work, chip, like)
    if any(NOT_PRINTED in mark for mark in marks):
        found = replace(found, bound_s=None)  # another bin may be quicker
    return replace(found, marks=(*marks, *found.marks))

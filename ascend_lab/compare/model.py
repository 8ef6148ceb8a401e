"""Estimates the time of a measured row with the model, and a lower bound for it.

A row's `timing` says what its time includes. `kernel` is a task on the device as a profiler counts
it, from its launch there (`queued_launch_s` of the chip, more if cube and vector cores start
together) to its end. `wall` includes the whole launch by the host; `step` is the time of a whole
network. `l2` says whether the operands lie in L2.

The bound assumes memory at its peak rate (`memory_peak_bytes_per_s`), which kernels do not reach,
so that no board can beat it. If a source does not say which speed grade (bin) of a chip it
measured, there is no bound.
"""

from dataclasses import replace
from importlib import import_module

from ascend_lab.compare.chained import chain, grouped
from ascend_lab.compare.chains import CHAINS, ESTIMATES, GROUPS, is_chain
from ascend_lab.compare.chains.groups import as_groups
from ascend_lab.compare.collectives import collective
from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.networks import network
from ascend_lab.compare.operators import as_library, in_pairs, operator_alone
from ascend_lab.compare.programs import Programs, programs
from ascend_lab.compare.rows import LANGUAGE, Work
from ascend_lab.compare.table import COLLECTIVES
from ascend_lab.compare.words import NOT_PRINTED, chip_of
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip

ZOO = "zoo:"
LANGUAGE_ROWS = "ascend_lab.llm.published"
LIKE = ("cann",)
"""Compilers to be timed in place of ours, for networks, products and row kernels."""


def estimate(work: Work, own_chip: Chip | None = None, like: str = "") -> Estimate:
    """Return the model's estimate for `work`; `own_chip` is the user's chip, which rows may name.

    A kernel whose structure in the vendor's library is known is timed in that structure, even where
    ours is quicker (`row_kernels`). With `like` "cann" networks and products, too, are compiled as
    CANN would. Raises an `AscendLabError` that says what the model cannot do.
    """
    if work.operator == LANGUAGE:
        return _language_step(work, own_chip)
    # a row may hold tokens per second, or microseconds per token: neither is the time of one run
    if "metric" in work.attributes:
        needed = "a time of the whole work"
        raise InputError(needed, f"metric={work.attributes['metric']}", "it is a time per unit")
    if work.operator in COLLECTIVES:
        return collective(work, own_chip)
    # only collectives are described by a size in bytes instead of shapes
    if work.size_bytes is not None:
        needed = f"a collective of {' and '.join(COLLECTIVES)}"
        raise UnsupportedError(needed, work.operator or "no operator", "others are not timed here")
    chip, marks = chip_of(work.chip, own_chip)
    timed_work = as_groups(work)
    if work.operator == "scatter_add" and "segments" in work.attributes:
        # Sums of segments start from zeros that the measured kernels write: no x is read.
        timed_work = replace(work, operator="unsorted_segment_sum")
    if work.operator == "transpose" and work.dtypes == ("int64",):
        timed_work = in_pairs(work)
        marks = (*marks, "int64 moved as pairs of int32")
    answer = _timed(timed_work, chip, like)
    if any(NOT_PRINTED in mark for mark in marks):
        answer = replace(answer, bound_s=None)  # another bin may be quicker
    return replace(answer, marks=(*marks, *answer.marks))


def _language_step(work: Work, own_chip: Chip | None) -> Estimate:
    """Time a step of a language model, if the package that can do it is installed.

    That package imports this one; it is imported by its name here, when it is first needed.
    """
    try:
        published = import_module(LANGUAGE_ROWS)
    except ModuleNotFoundError as error:
        if error.name != LANGUAGE_ROWS:
            raise
        needed = "the package ascend_lab.llm"
        raise UnsupportedError(
            needed, "it is not installed", "steps of models are refused"
        ) from None
    answer: Estimate = published.estimate_row(work, own_chip)
    return answer


def _timed(work: Work, chip: Chip, like: str) -> Estimate:
    """Time a network, a handwritten product, a chain of kernels or an operator by its own rule."""
    if work.operator.startswith(ZOO):
        return network(work, chip, like)
    if work.operator in GROUPS:
        return grouped(work, chip)
    if work.operator in ESTIMATES:
        return ESTIMATES[work.operator](work, chip)
    if not is_chain(work):
        # where the library's own structure is known it is what was measured, not our kernel
        return as_library(work, chip, operator_alone(work, chip, like), like)
    # A chain's builder returns programs written by hand, the work of a single operator, or a graph.
    # mish is a graph, group_norm a program, causal attention one operator
    built = CHAINS[work.operator](work)
    if isinstance(built, Programs):
        return programs(work, built, chip)
    if isinstance(built, Work):
        return as_library(built, chip, operator_alone(built, chip, like), like)
    return as_library(work, chip, chain(work, built, chip), like)

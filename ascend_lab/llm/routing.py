"""How tokens find their experts on one device: two vector kernels of the library, and their times.

A layer with experts starts these kernels (vLLM on Ascend, fused_moe: experts_selector.py,
token_dispatcher.py and moe_mlp.py; CANN's operators in brackets):

    router        scores of all experts                                      (a product)
    choice        softmax or sigmoid, the k best, their weights              (MoeGatingTopK)
    tokens.to     places of T k pairs in the order of experts, rows copied   (MoeInitRouting)
    experts       two grouped products, and what is between them             (GroupedMatmul)
    tokens.back   k rows of a token added with their weights                 (MoeFinalizeRouting)

With tokens from several groups, dispatch and combine stand for the moves (`step`). No board's time
is known for the first two vector kernels: their steps are those of the sources named below, the
cost of an instruction is the chip's. Assumed is what Sort32 and MrgSort take, which no source
prints: a repeat of any other instruction for 32 pairs, and a cycle for each pair that is merged.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ascend_lab.compare.model import estimate
from ascend_lab.compare.row_writer import Rows, RowWriter, TileWriter, row_launch
from ascend_lab.compare.rows import Work
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Affine

GATING = "moe_gating_top_k"
LISTED = "listed"
"""Attribute of a grouped product: the groups of its list, of which only some have tokens."""
INIT_ROUTING = "moe_init_routing"
SORTED_AT_ONCE = 32
"""Numbers that one repeat of Sort32 brings in order, each with its place: 8 bytes a pair."""
LISTS = 4
"""Sorted lists that one MrgSort makes one of."""
SORT_BUFFERS_BYTES = 32
"""Bytes of UB that a pair takes while it is sorted: four buffers of pairs."""
STEPS_OF_MOVE = 2
"""Of the scalar unit, for the address of a single number that is stored."""


def gating_s(work: Work, chip: Chip) -> float:
    """Return the seconds of the choice of k experts for each token, a task on the device.

    `work.shapes` are scores (tokens, experts) and weights (tokens, k). A core has one token at a
    time, from its load to its store, and nothing overlaps. Chips whose cores are both cube and
    vector have another kernel, of which no source is known: softmax alone stands in for it.
    Source: hicann/ops-transformer, moe/moe_gating_top_k/op_kernel.
    """
    if chip.combined:
        return estimate(replace(work, operator="softmax", shapes=work.shapes[:1]), chip).model_s
    from ascend_lab.machine.isa import as_kernel
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    (tokens, experts), (_, chosen) = work.shapes
    rows = Rows(tokens, experts, "fp32")
    merged = max(1, merged_pairs(experts, chosen))
    start = partial(_gating, chosen=chosen, merged=merged)
    launch = row_launch(GATING, chip, rows, 1, start, chip.cores_of("vector"))
    timeline = simulate_kernel(as_kernel(launch), chip, DeviceMemory.of(chip))
    return replace(timeline, start="queued").task_s


def _gating(w: RowWriter, held: int, *, chosen: int, merged: int) -> TileWriter:
    """Declare scores, weights and numbers; write what a token takes."""
    experts = w.rows.columns
    x = w.source("x", held)
    weights = w.result("weights", chosen, w.rows.dtype, held)
    places = w.result("places", chosen, "int32", held)
    pairs = 2 * experts  # half as many fit a repeat

    def tile(first: Affine, count: int) -> None:
        x.load(first, count)
        w.vectors("vconv", experts)
        x.free()
        w.reduce("vcmax", 1)
        w.by_scalar(1)
        w.vectors("vadds vexp", experts)
        w.reduce("vcadd", 1)
        w.by_scalar(1)
        w.vectors("vdup vdiv", experts)
        w.vectors("vadds", experts)  # the experts' own numbers
        w.vectors("vcopy", pairs)  # Sort32
        w.by_scalar(merged)  # MrgSort, a cycle for each pair: the unit is busy as long
        w.vectors("vcopy", chosen)  # numbers out of pairs
        weights.alloc()
        places.alloc()
        w.vectors("vmuls vcopy", chosen)  # weights of the numbers, without any bias
        w.reduce("vcadd", 1)
        w.by_scalar(2)
        w.vectors("vdup vdiv vmuls vconv", chosen)
        weights.store(first, count)
        places.store(first, count)

    return tile


def merged_pairs(count: int, wanted: int = 0) -> int:
    """Return the pairs that all passes of MrgSort write until `count` of them are one list.

    128 are 4 lists of 32, one pass; 1000 are 32 lists, three passes. Of each list no more than
    `wanted` are merged, if that is given.
    """
    # 256 experts: 8 lists of 32, then 2 of 128, then one.
    lists = math.ceil(count / SORTED_AT_ONCE)
    length = min(SORTED_AT_ONCE, wanted or count)
    pairs = 0
    while lists > 1:
        pairs += lists * length
        lists = math.ceil(lists / LISTS)
        length = min(length * LISTS, wanted or count)
    return pairs


# -- tokens in the order of experts ----------------------------------------------------------------
def order_s(pairs: int, chip: Chip) -> float:
    """Return the seconds until each of T k pairs knows its place, before rows are copied.

    Few pairs: every core sorts all of them, twice: by expert, and by place to turn the order round.
    More than UB holds: each core sorts a share, fewer and fewer cores merge four lists into one,
    and places are stored number by number. All cores wait for each other after each of the steps
    sort, count and turn.
    Source: hicann/ops-transformer, moe/moe_init_routing_v2/docs, the design of the operator.
    """
    cost = chip.vector_costs.get("vcopy", chip.vector_costs["default"])
    one_sort = cost.head_cycles + cost.tail_cycles
    if pairs <= chip.buffers["UB"] // SORT_BUFFERS_BYTES:
        repeats = math.ceil(pairs / SORTED_AT_ONCE)
        return 2 * (one_sort + cost.slope_cycles * repeats + merged_pairs(pairs)) / chip.clock_hz
    cores = chip.cores_of("vector")
    share = math.ceil(pairs / cores)
    cycles = one_sort + cost.slope_cycles * math.ceil(share / SORTED_AT_ONCE) + merged_pairs(share)
    cycles += merged_by_fewer(pairs, cores)
    stores = chip.path("UB", "GM").startup_cycles + STEPS_OF_MOVE * chip.scalar_cycles
    cycles += share * stores
    cycles += 3 * chip.all_cores_cycles
    return cycles / chip.clock_hz


def merged_by_fewer(pairs: int, lists: int) -> int:
    """Return the cycles in which a list of each core becomes one of all: the last core has all.

    48 lists are merged by 12 cores, 12 by 3, 3 by one: pairs (1/12 + 1/3 + 1) cycles.
    """
    cycles = 0
    while lists > 1:
        lists = math.ceil(lists / LISTS)
        cycles += math.ceil(pairs / lists)
    return cycles


LIST_LINE_BYTES = 64
"""A line of the scalar unit's cache, and 8 numbers of the list of groups."""
LISTED_BYTES = 8
STEPS_OF_GROUP = 25
"""Of the scalar unit, for the sizes and offsets of a group, counted in the source."""


def listed_s(groups: int, chip: Chip) -> float:
    """Return the seconds in which a grouped product finds its work in the list of all groups.

    Every core walks through all groups, those without tokens too: it waits for each line of the
    list and adds up sizes and offsets. 128 groups are 16 lines: 3.5 us on a 910C.
    Source: hicann/ops-transformer, gmm/grouped_matmul/op_kernel/grouped_matmul.h (Process).
    """
    lines = math.ceil(groups * LISTED_BYTES / LIST_LINE_BYTES)
    cycles = lines * chip.device_memory.latency_cycles
    cycles += groups * STEPS_OF_GROUP * chip.scalar_cycles
    return cycles / chip.clock_hz


# -- the fullest device ----------------------------------------------------------------------------
def fullest(trials: float, share: float, devices: int) -> float:
    """Return the expected largest of the loads of some devices, each the sum of so many choices.

    A device's load has the mean n p and the variance n p (1 - p). Loads of several are nearly
    independent and normal: the largest of d lies as far above the mean as the largest of d
    standard normals does, z(d) = quantile of (d - 0.375) / (d + 0.25), by Blom.
    1024 choices for 16 devices: 64 on average, 77.7 on the fullest.
    """
    from statistics import NormalDist

    mean = trials * share
    if devices == 1:
        return mean
    z = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return min(trials, mean + z * math.sqrt(mean * (1 - share)))

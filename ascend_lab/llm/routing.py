"""Times the kernels that route tokens to the experts of a mixture-of-experts layer.

A layer with experts starts these kernels (vLLM on Ascend, fused_moe: experts_selector.py,
token_dispatcher.py and moe_mlp.py; CANN's operators in brackets):

    router        scores of all experts                                      (a product)
    choice        softmax or sigmoid, the k best, their weights              (MoeGatingTopK)
    tokens.to     T k (token, expert) pairs sorted by expert, rows copied    (MoeInitRouting)
    experts       two grouped products and the activation between them       (GroupedMatmul)
    tokens.back   k rows of a token added with their weights                 (MoeFinalizeRouting)

If tokens come from several groups, a decode step has collectives in place of tokens.to and
tokens.back (see `step`). No measured times are known for `choice` and `tokens.to`: their
instructions are counted from the sources named below and timed at the chip's rates. The times of
the sorting instructions are assumed, as no source states them: Sort32 takes as long as a repeat of
a copy for 32 pairs, and MrgSort one cycle for each pair that it merges.
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
"""Operator of `choice`: scores of experts to the k best of each token."""
LISTED_GROUPS = "listed"
"""Attribute of a grouped product: the number of groups in its list, with or without tokens."""
INIT_ROUTING = "moe_init_routing"
"""Operator of `tokens.to`: its attribute "pairs" is the number of pairs to sort, T k."""
SORT32_NUMBERS = 32
"""Numbers that one repeat of Sort32 sorts, each paired with its index: 8 bytes a pair."""
MERGED_LISTS = 4
"""Sorted lists that one MrgSort merges into one."""
SORT_BYTES_PER_PAIR = 32
"""Bytes of UB that a pair takes while it is sorted: four buffers of 8 bytes."""
SCALAR_STEPS_PER_STORE = 2
"""Steps of the scalar unit to compute the address of a single number and store it."""
SCALAR_LINE_BYTES = 64
"""Bytes of a line of the scalar unit's cache."""
GROUP_SIZE_BYTES = 8
"""Bytes of the entry of one group in the list."""
SCALAR_STEPS_PER_GROUP = 25
"""Steps of the scalar unit for the sizes and offsets of a group, counted in the source."""


def gating_s(work: Work, chip: Chip) -> float:
    """Return the seconds of the choice of k experts for each token, a task on the device.

    `work.shapes` are scores (tokens, experts) and weights (tokens, k). A core handles one token at
    a time, from its load to its store, and nothing overlaps. On chips whose cores have both a cube
    and a vector unit, such as the 910A, the kernel's source is not known: softmax is timed instead.
    Source: hicann/ops-transformer, moe/moe_gating_top_k/op_kernel.
    """
    if chip.combined:
        return estimate(replace(work, operator="softmax", shapes=work.shapes[:1]), chip).model_s
    from ascend_lab.machine.isa import as_kernel
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    (tokens, experts), (_, chosen) = work.shapes
    rows = Rows(tokens, experts, "fp32")
    merge_steps = max(1, merged_pairs(experts, chosen))
    write_gating = partial(_gating, chosen=chosen, merge_steps=merge_steps)
    launch = row_launch(GATING, chip, rows, 1, write_gating, chip.cores_of("vector"))
    timeline = simulate_kernel(as_kernel(launch), chip, DeviceMemory.of(chip))
    return replace(timeline, start="queued").task_s


def _gating(writer: RowWriter, buffer_rows: int, *, chosen: int, merge_steps: int) -> TileWriter:
    """Declare the buffers of a core, and return the function that writes one token's program."""
    experts = writer.rows.columns
    x = writer.source("x", buffer_rows)
    weights = writer.result("weights", chosen, writer.rows.dtype, buffer_rows)
    places = writer.result("places", chosen, "int32", buffer_rows)
    numbers_in_pairs = 2 * experts  # index and score: 8 bytes a pair, 32 pairs a repeat

    def tile(first_row: Affine, count: int) -> None:
        x.load(first_row, count)
        writer.vectors("vconv", experts)
        x.free()
        writer.reduce("vcmax", 1)
        writer.by_scalar(1)
        writer.vectors("vadds vexp", experts)
        writer.reduce("vcadd", 1)
        writer.by_scalar(1)
        writer.vectors("vdup vdiv", experts)
        writer.vectors("vadds", experts)  # the indices of the experts
        writer.vectors("vcopy", numbers_in_pairs)  # stands for Sort32
        writer.by_scalar(merge_steps)  # stands for MrgSort: a step for each merged pair
        writer.vectors("vcopy", chosen)  # the indices out of the pairs
        weights.alloc()
        places.alloc()
        writer.vectors("vmuls vcopy", chosen)  # the scores of the chosen experts, without the bias
        writer.reduce("vcadd", 1)
        writer.by_scalar(2)
        writer.vectors("vdup vdiv vmuls vconv", chosen)
        weights.store(first_row, count)
        places.store(first_row, count)

    return tile


def merged_pairs(count: int, best: int = 0) -> int:
    """Return the pairs that all passes of MrgSort write until `count` pairs are one sorted list.

    128 pairs are 4 lists of 32 and take one pass; 1000 pairs are 32 lists and take three passes.
    If `best` is above 0, only that many pairs of each list are merged.
    """
    # 256 experts: 8 lists of 32, then 2 of 128, then one.
    lists = math.ceil(count / SORT32_NUMBERS)
    length = min(SORT32_NUMBERS, best or count)
    pairs = 0
    while lists > 1:
        pairs += lists * length
        lists = math.ceil(lists / MERGED_LISTS)
        length = min(length * MERGED_LISTS, best or count)
    return pairs


# -- tokens in the order of experts ----------------------------------------------------------------
def init_routing_s(pairs: int, chip: Chip) -> float:
    """Return the seconds to sort T k (token, expert) pairs by expert, before rows are copied.

    If all pairs fit into UB, every core sorts all of them twice: by expert, and by position to
    invert the permutation. Otherwise each core sorts a share, fewer and fewer cores merge four
    lists into one, and positions are stored number by number. All cores wait for each other after
    sorting, after counting and after inverting.
    Source: hicann/ops-transformer, moe/moe_init_routing_v2/docs, the design of the operator.
    """
    cost = chip.vector_costs.get("vcopy", chip.vector_costs["default"])
    one_sort = cost.head_cycles + cost.tail_cycles
    if pairs <= chip.buffers["UB"] // SORT_BYTES_PER_PAIR:
        repeats = math.ceil(pairs / SORT32_NUMBERS)
        return 2 * (one_sort + cost.slope_cycles * repeats + merged_pairs(pairs)) / chip.clock_hz
    cores = chip.cores_of("vector")
    core_pairs = math.ceil(pairs / cores)
    core_repeats = math.ceil(core_pairs / SORT32_NUMBERS)
    cycles = one_sort + cost.slope_cycles * core_repeats + merged_pairs(core_pairs)
    cycles += merge_tree_cycles(pairs, cores)
    store = chip.path("UB", "GM").startup_cycles + SCALAR_STEPS_PER_STORE * chip.scalar_cycles
    cycles += core_pairs * store
    cycles += 3 * chip.all_cores_cycles
    return cycles / chip.clock_hz


def merge_tree_cycles(pairs: int, lists: int) -> int:
    """Return the cycles of a tree of merges in which the last core writes all pairs.

    48 lists are merged by 12 cores, 12 lists by 3 cores and 3 lists by one core. A core takes a
    cycle a pair: pairs (1/12 + 1/3 + 1) cycles.
    """
    cycles = 0
    while lists > 1:
        lists = math.ceil(lists / MERGED_LISTS)
        cycles += math.ceil(pairs / lists)
    return cycles


def group_list_s(groups: int, chip: Chip) -> float:
    """Return the seconds that a grouped product takes to read its list of groups.

    Every core walks through all groups, including those without tokens: it waits for each line of
    the list and adds up sizes and offsets. 128 groups are 16 lines: 3.5 us on a 910C.
    Source: hicann/ops-transformer, gmm/grouped_matmul/op_kernel/grouped_matmul.h (Process).
    """
    lines = math.ceil(groups * GROUP_SIZE_BYTES / SCALAR_LINE_BYTES)
    cycles = lines * chip.device_memory.latency_cycles
    cycles += groups * SCALAR_STEPS_PER_GROUP * chip.scalar_cycles
    return cycles / chip.clock_hz


# -- the fullest device ----------------------------------------------------------------------------
def expected_largest_load(trials: float, share: float, devices: int) -> float:
    """Return the expected load of the fullest of d devices when n choices hit each with share p.

    A device's load has mean n p and variance n p (1 - p), and the loads are treated as independent
    and normal. The expected maximum of d standard normals is about the normal quantile of
    (d - 0.375) / (d + 0.25) (Blom's formula).
    1024 choices for 16 devices: 64 on average, 77.7 on the fullest.
    """
    from statistics import NormalDist

    mean = trials * share
    if devices == 1:
        return mean
    normal_quantile = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return min(trials, mean + normal_quantile * math.sqrt(mean * (1 - share)))

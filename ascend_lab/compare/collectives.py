"""Times measured collectives (all_reduce, all_to_all): the quickest algorithm on a topology."""

from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import chip_of, is_measurement
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

EXPERT_KEYS = ("ep", "tokens", "hidden", "topk")
"""Attributes of rows whose collective moves the tokens of experts."""
TOKEN_DTYPES = ("int8", "fp16", "bf16")
LATE_HOSTS = "as measured also a wait for late hosts"
"""A remark on a dispatch: it ends when the last rank has sent, whose host may have begun later.

A combine follows it on each device's queue, so all ranks begin it together. Source: the benchmark
of sgl-kernel-npu, which sets a barrier before the first of thirty calls and averages all.
"""
OTHER_TOPOLOGIES = {"A3 pod, HCCS": "a3-pod"}
"""A source's name of its topology -> our preset, which gets as many devices as there are ranks."""


def collective(work: Work, own_chip: Chip | None) -> Estimate:
    """Time a collective by its quickest algorithm; fewer ranks than devices use the first ones."""
    from ascend_lab.cluster import collective_time, load_topology
    from ascend_lab.cluster.loader import TOPOLOGIES

    # by the wall clock a collective also waits for the hosts of all ranks
    if work.timing != "kernel":
        needed = f"{work.operator}: the time of its tasks on the devices, timing=kernel"
        raise UnsupportedError(needed, work.timing, "what hosts do meanwhile has no model")
    for word, value in work.attributes.items():
        if word not in ("ranks", "topology", *EXPERT_KEYS) and not is_measurement(word):
            needed = f"{work.operator}: attributes ranks and topology"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")
    name = work.attributes.get("topology")
    ranks = work.attributes.get("ranks")
    if work.size_bytes is None:
        raise InputError(f"{work.operator}: inputs as bytes=N", "none", "correct that row")
    marks = []
    if name in OTHER_TOPOLOGIES and type(ranks) is int:
        marks.append(f"topology: as {OTHER_TOPOLOGIES[name]}")
        # "a3-pod:64": the preset with as many devices as the row has ranks
        name = f"{OTHER_TOPOLOGIES[name]}:{ranks}"
    if not isinstance(name, str) or name.partition(":")[0] not in TOPOLOGIES:
        needed = f"{work.operator}: a topology among {', '.join(TOPOLOGIES)}"
        raise InputError(needed, shown(name), "none is guessed")
    topology = load_topology(name)
    if type(ranks) is not int or not 2 <= ranks <= topology.size:
        needed = f"{work.operator}: ranks from 2 to {topology.size}, the devices of {name}"
        raise InputError(needed, shown(ranks), "correct that row")
    fastest = collective_time(work.operator, topology, work.size_bytes, placement=range(ranks))
    marks.append(f"{fastest.algorithm}, the quickest of the model")
    tokens_s = 0.0
    # an all_to_all of experts also moves tokens inside each device
    if work.attributes.keys() >= set(EXPERT_KEYS):
        chip, chip_marks = chip_of(work.chip, own_chip)
        tokens_s, tokens_mark = tokens_moved(work, chip)
        marks += [*chip_marks, tokens_mark]
    return Estimate(fastest.time_s + tokens_s, fastest.lower_bound_s, "links", {}, tuple(marks))


def tokens_moved(work: Work, chip: Chip) -> tuple[float, str]:
    """Return the seconds in which a rank moves its experts' tokens in its memory, and a remark.

        dispatch: received rows leave the buffer that peers write to       2 B / memory rate
        combine:  a sum over the topk rows of every token          (B + B / topk) / memory rate

    B is the bytes of all rows. A core sends all of its rows before it begins with what came in, so
    these seconds follow those of the links. Rows of int8 mean a dispatch: sums are exchanged in
    wider formats. A row is quantised while others are on the links, which costs no time of its own.
    Source: sgl-project/sgl-kernel-npu @f425bdf1, csrc/deepep/ops/op_kernel: the phases of
    moe_distribute_dispatch_v2 and moe_distribute_combine_v2.
    """
    dtype = ", ".join(work.dtypes)
    topk = work.attributes["topk"]
    if dtype not in TOKEN_DTYPES:
        needed = f"{work.operator}: tokens in {', '.join(TOKEN_DTYPES)}"
        raise UnsupportedError(needed, dtype or "none", "leave out the words on experts")
    if type(topk) is not int or topk < 1:
        raise InputError(f"{work.operator}: topk above 0", shown(topk), "correct that row")
    row_bytes = work.size_bytes or 0.0
    if dtype == "int8":
        # every byte is read and written once
        moved_bytes = 2.0 * row_bytes
        mark = f"dispatch: with the copy to the experts; {LATE_HOSTS}"
    else:
        # topk rows are read for one row that is written
        moved_bytes = row_bytes + row_bytes / topk
        mark = "combine: with the sum over the experts of a token"
    return moved_bytes / chip.device_memory.rate_bytes_per_s, mark

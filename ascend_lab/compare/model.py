"""What the model says of a measured row: seconds, a bound that no schedule beats, what limits it.

`timing` says what counts. `kernel` is a profiler's task on the device, from the start of the task
there (`queued_launch_s` of the chip, more on cores of two kinds) to its end. `wall` is with all of
a launch by the host, `step` that of a whole network. `l2` says where operands lie.

The bound is that of memory's peak rate (`memory_peak_bytes_per_s`), whatever rate kernels reach: no
board may beat it.

Attributes are of three kinds: those that the operator knows, those that describe (they change no
result, or are checked), and all others. A row with one of the others is refused by name: what it
means for the time is not guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ascend_lab.chip import DTYPE_BYTES, PRESETS, Chip, load_chip
from ascend_lab.compare.chains import CHAINS, GROUPS, KERNELS, attention, is_chain
from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compare.table import COLLECTIVES
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown

if TYPE_CHECKING:
    from ascend_lab.graph import Bound, Graph, NetworkTimeline
    from ascend_lab.kernels import GemmSchedule
    from ascend_lab.sim import KernelTimeline

ZOO = "zoo:"
LIKE = ("cann",)
"""Compilers that networks and products can be compiled as by, beside ours (`graph.like_cann`)."""
SMALL = "small_channel"
"""Word of a network's row: 1, its first layer reads pixels of 4 channels (--enable_small_channel).

Our compiler decides that by itself.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The model's seconds and those of the bound; `limit` is the pipe or part that takes longest.

    `busy` are shares of the model's own time, by pipe; `marks` what to keep in mind.
    """

    model_s: float
    bound_s: float
    limit: str
    busy: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


def estimate(work: Work, own: Chip | None = None, like: str = "") -> Estimate:
    """Return what the model says of a work; `own` is a chip of one's own, used by its name.

    With `like` "cann" networks and products are compiled as by that compiler. Raises an
    `AscendLabError` that says what the model cannot do.
    """
    if "metric" in work.attributes:
        needed = "a time of the whole work"
        raise InputError(needed, f"metric={work.attributes['metric']}", "it is a time per unit")
    if work.operator in COLLECTIVES:
        return _collective(work, own)
    chip, marks = _chip(work.chip, own)
    if work.operator == "scatter_add" and "segments" in work.attributes:
        # Sums of segments start from zeros that the measured kernels write: no x is read.
        work = replace(work, operator="unsorted_segment_sum")
    if work.operator.startswith(ZOO):
        found = _network(work, chip, like)
    elif is_chain(work):
        made = CHAINS[work.operator](work)
        if isinstance(made, Work):
            found = _operator(made, chip, like)
        else:
            found = _chain(work, made, chip)
    elif work.operator in GROUPS:
        found = _groups(work, chip)
    elif work.operator == "transpose" and work.dtypes == ("int64",):
        found = _operator(_in_pairs(work), chip, like)
        marks = (*marks, "int64 moved as pairs of int32")
    else:
        found = _operator(work, chip, like)
    return replace(found, marks=(*marks, *found.marks))


# -- chips -----------------------------------------------------------------------------------------
OTHER_WORDS = {
    "A3 die, 24 cores": ("Ascend910C", ""),
    "Ascend950 (32 cores)": ("Ascend950PR", ""),
    "A3 die": ("Ascend910C", "bin not printed"),
    "A3 (pod)": ("Ascend910C", "bin not printed"),
    "A2, 20 cores": ("Ascend910B3", "bin not printed"),
    "A2, bin not named": ("Ascend910B2", "bin not printed"),
    "A2 (8 cards)": ("Ascend910B2", "bin not printed"),
    "unknown 910B4 class": ("Ascend910B4", "bin not printed, class concluded from its times"),
    "310P class, not named": ("Ascend310P3", "bin not printed"),
}
"""Words of a source for its chip -> the preset that it is timed as, and what is not certain."""


def _chip(name: str, own: Chip | None) -> tuple[Chip, tuple[str, ...]]:
    """Return the chip of a row, and a mark where the row does not name it by a preset's name.

    It is one of one's own by its name, or where a row names none; a preset; or a preset that stands
    for a source's words. Raises `InputError` for others: what another board has is not guessed.
    """
    if own is not None and name in ("", own.name):
        return own, ()
    if name in PRESETS:
        return load_chip(name), ()
    if name in OTHER_WORDS:
        preset, doubt = OTHER_WORDS[name]
        return load_chip(preset), (f"chip: as {preset}" + (f", {doubt}" if doubt else ""),)
    raise InputError(f"chip: one of {', '.join(PRESETS)}", shown(name), "none is guessed")


# -- attributes ------------------------------------------------------------------------------------
DESCRIBE = ("heads", "kv_heads", "queries", "keys", "beta1", "beta2")
"""Words that say again what the shapes say, or change numbers but no time."""
SCHEDULE = (
    *("base", "single", "tile", "grid", "step", "step_k", "mix", "depth", "swizzle", "stagger"),
    *("split_k", "a_in_l1", "kind", "nd2nz"),
)
"""Words on how the measured kernel was written: ours has the schedule that it would choose."""
MEASURED = ("_us", "_share")
"""Ends of words that tell more measurements of the same run."""
PRINTED = ("printed_", "peer_")
"""Beginnings of words that tell what the source printed."""
ALSO_CALLED = {("leaky_relu", "slope"): "alpha"}
"""(operator, word) -> what the operator calls it."""
SAME_AS_FIRST_SIZE = {"batch_matmul": "groups"}
"""Operators -> a word that has to be the first size of their first input."""


HALVES_IN_FP32 = ("gelu", "sigmoid")
"""Operators of ours that compute halves in fp16 where the measured kernel does it in fp32.

With bf16 ours do the same work: as many bytes, a cast to fp32 and one back. Source: CANN toolkit,
TBE operators Gelu and Sigmoid on the 910B, whose default is high precision.
"""


def _is_told(word: str) -> bool:
    return word.endswith(MEASURED) or word.startswith(PRINTED)


@dataclass(slots=True)
class _Settings:
    """The attributes that an operator knows, the cores it may use, what to keep in mind."""

    own: dict[str, Any] = field(default_factory=dict)
    cores: int | None = None
    marks: list[str] = field(default_factory=list)


def _settings(work: Work, chip: Chip, known: Mapping[str, Any]) -> _Settings:
    """Sort the attributes of an operator's row; raises `UnsupportedError` for any it cannot do."""
    found = _Settings()
    schedule = []
    for word, value in work.attributes.items():
        name = ALSO_CALLED.get((work.operator, word), word)
        if name in known:
            found.own[name] = value
        elif word in SCHEDULE:
            schedule.append(word)
        elif word in ("cores", "aiv_cores"):
            found.cores = _cores(chip, word, value)
        elif mark := _mark(work, word, value):
            found.marks.append(mark)
    if schedule:
        found.marks.append(f"schedule of the source not taken ({', '.join(schedule)})")
    return found


def _mark(work: Work, word: str, value: Any) -> str:
    """Return what a word that is no attribute of the operator makes of the row, "" if nothing.

    Raises `UnsupportedError` for a word whose meaning for the time is unknown.
    """
    if word in DESCRIBE or _is_told(word):
        return ""
    if word == SAME_AS_FIRST_SIZE.get(work.operator):
        _check_first_size(work, word, value)
        return ""
    if word == "layout":
        return f"measured on {value} tensors"
    if word == "approximate" and work.operator == "gelu":
        return "" if value == "tanh" else f"approximate={value} asked for, tanh form computed"
    needed = f"{work.operator}: attributes that the operator has"
    raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")


def _check_first_size(work: Work, word: str, value: Any) -> None:
    """Raise `UnsupportedError` unless an attribute says what the first size says."""
    if not work.shapes or work.shapes[0][0] != value:
        first = work.shapes[0][0] if work.shapes else "none"
        needed = f"{work.operator}: {word} equal to the first size, {first}"
        raise UnsupportedError(needed, shown(value), "parts of other sizes have no operator")


def _cores(chip: Chip, word: str, value: Any) -> int:
    """Return the cores of a chip for `cores` or, of the vector kind, `aiv_cores`."""
    each = chip.vector_cores_per_core if word == "aiv_cores" else 1
    most = chip.core_count * each
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most or value % each:
        needed = f"{word} from {each} to {most}, what {chip.name} has, in steps of {each}"
        raise UnsupportedError(needed, shown(value), "another chip was measured")
    return int(value) // each


# -- operators -------------------------------------------------------------------------------------
def _operator(work: Work, chip: Chip, like: str) -> Estimate:
    """Time one operator of the library by its default schedule."""
    from ascend_lab import ops

    operator = ops.get(work.operator)
    if operator.name == attention.FLASH:
        work = attention.as_called(work)
    if not work.shapes:
        got = "bytes" if work.size_bytes is not None else "none"
        raise InputError(f"{work.operator}: a shape per input", got, "write them in its order")
    settings = _settings(work, chip, operator.attrs)
    if settings.cores is not None:
        chip = replace(chip, core_count=settings.cores)
    dtypes = _dtypes(work, settings.own)
    if work.operator in HALVES_IN_FP32 and dtypes[0] == "fp16" and "bf16" in chip.cube:
        dtypes = ("bf16",) * len(dtypes)
        settings.marks.append("halves computed in fp32 as measured: timed as bf16")
    if like:
        tiling = _like_tiling(work, chip, dtypes, settings)
        line = ops.time(
            operator,
            work.shapes,
            dtypes,
            chip,
            warm_l2=work.l2 == "warm",
            tiling=tiling,
            **settings.own,
        )
    else:
        line = _timeline(work, chip, dtypes, settings.own)
    line = replace(line, start="queued" if work.timing == "kernel" else "cold")
    converting_s = 0.0
    if work.conversions and operator.has("convolution"):
        shapes = (*work.shapes[:2], *operator.infer(*work.shapes, **settings.own))
        converting_s = _converting_s(shapes, dtypes[0], work.conversions, chip)
        settings.marks.append(_conversions_told(work.conversions, dtypes[0]))
    bound_s = _bound_s(work, at_peak(chip), dtypes, settings.own)
    limits = Counter({"sync": line.sync_cycles, "start": line.launch_cycles})
    for phase in line.phases:
        limits[phase.limit] += phase.cycles
    busy = {pipe: busy / max(line.total_cycles, 1) for pipe, busy in line.busy_cycles.items()}
    if work.l2 == "unknown":
        settings.marks.append("l2 unknown: timed cold")
    limit = max(limits, key=lambda name: limits[name])
    model_s = line.time_s + converting_s
    return Estimate(model_s, bound_s, limit, busy, tuple(settings.marks))


def at_peak(chip: Chip) -> Chip:
    """Return a chip whose memory moves what its interface could at best: nothing is quicker."""
    memory = replace(chip.device_memory, rate_bytes_per_s=chip.memory_peak_bytes_per_s)
    return replace(chip, device_memory=memory)


def _in_pairs(work: Work) -> Work:
    """Return a transpose of int64 as one of int32: halves of a number are a last axis, which stays.

    (a, b) with perm (1, 0) becomes (a, b, 2) with perm (1, 0, 2).
    """
    if len(work.shapes) != 1:
        raise InputError("transpose: one input", str(len(work.shapes)), "mend that row")
    (shape,) = work.shapes
    rank = len(shape)
    perm = work.attributes.get("perm") or tuple(reversed(range(rank)))
    if not isinstance(perm, tuple) or sorted(perm) != list(range(rank)):
        needed = f"transpose: perm with each of 0..{rank - 1} once"
        raise InputError(needed, shown(perm), "mend that row")
    attributes = {**work.attributes, "perm": (*perm, rank)}
    return replace(work, shapes=((*shape, 2),), dtypes=("int32",), attributes=attributes)


def _timeline(
    work: Work, chip: Chip, dtypes: Sequence[str], attributes: Mapping[str, Any]
) -> KernelTimeline:
    """Return the timeline of a kernel whose operands lie in L2, or not, and whose results may.

    An L2 that is a cache keeps what a kernel writes: 134 MB of results cost no trip to memory.
    """
    from ascend_lab import ops, sim

    if work.l2 == "warm":
        return ops.time(work.operator, work.shapes, dtypes, chip, warm_l2=True, **attributes)
    kernel = ops.compile(work.operator, work.shapes, dtypes, chip, **attributes)
    return sim.simulate_kernel(kernel, chip, sim.DeviceMemory.of(chip))


def _turns_blocks(dtype: str) -> bool:
    """Tell whether ours turns 16 channels of a format in one go, as the device does."""
    return DTYPE_BYTES[dtype] == 2


def _conversions_told(count: int, dtype: str) -> str:
    """Return what the model did about so many changes of layout that were measured."""
    if _turns_blocks(dtype):
        return f"with {count} changes of layout, as measured"
    return f"{count} changes of layout not timed: ours of {dtype} would move single elements"


def _converting_s(shapes: Sequence[Shape], dtype: str, count: int, chip: Chip) -> float:
    """Return the seconds of changing the layout of the `count` largest images and weights."""
    from ascend_lab.graph import Graph, Node, Road, TensorType, finish_stages
    from ascend_lab.graph.compile import Front

    if not _turns_blocks(dtype):
        return 0.0
    total_s = 0.0
    for shape in sorted(shapes, key=math.prod, reverse=True)[:count]:
        plain = TensorType(shape, dtype)
        types = {"x": plain, "y": replace(plain, layout="NC1HWC0")}
        node = Node("y", "trans_data", ("x",), ("y",), {"layout": "NC1HWC0"})
        graph = Graph("layout", ("x",), ("y",), (node,), types)
        times = finish_stages(Front({}, graph, graph), chip, Road(dtype="")).timeline()
        total_s += times.time_s - (chip.launch_overhead_s - chip.queued_launch_s)
    return total_s


def _like_tiling(
    work: Work, chip: Chip, dtypes: Sequence[str], settings: _Settings
) -> GemmSchedule | None:
    """Return the tiling that CANN publishes for a product; None, and a mark, for all else."""
    from ascend_lab.graph.like_cann import tiling_of_operator

    if work.operator != "matmul":
        settings.marks.append("no tiling of CANN's is published: ours")
        return None
    return tiling_of_operator(work.shapes, dtypes, chip, settings.own)


def _dtypes(work: Work, attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a number format for each input; one given is the operator's main format."""
    from ascend_lab import ops
    from ascend_lab.dsl.tensor import ALIASES

    operator = ops.get(work.operator)
    given = tuple(ALIASES.get(dtype, dtype) for dtype in work.dtypes)
    if len(given) == 1:
        return operator.input_types(len(work.shapes), given[0], **attributes)
    if len(given) != len(work.shapes):
        needed = f"dtype: one, or one for each of {len(work.shapes)} inputs"
        raise InputError(needed, str(len(given)), "mend that row")
    return given


def _bound_s(work: Work, chip: Chip, dtypes: Sequence[str], attributes: Mapping[str, Any]) -> float:
    """Return the bound of a graph that is this one operator (see `graph.bound`).

    Without the launch for a kernel.
    """
    from ascend_lab.graph import GraphBuilder, bound_of

    draft = GraphBuilder(work.operator)
    tensors = [
        draft.input(f"x{place}", shape, dtype)
        for place, (shape, dtype) in enumerate(zip(work.shapes, dtypes, strict=True))
    ]
    results = draft.add_node(work.operator, *tensors, **attributes)
    many = results if isinstance(results, tuple) else (results,)
    for result in many:
        draft.output(result)
    graph = draft.build()
    bound = bound_of(graph, chip)
    if work.operator in READ_WHOLE and not bound.launch:
        bound = replace(bound, launch=chip.launch_overhead_s)
    bound = replace(bound, memory=_memory_s(work, graph, chip, bound.memory))
    return bound.work_s if work.timing == "kernel" else bound.time_s


def _memory_s(work: Work, graph: Graph, chip: Chip, of_network_s: float) -> float:
    """Return the least seconds of one operator's bytes across the memory interface.

    A network's results go to memory, those of one operator may stay in an L2 of either kind. What
    is changed in place is neither read nor written where no index points: only the rest is read.
    """
    from ascend_lab import ops

    if work.l2 == "warm":
        return 0.0
    rate = chip.device_memory.rate_bytes_per_s
    if ops.get(work.operator).has("in place"):
        return sum(graph.types[name].data_bytes for name in graph.inputs[1:]) / rate
    written = sum(graph.types[name].data_bytes for name in graph.outputs)
    kept = min(written, chip.l2.size_bytes)
    if work.operator in READ_WHOLE:
        read = sum(graph.types[name].data_bytes for name in graph.inputs)
        return (read + written - kept) / rate
    in_cache = chip.l2.kind == "cache"  # the network's bound has left them out already
    return of_network_s if in_cache else max(0.0, of_network_s - kept / rate)


READ_WHOLE = ("transpose", "concat", "adam", "sgd_momentum")
"""Operators without a bound as a graph (a graph may do without a move), alone they read it all."""


# -- chains of operators ---------------------------------------------------------------------------
def ends_as_given(graph: Graph) -> Graph:
    """Return a graph with layouts; where an input lies in blocks, so do the cube's results."""
    from ascend_lab.graph.layout import Assigner

    blocked = any(graph.types[name].layout != "ND" for name in graph.inputs)
    return Assigner(graph).assigned(None if blocked else "ND")


def _chain(work: Work, graph: Graph, chip: Chip) -> Estimate:
    """Time the kernels of a small graph, each tensor in the format that the row gives it."""
    from ascend_lab.graph import Road, bound_of, finish_stages, front_stages, network, tasks

    if "cores" in work.attributes:
        cores = _cores(chip, "cores", work.attributes["cores"])
        chip = replace(chip, core_count=cores)
    road = Road(dtype="", layouts=ends_as_given)
    front = front_stages(graph, chip, road)
    if cut := KERNELS.get(work.operator):
        groups = cut(work, front.laid_out)
        compiled = tasks.compile_tasks(front.laid_out, chip, groups, road.start)
        times = network.simulate_graph(compiled)
        cut_by = "cut as the source's"
    else:
        times = finish_stages(front, chip, road).timeline()
        cut_by = "fused by our rules"
    bound = bound_of(front.rewritten, at_peak(chip))
    marks = [f"kernels of ours: {len(times.operators)}, {cut_by}"]
    if work.l2 != "cold":
        marks.append(f"l2 {work.l2}: timed cold")
    if aside := times.on_ai_cpu:
        marks.append(", ".join(line.type for line in aside))
    return _of_tasks(work, chip, times, bound, tuple(marks))


def _of_tasks(
    work: Work,
    chip: Chip,
    times: NetworkTimeline,
    bound: Bound,
    marks: tuple[str, ...] = (),
) -> Estimate:
    """Return what a chain of kernels takes; a sum of a profiler's tasks is without the host's part.

    The host starts the first one only: the others wait in the device's queue.
    """
    from ascend_lab.graph.compile import account

    limit = _largest(account(times, bound)["ledger"])
    if work.timing == "kernel":
        by_host_s = chip.launch_overhead_s - chip.queued_launch_s
        return Estimate(times.time_s - by_host_s, bound.work_s, limit, {}, marks)
    return Estimate(times.time_s, bound.time_s, limit, {}, marks)


def _groups(work: Work, chip: Chip) -> Estimate:
    """Time a grouped product, and what stands before and behind it; each starts on its own."""
    from ascend_lab.graph import bound_of, simulate_graph
    from ascend_lab.graph.compile import Front, Road, finish_stages
    from ascend_lab.ops.grouped import default_grouped
    from ascend_lab.sim import simulate_kernel

    found, road = GROUPS[work.operator](work), Road(dtype="", layouts=ends_as_given)
    bound = bound_of(found.products, at_peak(chip))
    line = simulate_kernel(default_grouped(found.shape, chip, found.epilogue), chip)
    by_host_s = chip.launch_overhead_s - chip.queued_launch_s
    parts = {"products": line.task_s}
    kernels = 1
    if found.before:
        stages = finish_stages(Front({}, found.before, found.before), chip, road)
        times = stages.timeline()
        parts["weights"] = times.time_s - by_host_s
        kernels += len(times.operators)
    if found.behind:
        times = simulate_graph(road.stages(found.behind, chip).compiled, written=("y",))
        parts["behind"] = times.time_s - by_host_s
        kernels += len(times.operators)
    marks = (f"{kernels} kernels of ours, the groups in one",)
    limit = max(parts, key=lambda part: parts[part])
    model_s = sum(parts.values())
    if work.timing == "kernel":
        return Estimate(model_s, bound.work_s, limit, {}, marks)
    return Estimate(model_s + by_host_s, bound.time_s, limit, {}, marks)


# -- networks --------------------------------------------------------------------------------------
NETWORK_DTYPES = ("fp16", "bf16", "int8")


def _network(work: Work, chip: Chip, like: str) -> Estimate:
    """Time a network of the zoo, compiled as the command `simulate` does."""
    from ascend_lab.graph import Road, bound_of, finish_stages, front_stages, placement, tiled
    from ascend_lab.graph.like_cann import cann_road

    if "training" in work.group:
        needed = f"{work.operator}: inference"
        raise UnsupportedError(needed, work.group, "a step of training is more than its network")
    dtype = work.dtypes[0] if len(work.dtypes) == 1 else ", ".join(work.dtypes) or "none"
    if dtype not in NETWORK_DTYPES:
        needed = f"{work.operator}: a network in {', '.join(NETWORK_DTYPES)}"
        raise UnsupportedError(needed, dtype, "networks run in no other format")
    graph = _graph(work)
    small = work.attributes.get(SMALL, 0) == 1
    road = cann_road(chip, dtype, small_channel=small) if like else Road(dtype=dtype)
    front = front_stages(graph, chip, road)
    if placement.too_large(front.laid_out, chip.device_memory.size_bytes):
        times, _ = tiled.simulate_within(front, chip, None, road)
    else:
        times = finish_stages(front, chip, road).timeline()
    bound = bound_of(front.rewritten, at_peak(chip))
    return _of_tasks(work, chip, times, bound)


def _largest(ledger: Mapping[str, float]) -> str:
    """Return what takes longest above the bound."""
    above = {part: time_s for part, time_s in ledger.items() if part != "bound"}
    return max(above, key=lambda part: above[part], default="bound")


def _graph(work: Work) -> Graph:
    """Return the zoo's network at the row's batch and sizes; raises where they contradict."""
    from ascend_lab.graph import zoo

    batch: Any = None
    for word, value in work.attributes.items():
        if word == "batch":
            batch = value
        elif not _is_told(word) and not _says_again(work, word, value):
            needed = f"{work.operator}: attributes that its time on one device depends on"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "none is guessed")
    if batch is None and work.shapes:
        batch = work.shapes[0][0]
    whole = isinstance(batch, int) and not isinstance(batch, bool)
    if not whole or batch < 1 or (work.shapes and work.shapes[0][0] != batch):
        first = f", inputs of {work.shapes[0][0]}" if work.shapes else ""
        needed = f"{work.operator}: a batch above 0 that inputs and attributes agree on"
        raise InputError(needed, f"batch={shown(batch)}{first}", "mend that row")
    graph = zoo.load_model(work.operator, batch=batch).graph
    name = graph.inputs[0]
    if work.shapes and graph.types[name].shape != work.shapes[0]:
        graph = zoo.load_model(work.operator, shapes={name: work.shapes[0]}).graph
    return graph


def _says_again(work: Work, word: str, value: Any) -> bool:
    """Tell whether a word says what is so anyway: one device, the length that the shapes have.

    Or how the first layer was compiled, which no result depends on.
    """
    if word == SMALL:
        return value in (0, 1)
    if word == "context":
        return bool(work.shapes) and work.shapes[0][-1] == value
    return word in ("cards", "ranks", "tp") and value == 1


# -- collectives -----------------------------------------------------------------------------------
OF_EXPERTS = ("ep", "tokens", "hidden", "topk")
"""Words on the experts whose tokens a collective moves: the bytes are what counts."""
OTHER_TOPOLOGIES = {"A3 pod, HCCS": "a3-pod"}
"""Words of a source for its topology -> the preset, with as many devices as ranks."""


def _collective(work: Work, own: Chip | None) -> Estimate:
    """Time a collective by the quickest algorithm on a topology, its first devices if fewer."""
    from ascend_lab.cluster import collective_time, load_topology
    from ascend_lab.cluster.loader import TOPOLOGIES

    for word, value in work.attributes.items():
        if word not in ("ranks", "topology", *OF_EXPERTS) and not _is_told(word):
            needed = f"{work.operator}: attributes ranks and topology"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")
    name, ranks = work.attributes.get("topology"), work.attributes.get("ranks")
    if work.size_bytes is None:
        raise InputError(f"{work.operator}: inputs as bytes=N", "none", "mend that row")
    marks = []
    if name in OTHER_TOPOLOGIES and type(ranks) is int:
        marks.append(f"topology: as {OTHER_TOPOLOGIES[name]}")
        name = f"{OTHER_TOPOLOGIES[name]}:{ranks}"
    if not isinstance(name, str) or name.partition(":")[0] not in TOPOLOGIES:
        needed = f"{work.operator}: a topology among {', '.join(TOPOLOGIES)}"
        raise InputError(needed, shown(name), "none is guessed")
    topology = load_topology(name)
    if type(ranks) is not int or not 2 <= ranks <= topology.size:
        needed = f"{work.operator}: ranks from 2 to {topology.size}, the devices of {name}"
        raise InputError(needed, shown(ranks), "mend that row")
    found = collective_time(work.operator, topology, work.size_bytes, placement=range(ranks))
    marks.append(f"{found.algorithm}, the quickest of the model")
    launch_s = 0.0
    if work.timing != "kernel":
        try:
            chip, of_chip = _chip(work.chip, own)
        except InputError:
            marks.append("the launch of this chip is unknown: none counted")
        else:
            launch_s = chip.launch_overhead_s
            marks += [*of_chip, "of the host's work a launch, no library's"]
    return Estimate(
        found.time_s + launch_s, found.lower_bound_s + launch_s, "links", {}, tuple(marks)
    )

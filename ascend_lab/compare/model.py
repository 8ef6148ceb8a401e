"""What the model says of a measured row: seconds, a bound that no schedule beats, what limits it.

`timing` says what counts. `kernel` is a profiler's task on the device: all but what the host takes
to launch it (`launch_overhead_s` of the chip); the start of cores of two kinds stays in, because a
profiler's task holds it. `wall` and `step` are with the launch. `l2` says where operands lie.

Attributes are of three kinds: those that the operator knows, those that describe (they change no
result, or are checked), and all others. A row with one of the others is refused by name: what it
means for the time is not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ascend_lab.chip import PRESETS, Chip, load_chip
from ascend_lab.compare.chains import CHAINS
from ascend_lab.compare.rows import Work
from ascend_lab.compare.table import COLLECTIVES
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown

if TYPE_CHECKING:
    from ascend_lab.graph import Graph
    from ascend_lab.kernels import GemmSchedule

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
    chip = _chip(work.chip, own)
    if work.operator.startswith(ZOO):
        return _network(work, chip, like)
    if work.operator in CHAINS:
        return _chain(work, chip)
    return _operator(work, chip, like)


def _chip(name: str, own: Chip | None) -> Chip:
    """Return the chip of a row: one of one's own by its name, or where a row names none; a preset.

    Raises `InputError` for other names: what a board in other words has is not guessed.
    """
    if own is not None and name in ("", own.name):
        return own
    if name in PRESETS:
        return load_chip(name)
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
SAME_AS_FIRST_SIZE = {"batch_matmul": "groups", "scatter_add": "segments"}
"""Operators -> a word that has to be the first size of their first input."""


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
    if word == "causal":
        masked = value not in (False, "False", "false", 0)
        return "causal=True computed in full, with all that is masked" if masked else ""
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
    """Time one operator of the library by its default schedule, as the command `op` does."""
    from ascend_lab import ops
    from ascend_lab.sim.timeline import start_cycles

    operator = ops.get(work.operator)
    if not work.shapes:
        got = "bytes" if work.size_bytes is not None else "none"
        raise InputError(f"{work.operator}: a shape per input", got, "write them in its order")
    settings = _settings(work, chip, operator.attrs)
    if settings.cores is not None:
        chip = replace(chip, core_count=settings.cores)
    dtypes = _dtypes(work, settings.own)
    warm = work.l2 == "warm"
    tiling = _like_tiling(work, chip, dtypes, settings) if like else None
    line = ops.time(
        operator, work.shapes, dtypes, chip, warm_l2=warm, tiling=tiling, **settings.own
    )
    line = replace(line, start="cold")
    launch = start_cycles(chip, "cold")
    with_launch = work.timing != "kernel"
    cycles = line.total_cycles - (0 if with_launch else min(launch, line.launch_cycles))
    bound_s = _bound_s(work, chip, dtypes, settings.own)
    limits = Counter({"sync": line.sync_cycles, "start": line.launch_cycles})
    if not with_launch:
        limits["start"] -= min(launch, line.launch_cycles)
    for phase in line.phases:
        limits[phase.limit] += phase.cycles
    busy = {pipe: busy / max(cycles, 1) for pipe, busy in line.busy_cycles.items()}
    if work.l2 == "unknown":
        settings.marks.append("l2 unknown: timed cold")
    limit = max(limits, key=lambda name: limits[name])
    return Estimate(cycles / chip.clock_hz, bound_s, limit, busy, tuple(settings.marks))


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
def _chain(work: Work, chip: Chip) -> Estimate:
    """Time the kernels of a small graph, each tensor in the format that the row gives it."""
    from ascend_lab.graph import Road, bound_of, finish_stages, front_stages
    from ascend_lab.graph.compile import account

    road = Road(dtype="")
    front = front_stages(CHAINS[work.operator](work), chip, road)
    times = finish_stages(front, chip, road).timeline()
    bound = bound_of(front.rewritten, chip)
    marks = (f"{len(times.operators)} kernels of ours, fused by our rules",)
    ledger: dict[str, float] = account(times, bound)["ledger"]
    if work.timing == "kernel":
        ledger = {part: time_s for part, time_s in ledger.items() if part != "launches"}
        time_s = times.time_s - times.launch_s
        return Estimate(time_s, bound.work_s, _largest(ledger), {}, marks)
    return Estimate(times.time_s, bound.time_s, _largest(ledger), {}, marks)


# -- networks --------------------------------------------------------------------------------------
NETWORK_DTYPES = ("fp16", "bf16", "int8")


def _network(work: Work, chip: Chip, like: str) -> Estimate:
    """Time a network of the zoo, compiled as the command `simulate` does."""
    from ascend_lab.graph import Road, bound_of, finish_stages, front_stages, placement, tiled
    from ascend_lab.graph.compile import account
    from ascend_lab.graph.like_cann import cann_road

    if "training" in work.group:
        needed = f"{work.operator}: inference"
        raise UnsupportedError(needed, work.group, "a step of training is more than its network")
    dtype = work.dtypes[0] if len(work.dtypes) == 1 else ", ".join(work.dtypes) or "none"
    if dtype not in NETWORK_DTYPES:
        needed = f"{work.operator}: a network in {', '.join(NETWORK_DTYPES)}"
        raise UnsupportedError(needed, dtype, "the cube multiplies no other format")
    graph = _graph(work)
    small = work.attributes.get(SMALL, 0) == 1
    road = cann_road(chip, dtype, small_channel=small) if like else Road(dtype=dtype)
    front = front_stages(graph, chip, road)
    if placement.too_large(front.laid_out, chip.device_memory.size_bytes):
        times, _ = tiled.simulate_within(front, chip, None, road)
    else:
        times = finish_stages(front, chip, road).timeline()
    bound = bound_of(front.rewritten, chip)
    ledger: dict[str, float] = account(times, bound)["ledger"]
    if work.timing == "kernel":
        ledger = {part: time_s for part, time_s in ledger.items() if part != "launches"}
        return Estimate(times.time_s - times.launch_s, bound.work_s, _largest(ledger))
    return Estimate(times.time_s, bound.time_s, _largest(ledger))


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
    if not isinstance(name, str) or name.partition(":")[0] not in TOPOLOGIES:
        needed = f"{work.operator}: a topology among {', '.join(TOPOLOGIES)}"
        raise InputError(needed, shown(name), "none is guessed")
    topology = load_topology(name)
    if type(ranks) is not int or not 2 <= ranks <= topology.size:
        needed = f"{work.operator}: ranks from 2 to {topology.size}, the devices of {name}"
        raise InputError(needed, shown(ranks), "mend that row")
    found = collective_time(work.operator, topology, work.size_bytes, placement=range(ranks))
    marks = [f"{found.algorithm}, the quickest of the model"]
    launch_s = 0.0
    if work.timing != "kernel":
        if work.chip in PRESETS or (own is not None and work.chip == own.name):
            launch_s = _chip(work.chip, own).launch_overhead_s
        else:
            marks.append("the launch of this chip is unknown: none counted")
    return Estimate(
        found.time_s + launch_s, found.lower_bound_s + launch_s, "links", {}, tuple(marks)
    )

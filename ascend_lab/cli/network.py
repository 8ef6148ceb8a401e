"""The verbs on a network: `run` prints its output values, `simulate` its time on a chip.

    ascend-lab run model.onnx --inputs x.npz --outputs y.npz
    ascend-lab simulate zoo:resnet50 --chip Ascend910B2

Both also accept a model that the compiler refuses: its nodes then run on AI core, AI CPU or host.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab import limits, output
from ascend_lab.cli import common
from ascend_lab.cli.array_files import Arrays, load_arrays, save_arrays, warn_infinite
from ascend_lab.cli.common import BATCH, COMPILED, JSON, LIKE, SHAPES, TUNED, Verb, flag
from ascend_lab.cli.printing import columns, emit
from ascend_lab.errors import CapacityError, InputError, UnsupportedError, complain
from ascend_lab.machine.chip import Chip, load_chip

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph, fusion, hosted
    from ascend_lab.compiler.compile import Front, Road
    from ascend_lab.compiler.network import NetworkTimeline, OperatorTime
    from ascend_lab.compiler.onnx import Imported
    from ascend_lab.compiler.overflow import Overflow
    from ascend_lab.compiler.switches import Switches
    from ascend_lab.deploy.runtime import OfflineModel


WORKING_BYTES = 2**31
"""Most bytes a node may read and write while it is evaluated in fp64: 2 GiB."""
COMPILED_ONLY_FLAGS = ("--chip", "--aicore-num", "--tuned", "--bank", "--keep_dtype")
"""Flags of `run` that have an effect only on compiled programs."""
COMPILER_ONLY = "for models whose operators the compiler takes"
"""The words in messages about flags that only the compiler understands."""


def _run(arguments: argparse.Namespace) -> int:
    """Compute a model's outputs from arrays of a file, or from random ones."""
    if not arguments.compiled:
        # Without it the graph is evaluated exactly, whatever the chip.
        common.refuse_idle(arguments, "with --compiled", *COMPILED_ONLY_FLAGS)
    if arguments.inputs:
        common.refuse_idle(arguments, "without --inputs", "--seed")
    common.check_least(arguments, "--seed")
    feeds = load_arrays(arguments.inputs) if arguments.inputs else None
    warn_infinite(feeds or {}, "--inputs")
    try:
        model = common.imported(arguments, feeds)
    except UnsupportedError as error:
        # A model without kernels for some nodes can be evaluated but has no compiled programs.
        refuse_off_core(arguments, error, "--compiled")
        hosted = place_off_core(arguments, feeds, error)
        nodes = sum(len(group.nodes) for group in hosted.parts)
        title = f"{hosted.name}: {nodes} nodes, {len(hosted.off_core)} of them off the core"
        return _print_outputs(arguments, title, arrays_of_outputs(hosted), {})
    return _run_graph(arguments, model, feeds)


def _run_graph(arguments: argparse.Namespace, model: Imported, feeds: Arrays | None) -> int:
    """Compute the outputs of a model that the compiler supports, and say which nodes overflowed."""
    from ascend_lab.compiler import evaluate, random_inputs
    from ascend_lab.compiler.onnx.tensors import in_type
    from ascend_lab.compiler.overflow import constants_beyond, vanished_constants

    graph = model.graph
    _check_size(graph)
    if feeds is None:
        inputs = random_inputs(graph, arguments.seed)
    else:
        inputs = common.arrays_named(graph.inputs, feeds, "--inputs")
    overflows: list[Overflow] = []
    if arguments.compiled or common.is_compiled(arguments.model):
        values = _run_compiled(arguments, graph, inputs, overflows)
        # A weight of 1e6 is infinite in fp16 before any node runs.
        overflows += constants_beyond(graph, "fp16")
    else:
        values = evaluate(graph, inputs)
    # Kernels compute in fp16, but files state float32: outputs get the types the model states.
    outputs = {name: in_type(values[name], kind) for name, kind in model.output_types.items()}
    count = f"{graph.parameter_count:,} parameters, statistics of norms counted"
    title = f"{graph.name}: {len(graph.nodes)} nodes, {count}"
    overflow_report = _overflow_report(graph, inputs, overflows, kept_nodes(arguments.keep_dtype))
    if arguments.compiled:
        lost = [f"  lost: {line}" for line in vanished_constants(graph, "fp16")]
        overflow_report["lines"] = [*overflow_report.get("lines", []), *lost]
    finite = all(np.isfinite(array.astype(np.float64)).all() for array in outputs.values())
    if not finite:
        overflow_report.setdefault("lines", []).append(
            f"  not finite: {_cause(graph, inputs, overflows)}"
        )
    return _print_outputs(arguments, title, outputs, overflow_report)


def _print_outputs(
    arguments: argparse.Namespace, title: str, outputs: Arrays, overflow_report: dict[str, Any]
) -> int:
    """Write and print a model's outputs, and the nodes whose numbers left their format."""
    if arguments.outputs:
        save_arrays(arguments.outputs, outputs)
    rows = {name: _summary(array) for name, array in outputs.items()}
    lines = [title]
    lines += [
        f"  {name}  {row['type']}{row['shape']}"
        + "".join(f"  {key} {row[key]:.6g}" for key in ("min", "max", "mean") if key in row)
        for name, row in rows.items()
    ]
    lines += overflow_report.get("lines", [])
    emit(arguments.json, {**rows, **overflow_report.get("data", {})}, lines)
    return 0


MAX_SHOWN = 8
"""Most overflowing nodes that are printed; the later ones may follow from the first."""


def _overflow_report(
    graph: Graph, inputs: Arrays, overflows: Sequence[Overflow], kept: frozenset[str]
) -> dict[str, Any]:
    """Return which nodes overflowed and which to keep in fp32, under the keys "data" and "lines".

    The nodes to keep include those in `kept`. The result is empty if no node overflowed.
    """
    from ascend_lab.compiler.compile import nodes_to_keep

    if not overflows:
        return {}
    # Keeping nodes does not help a constant beyond the range of fp16; only other weights do.
    beyond = [overflow.node for overflow in overflows if overflow.op == "constant"]
    node_overflows = [overflow for overflow in overflows if overflow.op != "constant"]
    keep = nodes_to_keep(graph, inputs, node_overflows, kept)
    lines = [f"  overflow: {overflow}" for overflow in overflows[:MAX_SHOWN]]
    if len(overflows) > MAX_SHOWN:
        lines.append(f"  and {len(overflows) - MAX_SHOWN} more")
    if beyond:
        names = ", ".join(beyond[:MAX_SHOWN])
        lines.append(
            f"  kernels read 65504 for larger weights, so outputs are wrong: scale {names}"
        )
    if node_overflows and kept.issuperset(keep):
        lines.append("  --keep_dtype does not help further: products read fp16 in any case")
    elif node_overflows:
        names = ", ".join(keep)
        lines.append(f"  --keep_dtype F keeps in fp32 what a file lists, a node a line: {names}")
    rows = [overflow.as_dict() for overflow in overflows]
    return {"lines": lines, "data": {"overflows": rows, "keep_in_fp32": keep}}


def _cause(graph: Graph, inputs: Arrays, overflows: Sequence[Overflow]) -> str:
    """Return why outputs of kernels are not finite: the model itself, its inputs, or fp16."""
    from ascend_lab.compiler.overflow import not_finite_from

    # Exact evaluation tells whether the fault is the model's or that of fp16.
    origin = not_finite_from(graph, inputs)
    if origin is not None:
        return f"the model's own values are not finite either: {origin}"
    where = "see above" if overflows else "inside a kernel; compare without --compiled"
    return f"numbers left what fp16 holds (65504), {where}"


def _run_compiled(
    arguments: argparse.Namespace, graph: Graph, inputs: Arrays, overflows: list[Overflow]
) -> Arrays:
    """Return what a compiled model's programs compute; append overflowing nodes to `overflows`.

    A file of `compile` can also evaluate its graph exactly, which is what it does by default.
    """
    from ascend_lab.compiler.compile import Road
    from ascend_lab.compiler.values import run_tasks

    if common.is_compiled(arguments.model):
        # The file holds a program for each batch, a gear: the sizes say which one is meant.
        sizes = {name: graph.types[name].shape for name in graph.inputs}
        gear = _offline(arguments).gear(sizes)
        return gear.run(inputs, kernels=arguments.compiled, overflows=overflows)
    chip = common.chip_with(arguments)
    road = common.tuned_road(arguments, chip, Road(keep=kept_nodes(arguments.keep_dtype)))
    compiled = road.stages(graph, chip).compiled
    if common.is_tuned(arguments):
        compiled = common.with_tuned(compiled, arguments)
    return run_tasks(compiled, inputs, graph.outputs, overflows)


def kept_nodes(path: str | None) -> frozenset[str]:
    """Return the nodes that a file of --keep_dtype lists, one per line; raises `InputError`."""
    if path is None:
        return frozenset()
    needed = "--keep_dtype as a text file with the name of a node a line"
    data = limits.read_file(path, needed, limits.TABLE_BYTES)
    try:
        lines = [line.strip() for line in data.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(needed, f"{path}: {error}", "write names") from None
    return frozenset(line for line in lines if line)


def _offline(arguments: argparse.Namespace) -> OfflineModel:
    """Return a compiled model; raise `InputError` for a chip that it was not compiled for."""
    from ascend_lab.deploy.runtime import load_offline

    # All of these were decided when it was compiled.
    decided = (
        "tuned",
        "bank",
        "aicore-num",
        "keep_dtype",
        "dtype",
        "fusion-switch",
        "fusion-result",
        "no-fusion",
        "memory-limit",
        "like",
    )
    idle = (f"--{name}" for name in decided)
    common.refuse_idle(arguments, "for a model that is not compiled yet", *idle)
    # The default of --chip is for models that are not compiled yet: the file knows its own.
    chip = load_chip(arguments.chip) if "chip" in arguments.given else None
    return load_offline(arguments.model, chip)


def _check_size(graph: Graph) -> None:
    """Raise `UnsupportedError` if a node would need too much memory."""
    for node in graph.nodes:
        types = (*graph.in_types(node), *graph.out_types(node))
        # fp64: eight bytes an element
        size_bytes = sum(t.elements for t in types) * 8
        if size_bytes > WORKING_BYTES:
            needed = f"{node.name}: at most {WORKING_BYTES >> 30} GiB in fp64"
            raise UnsupportedError(needed, f"{size_bytes / 2**30:.1f} GiB", "use smaller inputs")


def _summary(array: Any) -> dict[str, Any]:
    """Return type, shape, smallest, largest and mean value of an output as plain data."""
    if array.dtype.kind in "SUc":  # complex numbers have no order either
        kind = str(array.dtype) if array.dtype.kind == "c" else "string"
        return {"type": kind, "shape": list(array.shape)}
    # sums of fp16 overflow at 65504; an empty output counts as a single 0
    numbers = array.astype(np.float64) if array.size else np.zeros(1)
    with np.errstate(all="ignore"):
        low = float(numbers.min())
        high = float(numbers.max())
        mean = float(numbers.mean())
    return {
        "type": str(array.dtype),
        "shape": list(array.shape),
        "min": low,
        "max": high,
        "mean": mean,
    }


# -- models with operators that the compiler does not support -------------------------------------
def refuse_off_core(arguments: argparse.Namespace, error: UnsupportedError, *flags: str) -> None:
    """Raise `error`, the compiler's reason, if one of `flags`, which need it, was given."""
    for name in flags:
        if name.lstrip("-").replace("-", "_") in arguments.given:
            drop = f"or drop {name}, which is only {COMPILER_ONLY}"
            remedy = "; ".join(reason for reason in (error.remedy, drop) if reason)
            raise UnsupportedError(error.needed, error.got, remedy) from error


def place_off_core(
    arguments: argparse.Namespace, feeds: Mapping[str, Any] | None, error: UnsupportedError
) -> hosted.Hosted:
    """Return the model of the arguments placed on core, AI CPU and host.

    Raises `error` if it cannot be placed.
    """
    from ascend_lab.compiler.hosted import place_model
    from ascend_lab.compiler.onnx import host
    from ascend_lab.deploy.media import UNITS

    if not arguments.model.endswith(common.ONNX):
        raise error
    refuse_off_core(arguments, error, "--tuned", "--bank")
    chip = common.chip_with(arguments)
    # Resizing and colour conversion run on the chip's own unit if it has one.
    vpc = UNITS.get(chip.family, {}).get("VPC")
    try:
        model = host.whole_model(arguments.model)
        seed = getattr(arguments, "seed", 0)
        shapes = common.shapes_of(arguments)
        return place_model(
            model,
            chip,
            inputs=feeds or host.random_feed(model, shapes, arguments.batch, seed),
            dtype=getattr(arguments, "dtype", "fp16"),
            media_pixels_per_s=vpc.pixels_per_s if vpc else 0.0,
        )
    except UnsupportedError as other:
        # If the reason is the same on and off the core, it is given once.
        if other.needed == error.needed:
            raise error from other
        why = "; ".join(reason for reason in (error.remedy, f"off the core: {other}") if reason)
        raise UnsupportedError(error.needed, error.got, why) from other


def arrays_of_outputs(hosted: hosted.Hosted) -> dict[str, Any]:
    """Return the outputs as arrays that a file can hold; raise `UnsupportedError` for lists."""
    arrays = {}
    for name, value in hosted.run().items():
        if not isinstance(value, np.ndarray | np.generic):
            kind = type(value).__name__
            raise UnsupportedError(f"{hosted.name}: outputs that are tensors", f"{name}, a {kind}")
        array = np.asarray(value)
        # Strings come as Python objects, which a file of arrays cannot hold without pickling.
        arrays[name] = array.astype(str) if array.dtype.kind == "O" else array
    return arrays


# -- time -----------------------------------------------------------------------------------------
NAME_WIDTH = 36
"""Characters of a kernel's name and type in the table; longer ones are cut at the end."""


def _simulate(arguments: argparse.Namespace) -> int:
    """Print the time of a network and of each of its kernels on a chip."""
    from ascend_lab.compiler import network
    from ascend_lab.compiler.compile import Road, front_stages
    from ascend_lab.compiler.like_cann import cann_road
    from ascend_lab.compiler.switches import Switches, read_switches

    if arguments.like:
        decided_by_cann = ("--tuned", "--bank", "--fusion-switch", "--no-fusion")
        common.refuse_idle(arguments, "without --like", *decided_by_cann)
    else:
        common.refuse_idle(arguments, "with --like", "--enable_small_channel")
    if common.is_compiled(arguments.model):
        return _simulate_offline(arguments)
    if arguments.chip is None:
        raise InputError("--chip with a chip name or file", "none", "see `ascend-lab chips`")
    chip = common.chip_with(arguments)
    common.check_least(arguments, "--memory-limit", 1, " byte", "raise it")
    switches = read_switches(arguments.fusion_switch) if arguments.fusion_switch else Switches()
    try:
        graph = common.imported(arguments).graph
    except UnsupportedError as error:
        return _simulate_placed(arguments, error)
    # Warnings are printed above the table, and below the reason why a model cannot be read.
    warn_of_switches(switches)
    # CANN's decisions replace the flags of our own compiler, which were refused above.
    if arguments.like:
        small = arguments.enable_small_channel == "1"
        road = cann_road(chip, arguments.dtype, small_channel=small)
    else:
        flags = Road(switches=switches, dtype=arguments.dtype, fusion=not arguments.no_fusion)
        road = common.tuned_road(arguments, chip, flags)
    front = front_stages(graph, chip, road)
    times, fused = _timed(arguments, front, chip, road)
    if arguments.trace:
        network.write_network_trace(times, arguments.trace)
    if arguments.fusion_result:
        output.write_whole(arguments.fusion_result, fused.result_json(front.matches))
    emit(arguments.json, *timing_report(times, front, graph))
    return 0


def _simulate_placed(arguments: argparse.Namespace, error: UnsupportedError) -> int:
    """Print the time of a model that is placed on core, AI CPU and host."""
    from ascend_lab.compiler import bound, compile as compiler, network

    refuse_off_core(
        arguments,
        error,
        "--fusion-switch",
        "--fusion-result",
        "--no-fusion",
        "--memory-limit",
        "--like",
    )
    hosted = place_off_core(arguments, None, error)
    times = hosted.timeline()
    if arguments.trace:
        network.write_network_trace(times, arguments.trace)
    nodes = sum(len(group.nodes) for group in hosted.parts)
    account = compiler.account(times, bound.Bound())
    lines = [*table(times, nodes, account["ledger"]), *hosted.lines()]
    emit(arguments.json, {**hosted.summary(), **account}, lines)
    return 0


def timing_report(
    times: NetworkTimeline, front: Front, graph: Graph
) -> tuple[dict[str, Any], list[str]]:
    """Return a network's times as plain data, and as the lines of a table.

    Both hold the bound that no schedule beats and the time by cause.
    """
    from ascend_lab.compiler import bound, compile as compiler

    account = compiler.account(times, bound.bound_of(front.rewritten, times.chip))
    return {**times.summary(), **account}, table(times, len(graph.nodes), account["ledger"])


def _simulate_offline(arguments: argparse.Namespace) -> int:
    """Print the times that a compiled model holds."""
    model = _offline(arguments)
    gear = model.gear(common.shapes_of(arguments), arguments.batch)
    times = gear.times
    batches = ", ".join(str(other_gear.batch) for other_gear in model.gears)
    # A model with one gear needs no hint at others.
    has_others = len(model.gears) > 1
    note = [f"batch {gear.batch} of {batches}; --batch N times another"] if has_others else []
    if arguments.trace:
        trace = {"traceEvents": times["events"], "displayTimeUnit": "ns"}
        output.write_whole(arguments.trace, json.dumps(trace))
    emit(arguments.json, times["summary"], [*note, *times["table"]])
    return 0


def _timed(
    arguments: argparse.Namespace, front: Front, chip: Chip, road: Road
) -> tuple[NetworkTimeline, fusion.Fused]:
    """Return the times with default or tuned kernels, and the fusion report."""
    from ascend_lab.compiler import placement, simulate_graph, tiled
    from ascend_lab.compiler.compile import finish_stages

    limit = arguments.memory_limit
    is_tuned = common.is_tuned(arguments)
    limit_bytes = chip.device_memory.size_bytes if limit is None else limit
    # A network too large for device memory is computed in tiles, with the default kernels only.
    if not is_tuned and placement.too_large(front.laid_out, limit_bytes):
        try:
            return tiled.simulate_within(front, chip, limit, road)
        except CapacityError as error:
            untiled = (
                f"with --memory-limit {placement.peak_bytes(front.laid_out)} nothing is in tiles"
            )
            remedy = error.remedy if limit is None else f"{untiled}; or {error.remedy}"
            raise CapacityError(error.needed, error.got, remedy) from error
    stages = finish_stages(front, chip, road)
    if not is_tuned:
        return stages.timeline(), stages.fused
    common.check_fits(stages.compiled, arguments.memory_limit)
    tuned = common.with_tuned(stages.compiled, arguments, arguments.dtype)
    return simulate_graph(tuned), stages.fused


def warn_of_switches(switches: Switches) -> None:
    """Warn on standard error of names in a switch file that no pass or fusion rule has.

    A pass listed under UBFusion, the scope of the rules, changes nothing either.
    """
    from ascend_lab.compiler import fusion, passes
    from ascend_lab.compiler.switches import SCOPES

    rules = {fusion.AUTOMATIC, *(rule.name for rule in fusion.rules())}
    names_by_scope = dict(zip(SCOPES, (set(passes.PASSES), rules), strict=True))
    names = {name for _, name in switches.named} - {"ALL"}
    if unknown := sorted(names.difference(*names_by_scope.values())):
        complain("ascend-lab", f"no pass or rule is called {', '.join(unknown)}", 0)
    for scope, names_of_scope in names_by_scope.items():
        if lost := sorted(n for n in names & names_of_scope if (scope, n) not in switches.named):
            fault = f"{', '.join(lost)} under {scope}; got another scope, which changes nothing"
            complain("ascend-lab", f"{fault}; list it under {scope}", 0)


def table(times: NetworkTimeline, nodes: int, ledger: Mapping[str, float]) -> list[str]:
    """Return lines: a table of the operators, the time by cause, and the totals."""
    from ascend_lab.compiler import compile as compiler, tiled

    chip = times.chip
    total_s = times.time_s
    head = f"{times.name} on {chip.name}: {nodes} nodes, {times.kernels} kernels (model)"
    lines = [head]
    if isinstance(times, tiled.TiledTimeline):
        cut = times.tiled
        lines.append(
            f"in {cut.tile_count} tiles, as {cut.limit_bytes / 1e9:.3f} GB of device "
            f"memory ask: {cut.halo_share:.2%} of the multiply-accumulates twice; "
            "time and bytes of a kernel are of all its runs",
        )
    rows = [_row(equal[0], len(equal), total_s) for equal in _equal(times.operators)]
    lines += columns(KERNEL_COLUMNS, rows)
    lines += compiler.ledger_table(ledger)
    lines.append(
        f"moved {times.memory_bytes / 1e6:.2f} MB to and from device memory, "
        f"{times.l2_hit_rate:.0%} of reads hit L2; {times.macs / 1e9:.2f} GMAC, padding too"
    )
    lines.append(f"total {total_s * 1e6:.1f} us ({times.launch_s * 1e6:.1f} us of it launches)")
    if times.on_ai_cpu:
        lines.append(_ai_cpu(times))
    return lines


def _ai_cpu(times: NetworkTimeline) -> str:
    """Return a line on the operators that run on the AI CPU, and how far to trust their time."""
    operators = times.on_ai_cpu
    kinds = ", ".join(dict.fromkeys(op.type.partition(" ")[0] for op in operators))
    trust = times.chip.facts["ai_cpu.rate_bytes_per_s"].trust
    return (
        f"AI CPU: {len(operators)} without a kernel ({kinds}), "
        f"{times.ai_cpu_s * 1e6:.1f} us, {times.ai_cpu_s / times.time_s:.1%} of the time "
        f"(launch and rate: {trust})"
    )


def _equal(operators: Iterable[OperatorTime]) -> list[list[OperatorTime]]:
    """Return the kernels in order, grouped if their rows differ only in the name."""
    groups: dict[str, list[OperatorTime]] = {}
    for op in operators:
        # Layers 2 and 3 of a stage are often equal: one row "2 x layer2" says it.
        groups.setdefault(repr({**op.summary(), "name": ""}), []).append(op)
    return list(groups.values())


KERNEL_COLUMNS = {
    "kernel": f"<{NAME_WIDTH}",
    "us": ">9.2f",
    "share": ">6.1%",
    "cube": ">4.0%",
    "bound by": ">8",
    "GM MB": ">7.2f",
    "mem MB": ">7.2f",
    "L2": ">4.0%",
}
"""Heads of the table that `simulate` prints, and formats below them; `LEGEND` explains each."""


def _row(op: OperatorTime, count: int, total_s: float) -> tuple[object, ...]:
    """Return the cells of a kernel that runs `count` times, time and bytes of all runs."""
    timeline = op.timeline
    times = f"{count} x " if count > 1 else ""
    global_bytes = sum(n for path, n in timeline.path_bytes.items() if "GM" in path)
    return (
        limits.labelled(f"{times}{op.name}", op.type, NAME_WIDTH),
        op.time_s * count * 1e6,
        op.time_s * count / total_s,
        op.cube_utilisation,
        timeline.bound_by,
        global_bytes * count / 1e6,
        timeline.memory_bytes * count / 1e6,
        timeline.l2_hit_rate,
    )


PIPES = (
    "Pipes: MTE2 brings in, MTE1 feeds the cube M, V is the vector unit, FIX and MTE3 take out, S "
    "is scalar; AIC., AIV.: of cube cores and of vector cores."
)
LEGEND = f"""Of each kernel: its time and share of the network's; the part of the cube's peak;
what takes longest, its start (launch), the interface of memory or a pipe; bytes copied from and to
global memory, those of them that cross the interface, and the reads that L2 answers. Equal kernels
are one row (12 x: the first one's name; time, share and bytes of all); --json has each. A name with
_moved: products by 0 and 1 move its channels. Then the time by cause. {PIPES}"""

VERBS = (
    Verb(
        "run",
        "compute an ONNX model's outputs",
        _run,
        (
            COMPILED,
            flag("--inputs", metavar="F.npz", help="arrays by input name (default: random)"),
            flag("--outputs", metavar="G.npz", help="write the outputs by name"),
            SHAPES,
            BATCH,
            flag("--seed", type=limits.whole, default=0, help="seed of random inputs (0)"),
            flag(
                "--compiled",
                action="store_true",
                help="run the compiled programs (else, also for an .alm, the exact values)",
            ),
            flag("--chip", default="Ascend310", help="for --compiled (Ascend310)"),
            flag("--keep_dtype", metavar="F", help="nodes, one a line, that stay in fp32"),
            *TUNED,
            JSON,
        ),
    ),
    Verb(
        "simulate",
        "time an ONNX model on a chip, operator by operator",
        _simulate,
        (
            COMPILED,
            flag("--chip", help="a preset name or your own .toml file; a compiled model has one"),
            SHAPES,
            BATCH,
            flag("--dtype", default="fp16", help="fp16 (default), bf16 or int8"),
            flag(
                "--fusion-switch",
                metavar="F",
                help=('JSON: {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {...}}}'),
            ),
            flag("--fusion-result", metavar="F", help="write fusion_result.json to F"),
            flag("--no-fusion", action="store_true", help="one kernel for every operator"),
            LIKE,
            flag(
                "--enable_small_channel",
                choices=("0", "1"),
                default="0",
                help="with --like: the first layer reads pixels of 4 channels (0)",
            ),
            flag(
                "--memory-limit",
                type=limits.whole,
                metavar="BYTES",
                help="device memory (default: the chip's)",
            ),
            *TUNED,
            JSON,
            flag("--trace", metavar="F", help="write a Chrome trace of the kernels"),
        ),
        {"epilog": LEGEND},
    ),
)

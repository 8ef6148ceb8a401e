"""The verb `compile`: compiles an ONNX model into one file that runs without the ONNX model.

It accepts the options of ATC, the compiler of CANN, that have an effect here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.cli import common, inputs, network
from ascend_lab.cli.aoe_words import FRAMEWORKS, REFUSED, dtype_of
from ascend_lab.cli.common import JSON, MODEL, Verb, flag, refuse_idle
from ascend_lab.cli.printing import emit
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import count, naming, wholes_of
from ascend_lab.machine.chip import Chip
from ascend_lab.output import check_writable, write_whole

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph
    from ascend_lab.compiler.compile import Road
    from ascend_lab.compiler.onnx import Imported
    from ascend_lab.deploy.runtime import OfflineModel

GEARS = range(2, 101)
"""How many batch sizes --dynamic_batch_size may list, as in ATC: a gear is compiled for each."""
LARGEST_BATCH = 2048
COMPILE_ONLY = (
    "--fusion_switch_file",
    "--insert_op_conf",
    "--enable_small_channel",
    "--keep_dtype",
)
"""Options that have an effect here but not in `aoe`."""
NO_MEANING = {
    # Short forms such as -w are left out: argparse would take the start of a longer word for one.
    **{name: why for name, why in REFUSED.items() if len(name) > 2 and name not in COMPILE_ONLY},
    "--precision_mode_v2": "--precision_mode says it",
    "--om": "an offline model of CANN is another format",
    "--sparsity": "what makes weights sparse changes them before they are compiled",
    "--buffer_optimize": "what lies in L2 is simulated",
    "--enable_single_stream": "kernels of a network run one after another",
    "--external_weight": "weights lie in the file",
    "--core_type": "the chip file says it",
    "--oo_level": "--fusion_switch_file turns passes and rules off by name",
}
"""Options of ATC without a meaning here, and why.

They are parsed, so that a command line written for ATC is refused with a reason.
"""
MODES = {"0": "compile", "3": "only the precheck report"}
RECORDED = (
    "precision_mode",
    "input_shape",
    "dynamic_batch_size",
    "aicore_num",
    "insert_op_conf",
    "compression",
    "keep_dtype",
)
"""Options that are recorded in the file, to tell how it was compiled."""


def _compile(arguments: argparse.Namespace) -> int:
    """Compile the model for every gear, write the file and print what is in it."""
    from ascend_lab.deploy.runtime import OfflineModel, compile_offline, unpack_parts

    _check_flags(arguments)
    chip = common.with_cores(arguments.chip, arguments.aicore_num, "--aicore_num")
    road = _road(arguments)
    # The report comes first: if a model cannot be compiled, the report says why.
    if arguments.check_report and not _report(arguments):
        return 1
    gears = _gears(arguments, chip)
    options = {name: str(getattr(arguments, name)) for name in RECORDED if name in arguments.given}
    packed = compile_offline(gears, chip, road, options=options, describe=network.timing_report)
    # The printed numbers are read from the packed file: they are what its readers will find.
    model = OfflineModel(arguments.output, unpack_parts(packed, arguments.output))
    write_whole(arguments.output, packed)
    data = {
        "name": model.meta["name"],
        "chip": chip.name,
        "dtype": road.dtype,
        "output": arguments.output,
        "file_bytes": len(packed),
        "kernels": len(model.kernels),
        "gears": _gear_rows(model),
        # all gears have the same constants
        "warnings": _constant_warnings(next(iter(gears.values())).graph, road.dtype),
    }
    emit(arguments.json, data, _lines(data, model))
    return 0


def _constant_warnings(graph: Graph, dtype: str) -> list[str]:
    """Return a line for each weight that is not finite, or that the kernels' format cannot hold."""
    from ascend_lab.compiler.overflow import broken_constants, constants_beyond, vanished_constants

    beyond = [f"{overflow}; scale the weights" for overflow in constants_beyond(graph, dtype)]
    return [*broken_constants(graph), *beyond, *vanished_constants(graph, dtype)]


def _gear_rows(model: OfflineModel) -> list[dict[str, Any]]:
    """Return the inputs, time and memory of every gear as plain data."""
    return [
        {
            "batch": gear.batch,
            "inputs": {n: list(s) for n, s in gear.inputs.items()},
            "time_s": gear.times["summary"]["time_s"],
            "tasks": len(gear.times["tasks"]),
            "ai_cpu_operators": gear.times["summary"]["totals"]["ai_cpu_operators"],
            "work_bytes": gear.memory["work_bytes"],
            "weight_bytes": gear.memory["weight_bytes"],
        }
        for gear in model.gears
    ]


_CONSTANTS = "constants, as the graph states them and as kernels read them"


def _lines(data: Mapping[str, Any], model: OfflineModel) -> list[str]:
    """Return what was written as lines: the file and its bytes, then each gear."""
    from ascend_lab.deploy.runtime.container import Kind

    constant_bytes = model.parts[Kind.WEIGHTS, 0].nbytes
    output = data["output"]
    return [
        f"{data['name']} for {data['chip']}: {data['file_bytes']:,} bytes in {output}",
        f"  {constant_bytes:,} of them {_CONSTANTS}",
        *map(_gear_line, data["gears"]),
        *(f"  warning: {line}" for line in data["warnings"]),
    ]


def _gear_line(row: Mapping[str, Any]) -> str:
    """Return a gear as a line: its inputs, tasks, time and memory."""
    sizes = ", ".join(f"{name} {shape}" for name, shape in row["inputs"].items())
    return (
        f"  {sizes}: {row['tasks']} tasks, "
        f"{row['time_s'] * 1e6:.1f} us (model), {row['weight_bytes'] / 1e6:.2f} MB of weights, "
        f"{row['work_bytes'] / 1e6:.2f} MB to work in"
    )


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options of ATC without an effect here, or for a compiled model."""
    from ascend_lab.deploy.runtime import is_offline

    if is_offline(arguments.model):
        remedy = "give the .onnx file or zoo:NAME that it is from"
        raise InputError("a model to compile", f"{arguments.model}, compiled already", remedy)
    for name, why in NO_MEANING.items():
        # argparse stores --op_name_map under op_name_map: the name without its two dashes
        if name[2:] in arguments.given:
            raise InputError("options with a meaning here", name, f"drop it: {why}")
    if arguments.framework != "5":
        kind = FRAMEWORKS.get(arguments.framework, "unknown")
        got = f"{arguments.framework} ({kind})"
        raise InputError("--framework 5 (ONNX)", got, "export the model to ONNX")
    if arguments.mode not in MODES:
        modes = ", ".join(f"{n} ({meaning})" for n, meaning in MODES.items())
        raise InputError(f"--mode {modes}", arguments.mode, "choose one")
    if arguments.mode == "3":
        # ATC writes check_result.json into the folder where it runs.
        arguments.check_report = arguments.check_report or "check_result.json"
        refuse_idle(arguments, "with --mode 0", "--output", "--json")
        check_writable(arguments.check_report)
    elif arguments.output is None:
        raise InputError("--output with the file to write", "none", "e.g. --output model.alm")


def _report(arguments: argparse.Namespace) -> bool:
    """Write the precheck report; tell whether compiling goes on."""
    from ascend_lab.deploy.runtime import precheck

    if not Path(arguments.model).is_file():
        raise InputError("a precheck of an ONNX file", arguments.model, "leave out --check_report")
    # The first gear stands for all of them in the report.
    batch = _batches(arguments)[0]
    error: AscendLabError | None = None
    # The report lists all nodes, even if the import would stop at the first unsupported one.
    try:
        shapes = inputs.with_batch(inputs.shapes_of(arguments.input_shape), batch, "size")
        common.import_with(arguments.model, None, shapes, batch)
    except AscendLabError as found_error:
        error = found_error
    report = precheck(arguments.model, error)
    write_whole(arguments.check_report, json.dumps(report, indent=2) + "\n")
    failed = f"{report['fail']} of {report['total']} nodes cannot be compiled"
    if arguments.mode == "3" or report["fail"]:
        emit(None, None, [f"{report['name']}: {failed}; {arguments.check_report} says why"])
    return arguments.mode == "0" and not report["fail"]


def _road(arguments: argparse.Namespace) -> Road:
    """Return the compiler's options: the passes, fusion rules and number format asked for."""
    from ascend_lab.compiler.compile import Road
    from ascend_lab.compiler.switches import Switches, read_switches

    file = arguments.fusion_switch_file
    switches = read_switches(file) if file else Switches()
    network.warn_of_switches(switches)
    keep = network.kept_nodes(arguments.keep_dtype)
    return Road(switches=switches, dtype=dtype_of(arguments), keep=keep)


def _batches(arguments: argparse.Namespace) -> tuple[int | None, ...]:
    """Return the batches of --dynamic_batch_size; without that flag that of --batch, or (None,)."""
    text = arguments.dynamic_batch_size
    if text is None:
        return (arguments.batch,)
    if arguments.batch is not None:
        remedy = "leave one out: --batch is a single batch"
        raise InputError("--batch or --dynamic_batch_size", "both", remedy)
    batches = tuple(dict.fromkeys(wholes_of(text, ",")))  # "4,1,4" are the gears 4 and 1
    # A single batch needs no gears: --input_shape states it.
    if len(batches) not in GEARS or not all(1 <= n <= LARGEST_BATCH for n in batches):
        needed = f"--dynamic_batch_size with 2 to 100 batches of 1 to {LARGEST_BATCH}"
        raise InputError(needed, repr(text), "e.g. 1,2,4,8")
    return batches


def _gears(arguments: argparse.Namespace, chip: Chip) -> Mapping[int | None, Imported]:
    """Return the model's graph for every gear, camera frames in place of images if asked for."""
    batches = _batches(arguments)
    load = partial(common.import_with, arguments.model, None)
    shapes = inputs.shapes_of(arguments.input_shape)
    models = {n: load(inputs.with_batch(shapes, n, "size"), n) for n in batches}
    if arguments.compression:
        models = {n: _compressed(arguments.compression, model) for n, model in models.items()}
    if not arguments.insert_op_conf:
        refuse_idle(arguments, "with --insert_op_conf", "--enable_small_channel")
        return models
    return {n: _with_aipp(arguments, model, chip) for n, model in models.items()}


def _compressed(records: str, model: Imported) -> Imported:
    """Return a model whose layers have the scales of a record file, and compute in eight bits.

    The pairs of QuantizeLinear and DequantizeLinear are written and imported again, so that models
    compressed here and models quantised elsewhere are compiled in the same way.
    """
    from ascend_lab.compiler.onnx import import_onnx
    from ascend_lab.deploy.compress import qdq_model, read_records, with_records

    scaled = with_records(model.graph, read_records(records))
    return replace(model, graph=import_onnx(qdq_model(scaled)))


def _with_aipp(arguments: argparse.Namespace, model: Imported, chip: Chip) -> Imported:
    """Return a model with AIPP in front: its inputs are frames, or parameters, in bytes."""
    from ascend_lab.deploy.media import insert_aipp, read_config

    operations = read_config(arguments.insert_op_conf)
    # With small channels AIPP writes 4 channels a pixel, not a block of 16 mostly zeros.
    small = arguments.enable_small_channel == "1"
    with naming(arguments.insert_op_conf):
        graph = insert_aipp(model.graph, operations, chip, small_channel=small)
    # Frames replace images under the same names; parameter blocks are inputs that are new.
    kinds = {n: model.input_types.get(n, "uint8") for n in graph.inputs}
    kinds |= {n: "uint8" for n in graph.inputs if graph.types[n].dtype == "uint8"}
    return replace(model, graph=graph, input_types=kinds)


COMPILE = Verb(
    "compile",
    "compile an ONNX model into one file that runs without it",
    _compile,
    (
        MODEL,
        flag("--chip", "--soc_version", required=True, help="a preset name or your own .toml file"),
        flag("--output", metavar="F.alm", help="the file to write"),
        flag("--framework", default="5", metavar="5", help="5 (ONNX)"),
        flag("--mode", default="0", metavar="M", help="0 compile (default), 3 precheck only"),
        flag(
            "--input_shape",
            "--input-shape",
            default="",
            metavar='"x:1,3,224,224;y:1,10"',
            help="sizes left open; -1 for the batch of --dynamic_batch_size",
        ),
        common.BATCH,
        flag("--dynamic_batch_size", metavar="1,2,4,8", help="compile for each of these"),
        flag(
            "--precision_mode",
            default="force_fp16",
            metavar="P",
            help="force_fp16 (default), allow_fp32_to_bf16, ...",
        ),
        flag("--keep_dtype", metavar="F", help="nodes, one a line, that stay in fp32"),
        flag(
            "--fusion_switch_file",
            "--fusion-switch",
            metavar="F",
            help='JSON: {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {...}}}',
        ),
        flag("--compression", metavar="F", help="scales that `quantize --records` wrote: int8"),
        flag("--insert_op_conf", metavar="F.cfg", help="AIPP: camera frames, not images"),
        flag(
            "--enable_small_channel",
            choices=("0", "1"),
            default="0",
            help="1: AIPP writes four channels a pixel",
        ),
        flag(
            "--aicore_num",
            "--aicore-num",
            type=count,
            metavar="N",
            help="use N of the chip's cores",
        ),
        flag("--check_report", metavar="F.json", help="write a precheck report, node by node"),
        JSON,
        *(flag(name, help=argparse.SUPPRESS, nargs="?") for name in NO_MEANING),
    ),
)

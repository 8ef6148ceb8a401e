"""The verb `compile`: an offline model in one file, with the options of ATC that mean something."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.cli import common
from ascend_lab.cli.common import JSON, MODEL, Verb, emit, flag, refuse_idle
from ascend_lab.cli.network import told, unknown_names
from ascend_lab.cli.terminal import complain
from ascend_lab.cli.tune_flags import FRAMEWORKS, REFUSED, dtype_of
from ascend_lab.cli.tune_inputs import shapes_of
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import count, naming, wholes_of
from ascend_lab.output import check_writable, write_whole

if TYPE_CHECKING:
    from ascend_lab.chip import Chip
    from ascend_lab.graph import Road
    from ascend_lab.graph.onnx import Imported
    from ascend_lab.runtime import OfflineModel

GEARS = range(2, 101)
LARGEST_BATCH = 2048
"""Limits of --dynamic_batch_size, as ATC's."""
OWN = ("--fusion_switch_file", "--insert_op_conf", "--enable_small_channel")
"""Options that mean something here, though not to `aoe`."""
NO_MEANING = {name: why for name, why in REFUSED.items() if len(name) > 2 and name not in OWN} | {
    "--precision_mode_v2": "--precision_mode says it",
    "--om": "an offline model of CANN is another format",
    "--sparsity": "what makes weights sparse changes them before they are compiled",
    "--buffer_optimize": "what lies in L2 is simulated",
    "--enable_single_stream": "kernels of a network run one after another",
    "--external_weight": "weights lie in the file",
    "--core_type": "the chip file says it",
    "--oo_level": "--fusion_switch_file turns passes and rules off by name",
}
"""Options of ATC without a meaning here, and why."""
MODES = {"0": "compile", "3": "only the precheck report"}


def _compile(arguments: argparse.Namespace) -> int:
    from ascend_lab.runtime import OfflineModel, compile_offline, unpack_parts

    _check_flags(arguments)
    chip = common.with_cores(arguments.chip, arguments.aicore_num, "--aicore_num")
    road = _road(arguments)
    if arguments.check_report and not _report(arguments):
        return 1
    gears = _gears(arguments, chip)
    given = ("precision_mode", "input_shape", "dynamic_batch_size", "aicore_num", "insert_op_conf",
             "compression")  # fmt: skip
    options = {name: str(getattr(arguments, name)) for name in given if name in arguments.given}
    data = compile_offline(gears, chip, road, options=options, told=told)
    model = OfflineModel(arguments.output, unpack_parts(data, arguments.output))
    write_whole(arguments.output, data)
    rows = [
        {
            "batch": gear.batch, "inputs": {n: list(s) for n, s in gear.inputs.items()},
            "time_s": gear.times["summary"]["time_s"],
            "tasks": len(gear.times["tasks"]),
            "ai_cpu_operators": gear.times["summary"]["totals"]["ai_cpu_operators"],
            "work_bytes": gear.memory["work_bytes"], "weight_bytes": gear.memory["weight_bytes"],
        }
        for gear in model.gears
    ]  # fmt: skip
    found = {
        "name": model.meta["name"], "chip": chip.name, "dtype": road.dtype,
        "output": arguments.output, "file_bytes": len(data), "kernels": len(model.kernels),
        "gears": rows,
    }  # fmt: skip
    emit(arguments.json, found, _lines(found, model))
    return 0


def _lines(found: Mapping[str, Any], model: OfflineModel) -> list[str]:
    """Return what was written as lines: the file and its bytes, then each gear."""
    from ascend_lab.runtime.container import Kind

    held, output = model.parts[Kind.WEIGHTS, 0].nbytes, found["output"]
    return [
        f"{found['name']} for {found['chip']}: {found['file_bytes']:,} bytes in {output}",
        f"  {held:,} of them constants, as the graph states them and as kernels read them",
    ] + [
        f"  {', '.join(f'{n} {s}' for n, s in row['inputs'].items())}: {row['tasks']} tasks, "
        f"{row['time_s'] * 1e6:.1f} us (model), {row['weight_bytes'] / 1e6:.2f} MB of weights, "
        f"{row['work_bytes'] / 1e6:.2f} MB to work in"
        for row in found["gears"]
    ]


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options of ATC that mean nothing here, or a compiled model."""
    from ascend_lab.runtime import is_offline

    if is_offline(arguments.model):
        remedy = "give the .onnx file or zoo:NAME that it is from"
        raise InputError("a model to compile", f"{arguments.model}, compiled already", remedy)
    for name, why in NO_MEANING.items():
        if name[2:] in arguments.given:
            raise InputError("options with a meaning here", name, f"drop it: {why}")
    if arguments.framework != "5":
        kind = FRAMEWORKS.get(arguments.framework, "unknown")
        got = f"{arguments.framework} ({kind})"
        raise InputError("--framework 5 (ONNX)", got, "export the model to ONNX")
    if arguments.mode not in MODES:
        known = ", ".join(f"{n} ({what})" for n, what in MODES.items())
        raise InputError(f"--mode {known}", arguments.mode, "choose one")
    if arguments.mode == "3":
        arguments.check_report = arguments.check_report or "check_result.json"
        refuse_idle(arguments, "with --mode 0", "--output", "--json")
        check_writable(arguments.check_report)
    elif arguments.output is None:
        raise InputError("--output with the file to write", "none", "e.g. --output model.alm")


def _report(arguments: argparse.Namespace) -> bool:
    """Write the precheck report; tell whether compiling goes on."""
    from ascend_lab.runtime import precheck

    if not Path(arguments.model).is_file():
        raise InputError("a precheck of an ONNX file", arguments.model, "leave out --check_report")
    batch = _batches(arguments.dynamic_batch_size)[0]
    error: AscendLabError | None = None
    try:
        common.import_with(arguments.model, None, _sized(arguments, batch), batch)
    except AscendLabError as found_error:
        error = found_error
    found = precheck(arguments.model, error)
    write_whole(arguments.check_report, json.dumps(found, indent=2) + "\n")
    failed = f"{found['fail']} of {found['total']} nodes cannot be compiled"
    if arguments.mode == "3" or found["fail"]:
        emit(None, None, [f"{found['name']}: {failed}; {arguments.check_report} says why"])
    return arguments.mode == "0" and not found["fail"]


def _road(arguments: argparse.Namespace) -> Road:
    """Return what passes, rules and number format the options ask for."""
    from ascend_lab.graph import Road
    from ascend_lab.graph.decide import Switches, read_switches

    file = arguments.fusion_switch_file
    switches = read_switches(file) if file else Switches()
    if unknown := unknown_names(switches):
        complain("ascend-lab", f"no pass or rule is called {', '.join(unknown)}", 0)
    return Road(switches=switches, dtype=dtype_of(arguments))


def _batches(text: str | None) -> tuple[int | None, ...]:
    """Return the gears of --dynamic_batch_size, (None,) without."""
    if text is None:
        return (None,)
    found = tuple(dict.fromkeys(wholes_of(text, ",")))
    if len(found) not in GEARS or not all(1 <= n <= LARGEST_BATCH for n in found):
        needed = f"--dynamic_batch_size with 2 to 100 batches of 1 to {LARGEST_BATCH}"
        raise InputError(needed, repr(text), "e.g. 1,2,4,8")
    return found


def _sized(arguments: argparse.Namespace, batch: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of --input_shape, the batch in place of -1."""
    shapes = shapes_of(arguments.input_shape)
    if batch is None and any(-1 in shape for shape in shapes.values()):
        raise InputError("--dynamic_batch_size for a size of -1", "none", "give it")
    return {n: tuple(batch if k == -1 and batch else k for k in s) for n, s in shapes.items()}


def _gears(arguments: argparse.Namespace, chip: Chip) -> Mapping[int | None, Imported]:
    """Return the model's graph for every gear, camera frames in place of images if asked for."""
    batches = _batches(arguments.dynamic_batch_size)
    load = partial(common.import_with, arguments.model, None)
    found = {n: load(_sized(arguments, n), n) for n in batches}
    if arguments.compression:
        found = {n: _compressed(arguments.compression, one) for n, one in found.items()}
    if not arguments.insert_op_conf:
        refuse_idle(arguments, "with --insert_op_conf", "--enable_small_channel")
        return found
    return {n: _with_aipp(arguments, one, chip) for n, one in found.items()}


def _compressed(records: str, found: Imported) -> Imported:
    """Return a model with the layers of a record file in eight bits."""
    from ascend_lab.compress import qdq_model, read_records, with_records
    from ascend_lab.graph.onnx import import_onnx

    made = with_records(found.graph, read_records(records))
    return replace(found, graph=import_onnx(qdq_model(made)))


def _with_aipp(arguments: argparse.Namespace, found: Imported, chip: Chip) -> Imported:
    """Return a model with AIPP in front: its inputs are frames, or parameters, in bytes."""
    from ascend_lab.media import insert_aipp, read_config

    operations, small = read_config(arguments.insert_op_conf), arguments.enable_small_channel == "1"
    with naming(arguments.insert_op_conf):
        graph = insert_aipp(found.graph, operations, chip, small_channel=small)
    kinds = {n: found.input_types.get(n, "uint8") for n in graph.inputs}
    kinds |= {n: "uint8" for n in graph.inputs if graph.types[n].dtype == "uint8"}
    return replace(found, graph=graph, input_types=kinds)


VERBS = (
    Verb(
        "compile", "compile an ONNX model into one file that runs without it", _compile,
        (
            MODEL,
            flag("--chip", "--soc_version", required=True,
                 help="a preset name or your own .toml file"),
            flag("--output", metavar="F.alm", help="the file to write"),
            flag("--framework", default="5", metavar="5", help="5 (ONNX)"),
            flag("--mode", default="0", metavar="M", help="0 compile (default), 3 precheck only"),
            flag("--input_shape", "--input-shape", default="", metavar='"x:1,3,224,224;y:1,10"',
                 help="sizes left open; -1 for the batch of --dynamic_batch_size"),
            flag("--dynamic_batch_size", metavar="1,2,4,8", help="compile for each of these"),
            flag("--precision_mode", default="force_fp16", metavar="P",
                 help="force_fp16 (default), allow_fp32_to_bf16, ..."),
            flag("--fusion_switch_file", "--fusion-switch", metavar="F",
                 help="passes and rules to turn off"),
            flag("--compression", metavar="F", help="scales that `quantize --records` wrote: int8"),
            flag("--insert_op_conf", metavar="F.cfg", help="AIPP: camera frames, not images"),
            flag("--enable_small_channel", choices=("0", "1"), default="0",
                 help="1: AIPP writes four channels a pixel"),
            flag("--aicore_num", "--aicore-num", type=count, metavar="N",
                 help="use N of the chip's cores"),
            flag("--check_report", metavar="F.json", help="write a precheck report, node by node"),
            JSON,
            *(flag(name, help=argparse.SUPPRESS, nargs="?") for name in NO_MEANING),
        ),
    ),
)  # fmt: skip

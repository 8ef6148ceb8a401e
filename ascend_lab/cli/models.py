"""The verbs that inspect, migrate or quantise a model before it is compiled.

ascend-lab zoo mobilenet_v2                        parameters and multiply-accumulates
ascend-lab migrate model.onnx --chip Ascend310     what each node becomes, and what it costs
ascend-lab calibrate values.npy --method kl        scale and offset of one tensor
ascend-lab quantize model.onnx --calibration x.npz --output int8.onnx
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli import array_files, common, quantising
from ascend_lab.cli.common import JSON, MODEL, SHAPES, Verb, flag
from ascend_lab.cli.printing import columns, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, naming, whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph
    from ascend_lab.deploy.compress import Plan

LEGEND = (
    "GMAC: 1e9 products of the model; bound: us it cannot go below; MB to and from device memory",
    "of time: launches; no cube: kernels without products; fill: of the cube's peak rate",
    "padded: products that the cube does for each of the model's",
)


COUNT_COLUMNS = {"model": "<28", "parameters": ">11,", "MACs": ">16,", " input": ""}


def _zoo(arguments: argparse.Namespace) -> int:
    """List the models of the zoo with their counts, or show one of them."""
    from ascend_lab.compiler import zoo

    if arguments.chip is not None:
        return _print_reasons(arguments)
    if arguments.name is None:
        common.refuse_idle(arguments, "with a model's name", "--width", "--resolution")
        # Counts of batch 1 are stored: building all 74 graphs takes a while.
        rows = zoo.stored_counts()
        if arguments.batch != 1:
            rows = {name: zoo.counts_of(name, batch=arguments.batch) for name in zoo.ZOO}
        data: Any = rows
    else:
        # Both `zoo:unet` and `unet` are understood.
        data = zoo.counts_of(
            arguments.name.removeprefix("zoo:"),
            batch=arguments.batch,
            width=arguments.width,
            size=arguments.resolution,
        )
        rows = {data["name"]: data}
    # The last column has no width: two blanks separate its head and cells from the numbers.
    rows_of_cells = [
        (name, row["parameters"], row["macs"], f" {row['input_name']} {_by_x(row['input_shape'])}")
        for name, row in rows.items()
    ]
    lines = columns(COUNT_COLUMNS, rows_of_cells)
    if arguments.name is not None:
        lines.append(f"source: {data['source']}")
    emit(arguments.json, data, lines)
    return 0


def _by_x(sizes: Iterable[int]) -> str:
    """Return sizes as 1x3x224x224."""
    return "x".join(map(str, sizes))


def _print_reasons(arguments: argparse.Namespace) -> int:
    """Print why a model takes as long as it does on a chip."""
    from ascend_lab.compiler.zoo import why, why_lines

    if arguments.name is None:
        raise InputError("a model's name with --chip", "none", "e.g. zoo mobilenet_v2 --chip C")
    sizes = {"batch": arguments.batch, "width": arguments.width, "size": arguments.resolution}
    rows = why([arguments.name.removeprefix("zoo:")], arguments.chip, **sizes)
    emit(arguments.json, rows[0], [*why_lines(rows), *LEGEND])
    return 0


# -- migration ------------------------------------------------------------------------------------
ENDINGS = (".json", ".html", ".txt")
# A single file that can be mailed: it needs no separate style sheet or script.
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:.2em .6em;"
    "text-align:left;vertical-align:top}th{background:#eee}"
)


def _migrate(arguments: argparse.Namespace) -> int:
    """Report what becomes of every node of a model on a chip, and write the migrated model."""
    from ascend_lab.compiler import migrate, zoo
    from ascend_lab.machine.chip import load_chip

    ending = Path(arguments.report).suffix if arguments.report else ".txt"
    if ending not in ENDINGS:
        raise InputError(f"--report as {', '.join(ENDINGS)}", arguments.report, "rename it")
    chip = load_chip(arguments.chip)
    shapes = common.shapes_of(arguments)
    batch = arguments.batch
    source: str | bytes = arguments.model
    # A model of the zoo is one of our graphs: it is exported to ONNX and then treated as a file.
    if arguments.model.startswith(zoo.ZOO_PREFIX):
        from ascend_lab.compiler.onnx.export import export_onnx

        graph = zoo.load_model(arguments.model, shapes=shapes, batch=batch).graph
        source = export_onnx(graph).SerializeToString()
        shapes = {}  # the graph was built with them: its file leaves no size open
        batch = None
    migration = migrate.migrate(source, chip, shapes=shapes, batch=batch, dtype=arguments.dtype)
    # For a refused model no file is written, even if --output names one.
    data = {**migration.report, "output": arguments.output if migration.model is not None else None}
    if arguments.output and migration.model is not None:
        write_whole(arguments.output, migration.model.SerializeToString())
    lines = _report_lines(data)
    if arguments.report:
        if ending == ".html":
            report = _html(data)
        elif ending == ".json":
            report = json.dumps(data, indent=2) + "\n"
        else:
            report = "\n".join(lines) + "\n"
        write_whole(arguments.report, report)
    if migration.model is None and arguments.output is not None:
        lines.append(f"{arguments.output}: not written: the model is refused")
    emit(arguments.json, data, lines)
    # A model that the chip refuses has a report, and no file; the exit code says so too.
    return 0 if migration.model is not None else 1


def _report_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    lines = [f"{data['model']} on {data['chip']}: {data['nodes']} nodes"]
    lines.append("  " + ", ".join(f"{n} {verdict}" for verdict, n in data["totals"].items() if n))
    for title, headers, rows in _tables(data):
        # For a simple network most tables are empty.
        if rows:
            lines.append(f"{title}: {', '.join(headers)}")
            lines += ["  " + "  ".join(str(cell) for cell in row if cell != "") for row in rows]
    return lines


def _html(data: Mapping[str, Any]) -> str:
    """Return the report as a page that needs no other file; all texts are escaped."""

    def html_row(row: Iterable[object], tag: str) -> str:
        """Return a row of a table in HTML."""
        inner = "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
        return f"<tr>{inner}</tr>"

    head = escape(f"{data['model']} on {data['chip']}")
    top = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{head}</title>'
    parts = [top, f"<style>{STYLE}</style><h1>{head}</h1><p>{data['nodes']} nodes</p>"]
    for title, headers, rows in _tables(data):
        if rows:
            body = "".join(html_row(row, "td") for row in rows)
            parts.append(f"<h2>{escape(title)}</h2><table>{html_row(headers, 'th')}{body}</table>")
    return "\n".join(parts) + "</html>\n"


Row = tuple[object, ...]
Table = tuple[str, tuple[str, ...], list[Row]]
"""A title, heads of columns, and rows."""


def _tables(data: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a migration report, including those without rows."""
    nodes: list[Row] = [
        (
            row["source_op"],
            row["count"],
            row["verdict"],
            " + ".join(row["replaced_by"]),
            "" if row["max_error"] is None else f"error {row['max_error']:.1e}",
            row["advice"],
        )
        for row in data["rows"]
    ]
    moved: list[Row] = [(m["node"], m["op"], m["engine"], m["reason"]) for m in data["moved"]]
    padded: list[Row] = [
        (p["tensor"], p["shape"], p["layout"], f"{p['zeros']:.0%} zeros", p["advice"])
        for p in data["padded"]
    ]
    passes: list[Row] = [(name, matches) for name, matches in data["passes"].items()]
    outputs: list[Row] = [
        (name, f"{error:.1e}") for name, error in data.get("max_error", {}).items()
    ]
    refused: list[Row] = [(data["refused"],)] if "refused" in data else []
    kept: list[Row] = [(data["kept"],)] if "kept" in data else []
    return [
        ("nodes", ("operator", "count", "verdict", "replaced by", "max error", "advice"), nodes),
        ("refused", ("reason",), refused),
        ("kept", ("what and why",), kept),
        ("moved to another engine", ("node", "operator", "engine", "reason"), moved),
        ("padded", ("tensor", "shape", "layout", "zeros", "advice"), padded),
        ("passes", ("name", "matches"), passes),
        ("largest error of the migrated model", ("output", "error"), outputs),
    ]


# -- eight bits -----------------------------------------------------------------------------------
def _calibrate(arguments: argparse.Namespace) -> int:
    """Choose scale and offset of one tensor, and print the range they cover and their noise."""
    from ascend_lab.deploy.compress import calibrate, scales, signal_to_noise_db

    values = array_files.load_array(arguments.values)
    scale = calibrate(
        values, arguments.method, bits=arguments.bits, asymmetric=arguments.asymmetric
    )
    # With q = round(x / scale) + offset the ends of int8, -128 and 127, stand for these values.
    low, high = (
        float(end - scale.offset) * scale.scale for end in scales.integer_range(scale.bits)
    )
    values_fp32 = values.astype(np.float32)
    data = {
        "method": arguments.method,
        "scale": scale.scale,
        "offset": scale.offset,
        "bits": scale.bits,
        "range": [low, high],
        "signal_to_noise_db": signal_to_noise_db(values_fp32, scale.fake_quantise(values_fp32)),
    }
    lines = [
        f"{arguments.values}: {values.size:,} values, {arguments.method}, {scale.bits} bits",
        f"  scale {scale.scale:.9g}, offset {scale.offset}: holds {low:.6g} to {high:.6g}",
        f"  signal to noise {data['signal_to_noise_db']:.2f} dB",
    ]
    emit(arguments.json, data, lines)
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    """Write a model with its layers in eight bits, and print how far its outputs are off."""
    from ascend_lab.deploy.compress import qdq_model, records_text

    subject = quantising.subject_of(arguments.model, arguments.calibration)
    plan = _plan(arguments, subject.graph)
    subject = subject.with_pairs(plan)
    # Checked before calibration, which takes longer than reading a file.
    held_out = subject.held_out(arguments.held_out, plan)
    quantised, left_out = subject.quantised(plan)
    # The source keeps its nodes and names: pairs are put between them.
    model = qdq_model(quantised, subject.source, subject.graph)
    written: bytes = model.SerializeToString()
    used = subject.feeds[: plan.batches]  # a configuration may ask for fewer batches
    data: dict[str, Any] = {
        "layers": [
            {**asdict(layer), "op": quantised.graph.node(layer.name).op}
            for layer in quantised.layers
        ],
        "unquantised": [asdict(row) for row in left_out],
        "size_bytes": len(written),
        "float_bytes": subject.source.ByteSize(),
        "output_error": subject.error(model, quantised, used),
        "batches": len(used),
        "held_out_error": subject.error(model, quantised, held_out) if held_out else None,
        "held_out_batches": len(held_out),
        "batch": subject.batch,
    }
    # Printed only if the user's model took any batch and the written one does not.
    if subject.fixed_because:
        data["fixed_because"] = subject.fixed_because
    write_whole(arguments.output, written)
    if arguments.records:
        write_whole(arguments.records, records_text(quantised.layers))
    emit(arguments.json, data, _quantised_lines(data))
    return 0


def _quantised_lines(data: Mapping[str, Any]) -> list[str]:
    """Return lines: which layers were quantised, which not and why, and the errors of outputs."""
    lines = [
        f"{row['name']} ({row['op']}): scale {row['scale']:.6g}, offset {row['offset']}, "
        f"{len(row['weight_scales'])} weight scale(s)"
        for row in data["layers"]
    ]
    lines += [
        f"{row['name']} ({row['op']}): left in floating point: {row['reason']}"
        for row in data["unquantised"]
    ]
    if "fixed_because" in data:
        lines.append(f"sizes are those of the samples: {data['fixed_because']}")
    sizes = f"{data['float_bytes']:,} -> {data['size_bytes']:,} bytes"
    lines.append(f"{len(data['layers'])} layers; {sizes}")
    calibration_batches = _batches(data["batches"])
    error = f"outputs are off by {data['output_error']:.4%}"
    lines.append(f"{error}, measured on the calibration samples ({calibration_batches})")
    if data["held_out_batches"]:
        held_out_batches = _batches(data["held_out_batches"])
        held_out_error = f"outputs are off by {data['held_out_error']:.4%}"
        lines.append(f"{held_out_error}, measured on the held-out samples ({held_out_batches})")
    else:
        lines.append("no samples were held out: on others it may be more (--held-out X.npz)")
    return lines


def _batches(number: int) -> str:
    """Return a number of batches in words."""
    return f"{number} {'batches' if number > 1 else 'batch'}"


def _plan(arguments: argparse.Namespace, graph: Graph) -> Plan:
    """Return the plan of the flags and the configuration file; raise if they contradict."""
    from ascend_lab.deploy.compress import LayerPlan, Plan, read_config

    # A layer's settings in the file replace these flags.
    default_plan = LayerPlan(arguments.method, asymmetric=not arguments.symmetric)
    if not arguments.config:
        return Plan(default_plan)
    common.refuse_idle(arguments, "without --config", "--symmetric")
    plan = read_config(arguments.config, default_plan)
    with naming(arguments.config):
        plan.check(graph)
    # A method that is stated twice with the same value is not a contradiction.
    if "method" in arguments.given and plan.common.method != arguments.method:
        got = f"{plan.common.method} in {arguments.config}"
        raise InputError(f"--method {arguments.method} alone", got, "drop one")
    return plan


_METHODS = "minmax, percentile, ifmr, hfmg, kl, tensorrt or entropy"
VERBS = (
    Verb(
        "zoo",
        "list the models that zoo:NAME gives, or one model's counts",
        _zoo,
        (
            flag("name", nargs="?", help="a model, such as mobilenet_v2"),
            flag("--batch", type=count, default=1, metavar="N", help="images or sequences (1)"),
            flag("--width", type=decimal, metavar="W", help="factor of the channels, e.g. 0.75"),
            flag("--resolution", type=count, metavar="P", help="pixels of an image's side"),
            flag("--chip", help="say why the model is fast or slow on a chip"),
            JSON,
        ),
    ),
    Verb(
        "migrate",
        "say what becomes of a model on a chip, and rewrite it",
        _migrate,
        (
            MODEL,
            flag("--chip", default="Ascend310", help="a preset or .toml file (Ascend310)"),
            SHAPES,
            flag("--batch", type=count, metavar="N", help="first size of inputs where it is open"),
            flag("--dtype", default="fp16", help="fp16 (default), bf16 or int8"),
            flag("--output", metavar="M.onnx", help="write the migrated model"),
            flag("--report", metavar="R", help="write the report as .json, .html or .txt"),
            JSON,
        ),
        {"description": "Takes ONNX files, zoo:NAME, and programs of torch.export (.pt2)."},
    ),
    Verb(
        "calibrate",
        "choose the scale and offset of one tensor",
        _calibrate,
        (
            flag("values", metavar="VALUES.npy", help="an array of samples"),
            flag("--method", required=True, help=_METHODS),
            flag("--asymmetric", action="store_true", help="allow an offset"),
            flag("--bits", type=whole, default=8, metavar="B", help="2 to 16 (8)"),
            JSON,
        ),
    ),
    Verb(
        "quantize",
        "write a model with its layers in eight bits, scales chosen on samples",
        _quantize,
        (
            MODEL,
            flag("--calibration", required=True, metavar="X.npz", help="samples by input name"),
            flag("--held-out", metavar="H.npz", help="samples to measure on, not to calibrate on"),
            flag("--config", metavar="F", help="a simplified configuration file of AMCT"),
            flag("--method", default="ifmr", help=f"{_METHODS} (ifmr)"),
            flag("--symmetric", action="store_true", help="no offsets"),
            flag("--output", required=True, metavar="Q.onnx", help="write the model to Q.onnx"),
            flag("--records", metavar="F", help="write the scales as a record file"),
            JSON,
        ),
    ),
)

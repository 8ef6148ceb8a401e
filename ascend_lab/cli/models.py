"""Verbs on models: what they count, what becomes of one on a chip, one in eight bits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli import common, inputs
from ascend_lab.cli.common import JSON, MODEL, SHAPES, Verb, emit, flag, import_with
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, naming, whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto

    from ascend_lab.compress import Plan, Quantised
    from ascend_lab.graph import Graph

LEGEND = (
    "GMAC: 1e9 products of the model; bound: us it cannot go below; MB to and from device memory",
    "of time: launches; no cube: kernels without products; fill: of the cube's peak rate",
    "padded: products that the cube does for each of the model's",
)


def _zoo(arguments: argparse.Namespace) -> int:
    from ascend_lab.graph import zoo

    if arguments.chip is not None:
        return _why(arguments)
    if arguments.name is None:
        common.refuse_idle(arguments, "with a model's name", "--width", "--resolution")
        rows = {name: zoo.counts_of(name, batch=arguments.batch) for name in zoo.ZOO}
        data: Any = rows
    else:
        data = zoo.counts_of(
            arguments.name.removeprefix("zoo:"), batch=arguments.batch,
            width=arguments.width, size=arguments.resolution,
        )  # fmt: skip
        rows = {data["name"]: data}
    lines = [f"{'model':<28}{'parameters':>12}{'MACs':>17}  input"]
    lines += [
        f"{name:<28}{row['parameters']:>12,}{row['macs']:>17,}  "
        f"{row['input_name']} {'x'.join(map(str, row['input_shape']))}"
        for name, row in rows.items()
    ]
    if arguments.name is not None:
        lines.append(f"source: {data['source']}")
    emit(arguments.json, data, lines)
    return 0


def _why(arguments: argparse.Namespace) -> int:
    """Print why a model takes as long as it does on a chip."""
    from ascend_lab.graph.zoo import why, why_lines

    if arguments.name is None:
        raise InputError("a model's name with --chip", "none", "e.g. zoo mobilenet_v2 --chip C")
    sizes = {"batch": arguments.batch, "width": arguments.width, "size": arguments.resolution}
    rows = why([arguments.name.removeprefix("zoo:")], arguments.chip, **sizes)
    emit(arguments.json, rows[0], [*why_lines(rows), *LEGEND])
    return 0


# -- migration ------------------------------------------------------------------------------------
ENDINGS = (".json", ".html", ".txt")
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:.2em .6em;"
    "text-align:left;vertical-align:top}th{background:#eee}"
)


def _migrate(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.graph import migrate, zoo

    ending = Path(arguments.report).suffix if arguments.report else ".txt"
    if ending not in ENDINGS:
        raise InputError(f"--report as {', '.join(ENDINGS)}", arguments.report, "rename it")
    chip, shapes, batch = load_chip(arguments.chip), common.shapes_of(arguments), arguments.batch
    source: str | bytes = arguments.model
    if arguments.model.startswith(zoo.PREFIX):
        from ascend_lab.graph.onnx.export import export_onnx

        graph = zoo.load_model(arguments.model, shapes=shapes, batch=batch).graph
        source, shapes, batch = export_onnx(graph).SerializeToString(), {}, None
    found = migrate.migrate(source, chip, shapes=shapes, batch=batch, dtype=arguments.dtype)
    data = {**found.report, "output": arguments.output if found.model is not None else None}
    if arguments.output and found.model is not None:
        write_whole(arguments.output, found.model.SerializeToString())
    if arguments.report:
        plain = json.dumps(data, indent=2) if ending == ".json" else "\n".join(_lines(data))
        write_whole(arguments.report, _html(data) if ending == ".html" else f"{plain}\n")
    missing = [f"{arguments.output}: not written: the model is refused"]
    lost = found.model is None and arguments.output is not None
    emit(arguments.json, data, _lines(data) + missing * lost)
    return 0 if found.model is not None else 1


def _lines(data: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    lines = [f"{data['model']} on {data['chip']}: {data['nodes']} nodes"]
    lines.append("  " + ", ".join(f"{n} {verdict}" for verdict, n in data["totals"].items() if n))
    for title, headers, rows in _tables(data):
        if rows:
            lines.append(f"{title}: {', '.join(headers)}")
            lines += ["  " + "  ".join(str(cell) for cell in row if cell != "") for row in rows]
    return lines


def _html(data: Mapping[str, Any]) -> str:
    """Return the report as a page that needs nothing else; all texts are escaped."""

    def cells(row: Iterable[object], tag: str) -> str:
        inner = "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
        return f"<tr>{inner}</tr>"

    head = escape(f"{data['model']} on {data['chip']}")
    top = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{head}</title>'
    parts = [top, f"<style>{STYLE}</style><h1>{head}</h1><p>{data['nodes']} nodes</p>"]
    for title, headers, rows in _tables(data):
        if rows:
            body = "".join(cells(row, "td") for row in rows)
            parts.append(f"<h2>{escape(title)}</h2><table>{cells(headers, 'th')}{body}</table>")
    return "\n".join(parts) + "</html>\n"


Table = tuple[str, tuple[str, ...], list[tuple[object, ...]]]


def _tables(data: Mapping[str, Any]) -> list[Table]:
    """Return the report's tables: title, headers, rows."""
    nodes: list[tuple[object, ...]] = [
        (
            row["source_op"], row["count"], row["verdict"], " + ".join(row["replaced_by"]),
            "" if row["max_error"] is None else f"error {row['max_error']:.1e}", row["advice"],
        )
        for row in data["rows"]
    ]  # fmt: skip
    moved = [(m["node"], m["op"], m["engine"], m["reason"]) for m in data["moved"]]
    padded = [
        (p["tensor"], p["shape"], p["layout"], f"{p['zeros']:.0%} zeros", p["advice"])
        for p in data["padded"]
    ]
    passes = [(name, count) for name, count in data["passes"].items()]
    outputs = [(name, f"{error:.1e}") for name, error in data.get("max_error", {}).items()]
    refused = [(data["refused"],)] if "refused" in data else []
    kept = [(data["kept"],)] if "kept" in data else []
    return [
        ("nodes", ("operator", "count", "verdict", "replaced by", "max error", "advice"), nodes),
        ("refused", ("reason",), list(refused)),
        ("kept", ("what and why",), list(kept)),
        ("moved to another engine", ("node", "operator", "engine", "reason"), list(moved)),
        ("padded", ("tensor", "shape", "layout", "zeros", "advice"), list(padded)),
        ("passes", ("name", "matches"), list(passes)),
        ("largest error of the migrated model", ("output", "error"), list(outputs)),
    ]


# -- eight bits -----------------------------------------------------------------------------------
ROWS = 16
"""Samples a batch where the model leaves its size open."""
TRIAL_BATCHES = (53, 59)
"""Two sizes that no other axis is likely to have: what changes with them is the batch."""


def _calibrate(arguments: argparse.Namespace) -> int:
    from ascend_lab.compress import calibrate, scales, signal_to_noise_db

    values = inputs.load_array(arguments.values)
    found = calibrate(
        values, arguments.method, bits=arguments.bits, asymmetric=arguments.asymmetric
    )
    low, high = (float(end - found.offset) * found.scale for end in scales.limits(found.bits))
    narrow = values.astype(np.float32)
    data = {
        "method": arguments.method,
        "scale": found.scale,
        "offset": found.offset,
        "bits": found.bits,
        "range": [low, high],
        "signal_to_noise_db": signal_to_noise_db(narrow, found.fake(narrow)),
    }
    lines = [
        f"{arguments.values}: {values.size:,} values, {arguments.method}, {found.bits} bits",
        f"  scale {found.scale:.9g}, offset {found.offset}: holds {low:.6g} to {high:.6g}",
        f"  signal to noise {data['signal_to_noise_db']:.2f} dB",
    ]
    emit(arguments.json, data, lines)
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from ascend_lab import compress as c
    from ascend_lab.graph.onnx import export_onnx

    arrays = inputs.load_arrays(arguments.calibration)
    graph, is_open = _imported(arguments.model, arrays)
    plan = _plan(arguments, graph)
    samples = common.wanted(graph.inputs, arrays, "--calibration")
    feeds = c.batches_of(graph, samples)
    found = c.quantise_graph(graph, feeds, plan)
    model = _opened(arguments.model, arrays, found, plan) if is_open else None
    written: bytes = (model or c.qdq_model(found)).SerializeToString()
    data: dict[str, Any] = {
        "layers": [
            {**asdict(layer), "op": found.graph.node(layer.name).op} for layer in found.layers
        ],
        "size_bytes": len(written),
        "float_bytes": export_onnx(found.graph).ByteSize(),
        "output_error": c.output_error(graph, c.fake_quantised(found), feeds),
        "batches": len(feeds[: plan.batches]),
        "batch": "any" if model else graph.types[graph.inputs[0]].shape[0],
    }
    write_whole(arguments.output, written)
    if arguments.records:
        write_whole(arguments.records, c.records_text(found.layers))
    lines = [
        f"{row['name']} ({row['op']}): scale {row['scale']:.6g}, offset {row['offset']}, "
        f"{len(row['weight_scales'])} weight scale(s)"
        for row in data["layers"]
    ]
    sizes = f"{data['float_bytes']:,} -> {data['size_bytes']:,} bytes"
    last = f"{len(lines)} layers; {sizes}; outputs are off by {data['output_error']:.4%}"
    emit(arguments.json, data, [*lines, last])
    return 0


def _plan(arguments: argparse.Namespace, graph: Graph) -> Plan:
    """Return what the flags and the configuration file say, which must not contradict."""
    from ascend_lab.compress import LayerPlan, Plan, read_config

    every = LayerPlan(arguments.method, asymmetric=not arguments.symmetric)
    if not arguments.config:
        return Plan(every)
    common.refuse_idle(arguments, "without --config", "--symmetric")
    plan = read_config(arguments.config, every)
    with naming(arguments.config):
        plan.check(graph)
    if "method" in arguments.given and plan.common.method != arguments.method:
        got = f"{plan.common.method} in {arguments.config}"
        raise InputError(f"--method {arguments.method} alone", got, "drop one")
    return plan


def _imported(model: str, arrays: dict[str, Any]) -> tuple[Any, bool]:
    """Return the graph for as many rows as the model fixes, and whether it leaves them open."""
    from ascend_lab.graph.onnx import model_file, tensors
    from ascend_lab.graph.zoo import PREFIX

    if model.startswith(PREFIX):
        return import_with(model).graph, False
    stated = model_file.load(model)[0].graph
    entries = {e.name: tensors.sizes_of(e) for e in stated.input}
    common.wanted({e.name for e in tensors.inputs_of(stated)}, arrays, "--calibration")
    heads = {name: sizes[0] for name, sizes in entries.items() if sizes and name in arrays}
    is_open = any(not isinstance(head, int) for head in heads.values())
    rows = {name: head if isinstance(head, int) else ROWS for name, head in heads.items()}
    cut = {name: array[: rows.get(name)] if array.ndim else array for name, array in arrays.items()}
    return import_with(model, cut).graph, is_open


def _opened(model: str, arrays: dict[str, Any], found: Quantised, plan: Plan) -> ModelProto | None:
    """Return the quantised model for any batch; None where the batch is not all that changes."""
    from ascend_lab.compress import at_batch, qdq_model, with_open_batch

    made = []
    for rows in TRIAL_BATCHES:
        sizes = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in arrays.items()}
        made.append(qdq_model(at_batch(found, import_with(model, sizes).graph, plan)))
    return with_open_batch(*made)


_METHODS = "minmax, percentile, ifmr, hfmg, kl, tensorrt or entropy"
VERBS = (
    Verb(
        "zoo", "list the models that zoo:NAME gives, or one model's counts", _zoo,
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
        "migrate", "say what becomes of a model on a chip, and rewrite it", _migrate,
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
        "calibrate", "choose the scale and offset of one tensor", _calibrate,
        (
            flag("values", metavar="VALUES.npy", help="an array of samples"),
            flag("--method", required=True, help=_METHODS),
            flag("--asymmetric", action="store_true", help="allow an offset"),
            flag("--bits", type=whole, default=8, metavar="B", help="2 to 16 (8)"),
            JSON,
        ),
    ),
    Verb(
        "quantize", "write a model with its layers in eight bits, scales chosen on samples",
        _quantize,
        (
            MODEL,
            flag("--calibration", required=True, metavar="X.npz", help="samples by input name"),
            flag("--config", metavar="F", help="a simplified configuration file of AMCT"),
            flag("--method", default="ifmr", help=f"{_METHODS} (ifmr)"),
            flag("--symmetric", action="store_true", help="no offsets"),
            flag("--output", required=True, metavar="Q.onnx", help="write the model to Q.onnx"),
            flag("--records", metavar="F", help="write the scales as a record file"),
            JSON,
        ),
    ),
)  # fmt: skip

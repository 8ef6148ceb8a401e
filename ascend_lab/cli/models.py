"""The verbs `zoo` and `migrate`: what models count, and what becomes of one's nodes on a chip."""

import argparse
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ascend_lab.cli import common
from ascend_lab.cli.common import BATCH, JSON, MODEL, SHAPES, Verb, emit, flag
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal
from ascend_lab.output import write_whole

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
    from ascend_lab.graph.migrate import migrate
    from ascend_lab.graph.zoo import PREFIX, load_model

    ending = Path(arguments.report).suffix if arguments.report else ".txt"
    if ending not in ENDINGS:
        raise InputError(f"--report as {', '.join(ENDINGS)}", arguments.report, "rename it")
    chip, shapes, batch = load_chip(arguments.chip), common.shapes_of(arguments), arguments.batch
    source: str | bytes = arguments.model
    if arguments.model.startswith(PREFIX):
        from ascend_lab.graph.onnx.export import export_onnx

        graph = load_model(arguments.model, shapes=shapes, batch=batch).graph
        source, shapes, batch = export_onnx(graph).SerializeToString(), {}, None
    found = migrate(source, chip, shapes=shapes, batch=batch, dtype=arguments.dtype)
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
    return [
        ("nodes", ("operator", "count", "verdict", "replaced by", "max error", "advice"), nodes),
        ("refused", ("reason",), list(refused)),
        ("moved to another engine", ("node", "operator", "engine", "reason"), list(moved)),
        ("padded", ("tensor", "shape", "layout", "zeros", "advice"), list(padded)),
        ("passes", ("name", "matches"), list(passes)),
        ("largest error of the migrated model", ("output", "error"), list(outputs)),
    ]


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
            flag("--chip", default="Ascend310", help="a preset name or your own .toml file"),
            SHAPES, BATCH,
            flag("--dtype", default="fp16", help="fp16 (default), bf16 or int8"),
            flag("--output", metavar="M.onnx", help="write the migrated model"),
            flag("--report", metavar="R", help="write the report as .json, .html or .txt"),
            JSON,
        ),
        {"description": "Takes ONNX files, zoo:NAME, and programs of torch.export (.pt2)."},
    ),
)  # fmt: skip

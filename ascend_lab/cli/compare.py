"""The verb `compare`: measured rows, or a profile of a board, held against the model."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from xml.sax.saxutils import escape

from ascend_lab.cli.common import JSON, LIKE, Verb, emit, flag
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.output import write_whole

PICTURES = (".svg", ".png", ".pdf")


def _compare(arguments: argparse.Namespace) -> int:
    from ascend_lab.compare import compare

    ending = Path(arguments.figure).suffix.lower() if arguments.figure else PICTURES[0]
    if ending not in PICTURES:
        needed = f"--figure with an ending among {', '.join(PICTURES)}"
        raise InputError(needed, arguments.figure, "rename it")
    chip = load_chip(arguments.chip) if arguments.chip is not None else None
    found = compare(arguments.file, chip, arguments.like)
    if arguments.figure:
        from ascend_lab.lab.figures import fig_compared

        figure = fig_compared(found)
        if ending == ".svg":
            write_whole(arguments.figure, _with_alt(figure.to_svg(), figure.alt_text))
        else:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=ending[1:])
            write_whole(arguments.figure, drawn.getvalue())
    lines = found.lines()
    if arguments.figure:
        lines.append(f"{arguments.figure}: the figure")
    if not found.timed:
        lines.append("no row is timed: each says above what it lacks")
    emit(arguments.json, found.as_dict(), lines)
    return 0 if found.timed else 1


def _with_alt(svg: str, alt: str) -> str:
    """Return an SVG that says its alt text to who does not see it."""
    head, _, rest = svg.partition(">")
    text = escape(alt, {'"': "&quot;"})
    return f'{head} role="img" aria-label="{text}"><title>{text}</title>{rest}'


COMPARE = Verb(
    "compare",
    "hold measured times, a table or a profile of msprof, against the model",
    _compare,
    (
        flag("file", metavar="FILE.csv", help="measured rows, or an op_summary of msprof"),
        flag("--chip", help="chip of a profile, or of rows that name it or none"),
        LIKE,
        flag("--figure", metavar="F.svg", help="draw model over measured times (.svg, .png, .pdf)"),
        JSON,
    ),
    {
        "epilog": "A row timed as a kernel is compared without the launch by the host, others with "
        "it. The exit code is 1 if no row can be timed. Columns of a table: group, "
        "case, chip, operator, inputs, dtype, attributes, l2, timing, measured_us; the "
        "book's page on bringing your own says what each holds."
    },
)

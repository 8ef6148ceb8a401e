"""The verb `compare`: compares times measured on a board with those of the model.

ascend-lab compare op_summary.csv --chip Ascend310 --figure compared.svg
"""

from __future__ import annotations

import argparse
from xml.sax.saxutils import escape

from ascend_lab.cli.common import JSON, LIKE, Verb, flag
from ascend_lab.cli.printing import check_picture, emit, picture_kind, write_picture
from ascend_lab.machine.chip import load_chip
from ascend_lab.output import write_whole


def _compare(arguments: argparse.Namespace) -> int:
    """Time the rows of a file on the model; exit code 1 if none can be timed."""
    from ascend_lab.compare import compare

    check_picture(arguments.figure)
    chip = load_chip(arguments.chip) if arguments.chip is not None else None
    comparison = compare(arguments.file, chip, arguments.like)
    if arguments.figure:
        from ascend_lab.lab.figures import fig_compared

        figure = fig_compared(comparison)
        # Only an SVG can carry the text that a screen reader says instead of the picture.
        if picture_kind(arguments.figure) == ".svg":
            write_whole(arguments.figure, _with_alt(figure.to_svg(), figure.alt_text))
        else:
            write_picture(figure, arguments.figure)
    lines = comparison.lines()  # all rows; those that the model cannot time give the reason
    if arguments.figure:
        lines.append(f"{arguments.figure}: the figure")
    if not comparison.timed:
        lines.append("no row is timed: each says above what it lacks")
    emit(arguments.json, comparison.as_dict(), lines)
    return 0 if comparison.timed else 1


def _with_alt(svg: str, alt: str) -> str:
    """Return an SVG whose first tag carries an alt text, for readers who do not see it."""
    # "<svg ...>" ends at the first ">": attributes that a figure writes hold none
    head, _, tail = svg.partition(">")
    text = escape(alt, {'"': "&quot;"})
    return f'{head} role="img" aria-label="{text}"><title>{text}</title>{tail}'


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

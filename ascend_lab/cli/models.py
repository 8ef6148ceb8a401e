"""The verb `zoo`: what the models count."""

import argparse
from typing import Any

from ascend_lab.cli.common import JSON, Verb, emit, flag, refuse_idle
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal

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
        refuse_idle(arguments, "with a model's name", "--width", "--resolution")
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
    from ascend_lab.graph.ledger import why, why_lines

    if arguments.name is None:
        raise InputError("a model's name with --chip", "none", "e.g. zoo mobilenet_v2 --chip C")
    sizes = {"batch": arguments.batch, "width": arguments.width, "size": arguments.resolution}
    rows = why([arguments.name.removeprefix("zoo:")], arguments.chip, **sizes)
    emit(arguments.json, rows[0], [*why_lines(rows), *LEGEND])
    return 0


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
)  # fmt: skip

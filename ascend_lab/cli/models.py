"""The verb `zoo`: what the models count."""

from __future__ import annotations

import argparse
from typing import Any

from ascend_lab.cli.common import JSON, Verb, emit, flag, refuse_idle
from ascend_lab.limits import count, decimal


def _zoo(arguments: argparse.Namespace) -> int:
    from ascend_lab.graph import zoo

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
        f"{'x'.join(map(str, row['input_shape']))}"
        for name, row in rows.items()
    ]
    if arguments.name is not None:
        lines.append(f"source: {data['source']}")
    emit(arguments.json, data, lines)
    return 0


VERBS = (
    Verb(
        "zoo", "list the models that zoo:NAME gives, or one model's counts", _zoo,
        (
            flag("name", nargs="?", help="a model, such as mobilenet_v2"),
            flag("--batch", type=count, default=1, metavar="N", help="images or sequences (1)"),
            flag("--width", type=decimal, metavar="W", help="factor of the channels, e.g. 0.75"),
            flag("--resolution", type=count, metavar="P", help="pixels of an image's side"),
            JSON,
        ),
    ),
)  # fmt: skip

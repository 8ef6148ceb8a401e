"""The verb `ascend-lab op`: time an operator of the library, or show its default schedule."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from ascend_lab.cli_common import add_json, emit, refuse_idle
from ascend_lab.errors import InputError
from ascend_lab.limits import shown, wholes_of


def add_op(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("op", help="time an operator of the library; without a name, list them")
    verb.add_argument("name", nargs="?", help="an operator, such as softmax")
    verb.add_argument("shapes", nargs="*", help="one shape per input, such as 4096x1024")
    verb.add_argument("--chip", help="a preset name or your own .toml file")
    verb.add_argument("--dtype", default="fp16", help="number format of the inputs (fp16)")
    verb.add_argument(
        "--attr", action="append", default=[], metavar="KEY=VALUE", help="e.g. axis=-1; repeatable"
    )
    verb.add_argument("--show", action="store_true", help="print the default schedule's loop nests")
    add_json(verb)
    verb.set_defaults(run=_op)


def _op(arguments: argparse.Namespace) -> int:
    from ascend_lab import dsl as te
    from ascend_lab import ops
    from ascend_lab.chip import load_chip
    from ascend_lab.dsl.expr import ALIASES

    if arguments.name is None:
        refuse_idle(arguments, "with an operator's name", "--chip", "--dtype", "--attr", "--show")
        lines = [f"{name:<20} {', '.join(op.inputs)}" for name, op in ops.OPERATORS.items()]
        emit(arguments.json, {n: list(o.inputs) for n, o in ops.OPERATORS.items()}, lines)
        return 0
    if arguments.json:
        refuse_idle(arguments, "without --json", "--show")
    operator = ops.get(arguments.name)
    example = "e.g. op softmax 64x1000 --chip Ascend910A"
    if not arguments.shapes:
        raise InputError(f"a shape per input ({', '.join(operator.inputs)})", "none", example)
    if arguments.chip is None:
        raise InputError("--chip with a chip name or file", "none", example)
    chip, attrs = load_chip(arguments.chip), dict(map(_attribute, arguments.attr))
    shapes = [_shape(text) for text in arguments.shapes]
    formats = _formats(operator, len(shapes), ALIASES.get(arguments.dtype, arguments.dtype))
    timeline = ops.time(arguments.name, shapes, formats, chip, **attrs)
    data = timeline.summary()
    busy = ", ".join(f"{pipe} {share:.1%}" for pipe, share in timeline.busy.items())
    lines = [
        f"{arguments.name} on {timeline.core_count} cores of {chip.name} (model result)",
        (
            f"  {timeline.time_s * 1e6:.2f} us with launch, {timeline.cycles} cycles in "
            f"{len(timeline.phases)} phase(s), bound by {timeline.bound_by}"
        ),
        f"  {timeline.memory_bytes} bytes cross the memory interface (what stays in L2 does not)",
        f"  busy: {busy}",
    ]
    if arguments.show:
        tensors = ops.express(arguments.name, shapes, formats, **attrs)
        lines += te.show(te.auto_schedule(tensors, chip)).split("\n")
    emit(arguments.json, data, lines)
    return 0


def _formats(operator: Any, count: int, dtype: str) -> list[str]:
    """Return a format per input; index inputs are int32."""
    names = operator.names(count)
    return ["int32" if "index" in name or "indices" in name else dtype for name in names]


def _shape(text: str) -> tuple[int, ...]:
    shape = wholes_of(text.lower(), "x")
    if not shape:
        raise InputError("a shape such as 4096x1024", shown(text), "join sizes with x")
    return shape


def _attribute(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError("--attr KEY=VALUE", repr(text), "e.g. --attr axis=-1")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return key, value

"""`aoe --singleop`: graphs of one operator each, from a JSON description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, json_of, read_file, shown

if TYPE_CHECKING:
    from ascend_lab.graph import Graph

EXAMPLE = 'e.g. {"op": "matmul", "shapes": [[64, 64], [64, 32]], "dtypes": ["fp16", "fp16"]}'
OURS = ("op", "shapes", "dtypes", "attrs", "constants")
PUBLISHED = ("op", "name", "input_desc", "output_desc", "attr")


def read_json(file: Path, flag: str) -> Any:
    """Return the JSON in a file; raise `InputError` naming the flag for anything else."""
    what = f"{flag} as a JSON file"
    return json_of(read_file(file, what, TABLE_BYTES), f"{what}: {file}")


def single_operators(file: Path) -> list[Graph]:
    """Return a graph per operator that a file describes: one, or a list of them.

    Ours: op, shapes, dtypes (fp16), attrs, constants (places of weights; by default all but the
    first input of convolutions). Published: op, input_desc with shape and type, attr.
    """
    data = read_json(file, "--singleop")
    rows = data if isinstance(data, list) else [data]
    if not rows:
        raise InputError(f"{file}: operators", "none", EXAMPLE)
    graphs = [_graph(row, f"{file}: operator {i}") for i, row in enumerate(rows, 1)]
    if len(graphs) == 1:
        return graphs
    return [replace(graph, name=f"{i}_{graph.name}") for i, graph in enumerate(graphs, 1)]


@dataclass(frozen=True, slots=True)
class _Described:
    op: str
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    attrs: dict[str, Any]
    constants: Sequence[int]


def _graph(row: Any, where: str) -> Graph:
    from ascend_lab.graph import GraphBuilder, TensorType
    from ascend_lab.graph.ir import Fill, Seeded

    found = _described(row, where)
    builder = GraphBuilder(found.op, found.dtypes[0])
    values = []
    for i, (shape, dtype) in enumerate(zip(found.shapes, found.dtypes, strict=True)):
        if i in found.constants:
            data = Fill(1) if "int" in dtype else Seeded(i, 0.1)
            values.append(builder.constant(data, TensorType(shape, dtype), f"x{i}"))
        else:
            values.append(builder.input(f"x{i}", shape, dtype))
    outs = builder.add_node(found.op, *values, **found.attrs)
    builder.output(*(outs if isinstance(outs, tuple) else (outs,)))
    return builder.build()


def _described(row: Any, where: str) -> _Described:
    """Return what a description says in either form, checked."""
    from ascend_lab.chip import DTYPE_BYTES
    from ascend_lab.dsl.expr import ALIASES
    from ascend_lab.graph.lower import CONVOLUTIONS

    if not isinstance(row, dict) or not isinstance(row.get("op"), str):
        raise InputError(f"{where}: an object with op and shapes", shown(row), EXAMPLE)
    known = PUBLISHED if "input_desc" in row else OURS
    unknown = [key for key in row if key not in known]
    if unknown:
        raise InputError(f"{where}: keys among {', '.join(known)}", ", ".join(unknown), EXAMPLE)
    op = _operator(row["op"])
    try:
        shapes, types, attrs = _published(row) if "input_desc" in row else _ours(row)
        shapes = [tuple(_size(n) for n in shape) for shape in shapes]
        dtypes = [ALIASES.get(str(t), str(t)) for t in types]
        default = range(1, len(shapes)) if op in CONVOLUTIONS else ()
        constants = [_size(i, 0) for i in row.get("constants", default)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__} {error}"
        raise InputError(
            f"{where}: shapes, dtypes and attrs of its inputs", what, EXAMPLE
        ) from None
    bad = [dtype for dtype in dtypes if dtype not in DTYPE_BYTES]
    if bad or not shapes or len(dtypes) != len(shapes):
        got = ", ".join(bad) or f"{len(dtypes)} types for {len(shapes)} shapes"
        raise InputError(f"{where}: a shape and a type of {', '.join(DTYPE_BYTES)} each", got)
    return _Described(op, shapes, dtypes, attrs, constants)


def _operator(name: str) -> str:
    """Return an operator's name here; case and underscores do not matter (MatMul is matmul)."""
    from ascend_lab import ops

    plain = {key.replace("_", ""): key for key in ops.OPERATORS}
    return plain.get(name.lower().replace("_", "")) or ops.get(name).name


def _ours(row: dict[str, Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    shapes = list(row["shapes"])
    attrs = {str(key): _plain(value) for key, value in row.get("attrs", {}).items()}
    return shapes, list(row.get("dtypes", ["fp16"] * len(shapes))), attrs


def _published(row: dict[str, Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    inputs = list(row["input_desc"])
    attrs = {str(a["name"]): _plain(a["value"]) for a in row.get("attr", [])}
    return [d["shape"] for d in inputs], [d["type"] for d in inputs], attrs


def _plain(value: Any) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, list) else value


def _size(value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{shown(value)} where a number of at least {least} was needed")
    return value

"""Finds the networks and single operators that `aoe` tunes, from its flags and their files.

A model is loaded only when it is to be tuned: a folder may hold many.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab import limits
from ascend_lab.cli import common
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, json_of, read_file, shown
from ascend_lab.machine.chip import DTYPE_BYTES, Chip

if TYPE_CHECKING:
    from ascend_lab.aoe.operators import Tunable
    from ascend_lab.compiler import Graph

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Network:
    """A network to tune: its name, and how to get it."""

    name: str
    load: Callable[[], Graph]


@dataclass(frozen=True, slots=True)
class Source:
    """Networks that share a report, such as one model at several batches."""

    name: str
    networks: Sequence[Network]


def sources_of(arguments: argparse.Namespace) -> list[Source]:
    """Return the sources that the arguments name; of these only single operators are loaded."""
    shapes = shapes_of(arguments.input_shape)
    batches = _batches(arguments.dynamic_batch_size)
    if arguments.singleop:
        if shapes or batches:
            raise InputError("--singleop without sizes", "--input_shape or --dynamic_batch_size")
        file = Path(arguments.singleop)
        return [Source(file.stem, [_ready(graph) for graph in single_operators(file)])]
    if arguments.model:
        return [_model(arguments.model, shapes, batches)]
    folder = Path(arguments.model_path)
    # Sorted: the file system's order differs from machine to machine.
    files = sorted(p for p in folder.glob("*.onnx") if p.is_file())
    if not files:
        got = f"none in {folder}" if folder.is_dir() else f"{folder}, which is no folder"
        raise InputError("--model_path with .onnx files", got, "check the path")
    return [_model(str(file), shapes, batches) for file in files]


def _ready(graph: Graph) -> Network:
    """Return a graph that is already built as a network to tune."""
    return Network(graph.name, lambda: graph)


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of "x:1,3,224,224;y:1,10"; -1 may stand first, for the batch."""
    entries = [entry.strip() for entry in text.split(";") if entry.strip()]
    if text and not entries:
        # "; ;" names nothing: it is passed on to be refused, not ignored
        entries = [text]
    return common.shapes_in(entries, "--input_shape NAME:sizes;...", 'e.g. "x:1,3,224,224"')


def _batches(text: str) -> list[int]:
    """Return the batches of --dynamic_batch_size, each once: "1,4,4" are 1 and 4."""
    batches = limits.wholes_of(text, ",")
    if any(batch < 1 for batch in batches) or (text and not batches):
        raise InputError("--dynamic_batch_size as numbers above 0", repr(text), "e.g. 1,4,16")
    return list(dict.fromkeys(batches))


def _model(model: str, shapes: Shapes, batches: Sequence[int]) -> Source:
    """Return a model to tune: a network for each batch, and one report for all of them."""
    from ascend_lab.compiler.zoo import model_name

    name = model_name(model)
    if not batches:
        return Source(name, [Network(name, partial(_load, model, shapes, None))])
    names = {batch: f"{name}_batch{batch}" for batch in batches}
    return Source(name, [Network(n, partial(_load, model, shapes, b)) for b, n in names.items()])


def _load(model: str, shapes: Shapes, batch: int | None) -> Graph:
    return common.import_with(model, None, with_batch(shapes, batch, "batch"), batch).graph


def with_batch(shapes: Shapes, batch: int | None, meaning: str) -> dict[str, tuple[int, ...]]:
    """Return shapes with the batch in place of -1; raise `InputError` without a batch.

    `meaning` is what -1 stands for in the message.
    """
    if batch is None and any(-1 in shape for shape in shapes.values()):
        raise InputError(f"--dynamic_batch_size for a {meaning} of -1", "none", "give it")
    return {
        name: tuple(batch if batch and size == -1 else size for size in shape)
        for name, shape in shapes.items()
    }


def operator_filter(
    file: Path, graph: Graph, chip: Chip, dtype: str
) -> tuple[Callable[[Tunable], bool], str]:
    """Return a test for the operators of a --tune_ops_file, and a warning if the graph has none.

    An operator counts if one of its nodes has a listed name, or one of its types is listed.
    """
    from ascend_lab.compiler import compile_graph

    # A piece is what one kernel computes. It may hold several nodes, and equal pieces are tuned
    # once for all of them: a name counts if it belongs to any of these nodes.
    listed_names, listed_types = _names_and_types(file)
    names_by_piece: dict[str, set[str]] = {}
    model_types = set()
    for task in compile_graph(graph, chip, dtype=dtype).tasks:
        names_of_piece = names_by_piece.setdefault(task.piece.key, set())
        names_of_piece |= {task.name, *task.nodes, *task.piece.names.values()}
        if task.lowered is not None:
            model_types |= set(task.op.split("+"))

    def is_listed(operator: Tunable) -> bool:
        """Tell whether the file names the operator or one of its nodes, or its type."""
        # "conv2d+relu" is a fused kernel of two types
        operator_names = names_by_piece.get(operator.piece.key, set()) | {operator.name}
        operator_types = {_normalised(operator_type) for operator_type in operator.op.split("+")}
        return bool(operator_types & listed_types or operator_names & listed_names)

    all_names = set[str]().union(*names_by_piece.values())
    # Without the warning a misspelt name would silently tune nothing.
    missing = [
        *sorted(listed_names - all_names),
        *sorted(listed_types - set(map(_normalised, model_types))),
    ]
    warning = f"{file}: not in this model: {', '.join(missing)}" if missing else ""
    if missing:
        warning += f" (its types: {', '.join(sorted(model_types))})"
    return is_listed, warning


def _names_and_types(file: Path) -> tuple[set[str], set[str]]:
    """Return the names and the types that a --tune_ops_file lists."""
    data = read_json(file, "--tune_ops_file")
    keys = ("tune_ops_name", "tune_ops_type")
    needed = f"{file}: an object with lists of words {keys[0]} and {keys[1]}"
    fault = InputError(needed, str(data)[:80], '{"tune_ops_type": ["conv2d"]}')
    if not isinstance(data, dict) or not data or set(data) - set(keys):
        raise fault
    names, types = (data.get(key, []) for key in keys)
    for words in (names, types):
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise fault
    return set(names), {_normalised(name) for name in types}


def _normalised(operator_type: str) -> str:
    """Return an operator's type without case and underscores: Conv2D is conv2d."""
    return operator_type.lower().replace("_", "")


# -- single operators, from a JSON description ----------------------------------------------------
EXAMPLE = 'e.g. {"op": "matmul", "shapes": [[64, 64], [64, 32]], "dtypes": ["fp16", "fp16"]}'
# Keys of the two forms: ours, and that of CANN's single-operator files.
OURS = ("op", "shapes", "dtypes", "attrs", "constants")
PUBLISHED = ("op", "name", "input_desc", "output_desc", "attr")


def read_json(file: Path, flag: str) -> Any:
    """Return the JSON in a file; raise `InputError` naming the flag for anything else."""
    needed = f"{flag} as a JSON file"
    return json_of(read_file(file, needed, TABLE_BYTES), f"{needed}: {file}")


def single_operators(file: Path) -> list[Graph]:
    """Return a graph for each operator that a file describes: a single one, or a list of them.

    Our form has the keys op, shapes, dtypes (by default fp16), attrs, and constants: which inputs
    are weights, counted from 0 (by default all but the first of a convolution). The published form
    has op, input_desc with the shape and type of each input, and attr.
    """
    data = read_json(file, "--singleop")
    rows = data if isinstance(data, list) else [data]
    if not rows:
        raise InputError(f"{file}: operators", "none", EXAMPLE)
    # Two products in one file would write one report over the other: names begin with a number.
    graphs = [_graph(row, f"{file}: operator {i}") for i, row in enumerate(rows, 1)]
    if len(graphs) == 1:
        return graphs
    return [replace(graph, name=f"{i}_{graph.name}") for i, graph in enumerate(graphs, 1)]


@dataclass(frozen=True, slots=True)
class _Description:
    """A single operator as either form describes it."""

    op: str
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    attrs: dict[str, Any]
    constants: Sequence[int]


def _graph(row: Any, where: str) -> Graph:
    """Return the graph of a described operator; weights are constants of arbitrary values."""
    from ascend_lab.compiler import GraphBuilder, TensorType
    from ascend_lab.compiler.ir import Fill, Seeded

    description = _described(row, where)
    builder = GraphBuilder(description.op, description.dtypes[0])
    values = []
    inputs = zip(description.shapes, description.dtypes, strict=True)
    for i, (shape, dtype) in enumerate(inputs):
        if i in description.constants:
            # Integer inputs may be indices: 1 is a valid index of every table with two rows.
            data = Fill(1) if "int" in dtype else Seeded(i, 0.1)
            values.append(builder.constant(data, TensorType(shape, dtype), f"x{i}"))
        else:
            values.append(builder.input(f"x{i}", shape, dtype))
    outs = builder.add_node(description.op, *values, **description.attrs)
    builder.output(*(outs if isinstance(outs, tuple) else (outs,)))
    return builder.build()


def _described(row: Any, where: str) -> _Description:
    """Return what an entry of a file describes, in either form; raise `InputError`."""
    from ascend_lab.compiler.lower import CONVOLUTIONS
    from ascend_lab.operators import ops
    from ascend_lab.operators.dsl.tensor import ALIASES

    if not isinstance(row, dict) or not isinstance(row.get("op"), str):
        raise InputError(f"{where}: an object with op and shapes", shown(row), EXAMPLE)
    keys = PUBLISHED if "input_desc" in row else OURS
    unknown = [key for key in row if key not in keys]
    if unknown:
        raise InputError(f"{where}: keys among {', '.join(keys)}", ", ".join(unknown), EXAMPLE)
    plain = {key.replace("_", ""): key for key in ops.OPERATORS}  # MatMul is matmul
    # Our names are tried without underscores; the library looks up those of ONNX and CANN.
    op = plain.get(_normalised(row["op"]))
    if op is None:
        op = ops.get(row["op"]).name
    try:
        if "input_desc" in row:
            stated_shapes = [tensor["shape"] for tensor in row["input_desc"]]
            types = [tensor["type"] for tensor in row["input_desc"]]
            attributes = {a["name"]: a["value"] for a in row.get("attr", [])}
        else:
            stated_shapes = list(row["shapes"])
            attributes = row.get("attrs", {})
            types = list(row.get("dtypes", ["fp16"] * len(stated_shapes)))
        attrs = {str(key): _tuples_for_lists(value) for key, value in attributes.items()}
        shapes = [tuple(_size(n) for n in shape) for shape in stated_shapes]
        dtypes = [ALIASES.get(str(t), str(t)) for t in types]
        default = range(1, len(shapes)) if op in CONVOLUTIONS else ()
        constants = [_size(i, 0) for i in row.get("constants", default)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"none: {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"{where}: shapes, dtypes and attrs of its inputs", fault, EXAMPLE
        ) from None
    # Only inputs have types here: the operator decides those of its outputs.
    bad = [dtype for dtype in dtypes if dtype not in DTYPE_BYTES]
    if bad or not shapes or len(dtypes) != len(shapes):
        got = ", ".join(bad) or f"{len(dtypes)} types for {len(shapes)} shapes"
        raise InputError(f"{where}: a shape and a type of {', '.join(DTYPE_BYTES)} each", got)
    return _Description(op, shapes, dtypes, attrs, constants)


def _tuples_for_lists(value: Any) -> Any:
    """Return an attribute with tuples in place of JSON's lists, which operators do not take."""
    return tuple(_tuples_for_lists(v) for v in value) if isinstance(value, list) else value


def _size(value: Any, minimum: int = 1) -> int:
    """Return a whole number of a description; raise `ValueError` for anything else."""
    # In Python True is an int, which would pass as the number 1
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{shown(value)} where a number of at least {minimum} was needed")
    return value

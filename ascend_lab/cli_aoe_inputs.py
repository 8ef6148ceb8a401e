"""What `aoe` tunes: ONNX models, folders of them, single operators; and which operators of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_lab.cli_aoe_singleop import read_json, single_operators
from ascend_lab.cli_common import import_with
from ascend_lab.errors import InputError
from ascend_lab.limits import wholes_of

if TYPE_CHECKING:
    from ascend_lab.aoe.operators import Operator
    from ascend_lab.chip import Chip
    from ascend_lab.graph import Graph


@dataclass(frozen=True, slots=True)
class Network:
    """A network to tune: its name, and how to get it."""

    name: str
    load: Callable[[], Graph]


@dataclass(frozen=True, slots=True)
class Source:
    """Networks that share a report."""

    name: str
    networks: Sequence[Network]


def sources_of(arguments: argparse.Namespace) -> list[Source]:
    """Return what the arguments name, nothing of it loaded but single operators."""
    shapes, batches = shapes_of(arguments.input_shape), _batches(arguments.dynamic_batch_size)
    if arguments.singleop:
        if shapes or batches:
            raise InputError("--singleop without sizes", "--input_shape or --dynamic_batch_size")
        file = Path(arguments.singleop)
        return [Source(file.stem, [_ready(graph) for graph in single_operators(file)])]
    if arguments.model:
        return [_model(Path(arguments.model), shapes, batches)]
    folder = Path(arguments.model_path)
    files = sorted(p for p in folder.glob("*.onnx") if p.is_file())
    if not files:
        got = f"none in {folder}" if folder.is_dir() else f"{folder}, which is no folder"
        raise InputError("--model_path with .onnx files", got, "check the path")
    return [_model(file, shapes, batches) for file in files]


def _ready(graph: Graph) -> Network:
    return Network(graph.name, lambda: graph)


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of "x:1,3,224,224;y:1,10"; -1 may stand first, for the batch."""
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, colon, sizes = part.rpartition(":")
        found[name.strip()] = wholes_of(sizes, ",")
        if not colon or not name.strip() or (sizes.strip() and not found[name.strip()]):
            raise InputError("--input_shape NAME:sizes;...", repr(part), 'e.g. "x:1,3,224,224"')
    if text and not found:
        raise InputError("--input_shape NAME:sizes;...", repr(text), 'e.g. "x:1,3,224,224"')
    return found


def _batches(text: str) -> list[int]:
    found = wholes_of(text, ",")
    if any(batch < 1 for batch in found) or (text and not found):
        raise InputError("--dynamic_batch_size as numbers above 0", repr(text), "e.g. 1,4,16")
    return list(dict.fromkeys(found))


def _model(file: Path, shapes: Mapping[str, tuple[int, ...]], batches: Sequence[int]) -> Source:
    def loader(batch: int | None) -> Callable[[], Graph]:
        def load() -> Graph:
            if batch is None and any(-1 in shape for shape in shapes.values()):
                raise InputError("--dynamic_batch_size for a batch of -1", "none", "give it")
            sizes = {n: tuple(batch if k == -1 else k for k in s) for n, s in shapes.items()}
            return import_with(str(file), None, sizes, batch).graph

        return load

    if not batches:
        return Source(file.stem, [Network(file.stem, loader(None))])
    return Source(file.stem, [Network(f"{file.stem}_batch{b}", loader(b)) for b in batches])


def wanted_of(
    file: Path, graph: Graph, chip: Chip, dtype: str
) -> tuple[Callable[[Operator], bool], str]:
    """Return which operators a --tune_ops_file asks for, and a warning if none of a graph is.

    An operator counts if one of its nodes has a listed name, or one of its types is listed.
    """
    from ascend_lab.graph import compile_graph

    names, types = _listed(file)
    of_piece: dict[str, set[str]] = {}
    kinds = set()
    for task in compile_graph(graph, chip, dtype=dtype).tasks:
        own = of_piece.setdefault(task.piece.key, set())
        own |= {task.name, *task.nodes, *task.piece.names.values()}
        kinds |= set(task.op.split("+")) if task.lowered is not None else set()

    def wanted(operator: Operator) -> bool:
        mine = of_piece.get(operator.piece.key, set()) | {operator.name}
        words = {_word(part) for part in operator.op.split("+")}
        return bool(words & types or mine & names)

    known = {name for mine in of_piece.values() for name in mine}
    missing = [*sorted(names - known), *sorted(types - set(map(_word, kinds)))]
    warning = f"{file}: not in this model: {', '.join(missing)}" if missing else ""
    if missing:
        warning += f" (its types: {', '.join(sorted(kinds))})"
    return wanted, warning


def _listed(file: Path) -> tuple[set[str], set[str]]:
    data = read_json(file, "--tune_ops_file")
    keys = ("tune_ops_name", "tune_ops_type")
    good = isinstance(data, dict) and bool(data) and not set(data) - set(keys)
    lists = [data.get(key, []) for key in keys] if good else []
    if not good or not all(isinstance(x, list) and all(map(_is_text, x)) for x in lists):
        needed = f"{file}: an object with lists of words {keys[0]} and {keys[1]}"
        raise InputError(needed, str(data)[:80], '{"tune_ops_type": ["conv2d"]}')
    return set(lists[0]), {_word(name) for name in lists[1]}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _word(kind: str) -> str:
    """Return an operator's type without case and underscores: Conv2D is conv2d."""
    return kind.lower().replace("_", "")

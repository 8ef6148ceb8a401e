"""The verb `ascend-lab run`: the values an ONNX model computes, in NumPy or as compiled."""

from __future__ import annotations

import argparse
import io
import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli_aoe_use import add_tuned, chip_with, is_tuned, with_tuned
from ascend_lab.cli_common import add_json, add_shapes, emit, import_with, refuse_idle, shapes_of
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import ARRAY_BYTES, refuse_above, shown, whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.graph.ir import Graph

Arrays = dict[str, Any]
WORKING_BYTES = 2**31
"""Most bytes a node may read and write while it is evaluated in fp64."""


def add_run(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("run", help="compute an ONNX model's outputs")
    verb.add_argument("model", metavar="MODEL.onnx")
    verb.add_argument("--inputs", metavar="F.npz", help="arrays by input name (default: random)")
    verb.add_argument("--outputs", metavar="G.npz", help="write the outputs by name")
    add_shapes(verb)
    verb.add_argument("--seed", type=whole, default=0, help="seed of random inputs (0)")
    verb.add_argument("--compiled", action="store_true", help="run the compiled programs")
    verb.add_argument("--chip", default="Ascend310", help="for --compiled (Ascend310)")
    add_tuned(verb)
    add_json(verb)
    verb.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.compiled:
        refuse_idle(arguments, "with --compiled", "--chip", "--aicore-num", "--tuned", "--bank")
    if arguments.inputs:
        refuse_idle(arguments, "without --inputs", "--seed")
    given = load_arrays(arguments.inputs) if arguments.inputs else None
    found = import_with(arguments.model, given, shapes_of(arguments), arguments.batch)
    graph = found.graph
    _check_size(graph)
    inputs = _inputs(graph, given, arguments.seed)
    if arguments.compiled:
        values = _run_compiled(arguments, graph, inputs)
    else:
        from ascend_lab.graph import evaluate

        values = evaluate(graph, inputs)
    outputs = {name: in_type(values[name], kind) for name, kind in found.output_types.items()}
    if arguments.outputs:
        save_arrays(arguments.outputs, outputs)
    rows = {name: _summary(array) for name, array in outputs.items()}
    lines = [f"{graph.name}: {len(graph.nodes)} nodes, {graph.parameter_count:,} parameters"]
    lines += [
        f"  {name}  {row['type']}{row['shape']}  "
        f"min {row['min']:.6g}  max {row['max']:.6g}  mean {row['mean']:.6g}"
        for name, row in rows.items()
    ]
    if arguments.compiled and not all(
        np.isfinite(a.astype(np.float64)).all() for a in outputs.values()
    ):
        lines.append(
            "  not finite: numbers left what fp16 holds (65504); compare without --compiled"
        )
    emit(arguments.json, rows, lines)
    return 0


def _run_compiled(arguments: argparse.Namespace, graph: Graph, inputs: Arrays) -> Arrays:
    """Return the outputs that the kernels compute, default or tuned ones."""
    from ascend_lab.graph import compile_graph, run_tasks

    compiled = compile_graph(graph, chip_with(arguments))
    if is_tuned(arguments):
        compiled = with_tuned(compiled, arguments)
    found = run_tasks(compiled, inputs)
    # rewrites and conversions give outputs other names, in the same order
    return {n: found[own] for n, own in zip(graph.outputs, compiled.graph.outputs, strict=True)}


def _inputs(graph: Graph, given: Mapping[str, Any] | None, seed: int) -> Arrays:
    """Return an array per input of the graph: those given, else seeded ones."""
    from ascend_lab.graph import random_inputs

    if given is None:
        if seed < 0:
            raise InputError("a seed of at least 0", str(seed), "use another")
        return random_inputs(graph, seed)
    missing = [name for name in graph.inputs if name not in given]
    if missing:
        held = ", ".join(given) or "nothing"
        raise InputError(f"--inputs with {', '.join(missing)}", held, "save every input by name")
    return {name: given[name] for name in graph.inputs}


def _check_size(graph: Graph) -> None:
    """Raise `UnsupportedError` before a node that would need too much memory."""
    for node in graph.nodes:
        types = (*graph.in_types(node), *graph.out_types(node))
        wide = sum(t.elements for t in types) * 8
        if wide > WORKING_BYTES:
            raise UnsupportedError(
                f"{node.name}: at most {WORKING_BYTES >> 30} GiB in fp64",
                f"{wide / 2**30:.1f} GiB",
                "use smaller inputs",
            )


def in_type(values: Any, kind: str) -> Any:
    """Return an array in the ONNX element type of an output."""
    from ascend_lab.graph.onnx.tensors import NUMPY

    if kind == "bool":
        return np.asarray(values) != 0
    return np.asarray(values).astype(NUMPY.get(kind, np.asarray(values).dtype), copy=False)


def _summary(array: Any) -> dict[str, Any]:
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        numbers = (wide.min(), wide.max(), wide.mean()) if array.size else (0.0, 0.0, 0.0)
    low, high, mean = (float(n) for n in numbers)
    return {
        "type": str(array.dtype),
        "shape": list(array.shape),
        "min": low,
        "max": high,
        "mean": mean,
    }


def load_arrays(path: str) -> Arrays:
    """Return the arrays of an .npz file; raise `InputError` for another or a damaged file."""
    what = "an .npz file of arrays of numbers"
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise InputError(what, f"{path}, which is no file", "give a file")
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        refuse_above(f"{path}: bytes of arrays, unpacked,", total, ARRAY_BYTES, "use fewer")
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except _DAMAGED as error:
        got = f"{path}: {str(error)[:200]}"
        raise InputError(what, got, "numpy.savez writes one") from None
    for name, array in found.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise InputError(what, f"{shown(name)} in {path}", "numpy.savez writes one")
    return found


_DAMAGED = (
    OSError, ValueError, LookupError, EOFError, SyntaxError, TypeError, RuntimeError, MemoryError,
    zipfile.BadZipFile, tokenize.TokenError, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""What NumPy and zipfile raise for what is no archive of arrays."""


def save_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name into an .npz file; any name will do, also those with slashes."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array))
    write_whole(path, whole.getvalue())

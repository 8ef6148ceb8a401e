"""Migrates an ONNX model to a chip: reports what becomes of every node and rewrites the model.

    verdict      what becomes of the node
    direct       one operator of the library
    rewritten    one operator that a pass changes, or fuses into others
    composed     several operators
    folded       nothing: its result is known before the graph runs, or it changes nothing
    host         it runs on the AI CPU or the host: it has no operator in a graph
    unsupported  no engine computes it

The counts of all verdicts add up to the model's nodes. If a graph can hold all nodes, the migrated
model is that graph after the passes, exported to ONNX. If it cannot, or if the exported model takes
longer on the chip, the migrated model is the source with its constants computed and its unused
nodes dropped. Both keep the names and types of inputs and outputs; symbolic sizes are fixed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler.compile import compile_graph
from ascend_lab.compiler.evaluate import evaluate_all, random_inputs
from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.network import simulate_graph
from ascend_lab.compiler.onnx import (
    CONVERTERS,
    Imported,
    host as h,
    import_model,
    model_file,
    tensors,
)
from ascend_lab.compiler.passes import DEFAULT, run_passes
from ascend_lab.compiler.tasks import Compiled, CpuKernel
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

VERDICTS = ("direct", "rewritten", "composed", "folded", "host", "unsupported")
ADVICE = {
    "NonMaxSuppression": "leave it for after the network, or take fewer boxes into it",
    "NonZero": "where a mask will do, multiply by it: sizes stay known",
    "Unique": "prepare it before the network",
    "Loop": "unroll it when exporting",
    "If": "export the branch that is taken",
    "Scan": "unroll it when exporting",
    "Dropout": "export in evaluation mode",
    "GridSample": "precompute the grid and gather, or resize where it is regular",
}
"""Advice for operators that run outside the AI core, by ONNX operator."""
WIDE_TYPES_ADVICE = "export in float32 and int32: 64-bit numbers have no kernels"
TEXT_ADVICE = "leave texts and lists outside: turn them into numbers before the network"
ROUNDING_SHARE = 1e-6
"""A rewritten model may be slower by this share of the time: sums of times are rounded."""
MIN_PADDING_SHARE = 0.25
"""The report mentions tensors whose padding is at least this share of the stored tensor."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The report on a model as plain data, and the migrated model, None if it cannot run."""

    report: Mapping[str, Any]
    model: ModelProto | None


def migrate(
    source: str | Path | bytes,
    chip: Chip,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    dtype: str = "fp16",
) -> Migration:
    """Return the report on a model and the migrated model; values are compared on random inputs.

    A .pt2 file of torch.export is exported to ONNX first. Raises `InputError` or `GraphError` if
    `source` is not a valid model, and `UnsupportedError` for symbolic sizes that are not set.
    """
    # a program of torch.export; an ONNX model may come as bytes
    is_program = not isinstance(source, bytes) and Path(source).suffix == ".pt2"
    source_model = h.whole_model(_from_torch(Path(str(source))) if is_program else source)
    # one random input for both models: their outputs are compared below
    feed = h.random_feed(source_model, shapes or {}, batch, 0)
    sizes = {name: array.shape for name, array in feed.items()}
    report = _empty_report(source_model, chip, sizes)
    imported = None
    model: ModelProto | None
    try:
        imported = import_model(source_model, shapes=sizes)
        # an index drawn at random could lie outside of the table that it points into
        feed |= _indices_inside(imported)
        compiled = compile_graph(imported.graph, chip, dtype=dtype)
    except InputError:
        raise
    except AscendLabError as error:
        model, outcomes = _placed(source_model, chip, feed, dtype, report, error)
    else:
        model, outcomes = _as_one_graph(source_model, imported, compiled, feed, dtype, report)
    errors = _errors(source_model, feed, model, report, imported)
    report["rows"] = _rows(outcomes, errors, _titles(source_model.graph.node), source_model)
    totals = dict.fromkeys(VERDICTS, 0)
    for row in report["rows"]:
        totals[row["verdict"]] += row["count"]
    report["totals"] = totals
    return Migration(report, model)


def _titles(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Return nodes by their names, which `host.whole_model` has made unique."""
    return {node.name: node for node in nodes}


def _empty_report(
    source: ModelProto, chip: Chip, sizes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return a report that says which model goes to which chip, and nothing of its nodes yet."""
    return {
        "model": source.graph.name or "model",
        "chip": chip.name,
        "nodes": len(_titles(source.graph.node)),
        "inputs": {name: list(shape) for name, shape in sizes.items()},
        "passes": {},
        "moved": [],
        "padded": [],
    }


def _as_one_graph(
    source: ModelProto,
    imported: Imported,
    compiled: Compiled,
    feed: Mapping[str, Any],
    dtype: str,
    report: dict[str, Any],
) -> tuple[ModelProto, Outcomes]:
    """Return the migrated model of a source that one graph holds, and what became of its nodes.

    It is the graph after passes, unless the exported model would take longer: then it is the source
    itself.
    """
    titles = _titles(source.graph.node)
    model, outcomes = _after_passes(imported, compiled, report, titles)
    source_s = simulate_graph(compiled).time_s
    # the migrated model is imported as a user would: nodes added by the export count, too
    rewritten_s = _time_s(model, compiled.chip, dtype)
    report["time_s"] = {"before": source_s, "after": rewritten_s}
    # passes are made for this compiler's kernels; exported, their result may be slower
    if rewritten_s > source_s * (1 + ROUNDING_SHARE):
        model = _without_rewrites(source, feed)
        outcomes = _verdicts(imported.graph, imported.graph, titles)
        report["passes"] = {}
        report["kept"] = (
            f"the nodes as they were: rewritten {rewritten_s * 1e6:.2f} us instead of "
            f"{source_s * 1e6:.2f} us"
        )
        report["time_s"]["after"] = source_s
    return model, outcomes


def _time_s(model: ModelProto, chip: Chip, dtype: str) -> float:
    """Return the time of a migrated model; infinity if it does not compile."""
    try:
        return simulate_graph(compile_graph(import_model(model).graph, chip, dtype=dtype)).time_s
    except AscendLabError:
        return float("inf")


def _without_rewrites(source: ModelProto, feed: Mapping[str, Any]) -> ModelProto:
    """Return the source with fixed sizes, without nodes whose results nothing reads."""
    outputs = [entry.name for entry in source.graph.output]
    used = set(outputs)
    live: list[NodeProto] = []
    # backward from the outputs, so that a node comes after all its readers
    for node in reversed(source.graph.node):
        if used.intersection(node.output):
            # also what subgraphs of If and Loop read
            used.update(h.all_reads(node))
            live.insert(0, node)
    inputs = [entry.name for entry in tensors.inputs_of(source.graph)]
    reads, _ = h.reads_and_writes(live, outputs)
    reads = list(dict.fromkeys((*inputs, *reads)))
    model = h.sub_model(source, live, reads, outputs, {**h.constants_of(source), **feed})
    return _with_declared_outputs(model, source)


def _with_declared_outputs(model: ModelProto, source: ModelProto) -> ModelProto:
    """Return a part of the source with the source's declarations of outputs."""
    del model.graph.output[:]
    model.graph.output.extend(source.graph.output)
    return model


def _indices_inside(imported: Imported) -> dict[str, Any]:
    """Return random integers for integer inputs; those used as indices lie inside their tables."""
    arrays = random_inputs(imported.graph)
    return {
        name: tensors.in_type(arrays[name], kind)
        for name, kind in imported.input_types.items()
        if kind in tensors.INTEGERS and name in arrays
    }


Outcomes = dict[tuple[str, str, tuple[str, ...]], list[str]]
"""Names of the model's nodes by (operator, verdict, operators that replace it)."""


def _rows(
    outcomes: Outcomes,
    errors: Mapping[str, float],
    titles: Mapping[str, NodeProto],
    source: ModelProto,
) -> list[dict[str, Any]]:
    """Return a row for every operator and what it became, the worst verdict first."""
    # `VERDICTS` lists verdicts from best to worst
    order = {verdict: i for i, verdict in enumerate(VERDICTS)}
    rows = [
        {
            "source_op": op,
            "count": len(names),
            "verdict": verdict,
            "replaced_by": list(by),
            "max_error": max((errors[name] for name in names if name in errors), default=None),
            "advice": _advice(titles[names[0]], verdict, source),
        }
        for (op, verdict, by), names in outcomes.items()
    ]
    return sorted(rows, key=lambda row: (-order[str(row["verdict"])], str(row["source_op"])))


def _after_passes(
    imported: Imported, compiled: Compiled, report: dict[str, Any], titles: Mapping[str, NodeProto]
) -> tuple[ModelProto, Outcomes]:
    """Return the model that the passes make of a graph, and what became of the source's nodes."""
    from ascend_lab.compiler.onnx.export import export_onnx

    graph, pass_report = run_passes(imported.graph, DEFAULT)
    report["passes"] = {name: count for name, count in pass_report.matches.items() if count}
    for task in compiled.tasks:
        kernel = task.lowered.kernel if task.lowered else None
        if isinstance(kernel, CpuKernel):
            report["moved"].append(
                {
                    "node": task.name,
                    "op": task.op,
                    "engine": kernel.engine,
                    "reason": kernel.reason,
                }
            )
    report["padded"] = _padded_tensors(compiled.graph)
    model = _with_source_types(export_onnx(graph), graph, imported)
    return model, _verdicts(imported.graph, graph, titles)


def _verdicts(graph: Graph, rewritten: Graph, titles: Mapping[str, NodeProto]) -> Outcomes:
    """Return what nodes became in a graph and after its passes.

    The names of the nodes in both graphs begin with the title of the model's node.
    """
    both_stages: list[dict[str, list[str]]] = [defaultdict(list), defaultdict(list)]
    for ops, stage in zip(both_stages, (graph, rewritten), strict=True):
        for node in stage.nodes:
            ops[_source_of(node.name, titles)].append(node.op)
    outcomes: Outcomes = defaultdict(list)
    for name, entry in titles.items():
        ops_before, ops_after = (ops.get(name, []) for ops in both_stages)
        # several operators are "composed"; none means that the node is constant or has no effect
        if len(ops_before) == 1:
            verdict, replacements = (
                ("direct", ops_after)
                if ops_before == ops_after
                else ("rewritten", ops_after or ["fused"])
            )
        else:
            verdict = "composed" if ops_before else "folded"
            replacements = ops_before
        outcomes[entry.op_type, verdict, tuple(dict.fromkeys(replacements))].append(name)
    return outcomes


def _source_of(name: str, titles: Mapping[str, NodeProto]) -> str:
    """Return the title of the model's node from which a node of the graph comes.

    A pass names new nodes TITLE/part or TITLE_part, after the node that they replace: mm, in three,
    is mm_rows, mm_product and mm.
    """
    candidates = (name, name.rpartition("/")[0], name.rpartition("_")[0])
    return next((title for title in candidates if title in titles), "")


def _placed(
    source: ModelProto,
    chip: Chip,
    feed: Mapping[str, Any],
    dtype: str,
    report: dict[str, Any],
    error: AscendLabError,
) -> tuple[ModelProto | None, Outcomes]:
    """Return the source's nodes on chip and host as a model, and what became of each node.

    The model is None if a node runs nowhere. `error` says why no single graph holds the model.
    """
    try:
        hosted = place_model(source, chip, inputs=feed, dtype=dtype)
    except UnsupportedError as refusal:
        report["refused"] = str(error if isinstance(error, UnsupportedError) else refusal)
        return None, _outcomes_if_refused(source, error)
    outcomes: Outcomes = defaultdict(list)
    placed_nodes = _titles(node for placed_part in hosted.parts for node in placed_part.nodes)
    for placed_part in hosted.parts:
        if placed_part.imported is not None and placed_part.compiled is not None:
            graph = placed_part.imported.graph
            rewritten = run_passes(graph, DEFAULT)[0]
            part_outcomes = _verdicts(graph, rewritten, _titles(placed_part.nodes))
            for key, names in part_outcomes.items():
                outcomes[key] += names
            report["padded"] += _padded_tensors(placed_part.compiled.graph)
    for name, engine in hosted.off_core.items():
        op = placed_nodes[name].op_type
        outcomes[op, "host", (engine,)].append(name)
        reason = hosted.reasons.get(name, "cheaper there: its neighbours, or a launch")
        report["moved"].append({"node": name, "op": op, "engine": engine, "reason": reason})
    # nodes without an engine were computed from constants in advance
    for node in source.graph.node:
        if node.name not in placed_nodes:
            outcomes[node.op_type, "folded", ()].append(node.name)
    report["placement"] = hosted.summary()["placement"]
    return _placed_model(source, list(placed_nodes.values()), hosted.values), outcomes


def _outcomes_if_refused(source: ModelProto, error: AscendLabError) -> Outcomes:
    """Return what would become of each node of a model that cannot run as a whole."""
    from onnx import defs

    outcomes: Outcomes = defaultdict(list)
    for node in source.graph.node:
        # the compiler's error names only the first node that fails: the others may compile
        is_named = str(error).startswith(f"node {model_file.title(node)}")
        verdict = "host" if defs.has(node.op_type, node.domain) else "unsupported"
        if model_file.full_name(node) in CONVERTERS and not is_named:
            verdict = "direct"
        outcomes[node.op_type, verdict, ()].append(node.name)
    return outcomes


def _placed_model(
    source: ModelProto, nodes: Sequence[NodeProto], values: Mapping[str, Any]
) -> ModelProto:
    """Return the placed nodes as a model, with the values of all other tensors as constants."""
    inputs = [entry.name for entry in tensors.inputs_of(source.graph)]
    outputs = [entry.name for entry in source.graph.output]
    written = {name for node in nodes for name in node.output}
    constants = {name for name in values if name not in written and name not in inputs}
    reads = [*inputs, *constants]
    model = h.sub_model(source, nodes, reads, outputs, values, constants)
    return _with_declared_outputs(model, source)


def _with_source_types(model: ModelProto, graph: Graph, imported: Imported) -> ModelProto:
    """Return a model whose inputs and outputs have the names and types of the source's."""
    import onnx

    casts_in: list[NodeProto] = []
    casts_out: list[NodeProto] = []
    for entry, kinds in (
        *((e, imported.input_types) for e in model.graph.input),
        *((e, imported.output_types) for e in model.graph.output),
    ):
        name = entry.name
        tensor = entry.type.tensor_type
        is_input = kinds is imported.input_types
        model_name = name if is_input else imported.graph.outputs[list(graph.outputs).index(name)]
        element_type = onnx.helper.np_dtype_to_tensor_dtype(
            np.dtype(_NUMPY.get(kinds[model_name], kinds[model_name]))
        )
        if tensor.elem_type == element_type and model_name == name:
            continue
        # the graph has fp16 or int32 where inputs and outputs of the source are float or int64
        inner = f"{name}.inner"
        cast = onnx.helper.make_node(
            "Cast",
            [name] if is_input else [inner],
            [inner] if is_input else [model_name],
            to=tensor.elem_type if is_input else element_type,
        )
        (casts_in if is_input else casts_out).append(cast)
        for node in model.graph.node:
            for tensor_names in (node.input, node.output):
                tensor_names[:] = [
                    inner if tensor_name == name else tensor_name for tensor_name in tensor_names
                ]
        for stored in model.graph.initializer:
            stored.name = inner if stored.name == name else stored.name
        tensor.elem_type = element_type
        entry.name = model_name
    nodes = onnx.GraphProto(node=[*casts_in, *model.graph.node, *casts_out])
    del model.graph.node[:]
    model.graph.node.extend(nodes.node)
    return model


_NUMPY = {"double": "float64", "bfloat16": "float32"}
"""NumPy's name of an ONNX element type, where it differs; NumPy has no bfloat16."""


def _errors(
    source: ModelProto,
    feed: Mapping[str, Any],
    model: ModelProto | None,
    data: dict[str, Any],
    imported: Imported | None,
) -> dict[str, float]:
    """Return the largest error of each node's first output; add the outputs' errors to `data`."""
    if model is None:
        return {}
    expected = h.run_on_host(source, feed, everything=True)
    migrated = h.run_on_host(model, feed)
    data["max_error"] = {name: _error(migrated[name], expected[name]) for name in migrated}
    if imported is None:
        return {}
    values = evaluate_all(imported.graph, {n: feed[n] for n in imported.graph.inputs})
    return {
        node.name: _error(values[node.output[0]], expected[node.output[0]])
        for node in source.graph.node
        if node.output[0] in values and node.output[0] in expected
    }


def _error(migrated: Any, source: Any) -> float:
    """Return the largest difference as a share of the largest finite number; 0 for equal strings.

    NaN or the same infinity in both counts as equal; in one of them alone the error is infinite.
    """
    if not h.is_numbers(source):
        return 0.0 if np.array_equal(np.asarray(migrated), np.asarray(source)) else float("inf")
    migrated_values, source_values = (
        np.asarray(array).astype(np.float64) for array in (migrated, source)
    )
    # a wrong shape is a wrong result, whatever the numbers
    if migrated_values.shape != source_values.shape:
        return float("inf")
    finite = np.isfinite(migrated_values) & np.isfinite(source_values)
    if not np.array_equal(migrated_values[~finite], source_values[~finite], equal_nan=True):
        return float("inf")
    # errors are shares of the largest number: fp16 has 11 bits, about 0.0005 of it
    scale = float(np.abs(source_values[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(migrated_values[finite] - source_values[finite]).max(initial=0.0)) / scale


def _padded_tensors(graph: Graph) -> list[dict[str, Any]]:
    """Return the tensors that are stored with much padding, and which sizes to raise.

    A tensor of 3 channels in blocks of 16 is stored with 81 % zeros: use 16 channels.
    """
    rows = []
    for node in graph.nodes:
        kind = graph.types[node.output]
        stored = int(np.prod(kind.stored_shape))
        zeros = 1 - kind.elements / stored if stored else 0.0
        if zeros >= MIN_PADDING_SHARE and node.op != "trans_data":
            # a matrix pads rows and columns to 16, an image its channels
            in_fractals = kind.layout == "FRACTAL_NZ"
            axes = ("rows", "columns") if in_fractals else ("channels",)
            sizes = zip(axes, kind.shape[-2:] if in_fractals else kind.shape[1:2], strict=False)
            ragged_axes = [name for name, size in sizes if size % 16]
            note = ": a larger batch has more" if ragged_axes == ["rows"] else ""
            rows.append(
                {
                    "tensor": node.output,
                    "shape": list(kind.shape),
                    "layout": kind.layout,
                    "zeros": zeros,
                    "advice": f"use {' and '.join(ragged_axes or axes)} in multiples of 16{note}",
                }
            )
    return rows


def _advice(node: NodeProto, verdict: str, source: ModelProto) -> str:
    """Return how a model might avoid a node off the core, "" for nodes on the core."""
    if verdict == "unsupported":
        return "replace it by operators of the standard, or export its function with the model"
    if verdict != "host":
        return ""
    from onnx import TensorProto

    entries = (*source.graph.value_info, *tensors.inputs_of(source.graph), *source.graph.output)
    tensor_names = {*node.input, *node.output}
    kinds = Counter(e.type.tensor_type.elem_type for e in entries if e.name in tensor_names)
    # texts and lists have no tensors: no chip computes them
    if TensorProto.STRING in kinds or "Sequence" in node.op_type or "String" in node.op_type:
        return TEXT_ADVICE
    if {TensorProto.DOUBLE, TensorProto.UINT64, TensorProto.INT64} & kinds.keys():
        return ADVICE.get(node.op_type, WIDE_TYPES_ADVICE)
    return ADVICE.get(node.op_type, "keep it at the ends of the network: each change costs copies")


def _from_torch(path: Path) -> bytes:
    """Return a program of torch.export as an ONNX model; raise `InputError` without torch."""
    try:
        import torch
    except ImportError:
        needed = "torch (pip install torch onnxscript) for a .pt2 file"
        raise InputError(needed, "none", "or export to ONNX where torch is") from None
    try:
        program = torch.export.load(path)
        exported: Any = torch.onnx.export(program, dynamo=True)
        return bytes(exported.model_proto.SerializeToString())
    except Exception as error:  # whatever torch raises
        got = f"{path}: {str(error)[:160]}"
        raise InputError("a program of torch.export", got, "save it again") from None

"""The verbs `calibrate` and `quantize`: one tensor's scale, a whole model in eight bits."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli.arrays import load_array, load_arrays
from ascend_lab.cli.common import JSON, MODEL, Verb, emit, flag, import_with, refuse_idle, wanted
from ascend_lab.errors import InputError
from ascend_lab.limits import naming, whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto

    from ascend_lab.compress import Plan, Quantised
    from ascend_lab.graph import Graph

ROWS = 16
"""Samples a batch where the model leaves its size open."""
TRIAL_BATCHES = (53, 59)
"""Two sizes that no other axis is likely to have: what changes with them is the batch."""


def _calibrate(arguments: argparse.Namespace) -> int:
    from ascend_lab.compress import calibrate, signal_to_noise_db
    from ascend_lab.compress.scales import limits

    values = load_array(arguments.values)
    found = calibrate(
        values, arguments.method, bits=arguments.bits, asymmetric=arguments.asymmetric
    )
    low, high = (float(end - found.offset) * found.scale for end in limits(found.bits))
    narrow = values.astype(np.float32)
    data = {
        "method": arguments.method,
        "scale": found.scale,
        "offset": found.offset,
        "bits": found.bits,
        "range": [low, high],
        "signal_to_noise_db": signal_to_noise_db(narrow, found.fake(narrow)),
    }
    lines = [
        f"{arguments.values}: {values.size:,} values, {arguments.method}, {found.bits} bits",
        f"  scale {found.scale:.9g}, offset {found.offset}: holds {low:.6g} to {high:.6g}",
        f"  signal to noise {data['signal_to_noise_db']:.2f} dB",
    ]
    emit(arguments.json, data, lines)
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from ascend_lab import compress as c
    from ascend_lab.graph.onnx import export_onnx

    arrays = load_arrays(arguments.calibration)
    graph, is_open = _imported(arguments.model, arrays)
    plan = _plan(arguments, graph)
    feeds = c.batches_of(graph, wanted(graph.inputs, arrays, "--calibration"))
    found = c.quantise_graph(graph, feeds, plan)
    model = _opened(arguments.model, arrays, found, plan) if is_open else None
    written: bytes = (model or c.qdq_model(found)).SerializeToString()
    data: dict[str, Any] = {
        "layers": [
            {**asdict(layer), "op": found.graph.node(layer.name).op} for layer in found.layers
        ],
        "size_bytes": len(written),
        "float_bytes": export_onnx(found.graph).ByteSize(),
        "output_error": c.output_error(graph, c.fake_quantised(found), feeds),
        "batches": len(feeds[: plan.batches]),
        "batch": "any" if model else graph.types[graph.inputs[0]].shape[0],
    }
    write_whole(arguments.output, written)
    if arguments.records:
        write_whole(arguments.records, c.records_text(found.layers))
    lines = [
        f"{row['name']} ({row['op']}): scale {row['scale']:.6g}, offset {row['offset']}, "
        f"{len(row['weight_scales'])} weight scale(s)"
        for row in data["layers"]
    ]
    sizes = f"{data['float_bytes']:,} -> {data['size_bytes']:,} bytes"
    last = f"{len(lines)} layers; {sizes}; outputs are off by {data['output_error']:.4%}"
    emit(arguments.json, data, [*lines, last])
    return 0


def _plan(arguments: argparse.Namespace, graph: Graph) -> Plan:
    """Return what the flags and the configuration file say, which must not contradict."""
    from ascend_lab.compress import LayerPlan, Plan, read_config

    common = LayerPlan(arguments.method, asymmetric=not arguments.symmetric)
    if not arguments.config:
        return Plan(common)
    refuse_idle(arguments, "without --config", "--symmetric")
    plan = read_config(arguments.config, common)
    with naming(arguments.config):
        plan.check(graph)
    if "method" in arguments.given and plan.common.method != arguments.method:
        got = f"{plan.common.method} in {arguments.config}"
        raise InputError(f"--method {arguments.method} alone", got, "drop one")
    return plan


def _imported(model: str, arrays: dict[str, Any]) -> tuple[Any, bool]:
    """Return the graph for as many rows as the model fixes, and whether it leaves them open."""
    from ascend_lab.graph.onnx.model_file import load
    from ascend_lab.graph.onnx.tensors import Limits, sizes_of
    from ascend_lab.graph.zoo import PREFIX

    if model.startswith(PREFIX):
        return import_with(model).graph, False
    stated = load(model, Limits())[0].graph
    entries = {e.name: sizes_of(e) for e in stated.input}
    wanted(entries.keys() - {t.name for t in stated.initializer}, arrays, "--calibration")
    heads = {name: sizes[0] for name, sizes in entries.items() if sizes and name in arrays}
    is_open = any(not isinstance(head, int) for head in heads.values())
    rows = {name: head if isinstance(head, int) else ROWS for name, head in heads.items()}
    cut = {name: array[: rows.get(name)] if array.ndim else array for name, array in arrays.items()}
    return import_with(model, cut).graph, is_open


def _opened(model: str, arrays: dict[str, Any], found: Quantised, plan: Plan) -> ModelProto | None:
    """Return the quantised model for any batch; None where the batch is not all that changes."""
    from ascend_lab.compress import at_batch, qdq_model, with_open_batch

    made = []
    for rows in TRIAL_BATCHES:
        sizes = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in arrays.items()}
        made.append(qdq_model(at_batch(found, import_with(model, sizes).graph, plan)))
    return with_open_batch(*made)


_METHODS = "minmax, percentile, ifmr, hfmg, kl, tensorrt or entropy"
VERBS = (
    Verb(
        "calibrate", "choose the scale and offset of one tensor", _calibrate,
        (
            flag("values", metavar="VALUES.npy", help="an array of samples"),
            flag("--method", required=True, help=_METHODS),
            flag("--asymmetric", action="store_true", help="allow an offset"),
            flag("--bits", type=whole, default=8, metavar="B", help="2 to 16 (8)"),
            JSON,
        ),
    ),
    Verb(
        "quantize", "write a model with its layers in eight bits, scales chosen on samples",
        _quantize,
        (
            MODEL,
            flag("--calibration", required=True, metavar="X.npz", help="samples by input name"),
            flag("--config", metavar="F", help="a simplified configuration file of AMCT"),
            flag("--method", default="ifmr", help=f"{_METHODS} (ifmr)"),
            flag("--symmetric", action="store_true", help="no offsets"),
            flag("--output", required=True, metavar="Q.onnx", help="write the model to Q.onnx"),
            flag("--records", metavar="F", help="write the scales as a record file"),
            JSON,
        ),
    ),
)  # fmt: skip

"""What a quantised graph computes, for others to read: in fp32, and as records.

`fake_quantised` puts the rounding where the hardware rounds; `onnx_file` writes it into a model.

A record file is a text of records, one a layer, with the keys that AMCT's tools read and write
(scale_offset_record_pytorch.proto).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler import Draft, Graph, Node, ir
from ascend_lab.compiler.passes import formats
from ascend_lab.deploy.compress import config
from ascend_lab.deploy.compress.layers import (
    BIAS_STEPS,
    Quantised,
    bias_of,
    by_node,
    constant_of,
    weight_scales,
)
from ascend_lab.deploy.compress.scales import LayerScales, fake, limits
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file


def with_reads(
    graph: Graph,
    layers: Mapping[str, LayerScales],
    put: Callable[[Draft, Node, LayerScales, int], str],
) -> Graph:
    """Return the graph whose layers read what `put` writes in place of an input.

    Its places are what a layer reads, 0, once for equal scales; the weights, 1; a whole bias, 2.
    """
    draft = Draft(graph)
    made = dict[tuple[str, float, int, int], str]()
    for node in graph.nodes:
        if node.name not in layers:
            continue
        layer = layers[node.name]
        reads = list(node.inputs)
        key = (reads[0], layer.scale, layer.offset, layer.bits)
        if key not in made:
            made[key] = put(draft, node, layer, 0)
        reads[0] = made[key]
        reads[1] = put(draft, node, layer, 1)
        if whole_bias(layer, node, graph) is not None:
            reads[2] = put(draft, node, layer, 2)
        draft.become(node, node.op, reads, node.attrs)
    for addition, name in formats.summands(graph, [n for n, one in layers.items() if one.shared]):
        layer = layers[name]
        x = graph.node(name).inputs[0]
        formats.share(draft, addition, x, made[x, layer.scale, layer.offset, layer.bits])
    return draft.finish()


def fake_quantised(found: Quantised) -> Graph:
    """Return the graph that rounds what layers read as whole numbers would, in fp32.

    Raises `InputError` for scales of a layer that the graph has not.
    """

    def put(draft: Draft, node: Node, layer: LayerScales, place: int) -> str:
        name = node.inputs[place]
        graph = found.graph
        if place == 0:  # (clip(round(x / scale) + offset) - offset) scale
            step = draft.add(constant_of(np.asarray(layer.scale, np.float32)), f"{name}_scale")
            y = draft.insert("round", [draft.insert("div", [name, step])])
            low, high = (float(end - layer.offset) for end in limits(layer.bits))
            y = draft.insert("clip", [y], {"low": low, "high": high})
            return draft.insert("muls", [y], {"number": layer.scale}, f"{name}_fake")
        if place == 1:
            array = graph.constants[name].array()
            scales = weight_scales(layer, node, graph)
            return draft.add(constant_of(fake(array, scales, 0, layer.weight_bits)), f"{name}_fake")
        bias = whole_bias(layer, node, graph) * bias_scales(layer)
        return draft.add(constant_of(bias), f"{name}_fake")

    return with_reads(found.graph, by_node(found), put)


def bias_scales(layer: LayerScales) -> ir.Values:
    """Return the scales of a layer's sums: one, or one per output channel."""
    return np.float32(layer.scale) * np.asarray(layer.weight_scales, np.float32)


def whole_bias(layer: LayerScales, node: Node, graph: Graph) -> ir.Values | None:
    """Return round(b / (scale x weight scale)) in int32; None for a bias that stays in floats.

    That is one of other than a number a channel, and one that int32 does not hold in such steps.
    """
    bias = bias_of(node, graph)
    return None if bias is None else whole_steps(bias, layer)


def whole_steps(bias: ir.Values, layer: LayerScales) -> ir.Values | None:
    """Return a bias in steps of a layer's sums, as `whole_bias` does."""
    steps = np.rint(bias.astype(np.float64) / bias_scales(layer))
    held = np.abs(steps).max(initial=0.0) <= 2 * BIAS_STEPS - 1
    return steps.astype(np.int32) if held else None


# -- a record file --------------------------------------------------------------------------------
_WIDTHS = {f"INT{bits}": bits for bits in range(2, 17)}
_RNN = "records of recurrent layers are not read"
_VALUE: Mapping[str, Any] = {
    "scale_d": float,
    "offset_d": int,
    "scale_w": [float],
    "offset_w": [int],
    "tensor_balance_factor": [float],
    "dst_type": tuple(_WIDTHS),
    "act_type": tuple(_WIDTHS),
    "wts_type": tuple(_WIDTHS),
    "skip_fusion": bool,
    "shift_bit": "shifts belong to an older form of integer layers",
    "fakequant_precision_mode": "values are computed in fp32",
    **dict.fromkeys(("scale_h", "offset_h", "scale_r", "offset_r"), _RNN),
}
_FILE: Mapping[str, Any] = {
    "record": [{"key": str, "value": _VALUE}],
    "prune_record": "records of pruning are not read here",
}


def parse_records(text: str, where: str = "record file") -> tuple[LayerScales, ...]:
    """Return the layers of a record file; raise `InputError` naming the layer or key at fault."""
    found: dict[str, LayerScales] = {}
    for record in config.read_text(text, _FILE, where).get("record", []):
        name = record.get("key", "")
        value = record.get("value", {})
        missing = [key for key in ("scale_d", "scale_w") if key not in value]
        if not name or missing or name in found:
            got = f"{name}: no {missing[0]}" if missing else f"{name or 'a record without'} twice"
            raise InputError(f"{where}: records with key, scale_d, scale_w, each once", got)
        if any(value.get("offset_w", ())):
            raise InputError(f"{where}: {name}: offset_w of 0", "another", "weights are symmetric")
        both = value.get("dst_type", "INT8")
        found[name] = LayerScales(
            name,
            value["scale_d"],
            value.get("offset_d", 0),
            tuple(value["scale_w"]),
            _WIDTHS[value.get("act_type", both)],
            _WIDTHS[value.get("wts_type", both)],
            tuple(value.get("tensor_balance_factor", ())),
        )
    return tuple(found.values())


def read_records(path: str | Path) -> tuple[LayerScales, ...]:
    """Return the layers of a record file on disk; raises as `parse_records`."""
    data = read_file(path, "a record file", TABLE_BYTES)
    return parse_records(data.decode("utf-8", "replace"), str(path))


def records_text(layers: Iterable[LayerScales]) -> str:
    """Return the record file of some layers; `parse_records` of it gives them back."""
    lines = []
    for one in layers:
        quoted = one.name.replace("\\", "\\\\").replace('"', '\\"')
        lines += ["record {", f'  key: "{quoted}"', "  value {"]
        lines += [f"    scale_d: {one.scale:.9g}", f"    offset_d: {one.offset}"]
        for scale in one.weight_scales:
            lines += [f"    scale_w: {scale:.9g}", "    offset_w: 0"]
        lines += [f"    tensor_balance_factor: {factor:.9g}" for factor in one.balance]
        lines += [f"    act_type: INT{one.bits}", f"    wts_type: INT{one.weight_bits}"]
        lines += ["  }", "}"]
    return "\n".join([*lines, ""])

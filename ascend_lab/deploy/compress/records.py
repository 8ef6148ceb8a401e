"""Reads and writes record files: the scales of a network's layers as text, in AMCT's format.

    record { key: "conv1" value { scale_d: 0.02 offset_d: -128 scale_w: 0.004 offset_w: 0 ... } }

AMCT is CANN's compression toolkit. The suffixes _d and _w stand for data (the layer's input) and
weights. A network is quantised once and its records are kept; with them the same scales can be put
into the graph again, for another batch size or another chip. Keys:
scale_offset_record_pytorch.proto in github hicann/amct.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ascend_lab.deploy.compress.protobuf_text import read_text
from ascend_lab.deploy.compress.scales import LayerScales
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file

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
"""Keys of a record's value, in the form that `protobuf_text.read_text` takes."""
_FILE: Mapping[str, Any] = {
    "record": [{"key": str, "value": _VALUE}],
    "prune_record": "records of pruning are not read here",
}


def parse_records(text: str, where: str = "record file") -> tuple[LayerScales, ...]:
    """Return the layers of a record file; raise `InputError` naming the layer or key at fault."""
    layers: dict[str, LayerScales] = {}
    for record in read_text(text, _FILE, where).get("record", []):
        name = record.get("key", "")
        value = record.get("value", {})
        missing = [key for key in ("scale_d", "scale_w") if key not in value]
        if not name or missing or name in layers:
            got = f"{name}: no {missing[0]}" if missing else f"{name or 'a record without'} twice"
            raise InputError(f"{where}: records with key, scale_d, scale_w, each once", got)
        # the format allows offsets of weights; here each must be 0 or left out
        if any(value.get("offset_w", ())):
            raise InputError(f"{where}: {name}: offset_w of 0", "another", "weights are symmetric")
        # `dst_type` is for both, unless activations and weights have types of their own
        common_type = value.get("dst_type", "INT8")
        layers[name] = LayerScales(
            name=name,
            scale=value["scale_d"],
            offset=value.get("offset_d", 0),
            weight_scales=tuple(value["scale_w"]),
            bits=_WIDTHS[value.get("act_type", common_type)],
            weight_bits=_WIDTHS[value.get("wts_type", common_type)],
            balance=tuple(value.get("tensor_balance_factor", ())),
        )
    return tuple(layers.values())


def read_records(path: str | Path) -> tuple[LayerScales, ...]:
    """Return the layers of a record file on disk; raises the errors of `parse_records`."""
    data = read_file(path, "a record file", TABLE_BYTES)
    return parse_records(data.decode("utf-8", "replace"), str(path))


def records_text(layers: Iterable[LayerScales]) -> str:
    """Return the text of a record file, from which `parse_records` restores the layers."""
    lines = []
    for layer in layers:
        # names of nodes may hold quotes and backslashes
        quoted = layer.name.replace("\\", "\\\\").replace('"', '\\"')
        lines += ["record {", f'  key: "{quoted}"', "  value {"]
        # nine digits bring back every fp32 number exactly
        lines += [f"    scale_d: {layer.scale:.9g}", f"    offset_d: {layer.offset}"]
        for scale in layer.weight_scales:
            lines += [f"    scale_w: {scale:.9g}", "    offset_w: 0"]
        lines += [f"    tensor_balance_factor: {factor:.9g}" for factor in layer.balance]
        lines += [f"    act_type: INT{layer.bits}", f"    wts_type: INT{layer.weight_bits}"]
        lines += ["  }", "}"]
    return "\n".join([*lines, ""])

"""What quantisation knows of a layer: scales and offsets, in memory and as a text file.

A layer reads x and weights w: q = clip(round(v / scale) + offset), v = (q - offset) scale. The file
is a text of records, one a layer, with the keys that AMCT's tools read and write (github
hicann/amct, scale_offset_record_pytorch.proto).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_lab.compress.prototext import read_text
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file
from ascend_lab.output import write_whole


@dataclass(frozen=True, slots=True)
class LayerScales:
    """How a layer is quantised: `name` is its node; one weight scale, or one per output channel.

    Weights are symmetric (offset 0). `balance` divides what the layer reads, per input channel, and
    multiplies its weights, before both are quantised; () where nothing is balanced.
    """

    name: str
    scale: float
    offset: int
    weight_scales: tuple[float, ...]
    bits: int = 8
    weight_bits: int = 8
    balance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.scale, *self.weight_scales, *self.balance)
        if not self.weight_scales or not all(0 < n < float("inf") for n in numbers):
            raise InputError(f"{self.name}: finite scales above 0", str(min(numbers, default=0)))
        for key, bits in (("bits", self.bits), ("weight_bits", self.weight_bits)):
            if not 2 <= bits <= 16:
                raise InputError(f"{self.name}: {key} from 2 to 16", str(bits))
        half = 2 ** (self.bits - 1)
        if not -half <= self.offset < half:
            raise InputError(f"{self.name}: an offset in {self.bits} bits", str(self.offset))


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
    for record in read_text(text, _FILE, where).get("record", []):
        name, value = record.get("key", ""), record.get("value", {})
        missing = [key for key in ("scale_d", "scale_w") if key not in value]
        if not name or missing or name in found:
            got = f"{name}: no {missing[0]}" if missing else f"{name or 'a record without'} twice"
            raise InputError(f"{where}: records with key, scale_d, scale_w, each once", got)
        if any(value.get("offset_w", ())):
            raise InputError(f"{where}: {name}: offset_w of 0", "another", "weights are symmetric")
        both = value.get("dst_type", "INT8")
        found[name] = LayerScales(
            name, value["scale_d"], value.get("offset_d", 0), tuple(value["scale_w"]),
            _WIDTHS[value.get("act_type", both)], _WIDTHS[value.get("wts_type", both)],
            tuple(value.get("tensor_balance_factor", ())),
        )  # fmt: skip
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


def save_records(layers: Iterable[LayerScales], path: str | Path) -> None:
    """Write the record file of some layers, whole or not at all."""
    write_whole(path, records_text(layers))

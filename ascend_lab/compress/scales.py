"""The arithmetic of whole numbers that stand for others: v is about (q - offset) scale.

q = clip(round(v / scale) + offset, -2^(b-1), 2^(b-1) - 1), halves to even. Symmetric: offset 0, the
scale is max|v| / (2^(b-1) - 1), or / 2^(b-1) where the largest number is negative. Asymmetric: the
range, 0 taken in, / (2^b - 1). A scale that would be below FLT_EPSILON is 1. (AMCT, github
hicann/amct, custom_op/utils.py.)

A record file is a text of records, one a layer, with the keys that AMCT's tools read and write
(scale_offset_record_pytorch.proto).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compress.prototext import read_text
from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Values
from ascend_lab.limits import TABLE_BYTES, read_file

EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True)
class Scale:
    """One scale and offset of a whole tensor, in so many bits."""

    scale: float
    offset: int = 0
    bits: int = 8

    def quantise(self, values: Values) -> Values:
        """Return the whole numbers, in the float format of the values."""
        return quantise(values, self.scale, self.offset, self.bits)

    def fake(self, values: Values) -> Values:
        """Return the values that the whole numbers stand for."""
        return fake(values, self.scale, self.offset, self.bits)


def limits(bits: int) -> tuple[int, int]:
    """Return the least and the largest signed number of so many bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def quantise(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return q of the rule above, as floats of the values' format; scales may be arrays."""
    kind = values.dtype.type
    found: Values = np.clip(np.rint(values / np.asarray(scale, kind)) + kind(offset), *limits(bits))
    return found.astype(kind, copy=False)


def fake(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return (q - offset) scale: the values rounded and limited as the whole numbers are."""
    kind = values.dtype.type
    whole = quantise(values, scale, offset, bits) - kind(offset)
    found: Values = whole * np.asarray(scale, kind)
    return found


def scale_between(low: float, high: float, bits: int = 8, asymmetric: bool = False) -> Scale:
    """Return the scale and offset that just hold the numbers from low to high."""
    half = 2 ** (bits - 1)
    one, two = np.float32(low), np.float32(high)
    if asymmetric:
        one, two = min(one, np.float32(0)), max(two, np.float32(0))
        step = (two - one) / np.float32(2 * half - 1)
        if not step >= EPSILON:
            return Scale(1.0, -half, bits)
        return Scale(float(step), -half - round(float(one / step)), bits)
    step = max(abs(one), abs(two)) / np.float32(half if abs(one) > abs(two) else half - 1)
    return Scale(float(step) if step >= EPSILON else 1.0, 0, bits)


def channel_scales(weights: Values, axis: int | None, bits: int = 8) -> tuple[float, ...]:
    """Return the symmetric scale of each slice along an axis, or of all weights for None (ARQ)."""
    rows = weights.reshape(1, -1) if axis is None else np.moveaxis(weights, axis, 0)
    flat = rows.reshape(len(rows), -1)
    return tuple(scale_between(row.min(), row.max(), bits).scale for row in flat)


def along(numbers: Any, axis: int | None, rank: int) -> Values:
    """Return numbers shaped to broadcast along an axis of a tensor; one, or no axis: a scalar."""
    found = np.asarray(numbers)
    if axis is None or found.size == 1:
        return found.reshape(())
    return found.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def checked(values: Any, what: str = "values") -> Values:
    """Return numbers in fp32; raise `InputError` for none, other things, NaN and infinity."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or not array.size:
        got = f"{array.dtype} {array.shape}"
        raise InputError(f"{what}: an array of numbers that is not empty", got)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if not np.isfinite(narrow).all():
        place = int(np.argmin(np.isfinite(narrow).ravel()))
        got = f"{array.ravel()[place]} at place {place}"
        raise InputError(f"{what}: finite numbers in fp32", got, "clean the data")
    return narrow


def signal_to_noise_db(values: Values, found: Values) -> float:
    """Return 10 log10(sum v^2 / sum (v - found)^2), in decibel; infinite for equal arrays."""
    wide = values.astype(np.float64)
    noise = float(np.sum((wide - found) ** 2))
    return 10 * math.log10(float(np.sum(wide**2)) / noise) if noise else math.inf


# -- what is known of a layer ---------------------------------------------------------------------
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

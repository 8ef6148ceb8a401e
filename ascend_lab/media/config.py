"""The configuration file of AIPP: protobuf text, read with one table of keys.

    aipp_op { aipp_mode: static  input_format: YUV420SP_U8  crop: true  crop_size_w: 224 ... }

A key left out has the default of the published template: a matrix of which half is given is
completed from it in silence, and its rows end in blue, green, red. Without `crop: true` or
`padding: true` their sizes count for nothing. Keys that the documents reserve may be given with
their default only. Source: CANN, AIPP, config_file_template; GE, insert_op.proto.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_lab.compress.prototext import read_text
from ascend_lab.errors import InputError
from ascend_lab.limits import TOML_BYTES, naming, read_file
from ascend_lab.media.aipp import FORMATS, Aipp
from ascend_lab.media.colour import Csc, csc_of

_AXES, _SIDES = ("w", "h"), ("top", "bottom", "left", "right")
_MATRIX = [[f"matrix_r{row}c{column}" for column in range(3)] for row in range(3)]


@dataclass(frozen=True, slots=True)
class Key:
    """A key: what its value is, its default, least and largest, the mode it is for."""

    kind: type | tuple[str, ...]
    default: Any
    low: float = 0
    high: float = 0
    mode: str = "static"


def _keys() -> dict[str, Key]:
    switches = ("csc_switch", "rbuv_swap_switch", "ax_swap_switch", "crop", "padding")
    found = {name: Key(bool, False) for name in switches}
    reserved = ("resize", "single_line_mode", "support_rotation")
    found |= {name: Key(bool, False, mode="reserved") for name in reserved}
    found |= {"aipp_mode": Key(("static", "dynamic"), None, mode=""),
              "related_input_rank": Key(int, 0, 0, 2**16, ""),
              "related_input_name": Key(str, "", mode="reserved"),
              "max_src_image_size": Key(int, 0, 0, 2**32 - 1, "dynamic"),
              "input_format": Key(tuple(FORMATS), None),
              "cpadding_value": Key(float, 0.0, -65504, 65504, "reserved"),
              "rotation_angle": Key(int, 0, 0, 3, "reserved"),
              "raw_rgbir_to_f16_n": Key(int, 8, 0, 31, "reserved"),
              "padding_value": Key(float, 0.0, -65504, 65504)}  # fmt: skip
    for axis in _AXES:
        found[f"src_image_size_{axis}"] = Key(int, 0, 0, 4096)
        found[f"load_start_pos_{axis}"] = Key(int, 0, 0, 4095)
        found[f"crop_size_{axis}"] = Key(int, 0, 0, 4096)
        found[f"resize_output_{axis}"] = Key(int, 0, 0, 4096, "reserved")
    found |= {f"{side}_padding_size": Key(int, 0, 0, 32) for side in _SIDES}
    found |= {key: Key(int, None, -(2**15), 2**15 - 1) for row in _MATRIX for key in row}
    for i, bias in enumerate((16, 128, 128)):
        found |= {f"{side}_bias_{i}": Key(int, bias, 0, 255) for side in ("input", "output")}
    for i in range(4):
        found[f"mean_chn_{i}"] = Key(int, 0, 0, 255)
        found[f"min_chn_{i}"] = Key(float, 0.0, 0, 255)
        found[f"var_reci_chn_{i}"] = Key(float, 1.0, -65504, 65504)
    return found


KEYS = _keys()
"""Every key of an `aipp_op`; defaults of the matrix depend on the input format."""


@dataclass(frozen=True, slots=True)
class AippOp:
    """One `aipp_op`: for which input of the network, and its settings (None: dynamic ones).

    Sizes that the file leaves to the network are 0 in the settings: see `fitted`. A dynamic one
    says only the `max_bytes` of all frames of a batch.
    """

    rank: int
    settings: Aipp | None
    max_bytes: int = 0


def read_config(path: str | Path) -> tuple[AippOp, ...]:
    """Return the operations of a file; raises `InputError` naming the key at fault."""
    data = read_file(path, "an AIPP configuration", TOML_BYTES)
    try:
        return parse_config(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InputError("an AIPP configuration in UTF-8", f"{path}: {error}") from None


def parse_config(text: str, where: str = "AIPP") -> tuple[AippOp, ...]:
    """Return the operations of a text, in order; raises `InputError` naming the key at fault."""
    table = {"aipp_op": [{name: key.kind for name, key in KEYS.items()}]}
    given = read_text(text, table, where).get("aipp_op", ())
    with naming(where):
        return _operations(given)


def _operations(given: Iterable[dict[str, Any]]) -> tuple[AippOp, ...]:
    found = [_operation(one) for one in given]
    ranks = [op.rank for op in found]
    if not found:
        raise InputError("an aipp_op { ... }", "none", "write one for each input")
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise InputError("one aipp_op for each related_input_rank", f"{twice} twice", "number them")
    return tuple(found)


def _operation(given: dict[str, Any]) -> AippOp:
    mode = given.get("aipp_mode")
    if mode is None:
        raise InputError("aipp_mode: static or dynamic", "none", "every aipp_op says it")
    for name, value in given.items():
        key = KEYS[name]
        if key.kind in (int, float) and not key.low <= value <= key.high:
            needed = f"{name}: a number from {key.low:g} to {key.high:g}"
            raise InputError(needed, f"{value:g}", "mend the configuration")
        if key.mode == "reserved" and value != key.default:
            raise InputError(f"{name}: {key.default}", str(value), "the documents reserve it")
        if key.mode in ("static", "dynamic") and key.mode != mode and value != key.default:
            remedy = "frames bring theirs" if mode == "dynamic" else "drop it"
            raise InputError(f"{name} only with aipp_mode: {key.mode}", mode, remedy)
    v = {name: given.get(name, key.default) for name, key in KEYS.items()}
    if mode == "static":
        return AippOp(v["related_input_rank"], _static(v))
    if not v["max_src_image_size"]:
        raise InputError("max_src_image_size above 0 with aipp_mode: dynamic", "none", "add it")
    return AippOp(v["related_input_rank"], None, v["max_src_image_size"])


def _static(v: dict[str, Any]) -> Aipp:
    if v["input_format"] is None:
        raise InputError(f"input_format: one of {', '.join(FORMATS)}", "none", "add it")
    sizes = [v[f"src_image_size_{axis}"] for axis in _AXES]
    names = [f"{key}_{axis}" for key in ("load_start_pos", "crop_size") for axis in _AXES]
    padding = tuple(v[f"{side}_padding_size"] for side in _SIDES)
    per_channel = [
        tuple(v[f"{key}_chn_{i}"] for i in range(4)) for key in ("mean", "min", "var_reci")
    ]
    return Aipp(
        v["input_format"], sizes[0], sizes[1],
        csc=_conversion(v) if v["csc_switch"] else None,
        rbuv_swap=v["rbuv_swap_switch"], ax_swap=v["ax_swap_switch"],
        crop=tuple(v[name] for name in names) if v["crop"] else None,
        padding=padding if v["padding"] else (0, 0, 0, 0),
        padding_value=v["padding_value"],
        mean=per_channel[0], least=per_channel[1], var_reci=per_channel[2],
    )  # fmt: skip


def _conversion(v: dict[str, Any]) -> Csc:
    """Return the conversion given, what it leaves out from BT.601 narrow."""
    to = "BGR" if v["input_format"] == "YUV420SP_U8" else "YUV"
    usual = csc_of("601 narrow", to).matrix
    rows = tuple(
        tuple(n if v[key] is None else v[key] for n, key in zip(*pair, strict=True))
        for pair in zip(usual, _MATRIX, strict=True)
    )
    biases = (tuple(v[f"{side}_bias_{i}"] for i in range(3)) for side in ("input", "output"))
    return Csc(rows, *biases)  # type: ignore[arg-type]

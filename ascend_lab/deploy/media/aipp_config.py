"""Reads the configuration file of AIPP (image pre-processing), in the text format of protobuf.

    aipp_op { aipp_mode: static  input_format: YUV420SP_U8  crop: true  crop_size_w: 224 ... }

A missing key has the default of the published template. Missing entries of the colour matrix are
those of narrow BT.601: from YUV420SP_U8 to blue, green and red in this order, as in the template,
and from the other formats to YUV. Sizes of crop and padding are ignored without `crop: true` or
`padding: true`. Keys that the documents call reserved are accepted with their default only.

Source: CANN, AIPP, config_file_template and crop_padding_config; GE, insert_op.proto, aipp_op.cc.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_lab.deploy.compress.protobuf_text import read_text
from ascend_lab.deploy.media.aipp import (
    BYTE_RANGE,
    BYTES_PER_PIXEL,
    CROP_START_RANGE,
    FP16_RANGE,
    MAX_HEIGHT,
    MAX_WIDTH,
    MINIMUM_RANGE,
    PADDING_RANGE,
    Aipp,
)
from ascend_lab.deploy.media.colours import Csc, csc_of
from ascend_lab.errors import InputError
from ascend_lab.limits import TOML_BYTES, Range, naming, read_file

_AXES = ("w", "h")
_SIDES = ("top", "bottom", "left", "right")
_MATRIX = [[f"matrix_r{row}c{column}" for column in range(3)] for row in range(3)]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of an `aipp_op`: the type of its value, its default and its mode ("" is for both).

    `kind` is a type, a tuple of words or a range of numbers, as `protobuf_text` takes them.
    """

    kind: type | tuple[str, ...] | Range
    default: Any
    mode: str = "static"


def _keys() -> dict[str, Key]:
    """Return all keys of an `aipp_op` by name."""
    size = Range(int, 0, max(MAX_WIDTH, MAX_HEIGHT))  # 0: the size of the network's input
    switches = ("csc_switch", "rbuv_swap_switch", "ax_swap_switch", "crop", "padding")
    keys = {name: Key(bool, False) for name in switches}
    reserved = ("resize", "single_line_mode", "support_rotation")
    keys |= {name: Key(bool, False, "reserved") for name in reserved}
    keys |= {
        "aipp_mode": Key(("static", "dynamic"), None, ""),
        "related_input_rank": Key(Range(int, 0, 2**16), 0, ""),
        "related_input_name": Key(str, "", "reserved"),
        "max_src_image_size": Key(Range(int, 0, 2**32 - 1), 0, "dynamic"),
        "input_format": Key(tuple(BYTES_PER_PIXEL), None),
        "cpadding_value": Key(FP16_RANGE, 0.0, "reserved"),
        "rotation_angle": Key(Range(int, 0, 3), 0, "reserved"),
        "raw_rgbir_to_f16_n": Key(Range(int, 0, 31), 8, "reserved"),
        "padding_value": Key(FP16_RANGE, 0.0),
    }
    for axis in _AXES:
        keys[f"src_image_size_{axis}"] = Key(size, 0)
        keys[f"load_start_pos_{axis}"] = Key(CROP_START_RANGE, 0)
        keys[f"crop_size_{axis}"] = Key(size, 0)
        keys[f"resize_output_{axis}"] = Key(size, 0, "reserved")
    keys |= {f"{side}_padding_size": Key(PADDING_RANGE, 0) for side in _SIDES}
    # Entries are in units of 1/256: 16 bits reach from -128 to 128. Defaults depend on the format.
    entry = Range(int, -(2**15), 2**15 - 1)
    keys |= {key: Key(entry, None) for row in _MATRIX for key in row}
    # The defaults are those of narrow BT.601: luma begins at 16, chroma is centred at 128.
    for i, bias in enumerate((16, 128, 128)):
        keys |= {f"{side}_bias_{i}": Key(BYTE_RANGE, bias) for side in ("input", "output")}
    for i in range(4):
        keys[f"mean_chn_{i}"] = Key(BYTE_RANGE, 0)
        keys[f"min_chn_{i}"] = Key(MINIMUM_RANGE, 0.0)
        keys[f"var_reci_chn_{i}"] = Key(FP16_RANGE, 1.0)
    return keys


KEYS = _keys()
"""All keys of an `aipp_op`; `_conversion` has the defaults of the matrix."""


@dataclass(frozen=True, slots=True)
class AippOp:
    """One `aipp_op`: the number of the network's input, and the settings (None: dynamic AIPP).

    A size of 0 in the settings stands for that of the network's input (see `fitted`). Dynamic
    AIPP has `max_bytes` instead, the size of all frames of a batch.
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
    # `read_text` checks types and ranges and names the line; modes are checked below.
    messages = read_text(text, table, where).get("aipp_op", ())
    with naming(where):
        return _operations(messages)


def _operations(messages: Iterable[dict[str, Any]]) -> tuple[AippOp, ...]:
    """Return the operations of all `aipp_op` of a file, one for each input of the network."""
    operations = [_operation(message) for message in messages]
    ranks = [op.rank for op in operations]
    if not operations:
        raise InputError("an aipp_op { ... }", "none", "write one for each input")
    if len(set(ranks)) < len(ranks):
        repeated_rank = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise InputError(
            "one aipp_op for each related_input_rank", f"{repeated_rank} twice", "number them"
        )
    return tuple(operations)


def _operation(message: dict[str, Any]) -> AippOp:
    """Return one operation, its keys checked against its mode."""
    mode = message.get("aipp_mode")
    if mode is None:
        raise InputError("aipp_mode: static or dynamic", "none", "every aipp_op says it")
    for name, value in message.items():
        key = KEYS[name]
        if key.mode == "reserved" and value != key.default:
            raise InputError(f"{name}: {key.default}", str(value), "the documents reserve it")
        # A key of the other mode may have its default value, as in the vendor's template.
        if key.mode in ("static", "dynamic") and key.mode != mode and value != key.default:
            remedy = "frames bring theirs" if mode == "dynamic" else "drop it"
            raise InputError(f"{name} only with aipp_mode: {key.mode}", mode, remedy)
    # The defaults give a value to every key.
    values = {name: message.get(name, key.default) for name, key in KEYS.items()}
    if mode == "static":
        return AippOp(values["related_input_rank"], _static_settings(values))
    if not values["max_src_image_size"]:
        raise InputError("max_src_image_size above 0 with aipp_mode: dynamic", "none", "add it")
    return AippOp(values["related_input_rank"], None, values["max_src_image_size"])


def _static_settings(values: dict[str, Any]) -> Aipp:
    """Return the settings of a static operation, from the values of all keys."""
    if values["input_format"] is None:
        raise InputError(f"input_format: one of {', '.join(BYTES_PER_PIXEL)}", "none", "add it")
    names = [f"{key}_{axis}" for key in ("load_start_pos", "crop_size") for axis in _AXES]
    padding = tuple(values[f"{side}_padding_size"] for side in _SIDES)
    per_channel = [
        tuple(values[f"{key}_chn_{i}"] for i in range(4)) for key in ("mean", "min", "var_reci")
    ]
    return Aipp(
        values["input_format"],
        values["src_image_size_w"],
        values["src_image_size_h"],
        csc=_conversion(values) if values["csc_switch"] else None,
        rbuv_swap=values["rbuv_swap_switch"],
        ax_swap=values["ax_swap_switch"],
        crop=tuple(values[name] for name in names) if values["crop"] else None,
        padding=padding if values["padding"] else (0, 0, 0, 0),
        padding_value=values["padding_value"],
        mean=per_channel[0],
        minimum=per_channel[1],
        var_reci=per_channel[2],
    )


def _conversion(values: dict[str, Any]) -> Csc:
    """Return the colour conversion of a file, with missing entries from narrow BT.601."""
    # As in the template: from YUV the rows are blue, green, red; other formats become YUV.
    target = "BGR" if values["input_format"] == "YUV420SP_U8" else "YUV"
    rows = []
    for keys, defaults in zip(_MATRIX, csc_of("601 narrow", target).matrix, strict=True):
        row = [
            default if values[key] is None else values[key]
            for key, default in zip(keys, defaults, strict=True)
        ]
        rows.append(tuple(row))
    in_bias = tuple(values[f"input_bias_{i}"] for i in range(3))
    out_bias = tuple(values[f"output_bias_{i}"] for i in range(3))
    return Csc(tuple(rows), in_bias, out_bias)  # type: ignore[arg-type]

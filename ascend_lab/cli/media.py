"""The verb `aipp`: raw frames through an AIPP configuration file, pixel by pixel."""

import argparse
import io
from typing import Any

import numpy as np

from ascend_lab.cli.arrays import load_array
from ascend_lab.cli.common import JSON, Verb, emit, flag
from ascend_lab.errors import InputError
from ascend_lab.limits import ARRAY_BYTES, TABLE_BYTES, naming, read_file, refuse_above, whole
from ascend_lab.output import write_whole


def _aipp(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.media import aipp_each, check, read_config, unpack_block

    found = [op for op in read_config(arguments.config) if op.rank == arguments.rank]
    if not found:
        raise InputError(f"an aipp_op of related_input_rank {arguments.rank}", "none", "--rank N")
    op, chip = found[0], load_chip(arguments.chip) if arguments.chip else None
    frames = load_array(arguments.image)
    if op.settings is not None:
        if arguments.block:
            raise InputError("--block only with aipp_mode: dynamic", "static", "drop it")
        with naming(arguments.config):
            size = check(op.settings, chip).frame_bytes
        each = [op.settings] * max(1, frames.size // size)
    else:
        if not arguments.block:
            raise InputError("--block F.bin with aipp_mode: dynamic", "none", "64 + 96 n bytes")
        block = read_file(arguments.block, "a parameter block of dynamic AIPP", TABLE_BYTES)
        each = [check(s, chip) for s in unpack_block(block)]
        total = sum(s.frame_bytes for s in each)
        refuse_above("frames of max_src_image_size", total, op.max_bytes, "raise it")
    width, height = each[0].size
    refuse_above("bytes of the result", len(each) * width * height * 6, ARRAY_BYTES)
    result = aipp_each(frames, each)
    save_array(arguments.output, result)
    wide = result.astype(np.float64)
    data = {
        "frames": len(result), "shape": list(result.shape), "dtype": str(result.dtype),
        "min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean()),
    }  # fmt: skip
    line = (
        f"{len(result)} frames of {each[0].width} x {each[0].height} ({each[0].input_format}) -> "
        f"{result.dtype}{list(result.shape)}, {wide.min():g} to {wide.max():g}"
    )
    emit(arguments.json, data, [line])
    return 0


def save_array(path: str, array: Any) -> None:
    """Write an array into an .npy file."""
    raw = io.BytesIO()
    np.lib.format.write_array(raw, np.ascontiguousarray(array))
    write_whole(path, raw.getvalue())


VERBS = (
    Verb(
        "aipp", "raw camera frames through an AIPP configuration", _aipp,
        (
            flag("config", metavar="CONFIG.cfg"),
            flag("--image", required=True, metavar="X.npy", help="raw frames, flat uint8"),
            flag("--output", required=True, metavar="Y.npy", help="write fp16 (n, c, h, w) to it"),
            flag("--rank", type=whole, default=0, metavar="N", help="related_input_rank (0)"),
            flag("--block", metavar="F.bin", help="parameters, with aipp_mode: dynamic"),
            flag("--chip", help="keep this chip's limits, too"),
            JSON,
        ),
    ),
)  # fmt: skip

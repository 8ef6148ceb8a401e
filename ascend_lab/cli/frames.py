"""The verb `aipp`: applies AIPP, image pre-processing, to raw camera frames for a network."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from ascend_lab import limits
from ascend_lab.cli import array_files
from ascend_lab.cli.common import JSON, Verb, flag
from ascend_lab.cli.printing import emit
from ascend_lab.errors import InputError
from ascend_lab.limits import naming, whole
from ascend_lab.machine.chip import Chip, load_chip

if TYPE_CHECKING:
    from ascend_lab.deploy.media.aipp import Aipp

HALF_BYTES = 2
"""Bytes of a value of the result, which is fp16."""
CHANNELS = 3


def _aipp(arguments: argparse.Namespace) -> int:
    """Turn raw frames into the arrays that a network reads, and write them."""
    from ascend_lab.deploy.media import aipp_each, read_config

    # A file may configure several inputs of a network, each by its number.
    operations = [op for op in read_config(arguments.config) if op.rank == arguments.rank]
    if not operations:
        raise InputError(f"an aipp_op of related_input_rank {arguments.rank}", "none", "--rank N")
    op = operations[0]
    chip = load_chip(arguments.chip) if arguments.chip else None
    frames = array_files.load_array(arguments.image)
    if op.settings is not None:
        settings_by_frame = _static_settings(arguments, op.settings, chip, frames.size)
    else:
        settings_by_frame = _dynamic_settings(arguments, op.max_bytes, chip)
    first_frame = settings_by_frame[0]
    width, height = first_frame.size
    result_bytes = len(settings_by_frame) * width * height * CHANNELS * HALF_BYTES
    limits.refuse_above("bytes of the result", result_bytes, limits.ARRAY_BYTES)
    result = aipp_each(frames, settings_by_frame)
    array_files.save_array(arguments.output, result)
    wide = result.astype(np.float64)  # a mean in fp16 overflows at 65504
    data = {
        "frames": len(result),
        "shape": list(result.shape),
        "dtype": str(result.dtype),
        "min": float(wide.min()),
        "max": float(wide.max()),
        "mean": float(wide.mean()),
    }
    line = (
        f"{len(result)} frames of {first_frame.width} x {first_frame.height} "
        f"({first_frame.input_format}) -> "
        f"{result.dtype}{list(result.shape)}, {wide.min():g} to {wide.max():g}"
    )
    emit(arguments.json, data, [line])
    return 0


def _static_settings(
    arguments: argparse.Namespace, settings: Aipp, chip: Chip | None, frames_bytes: int
) -> list[Aipp]:
    """Return a list with the static configuration's settings, one item per frame in the file."""
    from ascend_lab.deploy.media import check_aipp

    if arguments.block:
        raise InputError("--block only with aipp_mode: dynamic", "static", "drop it")
    with naming(arguments.config):
        frame_bytes = check_aipp(settings, chip).frame_bytes
    # A file shorter than one frame counts as one: `aipp_each` refuses it and names both sizes.
    return [settings] * max(1, frames_bytes // frame_bytes)


def _dynamic_settings(
    arguments: argparse.Namespace, most_bytes: int, chip: Chip | None
) -> list[Aipp]:
    """Return the settings in a parameter block, one item per frame."""
    from ascend_lab.deploy.media import check_aipp, unpack_block

    if not arguments.block:
        # A block has a head of 64 bytes and 96 for each frame: 256 for two.
        raise InputError("--block F.bin with aipp_mode: dynamic", "none", "64 + 96 n bytes")
    needed = "a parameter block of dynamic AIPP"
    block = limits.read_file(arguments.block, needed, limits.TABLE_BYTES)
    settings_by_frame = [check_aipp(settings, chip) for settings in unpack_block(block)]
    frames_bytes = sum(settings.frame_bytes for settings in settings_by_frame)
    limits.refuse_above("frames of max_src_image_size", frames_bytes, most_bytes, "raise it")
    return settings_by_frame


AIPP = Verb(
    "aipp",
    "raw camera frames through an AIPP configuration",
    _aipp,
    (
        flag("config", metavar="CONFIG.cfg", help="aipp_op { key: value ... } for each input"),
        flag("--image", required=True, metavar="X.npy", help="raw frames, flat uint8"),
        flag("--output", required=True, metavar="Y.npy", help="write fp16 (n, c, h, w) to it"),
        flag(
            "--rank",
            type=whole,
            default=0,
            metavar="N",
            help="which input: the aipp_op with this related_input_rank (0)",
        ),
        flag("--block", metavar="F.bin", help="parameters, with aipp_mode: dynamic"),
        flag("--chip", help="keep this chip's limits, too"),
        JSON,
    ),
)

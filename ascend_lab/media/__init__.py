"""Media: from a camera's bytes to a network's input, and what that costs."""

# fmt: off
# isort: off
from ascend_lab.media.aipp import (
    Aipp, AippOp, aipp, aipp_each, check, crop, normalise, pad, parse_config, read_config,
)
from ascend_lab.media.dvpp import (
    STANDARDS, UNITS, Answer, Csc, Picture, Played, Station, Unit, cards_needed, convert,
    copy_station, crop_box, csc_of, jpegd_picture, network_station, play, resize, unit_station,
    vpc_crop_and_resize, vpc_picture,
)
from ascend_lab.media.insert import block_bytes, fitted, insert_aipp, pack_block, unpack_block

__all__ = [
    "STANDARDS", "UNITS", "Aipp", "AippOp", "Answer", "Csc", "Picture", "Played", "Station",
    "Unit", "aipp", "aipp_each", "block_bytes", "cards_needed", "check", "convert",
    "copy_station", "crop", "crop_box", "csc_of", "fitted", "insert_aipp", "jpegd_picture",
    "network_station", "normalise", "pack_block", "pad", "parse_config", "play", "read_config",
    "resize", "unit_station", "unpack_block", "vpc_crop_and_resize", "vpc_picture",
]

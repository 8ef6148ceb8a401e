"""Media: from a camera's bytes to a network's input, and what that costs."""

# fmt: off
# isort: off
from ascend_lab.media.aipp import Aipp, aipp, aipp_each, check, crop, normalise, pad
from ascend_lab.media.cards import (
    UNITS, Answer, Played, Station, Unit, cards_needed, copy_station, network_station, play,
    unit_station,
)
from ascend_lab.media.colour import STANDARDS, Csc, convert, csc_of
from ascend_lab.media.config import AippOp, parse_config, read_config
from ascend_lab.media.dvpp import Picture, crop_box, jpegd_picture, vpc_crop_and_resize, vpc_picture
from ascend_lab.media.dynamic import block_bytes, pack_block, unpack_block
from ascend_lab.media.insert import fitted, insert_aipp
from ascend_lab.media.resize import resize

__all__ = [
    "STANDARDS", "UNITS", "Aipp", "AippOp", "Answer", "Csc", "Picture", "Played", "Station",
    "Unit", "aipp", "aipp_each", "block_bytes", "cards_needed", "check", "convert",
    "copy_station", "crop", "crop_box", "csc_of", "fitted", "insert_aipp", "jpegd_picture",
    "network_station", "normalise", "pack_block", "pad", "parse_config", "play", "read_config",
    "resize", "unit_station", "unpack_block", "vpc_crop_and_resize", "vpc_picture",
]

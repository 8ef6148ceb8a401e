"""Media: from a camera's bytes to a network's input, and what that costs."""

from ascend_lab.media.aipp import Aipp, aipp, aipp_each, check
from ascend_lab.media.colour import Csc, convert, csc_of
from ascend_lab.media.config import AippOp, parse_config, read_config
from ascend_lab.media.dynamic import block_bytes, pack_block, unpack_block
from ascend_lab.media.insert import fitted, insert_aipp
from ascend_lab.media.resize import resize

__all__ = [
    "Aipp",
    "AippOp",
    "Csc",
    "aipp",
    "aipp_each",
    "block_bytes",
    "check",
    "convert",
    "csc_of",
    "fitted",
    "insert_aipp",
    "pack_block",
    "parse_config",
    "read_config",
    "resize",
    "unpack_block",
]

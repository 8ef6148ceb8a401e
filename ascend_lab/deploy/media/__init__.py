"""Image pre-processing on Ascend chips: from a camera's bytes to a network's input.

AIPP (AI pre-processing) converts, crops and normalises frames while they are read into the core.
DVPP (digital vision pre-processing) has the decoders and resizers outside the cores.

- `colours` (CSC: colour space conversion), `resizing`: the arithmetic of pixels in these units.
- `aipp`, `aipp_config`, `parameter_block`: AIPP with its settings in Python, in a configuration
  file, and in bytes that a program sends before each run.
- `insertion`: AIPP as the first operator of a graph.
- `pictures`, `dvpp`: decoded pictures in memory, and the number of cards that keep up with a stream
  of them.

A grey frame of two pixels, normalised by (x - 100) * 0.5:

>>> import numpy as np
>>> settings = Aipp("YUV400_U8", 2, 1, mean=(100, 0, 0, 0), var_reci=(0.5, 1.0, 1.0, 1.0))
>>> aipp(np.array([100, 104], np.uint8), settings).tolist()
[[[[0.0, 2.0]]]]
"""

# fmt: off
# isort: off
from ascend_lab.deploy.media.colours import STANDARDS, Csc, convert, csc_of
from ascend_lab.deploy.media.resizing import resize
from ascend_lab.deploy.media.aipp import (
    Aipp, aipp, aipp_each, check_aipp, crop, normalise, pad,
)
from ascend_lab.deploy.media.aipp_config import AippOp, parse_config, read_config
from ascend_lab.deploy.media.parameter_block import block_bytes, pack_block, unpack_block
from ascend_lab.deploy.media.insertion import insert_aipp, with_network_size
from ascend_lab.deploy.media.pictures import (
    Picture, crop_box, jpegd_picture, vpc_crop_and_resize, vpc_picture,
)
from ascend_lab.deploy.media.dvpp import (
    UNITS, CardCount, CardSimulation, Station, Unit, cards_needed, copy_station, network_station,
    simulate_card, unit_station,
)
# fmt: on
# isort: on

__all__ = [
    "STANDARDS",
    "UNITS",
    "Aipp",
    "AippOp",
    "CardCount",
    "CardSimulation",
    "Csc",
    "Picture",
    "Station",
    "Unit",
    "aipp",
    "aipp_each",
    "block_bytes",
    "cards_needed",
    "check_aipp",
    "convert",
    "copy_station",
    "crop",
    "crop_box",
    "csc_of",
    "insert_aipp",
    "jpegd_picture",
    "network_station",
    "normalise",
    "pack_block",
    "pad",
    "parse_config",
    "read_config",
    "resize",
    "simulate_card",
    "unit_station",
    "unpack_block",
    "vpc_crop_and_resize",
    "vpc_picture",
    "with_network_size",
]

"""Layouts as address maps: where an element lies, what is padding, what a conversion costs."""

# fmt: off
# isort: off
from ascend_lab.layout.maps import (
    FORMATS, AddressMap, Box, Dim, Format, Piece, address, address_map, addresses, burst_bytes,
    convert, copy_boxes, element_at, pack, unpack, zero_boxes,
)
from ascend_lab.layout.moves import conversion_launch

__all__ = [
    "FORMATS", "AddressMap", "Box", "Dim", "Format", "Piece", "address", "address_map",
    "addresses", "burst_bytes", "conversion_launch", "convert", "copy_boxes", "element_at",
    "pack", "unpack", "zero_boxes",
]

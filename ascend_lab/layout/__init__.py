"""Layouts as address maps: where an element lies, what is padding, what a conversion costs."""

from ascend_lab.layout.boxes import Box, Dim, burst_bytes, copy_boxes, zero_boxes
from ascend_lab.layout.convert import convert, pack, unpack
from ascend_lab.layout.formats import FORMATS, Format
from ascend_lab.layout.launch import conversion_launch
from ascend_lab.layout.maps import (
    AddressMap,
    Piece,
    address,
    address_map,
    addresses,
    element_at,
)

__all__ = [
    "FORMATS",
    "AddressMap",
    "Box",
    "Dim",
    "Format",
    "Piece",
    "address",
    "address_map",
    "addresses",
    "burst_bytes",
    "conversion_launch",
    "convert",
    "copy_boxes",
    "element_at",
    "pack",
    "unpack",
    "zero_boxes",
]

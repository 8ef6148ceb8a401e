"""Smaller models: calibration, quantisation, what a layer's scales are."""

from ascend_lab.compress.records import (
    LayerScales,
    parse_records,
    read_records,
    records_text,
    save_records,
)

__all__ = ["LayerScales", "parse_records", "read_records", "records_text", "save_records"]

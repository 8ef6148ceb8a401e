"""Smaller models: calibration, quantisation, what a layer's scales are."""

from ascend_lab.compress.calibrators import METHODS, calibrate
from ascend_lab.compress.config import parse_config, read_config
from ascend_lab.compress.layers import LayerPlan, Plan, Quantised, layers_of
from ascend_lab.compress.qdq import qdq_model, with_open_batch
from ascend_lab.compress.quantise import (
    at_batch,
    batches_of,
    fake_quantised,
    output_error,
    quantise_graph,
    with_records,
)
from ascend_lab.compress.records import (
    LayerScales,
    parse_records,
    read_records,
    records_text,
    save_records,
)
from ascend_lab.compress.scales import Scale, channel_scales, scale_between, signal_to_noise_db
from ascend_lab.compress.weights import Rounding, balance_factors

__all__ = [
    "METHODS",
    "LayerPlan",
    "LayerScales",
    "Plan",
    "Quantised",
    "Rounding",
    "Scale",
    "at_batch",
    "balance_factors",
    "batches_of",
    "calibrate",
    "channel_scales",
    "fake_quantised",
    "layers_of",
    "output_error",
    "parse_config",
    "parse_records",
    "qdq_model",
    "quantise_graph",
    "read_config",
    "read_records",
    "records_text",
    "save_records",
    "scale_between",
    "signal_to_noise_db",
    "with_open_batch",
    "with_records",
]

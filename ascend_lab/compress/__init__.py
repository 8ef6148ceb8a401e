"""Smaller models: calibrated, quantised, trained so, deployed; pruned, sparse, of low rank."""

# fmt: off
# isort: off
from ascend_lab.compress.calibrators import METHODS, calibrate
from ascend_lab.compress.config import LayerPlan, Plan, parse_config, read_config
from ascend_lab.compress.deploy import deploy
from ascend_lab.compress.learned import cross_entropy, distil, retrain, ulq_slopes
from ascend_lab.compress.low_rank import decomposed
from ascend_lab.compress.mixed import fastest
from ascend_lab.compress.pruning import prune
from ascend_lab.compress.qdq import qdq_model, with_open_batch
from ascend_lab.compress.quantise import (
    Quantised, at_batch, batches_of, fake_quantised, layers_of, output_error, quantise_graph,
    seen, with_records,
)
from ascend_lab.compress.scales import (
    LayerScales, parse_records, read_records, records_text, Scale, channel_scales,
    scale_between, signal_to_noise_db,
)
from ascend_lab.compress.sparsity import sparsified
from ascend_lab.compress.weights import Rounding, balance_factors

__all__ = [
    "METHODS", "LayerPlan", "LayerScales", "Plan", "Quantised", "Rounding", "Scale", "at_batch",
    "balance_factors", "batches_of", "calibrate", "channel_scales", "cross_entropy",
    "decomposed", "deploy", "distil", "fake_quantised", "fastest", "layers_of", "output_error",
    "parse_config", "parse_records", "prune", "qdq_model", "quantise_graph", "read_config",
    "read_records", "records_text", "retrain", "scale_between", "seen", "signal_to_noise_db",
    "sparsified", "ulq_slopes", "with_open_batch", "with_records",
]

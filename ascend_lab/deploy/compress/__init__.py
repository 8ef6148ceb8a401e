"""Compresses models: quantisation (with calibration or training), pruning, sparsity, low rank."""

# fmt: off
# isort: off
from ascend_lab.deploy.compress.calibrators import METHODS, calibrate
from ascend_lab.deploy.compress.config import LayerPlan, Plan, Rounding, parse_config, read_config
from ascend_lab.deploy.compress.learned import cross_entropy, distil, retrain
from ascend_lab.deploy.compress.learned_rounding import ulq_slopes
from ascend_lab.deploy.compress.low_rank import decomposed
from ascend_lab.deploy.compress.sparsity import sparsified
from ascend_lab.deploy.compress.deployed import deploy
from ascend_lab.deploy.compress.knapsack import fastest
from ascend_lab.deploy.compress.pruning import prune
from ascend_lab.deploy.compress.onnx_layers import LeftOut, left_out
from ascend_lab.deploy.compress.onnx_file import qdq_model, upgraded
from ascend_lab.deploy.compress.fake_quantisation import fake_quantised
from ascend_lab.deploy.compress.records import parse_records, read_records, records_text
from ascend_lab.deploy.compress.quantise import (
    at_batch, batches_of, made_ready, output_error, quantise_graph, with_records,
)
from ascend_lab.deploy.compress.balance import balance_factors
from ascend_lab.deploy.compress.layers import Quantised, layers_of, tensor_values
from ascend_lab.deploy.compress.scales import (
    LayerScales, Scale, channel_scales, scale_between, signal_to_noise_db,
)

__all__ = [
    "METHODS", "LayerPlan", "LayerScales", "LeftOut", "Plan", "Quantised", "Rounding", "Scale",
    "at_batch", "balance_factors", "batches_of", "calibrate", "channel_scales", "cross_entropy",
    "decomposed", "deploy", "distil", "fake_quantised", "fastest", "layers_of", "left_out",
    "made_ready", "output_error", "parse_config", "parse_records", "prune", "qdq_model",
    "quantise_graph", "read_config", "read_records", "records_text", "retrain", "scale_between",
    "signal_to_noise_db", "sparsified", "tensor_values", "ulq_slopes", "upgraded", "with_records",
]

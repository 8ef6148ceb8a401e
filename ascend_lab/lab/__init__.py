"""What only the book's chapters use: figures, checks, sliders, small machines, some kernels.

No other part of the package imports it. A name is imported when a chapter first uses it, so that
matplotlib is loaded only once a figure is drawn.

The operations per byte from which on a kernel of an Ascend910B2 is limited by the cube, not by
device memory (Chapter 3):

>>> from ascend_lab import lab
>>> from ascend_lab.machine import load_chip
>>> chip = load_chip("Ascend910B2")
>>> into_l0, into_l1, into_l2 = lab.chip_levels(chip)
>>> round(lab.ridge_point(chip.peak_ops_per_s("fp16"), into_l2))
295
"""

from importlib import import_module
from typing import Any

from ascend_lab.facade import names_of

_MODULES = {
    "checks": "compare predict",
    "checks.chapter11_12": "narrow_sum",
    "checks.chapter21_22": "eyes",
    "checks.chapter24_25": "toy_rows",
    "chip_report": "chip_facts_html overview_html shared_keys sources_html table_html trust_html",
    "contest": "read_problem solve",
    "detector": "detector",
    "figures.flash": "flash_traffic separate_kernels separate_traffic",
    "figures.fusing": "chain_kernels",
    "figures.gantt": "steady_cycles",
    "figures.layouts": "matrix_maps small_maps",
    "figures.lowering": (
        "NETWORKS five_programs network residual_sum rewritten same_order without"
    ),
    "figures.deploying": "camera_frame scene",
    "figures.expressions": "EXPRESSIONS three_nests whole_rows",
    "figures.nests": "gm_bytes",
    "figures.networks": "ALLOWED FUSED MODELS ORDERS mish_block residual_block",
    "figures.tuned_networks": "one_block",
    "graph_examples": (
        "WAYS crossing_bytes dispatch kernel_times topological_order "
        "cheapest converted_bytes exported_block laid_out moved_bytes options prepared size_bytes "
        "unfused_us"
    ),
    "instruction_times": "cycles_by_instruction",
    "program_text": "listing",
    "kernels": (
        "conv2d_reference explicit_conv group_indices grouped_launch im2col_reference in_tiles "
        "nest_bytes pack_explicit pack_pointwise pointwise_launch product_floors product_nest "
        "relu_transpose_kernel unpack_explicit"
    ),
    "kernels.cross_core_folds": "atomic chain kept tree two_pass",
    "kernels.split_conflict": "common_split",
    "one_file": "journey",
    "packing": "exact_plan",
    "text_table": "table",
    "machines": "VectorOp tops_per_watt",
    "machines.roofline": ("binding_level chip_levels level_dot levels_of ridge_point source_text"),
    "tuning": (
        "NestCosts SimpleGenetic TECHNIQUES Workbench all_times compile_with compilers factors "
        "ladder optimum"
    ),
    "widgets": "explore",
}
"""Module -> the names that chapters import from it; names `fig_*` come from `figures`."""


_named = names_of(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    """Return a name that chapters use, from its module; names `fig_*` come from `figures`."""
    if name.startswith("fig_"):
        return getattr(import_module(f"{__name__}.figures"), name)
    return _named(name)

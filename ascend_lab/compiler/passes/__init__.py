"""Passes: rewrites of a graph that keep what it computes, run in rounds until nothing changes.

`run_passes(graph)` runs the default passes; `PASSES` holds all of them by name.
"""

# fmt: off
# isort: off
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.passes import formats, images, recognise, simplify
from ascend_lab.compiler.passes.formats import convert, measured_scales, quantise
from ascend_lab.compiler.passes.rewrite import (
    PASSES, USUAL, Pass, Report, get_pass, match, register_pass, rewrites, run_passes, sweep,
)
# fmt: on
# isort: on

__all__ = [
    "DEFAULT",
    "PASSES",
    "Draft",
    "Pass",
    "Report",
    "convert",
    "get_pass",
    "match",
    "measured_scales",
    "quantise",
    "register_pass",
    "rewrites",
    "run_passes",
    "sweep",
]

PASSES.update(
    (graph_pass.name, graph_pass)
    for graph_pass in (
        formats.REQUANT,
        simplify.DEAD_CODE,
        simplify.FOLDING,
        simplify.COMMON,
        simplify.identity,
        simplify.scalar_operand,
        simplify.algebra,
        simplify.reassociation,
        simplify.permute,
        simplify.reshapes,
        simplify.casts,
        images.pad_conv,
        images.batch_norm_scale,
        images.CONV_BATCH_NORM,
        images.CONV_SCALE,
        images.CONV_BIAS,
        images.fully_connected,
        images.mean_of_image,
        images.pool_of_image,
        recognise.layer_norm,
        recognise.gelu,
        recognise.activation,
        recognise.attention,
        recognise.flat_product,
        simplify.gemm_to_matmul,
        recognise.product_bias,
        images.pool_to_conv,
        recognise.gelu_erf,
        formats.FP16,
        formats.BF16,
        formats.INT8,
    )
)

DEFAULT: tuple[str, ...] = tuple(
    graph_pass.name for graph_pass in PASSES.values() if graph_pass.stage in ("prepare", "fuse")
)
"""Passes that keep values (up to rounding), in the order they run."""
USUAL.extend(DEFAULT)

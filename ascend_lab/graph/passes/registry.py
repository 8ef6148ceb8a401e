"""All passes by name, and the order in which they run unless told otherwise."""

from __future__ import annotations

import difflib

from ascend_lab.errors import InputError
from ascend_lab.graph.passes import (
    activations,
    affine,
    algebra,
    attention,
    casts,
    common,
    constant_folding,
    convolutions,
    dead_code,
    identity,
    int8,
    movement,
    pooling,
    precision,
    products,
    scalars,
)
from ascend_lab.graph.passes.rewrite import Pass

PASSES: dict[str, Pass] = {
    one.name: one
    for one in (
        dead_code.DEAD_CODE,
        constant_folding.FOLDING,
        common.COMMON,
        identity.IDENTITY,
        scalars.SCALARS,
        algebra.ALGEBRA,
        algebra.REASSOCIATION,
        movement.PERMUTE,
        movement.RESHAPES,
        casts.CASTS,
        convolutions.PAD_CONV,
        affine.BATCH_NORM_SCALE,
        affine.CONV_BATCH_NORM,
        affine.CONV_SCALE,
        affine.CONV_BIAS,
        convolutions.FULLY_CONNECTED,
        pooling.MEAN,
        pooling.GLOBAL_POOL,
        activations.LAYER_NORM_PASS,
        activations.GELU_PASS,
        activations.ACTIVATION_PASS,
        attention.ATTENTION,
        products.BATCHES,
        products.NO_BIAS,
        products.BIAS,
        pooling.POOL_TO_CONV,
        activations.GELU_ERF_PASS,
        precision.FP16,
        precision.BF16,
        int8.INT8,
    )
}
"""Every pass by name; `register_pass` adds one."""

DEFAULT: tuple[str, ...] = tuple(
    one.name for one in PASSES.values() if one.stage in ("prepare", "fuse")
)
"""Passes that keep values (up to rounding), in the order they run."""


def get_pass(name: str) -> Pass:
    """Return a pass by name; raise `InputError` with the nearest name for an unknown one."""
    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, 1, 0.3)
        remedy = f"did you mean {near[0]}?" if near else "see PASSES"
        raise InputError("the name of a pass", repr(name), remedy)
    return PASSES[name]


def register_pass(one: Pass) -> Pass:
    """Add a pass of your own under its name; raise `InputError` if the name is taken."""
    if one.name in PASSES:
        raise InputError("a new name for a pass", one.name, "choose another")
    PASSES[one.name] = one
    return one

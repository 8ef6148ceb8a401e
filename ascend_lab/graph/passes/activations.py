"""Activations and norms that a model spells out in small operators become one operator."""

from __future__ import annotations

import math
from typing import Any

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.passes.pattern import match
from ascend_lab.graph.passes.rewrite import Pass, derived, sweep
from ascend_lab.ops.shapes import axes_of

_SHIFTED = ("sub", "x", ("reduce_mean", "x", {"axis": "$axis", "keepdims": True}))
_SPREAD = ("reduce_mean", ("square", _SHIFTED), {"axis": "$axis", "keepdims": True})
_ROOT = ("sqrt", ("adds", _SPREAD, {"number": "$epsilon"}))
_NORMAL = (
    ("div", _SHIFTED, _ROOT),
    ("mul", _SHIFTED, ("rec", _ROOT)),
    ("mul", _SHIFTED, ("rsqrt", _ROOT[1])),
)
LAYER_NORM = tuple(("add", ("mul", normal, "scale"), "bias") for normal in _NORMAL)
_CUBES = (("pow", "x", 3.0), ("mul", ("square", "x"), "x"))


def _halves(inner: Any) -> tuple[Any, ...]:
    """Return the ways to write x / 2 * (1 + inner)."""
    one = ("adds", inner, {"number": 1.0})
    return (
        ("muls", ("mul", "x", one), {"number": 0.5}),
        ("mul", ("muls", "x", {"number": 0.5}), one),
        ("mul", "x", ("muls", one, {"number": 0.5})),
    )


GELU = tuple(
    form
    for cube in _CUBES
    for form in _halves(
        (
            "tanh",
            (
                "muls",
                ("add", "x", ("muls", cube, {"number": 0.044715})),
                {"number": math.sqrt(2 / math.pi)},
            ),
        )
    )
)
GELU_ERF = tuple(
    form
    for inner in (("muls", "x", {"number": math.sqrt(0.5)}), ("div", "x", math.sqrt(2.0)))
    for form in _halves(("erf", inner))
)
_CLIPPED = (
    ("relu6", ("adds", "x", {"number": 3.0})),
    ("clip", ("adds", "x", {"number": 3.0}), {"low": 0.0, "high": 6.0}),
)
HARD_SIGMOID = tuple(
    form
    for clipped in _CLIPPED
    for form in (("muls", clipped, {"number": 1 / 6}), ("div", clipped, 6.0))
)
_PRODUCTS = {
    "silu": ("mul", "x", ("sigmoid", "x")),
    "hard_swish": ("mul", "x", ("hard_sigmoid", "x")),
}
_SIXTHS = tuple(
    form
    for clipped in _CLIPPED
    for form in (
        ("muls", ("mul", "x", clipped), {"number": 1 / 6}),
        ("div", ("mul", "x", clipped), 6.0),
    )
)


def to_layer_norm(rw: Draft, node: Node) -> bool:
    """Turn (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias into layer_norm."""
    found = match(rw, node, *LAYER_NORM)
    if found is None:
        return False
    shape = rw.type(found["x"]).shape
    axes = axes_of("layer_norm", found["axis"], shape)
    if axes != tuple(range(axes[0], len(shape))):
        return False
    tail = TensorType(shape[axes[0] :], rw.type(found["x"]).dtype)
    parameters = [_as_tail(rw, found[name], tail) for name in ("scale", "bias")]
    if None in parameters:
        return False
    attrs = {"axis": axes[0] - len(shape), "epsilon": found["epsilon"]}
    return rw.become(node, "layer_norm", (found["x"], *map(str, parameters)), attrs)


def _as_tail(rw: Draft, name: str, kind: TensorType) -> str | None:
    """Return a parameter in the shape of the normalised axes; None if it cannot have it."""
    if rw.type(name) == kind:
        return name
    constant = rw.constant(name)
    if constant is None or constant.type.elements != kind.elements:
        return None
    return rw.add(derived(kind, lambda v: v.reshape(kind.shape), constant), f"{name}_tail")


def to_gelu(rw: Draft, node: Node) -> bool:
    """Turn x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) into gelu."""
    found = match(rw, node, *GELU)
    return found is not None and rw.become(node, "gelu", [found["x"]])


def erf_to_gelu(rw: Draft, node: Node) -> bool:
    """Turn x / 2 (1 + erf(x / sqrt(2))) into gelu, its tanh form: off by up to 0.0005."""
    found = match(rw, node, *GELU_ERF)
    return found is not None and rw.become(node, "gelu", [found["x"]])


def to_activation(rw: Draft, node: Node) -> bool:
    """Turn x sigmoid(x) into silu, x hard_sigmoid(x) into hard_swish, and their pieces likewise."""
    if node.op == "mul":
        for op, pattern in _PRODUCTS.items():
            found = match(rw, node, pattern)
            if found is not None:
                return rw.become(node, op, [found["x"]])
        return False
    for op, patterns in (("hard_swish", _SIXTHS), ("hard_sigmoid", HARD_SIGMOID)):
        found = match(rw, node, *patterns)
        if found is not None:
            return rw.become(node, op, [found["x"]])
    return False


LAYER_NORM_PASS = Pass(
    "LayerNormFusionPass",
    "fuse",
    sweep(to_layer_norm, "add"),
    "recognises a layer norm spelled out in nine operators",
    "rounded",
)
GELU_PASS = Pass(
    "GeluFusionPass",
    "fuse",
    sweep(to_gelu, "mul", "muls"),
    "recognises the tanh form of gelu spelled out",
    "rounded",
)
GELU_ERF_PASS = Pass(
    "GeluErfToTanhPass",
    "opt-in",
    sweep(erf_to_gelu, "mul", "muls"),
    "computes the erf form of gelu by its tanh form, off by up to 0.0005",
    "changed",
)
ACTIVATION_PASS = Pass(
    "ActivationFusionPass",
    "fuse",
    sweep(to_activation, "mul", "muls", "div"),
    "recognises silu, hard sigmoid and hard swish spelled out",
    "rounded",
)

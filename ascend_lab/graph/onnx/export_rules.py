"""How matrix products, attention, convolutions and pooling are written in ONNX."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.onnx.export_writer import NARROW, RULES, Result, Rule, Site, one, rule
from ascend_lab.ops.formats import is_float, numpy_type
from ascend_lab.ops.shapes import axes_of, axis_of, pad_pairs, pair

FP32_WHOLE = 2**24
"""Whole numbers up to here are exact in fp32."""


# -- products -------------------------------------------------------------------------------------
def _product(site: Site, names: list[str]) -> str:
    """Return a b, transposed as the attributes say; int8 sums to int32.

    Matrices of floats are a Gemm, which transposes itself: a weight two nodes share stays one.
    """
    turned = {"transA": site.attrs.get("trans_a"), "transB": site.attrs.get("trans_b")}
    matrices = all(len(kind.shape) == 2 for kind in site.given[:2]) and is_float(site.dtype)
    if matrices and any(turned.values()):
        return site.one("Gemm", *names, **{key: int(bool(v)) for key, v in turned.items()})
    sides = []
    for name, kind, key in zip(names, site.given[:2], ("trans_a", "trans_b"), strict=False):
        rank = len(kind.shape)
        perm = (*range(rank - 2), rank - 1, rank - 2)
        sides.append(site.one("Transpose", name, perm=perm) if site.attrs.get(key) else name)
    op = "MatMulInteger" if site.dtype == "int8" else "MatMul"
    return site.one(op, *sides)


@rule("matmul", "batch_matmul", "attention_context")
def _matmul(site: Site) -> Result:
    grows = site.dtype in NARROW and site.wanted[0].dtype == "fp32"
    return _product(site, site.wide() if grows else list(site.inputs))


@rule("gemm")
def _gemm(site: Site) -> Result:
    a = site.attrs
    return site.one(
        "Gemm",
        *site.inputs,
        alpha=float(a["alpha"]),
        beta=float(a["beta"]),
        transA=int(a["trans_a"]),
        transB=int(a["trans_b"]),
    )


def _scores(site: Site, q: str, k: str) -> str:
    """Return scale q k^T in fp32."""
    rank = len(site.given[1].shape)
    turned = site.one("Transpose", k, perm=(*range(rank - 2), rank - 1, rank - 2))
    scale = site.attrs["scale"]
    scale = 1.0 / math.sqrt(site.shape[-1]) if scale is None else scale
    total = site.one("MatMul", q, turned)
    return site.one("Mul", total, site.writer.number(scale, "fp32"))


@rule("attention_scores")
def _attention_scores(site: Site) -> Result:
    return site.back(_scores(site, *site.wide()))


@rule("masked_softmax")
def _masked_softmax(site: Site) -> Result:
    return site.back(site.one("Softmax", site.one("Add", *site.wide()), axis=-1))


@rule("attention", "flash_attention")
def _attention(site: Site) -> Result:
    q, k, v, *mask = site.wide()
    scores = _scores(site, q, k)
    scores = site.one("Add", scores, *mask) if mask else scores
    return site.back(site.one("MatMul", site.one("Softmax", scores, axis=-1), v))


# -- windows --------------------------------------------------------------------------------------
def _window(site: Site, **more: Any) -> dict[str, Any]:
    """Return strides, pads (top, left, bottom, right) and dilations as ONNX writes them."""
    (top, bottom), (left, right) = pad_pairs("pad", site.attrs["pad"])
    return {"pads": (top, left, bottom, right), **more}


@rule("conv2d", "depthwise_conv2d", "conv_transpose2d")
def _convolution(site: Site) -> Result:
    a = site.attrs
    attrs = _window(
        site,
        kernel_shape=site.given[1].shape[2:],
        strides=pair("stride", a["stride"]),
        dilations=pair("dilation", a["dilation"]),
        group=a.get("groups", site.shape[1]),
    )
    turned = "output_padding" in a
    if turned:
        attrs["output_padding"] = pair("output_padding", a["output_padding"], least=0)
    op = "ConvTranspose" if turned else "Conv"
    if site.dtype == "int8":
        return _whole_convolution(site, op, attrs)
    grows = site.dtype in NARROW and site.wanted[0].dtype == "fp32"
    return site.one(op, *(site.wide() if grows else site.inputs), **attrs)


def _whole_convolution(site: Site, op: str, attrs: dict[str, Any]) -> str:
    """Return an int8 convolution in int32; ONNX has no transposed one, which passes through fp32.

    Raises `UnsupportedError` where its sums could leave what fp32 holds exactly.
    """
    if op == "Conv":
        found = site.one("ConvInteger", *site.inputs[:2], **attrs)
    else:
        weight = site.given[1].shape
        largest = math.prod((weight[0] // attrs["group"], *weight[2:])) * 2**14
        if largest > FP32_WHOLE:
            raise UnsupportedError(
                f"conv_transpose2d: int8 sums up to {FP32_WHOLE:,} for ONNX",
                f"up to {largest:,}",
                "cast to fp16 first",
            )
        sides = [site.cast(name, "fp32") for name in site.inputs[:2]]
        found = site.cast(site.one(op, *sides, **attrs), "int32")
    if len(site.inputs) > 2:
        column = site.one("Reshape", site.inputs[2], site.writer.ints((1, -1, 1, 1)))
        found = site.one("Add", found, column)
    return found


@rule("max_pool2d", "avg_pool2d")
def _pool(site: Site) -> Result:
    a = site.attrs
    kernel = pair("kernel", a["kernel"])
    step = kernel if a["stride"] is None else pair("stride", a["stride"])
    attrs = _window(site, kernel_shape=kernel, strides=step)
    if "count_include_pad" not in a:
        return site.one("MaxPool", *site.inputs, **attrs)
    include = int(a["count_include_pad"])
    return site.one("AveragePool", *site.inputs, count_include_pad=include, **attrs)


# How operators that compute element by element, reduce or move are written in ONNX.


# -- element by element ---------------------------------------------------------------------------
_SAME = {
    "abs": "Abs", "neg": "Neg", "relu": "Relu", "exp": "Exp", "log": "Log", "sqrt": "Sqrt",
    "rec": "Reciprocal", "ceil": "Ceil", "floor": "Floor", "round": "Round", "sign": "Sign",
    "not": "BitwiseNot", "sigmoid": "Sigmoid", "tanh": "Tanh", "softplus": "Softplus",
    "hard_swish": "HardSwish", "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div",
    "max": "Max", "min": "Min", "pow": "Pow", "and": "BitwiseAnd", "or": "BitwiseOr",
    "embedding": "Gather", "erf": "Erf", "global_max_pool": "GlobalMaxPool",
    "global_avg_pool": "GlobalAveragePool", "trans_data": "Identity",
}  # fmt: skip
RULES.update({ours: one(theirs) for ours, theirs in _SAME.items() if ours != "trans_data"})
RULES["trans_data"] = lambda site: site.one("Identity", site.inputs[0])
RULES["gelu"] = one("Gelu", approximate="tanh")
RULES["hard_sigmoid"] = one("HardSigmoid", alpha=1 / 6, beta=0.5)
RULES["rsqrt"] = lambda site: site.one("Reciprocal", site.one("Sqrt", *site.inputs))
RULES["square"] = lambda site: site.one("Mul", *site.inputs * 2)
RULES["lrn"] = lambda site: site.one("LRN", *site.inputs, **site.attrs)
RULES["silu"] = lambda site: site.one("Mul", site.inputs[0], site.one("Sigmoid", *site.inputs))
RULES["leaky_relu"] = lambda site: site.one("LeakyRelu", *site.inputs, alpha=site.attrs["alpha"])
RULES["elu"] = lambda site: site.one("Elu", *site.inputs, alpha=site.attrs["alpha"])
RULES["relu6"] = lambda site: _clip(site, site.inputs[0], 0.0, 6.0, site.dtype)
RULES["clip"] = lambda site: _clip(
    site, site.inputs[0], site.attrs["low"], site.attrs["high"], site.dtype
)


def _clip(site: Site, name: str, low: float, high: float, dtype: str) -> str:
    bounds = (site.writer.number(n, dtype) for n in (low, high))
    return site.one("Clip", name, *bounds)


def _with_number(op: str) -> Rule:
    """Return the rule of x op number; in fp32 where the format cannot hold the number."""

    def export(site: Site) -> Result:
        number, dtype = site.attrs["number"], site.dtype
        if dtype in NARROW and float(np.asarray(number).astype(numpy_type(dtype))) != number:
            return site.back(site.one(op, *site.wide(), site.writer.number(number, "fp32")))
        return site.one(op, *site.inputs, site.writer.number(number, dtype))

    return export


RULES["adds"], RULES["muls"] = _with_number("Add"), _with_number("Mul")


def _compared(op: str) -> Rule:
    return lambda site: site.cast(site.one(op, *site.inputs), site.dtype)


_COMPARISONS = {
    "equal": "Equal", "greater": "Greater", "greater_equal": "GreaterOrEqual", "less": "Less",
    "less_equal": "LessOrEqual",
}  # fmt: skip
RULES.update({ours: _compared(theirs) for ours, theirs in _COMPARISONS.items()})


@rule("not_equal")
def _not_equal(site: Site) -> Result:
    return site.cast(site.one("Not", site.one("Equal", *site.inputs)), site.dtype)


@rule("select")
def _select(site: Site) -> Result:
    return site.one("Where", site.cast(site.inputs[0], "bool"), *site.inputs[1:])


@rule("cast")
def _cast(site: Site) -> Result:
    """Round and limit first: ONNX cuts digits off and leaves values out of range undefined.

    fp32 has no 2^31 - 1 to limit to: floats beyond int32 stay undefined.
    """
    source, target, name = site.dtype, site.attrs["dtype"], site.inputs[0]
    if is_float(target):
        return site.cast(name, target)
    limits = np.iinfo(numpy_type(target))
    low, high = int(limits.min), int(limits.max)
    if is_float(source):
        rounding = {"rint": "Round", "floor": "Floor", "ceil": "Ceil"}.get(site.attrs["round"])
        name = site.one(rounding, name) if rounding else name
        inside = target == "int32"
    else:
        own = np.iinfo(numpy_type(source))
        inside = low <= own.min and own.max <= high
        low, high = max(low, int(own.min)), min(high, int(own.max))
    return site.cast(name if inside else _clip(site, name, low, high, source), target)


# -- reduce and rescale ---------------------------------------------------------------------------
def _reduced(op: str) -> Rule:
    def export(site: Site) -> Result:
        axes = site.writer.ints(axes_of("reduce", site.attrs["axis"], site.shape))
        return site.one(op, site.inputs[0], axes, keepdims=int(site.attrs["keepdims"]))

    return export


for _kind in ("sum", "mean", "max", "min", "prod"):
    RULES[f"reduce_{_kind}"] = _reduced(f"Reduce{_kind.capitalize()}")
RULES["softmax"] = lambda site: site.one("Softmax", *site.inputs, axis=site.attrs["axis"])
RULES["log_softmax"] = lambda site: site.one("LogSoftmax", *site.inputs, axis=site.attrs["axis"])
RULES["layer_norm"] = lambda site: site.one("LayerNormalization", *site.inputs, **site.attrs)
RULES["batch_norm"] = lambda site: site.one("BatchNormalization", *site.inputs, **site.attrs)


@rule("batch_norm_training")
def _batch_norm_training(site: Site) -> Result:
    return site.writer.emit(
        "BatchNormalization", *site.inputs, outputs=3, training_mode=1, **site.attrs
    )


@rule("rms_norm")
def _rms_norm(site: Site) -> Result:
    x, scale = site.wide()
    axes = range(axis_of("axis", site.attrs["axis"], site.shape), len(site.shape))
    mean = site.one("ReduceMean", site.one("Mul", x, x), site.writer.ints(tuple(axes)))
    added = site.one("Add", mean, site.writer.number(site.attrs["epsilon"], "fp32"))
    return site.back(site.one("Mul", site.one("Div", x, site.one("Sqrt", added)), scale))


@rule("cross_entropy")
def _cross_entropy(site: Site) -> Result:
    logits, target = site.wide()
    weighted = site.one("Mul", target, site.one("LogSoftmax", logits, axis=1))
    total = site.one("ReduceSum", weighted, site.writer.ints((1,)), keepdims=0)
    return site.back(site.one("Neg", total))


# -- moving ---------------------------------------------------------------------------------------
def _reshaped(op: str) -> Rule:
    return lambda site: site.one(op, site.inputs[0], site.writer.ints(site.wanted[0].shape))


RULES["reshape"], RULES["expand"] = _reshaped("Reshape"), _reshaped("Expand")
RULES["gather"] = lambda site: site.one("Gather", *site.inputs, axis=site.attrs["axis"])
RULES["concat"] = lambda site: site.one("Concat", *site.inputs, axis=site.attrs["axis"])


@rule("transpose")
def _transpose(site: Site) -> Result:
    rank, perm = len(site.shape), site.attrs["perm"]
    order = range(rank)[::-1] if perm is None else (p % rank for p in perm)
    return site.one("Transpose", site.inputs[0], perm=tuple(order))


@rule("slice")
def _slice(site: Site) -> Result:
    a, ints = site.attrs, site.writer.ints
    steps = (1,) * len(site.shape) if a["step"] is None else a["step"]
    axes = tuple(range(len(site.shape)))
    return site.one(
        "Slice", site.inputs[0], ints(a["begin"]), ints(a["end"]), ints(axes), ints(steps)
    )


@rule("pad")
def _pad(site: Site) -> Result:
    pads = [p[side] for side in (0, 1) for p in site.attrs["pads"]]
    value = site.writer.number(site.attrs["value"], site.dtype)
    return site.one("Pad", site.inputs[0], site.writer.ints(pads), value)


@rule("split")
def _split(site: Site) -> Result:
    axis = axis_of("split", site.attrs["axis"], site.shape)
    sizes = site.writer.ints([kind.shape[axis] for kind in site.wanted])
    return site.writer.emit("Split", site.inputs[0], sizes, outputs=len(site.wanted), axis=axis)


@rule("one_hot")
def _one_hot(site: Site) -> Result:
    a, write = site.attrs, site.writer
    depth = write.ints((a["depth"],))
    values = write.numbers((a["off_value"], a["on_value"]), "fp32")
    return site.back(site.one("OneHot", site.cast(site.inputs[0], "int64"), depth, values))


@rule("scatter_update", "scatter_add")
def _scatter(site: Site) -> Result:
    """ONNX leaves open which of equal indices wins an update; its runtimes take the last."""
    x, indices, updates = site.inputs
    places = site.one("Unsqueeze", site.cast(indices, "int64"), site.writer.ints((-1,)))
    way = "add" if site.op == "scatter_add" else "none"
    return site.one("ScatterND", x, places, updates, reduction=way)

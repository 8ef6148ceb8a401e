"""How operators that compute element by element, reduce or move are written in ONNX."""

from __future__ import annotations

import numpy as np

from ascend_lab.graph.onnx.export_site import NARROW, RULES, Result, Rule, Site, one, rule
from ascend_lab.ops.formats import is_float, numpy_type
from ascend_lab.ops.shapes import axes_of, axis_of

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

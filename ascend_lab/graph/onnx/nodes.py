"""One node becomes tensors: folded, converted, or replaced by the body of its function.

Many operators are functions of others; the standard holds their bodies, whose nodes are converted
in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.errors import AscendLabError, GraphError, UnsupportedError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.converter import CONVERTERS, Result, attributes, converter, find
from ascend_lab.graph.onnx.tensors import ELEMENTS, FLOATS, INTEGERS, SMALL, Tensor, Values, known

if TYPE_CHECKING:
    from onnx import FunctionProto


_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError)
"""What attributes of other kinds or sizes than the standard's lead to inside a converter."""


def tensors_of(ctx: Context) -> list[Tensor]:
    """Return what a node writes; whole numbers computed from what is known are known, too."""
    start = ctx.net.node_count
    ctx.result = CONVERTERS[ctx.op].result or next((t.elem for t in ctx.inputs if t), "")
    results = _early(ctx, start, _converted(ctx))
    if ctx.result == "int64":
        ctx.net.narrow(start)
    roots = frozenset().union(*(t.roots for t in ctx.inputs if t))
    return [
        r if isinstance(r, Tensor) else Tensor(ctx.result, r.shape, r, roots=roots) for r in results
    ]


def _converted(ctx: Context) -> Sequence[Result]:
    """Return what the node writes: folded if all is known and small, else converted."""
    try:
        early = folded(ctx)
        if early is not None:
            return (early,)
        _check_types(ctx)
        found = CONVERTERS[ctx.op].convert(ctx)
    except UnsupportedError:
        raise
    except AscendLabError as error:
        if any(t is not None and not t.elements for t in ctx.inputs):
            raise UnsupportedError(f"{ctx.where}: {error.needed}", error.got, "skip it") from error
        if error.needed.startswith("node "):
            raise
        raise GraphError(f"{ctx.where}: {error.needed}", error.got, error.remedy) from error
    except _MALFORMED as error:
        got = f"{type(error).__name__}: {error}"
        raise GraphError(f"{ctx.where}: attributes that fit", got, "mend the node") from error
    return (found,) if isinstance(found, Value | Tensor) else tuple(found)


def _check_types(ctx: Context) -> None:
    """Raise `UnsupportedError` unless each input has a type it may have."""
    types = CONVERTERS[ctx.op].types
    for i, tensor in enumerate(ctx.inputs):
        allowed = types[min(i, len(types) - 1)]
        if tensor is not None and tensor.elem not in allowed:
            ctx.unsupported(f"input {i} in {' or '.join(allowed)}", tensor.elem, "cast it")


def _early(ctx: Context, start: int, results: Sequence[Result]) -> Sequence[Result]:
    """Return whole numbers computed from what is known as known: shapes depend on them."""
    fresh = [found.name for found in results if isinstance(found, Value)]
    sizes = [t.elements if t.known is not None else SMALL + 1 for t in ctx.inputs if t]
    sizes += [ctx.net.type_of(name).elements for name in fresh]
    if not fresh or not any(ctx.inputs) or ctx.result not in (*INTEGERS, "bool"):
        return results
    if sum(sizes) > SMALL:
        return results
    arrays = ctx.net.computed(start, fresh)
    return tuple(
        ctx.known(arrays[found.name], ctx.result) if isinstance(found, Value) else found
        for found in results
    )


# -- functions of the standard --------------------------------------------------------------------
_WORDS = {"reduction": ("none", "sum", "mean"), "activation": ("none", "silu", "swish")}
"""What attributes may say: bodies take another word for one of these."""
_NUMBERS = {name: number for number, (name, _) in ELEMENTS.items()}


@converter(
    "Celu", "Mish", "Shrink", "Softsign", "SwiGLU", "ThresholdedRelu", "MeanVarianceNormalization",
    "CausalConvWithState", types=(FLOATS,),
)  # fmt: skip
@converter("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", types=(FLOATS, INTEGERS, FLOATS))
@converter("HannWindow", "HammingWindow", "BlackmanWindow", types=(INTEGERS,))
@converter("RotaryEmbedding", types=(FLOATS, FLOATS, FLOATS, ("int64",)))
@converter("DynamicQuantizeLinear", types=(("float32",),))
@converter("CenterCropPad")
def inlined(ctx: Context) -> Sequence[Tensor]:
    """Convert the nodes of the function's body instead of the node."""
    for key, words in _WORDS.items():
        if ctx.attrs.get(key, words[0]) not in words:
            needed = f"{key} {', '.join(words[:-1])} or {words[-1]}"
            ctx.unsupported(needed, str(ctx.attr(key)))
    body = _body(ctx)
    opset, found = body.opset_import[0].version, dict(zip(body.input, ctx.inputs, strict=False))
    for node in body.node:
        how = find(node, opset)
        inner = replace(
            ctx,
            op=how.op,
            opset=opset,
            inputs=[found.get(name) for name in node.input],
            attrs=attributes(node, opset, ctx.attrs),
            out_count=len(node.output),
            within=ctx.within or ctx.op,
        )
        found |= zip(node.output, tensors_of(inner), strict=False)
    return [tensor for name in body.output if (tensor := found.get(name)) is not None]


def _body(ctx: Context) -> FunctionProto:
    """Return the standard's function, made for the attributes and types of the node if it asks."""
    from onnx import FunctionProto, defs, helper

    schema: Any = defs.get_schema(ctx.op, ctx.opset)
    body = FunctionProto()
    if schema.has_function:
        version = max(schema.function_opset_versions)
        body.ParseFromString(schema.get_function_with_opset_version(version))
        return body
    inputs = [f"x{i}" if tensor else "" for i, tensor in enumerate(ctx.inputs)]
    outputs = [f"y{i}" for i in range(ctx.out_count)]
    given = {name: value for name, value in ctx.attrs.items() if value not in (None, ())}
    node = helper.make_node(ctx.op, inputs, outputs, **given).SerializeToString()
    kinds = [
        helper.make_tensor_type_proto(_NUMBERS[t.elem], t.shape).SerializeToString() if t else b""
        for t in ctx.inputs
    ]
    version = max(schema.context_dependent_function_opset_versions)
    made = schema.get_context_dependent_function_with_opset_version(version, node, kinds)
    body.ParseFromString(made)
    if not body.node:
        ctx.unsupported("attributes that the standard has a function for", str(given))
    return body


# -- folding: nodes whose inputs are all known and small, in NumPy ---------------------------------
# ONNX's reference evaluator says the same, but takes 0.4 s to load.
UFUNCS: dict[str, np.ufunc] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Pow": np.power, "Neg": np.negative,
    "Abs": np.abs, "Sqrt": np.sqrt, "Exp": np.exp, "Log": np.log, "Sin": np.sin, "Cos": np.cos,
    "Reciprocal": np.reciprocal, "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint,
    "Sign": np.sign, "Sum": np.add, "Max": np.maximum, "Min": np.minimum, "Equal": np.equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "And": np.logical_and, "Or": np.logical_or,
    "Xor": np.logical_xor, "Not": np.logical_not,
}  # fmt: skip
"""NumPy's name of operators that compute shapes, indices and masks element by element."""
_MOVES = ("Range", "Concat", "Gather", "CumSum", "NonZero")


def folded(ctx: Context) -> Tensor | None:
    """Return the result of a node if all its inputs are known and small, and it is too."""
    given = [t for t in ctx.inputs if t is not None and t.known is not None]
    if not given or len(given) < len(ctx.inputs) or sum(t.elements for t in given) > SMALL:
        return None
    if ctx.op not in (*UFUNCS, "Div", "Mod", "Where", *_MOVES):
        return None
    arrays = [t.array() for t in given]
    with np.errstate(all="ignore"):
        if ctx.op in _MOVES:
            found = _moved(ctx, *arrays)
        elif np.prod(np.broadcast_shapes(*(a.shape for a in arrays)), dtype=object) > SMALL:
            found = None
        else:
            found = _element_by_element(ctx, *arrays)
    return None if found is None else known(found)


def _element_by_element(ctx: Context, x: Values, *more: Values) -> Values:
    if ctx.op == "Where":
        return np.where(x, *more)
    if ctx.op in ("Div", "Mod") and x.dtype.kind in "iu" and not np.all(more[0]):
        raise GraphError("a divisor that is not 0", "0", "mend the model")
    if ctx.op == "Div":
        whole = x.dtype.kind in "iu"  # cut toward zero
        return np.asarray((x - np.fmod(x, *more)) // more[0] if whole else x / more[0])
    if ctx.op == "Mod":
        return np.asarray(np.fmod(x, *more) if ctx.attr("fmod") else np.mod(x, *more))
    total = UFUNCS[ctx.op](x, *more[:1])
    for array in more[1:]:
        total = UFUNCS[ctx.op](total, array)
    return np.asarray(total if total.dtype == np.bool_ else total.astype(x.dtype))


def _moved(ctx: Context, x: Values, *more: Values) -> Values | None:
    if ctx.op == "Concat":
        return np.concatenate((x, *more), ctx.attr("axis"))
    if ctx.op == "NonZero":
        return np.array(np.nonzero(x), np.int64)
    if ctx.op == "Range":
        return _counted(ctx, *(v.reshape(()).item() for v in (x, *more))).astype(x.dtype)
    if ctx.op == "CumSum":
        return _cumulated(ctx, x, int(more[0].reshape(()).item()))
    indices, axis = more[0], ctx.attr("axis")
    size = x.shape[axis]
    if indices.size * (x.size // max(1, size)) > SMALL:
        return None
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise GraphError(f"indices from {-size} to {size - 1}", str(indices)[:40], "mend the model")
    return np.take(x, indices, axis)


def _counted(ctx: Context, first: Any, last: Any, step: Any) -> Values:
    if step == 0:
        raise GraphError("a step that is not 0", "0", "mend the model")
    count = max(0, int(-(-(last - first) // step)))
    if count > SMALL:
        ctx.unsupported(f"a range of at most {SMALL} numbers", str(count))
    return np.asarray(first + step * np.arange(count))


def _cumulated(ctx: Context, x: Values, axis: int) -> Values:
    """Return running sums; exclusive ones leave the own element out, reverse ones run back."""
    flipped = np.flip(x, axis) if ctx.attr("reverse") else x
    total = np.cumsum(flipped, axis, dtype=x.dtype)
    total = total - flipped if ctx.attr("exclusive") else total
    return np.asarray(np.flip(total, axis) if ctx.attr("reverse") else total)

"""Quantise / dequantise pairs become integer layers, and what lies between them stays in bytes.

    conv(dequantise(q), dequantise(w))           dequantise(conv(q, w))        sums in int32
    quantise(relu(dequantise(sums)))             requantise(sums)              in the epilogue
    reshape(dequantise(q)), transpose, ...       dequantise(reshape(q))
    dequantise(q) + y                            add_dequantised(y, q)         a residual in bytes
    quantise(dequantise(q)), equal scales        q

y = sx sw (sum qx qw - ox sum qw + qb), qb = round(b / (sx sw)); pads of x hold ox. Sums that int32
might not hold stay in floating point; a bias too large for it is added to dequantised sums.

A summand in floats is never read as the bytes that a layer beside it reads: bytes end where their
scale does, the summand does not.
Source: github hicann/amct, graph_based; the vendor's V100/V200RequantFusionPass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant, Graph, Node, TensorType, Values
from ascend_lab.compiler.passes import simplify
from ascend_lab.compiler.passes.rewrite import Pass, derived, having, settings, sweep
from ascend_lab.operators.kernels.epilogue_plan import MOST_WHOLE
from ascend_lab.operators.ops.formats import is_float

CONVOLUTIONS = ("conv2d", "depthwise_conv2d")
MOVING = ("reshape", "transpose", "slice", "expand")
WINDOW = ("stride", "pad", "dilation")
MOST_APART = 16.0
"""How much larger steps of sums may be than those of the sums that take their bias."""
MOST_PRODUCT = 255 * 128
MOST_SUM = 2**31 - 1
"""The largest |(q - offset) w| of bytes, and the largest sum of such that int32 holds."""
ZERO_STEPS = 2**18
"""Most steps that the bias of a channel of zeros becomes."""
COARSEST = 0.25
"""The largest step of sums, in steps of bytes, to which what is taken off bytes is rounded."""
SHALLOW = 512
"""Products a result up to which the vector unit may have more to do than the cube."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor of int8 that stands for (q - offset) scale."""

    name: str
    scale: float
    offset: int


def bytes_of(draft: Draft, name: str) -> Bytes | None:
    """Return what a dequantised tensor was, if that is one scale and offset for int8."""
    node = draft.maker(name)
    if node is None or node.op != "dequantise" or len(node.inputs) > 1:
        return None
    if draft.type(node.inputs[0]).dtype != "int8":
        return None
    return Bytes(node.inputs[0], node.attr("scale", 1.0), node.attr("offset", 0))


# -- uint8 ----------------------------------------------------------------------------------------
def in_int8(draft: Draft, node: Node) -> bool:
    """Let uint8 be int8 where only dequantising nodes read it, zero points 128 lower."""
    out = node.output
    readers = draft.graph.readers[node.output]
    pure = out not in draft.outputs and all(r.op == "dequantise" for r in readers)
    if draft.type(out).dtype != "uint8" or not pure:
        return False
    attrs = {**node.attrs, "dtype": "int8", "offset": node.attr("offset", 0) - 128}
    new = draft.insert("quantise", node.inputs, attrs, out)
    for reader in readers:
        attrs = {**reader.attrs, "offset": reader.attr("offset", 0) - 128}
        others = draft.current(reader.name).inputs[1:]
        made = draft.insert("dequantise", (new, *others), attrs, reader.name)
        draft.replace(reader.output, made)
    return True


# -- integer layers -------------------------------------------------------------------------------
def integer_layer(draft: Draft, node: Node) -> bool:
    """Compute a convolution or product of bytes in int32."""
    x = bytes_of(draft, node.inputs[0])
    options = settings(node)
    weight = _weight(draft, node, options)
    if x is None or weight is None or not is_float(draft.type(node.output).dtype):
        return False
    if options.get("trans_a") or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
        return False
    whole, scales = weight
    conv = node.op in CONVOLUTIONS
    title = node.name
    shape = (whole.type.shape[0], 1, 1) if conv else (draft.type(node.output).shape[-1],)
    products = whole.type.elements // shape[0]
    if products * MOST_PRODUCT > MOST_SUM:
        return False
    biased = len(node.inputs) > 2
    bias = _bias(draft, node, shape[0])
    if biased and bias is None:
        return False
    room = MOST_SUM - products * MOST_PRODUCT
    beside = bias is not None and not _bias_fits(bias, scales, x.scale, room)
    given = [scales, whole, *([bias] if bias and not beside else [])]
    axes: tuple[int, ...] = (1, 2, 3) if conv else (-1 if options.get("trans_b") else 0,)
    kind = TensorType(shape, "fp32")
    name = draft.add(whole, f"{title}_weight")
    step = derived(kind, partial(_scales, x.scale, shape, axes), *given)
    total = partial(_whole_bias, x, shape, axes)
    added = draft.add(derived(replace(kind, dtype="int32"), total, *given), f"{title}_bias")
    attrs: dict[str, Any] = {key: options[key] for key in (*WINDOW, "trans_b") if key in options}
    if conv:
        channels = draft.type(x.name).shape[1]
        attrs["groups"] = options.get("groups", channels)
        attrs["pad_value"] = x.offset if np.any(options["pad"]) else 0
    op = "conv2d" if conv else "matmul" if node.op == "gemm" else node.op
    sums = draft.insert(op, (x.name, name), attrs, f"{title}_sums")
    kept: dict[str, Any] = {"dtype": draft.type(node.output).dtype}
    if conv and whole.type.elements <= SHALLOW * shape[0]:
        kept |= _small(draft.constants[added])
    reads = (sums, draft.add(step, f"{title}_scales"), added)
    if not beside:
        return draft.become(node, "dequantise", reads, kept)
    assert bias is not None
    found = draft.insert("dequantise", reads, kept, f"{title}_floats")
    column = derived(
        TensorType(shape, draft.type(node.output).dtype),
        lambda b: np.broadcast_to(b.reshape(-1), (shape[0],)).reshape(shape),
        bias,
    )
    return draft.become(node, "add", (found, draft.add(column, f"{title}_summand")))


def _bias_fits(bias: Constant, scales: Constant, step: float, room: int) -> bool:
    """Tell whether a bias in steps of the sums leaves them within int32."""
    with np.errstate(all="ignore"):
        whole = bias.array().astype(np.float64).reshape(-1) / (
            scales.array().astype(np.float64).reshape(-1) * step
        )
    return bool(np.all(np.abs(whole) <= room))


def _small(bias: Constant) -> dict[str, bool]:
    """Return the attribute that says so where the cube can add a bias."""
    return {"small_bias": True} if np.abs(bias.array()).max() <= MOST_WHOLE else {}


def _weight(
    draft: Draft, node: Node, options: Mapping[str, Any]
) -> tuple[Constant, Constant] | None:
    """Return constant int8 weights with offset 0, and their scales: one, or one a channel."""
    maker = draft.maker(node.inputs[1])
    if maker is None or maker.op != "dequantise" or len(maker.inputs) > 2:
        return None
    whole = draft.constant(maker.inputs[0])
    if whole is None or (node.op in simplify.PRODUCTS and len(whole.type.shape) != 2):
        return None
    low = 128 if whole.type.dtype == "uint8" else 0
    if maker.attr("offset", 0) != low or whole.type.dtype not in ("int8", "uint8"):
        return None
    if low:
        kind = replace(whole.type, dtype="int8")
        whole = derived(kind, lambda values: values.astype(np.int64) - 128, whole)
    one = Constant(TensorType((1,), "fp32"), np.array([maker.attr("scale", 1.0)], np.float32))
    if len(maker.inputs) == 1:
        return whole, one
    scales = draft.constant(maker.inputs[1])
    rank = len(whole.type.shape)
    if scales is None or maker.attr("scale", 1.0) != 1:
        return None
    sides = (1,) * (rank - len(scales.type.shape)) + scales.type.shape
    last = node.op in simplify.PRODUCTS and not options.get("trans_b")
    axis = rank - 1 if last else 0
    fits = all(n == 1 or d == axis for d, n in enumerate(sides))
    return (whole, scales) if fits else None


def _bias(draft: Draft, node: Node, channels: int) -> Constant | None:
    """Return a constant bias in floats, one number or one a channel: its own, or dequantised."""
    if len(node.inputs) < 3:
        return None
    name = node.inputs[2]
    kind = draft.type(name)
    if kind.elements != 1 and (kind.elements, kind.shape[-1]) != (channels, channels):
        return None
    maker = draft.maker(name)
    if maker is None:
        return draft.constant(name)
    given = [draft.constant(n) for n in maker.inputs]
    if maker.op != "dequantise" or len(given) > 2 or any(g is None for g in given):
        return None
    a = settings(maker)

    def floats(whole: Values, *scales: Values) -> Values:
        wide = (whole.astype(np.float64) - a["offset"]) * a["scale"]
        full: Values = wide * scales[0].astype(np.float64).reshape(-1) if scales else wide
        return full

    kind = replace(draft.type(name), dtype="fp32")
    return derived(kind, floats, *[g for g in given if g])


def _scales(
    step: float,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: Values,
    weight: Values,
    *bias: Values,
) -> Values:
    """Return the steps of sums: sx sw; of a channel of zeros a sixteenth of those of the others.

    Such a channel is its bias, and any scale of zeros will do. What exporters write there, 1 or
    1e-12 for instance, would round the bias to steps as large as sx, or not hold it.
    """
    flat = np.broadcast_to(scales.astype(np.float64).reshape(-1) * step, (math.prod(shape),))
    idle = ~weight.any(axes).reshape(-1)
    if not idle.any():
        return flat.reshape(shape)
    usual = np.median(flat[~idle]) if not idle.all() else step / 127
    size = np.abs(bias[0].astype(np.float64).reshape(-1)) if bias else 0.0
    return np.where(idle, np.maximum(usual / 16, size / ZERO_STEPS), flat).reshape(shape)


def _whole_bias(
    x: Bytes,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scales: Values,
    weight: Values,
    *bias: Values,
) -> Values:
    """round(b / (sx sw)) - ox sum qw, as int32 holds it."""
    total: Values = -x.offset * weight.astype(np.float64).sum(axes).reshape(-1)
    if bias:
        step = _scales(x.scale, shape, axes, scales, weight, *bias).reshape(-1)
        total = total + np.rint(bias[0].astype(np.float64).reshape(-1) / step)
    return total.reshape(shape)


# -- what lies between ----------------------------------------------------------------------------
def moved(draft: Draft, node: Node) -> bool:
    """Move bytes instead of the floats they stand for."""
    x = bytes_of(draft, node.inputs[0])
    if x is None:
        return False
    made = draft.insert(node.op, (x.name,), node.attrs, f"{node.name}_int8")
    attrs = {"scale": x.scale, "offset": x.offset, "dtype": draft.type(node.output).dtype}
    return draft.become(node, "dequantise", (made,), attrs)


def residual(draft: Draft, node: Node) -> bool:
    """Add a quantised summand to what a layer in front computes."""
    sides = [bytes_of(draft, name) for name in node.inputs]
    equal = len({draft.type(n).shape for n in (*node.inputs, node.output)}) == 1
    if not any(sides) or not equal or node.inputs[0] == node.inputs[1]:
        return False
    fresh = [_is_fresh(draft, name) for name in node.inputs]
    first = 1 if sides[1] is None else 0 if sides[0] is None else int(fresh[1] >= fresh[0])
    other = sides[1 - first]
    assert other is not None
    pair = (node.inputs[first], other.name)
    return draft.become(
        node, "add_dequantised", pair, {"scale": other.scale, "offset": other.offset}
    )


def _is_fresh(draft: Draft, name: str) -> bool:
    """Tell whether a tensor comes from a layer that nobody else reads."""
    node = draft.only(name, "dequantise")
    if node is None:
        return False
    return draft.type(node.inputs[0]).dtype == "int32" or bool(
        draft.only(node.inputs[0], "requantise", "quantise")
    )


def requantised(draft: Draft, node: Node) -> bool:
    """Return bytes of sums at once, what came back unchanged, or scale in front."""
    own = Bytes("", node.attr("scale", 1.0), node.attr("offset", 0))
    if node.attr("dtype", "int8") != "int8":
        return False
    same = bytes_of(draft, node.inputs[0])
    if same and (same.scale, same.offset) == (own.scale, own.offset):
        return draft.forward(node, same.name)
    limits = _limited(draft, node.inputs[0], own)
    source, relu = limits or (node.inputs[0], False)
    sums = draft.only(source, "dequantise")
    if sums is not None and len(sums.inputs) == 3 and not sums.attr("offset", 0):
        scales = _divided(draft, sums, own.scale)
        attrs = {"offset": own.offset, "relu": relu}
        attrs |= {key: True for key in ("small_bias",) if sums.attr(key)}
        return draft.become(node, "requantise", (sums.inputs[0], scales, sums.inputs[2]), attrs)
    if own.scale != 1 and _in_steps(draft, node, own, (source, relu)):
        return True
    return bool(limits and not relu) and draft.become(node, "quantise", (source,), node.attrs)


def _limited(draft: Draft, name: str, own: Bytes) -> tuple[str, bool] | None:
    """Return what is cut to a range, and whether at 0, if bytes cut the rest themselves."""
    node = draft.only(name, "clip", *simplify.LIMITS)
    if node is None:
        return None
    low, high = simplify.LIMITS.get(node.op, (node.attr("low"), node.attr("high")))
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    below = low / own.scale + own.offset <= -128
    above = high / own.scale + own.offset >= 127
    return (node.inputs[0], not below) if above and (below or low == 0) else None


def _divided(draft: Draft, sums: Node, step: float) -> str:
    """Return the scales of dequantised sums in steps of what they become."""
    scales = draft.constants[sums.inputs[1]]
    factor = sums.attr("scale", 1.0) / step
    return draft.add(
        derived(scales.type, lambda v: v.astype(np.float64) * factor, scales), f"{sums.name}_steps"
    )


def _in_steps(draft: Draft, node: Node, own: Bytes, behind: tuple[str, bool]) -> bool:
    """Let a sum of two be in steps of its result, with one offset for all three.

    Two layers each scale their sums so. With a residual in bytes
    relu((x - ox) sx + (q - oq) sq) / s = relu(x (sx / s) + (q - o) (sq / s)).
    """
    source, relu = behind
    top = draft.only(source, "add_dequantised", "add")
    shift = 0.0 if relu else -float(own.offset)
    if top is not None and top.op == "add":
        heads = [draft.only(name, "dequantise") for name in top.inputs]
        if not all(h is not None and len(h.inputs) == 3 for h in heads):
            return False
        if not all(h and _takes(draft, h, own.scale, shift) for h in heads):
            return False
        for head, own_shift in zip(heads, (shift, 0.0), strict=True):
            assert head is not None
            _head_in_steps(draft, head, own.scale, own_shift)
        both = [draft.current(head.name) for head in heads if head]
        if draft.type(both[0].output).shape == draft.type(both[1].output).shape:
            _one_bias(draft, both)
    else:
        head = draft.only(top.inputs[0], "dequantise") if top is not None else None
        if top is None or head is None or len(head.inputs) == 2:
            return False
        scale = top.attr("scale", 1.0) / own.scale
        shift += top.attr("offset", 0.0) * scale
        if not _takes(draft, head, own.scale, shift):
            return False
        left = _head_in_steps(draft, head, own.scale, shift)
        pair = {"scale": scale, "offset": left / scale}
        draft.become(top, "add_dequantised", draft.current(top.name).inputs, pair)
    if relu:  # what is cut at 0 is in steps now; bytes cut it above
        source = draft.insert("relu", (source,), {}, f"{node.name}_relu")
    kept = {"offset": own.offset} if relu else {}
    return draft.become(node, "quantise", (source,), kept)


def _takes(draft: Draft, head: Node, step: float, shift: float) -> bool:
    """Tell whether sums are fine enough for a shift in steps of bytes, and int32 holds it."""
    if len(head.inputs) == 1:
        return True
    scales, bias = (draft.constants[name].array().astype(np.float64) for name in head.inputs[1:])
    steps = scales * (head.attr("scale", 1.0) / step)
    fits = np.abs(bias) + abs(shift) / steps <= MOST_SUM // 2
    return bool(np.all(fits) and np.all(steps <= COARSEST))


def _head_in_steps(draft: Draft, head: Node, step: float, shift: float) -> float:
    """Dequantise in steps of a sum, less what is taken from that; return what is left to take.

    A bias of sums is half a sum off at most.
    """
    attrs: dict[str, Any] = {"dtype": head.attr("dtype", "fp32")}
    inputs = head.inputs
    if len(inputs) == 1:
        attrs["scale"] = head.attr("scale", 1.0) / step
        draft.become(head, "dequantise", inputs, attrs)
        return shift + float(head.attr("offset", 0) * attrs["scale"])
    inputs = (inputs[0], _divided(draft, head, step), inputs[2])
    scales, bias = (draft.constants[name] for name in inputs[1:])
    less = derived(bias.type, lambda b, s: b - np.rint(shift / s.astype(np.float64)), bias, scales)
    attrs |= _small(less) if head.attr("small_bias") else {}
    draft.become(head, "dequantise", (*inputs[:2], draft.add(less, f"{head.name}_bias")), attrs)
    return 0.0


def _one_bias(draft: Draft, heads: list[Node]) -> None:
    """Let one of two layers that are added take both biases, half a sum of its own off at most.

    It is the one with more taps, or larger steps, unless these are too small for the other's bias.
    """

    def steps(head: Node) -> Values:
        wide: Values = draft.constants[head.inputs[1]].array().astype(np.float64).reshape(-1)
        return wide

    def order(head: Node) -> tuple[float, float]:
        layer = draft.maker(head.inputs[0])
        taps = draft.type(layer.inputs[1]).shape[2:] if layer else ()
        return -math.prod(taps), -float(steps(head).mean())

    heads.sort(key=order)
    for one, other in (heads, heads[::-1]):
        if np.all(steps(other) <= MOST_APART * steps(one)):
            numbers = [draft.constants[n] for head in (one, other) for n in head.inputs[1:]]
            total = derived(numbers[1].type, _both, *numbers)
            moved = _both(*(constant.array().astype(np.float64) for constant in numbers))
            if np.abs(moved).max() > MOST_SUM // 2:
                continue
            kinds = [{"dtype": draft.type(head.output).dtype} for head in (one, other)]
            small = _small(total) if one.attr("small_bias") else {}
            bias = draft.add(total, f"{one.name}_bias")
            draft.become(one, "dequantise", (*one.inputs[:2], bias), kinds[0] | small)
            draft.become(other, "dequantise", other.inputs[:2], kinds[1])
            return


def _both(scale: Values, bias: Values, other_scale: Values, other: Values) -> Values:
    """Return a bias of sums and what is added to the other's, in the first's steps."""
    return np.asarray(bias + np.rint(other * (other_scale / scale.astype(np.float64))))


def fold(graph: Graph) -> tuple[Graph, int]:
    """Return the graph in integer layers, and how many rewrites that took."""
    total = 0
    for apply in (
        simplify.COMMON.apply,
        sweep(in_int8, "quantise"),
        sweep(integer_layer, *CONVOLUTIONS, *simplify.PRODUCTS),
        sweep(moved, *MOVING),
        sweep(residual, "add"),
        sweep(requantised, "quantise"),
    ):
        graph, count = apply(graph)
        total += count
    return graph, total


REQUANT = Pass(
    "RequantFusionPass",
    "prepare",
    having(fold, "quantise", "dequantise"),
    "computes quantised layers in whole numbers",
    "steps",
)

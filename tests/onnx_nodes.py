"""Random nodes of the standard's operators: attributes and inputs drawn from what it allows.

Each family draws the inputs and attributes of one node of its operators. Attributes that the
operator set does not know yet are left out, so one family serves every version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, defs, helper, numpy_helper

OLDEST_OPSET = 7
NEWEST_OPSET = 26
"""Versions of the standard that every evaluator installed can be asked for."""
FLOATS = ("float32", "float64", "float16")
WHOLE = ("int32", "int64", "int8", "uint8", "int16", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class Case:
    """One node: the values of its inputs (None: left out), its attributes, how many outputs."""

    op: str
    opset: int
    inputs: Sequence[Any]
    attrs: dict[str, Any]
    outputs: int = 1
    stored: frozenset[int] = field(default_factory=frozenset)
    """Places of the inputs that are initialisers."""

    @property
    def names(self) -> list[str]:
        """Return the names of the inputs, "" for those left out."""
        return ["" if value is None else f"x{i}" for i, value in enumerate(self.inputs)]

    @property
    def feed(self) -> dict[str, Any]:
        """Return the values of the graph inputs by name."""
        named = zip(self.names, self.inputs, strict=True)
        return {name: v for i, (name, v) in enumerate(named) if name and i not in self.stored}

    def model(self) -> ModelProto:
        """Return the model of this node alone."""
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, self.names, outputs, "the_node", **self.attrs)
        entries = []
        for name, value in self.feed.items():
            array = np.asarray(value)
            is_text = array.dtype.kind in "OUS"
            kind = 8 if is_text else helper.np_dtype_to_tensor_dtype(array.dtype)
            entries.append(helper.make_tensor_value_info(name, kind, array.shape))
        weights = [
            numpy_helper.from_array(np.asarray(self.inputs[i]), f"x{i}") for i in self.stored
        ]
        ends = [ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph([node], "case", entries, ends, weights)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class Draw:
    """Random choices for one node."""

    def __init__(self, op: str, opset: int, seed: int) -> None:
        self.op = op
        self.opset = opset
        self.rng = np.random.default_rng(seed)

    def pick(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float = 0.5) -> bool:
        """Return true in a share of the cases."""
        return bool(self.rng.random() < share)

    def size(self, low: int, high: int) -> int:
        """Return a whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def sizes(self, count: int, low: int = 1, high: int = 4) -> tuple[int, ...]:
        """Return so many whole numbers."""
        return tuple(self.size(low, high) for _ in range(count))

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        """Return a shape of `low` to `high` axes."""
        return self.sizes(self.size(low, high), 1, 4)

    def numbers(self, shape: Sequence[int], dtype: str = "float32", scale: float = 2.0) -> Any:
        """Return normal floats, small whole numbers of both signs where there are any, or bits."""
        kind = np.dtype(dtype)
        if kind.kind == "b":
            return self.rng.integers(0, 2, shape).astype(bool)
        if kind.kind in "iu":
            low = -6 if kind.kind == "i" else 0
            return self.rng.integers(low, 7, shape).astype(kind)
        values = self.rng.standard_normal(shape) * scale
        if self.op in ("Round", "Floor", "Ceil") and self.chance(0.3):
            values = np.round(values * 2) / 2
        return values.astype(kind)

    def types(self, place: int = 0) -> list[str]:
        """Return NumPy's names of the element types that an input may have."""
        schema = defs.get_schema(self.op, self.opset)
        given = schema.inputs[min(place, len(schema.inputs) - 1)]
        names = {"float": "float32", "double": "float64"}
        found = []
        for text in sorted(given.types):
            word = text.removeprefix("tensor(").removesuffix(")")
            name = names.get(word, word)
            if name in (*FLOATS, *WHOLE, "bool"):
                found.append(name)
        return found

    def type(self, place: int = 0) -> str:
        """Return an element type of an input, float32 in every second case where it may be."""
        allowed = self.types(place)
        if "float32" in allowed and self.chance():
            return "float32"
        return str(self.pick(*allowed))


Drawn = tuple[Sequence[Any], dict[str, Any], int]
FAMILIES: dict[str, Callable[[Draw], Drawn]] = {}
STORED: dict[str, tuple[int, ...]] = {}
"""Inputs that are initialisers in every second case."""


def family(*ops: str, stored: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Register the function that draws nodes of these operators."""

    def register(draw: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
        for op in ops:
            FAMILIES[op] = draw
            STORED[op] = stored
        return draw

    return register


def versions(op: str) -> list[int]:
    """Return the operator sets in which a new form of an operator begins, and the newest."""
    begins = {
        max(s.since_version, OLDEST_OPSET)
        for s in defs.get_all_schemas_with_history()
        if s.name == op and not s.domain and s.since_version <= NEWEST_OPSET
    }
    last = NEWEST_OPSET
    while defs.get_schema(op, last).deprecated:
        last -= 1
    kept = [v for v in begins if v <= last and not defs.get_schema(op, v).deprecated]
    return sorted({*kept, last})


def drawn(op: str, seed: int) -> Case:
    """Return a random node of an operator."""
    rng = np.random.default_rng([seed, 1])
    choices = versions(op)
    opset = choices[int(rng.integers(len(choices)))]
    draw = Draw(op, opset, seed)
    inputs, attrs, outputs = FAMILIES[op](draw)
    schema = defs.get_schema(op, opset)
    known = {k: v for k, v in attrs.items() if k in schema.attributes and v is not None}
    values = list(inputs)[: schema.max_input]
    while values and values[-1] is None:
        values.pop()
    places = STORED[op] if draw.chance(0.7) else ()
    kept = frozenset(i for i in places if i < len(values) and values[i] is not None)
    return Case(op, opset, values, known, min(outputs, schema.max_output), kept)


# -- element by element ---------------------------------------------------------------------------
@family(
    "Abs", "BitwiseNot", "Ceil", "Celu", "Cos",
    "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu",
    "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Size", "NonZero", "Dropout",
)  # fmt: skip
def _unary(draw: Draw) -> Drawn:
    schema = defs.get_schema(draw.op, draw.opset)
    attrs: dict[str, Any] = {}
    for name, attribute in schema.attributes.items():
        if int(attribute.type) == 1 and draw.chance():
            attrs[name] = float(np.float32(draw.rng.uniform(0.1, 2)))
    attrs |= {"approximate": draw.pick("none", "tanh")} if draw.op == "Gelu" else {}
    if draw.op == "IsInf":
        attrs = {"detect_negative": draw.size(0, 1), "detect_positive": draw.size(0, 1)}
    x = draw.numbers(draw.shape(1 if draw.op == "NonZero" else 0), draw.type())
    if draw.op in ("IsInf", "IsNaN", "Relu", "Identity") and x.dtype.kind == "f":
        x = np.where(draw.rng.random(x.shape) < 0.2, x.dtype.type(draw.pick(np.nan, np.inf)), x)
        x = np.where(draw.rng.random(x.shape) < 0.2, x.dtype.type(-np.inf), x)
    return [x], attrs, 1


@family(
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Or", "PRelu", "Sub", "Xor", "Mod", "Pow",
    "BitShift",
)  # fmt: skip
def _binary(draw: Draw) -> Drawn:
    shape = draw.shape()
    other = tuple(1 if draw.chance(0.3) else n for n in shape)[draw.size(0, len(shape)) :]
    one, two = (shape, other) if draw.op == "PRelu" or draw.chance() else (other, shape)
    kind = draw.type()
    x = draw.numbers(one, kind)
    y = draw.numbers(two, draw.type(1) if draw.op == "Pow" and draw.opset >= 12 else kind)
    attrs: dict[str, Any] = {}
    if draw.op in ("Div", "Mod"):
        y = np.where(y == 0, y.dtype.type(3), y)
    if draw.op == "Mod":
        attrs = {"fmod": 1 if x.dtype.kind == "f" else draw.size(0, 1)}
    if draw.op == "Pow":
        fractional = x.dtype.kind == y.dtype.kind == "f" and draw.chance()
        if fractional:
            x = np.abs(x) + x.dtype.type(1)
        else:  # bases of any sign, and 0
            y = np.abs(y.astype(int)).astype(y.dtype) % y.dtype.type(4)
    if draw.op == "BitShift":
        attrs = {"direction": draw.pick("LEFT", "RIGHT")}
        y = (np.abs(y.astype(int)) % 7).astype(y.dtype)
    return [x, y], attrs, 1


@family("Max", "Mean", "Min", "Sum")
def _many(draw: Draw) -> Drawn:
    shape = draw.shape()
    kind = draw.type()
    parts = [
        draw.numbers(tuple(1 if draw.chance(0.3) else n for n in shape), kind)
        for _ in range(draw.size(1, 4))
    ]
    return parts, {}, 1


@family("Clip", stored=(1, 2))
def _clip(draw: Draw) -> Drawn:
    x = draw.numbers(draw.shape(), draw.type())
    low = np.asarray(1 if x.dtype.kind == "u" else -1).astype(x.dtype)
    high = np.asarray(2).astype(x.dtype)
    limits = [low if draw.chance(0.8) else None, high if draw.chance(0.8) else None]
    if draw.opset < 11:
        return [x], {"min": -1.0, "max": 2.0}, 1
    return [x, *limits], {}, 1


@family("Where")
def _where(draw: Draw) -> Drawn:
    shape = draw.shape()
    kind = draw.type(1)
    shapes = [tuple(1 if draw.chance(0.3) else n for n in shape) for _ in range(3)]
    return [draw.numbers(shapes[0], "bool"), *(draw.numbers(s, kind) for s in shapes[1:])], {}, 1


@family("Cast")
def _cast(draw: Draw) -> Drawn:
    x = draw.numbers(draw.shape(), draw.type(), 5.0)
    target = draw.pick(1, 2, 3, 6, 7, 9, 10, 11)
    if x.dtype.kind == "f" and target == 2:
        x = np.abs(x)
    return [x], {"to": target}, 1


# -- reductions -----------------------------------------------------------------------------------
@family(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", stored=(1,),
)  # fmt: skip
def _reduce(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    x = draw.numbers(shape, draw.type())
    x = np.abs(x) + x.dtype.type(1) if draw.op == "ReduceLogSum" else x
    count = draw.size(0, len(shape))
    axes = [int(a) for a in draw.rng.permutation(len(shape))[:count]]
    if draw.opset >= 11:
        axes = [a - len(shape) if draw.chance(0.3) else a for a in axes]
    attrs: dict[str, Any] = {"keepdims": draw.size(0, 1)}
    newest = defs.get_schema(draw.op, draw.opset)
    if "axes" in newest.attributes:
        return [x], attrs | ({"axes": axes} if axes else {}), 1
    attrs["noop_with_empty_axes"] = draw.size(0, 1)
    return [x, np.array(axes, np.int64) if axes or draw.chance() else None], attrs, 1


@family("ArgMax", "ArgMin")
def _arg(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    x = draw.numbers(shape, draw.type())
    if draw.chance():
        x = np.round(x.astype(np.float64)).astype(x.dtype)
    axis = draw.size(0, len(shape) - 1)
    last = draw.size(0, 1)
    return [x], {"axis": axis, "keepdims": draw.size(0, 1), "select_last_index": last}, 1


@family("CumSum", "CumProd", stored=(1,))
def _running(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = np.array(draw.size(-len(shape), len(shape) - 1), draw.pick(np.int32, np.int64))
    attrs = {"exclusive": draw.size(0, 1), "reverse": draw.size(0, 1)}
    return [draw.numbers(shape, draw.type()), axis], attrs, 1


@family("Softmax", "LogSoftmax", "Hardmax")
def _softmax(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    low = -len(shape) if draw.opset >= 11 else 0
    axis = draw.size(low, len(shape) - 1)
    x = draw.numbers(shape, draw.type())
    if draw.op == "Hardmax" and draw.chance():
        x = np.round(x)
    return (
        [x],
        {"axis": axis} if draw.chance(0.8) or (draw.opset < 13 and len(shape) < 2) else {},
        1,
    )


@family("LpNormalization")
def _lp_normalization(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(-len(shape), len(shape) - 1)
    x = draw.numbers(shape, draw.type())
    if draw.chance(0.2):
        x = x * 0
    return [x], {"axis": axis, "p": draw.size(1, 2)}, 1


# -- products -------------------------------------------------------------------------------------
@family("MatMul")
def _matmul(draw: Draw) -> Drawn:
    m, k, n = draw.sizes(3, 1, 5)
    batch = draw.shape(0, 2)
    one = (*batch[draw.size(0, len(batch)) :], m, k) if draw.chance(0.8) else (k,)
    two = (*batch, k, n) if draw.chance(0.8) else (k,)
    kind = draw.type()
    return [draw.numbers(one, kind), draw.numbers(two, kind)], {}, 1


@family("Gemm", stored=(1, 2))
def _gemm(draw: Draw) -> Drawn:
    m, k, n = draw.sizes(3, 1, 5)
    kind = draw.type()
    trans_a = draw.size(0, 1)
    trans_b = draw.size(0, 1)
    a = draw.numbers((k, m) if trans_a else (m, k), kind)
    b = draw.numbers((n, k) if trans_b else (k, n), kind)
    c = draw.numbers(draw.pick((m, n), (n,), (1, n), (m, 1), ()), kind)
    is_float = np.dtype(kind).kind == "f"
    attrs = {"transA": trans_a, "transB": trans_b}
    attrs |= {"alpha": 0.5, "beta": 1.5} if draw.chance() and is_float else {}
    return [a, b, c if draw.opset < 11 or draw.chance(0.7) else None], attrs, 1


@family("Einsum")
def _einsum(draw: Draw) -> Drawn:
    equation, ranks = draw.pick(
        ("ij,jk->ik", ("ij", "jk")), ("bij,bjk->bik", ("bij", "bjk")), ("ij->ji", ("ij",)),
        ("ij->i", ("ij",)), ("i,j->ij", ("i", "j")), ("...ij,...jk->...ik", ("bij", "bjk")),
        ("ij,jk,kl->il", ("ij", "jk", "kl")), ("bij,bij->b", ("bij", "bij")),
        ("ij,jk", ("ij", "jk")), ("ba,b", ("ba", "b")), ("ii->i", ("ii",)), ("ii", ("ii",)),
        ("b...,...->b...", ("bij", "ij")), (" bij , bjk -> bik", ("bij", "bjk")),
    )  # fmt: skip
    sizes = {letter: draw.size(1, 4) for letter in "abijkl"}
    kind = draw.type()
    values = [draw.numbers(tuple(sizes[c] for c in term), kind) for term in ranks]
    return values, {"equation": equation}, 1


@family("MatMulInteger", stored=(1, 2, 3))
def _matmul_integer(draw: Draw) -> Drawn:
    m, k, n = draw.sizes(3, 1, 70)
    a = draw.rng.integers(0, 256, (m, k)).astype(np.uint8).view(draw.pick("uint8", "int8"))
    b = draw.rng.integers(0, 256, (k, n)).astype(np.uint8).view(draw.pick("uint8", "int8"))
    points = [np.array(draw.size(0, 100), v.dtype) if draw.chance() else None for v in (a, b)]
    return [a, b, *points], {}, 1


@family("ConvInteger", stored=(1, 3))
def _conv_integer(draw: Draw) -> Drawn:
    (x, w, _), attrs, _ = _conv(draw)
    a = draw.rng.integers(0, 256, x.shape).astype(np.uint8)
    b = draw.rng.integers(0, 256, w.shape).astype(np.uint8).view(draw.pick("uint8", "int8"))
    points = [np.array(draw.size(0, 100), v.dtype) if draw.chance() else None for v in (a, b)]
    return [a, b, *points], attrs, 1


def _spatial(draw: Draw, kernel: tuple[int, ...], dilations: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes of an image in which the window fits."""
    return tuple((k - 1) * d + 1 + draw.size(0, 6) for k, d in zip(kernel, dilations, strict=True))


def _window(
    draw: Draw, rank: int, *, dilated: bool = True
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the image's sizes and the attributes of a window that fits in it."""
    kernel = draw.sizes(rank, 1, 4)
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    dilations = (1,) * rank
    if draw.chance(0.7):
        attrs["strides"] = draw.sizes(rank, 1, 4)
    auto = draw.pick("", "", "", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    if dilated and draw.chance(0.3) and not auto.startswith("SAME"):
        dilations = draw.sizes(rank, 1, 3)
        attrs["dilations"] = dilations
    if auto:
        attrs["auto_pad"] = auto
    if auto in ("", "NOTSET") and draw.chance(0.6):
        attrs["pads"] = [draw.size(0, max(k - 1, 0)) for k in kernel * 2]
    return _spatial(draw, kernel, dilations), attrs


@family("Conv", stored=(1, 2))
def _conv(draw: Draw) -> Drawn:
    rank = draw.pick(1, 2, 2, 3)
    image, attrs = _window(draw, rank)
    group, per_group, each = draw.sizes(3, 1, 3)
    kind = draw.type()
    x = draw.numbers((draw.size(1, 2), group * per_group, *image), kind)
    w = draw.numbers((group * each, per_group, *attrs["kernel_shape"]), kind)
    b = draw.numbers((group * each,), kind) if draw.chance() else None
    return [x, w, b], attrs | {"group": group}, 1


@family("ConvTranspose", stored=(1, 2))
def _conv_transpose(draw: Draw) -> Drawn:
    rank = draw.pick(1, 2, 2, 3)
    image, attrs = _window(draw, rank)
    group, per_group, each = draw.sizes(3, 1, 3)
    kind = draw.type()
    x = draw.numbers((draw.size(1, 2), group * per_group, *image), kind)
    w = draw.numbers((group * per_group, each, *attrs["kernel_shape"]), kind)
    b = draw.numbers((group * each,), kind) if draw.chance() else None
    strides = attrs.get("strides", (1,) * rank)
    dilations = attrs.get("dilations", (1,) * rank)
    attrs["group"] = group
    largest = [max(s, d) for s, d in zip(strides, dilations, strict=True)]
    if draw.chance(0.3):
        attrs["output_padding"] = [draw.size(0, most - 1) for most in largest]
    if draw.chance(0.2) and "pads" not in attrs:
        attrs["output_shape"] = [
            (n - 1) * s + (k - 1) * d + 1 - draw.size(0, min(2, n - 1))
            for n, s, k, d in zip(image, strides, attrs["kernel_shape"], dilations, strict=True)
        ]
    return [x, w, b], attrs, 1


# -- pools ----------------------------------------------------------------------------------------
@family("MaxPool", "AveragePool", "LpPool")
def _pool(draw: Draw) -> Drawn:
    rank = draw.pick(1, 2, 2, 3)
    image, attrs = _window(draw, rank)
    attrs["ceil_mode"] = draw.size(0, 1)
    if draw.op == "AveragePool":
        attrs["count_include_pad"] = draw.size(0, 1)
    if draw.op == "MaxPool":
        attrs["storage_order"] = draw.size(0, 1)
    if draw.op == "LpPool":
        attrs["p"] = draw.size(1, 3)
    x = draw.numbers((draw.size(1, 2), draw.size(1, 3), *image), draw.type())
    return [x], attrs, draw.size(1, 2) if draw.op == "MaxPool" else 1


@family("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(draw: Draw) -> Drawn:
    shape = draw.shape(3, 5)
    return [draw.numbers(shape, draw.type())], {"p": draw.size(1, 3)}, 1


@family("RoiAlign")
def _roi(draw: Draw) -> Drawn:
    kind = draw.type()
    n = draw.size(1, 2)
    c = draw.size(1, 3)
    h = draw.size(3, 8)
    w = draw.size(3, 8)
    count = draw.size(1, 3)
    x = draw.numbers((n, c, h, w), kind)
    low = draw.rng.uniform(0, 3, (count, 2))
    high = low + draw.rng.uniform(0.2, 4, (count, 2))
    boxes = np.concatenate((low, high), 1).astype(kind)
    batch = draw.rng.integers(0, n, count)
    attrs = {
        "mode": draw.pick("avg", "max"), "output_height": draw.size(1, 3),
        "output_width": draw.size(1, 3), "sampling_ratio": draw.size(0, 2),
        "spatial_scale": draw.pick(1.0, 0.5),
        "coordinate_transformation_mode": draw.pick("half_pixel", "output_half_pixel"),
    }  # fmt: skip
    return [x, boxes, batch.astype(np.int64)], attrs, 1


# -- resizing and sampling ------------------------------------------------------------------------
MODES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize", "tf_half_pixel_for_nn",
)  # fmt: skip


@family("Resize", stored=(1, 2, 3))
def _resize(draw: Draw) -> Drawn:
    rank = draw.pick(1, 2, 3, 4, 4)
    shape = draw.sizes(rank, 1, 7)
    whole = rank == 4 and draw.chance(0.6)
    kind = draw.type()
    x = draw.numbers(shape, kind)
    scales = np.array([draw.pick(0.5, 0.6, 0.7, 1, 1.3, 1.5, 2, 2.3, 3) for _ in shape], np.float32)
    if whole:
        scales[:2] = 1
    scales = np.maximum(scales, (1 / np.array(shape)).astype(np.float32))
    if draw.opset < 11:
        return [x, scales], {"mode": draw.pick("nearest", "linear")}, 1
    how = draw.pick(*(MODES if draw.opset < 13 else MODES[:6]))
    attrs: dict[str, Any] = {
        "mode": draw.pick("nearest", "nearest", "linear", "cubic"),
        "coordinate_transformation_mode": how,
        "nearest_mode": draw.pick("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    }  # fmt: skip
    if draw.chance(0.3):
        attrs |= {"cubic_coeff_a": -0.5, "exclude_outside": draw.size(0, 1)}
    if draw.chance(0.2) and attrs["mode"] != "nearest":
        attrs["antialias"] = 1
    roi = None
    if how == "tf_crop_and_resize":
        attrs["extrapolation_value"] = 7.0
        low = draw.rng.uniform(-0.2, 0.5, rank)
        roi = np.concatenate((low, low + draw.rng.uniform(0.2, 0.8, rank))).astype(np.float32)
        if whole:
            roi[[0, 1]] = 0
            roi[[rank, rank + 1]] = 1
    empty = np.zeros(0, np.float32) if draw.opset < 13 else None
    roi = empty if roi is None else roi
    if draw.chance():
        return [x, roi, scales], attrs, 1
    sizes = np.maximum(np.floor(np.array(shape) * scales), 1).astype(np.int64)
    if draw.chance(0.3):
        attrs["keep_aspect_ratio_policy"] = draw.pick("stretch", "not_larger", "not_smaller")
    return [x, roi, empty, sizes], attrs, 1


@family("Upsample", stored=(1,))
def _upsample(draw: Draw) -> Drawn:
    shape = draw.sizes(4, 1, 5)
    scales = [1.0, 1.0, *(float(draw.pick(1, 1.3, 1.5, 2, 3)) for _ in range(2))]
    x = draw.numbers(shape, draw.type())
    attrs = {"mode": draw.pick("nearest", "linear"), "scales": scales}
    return [x, np.array(scales, np.float32)], attrs, 1


@family("GridSample")
def _grid_sample(draw: Draw) -> Drawn:
    rank = 3 if draw.opset >= 20 and draw.chance(0.3) else 2
    n, c = draw.sizes(2, 1, 2)
    x = draw.numbers((n, c, *draw.sizes(rank, 2, 6)), draw.pick("float32", "float32", "float64"))
    grid = draw.rng.uniform(-1.6, 1.6, (n, *draw.sizes(rank, 1, 5), rank)).astype(x.dtype)
    old = draw.opset < 20
    modes = ("bilinear", "nearest", "bicubic") if old else ("linear", "nearest", "cubic")
    attrs = {
        "mode": draw.pick(*(modes if rank == 2 else modes[:2])),
        "padding_mode": draw.pick("zeros", "border", "reflection"),
        "align_corners": draw.size(0, 1),
    }  # fmt: skip
    return [x, grid], attrs, 1


@family("AffineGrid", stored=(1,))
def _affine_grid(draw: Draw) -> Drawn:
    rank = draw.size(2, 3)
    n = draw.size(1, 2)
    theta = draw.numbers((n, rank, rank + 1), draw.pick("float32", "float64"))
    size = np.array([n, 1, *draw.sizes(rank, 2, 5)], np.int64)
    return [theta, size], {"align_corners": draw.size(0, 1)}, 1


@family("Col2Im", stored=(1, 2))
def _col2im(draw: Draw) -> Drawn:
    rank = draw.pick(1, 2)
    image, attrs = _window(draw, rank)
    attrs.pop("auto_pad", None)
    kernel = attrs.pop("kernel_shape")
    strides = attrs.get("strides", (1,) * rank)
    dilations = attrs.get("dilations", (1,) * rank)
    pads = attrs.get("pads", (0,) * (2 * rank))
    out = [
        (n + pads[i] + pads[i + rank] - (k - 1) * d - 1) // s + 1
        for i, (n, k, s, d) in enumerate(zip(image, kernel, strides, dilations, strict=True))
    ]
    c = draw.size(1, 2)
    x = draw.numbers((draw.size(1, 2), c * int(np.prod(kernel)), int(np.prod(out))))
    return [x, np.array(image), np.array(kernel)], attrs, 1


# -- layers over sequences ------------------------------------------------------------------------
ACTIVATIONS = ("Sigmoid", "Tanh", "Relu", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh",
               "HardSigmoid", "Elu", "Softsign", "Softplus")  # fmt: skip


@family("RNN", "GRU", "LSTM", stored=(1, 2, 3, 4, 7))
def _recurrent(draw: Draw) -> Drawn:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[draw.op]
    steps, batch, width, hidden = draw.sizes(4, 1, 4)
    way = draw.pick("forward", "reverse", "bidirectional")
    directions = 2 if way == "bidirectional" else 1
    layout = 1 if draw.opset >= 14 and draw.chance(0.25) else 0
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": way, "layout": layout}
    x = draw.numbers((batch, steps, width) if layout else (steps, batch, width), scale=1.0)
    w = draw.numbers((directions, gates * hidden, width), scale=0.7)
    r = draw.numbers((directions, gates * hidden, hidden), scale=0.7)
    b = draw.numbers((directions, 2 * gates * hidden), scale=0.5) if draw.chance(0.7) else None
    lengths = None
    if draw.chance(0.4):
        lengths = draw.rng.integers(1, steps + 1, batch).astype(np.int32)
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    h = draw.numbers(state, scale=0.5) if draw.chance() else None
    inputs = [x, w, r, b, lengths, h]
    if draw.op == "LSTM":
        c = draw.numbers(state, scale=0.5) if draw.chance() else None
        p = draw.numbers((directions, 3 * hidden), scale=0.5) if draw.chance(0.3) else None
        inputs += [c, p]
        attrs["input_forget"] = int(draw.chance(0.15))
    if draw.op == "GRU":
        attrs["linear_before_reset"] = draw.size(0, 1)
    if draw.chance(0.2):
        attrs["clip"] = 0.5
    if draw.chance(0.3):
        count = {"RNN": 1, "GRU": 2, "LSTM": 3}[draw.op]
        attrs["activations"] = [draw.pick(*ACTIVATIONS) for _ in range(count * directions)]
        if any(a in ("Affine", "ScaledTanh") for a in attrs["activations"]):
            attrs["activation_alpha"] = [0.5] * len(attrs["activations"])
            attrs["activation_beta"] = [0.25] * len(attrs["activations"])
    return inputs, attrs, draw.size(1, 3 if draw.op == "LSTM" else 2)


@family("Attention")
def _attention(draw: Draw) -> Drawn:
    n, heads, q, k, d, e = draw.sizes(6, 1, 4)
    groups = draw.size(1, 2)
    kind = draw.pick("float32", "float32", "float16")
    values = [draw.numbers(s, kind, 1.0) for s in
              ((n, heads * groups, q, d), (n, heads, k, d), (n, heads, k, e))]  # fmt: skip
    attrs: dict[str, Any] = {"is_causal": draw.size(0, 1)}
    if draw.chance(0.3):
        attrs["softcap"] = 2.0
    if draw.chance(0.3):
        attrs["scale"] = 0.3
    past = draw.size(1, 3) if draw.chance(0.3) else 0
    mask = None
    if draw.chance():
        mask = draw.numbers((q, k + past), draw.pick("bool", kind))
    inputs = [*values, mask]
    if past:
        inputs += [draw.numbers((n, heads, past, d), kind), draw.numbers((n, heads, past, e), kind)]
    outputs = 1
    if past or draw.chance(0.3):
        outputs = draw.pick(3, 4) if past else draw.pick(1, 1)
    if outputs == 4:
        attrs["qk_matmul_output_mode"] = draw.size(0, 3)
    return inputs, attrs, outputs


@family("RotaryEmbedding")
def _rotary(draw: Draw) -> Drawn:
    n, heads, s, half = draw.sizes(4, 1, 4)
    width = 2 * half + 2 * draw.size(0, 1)
    kind = draw.pick("float32", "float16")
    x = draw.numbers((n, heads, s, width), kind, 1.0)
    partial = 0 if width == 2 * half else 2 * half
    attrs = {"interleaved": draw.size(0, 1), "rotary_embedding_dim": partial}
    if draw.chance():
        table = (s + 3, half)
        ids = draw.rng.integers(0, s + 3, (n, s))
        return [x, draw.numbers(table, kind), draw.numbers(table, kind), ids], attrs, 1
    table = (n, s, half)
    return [x, draw.numbers(table, kind), draw.numbers(table, kind)], attrs, 1


# -- normalisation --------------------------------------------------------------------------------
@family("BatchNormalization", stored=(1, 2, 3, 4))
def _batch_norm(draw: Draw) -> Drawn:
    shape = draw.shape(2, 5)
    kind = draw.type()
    tables = [draw.numbers((shape[1],), kind) for _ in range(3)]
    variance = (np.abs(draw.numbers((shape[1],), kind)) + 0.5).astype(kind)
    attrs: dict[str, Any] = {"epsilon": draw.pick(1e-5, 1e-2)}
    outputs = 1
    if draw.opset >= 14 and draw.chance(0.2):
        attrs |= {"training_mode": 1, "momentum": 0.7}
        outputs = 3
    return [draw.numbers(shape, kind), *tables, variance], attrs, outputs


@family("InstanceNormalization", "GroupNormalization", stored=(1, 2))
def _group_norm(draw: Draw) -> Drawn:
    groups = draw.size(1, 3)
    shape = (draw.size(1, 2), groups * draw.size(1, 3), *draw.shape(1, 3))
    kind = draw.pick("float32", "float32", "float64")
    per = groups if draw.op == "GroupNormalization" and draw.opset < 21 else shape[1]
    tables = [draw.numbers((per,), kind) for _ in range(2)]
    attrs = {"epsilon": draw.pick(1e-5, 1e-2), "num_groups": groups}
    return [draw.numbers(shape, kind), *tables], attrs, 1


@family("LayerNormalization", "RMSNormalization", stored=(1, 2))
def _layer_norm(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(-len(shape), len(shape) - 1)
    tail = shape[axis % len(shape) :]
    kind = draw.pick("float32", "float32", "float64", "float16")
    bias = draw.numbers(tail, kind) if draw.chance() else None
    attrs = {"axis": axis, "epsilon": draw.pick(1e-5, 1e-2)}
    return [draw.numbers(shape, kind), draw.numbers(tail, kind), bias], attrs, draw.size(1, 3)


@family("LRN")
def _lrn(draw: Draw) -> Drawn:
    attrs = {"size": draw.pick(1, 2, 3, 4, 5), "alpha": 0.3, "beta": 0.7, "bias": 1.5}
    return [draw.numbers(draw.shape(2, 4), draw.type())], attrs, 1


@family("MeanVarianceNormalization")
def _mvn(draw: Draw) -> Drawn:
    x = draw.numbers(draw.sizes(4, 2, 4), draw.type())
    return [x], {"axes": draw.pick([0, 2, 3], [2, 3], [1, 2, 3])}, 1


# -- moves ----------------------------------------------------------------------------------------
@family("Transpose")
def _transpose(draw: Draw) -> Drawn:
    shape = draw.shape(0, 5)
    perm = [int(p) for p in draw.rng.permutation(len(shape))]
    given = bool(shape) and draw.chance(0.7)
    return [draw.numbers(shape, draw.type())], {"perm": perm} if given else {}, 1


@family("Reshape", stored=(1,))
def _reshape(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    total = int(np.prod(shape))
    target = draw.pick([-1], [total], [1, -1], [*shape[:1], -1], [0, -1], list(shape))
    return [draw.numbers(shape, draw.type()), np.array(target, np.int64)], {}, 1


@family("Flatten")
def _flatten(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    return [draw.numbers(shape, draw.type())], {"axis": draw.size(0, len(shape))}, 1


@family("Squeeze", "Unsqueeze", stored=(1,))
def _squeeze(draw: Draw) -> Drawn:
    shape = tuple(1 if draw.chance() else n for n in draw.shape(1))
    x = draw.numbers(shape, draw.type())
    ones = [i for i, n in enumerate(shape) if n == 1]
    axes = ones if draw.op == "Squeeze" else [0, 2][: draw.size(1, min(2, len(shape)))]
    if not axes:
        return [x], {}, 1
    return [x, np.array(axes, np.int64)], {"axes": axes}, 1


@family("Expand", "Tile", stored=(1,))
def _expand(draw: Draw) -> Drawn:
    shape = tuple(1 if draw.chance() else n for n in draw.shape(1))
    x = draw.numbers(shape, draw.type())
    target = tuple(draw.size(1, 3) if n == 1 or draw.op == "Tile" else n for n in shape)
    return [x, np.array(target, np.int64)], {}, 1


@family("Concat")
def _concat(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    kind = draw.type()
    axis = draw.size(0, len(shape) - 1)
    parts = [
        draw.numbers((*shape[:axis], draw.size(1, 3), *shape[axis + 1 :]), kind)
        for _ in range(draw.size(1, 3))
    ]
    return parts, {"axis": axis}, 1


@family("Split", stored=(1,))
def _split(draw: Draw) -> Drawn:
    shape = list(draw.shape(1))
    axis = draw.size(0, len(shape) - 1)
    parts = draw.sizes(draw.size(1, 3), 1, 3)
    shape[axis] = sum(parts)
    x = draw.numbers(tuple(shape), draw.type())
    if draw.opset < 13:
        return [x], {"axis": axis, "split": parts}, len(parts)
    if draw.opset >= 18 and draw.chance():
        size = -(-shape[axis] // len(parts))
        if -(-shape[axis] // size) == len(parts):
            return [x], {"axis": axis, "num_outputs": len(parts)}, len(parts)
    return [x, np.array(parts, np.int64)], {"axis": axis}, len(parts)


@family("Slice", stored=(1, 2, 3, 4))
def _slice(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    rank = len(shape)
    axes = [int(a) for a in draw.rng.permutation(rank)[: draw.size(1, rank)]]
    starts = []
    ends = []
    steps = []
    for axis in axes:
        step = draw.pick(1, 1, 2, -1, -2) if draw.opset >= 10 else 1
        begin, end = sorted((draw.size(0, shape[axis] - 1), draw.size(0, shape[axis])))
        end = max(end, begin + 1)
        starts.append(begin if step > 0 else end - 1)
        ends.append(end if step > 0 else (begin - 1 if begin else -(2**31)))
        steps.append(step)
    x = draw.numbers(shape, draw.type())
    if draw.opset < 10:
        return [x], {"axes": axes, "starts": starts, "ends": ends}, 1
    kind = draw.pick(np.int32, np.int64)
    return [x, *(np.array(v, kind) for v in (starts, ends, axes, steps))], {}, 1


@family("Pad", stored=(1, 2, 3))
def _pad(draw: Draw) -> Drawn:
    shape = tuple(n + 1 for n in draw.shape(1))
    mode = draw.pick("constant", "reflect", "edge", *(("wrap",) if draw.opset >= 19 else ()))
    low = -1 if mode == "constant" else 0
    pads = [draw.size(low, 1) for _ in range(2 * len(shape))]
    x = draw.numbers(tuple(n + 2 for n in shape), draw.type())
    if draw.opset < 11:
        return [x], {"pads": pads, "mode": mode, "value": 3.0}, 1
    value = np.array(3, x.dtype) if draw.chance() and mode == "constant" else None
    return [x, np.array(pads, np.int64), value], {"mode": mode}, 1


@family("Gather", "GatherElements")
def _gather(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(0, len(shape) - 1)
    low = -shape[axis] if draw.opset >= 11 else 0
    like = (
        tuple(draw.size(1, n) for n in shape) if draw.op == "GatherElements" else draw.shape(0, 2)
    )
    index = draw.rng.integers(low, shape[axis], like).astype(draw.pick("int32", "int64"))
    return [draw.numbers(shape, draw.type()), index], {"axis": axis}, 1


@family("GatherND")
def _gather_nd(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    batch = draw.size(0, len(shape) - 1) if draw.opset >= 12 else 0
    depth = draw.size(1, len(shape) - batch)
    lead = (*shape[:batch], *draw.shape(0, 1))
    limits = shape[batch : batch + depth]
    index = np.stack([draw.rng.integers(-n, n, lead) for n in limits], -1)
    return [draw.numbers(shape, draw.type()), index], {"batch_dims": batch}, 1


@family("ScatterElements", "Scatter")
def _scatter_elements(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(0, len(shape) - 1)
    kind = draw.type()
    reduction = "none"
    if draw.opset >= 16 and kind != "bool":
        reduction = draw.pick("none", "add", "mul", *(("max", "min") if draw.opset >= 18 else ()))
    like = tuple(draw.size(1, n) for n in shape)
    places = draw.rng.permuted(np.broadcast_to(
        np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape),
        axis=axis)  # fmt: skip
    index = places[tuple(slice(0, n) for n in like)].astype(np.int64)
    if reduction != "none" and draw.chance():
        index = index * 0
    values = [draw.numbers(shape, kind), index, draw.numbers(like, kind)]
    return values, {"axis": axis, "reduction": reduction}, 1


@family("ScatterND")
def _scatter_nd(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    depth = draw.size(1, len(shape))
    kind = draw.type()
    limits = shape[:depth]
    count = draw.size(1, int(np.prod(limits)))
    flat = draw.rng.permutation(int(np.prod(limits)))[:count]
    index = np.stack(np.unravel_index(flat, limits), -1).astype(np.int64)
    reduction = "none"
    if draw.opset >= 16 and kind != "bool":
        reduction = draw.pick("none", "add", "mul", *(("max", "min") if draw.opset >= 18 else ()))
    values = [draw.numbers(shape, kind), index, draw.numbers((count, *shape[depth:]), kind)]
    return values, {"reduction": reduction}, 1


@family("TopK", stored=(1,))
def _top_k(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(-len(shape) if draw.opset >= 11 else 0, len(shape) - 1)
    x = draw.numbers(shape, draw.type())
    k = draw.size(1, shape[axis])
    attrs = {"axis": axis, "largest": draw.size(0, 1), "sorted": 1, "k": k}
    return [x, np.array([k], np.int64)], attrs, 2


@family("Unique")
def _unique(draw: Draw) -> Drawn:
    x = np.round(draw.numbers(draw.shape(1, 3), draw.pick("float32", "int64")))
    attrs = {"sorted": draw.size(0, 1)}
    if draw.chance():
        attrs["axis"] = draw.size(0, x.ndim - 1)
    return [x], attrs, draw.size(1, 4)


@family("OneHot", stored=(1,))
def _one_hot(draw: Draw) -> Drawn:
    shape = draw.shape(0, 3)
    depth = draw.size(1, 5)
    index = draw.rng.integers(-depth - 1, depth + 2, shape).astype(draw.pick("int64", "float32"))
    axis = draw.size(-len(shape) - 1, len(shape)) if draw.opset >= 11 else -1
    values = np.array([0, 3], draw.pick("float32", "int64"))
    return [index, np.array(depth, np.int64), values], {"axis": axis}, 1


@family("Compress")
def _compress(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(0, len(shape) - 1)
    size = shape[axis] if draw.chance(0.6) else None
    mask = draw.rng.integers(0, 2, size or int(np.prod(shape))).astype(bool)
    attrs = {"axis": axis} if size else {}
    return [draw.numbers(shape, draw.type()), mask], attrs, 1


@family("ReverseSequence")
def _reverse_sequence(draw: Draw) -> Drawn:
    batch = draw.size(0, 1)
    shape = (*draw.sizes(2, 1, 4), *draw.shape(0, 2))
    lengths = draw.rng.integers(1, shape[1 - batch] + 1, shape[batch])
    attrs = {"batch_axis": batch, "time_axis": 1 - batch}
    return [draw.numbers(shape, draw.type()), lengths], attrs, 1


@family("DepthToSpace", "SpaceToDepth")
def _blocks(draw: Draw) -> Drawn:
    block, n, c, h, w = draw.size(1, 3), *draw.sizes(4, 1, 3)
    deep = draw.op == "DepthToSpace"
    shape = (n, c * block**2, h, w) if deep else (n, c, h * block, w * block)
    return [draw.numbers(shape)], {"blocksize": block, "mode": draw.pick("DCR", "CRD")}, 1


@family("Trilu", stored=(1,))
def _trilu(draw: Draw) -> Drawn:
    x = draw.numbers(draw.shape(2), draw.type())
    k = np.array(draw.size(-3, 3), np.int64) if draw.chance() else None
    return [x, k], {"upper": draw.size(0, 1)}, 1


@family("CenterCropPad", stored=(1,))
def _center_crop_pad(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    return [draw.numbers(shape), np.array(draw.sizes(len(shape), 1, 6), np.int64)], {}, 1


@family("EyeLike", "Shape")
def _eye_like(draw: Draw) -> Drawn:
    shape = draw.sizes(2, 1, 4)
    attrs = {"k": draw.size(-2, 2)} if draw.op == "EyeLike" else {"start": draw.size(-1, 1)}
    return [draw.numbers(shape, draw.type())], attrs, 1


@family("ConstantOfShape", stored=(0,))
def _constant_of_shape(draw: Draw) -> Drawn:
    value = numpy_helper.from_array(np.array([draw.size(0, 5)], draw.pick("float32", "int64")))
    return [np.array(draw.shape(1), np.int64)], {"value": value}, 1


@family("Range", stored=(0, 1, 2))
def _range(draw: Draw) -> Drawn:
    kind = draw.pick("int32", "int64", "float32")
    return [np.array(v, kind) for v in draw.pick((0, 5, 1), (7, 1, -2), (1, 6, 2))], {}, 1


# -- signals and small matrices -------------------------------------------------------------------
@family("DFT", stored=(1, 2))
def _dft(draw: Draw) -> Drawn:
    parts = draw.size(1, 2)
    n = draw.size(1, 3)
    size = draw.size(2, 8)
    inverse = draw.size(0, 1)
    onesided = int(parts == 1 and not inverse and draw.chance())
    x = draw.numbers((n, size, parts))
    length = np.array(draw.size(2, 9), np.int64) if draw.chance(0.3) else None
    attrs = {"axis": 1, "inverse": inverse, "onesided": onesided}
    return [x, length, np.array(1, np.int64)], attrs, 1


@family("HannWindow", "HammingWindow", "BlackmanWindow", stored=(0,))
def _window_function(draw: Draw) -> Drawn:
    return [np.array(draw.size(2, 9), np.int64)], {"periodic": draw.size(0, 1)}, 1


# -- quantised ------------------------------------------------------------------------------------
@family("QuantizeLinear", "DequantizeLinear", stored=(1, 2))
def _quantise(draw: Draw) -> Drawn:
    shape = draw.shape(1)
    axis = draw.size(0, len(shape) - 1)
    per_axis = draw.opset >= 13 and draw.chance()
    many = (shape[axis],) if per_axis else ()
    scale = draw.rng.uniform(0.05, 0.5, many).astype(np.float32)
    kind = draw.pick("uint8", "int8")
    point = draw.rng.integers(0, 9, many).astype(kind) if draw.chance() else None
    attrs = {"axis": axis} if per_axis else {}
    if draw.op == "QuantizeLinear":
        return [draw.numbers(shape, scale=9.0), scale, point], attrs, 1
    return [draw.rng.integers(0, 120, shape).astype(kind), scale, point], attrs, 1


@family("DynamicQuantizeLinear")
def _dynamic_quantise(draw: Draw) -> Drawn:
    return [draw.numbers(draw.shape(1))], {}, 3


@family("QLinearMatMul", stored=(1, 2, 3, 4, 5, 6, 7))
def _qlinear_matmul(draw: Draw) -> Drawn:
    m, k, n = draw.sizes(3, 1, 40)
    a = draw.rng.integers(0, 256, (m, k)).astype(np.uint8)
    b = draw.rng.integers(0, 256, (k, n)).astype(np.uint8).view(draw.pick("uint8", "int8"))
    scales = [np.array(v, np.float32) for v in (0.02, 0.03, 0.9)]
    points = [np.array(draw.size(0, 100), kind) for kind in (np.uint8, b.dtype, np.uint8)]
    return [a, scales[0], points[0], b, scales[1], points[1], scales[2], points[2]], {}, 1


@family("QLinearConv", stored=(1, 2, 3, 4, 5, 6, 7, 8))
def _qlinear_conv(draw: Draw) -> Drawn:
    (x, w, b), attrs, _ = _conv(draw)
    a = draw.rng.integers(0, 256, x.shape).astype(np.uint8)
    f = draw.rng.integers(0, 256, w.shape).astype(np.uint8).view(draw.pick("uint8", "int8"))
    scales = [np.array(v, np.float32) for v in (0.02, 0.03, 0.9)]
    points = [np.array(draw.size(0, 100), kind) for kind in (np.uint8, f.dtype, np.uint8)]
    bias = None if b is None else draw.rng.integers(-99, 99, b.shape).astype(np.int32)
    values = [a, scales[0], points[0], f, scales[1], points[1], scales[2], points[2], bias]
    return values, attrs, 1


@family("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(draw: Draw) -> Drawn:
    n = draw.size(1, 3)
    c = draw.size(2, 4)
    rest = draw.shape(0, 2)
    x = draw.numbers((n, c, *rest))
    target = draw.rng.integers(0, c, (n, *rest))
    weight = np.abs(draw.numbers((c,))) + np.float32(0.1) if draw.chance() else None
    attrs: dict[str, Any] = {"reduction": draw.pick("none", "sum", "mean")}
    if draw.chance(0.4):
        attrs["ignore_index"] = draw.size(0, c - 1)
        if (target == attrs["ignore_index"]).all():
            target.flat[0] = (attrs["ignore_index"] + 1) % c
    outputs = draw.size(1, 2) if draw.op == "SoftmaxCrossEntropyLoss" else 1
    return [x, target, weight], attrs, outputs

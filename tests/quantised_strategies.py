"""Random networks of quantise / dequantise pairs, as ONNX models, drawn by a seed.

Scales are chosen on the numbers that the network holds there, a third too small, so that tensors
saturate, or too large; sizes of numbers reach from 1e-5 to 1e3.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from quantised_witness import FP32, exact, follow

Array = np.ndarray
OPSET = 19
SIZES = (1.0, 1.0, 1.0, 1e-3, 2e-5, 50.0)
"""How large inputs are; at 1e-3 and below steps are too small for factors in fp16."""


LARGEST = 2e4
WHOLE = ("QuantizeLinear", "MatMulInteger", "ConvInteger")
"""Operators that write whole numbers."""


class Drawn:
    """A network being drawn: its nodes and tensors, and what the tensors hold on the samples."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.known: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self.pairs: set[str] = set()
        self.floats: list[str] = []

    # -- writing ------------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def constant(self, array: Any) -> str:
        name = f"c{len(self.stored)}"
        values = np.asarray(array)
        self.stored.append(numpy_helper.from_array(values, name))
        self.known[name] = exact(values)
        self.kinds[name] = values.dtype
        return name

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"t{len(self.nodes)}"
        made = helper.make_node(op, list(inputs), [name], f"{op.lower()}{len(self.nodes)}", **attrs)
        self.nodes.append(made)
        follow(made, self.known, self.kinds, FP32)
        if op not in ("DequantizeLinear", *WHOLE):
            self.floats.append(name)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.known[name].value.shape

    # -- eight bits ---------------------------------------------------------------------------
    def grid(self, values: Array) -> tuple[str, str]:
        """Return the names of a scale and a zero point for what a tensor holds."""
        low = float(min(values.min(), 0))
        high = float(max(values.max(), 0))
        kind = self.pick(np.int8, np.int8, np.uint8)
        least = np.iinfo(kind).min
        if self.chance(0.5):
            step = max(-low, high) / 127
            zero = least + 128
        else:
            step = (high - low) / 255
            zero = least + round(-low / step) if step else least
        step = np.float32((step or 1.0) * self.rng.choice([0.7, 1.0, 1.0, 1.2]))
        return self.constant(step), self.constant(kind(np.clip(zero, least, least + 255)))

    def pair(self, name: str, again: bool = True) -> str:
        """Return a tensor quantised and dequantised, often the pair that is there already."""
        if name in self.pairs:
            return name
        scale, zero = self.grid(self.known[name].value)
        whole = self.node("QuantizeLinear", name, scale, zero)
        found = self.node("DequantizeLinear", whole, scale, zero)
        self.pairs.add(found)
        self.floats.append(found)
        return found

    def weight(self, shape: tuple[int, ...], axis: int) -> tuple[str, Array]:
        """Return dequantised whole weights, and their scales."""
        each = self.chance(0.6)
        unsigned = self.chance(0.15)
        odd = self.chance(0.1)
        count = shape[axis] if each else 1
        fan_in = int(np.prod(shape)) // shape[axis]
        scales = np.exp(self.rng.normal(size=count)) * 0.014 / np.sqrt(fan_in)
        low = 0 if unsigned else -128
        whole = self.rng.integers(low, low + 256, shape).astype(np.uint8 if unsigned else np.int8)
        zero = np.full(count, 128 if unsigned else 0)
        if odd:
            zero = zero + self.rng.integers(-20, 20, count)
        if each and self.chance(0.3):
            place = [slice(None)] * len(shape)
            place[axis] = slice(0, 1)  # a channel of zeros, whose scale says nothing
            whole[tuple(place)] = zero[0]
            scales[0] = self.pick(1.0, 1e-12, float(scales[0]))
        scales = scales.astype(np.float32)
        zeros = zero.astype(whole.dtype)
        given = (scales, zeros) if each else (scales[0], zeros[0])
        names = [self.constant(a) for a in (whole, *given)]
        attrs = {"axis": axis} if each else {}
        return self.node("DequantizeLinear", *names, **attrs), scales

    def bias(self, x: str, scales: Array, channels: int, size: float) -> list[str]:
        """Return no bias, one in floats, or one in steps of the sums."""
        way = self.pick("none", "float", "float", "whole", "whole")
        if way == "none":
            return []
        values = self.rng.normal(size=channels) * size
        step = self.known[x].step
        if way == "float" or step is None or step.size > 1:
            return [self.constant(values.astype(np.float32))]
        steps = (scales * np.float32(step)).astype(np.float32)
        whole = np.clip(np.rint(values / steps), -(2**30), 2**30).astype(np.int32)
        each = scales.size > 1
        given = [self.constant(whole), self.constant(steps if each else steps[0])]
        given.append(self.constant(np.zeros(steps.size if each else (), np.int32)))
        return [self.node("DequantizeLinear", *given, **({"axis": 0} if each else {}))]

    # -- layers -------------------------------------------------------------------------------
    def conv(self, name: str) -> str:
        x = self.pair(name)
        size = self.shape(name)
        channels = size[1]
        groups = self.pick(1, 1, 1, channels, 2 if channels % 2 == 0 else 1)
        out = channels if groups == channels and self.chance(0.7) else groups * self.pick(2, 5, 8)
        kernel = tuple(self.pick(1, 3, 3) if n >= 3 else 1 for n in size[2:])
        if self.chance(0.4):
            out = channels if channels % groups == 0 else out
            attrs = {"pads": [k // 2 for k in kernel] * 2}
        else:
            pads = [int(self.rng.integers(0, 1 + k // 2 + (k > 1))) for k in kernel * 2]
            attrs = {"pads": pads, "strides": [self.pick(1, 1, 2) for _ in kernel]}
            wide = self.chance(0.3)
            dilations = [
                2 if wide and k == 3 and n >= 5 else 1
                for k, n in zip(kernel, size[2:], strict=True)
            ]
            attrs["dilations"] = dilations
        w, scales = self.weight((out, channels // groups, *kernel), 0)
        spread = float(np.std(self.known[x].value)) + 1e-12
        bias = self.bias(x, scales, out, spread)
        return self.node("Conv", x, w, *bias, group=groups, kernel_shape=list(kernel), **attrs)

    def product(self, name: str) -> str:
        x = self.pair(name)
        rows = self.shape(name)[-1]
        out = self.pick(3, 10, 16)
        turned = self.chance(0.5)
        spread = float(np.std(self.known[x].value)) + 1e-12
        if len(self.shape(name)) == 2 and self.chance(0.7):
            w, scales = self.weight((out, rows) if turned else (rows, out), 0 if turned else 1)
            bias = self.bias(x, scales, out, spread)
            return self.node("Gemm", x, w, *bias, transB=int(turned))
        w, scales = self.weight((rows, out), 1)
        y = self.node("MatMul", x, w)
        if self.chance(0.5):
            bias = (self.rng.normal(size=out) * spread).astype(np.float32)
            y = self.node("Add", y, self.constant(bias))
        return y

    def whole_product(self, name: str) -> str:
        """Return a product of whole numbers by the standard's integer operators, scaled."""
        scale, zero = self.grid(self.known[name].value)
        q = self.node("QuantizeLinear", name, scale, zero)
        shape = self.shape(name)
        image = len(shape) == 4
        wide = (self.pick(4, 6), shape[1], 3, 3) if image else (shape[-1], 5)
        whole = self.constant(self.rng.integers(-128, 128, wide).astype(np.int8))
        zeros = [zero] + ([self.constant(np.int8(self.pick(0, 3)))] if self.chance(0.4) else [])
        if image:
            sums = self.node("ConvInteger", q, whole, *zeros, pads=[1] * 4, kernel_shape=[3, 3])
        else:
            sums = self.node("MatMulInteger", q, whole, *zeros)
        floats = self.node("Cast", sums, to=TensorProto.FLOAT)
        step = np.float32(0.01 / np.sqrt(np.prod(wide[1:]))) * np.float32(self.known[scale].value)
        return self.node("Mul", floats, self.constant(step))

    def limited(self, name: str) -> str:
        most = float(np.abs(self.known[name].value).max()) or 1.0
        way = self.pick("relu", "relu", "clip", "none")
        if way == "relu":
            return self.node("Relu", name)
        if way == "clip":
            low = self.pick(0.0, 0.0, -0.3 * most)
            ends = [self.constant(np.float32(n)) for n in (low, 0.6 * most)]
            return self.node("Clip", name, *ends)
        return name

    def summand(self, name: str) -> str:
        """Return the sum with another tensor of the same shape, in floats or in bytes."""
        alike = [n for n in self.floats if self.shape(n) == self.shape(name) and n != name]
        if not alike:
            return name
        other = self.pick(*alike[-4:])
        sides = [self.pair(n) if self.chance(0.4) else n for n in (name, other)]
        return self.node("Add", *(sides if self.chance(0.5) else sides[::-1]))

    def pooled(self, name: str) -> str:
        size = self.shape(name)
        if min(size[2:]) < 3:
            return name
        x = self.pair(name) if self.chance(0.7) else name
        rank = len(size) - 2
        attrs = {"kernel_shape": [self.pick(2, 3)] * rank, "strides": [self.pick(1, 2)] * rank}
        attrs["pads"] = [self.pick(0, 1)] * (2 * rank)
        if self.chance(0.6):
            return self.node("MaxPool", x, **attrs)
        return self.node("AveragePool", x, count_include_pad=self.pick(0, 1), **attrs)

    def joined(self, name: str) -> str:
        size = self.shape(name)
        alike = [n for n in self.floats
                 if len(self.shape(n)) == len(size)
                 and (self.shape(n)[0], *self.shape(n)[2:]) == (size[0], *size[2:])]  # fmt: skip
        other = self.pick(*alike[-4:])
        sides = [self.pair(n) if self.chance(0.7) else n for n in (name, other)]
        return self.node("Concat", *sides, axis=1)

    # -- whole networks -----------------------------------------------------------------------
    def body(self, x: str) -> str:
        for _ in range(int(self.rng.integers(1, 5))):
            rank = len(self.shape(x))
            if rank == 2:
                ways = (self.product, self.product, self.summand, self.limited, self.whole_product)
            else:
                ways = (self.conv, self.conv, self.conv, self.summand, self.pooled, self.joined,
                        self.limited, self.whole_product if rank == 4 else self.conv)  # fmt: skip
            x = self.pick(*ways)(x)
            if self.chance(0.4):
                x = self.limited(x)
            if self.chance(0.5):
                x = self.summand(x)
            if self.chance(0.3):
                x = self.pair(x)
        return x


def network(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model of opset 19 and what to feed it; another where fp16 would overflow."""
    net = Drawn(seed)
    found = drawn(net, seed)
    sums = {node.output[0] for node in net.nodes if node.op_type in ("Cast", *WHOLE)}
    floats = (net.known[name].value for name in net.floats if name not in sums)
    return found if all(np.abs(v).max() < LARGEST for v in floats) else network(seed + 1_000_000)


def drawn(net: Drawn, seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    rank = net.pick(2, 3, 4, 4, 4)
    size = tuple(int(net.rng.integers(low, 9)) for low in (5, 5))[: max(rank - 2, 0)]
    shape = (net.pick(1, 2, 3), net.pick(2, 3, 6, 16, 20), *size)
    large = net.pick(*SIZES)
    x = (net.rng.normal(size=shape) * large).astype(np.float32)
    x = x.astype(np.float16).astype(np.float32)  # what the kernels are given is what is meant
    net.known["x"] = exact(x)
    net.floats.append("x")
    y = net.body("x")
    if rank > 2 and net.chance(0.4):
        if net.chance(0.6):
            y = net.node("GlobalAveragePool", net.pair(y) if net.chance(0.5) else y)
        y = net.product(net.node("Flatten", net.pair(y) if net.chance(0.5) else y))
    if net.chance(0.5):
        y = net.pair(y)
    if y == "x":
        y = net.pair(y)
    entries = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)]
    graph = helper.make_graph(net.nodes, f"drawn{seed}", entries, outs, net.stored)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {"x": x}

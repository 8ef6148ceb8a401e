"""Another number format for a graph: fp16 or bf16 throughout; int8 for products and convolutions.

int8: y = (sx sw) (qx qw + qb), qx = round(x / sx), symmetric, one scale each, sx = max|x| / 127.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.graph.draft import Draft, given_attrs
from ascend_lab.graph.evaluate import evaluate, random_inputs
from ascend_lab.graph.ir import (
    Constant,
    Fill,
    Graph,
    Node,
    Seeded,
    TensorType,
    Values,
    infer,
    operator_of,
)
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep
from ascend_lab.ops.formats import FLOATS

LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38, "fp32": 3.4028234663852886e38}
HEAVY = ("conv2d", "matmul", "gemm")
STEPS = 127
"""Largest number used in int8: symmetric around 0, so that -128 is left out."""


# -- fp16, bf16 -----------------------------------------------------------------------------------
def convert(graph: Graph, dtype: str, source: str = "fp32") -> tuple[Graph, int]:
    """Compute in `dtype` what is computed in `source`: inputs, constants and outputs change too.

    What an operator keeps in a format of its own stays (batch norm's statistics in fp32, indices),
    and so does what scales int32 sums, which only fp32 holds; constants beyond the largest number
    of `dtype` become that number.
    """
    if not any(kind.dtype == source for kind in graph.types.values()):
        return graph, 0
    state = _Conversion(graph, dtype, source)
    for node in graph.nodes:
        state.node(node)
    if not state.count:
        return graph, 0
    for name in graph.outputs:
        if graph.types[name].dtype == source and state.draft.types[name].dtype == source:
            state.cast_output(name)
    return state.draft.finish(), state.count


class _Conversion:
    """The graph converted so far; `names` holds each tensor in each format it exists in."""

    def __init__(self, graph: Graph, dtype: str, source: str) -> None:
        self.graph, self.dtype, self.source = graph, dtype, source
        self.draft = Draft(graph, nodes=())
        self.names: dict[tuple[str, str], str] = {}
        self.sums: set[str] = set()
        self.count = 0
        for name in graph.inputs:
            if graph.types[name].dtype == source:
                self.draft.types[name] = replace(graph.types[name], dtype=dtype)
                self.count += 1

    def wanted(self, name: str, dtype: str) -> str:
        """Return the name of a tensor in a format: itself, a converted constant, or a cast."""
        draft, constant = self.draft, self.draft.constants.get(name)
        if draft.types[name].dtype == dtype:
            return name
        if (name, dtype) not in self.names:
            if constant is not None:
                new = draft.add(in_format(constant, dtype), f"{name}_{dtype}")
                self.count += 1
            else:
                new = draft.new_name(f"{name}_{dtype}")
                kind = replace(draft.types[name], dtype=dtype)
                draft.put(Node(new, "cast", (name,), (new,), {"dtype": dtype}), kind)
            self.names[name, dtype] = new
        return self.names[name, dtype]

    def node(self, node: Node) -> None:
        """Append a node in the format it computes in now, its inputs cast where they differ."""
        operator = operator_of(node.op)
        names, rule = operator.names(len(node.inputs)), operator.types
        before = tuple(t.dtype for t in self.graph.in_types(node))
        main = rule.main(names, before)
        attrs = operator.settings(node.attrs)
        kept = self.scales_sums(node, before)
        if not kept:
            attrs = {k: self.dtype if v == self.source else v for k, v in attrs.items()}
        if node.op == "cast" or kept:
            formats = tuple(self.draft.types[name].dtype for name in node.inputs)
        else:
            moves = main == self.source and self.dtype in rule.allowed
            self.count += moves
            main = self.dtype if moves else main
            formats = rule.inputs(names, main, attrs)
        inputs = tuple(map(self.wanted, node.inputs, formats))
        kinds = infer(node.op, [self.draft.types[name] for name in inputs], attrs)
        given = given_attrs(node.op, attrs)
        self.draft.put(Node(node.name, node.op, inputs, node.outputs, given), *kinds)

    def cast_output(self, name: str) -> None:
        """Let a graph output that is still in the old format be written by a cast."""
        draft = self.draft
        old, title = draft.new_name(f"{name}_{self.source}"), draft.new_name(f"{name}_cast")
        kind = draft.types[old] = draft.types[name]
        if name in draft.constants:
            draft.constants[old] = draft.constants.pop(name)
        for node in draft.nodes.values():
            inputs, outputs = (
                tuple(old if one == name else one for one in names)
                for names in (node.inputs, node.outputs)
            )
            draft.nodes[node.name] = replace(node, inputs=inputs, outputs=outputs)
        cast = Node(title, "cast", (old,), (name,), {"dtype": self.dtype})
        draft.put(cast, replace(kind, dtype=self.dtype))

    def scales_sums(self, node: Node, before: tuple[str, ...]) -> bool:
        """Tell whether a node casts int32 to the old format, or scales what such a cast gave."""
        casts = node.op == "cast" and before[0] == "int32" and node.attr("dtype") == self.source
        if casts:
            self.sums.add(node.output)
        return casts or (node.op == "muls" and node.inputs[0] in self.sums)


def in_format(constant: Constant, dtype: str) -> Constant:
    """Return a constant in another format: floats saturate; large ones convert when asked for."""
    kind = replace(constant.type, dtype=dtype)
    most = LARGEST.get(dtype, np.inf)
    if isinstance(constant.data, Seeded) and dtype in FLOATS:
        return Constant(kind, constant.data)
    if isinstance(constant.data, Fill):
        return Constant(kind, Fill(min(max(constant.data.value, -most), most)))

    def converted(values: Values) -> Values:
        wide = values.astype(np.float64)
        return np.where(np.isfinite(wide), np.clip(wide, -most, most), wide)

    return derived(kind, converted, constant)


# -- int8 -----------------------------------------------------------------------------------------
def weighted(graph: Graph) -> list[Node]:
    """Return the nodes that can run in int8: floats times constant weights."""
    return [
        node
        for node in graph.nodes
        if node.op in HEAVY
        and all(name in graph.constants for name in node.inputs[1:])
        and graph.types[node.inputs[0]].dtype != "int8"
        and not node.attr("trans_a")
        and graph.types[node.output].dtype == graph.types[node.inputs[0]].dtype
    ]


def measured_scales(graph: Graph, seed: int = 0) -> dict[str, float]:
    """Return max|x| / 127 of what those nodes read, in one run on seeded inputs."""
    names = tuple(dict.fromkeys(node.inputs[0] for node in weighted(graph)))
    values = evaluate(replace(graph, outputs=names), random_inputs(graph, seed)) if names else {}
    return {name: scale_of(array) for name, array in values.items()}


def scale_of(values: Values) -> float:
    """Return the step of a symmetric int8 scale that holds all values; 1 if all are 0."""
    most = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    return most / STEPS if most > 0 and np.isfinite(most) else 1.0


def quantise(graph: Graph, scales: Mapping[str, float] | None = None) -> tuple[Graph, int]:
    """Run convolutions and products with constant weights in int8.

    `scales` gives the step of each tensor they read; None measures it on seeded inputs.
    """
    known = measured_scales(graph) if scales is None else scales
    reads = {node.name: node.inputs[0] for node in weighted(graph) if node.inputs[0] in known}
    if not reads:
        return graph, 0

    def rule(draft: Draft, node: Node) -> bool:
        return node.name in reads and _in_int8(draft, node, known[reads[node.name]])

    return sweep(rule, *HEAVY)(graph)


def _in_int8(draft: Draft, node: Node, step: float) -> bool:
    out, options, gemm = draft.type(node.output), settings(node), node.op == "gemm"
    weight = draft.constants[node.inputs[1]]
    scale = scale_of(weight.array())
    reads = [
        _quantised(draft, node, step),
        _derived(draft, node.inputs[1], "int8", partial(_rounded, scale, STEPS, -STEPS)),
    ]
    if node.op == "conv2d" and len(node.inputs) > 2:  # the bias in int32, as the sums are
        whole = partial(_rounded, step * scale, 2**31 - 1, -(2**31))
        reads.append(_derived(draft, node.inputs[2], "int32", whole))
    drop = ("out_dtype", "alpha", "beta") if gemm else ("out_dtype",)
    attrs = {key: value for key, value in options.items() if key not in drop}
    sums = draft.insert("matmul" if gemm else node.op, reads, attrs, f"{node.name}_sums")
    wide = draft.insert("cast", [sums], {"dtype": "fp32"}, f"{node.name}_wide")
    factor = {"number": step * scale * float(options.get("alpha", 1.0))}
    if not gemm and out.dtype == "fp32":
        return draft.become(node, "muls", [wide], factor)
    y = draft.insert("muls", [wide], factor, f"{node.name}_scaled")
    if gemm:
        beta = float(options["beta"])
        summand = _derived(draft, node.inputs[2], "fp32", lambda v: v.astype(np.float64) * beta)
        y = draft.insert("add", [y, summand], {}, f"{node.name}_sum")
    return draft.become(node, "cast", [y], {"dtype": out.dtype})


def _quantised(draft: Draft, node: Node, step: float) -> str:
    """Return round(x / step) in int8, made once for all readers."""
    x = node.inputs[0]
    cast = draft.maker(f"{x}_int8")
    steps = None if cast is None or cast.op != "cast" else draft.maker(cast.inputs[0])
    if cast is not None and steps is not None and steps.inputs == (x,):
        return cast.output
    scaled = draft.insert("muls", [x], {"number": 1 / step}, f"{x}_steps")
    return draft.insert("cast", [scaled], {"dtype": "int8"}, f"{x}_int8")


def _derived(draft: Draft, name: str, dtype: str, compute: Callable[[Values], Values]) -> str:
    """Return a constant computed anew in another format."""
    old = draft.constants[draft.resolve(name)]
    made = derived(TensorType(old.type.shape, dtype), compute, old)
    return draft.add(made, f"{name}_{dtype}")


def _rounded(scale: float, most: int, least: int, values: Values) -> Values:
    return np.clip(np.rint(values.astype(np.float64) / scale), least, most)


FP16, BF16 = (
    Pass(name, "precision", partial(convert, dtype=dtype), summary, "changed")
    for name, dtype, summary in (
        ("Fp16ConversionPass", "fp16", "computes fp32 graphs in fp16"),
        ("Bf16ConversionPass", "bf16", "computes fp32 graphs in bf16"),
    )
)
INT8 = Pass(
    "Int8ConversionPass",
    "precision",
    quantise,
    "runs convolutions and products with constant weights in int8",
    "changed",
)

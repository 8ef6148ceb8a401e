"""The graph: operators that read and write named, typed tensors.

A graph is frozen data in static single assignment (SSA): every name is written once, by an input,
a constant or one node. Nodes are stored in topological order: each reads only tensors that come
before it. `ops.OPERATORS[node.op]` defines what a node computes and which attributes it takes.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import AscendLabError, GraphError, TypeMismatchError
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.machine.layout import FORMATS, AddressMap
from ascend_lab.operators.ops import REQUIRED, Operator, formats, get, slicing

Values = NDArray[Any]
Shape = tuple[int, ...]
MOVES = ("trans_data", "reshape", "transpose")
"""Operators that compute nothing: they change the order, the shape or the layout of elements."""
JOINS = ("concat", "slice", "split")
"""Operators that concatenate tensors along an axis, or cut one into pieces."""
IMAGES = "NC1HWC0"
"""Layout of images: channels in C1 blocks of C0 = 16, image after image (N outermost)."""
BLOCKS = "C1NHWC0"
"""The same blocks of channels with C1 outermost: block 0 of all images, then block 1, ..."""
SMALL_PIXELS = "NC1HWC0:4"
"""Images of up to 4 channels, 4 numbers a pixel: a network's first convolution may read them."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, number format and layout of a tensor; "ND" is row-major.

    The shape is the logical one in every layout; a layout in blocks stores padding, too. A block
    of int8 has 32 channels and one of fp16 has 16: both fill 32 bytes. A block of fp32 or int32 has
    the 16 channels that the cube writes, 64 bytes. ":16" after a layout means blocks of 16
    channels where the number format would have 32, as for int8 just cast from fp16.
    """

    shape: Shape
    dtype: str
    layout: str = "ND"

    @property
    def elements(self) -> int:
        """Number of elements, padding not included."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> Shape:
        """Shape of the row-major array that lies in memory, padding included."""
        # fp16[1, 3, 8, 8] in NC1HWC0 is stored as (1, 1, 8, 8, 16): 13 of 16 channels are padding
        return self.shape if self.layout == "ND" else self.map.storage_shape

    @property
    def map(self) -> AddressMap:
        """The address map: where in memory every element is stored."""
        # a scalar has the shape (): it is stored like a row of one element
        return formats.map_of(self.layout, self.shape or (1,), self.dtype)

    @property
    def data_bytes(self) -> int:
        """Bytes of the elements alone."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes in memory, padding of blocks included."""
        return math.prod(self.stored_shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        """Return the type as the text form writes it: fp16[1, 3, 8, 8]@NC1HWC0."""
        end = "" if self.layout == "ND" else f"@{self.layout}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{end}"


@dataclass(frozen=True, slots=True)
class Fill:
    """Constant data: one number everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Seeded:
    """Constant data drawn from a seed: normal with standard deviation `scale` around `mean`."""

    seed: int
    scale: float = 1.0
    mean: float = 0.0


Data = Values | Fill | Seeded | Callable[[], Values]


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor known when the graph is built; `array` computes large data when they are needed."""

    type: TensorType
    data: Data

    def array(self) -> Values:
        """Return the values as an array of the type's shape and format."""
        kind = formats.numpy_type(self.type.dtype)
        shape = self.type.shape
        if isinstance(self.data, Fill):
            # one number instead of an array: a bias of 1,000 zeros takes no memory
            return np.full(shape, self.data.value, kind)
        if isinstance(self.data, Seeded):
            rng = np.random.default_rng(self.data.seed)
            # drawn in fp32 and rounded once, so that every format gets the same numbers
            drawn = rng.standard_normal(shape, np.float32) * np.float32(self.data.scale)
            return (drawn + np.float32(self.data.mean)).astype(kind)
        values = np.asarray(self.data() if callable(self.data) else self.data)
        if values.shape != shape:
            raise GraphError(f"constant data of shape {shape}", str(values.shape), "fix the data")
        return values.astype(kind, copy=False)


Attrs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """One use of an operator: names read, names written, attributes other than the defaults."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)

    @property
    def output(self) -> str:
        """The first name written."""
        return self.outputs[0]

    def has(self, *traits: str) -> bool:
        """Tell whether the operator has at least one of these traits (`ops.operator.TRAITS`)."""
        return operator_of(self.op).has(*traits)

    def attr(self, key: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where the node does not set it."""
        return self.attrs.get(key, default)


@dataclass(frozen=True)
class Graph:
    """A network: inputs, outputs, nodes in order, the type of every name, constants by name.

    `narrowed` names int32 tensors that are int64 in the model. `evaluate` computes them in 64 bits;
    a kernel holds 32, and numbers beyond those raise an error. `elements` keeps, by the names of
    inputs and outputs, the model's element types for which graphs have no format, int64 and bool,
    so that an exported file has them again.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    narrowed: frozenset[str] = frozenset()
    elements: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash the cheap fields, which nearly always differ; equality still compares every node."""
        # hashing 500 nodes on each look-up in a cache would cost more than the caches save
        return hash((self.name, self.inputs, self.outputs, len(self.nodes)))

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that writes each name; inputs and constants have none."""
        # cached: a graph never changes, and passes ask this for every node
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each name, in graph order, each once; () if there are none."""
        readers: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            # mul(x, x) reads x twice and is one reader
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    def type_of(self, name: str) -> TensorType:
        """Return the type of a tensor; raise `GraphError` for an unknown name."""
        if name not in self.types:
            raise GraphError(f"{self.name}: a tensor of the graph", repr(name), "check the name")
        return self.types[name]

    def node(self, name: str) -> Node:
        """Return a node by name; raise `GraphError` for an unknown one."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(f"{self.name}: a node of the graph", repr(name), "check the name")

    def in_types(self, node: Node) -> tuple[TensorType, ...]:
        """Return the types a node reads."""
        return tuple(self.types[name] for name in node.inputs)

    def out_types(self, node: Node) -> tuple[TensorType, ...]:
        """Return the types a node writes."""
        return tuple(self.types[name] for name in node.outputs)

    @property
    def parameter_count(self) -> int:
        """Elements of all constants of floating point that nodes read: weights and biases."""
        read = (c.type for name, c in self.constants.items() if self.readers[name])
        return sum(kind.elements for kind in read if kind.dtype in formats.FLOATS)

    def renamed(self, name: str) -> "Graph":
        """Return the same graph with another name."""
        return replace(self, name=name)

    def __repr__(self) -> str:
        """Return one line."""
        return (
            f"Graph({self.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs, "
            f"{len(self.outputs)} outputs, {self.parameter_count:,} parameters)"
        )

    def __str__(self) -> str:
        """Return the text form, as `to_text` writes it."""
        return to_text(self)


# -- the text form; `text_form.from_text` reads it ------------------------------------------------
MAX_WRITTEN = 64
"""Most elements of a constant that the text form writes out."""
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*$")


def to_text(graph: Graph) -> str:
    """Return the text form; `from_text` of it is the same graph."""
    # a graph of one relu:
    # graph net (x: fp16[1, 8]) -> (y) { y: fp16[1, 8] = relu(x) relu_0 }
    input_texts = ", ".join(_typed_name(graph, name) for name in graph.inputs)
    output_texts = ", ".join(map(_quoted_name, graph.outputs))
    lines = [f"graph {_quoted_name(graph.name)} ({input_texts}) -> ({output_texts}) {{"]
    for name, constant in graph.constants.items():
        lines.append(f"  {_typed_name(graph, name)} = {_data_text(constant)}")
    for node in graph.nodes:
        # e.g. `y: fp16[1, 8] = adds(x) {number = 1.0} y`
        outputs = ", ".join(_typed_name(graph, name) for name in node.outputs)
        inputs = ", ".join(map(_quoted_name, node.inputs))
        attribute_list = ", ".join(
            f"{key} = {_literal(value)}" for key, value in sorted(node.attrs.items())
        )
        attribute_text = f" {{{attribute_list}}}" if attribute_list else ""
        lines.append(f"  {outputs} = {node.op}({inputs}){attribute_text} {_quoted_name(node.name)}")
    return "\n".join([*lines, "}"]) + "\n"


def _literal(value: object) -> str:
    """Spell an attribute as a Python literal; infinity, which has none, as 1e999."""
    return re.sub(r"\binf\b", "1e999", repr(value)) if "inf" in repr(value) else repr(value)


def _quoted_name(text: str) -> str:
    return text if _IDENTIFIER.match(text) else json.dumps(text)


def _typed_name(graph: Graph, name: str) -> str:
    return f"{_quoted_name(name)}: {graph.types[name]}"


def _data_text(constant: Constant) -> str:
    data = constant.data
    if isinstance(data, Fill):
        return f"fill({_literal(data.value)})"
    if isinstance(data, Seeded):
        return f"seeded({data.seed}, {_literal(data.scale)}, {_literal(data.mean)})"
    # the text form is for reading: the weights of a layer are written as the word `data`
    if constant.type.elements > MAX_WRITTEN:
        return "data"
    numbers = json.dumps(constant.array().ravel().astype(np.float64).tolist())
    # 1.0 is written as 1; the second replacement restores the sign of -0.0
    return numbers.replace(".0,", ",").replace("-0,", "-0.0,")


# -- types, from the operator library -------------------------------------------------------------
# The library's rules say which number formats an operator takes. A graph may hold a format that a
# chip does not compute (an fp32 convolution): `evaluate` computes it, and the compiler casts it.
TRANS_DATA = Operator(
    "trans_data",
    ("x",),
    lambda x, layout: x,
    summary="the same tensor in another layout",
    attrs={"layout": REQUIRED},
    shape_rule=lambda x, layout: x,
    slicing=lambda shapes, layout: slicing.elementwise_rules(shapes, shapes[0]),
    backward=lambda s: (s.g,),
    allows_empty=True,
)
"""The node between two layouts: the same elements at other addresses."""
GRAPH_ONLY: dict[str, Operator] = {TRANS_DATA.name: TRANS_DATA}
"""Operators that only compilers put into graphs, by name; other packages may add their own."""


def operator_of(op: str) -> Operator:
    """Return the operator a node names; raise `InputError` with near names for an unknown one."""
    return GRAPH_ONLY[op] if op in GRAPH_ONLY else get(op)


def rules_of(graph: Graph, node: Node) -> slicing.SliceRules:
    """Return the slice rules of a node at its shapes."""
    return operator_of(node.op).slice_rules([t.shape for t in graph.in_types(node)], node.attrs)


def infer(
    op: str, input_types: Sequence[TensorType], attrs: Mapping[str, Any]
) -> tuple[TensorType, ...]:
    """Return the types of the outputs, row-major unless `op` is `trans_data`.

    Raises `ShapeError`, `TypeMismatchError` or `InputError` that names the operator.
    """
    # the library has one rule for shapes and another for number formats; a type needs both
    operator = operator_of(op)
    settings = operator.settings(attrs)
    shapes = operator.infer(*(t.shape for t in input_types), **attrs)
    names = operator.names(len(input_types))
    rule = operator.types
    dtypes = tuple(t.dtype for t in input_types)
    main_dtype = rule.main(names, dtypes)
    for name, needed, got in zip(
        names, rule.inputs(names, main_dtype, settings), dtypes, strict=True
    ):
        if got != needed:
            raise TypeMismatchError(f"{op}: input {name} in {needed}", got, f"cast {name}")
    kinds = rule.outputs(main_dtype, settings, len(shapes))
    # only `trans_data` states a layout; `layout.assign_layouts` sets all others later
    layout = str(settings["layout"]) if operator is TRANS_DATA else "ND"
    # a rule with one format means it for every output: split has one output for each piece
    kinds = kinds if len(kinds) == len(shapes) else kinds[:1] * len(shapes)
    return tuple(TensorType(s, d, layout) for s, d in zip(shapes, kinds, strict=True))


def verify(graph: Graph, verified: Graph | None = None) -> Graph:
    """Return the graph if it is sound; raise `GraphError` naming the node and what is wrong.

    A sound graph writes each name once and before it is read, knows the type of every name, has the
    shapes and formats that its operators infer, outputs that exist and constants of their type.
    `verified` is a graph that is known to be sound: types of nodes that both share are not inferred
    again.
    """
    # after a pass most nodes are the same objects as before: only new ones are inferred
    known_producers = verified.producers if verified else {}
    ready = set(graph.inputs) | set(graph.constants)
    # a set holds each name once: it is shorter than the two lists if a name occurs twice
    if len(graph.inputs) + len(graph.constants) != len(ready):
        repeated = sorted(set(graph.inputs) & set(graph.constants)) or list(graph.inputs)
        raise GraphError(f"{graph.name}: every name once", f"{repeated[0]} twice", "rename one")
    for name in ready:
        _check_type(graph, name)
    for name, constant in graph.constants.items():
        if constant.type != graph.types[name]:
            raise GraphError(f"constant {name} as {graph.types[name]}", str(constant.type), "cast")
    node_names: set[str] = set()
    # `ready` grows node by node: what a node reads must be in it, what it writes must not
    for node in graph.nodes:
        _check_names(graph, node, ready, node_names)
        tensor_names = (*node.inputs, *node.outputs)
        if (
            verified is None
            or known_producers.get(node.output) is not node
            or any(graph.types[name] is not verified.types[name] for name in tensor_names)
        ):
            _check_types(graph, node)
        ready.update(node.outputs)
        node_names.add(node.name)
    for name in graph.outputs:
        if name not in ready:
            raise GraphError(f"{graph.name}: output {name}", "nothing writes it", "check the name")
    return graph


def _check_type(graph: Graph, name: str) -> None:
    kind = graph.types.get(name)
    if kind is None:
        raise GraphError(f"{graph.name}: a type for {name}", "none", "state its shape and format")
    if kind.dtype not in DTYPE_BYTES:
        dtypes = ", ".join(DTYPE_BYTES)
        raise GraphError(f"{name}: one of {dtypes}", kind.dtype, "cast it")
    # "NC1HWC0:4" is NC1HWC0 with blocks of 4 channels
    if kind.layout.partition(":")[0] not in FORMATS:
        raise GraphError(f"{name}: one of {', '.join(FORMATS)}", kind.layout, "name a layout")


def _check_names(graph: Graph, node: Node, ready: set[str], node_names: set[str]) -> None:
    where = f"node {node.name} ({node.op})"
    if node.name in node_names:
        raise GraphError(f"{graph.name}: node names once", f"{node.name} twice", "rename one")
    for name in node.inputs:
        if name not in ready:
            is_written_later = name in graph.producers
            got = (
                "written later: a cycle, or nodes out of order"
                if is_written_later
                else "nothing writes it"
            )
            raise GraphError(f"{where}: input {name}", got, "reorder or reconnect")
    for name in node.outputs:
        if name in ready or node.outputs.count(name) > 1:
            raise GraphError(f"{where}: a new name to write", f"{name} exists", "rename it")
        _check_type(graph, name)


def _check_types(graph: Graph, node: Node) -> None:
    where = f"node {node.name} ({node.op})"
    try:
        inferred = infer(node.op, graph.in_types(node), node.attrs)
    except AscendLabError as error:
        raise GraphError(f"{where}: {error.needed}", error.got, error.remedy) from error
    stated = graph.out_types(node)
    if len(inferred) != len(stated):
        raise GraphError(f"{where}: {len(inferred)} outputs", str(len(stated)), "name each output")
    for name, expected, actual in zip(node.outputs, inferred, stated, strict=True):
        # the layout is free: `infer` says row-major, a compiled graph may state any other
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            raise GraphError(f"{where}: {name} as {expected}", str(actual), "infer the types again")


def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    # 16 images of 56 x 56: 50,176 pixels, the rows of the cube's product
    if node.has("convolution") or node.op == "conv_transpose2d":
        n, _, h, w = graph.types[node.output].shape
        return n * h * w
    return 0


def only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the only reader of a node's output; None for several or for a graph's output."""
    # an output of the graph is also read from outside the graph
    if len(node.outputs) > 1 or node.output in graph.outputs:
        return None
    # mul(x, x) counts as one reader
    readers = graph.readers[node.output]
    return readers[0] if len(readers) == 1 else None


def moves_before(graph: Graph, name: str) -> list[Node]:
    """Return the chain of `MOVES` that ends in this tensor, each read by the next one only."""
    maker = graph.producers.get(name)
    if maker is None or maker.op not in MOVES or only_reader(graph, maker) is None:
        return []
    return [*moves_before(graph, maker.inputs[0]), maker]


def moves_after(graph: Graph, node: Node) -> list[Node]:
    """Return the chain of `MOVES` after a node, each the only reader of the one before it.

    The list is empty if the node's result has several readers, or a reader that computes.
    """
    reader = only_reader(graph, node)
    return [reader, *moves_after(graph, reader)] if reader and reader.op in MOVES else []

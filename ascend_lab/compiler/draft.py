"""Builds graphs: `GraphBuilder` writes a new graph by hand, `Draft` rewrites an existing one.

To add a node by hand, call the method that is named after its operator:

    net = GraphBuilder("net")
    x = net.input("x", (1, 3, 32, 32))
    net.output(net.relu(net.conv2d(x, net.weight((8, 3, 3, 3)), pad=1)))
    graph = net.build()
"""

import math
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.errors import GraphError
from ascend_lab.operators.ops.formats import format_of


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor while a graph is built: its name and type."""

    name: str
    type: ir.TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's logical shape, without padding."""
        return self.type.shape


def free_name(
    base_name: str, *taken: Container[str], taken_below: Counter[str] | None = None
) -> str:
    """Return "y" for the base name "y" if no name in `taken` equals it, else "y_1", "y_2", ...

    `taken_below` remembers for each name the first number that may be free, so that 1,000 nodes
    with one name do not search from 0. It stays right if names are added and never removed.
    """

    def numbered(number: int) -> str:
        return f"{base_name}_{number}" if number else base_name

    number = 0 if taken_below is None else taken_below[base_name]
    while any(numbered(number) in names for names in taken):
        number += 1
    if taken_below is not None:
        taken_below[base_name] = number
    return numbered(number)


class GraphBuilder:
    """A graph under construction; every operator of the library is a method of the same name."""

    def __init__(self, name: str, dtype: str = "fp32") -> None:
        self.name = name
        self.dtype = dtype
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._nodes: list[ir.Node] = []
        self._types: dict[str, ir.TensorType] = {}
        self._constants: dict[str, ir.Constant] = {}
        self._reserved: frozenset[str] = frozenset()
        self._numbers: Counter[str] = Counter()

    def unique(self, base_name: str) -> str:
        """Return the base name, with a number appended if a tensor already has that name."""
        return free_name(base_name, self._types, self._reserved, taken_below=self._numbers)

    def _add(self, name: str, kind: ir.TensorType) -> Value:
        if name in self._types:
            raise GraphError(f"{self.name}: a new name", name, "names are written once")
        self._types[name] = kind
        return Value(name, kind)

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Value:
        """Declare an input."""
        self._inputs.append(name)
        return self._add(name, ir.TensorType(tuple(shape), dtype or self.dtype))

    def constant(
        self, data: ir.Data, kind: ir.TensorType | None = None, name: str = "const"
    ) -> Value:
        """Declare a constant: an array, or other data with the type `kind`; return its value."""
        type_of_data = kind
        if type_of_data is None:
            array = np.asarray(data)
            type_of_data = ir.TensorType(array.shape, format_of(array))
        value = self._add(self.unique(name), type_of_data)
        self._constants[value.name] = ir.Constant(type_of_data, data)
        return value

    def weight(
        self, shape: Sequence[int], name: str = "weight", *, scale: float | None = None
    ) -> Value:
        """Declare seeded normal weights, variance 2 / inputs of an output (He et al. 2015)."""
        unique_name = self.unique(name)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
        # the seed is a hash of the names: the same network has the same weights on every machine
        seed = zlib.crc32(f"{self.name}/{unique_name}".encode())
        data = ir.Seeded(seed, scale or math.sqrt(2 / fan_in))
        return self.constant(data, ir.TensorType(tuple(shape), self.dtype), unique_name)

    def fill(self, shape: Sequence[int], value: float, name: str = "fill") -> Value:
        """Declare a constant with one number everywhere."""
        return self.constant(ir.Fill(value), ir.TensorType(tuple(shape), self.dtype), name)

    def add_node(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Any:
        """Append a node; return its output, or a tuple of several. Raises like the operator."""
        kinds = ir.infer(op, [v.type for v in inputs], attrs)
        title = name or self.unique(op)
        names = [self.unique(title if i == 0 else f"{title}_{i}") for i in range(len(kinds))]
        outputs = tuple(self._add(n, t) for n, t in zip(names, kinds, strict=True))
        input_names = tuple(v.name for v in inputs)
        self._nodes.append(ir.Node(title, op, input_names, tuple(names), given_attrs(op, attrs)))
        return outputs if len(outputs) > 1 else outputs[0]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """Return the method that appends a node of operator `op`."""
        # Python asks for names such as __deepcopy__, which are not operators
        if op.startswith("_"):
            raise AttributeError(op)
        # `max_` is the operator `max`: for names that Python already uses
        operator_record = ir.operator_of(op.removesuffix("_"))

        def append(*inputs: Value, name: str = "", **attrs: Any) -> Any:
            return self.add_node(operator_record.name, *inputs, name=name, **attrs)

        inputs_and_attributes = (
            f"Inputs {operator_record.inputs}, attributes {operator_record.attrs}."
        )
        append.__name__ = operator_record.name
        append.__doc__ = f"{operator_record.summary}\n\n{inputs_and_attributes}"
        return append

    def output(self, *values: Value) -> None:
        """Declare outputs."""
        self._outputs += [v.name for v in values]

    def build(self) -> ir.Graph:
        """Return the verified graph."""
        outputs = tuple(self._outputs)
        if not outputs:
            raise GraphError(f"{self.name}: an output", "none", "call output(value)")
        nodes = tuple(self._nodes)
        types = dict(self._types)
        return ir.verify(
            ir.Graph(self.name, tuple(self._inputs), outputs, nodes, types, self._constants)
        )


def plain_value(value: Any) -> Any:
    """Return an attribute value as the text form writes it: numbers, strings, tuples, None."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(plain_value(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def given_attrs(op: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes in plain form, without those equal to the operator's default."""
    defaults = ir.operator_of(op).attrs
    values = {key: plain_value(value) for key, value in attrs.items()}
    return {
        k: v for k, v in values.items() if not (k in defaults and plain_value(defaults[k]) == v)
    }


SMALL_ELEMENTS = 4096
"""Constants of at most this many elements are computed at once, larger ones when they are read."""


class Draft:
    """A graph being rewritten; knows for every tensor the node that writes it and its readers.

    The draft starts with the graph's nodes, or with `nodes`: () to write all of them anew. `finish`
    sorts the nodes, drops those that nobody reads and verifies the result.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node] | None = None) -> None:
        self.graph = graph
        self.reserved = frozenset(() if nodes is None else (n.name for n in graph.nodes))
        first_nodes = graph.nodes if nodes is None else nodes
        self.nodes: dict[str, ir.Node] = {node.name: node for node in first_nodes}
        self.types: dict[str, ir.TensorType] = dict(graph.types)
        self.constants: dict[str, ir.Constant] = dict(graph.constants)
        self.outputs = frozenset(graph.outputs)
        self.narrowed = set(graph.narrowed)
        self.aliases: dict[str, str] = {}
        self.changes = 0
        self.maker_names = {out: node.name for node in first_nodes for out in node.outputs}
        self.uses = Counter(name for node in first_nodes for name in set(node.inputs))
        self.uses.update(graph.outputs)

    # -- queries --------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[ir.Node]:
        """Yield the nodes of the original graph that are still there, with inputs resolved."""
        for node in self.graph.nodes:
            if node.name in self.nodes:
                yield self.current(node.name)

    def current(self, name: str) -> ir.Node:
        """Return a node with its inputs resolved."""
        node = self.nodes[name]
        if self.aliases.keys().isdisjoint(node.inputs):
            return node
        return replace(node, inputs=tuple(map(self.resolve, node.inputs)))

    def resolve(self, name: str) -> str:
        """Return the tensor that stands for `name` after the replacements so far."""
        # a -> b and later b -> c: readers of a read c
        current_name = name
        while current_name in self.aliases:
            current_name = self.aliases[current_name]
        return current_name

    def maker(self, name: str) -> ir.Node | None:
        """Return the node that writes a tensor; None for inputs and constants."""
        title = self.maker_names.get(self.resolve(name))
        return None if title is None else self.current(title)

    def only(self, name: str, *ops: str) -> ir.Node | None:
        """Return the node that writes a tensor with a single reader, if its operator is in `ops`.

        Without `ops` any operator will do. Returns None if there is no such node.
        """
        node = self.maker(name)
        fits = node is not None and (not ops or node.op in ops) and len(node.outputs) == 1
        return node if fits and self.uses[self.resolve(name)] == 1 else None

    def type(self, name: str) -> ir.TensorType:
        """Return the type of a tensor."""
        return self.types[self.resolve(name)]

    def constant(self, name: str) -> ir.Constant | None:
        """Return a tensor's constant; None if the tensor is computed or an input."""
        return self.constants.get(self.resolve(name))

    def number(self, name: str) -> float | None:
        """Return the one number a floating-point constant holds, None if it holds several."""
        constant = self.constant(name)
        if constant is None or constant.type.dtype not in ("fp16", "bf16", "fp32"):
            return None
        if isinstance(constant.data, ir.Fill):
            # rounded to the constant's format: 0.1 in fp16 is 0.09997559
            return float(
                replace(constant, type=ir.TensorType((1,), constant.type.dtype)).array()[0]
            )
        if not 0 < constant.type.elements <= SMALL_ELEMENTS or not isinstance(
            constant.data, np.ndarray
        ):
            return None
        values = constant.array().ravel()
        return float(values[0]) if bool(np.all(values == values[0])) else None

    def new_name(self, base_name: str) -> str:
        """Return a name that neither a tensor nor a node has yet."""
        return free_name(base_name, self.types, self.nodes, self.reserved)

    # -- adding ---------------------------------------------------------------------------------
    def add(self, constant: ir.Constant, name: str = "const") -> str:
        """Add a constant; return its name."""
        unique_name = self.new_name(name)
        self.types[unique_name] = constant.type
        self.constants[unique_name] = constant
        self.changes += 1
        return unique_name

    def insert(
        self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None, name: str = ""
    ) -> str:
        """Add a node and infer its types; return the name of its first output."""
        resolved = tuple(map(self.resolve, inputs))
        kinds = ir.infer(op, [self.types[n] for n in resolved], attrs or {})
        title = self.new_name(name or op)
        outputs = tuple(
            title if i == 0 else self.new_name(f"{title}_{i}") for i in range(len(kinds))
        )
        self.put(ir.Node(title, op, resolved, outputs, given_attrs(op, dict(attrs or {}))), *kinds)
        return outputs[0]

    def stretched(self, name: str, shape: tuple[int, ...]) -> str:
        """Return a tensor repeated to `shape`; a repeated constant is a constant, too."""
        kind = self.type(name)
        constant = self.constant(name)
        if kind.shape == shape:
            return name
        if constant is None:
            # if the graph has an equal `expand` already, its result is used
            expansions = (n for n in self.nodes.values() if (n.op, n.inputs) == ("expand", (name,)))
            for node in expansions:
                if node.attrs["shape"] == shape:
                    return node.output
            return self.insert("expand", (name,), {"shape": shape}, f"{name}_whole")
        repeated = ir.Constant(
            replace(kind, shape=shape), lambda: np.broadcast_to(constant.array(), shape)
        )
        return self.add(repeated, f"{name}_whole")

    def put(self, node: ir.Node, *kinds: ir.TensorType) -> str:
        """Add a node with outputs of these types, inferred if none is given; return the first."""
        kinds = kinds or ir.infer(node.op, [self.type(n) for n in node.inputs], node.attrs)
        if any(self.resolve(name) in self.narrowed for name in node.inputs):
            # results that a rewrite computes from int64 numbers are int64 in the model, too
            int32_names = {
                n for n, k in zip(node.outputs, kinds, strict=True) if k.dtype == "int32"
            }
            self.narrowed |= int32_names - self.graph.types.keys()
        self.types.update(zip(node.outputs, kinds, strict=True))
        self.nodes[node.name] = node
        self.maker_names.update(dict.fromkeys(node.outputs, node.name))
        self.uses.update(set(node.inputs))
        self.changes += 1
        return node.output

    # -- changing -------------------------------------------------------------------------------
    def replace(self, old_name: str, new_name: str) -> None:
        """Let all readers of a tensor, and the graph's outputs, read another one instead."""
        resolved = self.resolve(new_name)
        # nodes keep the old name in their inputs; `current` resolves it when they are looked at
        if old_name != resolved:
            self.aliases[old_name] = resolved
            self.uses[resolved] += self.uses[old_name]
            self.changes += 1

    def become(
        self,
        node: ir.Node,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        last_node: ir.Node | None = None,
    ) -> bool:
        """Let a node compute something else; with `last_node` it also takes that node's place.

        With `last_node` a chain becomes one node: exp, sum and div become a softmax. Returns True.
        """
        # the last node's outputs, so that readers of the chain need no change
        resolved = tuple(map(self.resolve, inputs))
        outputs = (last_node or node).outputs
        self.put(ir.Node(node.name, op, resolved, outputs, given_attrs(op, dict(attrs or {}))))
        if last_node is not None and last_node.name != node.name:
            for name in node.outputs:
                del self.maker_names[name]
            del self.nodes[last_node.name]
            self._release(last_node.inputs)
        self._release(node.inputs)
        return True

    def forward(self, node: ir.Node, value: str) -> bool:
        """Let readers of a node's output read `value`, and remove the node; return True if done.

        An output of the graph must keep its name. Where that is impossible, as `value` is an input,
        a constant or another output, nothing changes and the method returns False.
        """
        old_name = node.output
        new_name = self.resolve(value)
        # `title` is the node that writes the new value; None for inputs and constants
        title = self.maker_names.get(new_name)
        if old_name not in self.outputs:
            self.replace(old_name, new_name)
        elif title is None or new_name in self.outputs:
            return False
        else:
            # the graph's output keeps its name: the maker of `value` writes under it from now on
            outputs = tuple(
                old_name if name == new_name else name for name in self.nodes[title].outputs
            )
            self.nodes[title] = replace(self.nodes[title], outputs=outputs)
            if new_name in self.narrowed:
                self.narrowed.add(old_name)
            self.aliases[new_name] = old_name
            self.uses[old_name] += self.uses[new_name]
        self.remove(node.name)
        self._release(node.inputs)
        if old_name in self.outputs and title is not None:
            self.maker_names[old_name] = title
        return True

    def remove(self, name: str) -> None:
        """Remove a node; its outputs must have been replaced, or be unread."""
        for out in self.nodes.pop(name).outputs:
            self.maker_names.pop(out, None)
        self.changes += 1

    def _release(self, names: Sequence[str]) -> None:
        """Subtract one reader of each tensor; remove the nodes that are left without any."""
        pending = [self.resolve(name) for name in set(names)]
        while pending:
            name = pending.pop()
            self.uses[name] -= 1
            # a node with two outputs stays until nobody reads either
            maker = self.nodes.get(self.maker_names.get(name, ""))
            if self.uses[name] or maker is None or any(self.uses[n] for n in maker.outputs):
                continue
            self.remove(maker.name)
            pending += [self.resolve(n) for n in set(maker.inputs)]

    def finish(self) -> ir.Graph:
        """Return the rewritten graph; the same object if nothing changed."""
        if not self.changes:
            return self.graph
        outputs = tuple(map(self.resolve, self.graph.outputs))
        elements = self.graph.elements
        # the model's element types follow outputs that were replaced
        renamed_elements = {
            new_name: elements[old_name]
            for old_name, new_name in zip(self.graph.outputs, outputs, strict=True)
            if old_name in elements
        }
        nodes = tuple(self.current(name) for name in self.nodes)
        graph = replace(
            self.graph,
            outputs=outputs,
            nodes=nodes,
            types=self.types,
            constants=self.constants,
            narrowed=frozenset(self.narrowed),
            elements={**elements, **renamed_elements},
        )
        return ir.verify(pruned(ordered(graph)), self.graph)


def ordered(graph: ir.Graph) -> ir.Graph:
    """Return the graph with its nodes in topological order.

    Nodes stay in the order given; only a node that comes after one of its readers moves, to the
    place before its first reader. Raises `GraphError` naming the nodes of a cycle.
    """
    placed: dict[str, ir.Node] = {}
    waiting: dict[str, None] = {}
    stack = list(graph.nodes[::-1])
    while stack:
        node = stack[-1]
        makers = (graph.producers.get(name) for name in node.inputs)
        missing = [n for n in makers if n is not None and n.name not in placed]
        # every input exists: the node can be placed
        if node.name in placed or not missing:
            placed.setdefault(node.name, node)
            waiting.pop(node.name, None)
            stack.pop()
            continue
        waiting[node.name] = None
        # an open node waits for its inputs; meeting one again closes a cycle
        for maker in reversed(missing):
            if maker.name in waiting:
                names = list(waiting)
                cycle_text = " -> ".join([*names[names.index(maker.name) :], maker.name])
                raise GraphError(
                    f"{graph.name}: a graph without cycles", cycle_text, "cut one edge"
                )
            stack.append(maker)
    # nothing moved: the same object tells callers so
    if len(placed) == len(graph.nodes) and all(map(operator.is_, placed.values(), graph.nodes)):
        return graph
    return replace(graph, nodes=tuple(placed.values()))


def pruned(graph: ir.Graph) -> ir.Graph:
    """Return the graph without nodes, constants and types that no output needs."""
    needed = set(graph.outputs)
    needed_nodes: list[ir.Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed_nodes.append(node)
            needed.update(node.inputs)
    written = {name for node in needed_nodes for name in node.outputs}
    names = needed | written | set(graph.inputs)
    return replace(
        graph,
        nodes=tuple(reversed(needed_nodes)),
        types={n: t for n, t in graph.types.items() if n in names},
        constants={n: c for n, c in graph.constants.items() if n in needed},
    )


def in_order(graph: ir.Graph) -> ir.Graph:
    """Return the graph with its nodes in an order that depends on its edges alone.

    The order is depth first from the outputs: everything that a node's first operand needs, then
    everything that its second operand needs, ..., then the node. So one branch is finished before
    the next one begins, and its tensors are read soon, while L2 still holds them. Neither the order
    of a file nor the names in it matter. Nodes that no output needs come last, in the order given.
    """
    order: list[ir.Node] = []
    placed = set[str]()
    stack = list(reversed(graph.outputs))
    while stack:
        node = graph.producers.get(stack[-1])
        if node is None or node.name in placed:
            stack.pop()
            continue
        missing = [n for n in node.inputs if n in graph.producers]
        missing = [n for n in missing if graph.producers[n].name not in placed]
        if missing:
            stack += reversed(missing)
            continue
        placed.add(node.name)
        order.append(node)
        stack.pop()
    unneeded = [node for node in graph.nodes if node.name not in placed]
    return replace(graph, nodes=(*order, *unneeded))

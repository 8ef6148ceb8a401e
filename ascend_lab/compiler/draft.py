"""Writing graphs: `GraphBuilder` by hand, `Draft` from a graph that is being rewritten.

By hand it is one call a node, named after the operator:

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
        """Its logical shape."""
        return self.type.shape


def free_name(wanted: str, *taken: Container[str], taken_below: Counter[str] | None = None) -> str:
    """Return `wanted`, with the first number behind it that none of `taken` has.

    `taken_below` remembers, by name, the first number to try, as long as no name becomes free.
    """
    number = 0 if taken_below is None else taken_below[wanted]
    while any((name := f"{wanted}_{number}" if number else wanted) in names for names in taken):
        number += 1
    if taken_below is not None:
        taken_below[wanted] = number
    return name


class GraphBuilder:
    """A graph under construction; every operator of the library is a method of that name."""

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

    def unique(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if a tensor has that name."""
        return free_name(wanted, self._types, self._reserved, taken_below=self._numbers)

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
        """Declare a constant: an array, or data of a stated type."""
        if kind is None:
            array = np.asarray(data)
            kind = ir.TensorType(array.shape, format_of(array))
        value = self._add(self.unique(name), kind)
        self._constants[value.name] = ir.Constant(kind, data)
        return value

    def weight(
        self, shape: Sequence[int], name: str = "weight", *, scale: float | None = None
    ) -> Value:
        """Declare seeded weights: normal, variance 2 / inputs of each output (He et al. 2015)."""
        name = self.unique(name)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
        data = ir.Seeded(zlib.crc32(f"{self.name}/{name}".encode()), scale or math.sqrt(2 / fan_in))
        return self.constant(data, ir.TensorType(tuple(shape), self.dtype), name)

    def fill(self, shape: Sequence[int], value: float, name: str = "fill") -> Value:
        """Declare a constant with one number everywhere."""
        return self.constant(ir.Fill(value), ir.TensorType(tuple(shape), self.dtype), name)

    def add_node(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Any:
        """Append a node; return its output, or a tuple of several. Raises like the operator."""
        found = ir.infer(op, [v.type for v in inputs], attrs)
        title = name or self.unique(op)
        names = [self.unique(title if i == 0 else f"{title}_{i}") for i in range(len(found))]
        outs = tuple(self._add(n, t) for n, t in zip(names, found, strict=True))
        reads = tuple(v.name for v in inputs)
        self._nodes.append(ir.Node(title, op, reads, tuple(names), given_attrs(op, attrs)))
        return outs if len(outs) > 1 else outs[0]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """Return the method that appends a node of operator `op`."""
        if op.startswith("_"):
            raise AttributeError(op)
        found = ir.operator_of(op.removesuffix("_"))

        def append(*inputs: Value, name: str = "", **attrs: Any) -> Any:
            return self.add_node(found.name, *inputs, name=name, **attrs)

        append.__name__ = found.name
        append.__doc__ = f"{found.summary}\n\nInputs {found.inputs}, attributes {found.attrs}."
        return append

    def output(self, *values: Value) -> None:
        """Declare outputs."""
        self._outputs += [v.name for v in values]

    def build(self) -> ir.Graph:
        """Return the verified graph."""
        outs = tuple(self._outputs)
        if not outs:
            raise GraphError(f"{self.name}: an output", "none", "call output(value)")
        nodes = tuple(self._nodes)
        types = dict(self._types)
        return ir.verify(
            ir.Graph(self.name, tuple(self._inputs), outs, nodes, types, self._constants)
        )


def plain(value: Any) -> Any:
    """Return an attribute value as the text form writes it: numbers, strings, tuples, None."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def given_attrs(op: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes in plain form, those left out that equal the operator's default."""
    defaults = ir.operator_of(op).attrs
    values = {key: plain(value) for key, value in attrs.items()}
    return {k: v for k, v in values.items() if not (k in defaults and plain(defaults[k]) == v)}


SMALL = 4096
"""Elements up to which constants are computed at once; larger ones when somebody asks."""


class Draft:
    """A graph being rewritten: every tensor knows its maker, and its readers are counted.

    `nodes` are those of the graph, or () to put them anew one by one. `finish` sorts what is there,
    drops what nobody reads and verifies it.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node] | None = None) -> None:
        self.graph = graph
        self.reserved = frozenset(() if nodes is None else (n.name for n in graph.nodes))
        nodes = graph.nodes if nodes is None else nodes
        self.nodes: dict[str, ir.Node] = {node.name: node for node in nodes}
        self.types: dict[str, ir.TensorType] = dict(graph.types)
        self.constants: dict[str, ir.Constant] = dict(graph.constants)
        self.outputs = frozenset(graph.outputs)
        self.narrowed = set(graph.narrowed)
        self.aliases: dict[str, str] = {}
        self.changes = 0
        self.made = {out: node.name for node in nodes for out in node.outputs}
        self.uses = Counter(name for node in nodes for name in set(node.inputs))
        self.uses.update(graph.outputs)

    # -- looking --------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[ir.Node]:
        """Walk the nodes of the graph at the start that are still there, inputs resolved."""
        for node in self.graph.nodes:
            if node.name in self.nodes:
                yield self.current(node.name)

    def current(self, name: str) -> ir.Node:
        """Return a node as it is now."""
        node = self.nodes[name]
        if self.aliases.keys().isdisjoint(node.inputs):
            return node
        return replace(node, inputs=tuple(map(self.resolve, node.inputs)))

    def resolve(self, name: str) -> str:
        """Return the tensor that stands for `name` after the replacements so far."""
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def maker(self, name: str) -> ir.Node | None:
        """Return the node that writes a tensor; None for inputs and constants."""
        title = self.made.get(self.resolve(name))
        return None if title is None else self.current(title)

    def only(self, name: str, *ops: str) -> ir.Node | None:
        """Return the maker of a tensor if it is one of `ops` (if given) and has no other reader."""
        node = self.maker(name)
        fits = node is not None and (not ops or node.op in ops) and len(node.outputs) == 1
        return node if fits and self.uses[self.resolve(name)] == 1 else None

    def type(self, name: str) -> ir.TensorType:
        """Return the type of a tensor."""
        return self.types[self.resolve(name)]

    def constant(self, name: str) -> ir.Constant | None:
        """Return a tensor's constant, None if it is none."""
        return self.constants.get(self.resolve(name))

    def number(self, name: str) -> float | None:
        """Return the one number a floating-point constant holds, None if it holds several."""
        found = self.constant(name)
        if found is None or found.type.dtype not in ("fp16", "bf16", "fp32"):
            return None
        if isinstance(found.data, ir.Fill):
            return float(replace(found, type=ir.TensorType((1,), found.type.dtype)).array()[0])
        if not 0 < found.type.elements <= SMALL or not isinstance(found.data, np.ndarray):
            return None
        values = found.array().ravel()
        return float(values[0]) if bool(np.all(values == values[0])) else None

    def new_name(self, wanted: str) -> str:
        """Return a tensor and node name that is free."""
        return free_name(wanted, self.types, self.nodes, self.reserved)

    # -- adding ---------------------------------------------------------------------------------
    def add(self, constant: ir.Constant, name: str = "const") -> str:
        """Add a constant; return its name."""
        name = self.new_name(name)
        self.types[name] = constant.type
        self.constants[name] = constant
        self.changes += 1
        return name

    def insert(
        self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None, name: str = ""
    ) -> str:
        """Add a node with types inferred; return its first output."""
        given = tuple(map(self.resolve, inputs))
        kinds = ir.infer(op, [self.types[n] for n in given], attrs or {})
        title = self.new_name(name or op)
        outs = tuple(title if i == 0 else self.new_name(f"{title}_{i}") for i in range(len(kinds)))
        self.put(ir.Node(title, op, given, outs, given_attrs(op, dict(attrs or {}))), *kinds)
        return outs[0]

    def stretched(self, name: str, shape: tuple[int, ...]) -> str:
        """Return a tensor repeated along the axes in which `shape` is longer; constants stay so."""
        kind = self.type(name)
        constant = self.constant(name)
        if kind.shape == shape:
            return name
        if constant is None:
            made = (n for n in self.nodes.values() if (n.op, n.inputs) == ("expand", (name,)))
            twins = [n.output for n in made if n.attrs["shape"] == shape]
            return (twins or [self.insert("expand", (name,), {"shape": shape}, f"{name}_whole")])[0]
        whole = ir.Constant(
            replace(kind, shape=shape), lambda: np.broadcast_to(constant.array(), shape)
        )
        return self.add(whole, f"{name}_whole")

    def put(self, node: ir.Node, *kinds: ir.TensorType) -> str:
        """Add a node as it is, its outputs of these types or as inferred; return the first."""
        kinds = kinds or ir.infer(node.op, [self.type(n) for n in node.inputs], node.attrs)
        if any(self.resolve(name) in self.narrowed for name in node.inputs):
            # what a rewrite makes of int64 numbers is int64 in the model, too
            new = {n for n, k in zip(node.outputs, kinds, strict=True) if k.dtype == "int32"}
            self.narrowed |= new - self.graph.types.keys()
        self.types.update(zip(node.outputs, kinds, strict=True))
        self.nodes[node.name] = node
        self.made.update(dict.fromkeys(node.outputs, node.name))
        self.uses.update(set(node.inputs))
        self.changes += 1
        return node.output

    # -- changing -------------------------------------------------------------------------------
    def replace(self, old: str, new: str) -> None:
        """Let all readers of `old`, and the graph's outputs, read `new` instead."""
        new = self.resolve(new)
        if old != new:
            self.aliases[old] = new
            self.uses[new] += self.uses[old]
            self.changes += 1

    def become(
        self,
        node: ir.Node,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        last: ir.Node | None = None,
    ) -> bool:
        """Let a node compute something else; with `last` it writes what that node wrote."""
        given = tuple(map(self.resolve, inputs))
        outs = (last or node).outputs
        self.put(ir.Node(node.name, op, given, outs, given_attrs(op, dict(attrs or {}))))
        if last is not None and last.name != node.name:
            for name in node.outputs:
                del self.made[name]
            del self.nodes[last.name]
            self._release(last.inputs)
        self._release(node.inputs)
        return True

    def forward(self, node: ir.Node, value: str) -> bool:
        """Let readers of a node's output read `value`; False if two names of outputs collide."""
        old = node.output
        new = self.resolve(value)
        title = self.made.get(new)
        if old not in self.outputs:
            self.replace(old, new)
        elif title is None or new in self.outputs:
            return False
        else:
            outs = tuple(old if name == new else name for name in self.nodes[title].outputs)
            self.nodes[title] = replace(self.nodes[title], outputs=outs)
            if new in self.narrowed:
                self.narrowed.add(old)
            self.aliases[new] = old
            self.uses[old] += self.uses[new]
        self.remove(node.name)
        self._release(node.inputs)
        if old in self.outputs and title is not None:
            self.made[old] = title
        return True

    def remove(self, name: str) -> None:
        """Remove a node; its outputs must have been replaced, or be unread."""
        for out in self.nodes.pop(name).outputs:
            self.made.pop(out, None)
        self.changes += 1

    def _release(self, names: Sequence[str]) -> None:
        """Count one reader less of each; drop the makers of what has none left."""
        todo = [self.resolve(name) for name in set(names)]
        while todo:
            name = todo.pop()
            self.uses[name] -= 1
            maker = self.nodes.get(self.made.get(name, ""))
            if self.uses[name] or maker is None or any(self.uses[n] for n in maker.outputs):
                continue
            self.remove(maker.name)
            todo += [self.resolve(n) for n in set(maker.inputs)]

    def finish(self) -> ir.Graph:
        """Return the rewritten graph; the same object if nothing changed."""
        if not self.changes:
            return self.graph
        outs = tuple(map(self.resolve, self.graph.outputs))
        kinds = self.graph.elements
        moved = {
            new: kinds[old]
            for old, new in zip(self.graph.outputs, outs, strict=True)
            if old in kinds
        }
        nodes = tuple(self.current(name) for name in self.nodes)
        graph = replace(
            self.graph,
            outputs=outs,
            nodes=nodes,
            types=self.types,
            constants=self.constants,
            narrowed=frozenset(self.narrowed),
            elements={**kinds, **moved},
        )
        return ir.verify(pruned(ordered(graph)), self.graph)


def ordered(graph: ir.Graph) -> ir.Graph:
    """Return the graph with its nodes in an order in which each reads what is there.

    Nodes stay in the order given, a node that is read too early moves in front of its first
    reader. Raises `GraphError` naming the nodes of a cycle.
    """
    done: dict[str, ir.Node] = {}
    open_: dict[str, None] = {}
    ahead = list(graph.nodes[::-1])
    while ahead:
        node = ahead[-1]
        made = (graph.producers.get(name) for name in node.inputs)
        missing = [n for n in made if n is not None and n.name not in done]
        if node.name in done or not missing:
            done.setdefault(node.name, node)
            open_.pop(node.name, None)
            ahead.pop()
            continue
        open_[node.name] = None
        for before in reversed(missing):
            if before.name in open_:
                names = list(open_)
                loop = " -> ".join([*names[names.index(before.name) :], before.name])
                raise GraphError(f"{graph.name}: a graph without cycles", loop, "cut one edge")
            ahead.append(before)
    if len(done) == len(graph.nodes) and all(map(operator.is_, done.values(), graph.nodes)):
        return graph
    return replace(graph, nodes=tuple(done.values()))


def pruned(graph: ir.Graph) -> ir.Graph:
    """Return the graph without nodes, constants and types that no output needs."""
    needed = set(graph.outputs)
    kept: list[ir.Node] = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    written = {name for node in kept for name in node.outputs}
    names = needed | written | set(graph.inputs)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        types={n: t for n, t in graph.types.items() if n in names},
        constants={n: c for n, c in graph.constants.items() if n in needed},
    )


def in_order(graph: ir.Graph) -> ir.Graph:
    """Return the graph with its nodes in the one order that neither file nor names decide.

    Depth first from the outputs: a node stands behind all that its first operand needs, then behind
    all that its second one needs, and so on. So a branch is finished before the next one begins,
    and what it left in L2 is read soon. Nodes that no output needs come last, as they stood.
    """
    order: list[ir.Node] = []
    placed = set[str]()
    waiting = list(reversed(graph.outputs))
    while waiting:
        node = graph.producers.get(waiting[-1])
        if node is None or node.name in placed:
            waiting.pop()
            continue
        ahead = [n for n in node.inputs if n in graph.producers]
        ahead = [n for n in ahead if graph.producers[n].name not in placed]
        if ahead:
            waiting += reversed(ahead)
            continue
        placed.add(node.name)
        order.append(node)
        waiting.pop()
    rest = [node for node in graph.nodes if node.name not in placed]
    return replace(graph, nodes=(*order, *rest))

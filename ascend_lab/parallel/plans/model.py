"""Where a network can be cut into stages, and what each part costs and keeps.

A part ends where one tensor alone carries the forward pass. The kernels of a profile belong to the
part whose nodes they compute, forward or backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import ClusterError
from ascend_lab.graph import Graph, Node, zoo
from ascend_lab.graph.aliases import aliases, view_nodes
from ascend_lab.kernels import GemmShape, gemm_launch
from ascend_lab.parallel.plans.plan import HALF_BYTES, Unit
from ascend_lab.sim import simulate
from ascend_lab.train.autodiff import carried, training_graph
from ascend_lab.train.profile import (
    SAMPLE,
    StepProfile,
    equal_layers,
    layer_prefix,
    profile_training,
    update_s,
)
from ascend_lab.train.step import in_compute_format, master_of, trainable

WHOLE = ("layer_norm", "rms_norm")
PRODUCTS = ("matmul", "gemm")
VOCABULARY = 8192
"""Rows from which an embedding's table is cut."""


@dataclass(frozen=True, slots=True)
class Part:
    """A unit before it is cut: its bytes and seconds, split by how tensor parallelism cuts them.

    Seconds are (forward, backward) of products, of other kernels that are cut, and of those that
    are not; `products` the (rows, inner, columns) of its products with weights.
    """

    name: str
    matrices: int
    vectors: int
    products: tuple[tuple[int, int, int], ...]
    product_s: tuple[float, float]
    cut_s: tuple[float, float]
    whole_s: tuple[float, float]
    cut_bytes: float
    whole_bytes: float
    input_bytes: float
    boundary_bytes: float
    attends: bool


def parts_of(graph: Graph, profile: StepProfile, dtype: str) -> tuple[Part, ...]:
    """Return the parts of a network with the times of its profile.

    A parameter that several parts read (a tied embedding) is counted in the first.
    """
    typed = in_compute_format(graph, dtype)
    names = trainable(graph)
    leaves = tuple(c for c in typed.constants if master_of(c, graph) in names)
    groups = unit_nodes(typed, leaves)
    place = {node.name: i for i, nodes in enumerate(groups) for node in nodes}
    seconds = _seconds(profile, place, typed)
    kept = kept_tensors(graph, dtype)
    found, counted = [], set[str]()
    for i, nodes in enumerate(groups):
        found.append(_part(i, nodes, typed, frozenset(leaves), counted, seconds[i], kept))
        counted.update(name for node in nodes for name in node.inputs)
    return tuple(found)


def unit_nodes(typed: Graph, leaves: Sequence[str]) -> list[list[Node]]:
    """Return the nodes of each unit: they end where one tensor that carries gradients is alive.

    Units without parameters are joined to those before.
    """
    flowing = carried(typed, leaves) - set(leaves)
    last = {name: i for i, node in enumerate(typed.nodes) for name in node.inputs}
    last.update(dict.fromkeys(typed.outputs, len(typed.nodes)))
    own, live, found = set(leaves), set[str](), list[list[Node]]([[]])
    for i, node in enumerate(typed.nodes):
        found[-1].append(node)
        live.update(name for name in node.outputs if name in flowing and name in last)
        live -= {name for name in live if last[name] <= i}
        if len(live) == 1 and i + 1 < len(typed.nodes):
            found.append([])
    joined: list[list[Node]] = []
    for nodes in found:
        has = any(not own.isdisjoint(node.inputs) for node in nodes)
        if joined and not (has and any(not own.isdisjoint(n.inputs) for n in joined[-1])):
            joined[-1] += nodes
        else:
            joined.append(nodes)
    return joined


def kept_tensors(graph: Graph, dtype: str) -> Mapping[str, int]:
    """Return the bytes of each tensor that forward writes and backward reads; views count once."""
    step = training_graph(graph, optimizer=None, dtype=dtype)
    full = step.graph
    owner = {name: alias.owner for name, alias in aliases(full, view_nodes(full)).items()}
    ahead = {name for node in full.nodes if step.phases[node.name] == "forward"
             for name in node.outputs}  # fmt: skip
    read = {n for node in full.nodes if step.phases[node.name] == "backward" for n in node.inputs}
    found = {owner.get(name, name) for name in ahead & read}
    copies = {n.output for n in full.nodes if n.op == "cast" and n.inputs[0] in step.parameters}
    return {n: full.types[n].size_bytes for n in found - copies if n not in full.inputs}


def _seconds(
    profile: StepProfile, place: Mapping[str, int], typed: Graph
) -> list[dict[str, list[float]]]:
    """Return, per unit, (forward, backward) seconds by kind: product, cut, whole."""
    count = max(place.values()) + 1
    found = [{k: [0.0, 0.0] for k in ("product", "cut", "whole")} for _ in range(count)]
    ops = {node.name: node.op for node in typed.nodes}
    unit = 0
    for row in profile.operators:
        if row.phase == "update":
            continue
        bases = [base for name in row.nodes if (base := _base(name, place))]
        unit = place[bases[0]] if bases else unit
        kind = "cut"
        if any(ops[b] in PRODUCTS for b in bases):
            kind = "product"
        elif any(ops[b] in WHOLE for b in bases):
            kind = "whole"
        found[unit][kind][row.phase == "backward"] += row.time_s
    return found


def _base(name: str, place: Mapping[str, int]) -> str:
    """Return the forward node a node of the step belongs to: w.grad.matmul to w; "" for none."""
    while name and name not in place:
        name = name.rpartition(".")[0]
    return name


def _part(
    number: int,
    nodes: Sequence[Node],
    typed: Graph,
    leaves: frozenset[str],
    counted: Collection[str],
    seconds: Mapping[str, Sequence[float]],
    kept: Mapping[str, int],
) -> Part:
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    own = {name for node in nodes for name in node.outputs}
    own_leaves = leaves - set(counted)
    weights = [typed.types[name] for name in read if name in own_leaves]
    cut = {n for node in nodes for n in node.inputs if n in own_leaves and _is_cut(typed, node, n)}
    matrices = sum(typed.types[n].elements for n in cut)
    whole = {name for node in nodes if node.op in WHOLE for name in node.outputs}
    outer = [n for n in read if n not in own and n not in leaves and n not in typed.constants]
    wide = DTYPE_BYTES[typed.types[nodes[-1].output].dtype]
    pair = {kind: (times[0], times[1]) for kind, times in seconds.items()}
    return Part(
        f"unit{number}:{nodes[0].name}", matrices, sum(w.elements for w in weights) - matrices,
        tuple(_product(typed, n) for n in nodes if n.op in PRODUCTS and leaves & {*n.inputs}),
        pair["product"], pair["cut"], pair["whole"],
        float(sum(kept.get(n, 0) for n in own - whole)),
        float(sum(kept.get(n, 0) for n in own & whole)),
        float(sum(typed.types[n].size_bytes for n in outer)),
        float(typed.types[nodes[-1].output].elements * min(wide, HALF_BYTES)),
        any(node.op == "softmax" for node in nodes),
    )  # fmt: skip


def _is_cut(typed: Graph, node: Node, weight: str) -> bool:
    """Tell whether tensor parallelism cuts a weight: a product's matrix or a vocabulary."""
    shape = typed.types[weight].shape
    if node.op == "embedding":
        return shape[0] >= VOCABULARY
    return node.op in PRODUCTS and len(shape) == 2


def _product(typed: Graph, node: Node) -> tuple[int, int, int]:
    out = typed.types[node.output].shape
    inner = typed.in_types(node)[0].shape[-2 if node.attr("trans_a") else -1]
    return math.prod(out[:-1]), inner, out[-1]


# A network of the zoo or an ONNX file as plans see it: its training step simulated, cut in units.
#
# Units end where one tensor alone carries the forward pass. Kernels are timed at micro-batches of
# 1,
# 8 and 32; others are on the straight lines through these. Tensor parallelism (transformers only)
# cuts the matrices of products, heads and vocabularies: a product's share is its kernel simulated
# anew with 1/t of its columns, other cut kernels take 1/t, norms take the whole unless the
# sequence
# is cut too. Backward kernels take the shares of forward's.


ProductTime = Callable[[int, int, int], float]
KNOTS = (1, 8, 32)
"""Micro-batches that are simulated."""
UPDATE_PARAMETERS = 2**20
"""Size of the parameter whose update tells the optimiser's seconds a parameter."""


@dataclass(frozen=True)
class GraphModel:
    """A network by name and a builder that takes the batch; see the module for what it assumes.

    With `layers` the builder gives a network of 3 equal layers, of which the middle one stands for
    all but two (`train.repeated`).
    """

    name: str
    build: Callable[[int], Graph]
    chip: Chip
    optimizer: str = "adam"
    dtype: str = "fp16"
    layers: int = 0
    _parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    _cut: dict[tuple[int, int, bool], tuple[Unit, ...]] = field(default_factory=dict)
    _degrees: list[int] = field(default_factory=list)
    _seconds: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def update_s_per_parameter(self) -> float:
        """Seconds the optimiser takes a parameter: a large one's update, simulated."""
        if () not in self._seconds:
            whole = update_s(UPDATE_PARAMETERS, self.chip, self.optimizer, self.dtype)
            self._seconds[()] = whole / UPDATE_PARAMETERS
        return self._seconds[()]

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return the powers of two that divide the heads of all attentions; (1,) without."""
        if not self._degrees:
            most = math.gcd(*attention_heads(self.build(1)))
            self._degrees.extend(2**k for k in range(7) if (most % 2**k == 0 and most) or not k)
        return tuple(self._degrees)

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units; raise `ClusterError` for a tensor degree the heads do not allow."""
        if tensor > 1 and tensor not in self.tensor_degrees():
            allowed = ", ".join(map(str, self.tensor_degrees()))
            what = f"{self.name}: a tensor degree of {allowed}"
            raise ClusterError(what, str(tensor), "choose one")
        key = (micro_batch, tensor, sequence)
        if key not in self._cut:
            self._cut[key] = self._between(micro_batch, tensor, sequence)
        return self._cut[key]

    def _between(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        if micro_batch in KNOTS:
            return self._units(micro_batch, tensor, sequence)
        high = next((k for k in KNOTS if k > micro_batch), KNOTS[-1])
        low = KNOTS[KNOTS.index(high) - 1]
        ends = (self._units(k, tensor, sequence) for k in (low, high))
        share = (micro_batch - low) / (high - low)
        once: dict[tuple[int, int], Unit] = {}
        return tuple(
            once.setdefault((id(a), id(b)), between(a, b, share))
            for a, b in zip(*ends, strict=True)
        )

    def _units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        if micro_batch not in self._parts:
            graph = self.build(micro_batch)
            profile = profile_training(graph, self.chip, optimizer=self.optimizer, dtype=self.dtype)
            parts = parts_of(graph, profile, self.dtype)
            self._parts[micro_batch] = repeated(parts, self.layers) if self.layers else parts
        parts = self._parts[micro_batch]
        once = {id(p): sliced(p, tensor, sequence, self._product_s) for p in parts}
        return tuple(once[id(part)] for part in parts)

    def _product_s(self, m: int, k: int, n: int) -> float:
        if (m, k, n) not in self._seconds:
            shape = GemmShape(m, k, n, self.dtype, self.dtype)
            timeline = simulate(gemm_launch(shape, self.chip), self.chip)
            self._seconds[m, k, n] = timeline.time_s
        return self._seconds[m, k, n]


def model_of(name: str, chip: Chip, *, optimizer: str = "adam", dtype: str = "fp16") -> GraphModel:
    """Return a model of the zoo as plans see it; raise `InputError` for an unknown name."""
    layers = equal_layers(name)
    if not layers:
        builder = zoo.find(name)
        return GraphModel(name, builder, chip, optimizer, dtype)
    return GraphModel(
        name, lambda batch: zoo.build(name, batch, layers=SAMPLE), chip, optimizer, dtype, layers
    )


def repeated(parts: Sequence[Part], layers: int) -> tuple[Part, ...]:
    """Return the parts of a network of 3 layers with the middle layer's often enough."""
    names = [part.name.partition(":")[2] for part in parts]
    middle = f"{layer_prefix(names)}1."
    places = [i for i, name in enumerate(names) if name.startswith(middle)]
    own = [parts[i] for i in places]
    return (*parts[: places[0]], *own * (layers - SAMPLE), *parts[places[0] :])


def between(a: Unit, b: Unit, share: float) -> Unit:
    """Return the unit on the straight line from a to b."""
    names = ("forward_s", "backward_s", "activation_bytes", "input_bytes", "boundary_bytes",
             "exchange_bytes", "dispatch_bytes")  # fmt: skip
    mixed = {n: getattr(a, n) + (getattr(b, n) - getattr(a, n)) * share for n in names}
    return replace(a, **mixed)


def attention_heads(graph: Graph) -> list[int]:
    """Return the heads of every attention: softmaxes over (batch, heads, rows, columns)."""
    shares = (graph.in_types(node)[0].shape for node in graph.nodes if node.op == "softmax")
    return [shape[1] for shape in shares if len(shape) == 4]


# -- cutting across: tensor parallelism -----------------------------------------------------------
def sliced(part: Part, tensor: int, sequence: bool, product_s: ProductTime) -> Unit:
    """Return a unit as one of `tensor` devices has it; `product_s(m, k, n)` times a product.

    A unit with cut weights takes one all-reduce of its boundary each way, two if it both attends
    and holds more than attention's four products: 4 a transformer block a step.
    """
    t = tensor
    share = product_share(part.products, t, product_s) if t > 1 else 1.0
    norms = 1.0 / t if sequence else 1.0
    ahead, back = (
        part.product_s[i] * share + part.cut_s[i] / t + part.whole_s[i] * norms for i in (0, 1)
    )
    exchanges = 0
    if t > 1 and part.matrices:
        both = part.attends and len(part.products) > 4
        exchanges = 2 if both else 1
    return Unit(
        part.name, -(-part.matrices // t) + part.vectors, ahead, back,
        part.cut_bytes / t + part.whole_bytes * norms, part.input_bytes * norms,
        part.boundary_bytes * norms, exchanges, part.boundary_bytes,
    )  # fmt: skip


def product_share(
    products: Sequence[tuple[int, int, int]], tensor: int, product_s: ProductTime
) -> float:
    """Return the time of products with 1/t of their columns / that of the whole ones."""
    if not products:
        return 1.0 / tensor
    whole = sum(product_s(m, k, n) for m, k, n in products)
    return sum(product_s(m, k, -(-n // tensor)) for m, k, n in products) / whole

"""Prepares a network for parallel plans: its training step is simulated and cut into units.

A unit is a run of layers that stay on one pipeline stage. It ends where a single tensor carries the
forward pass. The kernels of a profile belong to the unit whose nodes they compute, forward or
backward. Kernels are timed at micro-batches of 1, 8 and 32; times for other micro-batches are
interpolated linearly. Tensor parallelism on t devices (transformers only) cuts the weight matrices,
the attention heads and the vocabulary. A product is simulated again with 1/t of its columns, other
cut kernels take 1/t of their time, and norms take their whole time unless the sequence is cut too.
Backward kernels are reduced like the forward kernels.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ascend_lab import errors
from ascend_lab.cluster import train
from ascend_lab.cluster.parallel.plan import HALF_BYTES, Unit
from ascend_lab.cluster.train.step import in_compute_format, live_tensors, trainable
from ascend_lab.compiler import Graph, Node, zoo
from ascend_lab.compiler.aliases import aliases, view_nodes
from ascend_lab.machine import sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import GemmShape, gemm_launch

Product = tuple[int, int, int]
"""The sizes of a matrix product: rows, inner size, columns."""
Build = Callable[[int], Graph]
"""Builds the network for a batch."""
SIMULATED_BATCHES = (1, 8, 32)
"""Micro-batches that are simulated."""
UPDATE_PARAMETERS = 2**20
"""Size of the parameter from whose update the optimiser's time per parameter is computed."""
NORMS = ("layer_norm", "rms_norm")
"""Operators that every device of a tensor group computes whole."""
PRODUCTS = ("matmul", "gemm")
"""Operators whose weight matrix is cut."""
VOCABULARY = 8192
"""Embedding tables with at least this many rows are cut."""


@dataclass(frozen=True)
class GraphModel:
    """A network for parallel plans: its name, and a function that builds its graph for a batch.

    With `layers` the function builds a network of only 3 equal layers, the middle one of which
    stands for all layers but the first and the last (see `train.profile_layers`).
    """

    name: str
    build: Build
    chip: Chip
    optimizer: str = "adam"
    dtype: str = "fp16"
    layers: int = 0

    @cached_property
    def update_s_per_parameter(self) -> float:
        """Seconds per parameter of the optimiser's update, from the simulation of a large one."""
        update_s = train.update_s(UPDATE_PARAMETERS, self.chip, self.optimizer, self.dtype)
        return update_s / UPDATE_PARAMETERS

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        # 12 heads allow degrees 1, 2 and 4; a network without attention has gcd() = 0 and only
        # degree 1.
        head_divisor = math.gcd(*attention_heads(self.build(1)))
        if not head_divisor:
            return (1,)
        return tuple(2**k for k in range(7) if head_divisor % 2**k == 0)

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return the powers of two that divide all numbers of heads; (1,) without attention."""
        return self._degrees

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units; raise `ClusterError` for a tensor degree the heads do not allow."""
        if tensor > 1 and tensor not in self._degrees:
            allowed = ", ".join(map(str, self._degrees))
            needed = f"{self.name}: a tensor degree of {allowed}"
            raise errors.ClusterError(needed, str(tensor), "choose one")
        return _units(self, micro_batch, tensor, sequence)


def model_of(name: str, chip: Chip, *, optimizer: str = "adam", dtype: str = "fp16") -> GraphModel:
    """Return a model of the zoo for parallel plans; raise `InputError` for an unknown name."""
    layers = train.equal_layers(name)
    if not layers:
        return GraphModel(name, zoo.find(name), chip, optimizer, dtype)
    return GraphModel(
        name,
        lambda batch: zoo.build(name, batch, layers=train.SAMPLE),
        chip,
        optimizer,
        dtype,
        layers,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A unit before it is cut: its bytes and seconds, split by how tensor parallelism cuts them.

    - matrices, vectors: numbers of parameters that are cut, and of all others
    - products: the products with weights
    - product_s, cut_s, whole_s: seconds (forward, backward) of products, of other kernels that are
      cut, and of kernels that are not cut
    - cut_bytes, whole_bytes: activations stored for backward, cut or not
    - input_bytes, boundary_bytes: the tensors that enter the unit, and the one that leaves it
    - attends: whether it contains attention
    """

    name: str
    matrices: int
    vectors: int
    products: tuple[Product, ...]
    product_s: tuple[float, float]
    cut_s: tuple[float, float]
    whole_s: tuple[float, float]
    cut_bytes: float
    whole_bytes: float
    input_bytes: float
    boundary_bytes: float
    attends: bool


@lru_cache(maxsize=512)
def _units(model: GraphModel, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
    """Return the units of a model for a micro-batch and a tensor degree; they are cached."""
    if micro_batch not in SIMULATED_BATCHES:
        return _interpolated_units(model, micro_batch, tensor, sequence)
    parts = _parts(model.build, model.chip, model.optimizer, model.dtype, micro_batch)
    if model.layers:
        parts = repeated(parts, model.layers)
    # a network of many equal layers has few different parts: each is cut only once
    unit_of = {part: _sliced(part, tensor, sequence, model) for part in dict.fromkeys(parts)}
    return tuple(unit_of[part] for part in parts)


def _interpolated_units(
    model: GraphModel, micro_batch: int, tensor: int, sequence: bool
) -> tuple[Unit, ...]:
    """Return the units for a micro-batch between two that are simulated."""
    # beyond 32 the line from 8 to 32 is extrapolated
    high = next((k for k in SIMULATED_BATCHES if k > micro_batch), SIMULATED_BATCHES[-1])
    low = SIMULATED_BATCHES[SIMULATED_BATCHES.index(high) - 1]
    low_units = _units(model, low, tensor, sequence)
    high_units = _units(model, high, tensor, sequence)
    # A micro-batch of 4 lies (4 - 1) / (8 - 1) = 3/7 of the way from 1 to 8.
    share = (micro_batch - low) / (high - low)
    pairs = list(zip(low_units, high_units, strict=True))
    # equal layers give equal pairs: each is computed only once
    unit_of = {(a, b): a.towards(b, share) for a, b in dict.fromkeys(pairs)}
    return tuple(unit_of[pair] for pair in pairs)


@lru_cache(maxsize=16)
def _parts(
    build: Build, chip: Chip, optimizer: str, dtype: str, micro_batch: int
) -> tuple[Part, ...]:
    """Simulate a training step for a micro-batch and return its parts; they are cached."""
    graph = build(micro_batch)
    profile = train.profile_training(graph, chip, optimizer=optimizer, dtype=dtype)
    return parts_of(graph, profile, dtype)


def repeated(parts: Sequence[Part], layers: int) -> tuple[Part, ...]:
    """Return the parts of a network of `layers` layers, given those of a network of 3 layers."""
    names = [unit.name.partition(":")[2] for unit in parts]
    middle = f"{train.layer_prefix(names)}1."
    positions = [i for i, name in enumerate(names) if name.startswith(middle)]
    # 12 layers from a sample of 3: the middle layer's parts are repeated 9 more times.
    layer_parts = [parts[i] for i in positions]
    added = layer_parts * (layers - train.SAMPLE)
    return (*parts[: positions[0]], *added, *parts[positions[0] :])


def attention_heads(graph: Graph) -> list[int]:
    """Return the heads of every attention: softmaxes over (batch, heads, rows, columns)."""
    softmaxes = [node for node in graph.nodes if node.op == "softmax"]
    shapes = [graph.in_types(node)[0].shape for node in softmaxes]
    return [shape[1] for shape in shapes if len(shape) == 4]


# -- tensor parallelism ---------------------------------------------------------------------------
def _sliced(part: Part, tensor: int, sequence: bool, model: GraphModel) -> Unit:
    """Return the share of a part that one of `tensor` devices computes, as a unit.

    A unit with cut weights needs one all-reduce of its boundary tensor forward and one backward. It
    needs two each way if it contains attention and more than attention's four products: 4 for each
    transformer block and step.
    """
    # 1/t of the columns can take more than 1/t of the time: narrow tiles reuse less.
    product_share = 1.0
    if tensor > 1 and part.products:
        product_share = _products_s(part, tensor, model) / _products_s(part, 1, model)
    elif tensor > 1:
        # a part without products with weights is assumed to be cut evenly
        product_share = 1.0 / tensor
    norm_share = 1.0 / tensor if sequence else 1.0
    forward_s, backward_s = (
        part.product_s[i] * product_share + part.cut_s[i] / tensor + part.whole_s[i] * norm_share
        for i in (0, 1)
    )
    exchanges = 0
    if tensor > 1 and part.matrices:
        exchanges = 2 if part.attends and len(part.products) > 4 else 1
    return Unit(
        name=part.name,
        # Vectors (biases, norm scales) are counted whole on every device; matrices are rounded up.
        parameters=-(-part.matrices // tensor) + part.vectors,
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=part.cut_bytes / tensor + part.whole_bytes * norm_share,
        input_bytes=part.input_bytes * norm_share,
        boundary_bytes=part.boundary_bytes * norm_share,
        exchanges=exchanges,
        exchange_bytes=part.boundary_bytes,
    )


def _products_s(part: Part, tensor: int, model: GraphModel) -> float:
    """Return the seconds of a part's products with 1/t of their columns, rounded up."""
    seconds = 0.0
    for m, k, n in part.products:
        seconds += _product_s(m, k, -(-n // tensor), model.dtype, model.chip)
    return seconds


@lru_cache(maxsize=4096)
def _product_s(m: int, k: int, n: int, dtype: str, chip: Chip) -> float:
    return sim.simulate(gemm_launch(GemmShape(m, k, n, dtype, dtype), chip), chip).time_s


# -- parts ----------------------------------------------------------------------------------------
def parts_of(graph: Graph, profile: train.StepProfile, dtype: str) -> tuple[Part, ...]:
    """Return the parts of a network with the times of its profile.

    A parameter that several parts read (a tied embedding) is counted in the first.
    """
    typed, weights = in_compute_format(graph, dtype, trainable(graph))
    groups = _unit_nodes(typed, tuple(weights))
    unit_of_node = {node.name: i for i, nodes in enumerate(groups) for node in nodes}
    seconds = _seconds(profile, unit_of_node, typed)
    source = _Source(typed, frozenset(weights), _stored_tensors(graph, dtype))
    parts = []
    # A weight that two units read (a tied embedding, say) is counted in the first of them only.
    counted = set[str]()
    for i, nodes in enumerate(groups):
        parts.append(_part(i, nodes, source, counted, seconds[i]))
        counted.update(name for node in nodes for name in node.inputs)
    return tuple(parts)


def _unit_nodes(typed: Graph, weights: Sequence[str]) -> list[list[Node]]:
    """Return the nodes of each unit; a unit ends where only one tensor with gradients is alive.

    Units without parameters are joined to the units before them.
    """
    weight_names = set(weights)

    def has_weights(nodes: Sequence[Node]) -> bool:
        return any(not weight_names.isdisjoint(node.inputs) for node in nodes)

    units = list[list[Node]]([[]])
    for node, live in live_tensors(typed, weights):
        units[-1].append(node)
        if len(live) == 1 and node is not typed.nodes[-1]:
            units.append([])
    joined: list[list[Node]] = []
    for nodes in units:
        if joined and not (has_weights(nodes) and has_weights(joined[-1])):
            joined[-1] += nodes
        else:
            joined.append(nodes)
    return joined


def _stored_tensors(graph: Graph, dtype: str) -> Mapping[str, int]:
    """Return the bytes of each tensor that forward writes and backward reads; views count once."""
    step = train.training_graph(graph, optimizer=None, dtype=dtype)
    step_graph = step.graph
    all_aliases = aliases(step_graph, view_nodes(step_graph))
    owner = {name: alias.owner for name, alias in all_aliases.items()}
    written = set[str]()
    read = set[str]()
    weight_copies = set[str]()
    for node in step_graph.nodes:
        if step.phases[node.name] == "forward":
            written.update(node.outputs)
        if step.phases[node.name] == "backward":
            read.update(node.inputs)
        if node.op == "cast" and node.inputs[0] in step.parameters:
            weight_copies.add(node.output)
    stored = {owner.get(name, name) for name in written & read} - weight_copies
    types = step_graph.types
    return {n: types[n].size_bytes for n in stored if n not in step_graph.inputs}


def _seconds(
    profile: train.StepProfile, unit_of_node: Mapping[str, int], typed: Graph
) -> list[dict[str, list[float]]]:
    """Return, per unit, the seconds (forward, backward) by group: product, cut, whole."""
    count = max(unit_of_node.values()) + 1
    seconds = [{k: [0.0, 0.0] for k in ("product", "cut", "whole")} for _ in range(count)]
    ops = {node.name: node.op for node in typed.nodes}
    unit = 0
    for row in profile.operators:
        if row.phase == "update":
            continue
        # A kernel whose name contains no forward node stays with the unit before it.
        forward_nodes = [node for name in row.nodes if (node := _base(name, unit_of_node))]
        if forward_nodes:
            unit = unit_of_node[forward_nodes[0]]
        kernel_ops = {ops[name] for name in forward_nodes}
        if not kernel_ops.isdisjoint(PRODUCTS):
            kind = "product"
        else:
            kind = "cut" if kernel_ops.isdisjoint(NORMS) else "whole"
        seconds[unit][kind][0 if row.phase == "forward" else 1] += row.time_s
    return seconds


def _base(name: str, unit_of_node: Mapping[str, int]) -> str:
    """Return the forward node that a node of the step belongs to: w for w.grad.matmul, or ""."""
    # w.grad.matmul, w.grad, w: the first of these that is a forward node.
    while name and name not in unit_of_node:
        name = name.rpartition(".")[0]
    return name


@dataclass(frozen=True, slots=True)
class _Source:
    """The network that units are cut from.

    `weights` are the trainable weights; `stored_bytes` the activations stored for backward.
    """

    typed: Graph
    weights: frozenset[str]
    stored_bytes: Mapping[str, int]


def _part(
    number: int,
    nodes: Sequence[Node],
    source: _Source,
    counted: Collection[str],
    seconds: Mapping[str, Sequence[float]],
) -> Part:
    """Return the sizes and times of one unit; weights in `counted` belong to earlier units."""
    types = source.typed.types
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    produced = {name for node in nodes for name in node.outputs}
    uncounted = source.weights - set(counted)
    parameters = sum(types[name].elements for name in read if name in uncounted)
    cut_weights = set[str]()
    for node in nodes:
        weights = [name for name in node.inputs if name in uncounted]
        cut_weights.update(name for name in weights if _is_cut(source.typed, node, name))
    matrices = sum(types[name].elements for name in cut_weights)
    weighted_products = [
        node for node in nodes if node.op in PRODUCTS and source.weights & {*node.inputs}
    ]
    replicated = {name for node in nodes if node.op in NORMS for name in node.outputs}
    not_inputs = produced | source.weights | source.typed.constants.keys()
    input_bytes = sum(types[name].size_bytes for name in read if name not in not_inputs)
    stored_bytes = source.stored_bytes
    last_type = types[nodes[-1].output]
    # a boundary tensor in fp32 is sent in half precision
    boundary_bytes = last_type.elements * min(DTYPE_BYTES[last_type.dtype], HALF_BYTES)
    return Part(
        name=f"unit{number}:{nodes[0].name}",
        matrices=matrices,
        vectors=parameters - matrices,
        products=tuple(_product(source.typed, node) for node in weighted_products),
        product_s=(seconds["product"][0], seconds["product"][1]),
        cut_s=(seconds["cut"][0], seconds["cut"][1]),
        whole_s=(seconds["whole"][0], seconds["whole"][1]),
        cut_bytes=float(sum(stored_bytes.get(name, 0) for name in produced - replicated)),
        whole_bytes=float(sum(stored_bytes.get(name, 0) for name in produced & replicated)),
        input_bytes=float(input_bytes),
        boundary_bytes=float(boundary_bytes),
        attends=any(node.op == "softmax" for node in nodes),
    )


def _is_cut(typed: Graph, node: Node, weight: str) -> bool:
    """Tell whether tensor parallelism cuts a weight: a product's matrix or a vocabulary."""
    shape = typed.types[weight].shape
    if node.op == "embedding":
        return shape[0] >= VOCABULARY
    return node.op in PRODUCTS and len(shape) == 2


def _product(typed: Graph, node: Node) -> Product:
    out = typed.types[node.output].shape
    # (5, 2) transposed times (5, 4): the depth 5 is the first factor's second-to-last size.
    inner = typed.in_types(node)[0].shape[-2 if node.attr("trans_a") else -1]
    return math.prod(out[:-1]), inner, out[-1]

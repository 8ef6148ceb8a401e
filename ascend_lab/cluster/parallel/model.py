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
KNOTS = (1, 8, 32)
"""Micro-batches that are simulated."""
UPDATE_PARAMETERS = 2**20
"""Size of the parameter from whose update the optimiser's time per parameter is computed."""
WHOLE = ("layer_norm", "rms_norm")
PRODUCTS = ("matmul", "gemm")
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
        return tuple(2**k for k in range(7) if (head_divisor % 2**k == 0 and head_divisor) or not k)

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


@lru_cache(maxsize=512)
def _units(model: GraphModel, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
    if micro_batch not in KNOTS:
        # beyond 32 the line from 8 to 32 is extrapolated
        high = next((k for k in KNOTS if k > micro_batch), KNOTS[-1])
        low = KNOTS[KNOTS.index(high) - 1]
        ends = (_units(model, k, tensor, sequence) for k in (low, high))
        pairs = list(zip(*ends, strict=True))
        # A micro-batch of 4 lies (4 - 1) / (8 - 1) = 3/7 of the way from 1 to 8.
        share = (micro_batch - low) / (high - low)
        once = {(a, b): a.towards(b, share) for a, b in dict.fromkeys(pairs)}
        return tuple(once[pair] for pair in pairs)
    parts = _parts(model.build, model.chip, model.optimizer, model.dtype, micro_batch)
    parts = repeated(parts, model.layers) if model.layers else parts
    cut = {unit: _sliced(unit, tensor, sequence, model) for unit in dict.fromkeys(parts)}
    return tuple(cut[unit] for unit in parts)


@lru_cache(maxsize=16)
def _parts(
    build: Build, chip: Chip, optimizer: str, dtype: str, micro_batch: int
) -> tuple["Part", ...]:
    graph = build(micro_batch)
    return parts_of(
        graph, train.profile_training(graph, chip, optimizer=optimizer, dtype=dtype), dtype
    )


def repeated(parts: Sequence["Part"], layers: int) -> tuple["Part", ...]:
    """Return the parts of a network of `layers` layers, given those of a network of 3 layers."""
    names = [unit.name.partition(":")[2] for unit in parts]
    middle = f"{train.layer_prefix(names)}1."
    places = [i for i, name in enumerate(names) if name.startswith(middle)]
    # 12 layers from a sample of 3: the middle layer's parts are repeated 9 more times.
    members = [parts[i] for i in places]
    return (*parts[: places[0]], *members * (layers - train.SAMPLE), *parts[places[0] :])


def attention_heads(graph: Graph) -> list[int]:
    """Return the heads of every attention: softmaxes over (batch, heads, rows, columns)."""
    shares = (graph.in_types(node)[0].shape for node in graph.nodes if node.op == "softmax")
    return [shape[1] for shape in shares if len(shape) == 4]


# -- tensor parallelism ---------------------------------------------------------------------------
def _sliced(part: "Part", tensor: int, sequence: bool, model: GraphModel) -> Unit:
    """Return the share of a part that one of `tensor` devices computes, as a unit.

    A unit with cut weights needs one all-reduce of its boundary tensor forward and one backward. It
    needs two each way if it contains attention and more than attention's four products: 4 for each
    transformer block and step.
    """
    share = 1.0
    if tensor > 1:  # time of products with 1/t of their columns / time of the whole products
        # 1/t of the columns can take more than 1/t of the time: narrow tiles reuse less.
        uncut_s, cut_s = (
            sum(_product_s(m, k, -(-n // t), model.dtype, model.chip) for m, k, n in part.products)
            for t in (1, tensor)
        )
        # a part without products is assumed to be cut evenly
        share = cut_s / uncut_s if part.products else 1.0 / tensor
    norms = 1.0 / tensor if sequence else 1.0
    ahead, back = (
        part.product_s[i] * share + part.cut_s[i] / tensor + part.whole_s[i] * norms for i in (0, 1)
    )
    exchanges = 0
    if tensor > 1 and part.matrices:
        exchanges = 2 if part.attends and len(part.products) > 4 else 1
    return Unit(
        part.name,
        # Vectors (biases, norm scales) are counted whole on every device; matrices are rounded up.
        -(-part.matrices // tensor) + part.vectors,
        ahead,
        back,
        part.cut_bytes / tensor + part.whole_bytes * norms,
        part.input_bytes * norms,
        part.boundary_bytes * norms,
        exchanges,
        part.boundary_bytes,
    )


@lru_cache(maxsize=4096)
def _product_s(m: int, k: int, n: int, dtype: str, chip: Chip) -> float:
    return sim.simulate(gemm_launch(GemmShape(m, k, n, dtype, dtype), chip), chip).time_s


# -- parts ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Part:
    """A unit before it is cut: its bytes and seconds, split by how tensor parallelism cuts them.

    Seconds are pairs (forward, backward): for products, for other kernels that are cut, and for
    kernels that are not cut. `products` are the products with weights.
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


def parts_of(graph: Graph, profile: train.StepProfile, dtype: str) -> tuple[Part, ...]:
    """Return the parts of a network with the times of its profile.

    A parameter that several parts read (a tied embedding) is counted in the first.
    """
    typed, leaves = in_compute_format(graph, dtype, trainable(graph))
    groups = _unit_nodes(typed, tuple(leaves))
    place = {node.name: i for i, nodes in enumerate(groups) for node in nodes}
    seconds = _seconds(profile, place, typed)
    kept = _kept_tensors(graph, dtype)
    source = _Source(typed, frozenset(leaves), kept)
    runs = []
    # A weight that two units read (a tied embedding, say) is counted in the first of them only.
    counted = set[str]()
    for i, nodes in enumerate(groups):
        runs.append(_part(i, nodes, source, counted, seconds[i]))
        counted.update(name for node in nodes for name in node.inputs)
    return tuple(runs)


def _unit_nodes(typed: Graph, leaves: Sequence[str]) -> list[list[Node]]:
    """Return the nodes of each unit; a unit ends where only one tensor with gradients is alive.

    Units without parameters are joined to the units before them.
    """
    leaf_names = set(leaves)
    units = list[list[Node]]([[]])
    for node, live in live_tensors(typed, leaves):
        units[-1].append(node)
        if len(live) == 1 and node is not typed.nodes[-1]:
            units.append([])
    joined: list[list[Node]] = []
    for nodes in units:
        has = any(not leaf_names.isdisjoint(node.inputs) for node in nodes)
        if joined and not (has and any(not leaf_names.isdisjoint(n.inputs) for n in joined[-1])):
            joined[-1] += nodes
        else:
            joined.append(nodes)
    return joined


def _kept_tensors(graph: Graph, dtype: str) -> Mapping[str, int]:
    """Return the bytes of each tensor that forward writes and backward reads; views count once."""
    step = train.training_graph(graph, optimizer=None, dtype=dtype)
    whole_step = step.graph
    owner = {
        name: alias.owner for name, alias in aliases(whole_step, view_nodes(whole_step)).items()
    }
    ahead = {
        name
        for node in whole_step.nodes
        if step.phases[node.name] == "forward"
        for name in node.outputs
    }
    read = {
        n for node in whole_step.nodes if step.phases[node.name] == "backward" for n in node.inputs
    }
    tensors = {owner.get(name, name) for name in ahead & read}
    copies = {
        n.output for n in whole_step.nodes if n.op == "cast" and n.inputs[0] in step.parameters
    }
    return {
        n: whole_step.types[n].size_bytes for n in tensors - copies if n not in whole_step.inputs
    }


def _seconds(
    profile: train.StepProfile, place: Mapping[str, int], typed: Graph
) -> list[dict[str, list[float]]]:
    """Return, per unit, the seconds (forward, backward) by group: product, cut, whole."""
    count = max(place.values()) + 1
    seconds = [{k: [0.0, 0.0] for k in ("product", "cut", "whole")} for _ in range(count)]
    ops = {node.name: node.op for node in typed.nodes}
    unit = 0
    for row in profile.operators:
        if row.phase == "update":
            continue
        # A kernel whose name contains no forward node stays with the unit before it.
        bases = [base for name in row.nodes if (base := _base(name, place))]
        unit = place[bases[0]] if bases else unit
        sharding = "whole" if any(ops[b] in WHOLE for b in bases) else "cut"
        kind = "product" if any(ops[b] in PRODUCTS for b in bases) else sharding
        # The index False is 0 (forward), True is 1 (backward).
        seconds[unit][kind][row.phase == "backward"] += row.time_s
    return seconds


def _base(name: str, place: Mapping[str, int]) -> str:
    """Return the forward node that a node of the step belongs to: w for w.grad.matmul, or ""."""
    # w.grad.matmul, w.grad, w: the first of these that is a forward node.
    while name and name not in place:
        name = name.rpartition(".")[0]
    return name


@dataclass(frozen=True, slots=True)
class _Source:
    """The network that units are cut from.

    `leaves` are the trainable weights; `kept_bytes` the activations stored for backward.
    """

    typed: Graph
    leaves: frozenset[str]
    kept_bytes: Mapping[str, int]


def _part(
    number: int,
    nodes: Sequence[Node],
    source: _Source,
    counted: Collection[str],
    seconds: Mapping[str, Sequence[float]],
) -> Part:
    """Return the sizes and times of one unit; weights in `counted` belong to earlier units."""
    typed = source.typed
    leaves = source.leaves
    kept_bytes = source.kept_bytes
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    produced = {name for node in nodes for name in node.outputs}
    own_leaves = leaves - set(counted)
    weights = [typed.types[name] for name in read if name in own_leaves]
    cut = {n for node in nodes for n in node.inputs if n in own_leaves and _is_cut(typed, node, n)}
    matrices = sum(typed.types[n].elements for n in cut)
    replicated = {name for node in nodes if node.op in WHOLE for name in node.outputs}
    outer = [n for n in read if n not in produced and n not in leaves and n not in typed.constants]
    wide = DTYPE_BYTES[typed.types[nodes[-1].output].dtype]
    pair = {kind: (times[0], times[1]) for kind, times in seconds.items()}
    return Part(
        f"unit{number}:{nodes[0].name}",
        matrices,
        sum(w.elements for w in weights) - matrices,
        tuple(_product(typed, n) for n in nodes if n.op in PRODUCTS and leaves & {*n.inputs}),
        pair["product"],
        pair["cut"],
        pair["whole"],
        float(sum(kept_bytes.get(n, 0) for n in produced - replicated)),
        float(sum(kept_bytes.get(n, 0) for n in produced & replicated)),
        float(sum(typed.types[n].size_bytes for n in outer)),
        float(typed.types[nodes[-1].output].elements * min(wide, HALF_BYTES)),
        any(node.op == "softmax" for node in nodes),
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

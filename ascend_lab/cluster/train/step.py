"""Defines a training step as a graph of operators: forward, backward, update of the parameters.

`TrainingGraph` is such a graph. The functions here choose which constants are trained, which
tensors are computed a second time to save memory, the number format of the computation, and the
optimiser. `run_step` computes a step on NumPy arrays.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node, evaluate, ir, passes
from ascend_lab.compiler.ir import Constant, Fill, Seeded
from ascend_lab.errors import InputError
from ascend_lab.operators.ops.formats import is_float
from ascend_lab.operators.ops.operator import Operator, get


@dataclass(frozen=True)
class TrainingGraph:
    """A step of training as a graph, and what its names mean.

    `parameters` are inputs of the graph, in the order in which the forward pass reads them.
    `gradients` maps each parameter to the tensor that holds its gradient, in the order in which the
    backward pass computes them. Gradients have the number format of the forward pass and are
    multiplied by `loss_scale`. `states` are what the optimiser remembers and the running statistics
    of batch norms. `updates` maps parameters and states to the outputs that replace them in the
    next step; without an optimiser only the running statistics change. `phases` maps the names of
    nodes to forward, recompute, backward or update. `initial` holds the first values of parameters
    and states.
    """

    graph: Graph
    parameters: tuple[str, ...]
    gradients: Mapping[str, str]
    loss: str
    data: tuple[str, ...]
    targets: tuple[str, ...]
    states: tuple[str, ...]
    updates: Mapping[str, str]
    phases: Mapping[str, str]
    initial: Mapping[str, Constant]
    loss_scale: float

    @property
    def parameter_count(self) -> int:
        """The number of elements of all parameters together."""
        return sum(self.graph.types[name].elements for name in self.parameters)


# -- which constants training changes --------------------------------------------------------------
# A floating-point constant is a parameter if its data are `Seeded` (random numbers, which models of
# the zoo use only for weights), or if they are an array at an input that takes weights (`weights`
# of the operator), or one number per channel that is added or multiplied. Constants filled with one
# number (masks, scales), statistics of batch norms and arrays of several axes that are added
# (masks, fixed positions) are not.
STATISTICS = (3, 4)
"""Positions of the inputs of a batch norm that are running averages: mean and variance."""
NORMS = ("batch_norm", "batch_norm_training")


def is_parameter(graph: Graph, name: str) -> bool:
    """Tell whether training changes a constant, by the rule above."""
    constant = graph.constants[name]
    if not is_float(constant.type.dtype) or isinstance(constant.data, Fill):
        return False
    readers = graph.readers[name]
    uses = [
        (node, i)
        for node in readers
        for i, input_name in enumerate(node.inputs)
        if input_name == name
    ]
    # Running means and variances are read by norms but follow the data, not a gradient.
    trained = [(n, i) for n, i in uses if not (n.op in NORMS and i in STATISTICS)]
    if isinstance(constant.data, Seeded):
        return bool(trained)
    return any(_is_weight(constant, node, place) for node, place in trained)


def _is_weight(constant: Constant, node: Node, place: int) -> bool:
    """Tell whether an array is an operator's weights, or holds one number per channel."""
    if place in ir.operator_of(node.op).weights:
        return True
    # A bias of shape (1, 64, 1, 1) has one axis longer than 1.
    long_axes = [n for n in constant.type.shape if n != 1]
    return node.op in ("add", "mul") and len(long_axes) == 1


def trainable(graph: Graph, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the parameters of a graph in the order in which it reads them.

    With `chosen` they are the constants of these names, otherwise those that `is_parameter`
    accepts. Raises `InputError` for a name that is not a floating-point constant of the graph.
    """
    for name in chosen or ():
        constant = graph.constants.get(name)
        if constant is None or not is_float(constant.type.dtype):
            got = "no constant" if constant is None else constant.type.dtype
            raise InputError(f"parameter {name}: a floating-point constant", got, "check the name")
    inputs = (name for node in graph.nodes for name in node.inputs)
    constants = dict.fromkeys(name for name in inputs if name in graph.constants)
    if chosen is not None:
        return tuple(name for name in constants if name in chosen)
    return tuple(name for name in constants if is_parameter(graph, name))


# -- recomputation: memory for time ---------------------------------------------------------------
# With segments of equal cost between the kept tensors, a chain of n layers keeps about sqrt(n)
# tensors for one more forward pass (Chen et al. 2016).
def differentiable_tensors(graph: Graph, parameters: Sequence[str]) -> frozenset[str]:
    """Return the tensors that have a gradient: floating-point ones that depend on a parameter."""
    names = set(parameters)
    for node in graph.nodes:
        if not names.isdisjoint(node.inputs):
            names.update(n for n in node.outputs if is_float(graph.types[n].dtype))
    return frozenset(names)


def cut_tensors(graph: Graph, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors that are the only live one at some moment of the forward pass, in order.

    They divide the network into blocks: there is one between two residual blocks and none inside of
    a residual block. Tensors that depend on no parameter, such as masks, do not count.
    """
    cut_names: dict[str, None] = {}
    for _, live in live_tensors(graph, parameters):
        if len(live) == 1:
            cut_names.update(dict.fromkeys(live))
    return tuple(cut_names)


def live_tensors(graph: Graph, parameters: Sequence[str]) -> Iterator[tuple[Node, set[str]]]:
    """Yield every node and the set of tensors with gradients that later nodes read.

    The set is one object that changes from node to node: copy it to remember it.
    """
    differentiable = differentiable_tensors(graph, parameters) - set(parameters)
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    live: set[str] = set()
    for i, node in enumerate(graph.nodes):
        live.update(name for name in node.outputs if name in differentiable and name in last_use)
        # A residual block: while its branch is computed, the block's input is alive as well; after
        # the addition only the sum is alive, and there the network can be cut.
        live -= {name for name in live if last_use[name] <= i}
        yield node, live


def tensors_between_cuts(graph: Graph, blocks: int, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors to compute twice if only every n-th cut tensor is kept in memory.

    `blocks` is n. Tensors after the last kept cut are kept, since backward reads them at once, and
    so are tensors without a gradient. Raises `InputError` for n below 1.
    """
    if blocks < 1:
        raise InputError("recompute: every n-th block, n of at least 1", str(blocks), "raise it")
    inner_cuts = [name for name in cut_tensors(graph, parameters) if name not in graph.outputs]
    # Of cuts a, b, c, d, e with n = 2: keep b and d, and compute twice what comes before d.
    kept_cuts = inner_cuts[blocks - 1 :: blocks]
    if not kept_cuts:
        return ()
    differentiable = differentiable_tensors(graph, parameters)
    dropped = []
    for node in graph.nodes:
        if kept_cuts[-1] in node.outputs:
            break
        dropped += [n for n in node.outputs if n in differentiable and n not in kept_cuts]
    return tuple(dropped)


def dropped_tensors(
    graph: Graph, recompute: Sequence[str] | int, parameters: Sequence[str]
) -> frozenset[str]:
    """Return the tensors that are not kept for backward but computed a second time.

    `recompute` lists tensors, or nodes for all their outputs; as a number n it keeps only every
    n-th block's tensor (`tensors_between_cuts`). A node computes all its outputs, so naming one
    drops all. Outputs of the graph are always kept. Raises `InputError` for unknown names.
    """
    names = (
        tensors_between_cuts(graph, recompute, parameters)
        if isinstance(recompute, int)
        else recompute
    )
    nodes = {node.name: node for node in graph.nodes}
    dropped: set[str] = set()
    for name in names:
        node = graph.producers.get(name) or nodes.get(name)
        if node is None:
            raise InputError("recompute: nodes or their outputs", repr(name), "check the name")
        dropped.update(node.outputs)
    return frozenset(dropped - set(graph.outputs))


# -- mixed precision: narrow formats with wide masters, and the scale of the loss ------------------
# The step computes in fp16 from copies of fp32 parameters, and updates the fp32 ones: a change
# smaller than half the distance of neighbouring fp16 numbers would otherwise be lost. Gradients
# that fp16 would round to 0 survive because the loss is multiplied by a scale, and they are
# divided by it in fp32 (Micikevicius et al. 2018).
FORMATS = ("fp16", "bf16", "fp32")
LARGEST_SCALE = 2.0**24
"""The scale never grows beyond 2^24, the cap of NVIDIA's Apex.

Without a cap, a run whose gradients never overflow would double the scale every 2000 steps until
the scaled loss itself overflows.
"""


def in_compute_format(
    forward: Graph, dtype: str, parameters: Sequence[str]
) -> tuple[Graph, dict[str, str]]:
    """Return the forward graph that computes in a number format, and the parameters it reads.

    In fp16 it reads the tensor "w.fp16", a copy of the fp32 parameter "w". The second value maps
    the name of each copy to its parameter: {"w.fp16": "w"}.
    """
    if dtype not in FORMATS:
        raise InputError(f"dtype {', '.join(FORMATS)}", dtype, "choose one")
    typed = forward
    for source in FORMATS:
        typed = typed if source == dtype else passes.convert(typed, dtype, source)[0]
    masters = {}
    for name in typed.constants:
        # The conversion calls the copy of a weight w "w_fp16".
        match = re.fullmatch(r"(.+)_(?:fp16|bf16|fp32)(?:_\d+)?", name)
        origin = name if name in forward.constants or match is None else match[1]
        if origin in parameters:
            masters[name] = origin
    formats = {name: typed.types[name].dtype for name in masters}
    # "w_fp16" gets the name "w.fp16"; a parameter in fp32 is read without a copy.
    new_names = {
        name: origin if formats[name] == "fp32" else f"{origin}.{formats[name]}"
        for name, origin in masters.items()
    }
    nodes = tuple(
        replace(node, inputs=tuple(new_names.get(n, n) for n in node.inputs))
        for node in typed.nodes
    )
    types = {new_names.get(n, n): tensor_type for n, tensor_type in typed.types.items()}
    constants = {new_names.get(n, n): constant for n, constant in typed.constants.items()}
    converted = replace(typed, nodes=nodes, types=types, constants=constants)
    return converted, {new_names[name]: origin for name, origin in masters.items()}


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that halves when a gradient overflows and doubles after many good steps.

    `good_steps` counts steps since the last change. The defaults are those of the usual libraries:
    double after 2000 steps without infinity or NaN (Micikevicius et al. 2018).
    """

    scale: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.growth_interval < 1:
            got = f"{self.scale}, {self.growth_interval}"
            raise InputError("a scale above 0 and a growth interval of at least 1", got, "raise it")
        if not (self.growth >= 1.0 and 0.0 < self.backoff < 1.0):
            got = f"{self.growth}, {self.backoff}"
            raise InputError("growth of at least 1, backoff between 0 and 1", got, "change them")

    def next(self, overflowed: bool) -> "DynamicLossScale":
        """Return the scale for the next step; after an overflow this step's update is skipped."""
        if overflowed:
            # 65536 becomes 32768 after an overflow, and 65536 again after 2000 good steps.
            return replace(self, scale=max(1.0, self.scale * self.backoff), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(LARGEST_SCALE, self.scale * self.growth), good_steps=0)


def found_inf(values: Mapping[str, Any]) -> bool:
    """Tell whether any array holds an infinity or NaN, which means that a gradient overflowed."""
    return any(not np.isfinite(np.asarray(v, np.float64)).all() for v in values.values())


# -- the update: an optimiser takes gradients in fp32, divided by the loss scale -------------------
OPTIMISERS = {"sgd": "sgd_momentum", "adam": "adam"}
"""Optimiser -> the operator that updates a parameter, given the parameter, gradient and states."""
RUNNING_MOMENTUM = 0.9
"""Share of the old value in a new running statistic of a batch norm: 0.9 * old + 0.1 * batch."""


@dataclass(frozen=True, slots=True)
class Optimiser:
    """An optimiser and its attributes: lr, momentum, weight_decay, beta1, step, ..."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> Operator:
        """The operator that updates one parameter."""
        return get(OPTIMISERS[self.name])

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors that it remembers for each parameter, such as the momentum."""
        return self.operator.inputs[2:]


def optimiser(choice: str | Optimiser | None) -> Optimiser | None:
    """Return the optimiser of a name; raise `InputError` for an unknown name or attribute."""
    if choice is None:
        return None
    chosen = Optimiser(choice) if isinstance(choice, str) else choice
    if chosen.name not in OPTIMISERS:
        needed = f"optimizer {', '.join(OPTIMISERS)} or None"
        raise InputError(needed, repr(chosen.name), "choose one")
    chosen.operator.settings(chosen.attrs)  # raises for an unknown attribute
    return chosen


# -- running a step on arrays, as a loop of training would -----------------------------------------
Values = np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the loss, and the parameters and states for the next step.

    After an overflow the step is skipped: `values` are those that it started with.
    """

    loss: float
    values: Mapping[str, Values]
    overflow: bool


def first_values(step: TrainingGraph) -> dict[str, Values]:
    """Return the values of parameters and states before the first step."""
    return {name: constant.array() for name, constant in step.initial.items()}


def run_step(
    step: TrainingGraph, values: Mapping[str, Values], data: Mapping[str, Values], number: int = 1
) -> StepResult:
    """Compute one step in NumPy on `data`, the inputs and targets.

    `number` counts the steps from 1: Adam corrects its averages by it. Raises `InputError` for a
    graph without an optimiser, or inputs that are missing.
    """
    if not set(step.parameters) <= step.updates.keys():
        raise InputError("a training graph with an optimiser", "gradients only", "name one")
    outputs = evaluate(at_step(step, number).graph, {**values, **data})
    new_values = {name: outputs[output] for name, output in step.updates.items()}
    overflow = found_inf(new_values)
    return StepResult(
        float(outputs[step.loss][0]), dict(values) if overflow else new_values, overflow
    )


def at_step(step: TrainingGraph, number: int) -> TrainingGraph:
    """Return the graph of the step `number`, counted from 1.

    Adam's averages start at zero, so it divides them by 1 - beta^number.
    """
    if number == 1 or not any(node.op == "adam" for node in step.graph.nodes):
        return step
    nodes = (
        replace(node, attrs={**node.attrs, "step": number}) if node.op == "adam" else node
        for node in step.graph.nodes
    )
    return replace(step, graph=replace(step.graph, nodes=tuple(nodes)))

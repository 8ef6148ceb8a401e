"""A training step as one graph: forward, backward in reverse order, update of the parameters.

    training_graph(forward) reads   data, targets, parameters, states
                            writes  loss, new parameters, new states (or gradients)

Reverse mode: each node's rule turns the gradients of its outputs into those of its inputs; where a
tensor is read several times, they are added. Backward walks the forward nodes from the last to the
first, so that each parameter's gradient is there as soon as it can be.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.errors import GraphError, InputError
from ascend_lab.graph import Constant, Fill, Graph, Node, Value, verify
from ascend_lab.graph.passes.formats import in_format
from ascend_lab.ops.formats import is_float
from ascend_lab.train.step import (
    FORMATS,
    NORMS,
    STATISTICS,
    Optimiser,
    TrainingGraph,
    as_written,
    copies_named,
    declare_states,
    in_compute_format,
    master_of,
    optimiser,
    running,
    telling_names,
    trainable,
    update,
    without,
)
from ascend_lab.train.tape import Tape, gradients


# -- recomputation: memory for time ---------------------------------------------------------------
# With segments of equal cost between the kept tensors, a chain of n layers keeps about sqrt(n)
# tensors for one more forward pass (Chen et al. 2016).
def carried(graph: Graph, parameters: Sequence[str]) -> frozenset[str]:
    """Return the tensors through which gradients flow: floats that hang on a parameter."""
    found = set(parameters)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(n for n in node.outputs if is_float(graph.types[n].dtype))
    return frozenset(found)


def cuts(graph: Graph, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors that alone carry the forward pass at some moment, in its order.

    They part the network into blocks: between a residual block and the next there is one, inside
    there is none. Tensors that hang on no parameter, such as masks, do not count.
    """
    flowing = carried(graph, parameters) - set(parameters)
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    live: set[str] = set()
    found: list[str] = []
    for i, node in enumerate(graph.nodes):
        live.update(name for name in node.outputs if name in flowing and name in last)
        live -= {name for name in live if last[name] <= i}
        if len(live) == 1 and not live.intersection(found):
            found += live
    return tuple(found)


def every(graph: Graph, blocks: int, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors to drop so that every n-th cut is kept; those after the last cut stay.

    What hangs on no parameter is kept too. Raises `InputError` for fewer than one block.
    """
    if blocks < 1:
        raise InputError("recompute: every n-th block, n of at least 1", str(blocks), "raise it")
    inner = [name for name in cuts(graph, parameters) if name not in graph.outputs]
    kept = inner[blocks - 1 :: blocks]
    if not kept:
        return ()
    flowing, dropped = carried(graph, parameters), []
    for node in graph.nodes:
        if kept[-1] in node.outputs:
            break
        dropped += [n for n in node.outputs if n in flowing and n not in kept]
    return tuple(dropped)


def dropped_tensors(
    graph: Graph, recompute: Sequence[str] | int, parameters: Sequence[str]
) -> frozenset[str]:
    """Return the tensors not kept: named themselves or by their node, or by "every n-th block".

    All outputs of a node go together; graph outputs stay. Raises `InputError` for unknown names.
    """
    names = every(graph, recompute, parameters) if isinstance(recompute, int) else recompute
    nodes = {node.name: node for node in graph.nodes}
    found: set[str] = set()
    for name in names:
        node = graph.producers.get(name) or nodes.get(name)
        if node is None:
            raise InputError("recompute: nodes or their outputs", repr(name), "check the name")
        found.update(node.outputs)
    return frozenset(found - set(graph.outputs))


# -- the step -------------------------------------------------------------------------------------
SEED = "loss.seed"
"""Name of the constant, or the start of it, from which backward starts: loss scale / rows."""


def training_graph(
    forward: Graph,
    *,
    optimizer: str | None = "sgd",
    loss: str = "cross_entropy",
    parameters: Sequence[str] | None = None,
    master: str = "fp32",
    dtype: str = "fp32",
    loss_scale: float = 1.0,
    recompute: Sequence[str] | int = (),
    settings: Mapping[str, Any] | None = None,
) -> TrainingGraph:
    """Return one step of training of a forward graph.

    Each output (of any shape) is compared, as (rows, classes), with a target distribution of that
    shape in fp32: "target", "target_1", ...; the loss is the mean over rows, summed over outputs.
    `dtype` is the format of forward and backward, `master` that of parameters and states.
    `recompute` names nodes whose outputs are not kept, or is n: keep every n-th block's output.
    `settings` are the optimiser's attributes (lr, momentum, ...). Raises `UnsupportedError` for an
    operator without a rule, `InputError` for arguments, `GraphError` where there is nothing to
    train.
    """
    if loss != "cross_entropy":
        raise InputError("loss cross_entropy", repr(loss), "append another loss to the graph")
    if not loss_scale > 0:
        raise InputError("a loss scale above 0", str(loss_scale), "1 switches scaling off")
    if master not in FORMATS:
        raise InputError(f"master {', '.join(FORMATS)}", repr(master), "choose one")
    found = optimiser(optimizer, settings)
    names = trainable(forward, parameters)
    step = _Step(forward, in_compute_format(forward, dtype), names, master, recompute)
    step.forward()
    rows = step.losses()
    step.backward(rows, loss_scale)
    return step.finish(found, loss_scale, parameters is not None)


class _Step:
    """The step being written: the tape, and which tensor stands for what."""

    def __init__(
        self,
        given: Graph,
        typed: Graph,
        names: tuple[str, ...],
        master: str,
        recompute: Sequence[str] | int,
    ) -> None:
        self.given, self.names, self.master = given, names, master
        origins = {name: master_of(name, given) for name in typed.constants}
        masters = {name: origin for name, origin in origins.items() if origin in names}
        typed, self.leaves = copies_named(typed, masters, master)
        self.typed = typed
        dropped = dropped_tensors(typed, recompute, tuple(self.leaves))
        self.net = Tape(f"{given.name}_training", "fp32", dropped)
        self.wanted = carried(typed, tuple(self.leaves))
        self.grads: dict[str, Value] = {}
        self.statistics: dict[str, str] = {}
        self.initial: dict[str, Constant] = {}
        self.targets: list[str] = []
        self.loss = ""

    # -- forward ----------------------------------------------------------------------------------
    def forward(self) -> None:
        """Declare data and parameters; append the forward nodes, batch norms as in training."""
        net, typed = self.net, self.typed
        for name in typed.inputs:
            net.input(name, typed.types[name].shape, typed.types[name].dtype)
        for name in self.names:
            self._input(name, self.master)
        for node in typed.nodes:
            self._constants(node)
            net.copy(self._normed(node) if node.op in NORMS else node)

    def _input(self, name: str, dtype: str) -> None:
        """Declare a constant of the given graph as an input."""
        constant = self.given.constants[name]
        constant = constant if constant.type.dtype == dtype else in_format(constant, dtype)
        self.initial[name] = constant
        self.net.input(name, constant.type.shape, dtype)

    def _constants(self, node: Node) -> None:
        """Declare the constants a node reads: copies of parameters, statistics, others as such."""
        net = self.net
        for place, name in enumerate(node.inputs):
            if net.known(name) or name not in self.typed.constants:
                continue
            if name in self.leaves:
                net.copy(self._cast(name))
            elif node.op in NORMS and place in STATISTICS:
                self._input(name, "fp32")
            else:
                net.put_constant(name, self.typed.constants[name])

    def _cast(self, name: str) -> Node:
        """Return the node that copies a parameter to the format forward computes in."""
        dtype, title = self.typed.types[name].dtype, self.net.unique(f"{name}.cast")
        return Node(title, "cast", (self.leaves[name],), (name,), {"dtype": dtype})

    def _normed(self, node: Node) -> Node:
        """Return a batch norm with the batch's statistics; momentum 0 returns those themselves."""
        outs = node.outputs[:1]
        batch = tuple(self.net.unique(f"{node.name}.batch_{key}") for key in ("mean", "variance"))
        for place, new in zip(STATISTICS, batch, strict=True):
            self.statistics[node.inputs[place]] = new
        attrs = {**node.attrs, "momentum": 0.0}
        return Node(node.name, "batch_norm_training", node.inputs, (*outs, *batch), attrs)

    # -- loss -------------------------------------------------------------------------------------
    def losses(self) -> list[Value]:
        """Append the loss; return the losses of the rows of each output."""
        net, outs = self.net, [name for name in self.typed.outputs if name in self.wanted]
        found = [self._rows(net.value(name)) for name in outs]
        if not found:
            got = f"{len(self.names)} parameters, none of which an output hangs on"
            raise GraphError(f"{self.given.name}: parameters to train", got, "name parameters=")
        total = None
        for rows in found:
            mean = net.reduce_mean(rows, axis=(0,), keepdims=True)
            total = mean if total is None else net.add(total, mean)
        assert total is not None
        self.loss = total.name
        return found

    def _rows(self, logits: Value) -> Value:
        """Append the cross entropy of an output's rows, in fp32."""
        net, shape = self.net, logits.shape
        if len(shape) < 2:
            raise GraphError(f"output {logits.name} as (..., classes)", str(shape), "reshape it")
        net.prefix = f"{logits.name}.loss"
        classes, start = shape[-1], len(net.forward)
        wide = net.wide(net.shaped(logits, (logits.type.elements // classes, classes)))
        target = net.input(net.unique("target"), wide.shape, "fp32")
        self.targets.append(target.name)
        rows: Value = net.cross_entropy(wide, target)
        self.wanted |= {name for node in net.forward[start:] for name in node.outputs}
        return rows

    # -- backward ---------------------------------------------------------------------------------
    def backward(self, rows: list[Value], loss_scale: float) -> None:
        """Append the rules of all nodes, last to first."""
        net = self.net
        net.phase = "backward"
        for one in rows:
            data = Fill(loss_scale / one.type.elements)
            self.grads[one.name] = net.constant(data, one.type, SEED)
        for node in reversed(net.forward):
            if node.output in self.leaves:
                continue
            grads = tuple(self.grads.get(name) for name in node.outputs)
            wanted = tuple(name in self.wanted for name in node.inputs)
            if any(wanted) and any(g is not None for g in grads):
                self._add(node, gradients(net, node, grads, wanted))

    def _add(self, node: Node, found: list[Value | None]) -> None:
        """Add gradients to those that the tensors have from other readers."""
        for name, grad in zip(node.inputs, found, strict=True):
            if grad is not None:
                before = self.grads.get(name)
                self.grads[name] = grad if before is None else self.net.add(before, grad)

    def _merged(self) -> dict[str, Value]:
        """Return one gradient per parameter; one that is read in two formats adds them up."""
        found: dict[str, Value] = {}
        for leaf, name in self.leaves.items():
            if leaf in self.grads:
                grad = self.grads[leaf]
                self.net.prefix = f"{name}.grad"
                if name in found:
                    grad = self.net.add(self.net.wide(found[name]), self.net.wide(grad))
                found[name] = grad
        return found

    # -- update -----------------------------------------------------------------------------------
    def finish(self, found: Optimiser | None, scale: float, strict: bool) -> TrainingGraph:
        """Append the updates; return the graph with what its names mean."""
        net, grads = self.net, self._merged()
        missing = [name for name in self.names if name not in grads]
        if missing and strict:
            raise GraphError(f"a gradient of {missing[0]}", "none reaches it", "leave it out")
        net.phase = "update"
        parameters = tuple(name for name in self.names if name in grads)
        new: dict[str, str] = {}
        states: list[str] = []
        for name in as_written(net, grads):
            if found is not None:
                own = declare_states(net, name, net.kind(name), found)
                self.initial.update({state: Constant(net.kind(state), Fill(0.0)) for state in own})
                new.update(update(net, name, grads[name], own, found, scale))
                states += own
        for name, batch in self.statistics.items():
            states.append(name)
            new[name] = running(net, name, batch)
        return self._described(parameters, grads, states, new, scale)

    def _described(
        self,
        parameters: tuple[str, ...],
        grads: Mapping[str, Value],
        states: list[str],
        new: dict[str, str],
        scale: float,
    ) -> TrainingGraph:
        net, ready = self.net, as_written(self.net, grads)
        names = telling_names(net, {n: grads[n].name for n in ready}, new)
        names[self.loss] = net.unique("loss")
        slopes = {name: names.get(grads[name].name, grads[name].name) for name in ready}
        outs = [] if any(p in new for p in parameters) else [grads[name].name for name in ready]
        graph = net.finished([self.loss, *outs, *new.values()], names)
        graph = without(graph, set(self.names) - set(parameters))
        kept = {name: self.initial[name] for name in (*parameters, *states)}
        return TrainingGraph(
            graph=verify(graph),
            parameters=parameters,
            gradients=slopes,
            loss=names[self.loss],
            data=self.typed.inputs,
            targets=tuple(self.targets),
            states=tuple(states),
            updates={old: names.get(one, one) for old, one in new.items()},
            phases={node.name: net.phases[node.name] for node in graph.nodes},
            initial=kept,
            loss_scale=scale,
        )

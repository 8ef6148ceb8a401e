"""Builds the graph of a training step from a forward graph by reverse-mode differentiation.

    training_graph(forward) reads   data, targets, parameters, states
                            writes  loss, new parameters, new states (or gradients)

The rule of each operator computes the gradients of its inputs from those of its outputs; if several
nodes read a tensor, their gradients are added. The backward pass visits the forward nodes from the
last to the first, so that each parameter's gradient is computed as early as possible. The graph is
written on a `Tape`, a graph builder that marks the phase of each node and computes tensors again
that were not kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab import compiler as graphs
from ascend_lab.cluster.train import step as steps
from ascend_lab.compiler import (
    Constant,
    Fill,
    Graph,
    GraphBuilder,
    Node,
    TensorType,
    Value,
    infer,
    ir,
)
from ascend_lab.compiler.passes.formats import in_format
from ascend_lab.errors import GraphError, InputError
from ascend_lab.operators.ops.formats import Shape
from ascend_lab.operators.ops.gradients import Site, Writer, input_gradients

SEED = "loss.seed"
"""Name of the constant, or the start of it, from which backward starts: loss scale / rows."""


def training_graph(
    forward: Graph,
    *,
    optimizer: str | steps.Optimiser | None = "sgd",
    parameters: Sequence[str] | None = None,
    dtype: str = "fp32",
    loss_scale: float = 1.0,
    recompute: Sequence[str] | int = (),
) -> steps.TrainingGraph:
    """Return one step of training of a forward graph.

    Each output (of any shape) is compared, as (rows, classes), with a target distribution of that
    shape in fp32: "target", "target_1", ...; the loss is the mean cross entropy over rows, summed
    over outputs. `dtype` is the format of forward and backward; parameters and states are fp32.
    `recompute` names nodes whose outputs are not kept, or is n: keep every n-th block's output.
    `optimizer` is a name or, with attributes (lr, momentum, ...), an `Optimiser`. Raises
    `UnsupportedError` for an operator without a rule, `InputError` for arguments, `GraphError`
    where there is nothing to train.
    """
    if not loss_scale > 0:
        raise InputError("a loss scale above 0", str(loss_scale), "1 switches scaling off")
    rule = steps.optimiser(optimizer)
    names = steps.trainable(forward, parameters)
    step = _Step(forward, dtype, names, recompute)
    step.forward()
    rows = step.losses()
    step.backward(rows, loss_scale)
    return step.finish(rule, loss_scale, parameters is not None)


class _Step:
    """A step under construction: the tape, and the tensors by their names in the forward graph."""

    def __init__(
        self, given: Graph, dtype: str, names: tuple[str, ...], recompute: Sequence[str] | int
    ) -> None:
        self.given = given
        self.names = names
        typed, self.leaves = steps.in_compute_format(given, dtype, names)
        self.typed = typed
        dropped = steps.dropped_tensors(typed, recompute, tuple(self.leaves))
        self.net = Tape(f"{given.name}_training", "fp32", dropped)
        self.wanted = steps.differentiable_tensors(typed, tuple(self.leaves))
        self.grads: dict[str, Value] = {}
        self.statistics: dict[str, str] = {}
        self.initial: dict[str, Constant] = {}
        self.targets: list[str] = []
        self.loss = ""

    # -- forward ----------------------------------------------------------------------------------
    def forward(self) -> None:
        """Declare data and parameters; append the forward nodes, batch norms as in training."""
        net = self.net
        typed = self.typed
        for name in typed.inputs:
            net.input(name, typed.types[name].shape, typed.types[name].dtype)
        for name in self.names:
            self._input(name)
        for node in typed.nodes:
            self._constants(node)
            net.copy(self._normed(node) if node.op in steps.NORMS else node)

    def _input(self, name: str) -> None:
        """Declare a constant of the given graph as an input in fp32."""
        constant = self.given.constants[name]
        constant = constant if constant.type.dtype == "fp32" else in_format(constant, "fp32")
        self.initial[name] = constant
        self.net.input(name, constant.type.shape, "fp32")

    def _constants(self, node: Node) -> None:
        """Declare the constants that a node reads; parameters are read through their copies."""
        net = self.net
        for place, name in enumerate(node.inputs):
            if net.known(name) or name not in self.typed.constants:
                continue
            if name in self.leaves:
                cast = net.unique(f"{name}.cast")
                dtype = self.typed.types[name].dtype
                net.copy(Node(cast, "cast", (self.leaves[name],), (name,), {"dtype": dtype}))
            elif node.op in steps.NORMS and place in steps.STATISTICS:
                self._input(name)
            else:
                constant = self.typed.constants[name]
                net.constant(constant.data, constant.type, name)

    def _normed(self, node: Node) -> Node:
        """Return a batch norm that uses the batch's statistics, and returns them (momentum 0)."""
        outs = node.outputs[:1]
        batch = tuple(self.net.unique(f"{node.name}.batch_{key}") for key in ("mean", "variance"))
        for place, statistic in zip(steps.STATISTICS, batch, strict=True):
            self.statistics[node.inputs[place]] = statistic
        attrs = {**node.attrs, "momentum": 0.0}
        return Node(node.name, "batch_norm_training", node.inputs, (*outs, *batch), attrs)

    # -- loss -------------------------------------------------------------------------------------
    def losses(self) -> list[Value]:
        """Append the loss; return the losses of the rows of each output."""
        net = self.net
        # An output that depends on no parameter (for example a mask that is passed on) gets no
        # loss.
        outs = [name for name in self.typed.outputs if name in self.wanted]
        outputs = [self._rows(net.value(name)) for name in outs]
        if not outputs:
            got = f"{len(self.names)} parameters, none of which an output hangs on"
            remedy = "give a model with weights, or name parameters= in Python"
            raise GraphError(f"{self.given.name}: parameters to train", got, remedy)
        total = None
        for rows in outputs:
            mean = net.reduce_mean(rows, axis=(0,), keepdims=True)
            total = mean if total is None else net.add(total, mean)
        assert total is not None
        self.loss = total.name
        return outputs

    def _rows(self, logits: Value) -> Value:
        """Append the cross entropy of an output's rows, in fp32."""
        net = self.net
        shape = logits.shape
        if len(shape) < 2:
            raise GraphError(f"output {logits.name} as (..., classes)", str(shape), "reshape it")
        net.prefix = f"{logits.name}.loss"
        classes = shape[-1]
        start = len(net.forward)
        # (2, 128, 30522) becomes (256, 30522): each token is a row.
        wide = net.wide(net.shaped(logits, (logits.type.elements // classes, classes)))
        target = net.input(net.unique("target"), wide.shape, "fp32")
        self.targets.append(target.name)
        rows: Value = net.cross_entropy(wide, target)
        self.wanted |= {name for node in net.forward[start:] for name in node.outputs}
        return rows

    # -- backward ---------------------------------------------------------------------------------
    def backward(self, rows: list[Value], loss_scale: float) -> None:
        """Append the gradients of all nodes, from the last node to the first."""
        net = self.net
        net.phase = "backward"
        for row in rows:
            # The loss is a mean: each of 32 rows has slope 1/32, or 32 with a loss scale of
            # 1024, so that small gradients do not underflow in fp16.
            data = Fill(loss_scale / row.type.elements)
            self.grads[row.name] = net.constant(data, row.type, SEED)
        for node in reversed(net.forward):
            if node.output in self.leaves:
                continue
            grads = tuple(self.grads.get(name) for name in node.outputs)
            needs_grad = tuple(name in self.wanted for name in node.inputs)
            if any(needs_grad) and any(g is not None for g in grads):
                self._add(node, gradients(net, node, grads, needs_grad))

    def _add(self, node: Node, found: list[Value | None]) -> None:
        """Add the gradients `found` to those that a node's inputs have from other readers."""
        for name, grad in zip(node.inputs, found, strict=True):
            if grad is not None:
                # A tensor with two readers (a residual) has two gradients, which add up.
                previous = self.grads.get(name)
                self.grads[name] = grad if previous is None else self.net.add(previous, grad)

    def _merged(self) -> dict[str, Value]:
        """Return one gradient per parameter: the sum of two if it is read in two formats."""
        merged: dict[str, Value] = {}
        for leaf, name in self.leaves.items():
            if leaf in self.grads:
                grad = self.grads[leaf]
                self.net.prefix = f"{name}.grad"
                if name in merged:
                    # For example a weight that a product reads in fp16 and a norm in fp32: added in
                    # fp32.
                    grad = self.net.add(self.net.wide(merged[name]), self.net.wide(grad))
                merged[name] = grad
        return merged

    # -- update -----------------------------------------------------------------------------------
    def finish(
        self, found: steps.Optimiser | None, scale: float, strict: bool
    ) -> steps.TrainingGraph:
        """Append the updates; return the graph with the roles of its tensors."""
        net = self.net
        grads = self._merged()
        missing = [name for name in self.names if name not in grads]
        if missing and strict:
            raise GraphError(f"a gradient of {missing[0]}", "none reaches it", "leave it out")
        net.phase = "update"
        parameters = tuple(name for name in self.names if name in grads)
        updated_names: dict[str, str] = {}
        states: list[str] = []
        for name in net.in_order(grads):
            if found is not None:
                updates = self._updated(name, grads[name], found, scale)
                updated_names.update(updates)
                states += list(updates)[1:]
        for name, batch in self.statistics.items():
            states.append(name)
            updated_names[name] = self._running(name, batch)
        return self._described(parameters, grads, states, updated_names, scale)

    def _updated(
        self, name: str, grad: Value, found: steps.Optimiser, scale: float
    ) -> dict[str, str]:
        """Append a parameter's update; return the new tensor of the parameter and of each state."""
        net = self.net
        weight = self.net.value(name)
        states = [net.unique(f"{name}.{state}") for state in found.states]
        for state in states:
            net.input(state, weight.shape, weight.type.dtype)
            self.initial[state] = Constant(weight.type, Fill(0.0))
        net.prefix = f"{name}.update"
        # The gradient is divided by the loss scale after the cast to fp32, where it cannot
        # underflow.
        unscaled = net.scaled(net.in_format(grad, weight.type.dtype), 1.0 / scale)
        arguments = (weight, unscaled, *map(net.value, states))
        results = net.add_node(found.operator.name, *arguments, **found.attrs)
        return {
            old_name: result.name for old_name, result in zip((name, *states), results, strict=True)
        }

    def _running(self, name: str, batch: str) -> str:
        """Append a running statistic, m * old + (1 - m) * batch; return the name of the new one."""
        net = self.net
        net.prefix = f"{name}.update"
        # Old 2, batch 3: 0.9 * 2 + 0.1 * 3 = 2.1.
        old_share = net.muls(net.value(name), number=steps.RUNNING_MOMENTUM)
        batch_share = net.muls(net.value(batch), number=1.0 - steps.RUNNING_MOMENTUM)
        average: Value = net.add(old_share, batch_share)
        return average.name

    def _described(
        self,
        parameters: tuple[str, ...],
        grads: Mapping[str, Value],
        states: list[str],
        new: dict[str, str],
        scale: float,
    ) -> steps.TrainingGraph:
        net = self.net
        ready = self.net.in_order(grads)
        names = net.telling({n: grads[n].name for n in ready}, new)
        names[self.loss] = net.unique("loss")
        slopes = {name: names.get(grads[name].name, grads[name].name) for name in ready}
        outs = [] if any(p in new for p in parameters) else [grads[name].name for name in ready]
        graph = graphs.pruned(net.finished([self.loss, *outs, *new.values()], names))
        # A parameter without a gradient is an input that no node reads: it is removed.
        unused = set(self.names) - set(parameters)
        graph = replace(graph, inputs=tuple(name for name in graph.inputs if name not in unused))
        return steps.TrainingGraph(
            graph=graphs.verify(graph),
            parameters=parameters,
            gradients=slopes,
            loss=names[self.loss],
            data=self.typed.inputs,
            targets=tuple(self.targets),
            states=tuple(states),
            updates={old_name: names.get(new_name, new_name) for old_name, new_name in new.items()},
            phases={node.name: net.phases[node.name] for node in graph.nodes},
            initial={name: self.initial[name] for name in (*parameters, *states)},
            loss_scale=scale,
        )


# -- the tape -------------------------------------------------------------------------------------
class Tape(GraphBuilder, Writer):
    """A graph builder whose nodes have a phase; names of unnamed nodes begin with `prefix`.

    Tensors in `dropped` are not kept for backward: `kept` appends their producers again.
    """

    def __init__(self, name: str, dtype: str, dropped: frozenset[str] = frozenset()) -> None:
        super().__init__(name, dtype)
        self.phase = "forward"
        self.prefix = ""
        self.dropped = dropped
        self.phases: dict[str, str] = {}
        self.forward: list[Node] = []
        self._makers: dict[str, Node] = {}
        self._copies: dict[str, Value] = {}
        self._fills: dict[tuple[float, Shape, str], Value] = {}

    # -- nodes ------------------------------------------------------------------------------------
    def add_node(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Any:
        """Append a node of the current phase, as `GraphBuilder.add_node` does."""
        title = name or (f"{self.prefix}.{op}" if self.prefix else op)
        outputs = super().add_node(op, *inputs, name=self.unique(title), **attrs)
        self._record(self._nodes[-1])
        return outputs

    def copy(self, node: Node) -> None:
        """Append a node without changing its names."""
        kinds = infer(node.op, [self._types[name] for name in node.inputs], node.attrs)
        for name, kind in zip(node.outputs, kinds, strict=True):
            self._add(name, kind)
        self._nodes.append(node)
        self._record(node)

    def _record(self, node: Node) -> None:
        self.phases[node.name] = self.phase
        if self.phase == "forward":
            self.forward.append(node)
            self._makers.update(dict.fromkeys(node.outputs, node))

    def kind(self, name: str) -> TensorType:
        """Return the type of a tensor; a dropped tensor is not computed again for it."""
        return self._types[name]

    def known(self, name: str) -> bool:
        """Tell whether a tensor with this name exists."""
        return name in self._types

    def value(self, name: str) -> Value:
        """Return a tensor by name."""
        return Value(name, self._types[name])

    def number(self, value: float, shape: Shape, dtype: str) -> Value:
        """Return a constant filled with one number; equal constants are shared."""
        key = (value, shape, dtype)
        if key not in self._fills:
            self._fills[key] = self.constant(Fill(value), TensorType(shape, dtype), "number")
        return self._fills[key]

    # -- recomputation ----------------------------------------------------------------------------
    def kept(self, name: str) -> Value:
        """Return a tensor of the forward pass, which is kept or computed again at its first use."""
        if name not in self.dropped:
            return self.value(name)
        # Depth first without recursion: a tensor whose inputs were dropped too waits until these
        # are computed again. Only the tensors on which this one depends are recomputed.
        ahead = [name]
        while ahead:
            node = self._makers[ahead[-1]]
            missing = [n for n in node.inputs if n in self.dropped and n not in self._copies]
            if missing:
                ahead += missing
            else:
                self._again(node)
                ahead.pop()
        return self._copies[name]

    def _again(self, node: Node) -> None:
        if node.output in self._copies:
            return
        phase = self.phase
        self.phase = "recompute"
        reads = (self._copies[n].name if n in self.dropped else n for n in node.inputs)
        title = self.unique(f"{node.name}.again")
        outs = tuple(self.unique(f"{name}.again") for name in node.outputs)
        self.copy(Node(title, node.op, tuple(reads), outs, node.attrs))
        self._copies.update(zip(node.outputs, map(self.value, outs), strict=True))
        self.phase = phase

    # -- the end ----------------------------------------------------------------------------------
    def in_order(self, grads: Mapping[str, Value]) -> list[str]:
        """Return the parameters in the order in which their gradients are written."""
        order = {name: i for i, node in enumerate(self._nodes) for name in node.outputs}
        return sorted(grads, key=lambda name: order.get(grads[name].name, -1))

    def telling(self, grads: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
        """Return descriptive names of tensors, w.grad or w.new; a tensor that is both is w.grad."""
        written = {name for node in self._nodes for name in node.outputs}
        origins: dict[str, str] = {}
        for ending, pairs in (("grad", grads), ("new", new)):
            for name, tensor in pairs.items():
                if tensor in written and tensor not in origins and tensor != f"{name}.{ending}":
                    origins[tensor] = self.unique(f"{name}.{ending}")
        return origins

    def finished(self, outputs: Sequence[str], names: Mapping[str, str]) -> Graph:
        """Return the verified graph with these outputs, tensors renamed by `names`."""
        self._outputs = list(outputs)
        graph = self.build()

        def new(found: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in found)

        nodes = tuple(replace(n, inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes)
        types = {names.get(name, name): kind for name, kind in graph.types.items()}
        return replace(graph, nodes=nodes, types=types, outputs=new(graph.outputs))


def gradients(
    net: Tape, node: Node, grads: tuple[Value | None, ...], wanted: tuple[bool, ...]
) -> list[Value | None]:
    """Append the gradients of a node's inputs and return them; None for each that is not needed.

    Raises `UnsupportedError` for an operator without a rule.
    """
    net.prefix = f"{node.name}.grad"
    operator = ir.operator_of(node.op)
    settings = operator.settings(node.attrs)
    tensors = (node.inputs, node.outputs)
    return input_gradients(
        operator, Site(net, node.op, node.name, *tensors, grads, wanted, settings, operator.wide)
    )

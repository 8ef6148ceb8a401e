"""Builds the graph of a training step from a forward graph by reverse-mode differentiation.

    training_graph(forward) reads   data, targets, parameters, states
                            writes  loss, new parameters, new states (or gradients)

The rule of each operator computes the gradients of its inputs from those of its outputs; if several
nodes read a tensor, their gradients are added. The backward pass visits the forward nodes from the
last to the first, so that each parameter's gradient is computed as early as possible. The graph is
written on a `Tape`, a graph builder that marks the phase of each node and recomputes tensors that
were not kept.

For y = w x with a loss l of y, the backward pass appends dl/dw = dl/dy x^T (and dl/dx = w^T dl/dy
if x depends on a parameter), the update appends w.new.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.cluster.train import step as steps
from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType, ir
from ascend_lab.compiler.draft import Value, pruned
from ascend_lab.compiler.ir import Constant, Fill, infer, verify
from ascend_lab.compiler.passes.formats import in_format
from ascend_lab.errors import GraphError, InputError
from ascend_lab.operators.ops.formats import Shape
from ascend_lab.operators.ops.gradients import Site, Writer, input_gradients

SEED = "loss.seed"
"""Prefix of the names of the constants with which the backward pass begins: loss scale / rows."""


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
    `recompute` names nodes whose outputs are not kept, or is n: keep every n-th block's output
    (`step.tensors_between_cuts` says what a block is).
    `optimizer` is a name or, with attributes (lr, momentum, ...), an `Optimiser`. Raises
    `UnsupportedError` for an operator without a rule, `InputError` for arguments, `GraphError`
    where there is nothing to train.
    """
    if not loss_scale > 0:
        raise InputError("a loss scale above 0", str(loss_scale), "1 switches scaling off")
    rule = steps.optimiser(optimizer)
    names = steps.trainable(forward, parameters)
    training_step = _Step(forward, dtype, names, recompute)
    training_step.forward()
    row_losses = training_step.losses()
    training_step.backward(row_losses, loss_scale)
    return training_step.finish(rule, loss_scale, all_required=parameters is not None)


class _Step:
    """A step under construction: the tape, and the tensors by their names in the forward graph.

    `typed` is the forward graph `original` in the format of the computation. `masters` maps each
    parameter that it reads to the fp32 one, {"w.fp16": "w"}. `needs_gradient` are the tensors that
    depend on a parameter, `grads` their gradients so far. `statistics` maps each running statistic
    of a batch norm to that of this batch. `initial` holds the first values of parameters and
    states.
    """

    def __init__(
        self, original: Graph, dtype: str, names: tuple[str, ...], recompute: Sequence[str] | int
    ) -> None:
        self.original = original
        self.names = names
        typed, self.masters = steps.in_compute_format(original, dtype, names)
        self.typed = typed
        dropped = steps.dropped_tensors(typed, recompute, tuple(self.masters))
        self.tape = Tape(f"{original.name}_training", "fp32", dropped)
        self.needs_gradient = steps.differentiable_tensors(typed, tuple(self.masters))
        self.grads: dict[str, Value] = {}
        self.statistics: dict[str, str] = {}
        self.initial: dict[str, Constant] = {}
        self.targets: list[str] = []
        self.loss = ""

    # -- forward ----------------------------------------------------------------------------------
    def forward(self) -> None:
        """Declare data and parameters; append the forward nodes, batch norms as in training."""
        tape = self.tape
        typed = self.typed
        for name in typed.inputs:
            tape.input(name, typed.types[name].shape, typed.types[name].dtype)
        for name in self.names:
            self._input(name)
        for node in typed.nodes:
            self._constants(node)
            tape.copy(self._batch_statistics_norm(node) if node.op in steps.NORMS else node)

    def _input(self, name: str) -> None:
        """Declare a constant of the forward graph as an input in fp32."""
        constant = self.original.constants[name]
        if constant.type.dtype != "fp32":
            constant = in_format(constant, "fp32")
        self.initial[name] = constant
        self.tape.input(name, constant.type.shape, "fp32")

    def _constants(self, node: Node) -> None:
        """Declare the constants that a node reads; parameters are read through their copies."""
        tape = self.tape
        for position, name in enumerate(node.inputs):
            if tape.has_tensor(name) or name not in self.typed.constants:
                continue
            if name in self.masters:
                cast = tape.unique(f"{name}.cast")
                dtype = self.typed.types[name].dtype
                tape.copy(Node(cast, "cast", (self.masters[name],), (name,), {"dtype": dtype}))
            elif node.op in steps.NORMS and position in steps.STATISTICS:
                self._input(name)
            else:
                constant = self.typed.constants[name]
                tape.constant(constant.data, constant.type, name)

    def _batch_statistics_norm(self, node: Node) -> Node:
        """Return a batch norm that uses the batch's statistics, and returns them (momentum 0)."""
        mean = self.tape.unique(f"{node.name}.batch_mean")
        variance = self.tape.unique(f"{node.name}.batch_variance")
        mean_position, variance_position = steps.STATISTICS
        self.statistics[node.inputs[mean_position]] = mean
        self.statistics[node.inputs[variance_position]] = variance
        outputs = (node.outputs[0], mean, variance)
        attrs = {**node.attrs, "momentum": 0.0}
        return Node(node.name, "batch_norm_training", node.inputs, outputs, attrs)

    # -- loss -------------------------------------------------------------------------------------
    def losses(self) -> list[Value]:
        """Append the loss; return the losses of the rows of each output."""
        tape = self.tape
        # An output that depends on no parameter (for example a mask that is passed on) gets no
        # loss.
        names = [name for name in self.typed.outputs if name in self.needs_gradient]
        losses = [self._row_losses(tape.value(name)) for name in names]
        if not losses:
            got = f"{len(self.names)} parameters, none of which an output hangs on"
            remedy = "give a model with weights, or name parameters= in Python"
            raise GraphError(f"{self.original.name}: parameters to train", got, remedy)
        total = None
        for row_losses in losses:
            mean = tape.reduce_mean(row_losses, axis=(0,), keepdims=True)
            total = mean if total is None else tape.add(total, mean)
        assert total is not None
        self.loss = total.name
        return losses

    def _row_losses(self, logits: Value) -> Value:
        """Append the cross entropy of an output's rows, in fp32."""
        tape = self.tape
        shape = logits.shape
        if len(shape) < 2:
            raise GraphError(f"output {logits.name} as (..., classes)", str(shape), "reshape it")
        tape.prefix = f"{logits.name}.loss"
        classes = shape[-1]
        start = len(tape.forward)
        # (2, 128, 30522) becomes (256, 30522): each token is a row.
        wide = tape.wide(tape.shaped(logits, (logits.type.elements // classes, classes)))
        target = tape.input(tape.unique("target"), wide.shape, "fp32")
        self.targets.append(target.name)
        row_losses: Value = tape.cross_entropy(wide, target)
        loss_nodes = tape.forward[start:]
        self.needs_gradient |= {name for node in loss_nodes for name in node.outputs}
        return row_losses

    # -- backward ---------------------------------------------------------------------------------
    def backward(self, losses: list[Value], loss_scale: float) -> None:
        """Append the gradients of all nodes, from the last node to the first."""
        tape = self.tape
        tape.phase = "backward"
        for row_losses in losses:
            # The loss is a mean: each of 32 rows has slope 1/32, or 32 with a loss scale of
            # 1024, so that small gradients do not underflow in fp16.
            slope = Fill(loss_scale / row_losses.type.elements)
            self.grads[row_losses.name] = tape.constant(slope, row_losses.type, SEED)
        for node in reversed(tape.forward):
            if node.output in self.masters:
                continue
            grads = tuple(self.grads.get(name) for name in node.outputs)
            needs_grad = tuple(name in self.needs_gradient for name in node.inputs)
            if any(needs_grad) and any(g is not None for g in grads):
                self._accumulate(node, gradients(tape, node, grads, needs_grad))

    def _accumulate(self, node: Node, input_grads: list[Value | None]) -> None:
        """Add the gradients of a node's inputs to those that they have from other readers."""
        for name, grad in zip(node.inputs, input_grads, strict=True):
            if grad is not None:
                # A tensor with two readers (a residual) has two gradients, which add up.
                previous = self.grads.get(name)
                self.grads[name] = grad if previous is None else self.tape.add(previous, grad)

    def _parameter_gradients(self) -> dict[str, Value]:
        """Return one gradient per parameter: the sum of two if it is read in two formats."""
        tape = self.tape
        merged: dict[str, Value] = {}
        for read_name, name in self.masters.items():
            if read_name not in self.grads:
                continue
            tape.prefix = f"{name}.grad"
            if name in merged:
                # For example a weight that a product reads in fp16 and a norm in fp32: added in
                # fp32.
                merged[name] = tape.add(tape.wide(merged[name]), tape.wide(self.grads[read_name]))
            else:
                merged[name] = self.grads[read_name]
        return merged

    # -- update -----------------------------------------------------------------------------------
    def finish(
        self, optimiser: steps.Optimiser | None, scale: float, *, all_required: bool
    ) -> steps.TrainingGraph:
        """Append the updates; return the graph with the roles of its tensors.

        `all_required`: a parameter without a gradient is an error.
        """
        tape = self.tape
        grads = self._parameter_gradients()
        missing = [name for name in self.names if name not in grads]
        if missing and all_required:
            raise GraphError(f"a gradient of {missing[0]}", "none reaches it", "leave it out")
        tape.phase = "update"
        parameters = tuple(name for name in self.names if name in grads)
        updated_names: dict[str, str] = {}
        states: list[str] = []
        for name in tape.in_order(grads):
            if optimiser is not None:
                updates = self._update(name, grads[name], optimiser, scale)
                updated_names.update(updates)
                # the first entry is the parameter, all others are states
                states += list(updates)[1:]
        for name, batch in self.statistics.items():
            states.append(name)
            updated_names[name] = self._running_statistic(name, batch)
        return self._training_graph(parameters, grads, states, updated_names, scale)

    def _update(
        self, name: str, grad: Value, optimiser: steps.Optimiser, scale: float
    ) -> dict[str, str]:
        """Append a parameter's update; return the new tensor of the parameter and of each state."""
        tape = self.tape
        weight = tape.value(name)
        states = [tape.unique(f"{name}.{state}") for state in optimiser.states]
        for state in states:
            tape.input(state, weight.shape, weight.type.dtype)
            self.initial[state] = Constant(weight.type, Fill(0.0))
        tape.prefix = f"{name}.update"
        # The gradient is divided by the loss scale after the cast to fp32, where it cannot
        # underflow.
        unscaled = tape.scaled(tape.in_format(grad, weight.type.dtype), 1.0 / scale)
        arguments = (weight, unscaled, *map(tape.value, states))
        results = tape.add_node(optimiser.operator.name, *arguments, **optimiser.attrs)
        pairs = zip((name, *states), results, strict=True)
        return {old_name: result.name for old_name, result in pairs}

    def _running_statistic(self, name: str, batch: str) -> str:
        """Append a running statistic, m * old + (1 - m) * batch; return the name of the new one."""
        tape = self.tape
        tape.prefix = f"{name}.update"
        # Old 2, batch 3: 0.9 * 2 + 0.1 * 3 = 2.1.
        old_share = tape.muls(tape.value(name), number=steps.RUNNING_MOMENTUM)
        batch_share = tape.muls(tape.value(batch), number=1.0 - steps.RUNNING_MOMENTUM)
        average: Value = tape.add(old_share, batch_share)
        return average.name

    def _training_graph(
        self,
        parameters: tuple[str, ...],
        grads: Mapping[str, Value],
        states: list[str],
        updated_names: dict[str, str],
        scale: float,
    ) -> steps.TrainingGraph:
        """Name the tensors, choose the outputs, and return the graph without unused nodes.

        The outputs are the loss, the new parameters and states, and the gradients if no parameter
        is updated.
        """
        tape = self.tape
        ready = tape.in_order(grads)
        names = tape.descriptive_names({n: grads[n].name for n in ready}, updated_names)
        names[self.loss] = tape.unique("loss")
        is_updated = any(name in updated_names for name in parameters)
        output_grads = [] if is_updated else [grads[name].name for name in ready]
        outputs = [self.loss, *output_grads, *updated_names.values()]
        graph = pruned(tape.finished(outputs, names))
        # A parameter without a gradient is an input that no node reads: it is removed.
        unused = set(self.names) - set(parameters)
        graph = replace(graph, inputs=tuple(name for name in graph.inputs if name not in unused))
        return steps.TrainingGraph(
            graph=verify(graph),
            parameters=parameters,
            gradients={n: names.get(grads[n].name, grads[n].name) for n in ready},
            loss=names[self.loss],
            data=self.typed.inputs,
            targets=tuple(self.targets),
            states=tuple(states),
            updates={n: names.get(tensor, tensor) for n, tensor in updated_names.items()},
            phases={node.name: tape.phases[node.name] for node in graph.nodes},
            initial={name: self.initial[name] for name in (*parameters, *states)},
            loss_scale=scale,
        )


# -- the tape -------------------------------------------------------------------------------------
class Tape(GraphBuilder, Writer):
    """A graph builder whose nodes have a phase; names of unnamed nodes begin with `prefix`.

    Tensors in `dropped` are not kept for backward: `kept` appends their producers a second time.
    """

    def __init__(self, name: str, dtype: str, dropped: frozenset[str] = frozenset()) -> None:
        super().__init__(name, dtype)
        self.phase = "forward"
        self.prefix = ""
        self.dropped = dropped
        self.phases: dict[str, str] = {}
        self.forward: list[Node] = []
        self._producers: dict[str, Node] = {}
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
        types = infer(node.op, [self._types[name] for name in node.inputs], node.attrs)
        for name, tensor_type in zip(node.outputs, types, strict=True):
            self._add(name, tensor_type)
        self._nodes.append(node)
        self._record(node)

    def _record(self, node: Node) -> None:
        self.phases[node.name] = self.phase
        if self.phase == "forward":
            self.forward.append(node)
            self._producers.update(dict.fromkeys(node.outputs, node))

    def kind(self, name: str) -> TensorType:
        """Return the type of a tensor; a dropped tensor is not recomputed for that."""
        return self._types[name]

    def has_tensor(self, name: str) -> bool:
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
        stack = [name]
        while stack:
            node = self._producers[stack[-1]]
            missing = [n for n in node.inputs if n in self.dropped and n not in self._copies]
            if missing:
                stack += missing
            else:
                self._recompute(node)
                stack.pop()
        return self._copies[name]

    def _recompute(self, node: Node) -> None:
        """Append a copy of a forward node, unless there is one; its dropped inputs have copies."""
        if node.output in self._copies:
            return
        phase = self.phase
        self.phase = "recompute"
        reads = (self._copies[n].name if n in self.dropped else n for n in node.inputs)
        title = self.unique(f"{node.name}.again")
        outputs = tuple(self.unique(f"{name}.again") for name in node.outputs)
        self.copy(Node(title, node.op, tuple(reads), outputs, node.attrs))
        self._copies.update(zip(node.outputs, map(self.value, outputs), strict=True))
        self.phase = phase

    # -- the end ----------------------------------------------------------------------------------
    def in_order(self, grads: Mapping[str, Value]) -> list[str]:
        """Return the parameters in the order in which their gradients are written."""
        order = {name: i for i, node in enumerate(self._nodes) for name in node.outputs}
        return sorted(grads, key=lambda name: order.get(grads[name].name, -1))

    def descriptive_names(
        self, grads: Mapping[str, str], updates: Mapping[str, str]
    ) -> dict[str, str]:
        """Return descriptive names of tensors, w.grad or w.new; a tensor that is both is w.grad."""
        written = {name for node in self._nodes for name in node.outputs}
        new_names: dict[str, str] = {}
        for ending, tensors in (("grad", grads), ("new", updates)):
            for name, tensor in tensors.items():
                if tensor in written and tensor not in new_names and tensor != f"{name}.{ending}":
                    new_names[tensor] = self.unique(f"{name}.{ending}")
        return new_names

    def finished(self, outputs: Sequence[str], names: Mapping[str, str]) -> Graph:
        """Return the verified graph with these outputs, tensors renamed by `names`."""
        self._outputs = list(outputs)
        graph = self.build()

        def renamed(old_names: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in old_names)

        nodes = tuple(
            replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs))
            for node in graph.nodes
        )
        types = {names.get(name, name): tensor_type for name, tensor_type in graph.types.items()}
        return replace(graph, nodes=nodes, types=types, outputs=renamed(graph.outputs))


def gradients(
    tape: Tape, node: Node, grads: tuple[Value | None, ...], needs_gradient: tuple[bool, ...]
) -> list[Value | None]:
    """Append the gradients of a node's inputs and return them; None for each that is not needed.

    `grads` are the gradients of its outputs. Raises `UnsupportedError` for an operator without a
    rule.
    """
    tape.prefix = f"{node.name}.grad"
    operator = ir.operator_of(node.op)
    site = Site(
        net=tape,
        op=node.op,
        name=node.name,
        inputs=node.inputs,
        outputs=node.outputs,
        grads=grads,
        needs_gradient=needs_gradient,
        attrs=operator.settings(node.attrs),
        wide=operator.wide,
    )
    return input_gradients(operator, site)

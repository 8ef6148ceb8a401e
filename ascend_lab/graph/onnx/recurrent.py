"""Layers with a state, unrolled: every step of the sequence becomes nodes of its own.

RNN, GRU, LSTM: with x the step's input and h the state before it, gates are x W^T + h R^T + biases;
their order in the weights is the standard's: LSTM i o f c, GRU z r h. Linear attention: a state of
keys times values, which forgets, learns and is read by queries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.converter import Result, converter
from ascend_lab.graph.onnx.tensors import FLOATS

_TYPES = (FLOATS, FLOATS, FLOATS, FLOATS, ("int32",), FLOATS, FLOATS, FLOATS)
_FUNCTIONS = ("sigmoid", "tanh", "relu")
_MOST_STEPS, _MOST_TOKENS = 512, 256
States = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One direction of a layer: its weights, and how a pre-activation becomes an activation."""

    ctx: Context
    hidden: int
    functions: tuple[str, ...]
    weights: tuple[Value, Value]
    """Of the input and of the state before."""
    biases: tuple[Value, Value] | None
    peepholes: Value | None

    def gate(self, values: Value, begin: int, end: int, axis: int = 1) -> Value:
        """Return the part of gates begin to end."""
        return self.ctx.part(values, axis, begin * self.hidden, end * self.hidden)

    def project(self, which: int, x: Value, begin: int, end: int) -> Value:
        """Return what the input (0) or the state (1) adds to gates begin to end."""
        rows = self.gate(self.weights[which], begin, end, 0)
        total = self.ctx.emit("matmul", x, rows, trans_b=True)
        if self.biases is None:
            return total
        return self.ctx.emit("add", total, self.gate(self.biases[which], begin, end, 0))

    def gates(self, x: Value, h: Value, begin: int, end: int) -> Value:
        """Return the pre-activations of gates begin to end."""
        total, own = self.project(0, x, begin, end), self.project(1, h, begin, end)
        return self.ctx.emit("add", total, own)

    def active(self, which: int, x: Value) -> Value:
        """Return an activation function's values, its argument limited if the layer clips."""
        clip = self.ctx.attr("clip")
        limited = self.ctx.emit("clip", x, low=-clip, high=clip) if clip else x
        return self.ctx.emit(self.functions[which], limited)

    def peep(self, i: int, total: Value, c: Value) -> Value:
        """Add the cell's share of gate i, if the layer lets gates see the cell."""
        if self.peepholes is None:
            return total
        share = self.ctx.emit("mul", self.gate(self.peepholes, i, i + 1, 0), c)
        return self.ctx.emit("add", total, share)


def _rnn_cell(layer: _Layer, x: Value, states: States) -> States:
    return (layer.active(0, layer.gates(x, states[0], 0, 1)),)


def _gru_cell(layer: _Layer, x: Value, states: States) -> States:
    ctx, (h,) = layer.ctx, states
    both = layer.gates(x, h, 0, 2)
    update, reset = (layer.active(0, layer.gate(both, i, i + 1)) for i in range(2))
    fresh = layer.project(0, x, 2, 3)
    if ctx.attr("linear_before_reset"):
        own = ctx.emit("mul", reset, layer.project(1, h, 2, 3))
    else:
        own = layer.project(1, ctx.emit("mul", reset, h), 2, 3)
    fresh = layer.active(1, ctx.emit("add", fresh, own))
    moved = ctx.emit("mul", update, ctx.emit("sub", h, fresh))  # (1 - z) fresh + z h
    return (ctx.emit("add", fresh, moved),)


def _lstm_cell(layer: _Layer, x: Value, states: States) -> States:
    ctx, (h, c) = layer.ctx, states
    gates = layer.gates(x, h, 0, 4)
    enter, leave, forget, fresh = (layer.gate(gates, i, i + 1) for i in range(4))
    enter = layer.active(0, layer.peep(0, enter, c))
    forget = layer.active(0, layer.peep(2, forget, c))
    entering = ctx.emit("mul", enter, layer.active(1, fresh))
    c = ctx.emit("add", ctx.emit("mul", forget, c), entering)
    leave = layer.active(0, layer.peep(1, leave, c))
    return ctx.emit("mul", leave, ctx.emit(layer.functions[2], c)), c


Cell = Callable[[_Layer, Value, States], States]
_CELLS: dict[str, tuple[Cell, int, int, tuple[str, ...]]] = {
    "RNN": (_rnn_cell, 1, 1, ("tanh",)),
    "GRU": (_gru_cell, 3, 1, ("sigmoid", "tanh")),
    "LSTM": (_lstm_cell, 4, 2, ("sigmoid", "tanh", "tanh")),
}
"""Step, gates, states and default functions of each kind."""


@converter("RNN", "GRU", "LSTM", types=_TYPES, since=7)
def _unrolled(ctx: Context) -> tuple[Value, ...]:
    """Return all hidden states and the last states, in the layout asked for."""
    cell, gates, states, default = _CELLS[ctx.op]
    if ctx.attr("input_forget"):
        ctx.unsupported("input_forget = 0", "1")
    turned, x = bool(ctx.attr("layout")), ctx.input(0)
    x = ctx.emit("transpose", x, perm=(1, 0, 2)) if turned else x
    steps, batch, _ = x.shape
    directions, rows, _ = ctx.shape(1)
    hidden = rows // gates
    ways = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}
    order = ways.get(ctx.attr("direction"), ())
    if len(order) != directions or not 0 < steps <= _MOST_STEPS:
        ctx.unsupported(f"1 to {_MOST_STEPS} steps in a known direction", f"{steps} steps")
    if ctx.has(4) and set(ctx.ints(4)) != {steps}:
        ctx.unsupported(f"sequences of {steps} steps", str(ctx.ints(4)))
    names = _functions(ctx, default * directions)
    outs, lasts = [], []
    for d, way in enumerate(order):
        layer = _layer(ctx, d, hidden, names[d * len(default) : (d + 1) * len(default)])
        now = tuple(_initial(ctx, 5 + i, d, (batch, hidden)) for i in range(states))
        hiddens = []
        for step in range(steps)[::way]:
            now = cell(layer, ctx.reshape(ctx.part(x, 0, step, step + 1), x.shape[1:]), now)
            hiddens.append(ctx.reshape(now[0], (1, 1, batch, hidden)))
        outs.append(_joined(ctx, hiddens[::way], 0))
        lasts.append([ctx.reshape(s, (1, batch, hidden)) for s in now])
    every = _joined(ctx, outs, 1)
    final = [_joined(ctx, [last[i] for last in lasts], 0) for i in range(states)]
    if not turned:
        return every, *final
    final = [ctx.emit("transpose", v, perm=(1, 0, 2)) for v in final]
    return ctx.emit("transpose", every, perm=(2, 0, 1, 3)), *final


def _joined(ctx: Context, values: list[Value], axis: int) -> Value:
    return values[0] if len(values) == 1 else ctx.emit("concat", *values, axis=axis)


def _functions(ctx: Context, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the library's names of the activation functions."""
    given = ctx.attr("activations")[: len(default)]  # an RNN's default is of two directions
    names = tuple(str(name).lower() for name in given or default)
    if set(names) - set(_FUNCTIONS) or ctx.attr("activation_alpha") or len(names) != len(default):
        ctx.unsupported(f"activations {', '.join(_FUNCTIONS)}", ", ".join(names))
    return names


def _layer(ctx: Context, d: int, hidden: int, functions: tuple[str, ...]) -> _Layer:
    """Return the weights of one direction."""
    biases = None
    if ctx.has(3):
        both = _own(ctx, ctx.input(3), d)
        half = both.shape[0] // 2
        biases = ctx.part(both, 0, 0, half), ctx.part(both, 0, half, 2 * half)
    peepholes = _own(ctx, ctx.input(7), d) if ctx.has(7) else None
    weights = _own(ctx, ctx.input(1), d), _own(ctx, ctx.input(2), d)
    return _Layer(ctx, hidden, functions, weights, biases, peepholes)


def _own(ctx: Context, value: Value, d: int) -> Value:
    """Return the part of an input that belongs to direction d."""
    return ctx.reshape(ctx.part(value, 0, d, d + 1), value.shape[1:])


def _initial(ctx: Context, i: int, d: int, shape: tuple[int, int]) -> Value:
    """Return a state before the first step, zeros if none is given."""
    if not ctx.has(i):
        zero = ctx.table(0, ctx.input(0).type.dtype, "zero")
        return ctx.emit("expand", zero, shape=shape)
    given = ctx.input(i)
    if ctx.attr("layout"):
        given = ctx.emit("transpose", given, perm=(1, 0, 2))
    return _own(ctx, given, d)


# -- linear attention -----------------------------------------------------------------------------
@converter("LinearAttention", types=(FLOATS,), since=27)
def _linear_attention(ctx: Context) -> Sequence[Result]:
    """Step by step in fp32: S = e^g S + k^T v, with a beta + k^T (beta (v - k e^g S)); q S."""
    rule, heads, readers = (ctx.attr(k) for k in ("update_rule", "kv_num_heads", "q_num_heads"))
    n, steps, width = ctx.shape(0)
    known = rule in ("linear", "gated", "delta", "gated_delta")
    if not known or heads < 1 or readers % heads or not 0 < steps <= _MOST_TOKENS:
        ctx.unsupported(f"a known rule over 1 to {_MOST_TOKENS} steps", f"{rule}, {steps} steps")
    if ("gated" in rule) != ctx.has(4) or ("delta" in rule) != ctx.has(5):
        ctx.unsupported("decay for gated rules, beta for delta rules", rule)
    q, k, v = (_steps(ctx, i, h) for i, h in ((0, readers), (1, heads), (2, heads)))
    decay, beta = (_steps(ctx, i, 0) if ctx.has(i) else None for i in (4, 5))
    scale = ctx.attr("scale") or 1 / math.sqrt(width // readers)
    if ctx.has(3):
        state = ctx.input(3, "fp32")
    else:
        zero = ctx.table(0, "fp32", "zero")
        state = ctx.emit("expand", zero, shape=(n, heads, k.shape[-1], v.shape[-1]))
    outs = []
    for step in range(steps):
        key, value = (_row(ctx, x, step) for x in (k, v))
        if decay is not None:
            gate = _row(ctx, decay, step)
            kept = ctx.reshape(ctx.emit("exp", gate), (n, heads, gate.shape[-1], 1))
            state = ctx.emit("mul", state, kept)
        if beta is not None:
            rest = ctx.emit("sub", value, ctx.emit("batch_matmul", key, state))
            value = ctx.emit("mul", rest, _row(ctx, beta, step))
        learned = ctx.emit("batch_matmul", key, value, trans_a=True)
        state = ctx.emit("add", state, learned)
        query = ctx.reshape(_row(ctx, q, step), (n, heads, readers // heads, k.shape[-1]))
        read = ctx.emit("muls", ctx.emit("batch_matmul", query, state), number=scale)
        outs.append(ctx.reshape(read, (n, 1, readers * v.shape[-1])))
    like = 3 if ctx.has(3) else 0
    last = ctx.cast(state, ctx.input(like).type.dtype)
    every = ctx.cast(_joined(ctx, outs, 1), ctx.input(0).type.dtype)
    return every, ctx.typed(last, ctx.elem(like))


def _steps(ctx: Context, i: int, heads: int) -> Value:
    """Return an input (n, t, heads * d) as (n, t, heads, d) in fp32; of gates d follows."""
    x = ctx.input(i, "fp32")
    n, t, width = x.shape
    own = heads or min(width, ctx.attr("kv_num_heads"))
    if width % own:
        ctx.unsupported(f"a width of {own} heads", str(x.shape))
    return ctx.reshape(x, (n, t, own, width // own))


def _row(ctx: Context, x: Value, step: int) -> Value:
    """Return one step (n, heads, 1, d)."""
    n, _, heads, d = x.shape
    return ctx.reshape(ctx.part(x, 1, step, step + 1), (n, heads, 1, d))

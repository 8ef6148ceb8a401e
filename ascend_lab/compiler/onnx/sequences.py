"""Imports ONNX operators over sequences: attention, RNN, GRU, LSTM, and linear attention.

Recurrent layers are unrolled: every step becomes nodes. With x the step's input and h the state
before it, the gates of RNN, GRU and LSTM are x W^T + h R^T + biases; their order in the weights is
the standard's: LSTM i o f c, GRU z r h. The state of linear attention is a matrix: at each step it
decays, the product of a key and a value is added, and a query reads it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.onnx.context import Context, Result, converter
from ascend_lab.compiler.onnx.tensors import FLOATS, Shape, Values

# -- Attention ------------------------------------------------------------------------------------
# A node becomes the library's `attention`, which passes can rewrite, unless it has a soft cap, a
# mask that may drop whole rows, or the scores as an output: then it becomes several operators.
_INPUTS = (FLOATS, FLOATS, FLOATS, (*FLOATS, "bool"), FLOATS, FLOATS, ("int64",))


@converter("Attention", types=_INPUTS, since=23)
def _attention(ctx: Context) -> Sequence[Value]:
    """Return an attention's outputs; its softmax is at least as precise as `softmax_precision`."""
    query_heads, key_heads = (ctx.attr(f"{kind}_num_heads") or 0 for kind in ("q", "kv"))
    head_counts = (query_heads, key_heads, key_heads)
    q, k, v = (_heads(ctx, ctx.input(i), count) for i, count in enumerate(head_counts))
    if ctx.has(4) != ctx.has(5):
        ctx.unsupported("past_key and past_value", "one of them")
    if ctx.has(4):
        # keys and values of earlier calls come before those of this one
        k, v = (ctx.emit("concat", ctx.input(i), x, axis=2) for i, x in ((4, k), (5, v)))
    present = [k, v]
    if q.shape[1] != k.shape[1]:
        if q.shape[1] % k.shape[1]:
            ctx.unsupported(f"query heads in groups of {k.shape[1]}", str(q.shape[1]))
        k, v = (_repeated(ctx, x, q.shape[1] // k.shape[1]) for x in (k, v))
    known_bias = _known_bias(ctx, q.shape, k.shape[2], ctx.shape(4)[2] if ctx.has(4) else 0)
    mask = _mask(ctx, k.shape[2], q.type.dtype) if ctx.has(3) else None
    out, scores = _attended(ctx, (q, k, v), known_bias, mask)
    if len(ctx.shape(0)) == 3:
        n, h, s, d = out.shape
        out = ctx.reshape(ctx.transpose(out, (0, 2, 1, 3)), (n, s, h * d))
    return (out, *present) if scores is None else (out, *present, scores)


def _heads(ctx: Context, x: Value, heads: int) -> Value:
    """Return (n, s, heads * d) as (n, heads, s, d)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3 or heads < 1 or x.shape[2] % heads:
        ctx.unsupported("q_num_heads and kv_num_heads that divide the width", f"{heads}, {x.shape}")
    n, s, width = x.shape
    return ctx.transpose(ctx.reshape(x, (n, s, heads, width // heads)), (0, 2, 1, 3))


def _repeated(ctx: Context, x: Value, times: int) -> Value:
    """Return each head `times` times in a row."""
    n, h, s, d = x.shape
    # heads a, b twice: a, a, b, b
    wide = ctx.emit("expand", ctx.reshape(x, (n, h, 1, s, d)), shape=(n, h, times, s, d))
    return ctx.reshape(wide, (n, h * times, s, d))


def _known_bias(ctx: Context, q: Shape, keys: int, past: int) -> Values | None:
    """Return a bias (n or 1, 1, s, keys): 0 for visible keys, else -inf; None without masking."""
    lengths = np.array(ctx.ints(6)) if ctx.has(6) else None
    if lengths is not None and (past or lengths.shape != (q[0],)):
        ctx.unsupported("one length for each of the batch, no past", str(lengths.shape))
    offset = past if lengths is None else (lengths - q[2]).reshape(-1, 1, 1, 1)
    # 2 queries after 3 past keys are at positions 3 and 4: if causal, they see keys 0 .. 3 and
    # 0 .. 4
    positions = np.arange(q[2]).reshape(-1, 1) + offset
    key = np.arange(keys)
    left, right = (ctx.attr(f"{side}_window_size") for side in ("left", "right"))
    visible = np.ones(np.broadcast_shapes(positions.shape, key.shape), bool)
    if ctx.attr("is_causal"):
        visible &= key <= positions
    if left is not None and left >= 0:
        visible &= key >= positions - left
    if right is not None and right >= 0:
        visible &= key <= positions + right
    if lengths is not None:
        visible &= key < lengths.reshape(-1, 1, 1, 1)
    return None if visible.all() else np.where(visible, 0.0, -np.inf)


def _mask(ctx: Context, keys: int, dtype: str) -> Value:
    """Return the numbers that a mask adds to the scores; the mask may be shorter than the keys."""
    mask = ctx.input(3)
    if not mask.shape or mask.shape[-1] > keys:
        ctx.unsupported(f"a mask over at most {keys} keys", str(mask.shape))
    if ctx.elem(3) == "bool":
        zero = ctx.constant_array(0, dtype, "zero")
        drop = ctx.constant_array(-math.inf, dtype, "drop")
        mask = ctx.choose(mask, zero, drop)
    if mask.shape[-1] < keys:
        pads = (*((0, 0) for _ in mask.shape[:-1]), (0, keys - mask.shape[-1]))
        mask = ctx.emit("pad", mask, pads=pads, value=-math.inf)
    return mask


def _attended(
    ctx: Context, qkv: tuple[Value, Value, Value], known: Values | None, mask: Value | None
) -> tuple[Value, Value | None]:
    """Return the context, and the scores if they are an output."""
    (q, k, v) = qkv
    dtype = qkv[0].type.dtype
    cap, scale, mode = (ctx.attr(n) for n in ("softcap", "scale", "qk_matmul_output_mode"))
    wants_scores = ctx.out_count > 3
    may_drop = mask is not None or (known is not None and bool((known.max(-1) == -np.inf).any()))
    added = None if known is None else ctx.constant_array(known, dtype, "allowed")
    if not (cap or wants_scores or may_drop):
        return ctx.emit("attention", *qkv, *((added,) if added else ()), scale=scale), None
    stages = [ctx.emit("attention_scores", q, k, scale=scale)]
    capped = stages[0]
    if cap:
        shrunk = ctx.emit("tanh", ctx.emit("muls", capped, number=1.0 / cap))
        capped = ctx.emit("muls", shrunk, number=cap)
    if mask is not None:
        added = mask if added is None else ctx.emit("add", added, mask)
    biased = capped if added is None else ctx.emit("add", capped, added)
    weights = ctx.emit("softmax", biased, axis=-1)
    if added is not None and may_drop:
        # a row in which every key is masked holds only -inf, and softmax gives NaN: its weights
        # are set to 0
        row_max = ctx.emit("reduce_max", added, axis=-1, keepdims=True)
        all_masked = ctx.emit("equal", row_max, ctx.constant_array(-math.inf, dtype, "none"))
        weights = ctx.emit("select", all_masked, ctx.constant_array(0, dtype, "zero"), weights)
    stages += [capped, biased, weights]
    if not 0 <= mode < len(stages):
        ctx.unsupported("qk_matmul_output_mode 0 to 3", str(mode))
    return ctx.emit("attention_context", weights, v), stages[mode] if wants_scores else None


# -- RNN, GRU, LSTM -------------------------------------------------------------------------------
_TYPES = (FLOATS, FLOATS, FLOATS, FLOATS, ("int32",), FLOATS, FLOATS, FLOATS)
_FUNCTIONS = ("sigmoid", "tanh", "relu")
"""Activation functions of gates that are imported."""
_MAX_STEPS = 512
"""Most steps of a recurrent layer: each becomes nodes of the graph."""
_MAX_TOKENS = 256
"""Most steps of linear attention."""
States = tuple[Value, ...]


class _Layer:
    """One direction of a recurrent layer: its weights and activation functions.

    `weights` and `biases` are pairs: for the input, and for the state of the step before.
    """

    def __init__(self, ctx: Context, d: int, hidden: int, functions: tuple[str, ...]) -> None:
        self.ctx = ctx
        self.hidden = hidden
        self.functions = functions
        self.biases: tuple[Value, Value] | None = None
        if ctx.has(3):
            biases = _part_of_direction(ctx, ctx.input(3), d)
            half = biases.shape[0] // 2
            self.biases = ctx.part(biases, 0, 0, half), ctx.part(biases, 0, half, 2 * half)
        self.peepholes = _part_of_direction(ctx, ctx.input(7), d) if ctx.has(7) else None
        self.weights = (
            _part_of_direction(ctx, ctx.input(1), d),
            _part_of_direction(ctx, ctx.input(2), d),
        )

    def gate(self, values: Value, begin: int, end: int, axis: int = 1) -> Value:
        """Return the part of `values` that belongs to the gates from `begin` to `end`."""
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
        total = self.project(0, x, begin, end)
        from_state = self.project(1, h, begin, end)
        return self.ctx.emit("add", total, from_state)

    def active(self, which: int, x: Value) -> Value:
        """Return an activation function's values, its argument limited if the layer clips."""
        clip = self.ctx.attr("clip")
        limited = self.ctx.emit("clip", x, low=-clip, high=clip) if clip else x
        return self.ctx.emit(self.functions[which], limited)

    def with_peephole(self, gate: int, total: Value, c: Value) -> Value:
        """Return `total` plus the cell state's part of a gate, if the layer has peepholes."""
        if self.peepholes is None:
            return total
        share = self.ctx.emit("mul", self.gate(self.peepholes, gate, gate + 1, 0), c)
        return self.ctx.emit("add", total, share)


def _rnn_cell(layer: _Layer, x: Value, states: States) -> States:
    return (layer.active(0, layer.gates(x, states[0], 0, 1)),)


def _gru_cell(layer: _Layer, x: Value, states: States) -> States:
    """Return h' = (1 - z) n + z h with gates z and r, and the candidate n of x and r h."""
    ctx = layer.ctx
    (h,) = states
    gates = layer.gates(x, h, 0, 2)
    update_gate, reset_gate = (layer.active(0, layer.gate(gates, i, i + 1)) for i in range(2))
    candidate = layer.project(0, x, 2, 3)
    # r (h R + b), or (r h) R + b: PyTorch exports the first, the paper has the second
    if ctx.attr("linear_before_reset"):
        from_state = ctx.emit("mul", reset_gate, layer.project(1, h, 2, 3))
    else:
        from_state = layer.project(1, ctx.emit("mul", reset_gate, h), 2, 3)
    candidate = layer.active(1, ctx.emit("add", candidate, from_state))
    # (1 - z) n + z h = n + z (h - n)
    kept_difference = ctx.emit("mul", update_gate, ctx.emit("sub", h, candidate))
    return (ctx.emit("add", candidate, kept_difference),)


def _lstm_cell(layer: _Layer, x: Value, states: States) -> States:
    """Return h' = o tanh(c') and c' = f c + i g, with gates i, o, f and the cell's input g."""
    ctx = layer.ctx
    (h, c) = states
    gates = layer.gates(x, h, 0, 4)
    # the file's order of gates: input, output, forget, cell
    input_gate, output_gate, forget_gate, cell_input = (
        layer.gate(gates, i, i + 1) for i in range(4)
    )
    input_gate = layer.active(0, layer.with_peephole(0, input_gate, c))
    forget_gate = layer.active(0, layer.with_peephole(2, forget_gate, c))
    added = ctx.emit("mul", input_gate, layer.active(1, cell_input))
    c = ctx.emit("add", ctx.emit("mul", forget_gate, c), added)
    output_gate = layer.active(0, layer.with_peephole(1, output_gate, c))
    return ctx.emit("mul", output_gate, ctx.emit(layer.functions[2], c)), c


Cell = Callable[[_Layer, Value, States], States]
_CELLS: dict[str, tuple[Cell, int, int, tuple[str, ...]]] = {
    "RNN": (_rnn_cell, 1, 1, ("tanh",)),
    "GRU": (_gru_cell, 3, 1, ("sigmoid", "tanh")),
    "LSTM": (_lstm_cell, 4, 2, ("sigmoid", "tanh", "tanh")),
}
"""For each operator: function of a step, gates, states, default activation functions."""


@converter("RNN", "GRU", "LSTM", types=_TYPES, since=7)
def _unrolled(ctx: Context) -> tuple[Value, ...]:
    """Return all hidden states and the last states, in the node's `layout`."""
    cell, gates, states, default = _CELLS[ctx.op]
    if ctx.attr("input_forget"):
        ctx.unsupported("input_forget = 0", "1")
    batch_first = bool(ctx.attr("layout"))
    x = ctx.input(0)
    x = ctx.emit("transpose", x, perm=(1, 0, 2)) if batch_first else x
    steps, batch, _ = x.shape
    directions, rows, _ = ctx.shape(1)
    # LSTM weights of 4 gates and 128 hidden units have 512 rows
    hidden = rows // gates
    directions_of = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}
    order = directions_of.get(ctx.attr("direction"), ())
    if len(order) != directions or not 0 < steps <= _MAX_STEPS:
        ctx.unsupported(f"1 to {_MAX_STEPS} steps in a known direction", f"{steps} steps")
    if ctx.has(4) and set(ctx.ints(4)) != {steps}:
        ctx.unsupported(f"sequences of {steps} steps", str(ctx.ints(4)))
    names = _functions(ctx, default * directions)
    outs = []
    last_states = []
    for d, direction in enumerate(order):
        layer = _Layer(ctx, d, hidden, names[d * len(default) : (d + 1) * len(default)])
        current = tuple(_initial(ctx, 5 + i, d, (batch, hidden)) for i in range(states))
        hiddens = []
        # a graph has no loops: each step becomes nodes
        for step in range(steps)[::direction]:
            current = cell(layer, ctx.reshape(ctx.part(x, 0, step, step + 1), x.shape[1:]), current)
            hiddens.append(ctx.reshape(current[0], (1, 1, batch, hidden)))
        # a layer that runs backward still returns its states in order of time
        outs.append(_joined(ctx, hiddens[::direction], 0))
        last_states.append([ctx.reshape(s, (1, batch, hidden)) for s in current])
    all_outputs = _joined(ctx, outs, 1)
    # from the states of each direction to the directions of each state
    final = [_joined(ctx, list(directions), 0) for directions in zip(*last_states, strict=True)]
    if not batch_first:
        return all_outputs, *final
    final = [ctx.emit("transpose", v, perm=(1, 0, 2)) for v in final]
    return ctx.emit("transpose", all_outputs, perm=(2, 0, 1, 3)), *final


def _joined(ctx: Context, values: list[Value], axis: int) -> Value:
    return values[0] if len(values) == 1 else ctx.emit("concat", *values, axis=axis)


def _functions(ctx: Context, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the library's names of the activation functions."""
    activations = ctx.attr("activations")[: len(default)]  # the default lists two directions
    names = tuple(str(name).lower() for name in activations or default)
    if set(names) - set(_FUNCTIONS) or ctx.attr("activation_alpha") or len(names) != len(default):
        ctx.unsupported(f"activations {', '.join(_FUNCTIONS)}", ", ".join(names))
    return names


def _part_of_direction(ctx: Context, value: Value, d: int) -> Value:
    """Return the part of an input that belongs to direction d."""
    return ctx.reshape(ctx.part(value, 0, d, d + 1), value.shape[1:])


def _initial(ctx: Context, i: int, d: int, shape: tuple[int, int]) -> Value:
    """Return a state before the first step, zeros if none is given."""
    if not ctx.has(i):
        zero = ctx.constant_array(0, ctx.input(0).type.dtype, "zero")
        return ctx.emit("expand", zero, shape=shape)
    state = ctx.input(i)
    if ctx.attr("layout"):
        state = ctx.emit("transpose", state, perm=(1, 0, 2))
    return _part_of_direction(ctx, state, d)


# -- linear attention -----------------------------------------------------------------------------
@converter("LinearAttention", types=(FLOATS,), since=27)
def _linear_attention(ctx: Context) -> Sequence[Result]:
    """Return q S for each step, computed in fp32, and the last state S.

    A step makes the state e^g S + k^T v, or, with a beta, e^g S + k^T (beta (v - k e^g S)).
    """
    rule, heads, query_heads = (ctx.attr(k) for k in ("update_rule", "kv_num_heads", "q_num_heads"))
    n, steps, width = ctx.shape(0)
    is_known = rule in ("linear", "gated", "delta", "gated_delta")
    if not is_known or heads < 1 or query_heads % heads or not 0 < steps <= _MAX_TOKENS:
        ctx.unsupported(f"a known rule over 1 to {_MAX_TOKENS} steps", f"{rule}, {steps} steps")
    if ("gated" in rule) != ctx.has(4) or ("delta" in rule) != ctx.has(5):
        ctx.unsupported("decay for gated rules, beta for delta rules", rule)
    q, k, v = (_steps(ctx, i, h) for i, h in ((0, query_heads), (1, heads), (2, heads)))
    decay, beta = (_steps(ctx, i, 0) if ctx.has(i) else None for i in (4, 5))
    scale = ctx.attr("scale") or 1 / math.sqrt(width // query_heads)
    if ctx.has(3):
        state = ctx.input(3, "fp32")
    else:
        zero = ctx.constant_array(0, "fp32", "zero")
        state = ctx.emit("expand", zero, shape=(n, heads, k.shape[-1], v.shape[-1]))
    outs = []
    for step in range(steps):
        key, value = (_row(ctx, x, step) for x in (k, v))
        if decay is not None:
            log_decay = _row(ctx, decay, step)
            factor = ctx.reshape(ctx.emit("exp", log_decay), (n, heads, log_decay.shape[-1], 1))
            state = ctx.emit("mul", state, factor)
        if beta is not None:
            difference = ctx.emit("sub", value, ctx.emit("batch_matmul", key, state))
            value = ctx.emit("mul", difference, _row(ctx, beta, step))
        # (n, heads, 1, d) transposed times (n, heads, 1, e): the outer product (n, heads, d, e)
        outer_product = ctx.emit("batch_matmul", key, value, trans_a=True)
        state = ctx.emit("add", state, outer_product)
        # several readers share a state, as in grouped attention
        query = ctx.reshape(_row(ctx, q, step), (n, heads, query_heads // heads, k.shape[-1]))
        read = ctx.emit("muls", ctx.emit("batch_matmul", query, state), number=scale)
        outs.append(ctx.reshape(read, (n, 1, query_heads * v.shape[-1])))
    state_input = 3 if ctx.has(3) else 0
    final_state = ctx.cast(state, ctx.input(state_input).type.dtype)
    all_outputs = ctx.cast(_joined(ctx, outs, 1), ctx.input(0).type.dtype)
    return all_outputs, ctx.with_elem(final_state, ctx.elem(state_input))


def _steps(ctx: Context, i: int, heads: int) -> Value:
    """Return an input (n, t, heads * d) as (n, t, heads, d) in fp32; d follows from its size."""
    x = ctx.input(i, "fp32")
    n, t, width = x.shape
    key_heads = heads or min(width, ctx.attr("kv_num_heads"))
    if width % key_heads:
        ctx.unsupported(f"a width of {key_heads} heads", str(x.shape))
    return ctx.reshape(x, (n, t, key_heads, width // key_heads))


def _row(ctx: Context, x: Value, step: int) -> Value:
    """Return one step (n, heads, 1, d)."""
    n, _, heads, d = x.shape
    return ctx.reshape(ctx.part(x, 1, step, step + 1), (n, heads, 1, d))

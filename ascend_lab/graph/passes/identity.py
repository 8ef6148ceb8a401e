"""Identity elimination: nodes whose output is their input."""

from __future__ import annotations

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

BROADCASTING = ("add", "sub", "mul", "div", "max", "min", "pow")


def remove_identity(rw: Draft, node: Node) -> bool:
    """Forward the input of a node that changes neither values, shape nor format."""
    if len(node.outputs) > 1:
        return False
    if node.op in BROADCASTING:
        return _without_expand(rw, node) or _neutral_operand(rw, node)
    source = node.inputs[0]
    if rw.type(source) != rw.type(node.output) or not _is_identity(rw, node):
        return False
    return rw.forward(node, source)


def _is_identity(rw: Draft, node: Node) -> bool:
    """Tell whether a node that keeps its input's type keeps its values."""
    options = settings(node)
    if node.op in ("reshape", "expand", "cast", "split", "trans_data", "pad", "slice"):
        return True  # with the type kept there is nothing left to change
    if node.op in ("concat", "max_pool2d", "avg_pool2d", "global_avg_pool", "global_max_pool"):
        window = options.get("kernel", 1)
        single = window in (1, (1, 1)) and options.get("stride") in (None, 1, (1, 1))
        return len(node.inputs) == 1 and single and _whole_image(rw, node)
    if node.op == "transpose":
        rank = len(rw.type(node.output).shape)
        perm = options["perm"] or tuple(range(rank))[::-1]
        return tuple(p % rank for p in perm) == tuple(range(rank))
    return (node.op, options.get("number")) in (("adds", 0), ("muls", 1))


def _whole_image(rw: Draft, node: Node) -> bool:
    shape = rw.type(node.inputs[0]).shape
    return not node.op.startswith("global") or shape[2:] == (1, 1)


def _neutral_operand(rw: Draft, node: Node) -> bool:
    """Remove x + 0, x - 0, x * 1, x / 1, x ^ 1 whose constant does not enlarge x."""
    neutral = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}.get(node.op)
    pairs = [(node.inputs[0], node.inputs[1])]
    if node.op in ("add", "mul"):
        pairs.append((node.inputs[1], node.inputs[0]))
    for value, other in pairs:
        same = neutral is not None and rw.type(value) == rw.type(node.output)
        if same and rw.number(other) == neutral:
            return rw.forward(node, value)
    return False


def _without_expand(rw: Draft, node: Node) -> bool:
    """Let a broadcasting node repeat its operand itself where the other one has the full shape."""
    for place in (0, 1):
        maker = rw.maker(node.inputs[place])
        other = node.inputs[1 - place]
        full = rw.type(other).shape == rw.type(node.output).shape
        if full and maker is not None and maker.op == "expand":
            inputs = (maker.inputs[0], other) if place == 0 else (other, maker.inputs[0])
            return rw.become(node, node.op, inputs, node.attrs)
    return False


IDENTITY = Pass(
    "IdentityEliminationPass",
    "prepare",
    sweep(remove_identity),
    "removes reshapes, casts, pads, slices, sums and products that change nothing",
)

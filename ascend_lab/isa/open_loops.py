"""Loops while a builder writes them; slots of queues and rings are numbered over their turns."""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.isa.memory import Affine, Buffer, Region, var
from ascend_lab.isa.program import Instruction, Loop, Node

Place = tuple[str, int | str]
"""Memory space and address: a buffer and its views share one; in GM the name."""


def place_of(buffer: Buffer) -> Place:
    """Return where a buffer lies."""
    return buffer.space, buffer.name if buffer.space == "GM" else buffer.address


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A loop while it is written: its body so far, and how many slots its queues move on a pass."""

    loop: Loop
    body: "list[Instruction | OpenLoop]"
    steps: dict[Place, int]


def closed(
    nodes: Sequence[Instruction | OpenLoop], turns: dict[Place, Affine] | None = None
) -> tuple[Node, ...]:
    """Close the loops and number the slots: pass i of a loop starts `steps` * i slots further.

    `turns` is how far each queue has moved in the loops around.
    """
    turns = turns or {}
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, OpenLoop):
            loop, inner = node.loop, dict(turns)
            for place, step in node.steps.items():
                inner[place] = inner.get(place, Affine()) + var(loop.var) * step
            out.append(Loop(loop.var, loop.count, closed(node.body, inner)))
        elif turns and node.regions:
            dst = None if node.dst is None else _turned(node.dst, turns)
            srcs = tuple([_turned(region, turns) for region in node.srcs])
            out.append(Instruction(node.op, node.pipe, dst, srcs, node.attrs))
        else:
            out.append(node)
    return tuple(out)


def _turned(region: Region, turns: dict[Place, Affine]) -> Region:
    buffer = region.buffer
    turn = turns.get(place_of(buffer)) if buffer.slots > 1 else None
    return region if turn is None else region.turned(turn)

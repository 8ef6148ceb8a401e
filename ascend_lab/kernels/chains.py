"""Two operators in a row: what the second wants to own decides whether data may stay on chip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.isa import Kernel, Launch, Loop, Node, Region
from ascend_lab.kernels.move_writer import item_bytes
from ascend_lab.kernels.transpose import block_launch, permutation, transpose_launch
from ascend_lab.kernels.vector import elementwise_launch


def relu_transpose_kernel(chip: Chip, shape: Sequence[int], dtype: str, split: str) -> Kernel:
    """y[b] = relu(x[b]).T for x (B, M, N): tensors x and y, and h between two phases.

    `split` "outer": each core owns whole matrices, both operators run on its tiles in UB. "moved":
    each core owns rows of x for the ReLU and rows of y afterwards, so everything passes through the
    GM tensor h and all cores wait for each other; B * M * N must then be whole vector repeats per
    core. Raises `InputError`, `ShapeError`.
    """
    if split not in ("outer", "moved"):
        raise InputError("split outer or moved", repr(split), "choose one")
    if len(shape) != 3:
        raise ShapeError("a shape (B, M, N)", str(tuple(shape)), "use B = 1 for one matrix")
    perm = (0, 2, 1)
    if split == "outer":
        plan = permutation(shape, perm)
        launch = block_launch(chip, dtype, plan, math.prod(shape), relu=True)
        return Kernel("relu_transpose", (launch,))
    cores = chip.core_count * chip.vector_cores_per_core
    most = 1 << (chip.buffers["UB"] // (4 * item_bytes(dtype))).bit_length() - 1
    tile = math.gcd(math.prod(shape) // cores, most)
    relu = elementwise_launch(chip, math.prod(shape), op="vrelu", tile=tile, dtype=dtype)
    turn = transpose_launch(chip, shape, perm, dtype)
    phases = renamed(relu, {"x1": "x", "y": "h"}), renamed(turn, {"x": "h"})
    return Kernel("relu_transpose", phases)


def renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return the launch with GM tensors renamed, to join it with others on the same tensors."""

    def turn(region: Region) -> Region:
        name = names.get(region.buffer.name)
        if region.space != "GM" or name is None:
            return region
        return replace(region, buffer=replace(region.buffer, name=name))

    def visit(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                out.append(replace(node, body=visit(node.body)))
            else:
                dst = None if node.dst is None else turn(node.dst)
                out.append(replace(node, dst=dst, srcs=tuple(turn(s) for s in node.srcs)))
        return tuple(out)

    parts = []
    for part in launch.parts:
        program = part.program
        buffers = tuple(dict.fromkeys(turn(b.region()).buffer for b in program.buffers))
        body = visit(program.body)
        parts.append(replace(part, program=replace(program, buffers=buffers, body=body)))
    return replace(launch, parts=tuple(parts))

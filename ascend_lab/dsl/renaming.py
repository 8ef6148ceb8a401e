"""A launch with its tensors under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ascend_lab.isa.memory import Buffer, Region
from ascend_lab.isa.program import Launch, Loop, Node, Part


def renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return a launch with its GM tensors under other names; tiles make way for them."""

    @cache
    def buffer(old: Buffer) -> Buffer:
        if old.space == "GM":
            return replace(old, name=names[old.name]) if old.name in names else old
        return replace(old, name=f"{old.name}_tile") if old.name in names.values() else old

    def region(old: Region) -> Region:
        return replace(old, buffer=buffer(old.buffer))

    def node(old: Node) -> Node:
        if isinstance(old, Loop):
            return replace(old, body=tuple(map(node, old.body)))
        if not old.regions:
            return old
        dst = None if old.dst is None else region(old.dst)
        return replace(old, dst=dst, srcs=tuple(map(region, old.srcs)))

    def part(old: Part) -> Part:
        body = tuple(map(node, old.program.body))
        buffers = tuple(dict.fromkeys(map(buffer, old.program.buffers)))
        return replace(old, program=replace(old.program, buffers=buffers, body=body))

    return replace(launch, parts=tuple(map(part, launch.parts)))

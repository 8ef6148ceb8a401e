"""Conversions that are not needed: there and back, twice the same, or of bytes that stay put."""

from __future__ import annotations

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Graph, TensorType
from ascend_lab.graph.lower.stored import maps_between
from ascend_lab.layout import AddressMap


def cancel_trans_data(graph: Graph) -> Graph:
    """Return the graph with chains of conversions shortened, and equal ones merged.

    x -> A -> B becomes x -> B, and x itself where B is the layout of x and has no padding, which
    there and back fills with zeros.
    """
    edit = Draft(graph)
    seen: dict[tuple[str, str], str] = {}
    origin: dict[str, str] = {}
    for node in edit:
        if node.op != "trans_data":
            continue
        first, layout = node.inputs[0], str(node.attr("layout"))
        source = origin.get(first, first)
        kind, made = edit.types[source], node.output
        if kind.layout == layout and not kind.map.padding_bytes:
            edit.replace(node.output, source)
            continue
        if (source, layout) in seen:
            made = seen[source, layout]
            edit.replace(node.output, made)
        elif source != first:
            made = edit.insert("trans_data", (source,), {"layout": layout}, node.name)
            edit.replace(node.output, made)
        seen[source, layout] = made
        origin[made] = source
    return edit.finish()


def moves_nothing(one: TensorType, two: TensorType) -> bool:
    """Tell whether two layouts put every element of a shape at the same address, unpadded.

    NC1HWC0 of (n, 64, 1, 1) is row-major (n, 64): a conversion is only a new name.
    """
    first, second = maps_between(one, two)
    whole = not first.padding_bytes and not second.padding_bytes
    return whole and _runs(first) == _runs(second)


def _runs(layout: AddressMap) -> list[tuple[int, int, int, int]]:
    """Return the pieces, those of length 1 dropped and neighbours of one axis joined."""
    runs: list[tuple[int, int, int, int]] = []
    for p in layout.pieces:
        if p.count == 1:
            continue
        if runs and runs[-1][0] == p.axis and runs[-1][1] == p.step * p.count:
            axis, _, count, _ = runs.pop()
            runs.append((axis, p.step, count * p.count, p.stride))
        else:
            runs.append((p.axis, p.step, p.count, p.stride))
    return runs

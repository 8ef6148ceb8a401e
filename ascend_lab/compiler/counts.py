"""Counts the parameters and multiply-accumulates of a graph, and prints them in a table of nodes.

A 3 x 3 convolution from 64 to 64 channels has 36,864 weights.
"""

import math

from ascend_lab.compiler import ir

STATISTICS_OPERANDS = (3, 4)
"""Operands of a batch norm that no gradient changes: running mean and running variance."""


def parameters(graph: ir.Graph) -> int:
    """Return the trainable parameters of a model of the zoo, counted as published.

    Every `Seeded` constant (random weights, drawn from a seed) that some node reads counts once,
    even if several nodes share it.
    Running statistics of batch norms, masks and other constants that are not weights do not count.
    """
    names_read = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if not (node.op == "batch_norm" and place in STATISTICS_OPERANDS)
    }
    seeded = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, ir.Seeded))
    return sum(c.type.elements for name, c in seeded if name in names_read)


def node_macs(graph: ir.Graph, node: ir.Node) -> int:
    """Return the multiply-accumulates of one node; 0 unless it multiplies matrices or convolves."""
    operand_types = graph.in_types(node)
    out_elements = graph.types[node.output].elements
    if node.op in ("conv2d", "depthwise_conv2d"):
        return out_elements * math.prod(operand_types[1].shape[1:])
    # each output of a convolution sums Ci / groups * Kh * Kw products; each input of a transposed
    # convolution takes part in Co / groups * Kh * Kw products
    if node.op == "conv_transpose2d":
        return operand_types[0].elements * math.prod(operand_types[1].shape[1:])
    if node.op in ("matmul", "batch_matmul", "gemm"):
        return out_elements * operand_types[0].shape[-2 if node.attr("trans_a") else -1]
    if node.op == "attention":
        # Q is (..., s, d), K is (..., t, d), V is (..., t, e), and the output is (..., s, e)
        d = operand_types[0].shape[-1]
        t = operand_types[1].shape[-2]
        e = operand_types[2].shape[-1]
        # Q K^T takes s t d products, and (s, t) times V another s t e, in each batch and head
        query_rows = out_elements // e
        return query_rows * t * (d + e)
    return 0


def macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


def published_macs(graph: ir.Graph) -> int:
    """Return the multiply-accumulates of a model of the zoo, counted as published.

    Products with a fixed matrix do not count: papers do not count the interpolation of a resize.
    """
    fixed_matrices = {
        name for name, c in graph.constants.items() if not isinstance(c.data, ir.Seeded)
    }
    return sum(
        node_macs(graph, node) for node in graph.nodes if node.inputs[-1] not in fixed_matrices
    )


# -- a graph as a table ---------------------------------------------------------------------------
HEADINGS = ("node", "operator", "writes", "weights", "MACs")
ALIGNMENTS = "<<<>>"
"""How each column is aligned: "<" at the left, ">" at the right."""


def table(graph: ir.Graph, *, limit: int | None = None) -> str:
    """Return aligned columns: a line for each of the first `limit` nodes, then the totals.

    Weights are the elements of constants, counted at the first node that reads them; a 0 is left
    blank.
    """
    counted: set[str] = set()
    rows: list[tuple[tuple[str, str, str], int, int]] = []
    for node in graph.nodes:
        new_names = set(node.inputs) - counted
        weights = sum(graph.types[n].elements for n in new_names if n in graph.constants)
        writes = ", ".join(map(str, graph.out_types(node)))
        rows.append(((node.name, node.op, writes), weights, node_macs(graph, node)))
        counted |= new_names
    lines: list[tuple[str, ...]] = [HEADINGS]
    for texts, *counts in rows[:limit]:
        lines.append((*texts, *(f"{n:,}" if n else "" for n in counts)))
    omitted = len(rows) - len(rows[:limit])
    if omitted:
        lines.append((f"... {omitted} more", "", "", "", ""))
    totals = (f"{sum(row[1] for row in rows):,}", f"{sum(row[2] for row in rows):,}")
    lines.append((graph.name, f"{len(rows)} nodes", "", *totals))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(_aligned_line(line, widths) for line in lines)


def _aligned_line(cells: tuple[str, ...], widths: list[int]) -> str:
    """Return a line of the table: texts at the left of their columns, numbers at the right."""
    columns = zip(cells, ALIGNMENTS, widths, strict=True)
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in columns).rstrip()

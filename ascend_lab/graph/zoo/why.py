"""Why a light network is fast or slow here: its products and bytes, its launches, its cube's fill.

A network of few products can still be slow: every kernel is a launch, a depthwise layer fills a
sixteenth of the cube, and many small tensors move more bytes than they compute.
"""

from collections.abc import Iterable
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph.bound import bound_of
from ascend_lab.graph.compile import compile_stages
from ascend_lab.graph.counts import published_macs


def why(
    names: Iterable[str], chip: Chip | str, *, dtype: str = "fp16", **sizes: Any
) -> list[dict[str, Any]]:
    """Return a row for each model: what it counts, its time, and the time it could not go below.

    `cube_fill` is products / what the cubes could do in the time, `padded` the products the cubes
    do for each the model has, `launch_share` and `vector_share` are of the time. Raises as `sized`
    and `compile_stages`. `sizes` are those of `sized`: batch, width, size.
    """
    from ascend_lab.graph.zoo import sized

    on = load_chip(chip) if isinstance(chip, str) else chip
    rows = []
    for name in names:
        graph = sized(name, **sizes)
        stages = compile_stages(graph, on, dtype=dtype)
        times, macs = stages.timeline(), published_macs(graph)
        bound_s = bound_of(stages.rewritten, on).time_s
        peak = on.peak_ops_per_s(dtype) / 2
        busy = [op for op in times.operators if not op.timeline.macs]
        rows.append({
            "name": graph.name,
            "macs": macs,
            "time_s": times.time_s,
            "bound_s": bound_s,
            "over_bound": times.time_s / bound_s,
            "memory_bytes": times.memory_bytes,
            "launches": times.launches,
            "launch_share": times.launch_s / times.time_s,
            "vector_share": sum(op.time_s for op in busy) / times.time_s,
            "cube_fill": macs / (peak * times.time_s),
            "padded": times.macs / macs if macs else 0.0,
        })  # fmt: skip
    return rows


def why_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows of `why` as a table."""
    lines = [
        (
            f"{'model':<26}{'GMAC':>7}{'time us':>10}{'bound':>9}{'MB':>8}{'launches':>9}"
            f"{'of time':>8}{'no cube':>8}{'fill':>7}{'padded':>7}"
        )
    ]
    lines += [
        f"{row['name']:<26}{row['macs'] / 1e9:>7.3f}{row['time_s'] * 1e6:>10.1f}"
        f"{row['bound_s'] * 1e6:>9.1f}{row['memory_bytes'] / 1e6:>8.1f}{row['launches']:>9}"
        f"{row['launch_share']:>8.0%}{row['vector_share']:>8.0%}{row['cube_fill']:>7.1%}"
        f"{row['padded']:>7.1f}"
        for row in rows
    ]
    return lines

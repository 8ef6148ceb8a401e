"""Compares the measured tables in the package with the model: groups, worst rows, refusals."""

from collections import Counter
from collections.abc import Container, Sequence

from ascend_lab.compare import Compared, Comparison, compare, compare_rows, read_measured
from ascend_lab.data import data_path

KERNEL_TABLES = ("kernels_910b2", "gemm_910b2_warm")
"""Tables of single kernels of the vendor's library on a 910B2."""
OTHER_TABLES = ("kernelbench_a2", "pipe_shares")
"""Kernels on other chips of the 910B class.

The first table is of a variant that is not stated, the second from tuning guides.
"""
CALIBRATION_ROWS = {
    "cb/sigmoid/4": "rate of memory",
    "cb/sigmoid/5": "rate of memory",
    "cb/maximum/4": "rate of memory",
    "tb/gemm/9": "rate of memory",
    "tb/gemm/10": "rate of memory",
    **{f"cb/dynamic_quant/{i}": "fetch of code" for i in (1, 2, 7, 8, 11, 16, 17, 19, 20)},
}
"""Rows from which a number of a chip file was taken: they cannot test that number."""
SHORT_S = 3e-5
"""Seconds below which a task is mostly its start."""


def measured(*tables: str) -> Comparison:
    """Return the rows of some tables of the package, compared with the model as one comparison."""
    rows: list[Compared] = []
    for table in tables:
        rows.extend(compare(data_path(f"measured/{table}.csv")).rows)
    return Comparison(", ".join(tables), tuple(rows))


def measured_networks(batches: Container[int], like: str = "") -> Comparison:
    """Return the networks of the package's table that were measured with these batches.

    `like` "cann" compiles them as the vendor's documents say. A row takes about a second.
    """
    rows = [
        row
        for row in read_measured(data_path("measured/networks.csv"))
        if row.work is not None and row.work.attributes.get("batch") in batches
    ]
    return Comparison("networks", tuple(compare_rows(rows, like=like)))


def worst_lines(comparison: Comparison, per_group: int = 2) -> list[str]:
    """Return the `per_group` rows of each group with the largest errors, with times and limits."""
    lines = [f"{'group':<17}{'row':<30}{'measured us':>12}{'model us':>10}{'error':>7}  limit"]
    for group in comparison.groups():
        timed = [
            row for row in comparison.rows if row.group == group.group and row.error is not None
        ]
        lines += [_line(row) for row in sorted(timed, key=_miss, reverse=True)[:per_group]]
    return lines


def _miss(row: Compared) -> float:
    """Return the size of a row's error; 0 without one."""
    return abs(row.error or 0.0)


def _line(row: Compared) -> str:
    """Return a row: times in microseconds, at most 88 columns."""
    measured_us, model_us = (1e6 * (time_s or 0.0) for time_s in (row.measured_s, row.model_s))
    return (
        f"{row.group:<17.16}{row.case:<32.31}{measured_us:>10.1f}{model_us:>10.1f}"
        f"{row.error or 0.0:>+7.0%}  {row.limit[:10]}"
    )


def refusal_lines(*comparisons: Comparison, most: int = 8) -> list[str]:
    """Return why rows are refused, the commonest reason first, and how many rows it concerns."""
    reasons = Counter(
        row.refused for comparison in comparisons for row in comparison.rows if row.refused
    )
    lines = [f"{count:4}  {reason[:80]}" for reason, count in reasons.most_common(most)]
    other_count = sum(reasons.values()) - sum(count for _, count in reasons.most_common(most))
    if other_count:
        lines.append(f"{other_count:4}  other reasons")
    return lines


def calibration_lines(
    comparison: Comparison, cases: Sequence[str] = tuple(CALIBRATION_ROWS)
) -> list[str]:
    """Return the rows that gave a number of a chip file, with their errors."""
    return [_line(row) for row in comparison.rows if row.case in cases]


def shortest_lines(comparison: Comparison, most: int = 14) -> list[str]:
    """Return the shortest measured task of each kernel and the model's time, the longest first.

    Kernels whose shortest task takes `SHORT_S` or more are left out.
    """
    shortest: dict[str, Compared] = {}
    for row in comparison.rows:
        case_parts = row.case.split("/")
        if row.error is None or len(case_parts) != 3 or case_parts[0] not in ("cb", "tb"):
            continue
        name = case_parts[1]
        if name not in shortest or _measured_s(row) < _measured_s(shortest[name]):
            shortest[name] = row
    ranked = sorted(shortest.items(), key=lambda pair: _measured_s(pair[1]), reverse=True)
    small = [(name, row) for name, row in ranked if _measured_s(row) < SHORT_S]
    lines = [f"{'kernel':<28}{'measured':>11}{'model':>11}"]
    for name, row in small[:most]:
        model_s = row.model_s or 0.0
        lines.append(f"{name:<28}{1e6 * _measured_s(row):>8.1f} µs{1e6 * model_s:>8.1f} µs")
    return lines


def _measured_s(row: Compared) -> float:
    """Return a row's measured seconds; 0 without a measurement."""
    return row.measured_s or 0.0

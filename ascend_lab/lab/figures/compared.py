"""Figure of the command `compare`: the model's times over measured ones, row by row."""

import numpy as np
from matplotlib.ticker import FuncFormatter

from ascend_lab.compare import Compared, Comparison
from ascend_lab.lab.figures import style as st

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
MAX_NAMED_GROUPS = 12
"""Groups that get a colour and a marker of their own; the rest share one."""
OTHER_GROUPS = "other groups"
RATIO_LINES = (1.0, 2.0, 0.5)
"""Model / measured along the lines drawn."""


def fig_compared(comparison: Comparison) -> st.LabFigure:
    """Draw model over measured seconds, both axes logarithmic, a colour and marker a group."""
    fig, ax = st.new_figure(height_in=4.2)
    ax.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="model (µs)")
    alt_parts = []
    for place, (name, rows) in enumerate(_by_group(comparison).items()):
        measured = [1e6 * (row.measured_s or 0.0) for row in rows]
        model = [1e6 * (row.model_s or 0.0) for row in rows]
        look = {
            "marker": MARKERS[place % len(MARKERS)],
            "color": st.PALETTE[place % len(st.PALETTE)],
        }
        ax.plot(
            measured,
            model,
            linestyle="none",
            markersize=4,
            markeredgecolor=st.INK,
            markeredgewidth=0.3,
            label=name,
            **look,
        )
        ratio = float(np.exp(np.mean(np.log(np.array(model) / np.array(measured)))))
        alt_parts.append(f"{name}: {len(rows)} rows, model {ratio:.2g} times measured")
    if alt_parts:
        ends = np.array([*ax.get_xlim(), *ax.get_ylim()])
        line = np.array([ends.min(), ends.max()])
        for ratio in RATIO_LINES:
            style = "-" if ratio == 1.0 else ":"
            ax.plot(line, ratio * line, color=st.GREY, linestyle=style, linewidth=0.8, zorder=0)
        ax.set(xlim=line, ylim=line)
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    refused = sum(row.error is None for row in comparison.rows)
    alt = (
        f"Model over measured times of {comparison.name}, both logarithmic, by group. "
        f"{'; '.join(alt_parts) or 'No row is timed'}. {refused} rows are refused. "
        "Lines at equal times, and at twice and half."
    )
    return st.finish(fig, alt=alt)


def _by_group(comparison: Comparison) -> dict[str, list[Compared]]:
    """Return the timed rows of each group, those behind the largest `MAX_NAMED_GROUPS` as one."""
    groups: dict[str, list[Compared]] = {}
    for row in comparison.rows:
        if row.error is not None:
            groups.setdefault(row.group, []).append(row)
    ranked = sorted(groups, key=lambda name: -len(groups[name]))
    named_groups = {name: groups[name] for name in ranked[:MAX_NAMED_GROUPS]}
    other_rows = [row for name in ranked[MAX_NAMED_GROUPS:] for row in groups[name]]
    return {**named_groups, OTHER_GROUPS: other_rows} if other_rows else named_groups

"""Which core makes which number: bands of operators that split along different axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.figures.style import INK, LabFigure, finish, new_figure, styled

TITLES = {"h": "reduce", "u": "transpose", "y": "scatter", "fused": "one kernel"}


@styled
def fig_owners(maps: Mapping[str, NDArray[Any]]) -> LabFigure:
    """Draw who makes every number of reduce, transpose and scatter, and in one kernel for all.

    `maps` is what `graph.fusion.split_conflict.owner_maps` returns; points run to the right,
    channels down, and each core has a shade. Under the pictures stands the share of the numbers
    that stay on their core when the next operator takes them.
    """
    fig, axes = new_figure(ncols=len(maps), height_in=2.3)
    names = list(maps)
    cores = int(max(m.max() for m in maps.values())) + 1
    said = []
    for place, (ax, name) in enumerate(zip(axes, names, strict=True)):
        core = maps[name]
        ax.imshow(core.T, cmap="cividis", vmin=0, vmax=cores - 1, aspect="auto")
        ax.set_title(TITLES.get(name, name), loc="left")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_facecolor("none")
        for spine in ax.spines.values():
            spine.set(visible=True, color=INK, linewidth=0.6)
        along = _along(core)
        said.append(f"{TITLES.get(name, name)} is cut along the {along}")
        if place + 1 < len(names) and names[place + 1] != "fused":
            share = float(np.mean(core == maps[names[place + 1]]))
            ax.set_xlabel(f"{share:.1%} stay")
            said[-1] += f", {share:.1%} of its numbers stay on their core"
        elif name == "fused":
            ax.set_xlabel("all stay")
    axes[0].set_ylabel("channels")
    fig.supxlabel("points", fontsize=9)
    return finish(fig, alt=f"Owners among {cores} cores: {'; '.join(said)}.")


def _along(core: NDArray[Any]) -> str:
    """Return the axis along which the owner changes."""
    points, channels = (np.diff(core, axis=axis).any() for axis in (0, 1))
    if points and channels:
        return "points and channels"
    return "points" if points else "channels" if channels else "nothing"

"""Figures of clusters: topologies (servers, devices, switches, links), and collectives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyBboxPatch

from ascend_lab.cluster import Schedule, Topology, collective_time, execute, load_topology
from ascend_lab.cluster.loader import Kind, family, kind_of, link_kinds, rate_text
from ascend_lab.lab.chip_report import format_size
from ascend_lab.lab.figures import style as st

Look = tuple[str, Literal["-", "--", "-.", ":"]]
"""Colour and dashes of a link."""
LOOKS: tuple[Look, ...] = (
    (st.BLUE, "-"),
    (st.VERMILLION, "--"),
    (st.GREEN, "-."),
    (st.ORANGE, ":"),
    (st.PURPLE, "-"),
    (st.SKY, "--"),
    (st.GREY, ":"),
)
# Of more servers, devices or switches than these the first and the last are drawn, dots between.
MAX_SERVERS = 3
MAX_DEVICES = 12
MAX_SWITCHES = 8
DISC_IN = 0.13
"""Radius of a device, in inches as all lengths here."""
BOX_IN = (0.62, 0.22)
"""Sides of a switch."""
SERVER_IN = 2.1
"""Height of a server."""
ROW_IN = 0.62
"""Distance of rows of switches."""


@dataclass(slots=True)
class _Plan:
    """Where things are drawn, in inches from the upper left.

    `places` has the drawn devices and switches, `boxes` left and right edge of each drawn server,
    `dots` what stands for nodes left out, and `rows` counts the rows of switches.
    """

    places: dict[int, st.Point] = field(default_factory=dict)
    boxes: list[tuple[float, float]] = field(default_factory=list)
    dots: list[st.Point] = field(default_factory=list)
    rows: int = 0


def fig_topology(topology: Topology) -> st.LabFigure:
    """Draw a topology; of many servers, devices or switches the first ones and the last.

    Colour and dashes tell the kinds of links apart; the legend gives each kind's rate and latency
    in one direction and how many links of it the whole topology has.
    """
    plan = _planned(topology)
    kinds = list(link_kinds(topology).items())
    legend_in = 0.2 * -(-min(len(kinds), len(LOOKS)) // 2) + 0.15
    height = SERVER_IN + plan.rows * ROW_IN + legend_in + 0.45
    fig, ax = st.new_figure(height_in=max(height, 1.5))
    ax.set_axis_off()
    ax.set(xlim=(0, st.WIDTH_IN), ylim=(SERVER_IN + plan.rows * ROW_IN + 0.1, -0.3), aspect="equal")
    looks = {kind: LOOKS[i % len(LOOKS)] for i, (kind, _) in enumerate(kinds)}
    _servers(ax, topology, plan)
    _links(ax, topology, plan, looks)
    _nodes(ax, topology, plan)
    for x, y in plan.dots:
        st.put(ax, x, y, "···", fontsize=11)
    handles = []
    for kind, count in kinds[: len(LOOKS)]:
        (ends, alpha_s, rate) = kind
        (colour, dashes) = looks[kind]
        label = f"{ends}: {rate_text(rate)}, {alpha_s * 1e6:.3g} µs ({count} links)"
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.8, label=label))
    if handles:
        fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7.5)
    links = (f"{n} links {ends} of {rate_text(rate)}" for (ends, _, rate), n in kinds[:6])
    alt = (
        f"Topology {topology.name}: {topology.size} devices in {len(topology.groups)} "
        f"servers, {len(topology.switches)} switches; {'; '.join(links) or 'no links'}; "
        f"{rate_text(topology.bisection_bytes_per_s())} between the halves."
    )
    return st.finish(fig, alt=alt)


# -- places ---------------------------------------------------------------------------------------
def _ends_of(count: int, most: int) -> list[int]:
    """Return what is drawn of so many: all, or the first and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


def _planned(topology: Topology) -> _Plan:
    """Return where to draw servers with their devices and switches, and other switches below."""
    plan = _Plan()
    neighbours = _neighbours(topology)
    server_of = {d: i for i, group in enumerate(topology.groups) for d in group}
    # switches to which devices of one server only are linked
    server_of_switch: dict[int, int] = {}
    for switch in range(topology.size, topology.size + len(topology.switches)):
        servers = {server_of[n] for n in neighbours.get(switch, []) if n in server_of}
        network = family(topology.label(switch)) in ("rail", "spine", "ethernet")
        if len(servers) == 1 and (len(topology.groups) > 1 or not network):
            (server_of_switch[switch],) = servers
    drawn = _ends_of(len(topology.groups), MAX_SERVERS)
    width = st.WIDTH_IN / len(drawn)
    for place, server in enumerate(drawn):
        left_in = place * width + 0.13
        right_in = (place + 1) * width - 0.13
        plan.boxes.append((left_in, right_in))
        inside = [s for s, group in server_of_switch.items() if group == server]
        _place_server(topology, plan, server, inside, (left_in, right_in))
    if len(drawn) < len(topology.groups):
        plan.dots.append(((len(drawn) - 1) * width, SERVER_IN / 2))
    all_switches = [topology.size + i for i in range(len(topology.switches))]
    _place_network(topology, plan, [s for s in all_switches if s not in server_of_switch])
    return plan


def _neighbours(topology: Topology) -> dict[int, list[int]]:
    """Return the nodes to which each node is linked, in either direction."""
    pairs = set(topology.between) | {(b, a) for a, b in topology.between}
    neighbours: dict[int, list[int]] = {}
    for node, neighbour in sorted(pairs):
        neighbours.setdefault(node, []).append(neighbour)
    return neighbours


def _place_server(
    topology: Topology, plan: _Plan, server: int, inside: Sequence[int], sides: st.Point
) -> None:
    """Place a server's devices on circles, one for all that are linked, and its switches below."""
    group = topology.groups[server]
    shown = [group[i] for i in _ends_of(len(group), MAX_DEVICES)]
    circles = _linked(topology, shown)
    hub = len(inside) == 1 and len(circles) == 1
    y = (SERVER_IN - (0.0 if hub or not inside else 0.55)) / 2
    circle_width = (sides[1] - sides[0]) / len(circles)
    radius = min(y - 0.22, circle_width / 2 - 0.2)
    for i, members in enumerate(circles):
        x = sides[0] + (i + 0.5) * circle_width
        cut = len(shown) < len(group)
        angle_step = math.tau / (len(members) + cut)
        slots: list[int | None] = [*members[:-1], *([None] if cut else []), members[-1]]
        for j, device in enumerate(slots):
            angle = angle_step * (j + 0.5) - math.tau / 4
            distance = radius if len(slots) > 1 else 0.0
            position = (x + distance * math.cos(angle), y + distance * math.sin(angle))
            if device is None:
                plan.dots.append(position)
            else:
                plan.places[device] = position
    neighbours = _neighbours(topology)
    for switch in inside:
        xs = [plan.places[n][0] for n in neighbours[switch] if n in shown]
        middle = sum(xs) / len(xs) if xs else sum(sides) / 2
        plan.places[switch] = (middle, y if hub else SERVER_IN - 0.3)


def _linked(topology: Topology, shown: Sequence[int]) -> list[list[int]]:
    """Return the devices in circles: each linked set one, all single devices one together."""
    neighbours = _neighbours(topology)
    circle = {d: {d} for d in shown}
    for a in shown:
        for b in neighbours.get(a, []):
            if b in circle and circle[b] is not circle[a]:
                circle[a] |= circle[b]
                circle |= dict.fromkeys(circle[b], circle[a])
    circles = [sorted(circle[d]) for d in shown if d == min(circle[d])]
    single = sorted(d for members in circles if len(members) == 1 for d in members)
    return [*(members for members in circles if len(members) > 1), *([single] if single else [])]


def _place_network(topology: Topology, plan: _Plan, outer: Sequence[int]) -> None:
    """Place the switches between servers in rows: those near devices or hosts, then the others."""
    neighbours = _neighbours(topology)
    spine_switches = [
        switch for switch in outer if all(n in outer for n in neighbours.get(switch, []))
    ]
    leaf_switches = [switch for switch in outer if switch not in spine_switches]
    for row in (leaf_switches, spine_switches):
        if not row:
            continue
        y = SERVER_IN + (plan.rows + 0.6) * ROW_IN
        drawn = [row[i] for i in _ends_of(len(row), MAX_SWITCHES)]
        spacing_in = st.WIDTH_IN / len(drawn)
        for i, switch in enumerate(drawn):
            plan.places[switch] = ((i + 0.5) * spacing_in, y)
        if len(drawn) < len(row):
            plan.dots.append((st.WIDTH_IN - spacing_in, y))
        plan.rows += 1


# -- drawing --------------------------------------------------------------------------------------
def _servers(ax: Any, topology: Topology, plan: _Plan) -> None:
    """Draw the boxes of servers and their titles."""
    drawn = _ends_of(len(topology.groups), MAX_SERVERS)
    for server, (left_in, right_in) in zip(drawn, plan.boxes, strict=True):
        shape: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.08", "zorder": 0}
        look = {"facecolor": st.LIGHT, "edgecolor": st.INK, "linewidth": 0.8, **shape}
        ax.add_patch(FancyBboxPatch((left_in, 0), right_in - left_in, SERVER_IN, **look))
        count = len(topology.groups[server])
        name = f"server {server}" if len(topology.groups) > 1 else topology.name
        title = f"{name}: {count} device{'s' if count > 1 else ''}"
        st.put(ax, (left_in + right_in) / 2, -0.12, title)


def _links(ax: Any, topology: Topology, plan: _Plan, looks: dict[Kind, Look]) -> None:
    """Draw the links between drawn nodes, one line for both directions."""
    crowded = len(plan.places) > 24
    for (a, b), link in topology.between.items():
        if (b < a and (b, a) in topology.between) or a not in plan.places or b not in plan.places:
            continue
        colour, dashes = looks[kind_of(topology, link)]
        (x0, y0) = plan.places[a]
        (x1, y1) = plan.places[b]
        width = 0.7 if crowded else 1.2
        ax.plot([x0, x1], [y0, y1], color=colour, linestyle=dashes, linewidth=width, zorder=1)


def _nodes(ax: Any, topology: Topology, plan: _Plan) -> None:
    """Draw devices as discs and switches as boxes, with their names."""
    for node, position in plan.places.items():
        label = topology.label(node)
        if node < topology.size:
            short = label.removeprefix("npu") or label
            ax.add_patch(Circle(position, DISC_IN, facecolor=st.PAPER, edgecolor=st.INK, zorder=3))
            st.put(ax, *position, short[:6], fontsize=7 if len(short) < 4 else 6, zorder=4)
            continue
        corner = position[0] - BOX_IN[0] / 2, position[1] - BOX_IN[1] / 2
        st.box(ax, *corner, *BOX_IN, facecolor="#FFFFFF", edgecolor=st.INK, zorder=3)
        st.put(ax, *position, label[:10], fontsize=7, zorder=4)


# -- figures of collectives: who holds what after each round, and which algorithm wins where -------
SHADES = LinearSegmentedColormap.from_list("held", ["#FFFFFF", st.BLUE])
FAMILIES = {
    name: (letters, getattr(st, colour)) for name, (letters, colour) in st.LOOKS["families"].items()
}
"""Letters and colour of each algorithm in the map."""
DARK = (st.BLUE, st.VERMILLION, st.GREEN, st.GREY)
"""Colours on which letters are white."""


def fig_holdings(schedule: Schedule) -> st.LabFigure:
    """Draw, after each round of an all-reduce, of how many ranks each block holds the sum."""
    round_numbers = range(len(schedule.rounds) + 1)
    fig, axes = st.new_figure(ncols=len(round_numbers), height_in=1.7)
    panels = st.panels(axes)
    alt_parts = []
    ones = [np.ones(schedule.blocks, np.int64)] * schedule.ranks
    for number, ax in zip(round_numbers, panels, strict=True):
        rank_counts = np.stack(execute(replace(schedule, rounds=schedule.rounds[:number]), ones))
        ax.imshow(rank_counts, cmap=SHADES, vmin=0, vmax=schedule.ranks, aspect="equal")
        for (rank, block), count in np.ndenumerate(rank_counts):
            dark = count > schedule.ranks / 2
            st.put(ax, block, rank, str(count), color="#FFFFFF" if dark else st.INK)
        ax.set(title="start" if number == 0 else f"round {number}", xticks=[], yticks=[])
        ax.tick_params(length=0)
        alt_parts.append(
            f"after {number} rounds {int((rank_counts == schedule.ranks).sum())} complete"
        )
    panels[0].set(ylabel="rank", xlabel="block", yticks=range(schedule.ranks))
    text = f"{schedule.algorithm} all-reduce of {schedule.ranks} ranks, {schedule.blocks} blocks"
    return st.finish(
        fig, alt=f"{text}. Of {schedule.ranks * schedule.blocks}: {', '.join(alt_parts)}."
    )


SIZES_BYTES = tuple(2**k for k in range(10, 31, 2))


def fig_best_collective(
    kind: str = "910a-roce", counts: Sequence[int] = (2, 4, 8, 16, 32, 64), op: str = "all_reduce"
) -> st.LabFigure:
    """Draw which algorithm is quickest for every size and number of devices of a cluster.

    `kind` is a topology that takes a count. Cells bear letters; the legend names them.
    """
    grid = [(load_topology(f"{kind}:{p}"), n) for p in counts for n in SIZES_BYTES]
    algorithms = [collective_time(op, topology, n).algorithm for topology, n in grid]
    # names may go on with levels in brackets, and with * and a number of chunks
    family_names = [name.partition("(")[0].partition("*")[0] for name in algorithms]
    names = np.reshape(family_names, (len(counts), -1)).tolist()
    fig, ax = st.new_figure(height_in=0.55 + 0.36 * len(counts))
    for (row, column), name in np.ndenumerate(np.array(names)):
        letters, colour = FAMILIES[name]
        ink = "#FFFFFF" if colour in DARK else st.INK
        st.box(ax, column - 0.5, row - 0.5, 1, 1, fc=colour, ec="#FFFFFF", lw=1)
        st.put(ax, column, row, letters, color=ink)
    ax.set(xlim=(-0.5, len(SIZES_BYTES) - 0.5), ylim=(-0.5, len(counts) - 0.5))
    ax.set(xlabel="size", ylabel="devices")
    ax.set_xticks(range(len(SIZES_BYTES)), [format_size(n).replace(" ", "\n") for n in SIZES_BYTES])
    ax.set_yticks(range(len(counts)), [str(p) for p in counts])
    ax.tick_params(length=0)
    used_families = [name for name in FAMILIES if any(name in line for line in names)]
    looks = {f"{FAMILIES[n][0]}: {n}": {"fc": FAMILIES[n][1], "ec": st.INK} for n in used_families}
    st.key(fig, looks, loc="outside upper center", ncols=min(4, len(used_families)))
    alt_parts = []
    for count, line in zip(counts, names, strict=True):
        starts = [i for i, name in enumerate(line) if i == 0 or name != line[i - 1]]
        ranges = (f"{line[i]} from {format_size(SIZES_BYTES[i])}" for i in starts)
        alt_parts.append(f"{count} devices {', '.join(ranges)}")
    return st.finish(fig, alt=f"The quickest {op} on {kind}: {'; '.join(alt_parts)}.")

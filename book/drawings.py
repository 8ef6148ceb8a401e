"""Sphinx extension: the map of the road from a model file to a cluster, and its openers of parts.

The directive `{road}` draws the whole map, `{road} 4` a strip that shows where part IV lies on it.
The drawings stand in the page itself: they take its colours, and their stations are links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from chapter_numbers import number_of
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDE, HIGH, GAP, STEP = 216, 140, 36, 172
ACROSS = WIDE + GAP


def line(*points: float, close: bool = False) -> str:
    """Return a path through points x, y, x, y, ..."""
    pairs = [f"{x:g} {y:g}" for x, y in zip(points[::2], points[1::2], strict=True)]
    return f'<path d="M{" L".join(pairs)}{"Z" if close else ""}"/>'


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="1.5"/>'


def dots(*points: float) -> str:
    """Return small circles at x, y, x, y, ..."""
    pairs = zip(points[::2], points[1::2], strict=True)
    return "".join(f'<circle cx="{x:g}" cy="{y:g}" r="3"/>' for x, y in pairs)


# Small pictures of 32 by 32, in lines.
FILE = line(7, 2, 19, 2, 26, 9, 26, 30, 7, 30, close=True) + line(19, 2, 19, 9, 26, 9)
FILE += line(12, 16, 21, 16) + line(12, 22, 21, 22)
GRAPH = (
    line(16, 6, 8, 15, 16, 26) + line(16, 6, 24, 15, 16, 26) + dots(16, 5, 8, 15, 24, 15, 16, 27)
)
PASSES = "".join(line(4 + i, 6 + 7 * i, 28 - i, 6 + 7 * i) for i in (0, 3))
PASSES += line(9, 16, 22, 16) + line(18, 12, 22, 16, 18, 20)
LAYOUT = "".join(box(x, y, 6, 12) for x in (4, 13, 22) for y in (3, 17))
FUSE = box(3, 3, 12, 10) + box(17, 3, 12, 10) + line(9, 14, 16, 19, 23, 14) + box(8, 20, 16, 9)
LOWER = line(4, 5, 28, 5) + line(9, 12, 28, 12) + line(14, 19, 28, 19) + line(14, 26, 24, 26)
KERNEL = line(16, 2, 28, 9, 28, 23, 16, 30, 4, 23, 4, 9, close=True)
KERNEL += line(4, 9, 16, 16, 28, 9) + line(16, 16, 16, 30)
CYCLES = box(3, 4, 13, 5) + box(9, 13, 16, 5) + box(17, 22, 12, 5) + line(3, 30, 30, 30)
SEARCH = '<circle cx="13" cy="13" r="9"/>' + line(20, 20, 29, 29) + line(9, 13, 12, 16, 17, 10)
CLUSTER = line(6, 6, 26, 6, 26, 26, 6, 26, close=True) + line(6, 6, 26, 26) + line(26, 6, 6, 26)
CLUSTER += dots(6, 6, 26, 6, 26, 26, 6, 26)
USERS = '<circle cx="11" cy="9" r="5"/><circle cx="23" cy="11" r="4"/>'
USERS += line(2, 29, 3, 21, 7, 17, 15, 17, 19, 21, 20, 29) + line(20, 18, 26, 18, 29, 22, 30, 29)


@dataclass(frozen=True, slots=True)
class Station:
    """A stage of the road: name, picture, place, and {file of a chapter: short name}."""

    name: str
    picture: str
    column: int
    row: int
    chapters: dict[str, str]


ROAD = (
    Station(
        "model file",
        FILE,
        0,
        0,
        {"17_smaller_models": "Smaller models"},
    ),
    Station("graph", GRAPH, 1, 0, {"13_graph_ir": "From ONNX to our IR"}),
    Station(
        "passes",
        PASSES,
        2,
        0,
        {
            "14_rewrites": "Rewrites",
            "15_memory_planning": "Memory planning",
        },
    ),
    Station(
        "layout",
        LAYOUT,
        2,
        1,
        {
            "09_layouts": "Layouts",
            "14a_who_puts_the_layout": "Who places layouts",
        },
    ),
    Station(
        "fuse",
        FUSE,
        1,
        1,
        {
            "10_fusing": "Fusing add + relu",
            "11_elementwise_reduce": "Elementwise and reduce",
            "12_transpose_scatter": "Transpose and scatter",
            "16_flash_attention": "FlashAttention",
            "16a_two_kinds_of_cores": "Two kinds of cores",
        },
    ),
    Station(
        "lower",
        LOWER,
        0,
        1,
        {
            "05_operator_dsl": "What, apart from how",
            "06_schedules": "Schedules",
            "06a_nest_to_flags": "From nest to flags",
        },
    ),
    Station(
        "kernel",
        KERNEL,
        0,
        2,
        {
            "07_matmul": "Matmul on the cube",
            "08_convolution": "Convolution",
        },
    ),
    Station(
        "cycles",
        CYCLES,
        1,
        2,
        {
            "01_simd_simt": "SIMD, SIMT and peak",
            "02_da_vinci_core": "The Da Vinci core",
            "03_memory_roofline": "Memory and rooflines",
            "04_overlap": "Overlap",
        },
    ),
    Station(
        "cluster",
        CLUSTER,
        2,
        2,
        {
            "22_collectives": "Collectives",
            "23_parallel_training": "Parallel training",
            "24_gradient_tuner": "Gradient tuner",
        },
    ),
    Station(
        "search",
        SEARCH,
        1,
        3,
        {
            "19_vector_tuner_mcts": "Vector tuner",
            "20_cube_tuner_ga": "Cube tuner",
            "21_subgraph_tuner": "Subgraph tuner",
        },
    ),
    Station(
        "users",
        USERS,
        2,
        3,
        {
            "18_camera": "Camera and cards",
            "18a_placement_runtime": "Placement and runtime",
            "25_tuning_networks": "Whole networks, tuned",
            "26_serving": "Serving",
            "27_language_models": "Language models",
        },
    ),
)
STYLE = """<style>
.lab-road {overflow-x: auto; margin-block: 1.5rem}
.lab-road svg {display: block; width: 100%; min-width: 36rem; font-family: inherit}
.lab-road text {fill: var(--pst-color-text-base, #222); font-size: 13px}
.lab-road .lab-name {font-size: 15px; font-weight: 700}
.lab-road .lab-small {font-size: 12px}
.lab-road a {text-decoration: none}
.lab-road a text {fill: var(--pst-color-link, #0a5dc2)}
.lab-road a:hover text, .lab-road a:focus text {text-decoration: underline}
.lab-road .lab-card {fill: var(--pst-color-surface, #f3f4f5); stroke: var(--pst-color-border, #ccc)}
.lab-road .lab-way {fill: none; stroke: var(--pst-color-border, #ccc); stroke-width: 10;
  stroke-linejoin: round}
.lab-road .lab-line {fill: none; stroke: var(--pst-color-text-muted, #555); stroke-width: 1.6}
.lab-road .lab-picture {fill: none; stroke: var(--pst-color-text-muted, #555); stroke-width: 1.8;
  stroke-linejoin: round; stroke-linecap: round}
.lab-road .lab-here .lab-picture {stroke: var(--pst-color-primary, #0a5dc2); stroke-width: 2.4}
.lab-road .lab-here .lab-spot {fill: var(--pst-color-surface, #f3f4f5);
  stroke: var(--pst-color-primary, #0a5dc2); stroke-width: 2}
.lab-road .lab-spot {fill: var(--pst-color-background, #fff); stroke: var(--pst-color-border, #ccc)}
.lab-road .lab-here text {font-weight: 700}
.lab-road .lab-away text {fill: var(--pst-color-text-muted, #555)}
</style>"""


def number(chapter: str) -> str:
    """Return the number of a chapter's file as the book prints it."""
    return number_of(f"notebooks/{chapter}") or ""


def drawing(height: float, says: str, parts: Iterable[str]) -> str:
    """Return a drawing 720 wide, with what it says for those who do not see it."""
    start = f'<svg viewBox="-2 -2 724 {height + 4:g}" role="group" aria-label="{escape(says)}">'
    return f'<div class="lab-road">{STYLE}{start}{"".join(parts)}</svg></div>'


def road_map(there: Callable[[str], bool]) -> str:
    """Return the map: stations along the road, the chapters that are `there` as links."""
    middle = [(s.column * ACROSS + WIDE / 2, s.row * STEP + HIGH / 2) for s in ROAD]
    way = [at for station, at in zip(ROAD, middle, strict=True) if station.row < 3]
    points = " L".join(f"{x:g} {y:g}" for x, y in [*way, middle[-1]])
    parts = [f'<path class="lab-way" d="M{points}"/>', *arrows()]
    for station in ROAD:
        x, y = station.column * ACROSS, station.row * STEP
        card = f'<rect class="lab-card" width="{WIDE}" height="{HIGH}" rx="8"/>'
        rows = [
            f'<a href="../notebooks/{file}.html"><text x="14" y="{58 + 20 * i}">'
            f"{number(file)}&#8194;{escape(name)}</text></a>"
            for i, (file, name) in enumerate(
                filter(lambda c: there(c[0]), station.chapters.items())
            )
        ]
        picture = (
            f'<g class="lab-picture" transform="translate({WIDE - 40} 6)">{station.picture}</g>'
        )
        title = f'<text class="lab-name" x="14" y="29">{station.name}</text>'
        inside = "".join([card, picture, title, *rows])
        parts.append(f'<g class="lab-station" transform="translate({x} {y})">{inside}</g>')
    names = ", ".join(station.name for station in ROAD if station.row < 3)
    says = (
        f"A map of the book. A road leads from station to station: {names}. From the cycles a "
        "search leads back to layout, fusion and lowering; from the cluster the road goes on to "
        "the users. Each station lists its chapters as links."
    )
    return drawing(3 * STEP + HIGH, says, parts)


def way(x: float, y: float, *points: float, look: str = "") -> str:
    """Return a thin line through points around x, y."""
    return f'<g class="lab-line" transform="translate({x:g} {y:g})"{look}>{line(*points)}</g>'


def arrows() -> list[str]:
    """Return the heads of the road's arrows, and the way back that a search takes."""
    right, left, down = (-3, -6, 3, 0, -3, 6), (3, -6, -3, 0, 3, 6), (-6, -3, 0, 3, 6, -3)
    across = (
        (1, 0, right),
        (2, 0, right),
        (2, 1, left),
        (1, 1, left),
        (1, 2, right),
        (2, 2, right),
    )
    heads = [
        way(column * ACROSS - GAP / 2, row * STEP + HIGH / 2, *points)
        for column, row, points in across
    ]
    between = HIGH + (STEP - HIGH) / 2
    heads += [
        way(column * ACROSS + WIDE / 2, row * STEP + between, *down)
        for column, row in ((2, 0), (0, 1), (2, 2))
    ]
    middle, bottom, side, corner = ACROSS + WIDE / 2, 3 * STEP, 3 * STEP + HIGH / 2, WIDE - 30
    heads.append(way(middle, bottom, 0, HIGH - STEP, 0, 0))
    heads.append(way(middle, bottom - 4, *down))
    top = STEP + HIGH
    turns = (ACROSS, side, WIDE + GAP / 2, side, WIDE + GAP / 2, top + 16, corner, top + 16)
    heads.append(way(0, 0, *turns, corner, top, look=' stroke-dasharray="5 4"'))
    heads.append(way(corner, top + 4, -6, 3, 0, -3, 6, 3))
    text = f'<text class="lab-small" x="{ACROSS - 26}" y="{side + 22:g}" text-anchor="end">'
    return [*heads, f"{text}and again, until the clock ends</text>"]


PARTS = ("01 02 03 04", "05 06 06a 07 08 09", "10 11 12", "13 14 14a 15 16 16a", "17 18 18a",
         "19 20 21", "22 23 24", "25 26 27")  # fmt: skip
NAMES = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII")


def strip(part: int, there: Callable[[str], bool]) -> str:
    """Return the road as a strip, with the stations of a part, 1 to 8, marked."""
    own = PARTS[part - 1].split()
    parts = [f'<path class="lab-way" d="M30 30 L{30 + 66 * (len(ROAD) - 1)} 30"/>']
    here = []
    for i, station in enumerate(sorted(ROAD, key=lambda s: s.name in ("cluster", "users"))):
        files = [c for c in station.chapters if c.partition("_")[0] in own and there(c)]
        here += [station.name] if files else []
        spot = '<circle class="lab-spot" cx="30" cy="30" r="26"/>'
        picture = f'<g class="lab-picture" transform="translate(14 14)">{station.picture}</g>'
        name = f'<text class="lab-small" x="30" y="74" text-anchor="middle">{station.name}</text>'
        inside = spot + picture + name
        if files:
            inside = f'<a href="../notebooks/{files[0]}.html">{inside}</a>'
        kind = "lab-here" if files else "lab-away"
        parts.append(f'<g class="{kind}" transform="translate({66 * i} 0)">{inside}</g>')
    says = f"The road of the book from model file to users. Part {NAMES[part - 1]} is at: "
    return drawing(80, says + ", ".join(here) + ".", parts)


def chapters_of(stations: Collection[Station] = ROAD) -> list[str]:
    """Return the files of all chapters on the map."""
    return [chapter for station in stations for chapter in station.chapters]


class Road(SphinxDirective):
    """`{road}`: the map; `{road} N`: where part N lies."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Put the drawing into the page."""

        def there(chapter: str) -> bool:
            return f"notebooks/{chapter}" in self.env.found_docs

        drawn = strip(int(self.arguments[0]), there) if self.arguments else road_map(there)
        return [nodes.raw("", drawn, format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("road", Road)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

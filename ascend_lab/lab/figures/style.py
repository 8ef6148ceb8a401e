"""The style that every figure of the book shares: size, type, colours, hatches, alt text.

A figure function is pure: parameters in, `LabFigure` out, no pyplot state. It has this shape, and
the package styles it where it is looked up:

    def fig_name(...) -> LabFigure:
        fig, ax = new_figure(height_in=2.6)
        ...
        return finish(fig, alt="what the data say, in one or two sentences")

The palette is the one of Okabe and Ito (https://jfly.uni-koeln.de/color/), which readers with any
common form of colour blindness can tell apart; hatches carry the same information without colour.
"""

import inspect
import io
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from ascend_lab.errors import AscendLabError

Point = tuple[float, float]
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"
LIGHT = "#E4E4E0"
INK = "#222222"
PAPER = "#FBFBF8"
PALETTE: tuple[str, ...] = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, BLACK)
"""Order in which series take their colour."""
WIDTH_IN = 6.4
DPI = 100
MIN_ALT_CHARS = 40
"""Fewest characters of an alt text."""
PAGE_PX = 700
"""Width of a figure on a page of the book."""
MIN_LABEL_PX = 9
"""Height of the smallest letters on the page."""
MAX_VECTOR_MARKS = 1500
"""More marks of one kind than this become a picture of pixels inside the figure."""
HATCHES = "hatchcolor" in inspect.signature(Patch).parameters
"""Whether a hatch has a colour of its own: before matplotlib 3.11 it takes the edge's."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# Parts of an SVG that change nothing on the screen and are left out.
UNSEEN = re.compile(r'<!--.*?-->|(?<=>)\s+(?=<)| id="[a-z0-9]+_\d+"(?=>)', re.DOTALL)
"""Comments, space between tags, names that nothing refers to."""
PATH_POINTS = re.compile(r' d="[^"]*"')
"""The points of a path, in which `FINE_DIGITS` are left out."""
FINE_DIGITS = re.compile(r"(\.\d\d)\d+|\s+(?=\n|\")|(?<=[a-zA-Z])\s+")
"""Digits beyond a hundredth, and spaces that separate nothing; group 1 stays."""
LOOKS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("looks.toml").read_text("utf-8"))
"""The looks that are data: of matplotlib, and of single figures."""
_LINES = cycler(color=PALETTE, linestyle=["-", "--", "-.", ":"] * 2)
STYLE: Mapping[str, Any] = {**LOOKS["style"], "axes.prop_cycle": _LINES, "path.sketch": None}
"""The matplotlib settings of the book; applied around building and drawing, never globally."""


def book_style() -> AbstractContextManager[None]:
    """Return a context of the matplotlib settings `STYLE`; the user's come back after it."""
    settings: Any = dict(STYLE)
    return mpl.rc_context(settings)


class FigureError(AscendLabError):
    """A figure that the book may not show, for example one without alt text."""


@dataclass(frozen=True, slots=True)
class PipeStyle:
    """How the bars of one pipe look: fill colour, hatch, and a text colour that reads on it."""

    colour: str
    hatch: str
    text_colour: str

    def patch_args(self) -> dict[str, Any]:
        """Return keyword arguments for `Axes.barh`, `Axes.bar` or a patch."""
        hatch = {"hatchcolor": (*to_rgb(self.text_colour), 0.45)} if HATCHES else {}
        look = {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": INK, "linewidth": 0.6}
        return look | hatch

    def text_args(self) -> dict[str, Any]:
        """Return keyword arguments for text on a bar: a plain box keeps the hatch out of it."""
        box = {"facecolor": self.colour, "edgecolor": "none", "pad": 1.0}
        return {"color": self.text_colour, "fontsize": 8, "bbox": box}


PIPE_STYLE: Mapping[str, PipeStyle] = MappingProxyType(
    {
        "S": PipeStyle(YELLOW, "..", INK),
        "V": PipeStyle(GREEN, "//", "#FFFFFF"),
        "M": PipeStyle(VERMILLION, "", "#FFFFFF"),
        "MTE1": PipeStyle(SKY, "\\\\", INK),
        "MTE2": PipeStyle(BLUE, "xx", "#FFFFFF"),
        "MTE3": PipeStyle(PURPLE, "--", INK),
        "FIX": PipeStyle(ORANGE, "++", INK),
    }
)
"""Colour and hatch of each pipe of a Da Vinci core, the same in every figure."""


class LabFigure(Figure):
    """A matplotlib figure that a notebook draws by itself, with its alt text, without pyplot.

    Its text form is its alt text, so a strict notebook test compares what the figure says.
    """

    alt_text: str = ""

    def __repr__(self) -> str:
        return f"Figure: {self.alt_text or 'without alt text (call figures.style.finish)'}"

    def to_svg(self) -> str:
        """Return the figure as SVG: the same text each time on the same matplotlib."""
        for marks in self.findobj(mpl.collections.Collection):
            count = max(np.shape(marks.get_offsets())[0], len(marks.get_paths()))
            marks.set_rasterized(count > MAX_VECTOR_MARKS)
        for line in self.findobj(Line2D):
            marked = line.get_marker() not in (None, "None", " ", "")
            line.set_rasterized(marked and np.size(line.get_xdata()) > MAX_VECTOR_MARKS)
        buffer = io.StringIO()
        with book_style():
            self.savefig(buffer, format="svg", dpi=2 * DPI, metadata=NO_METADATA)
        svg = buffer.getvalue()
        svg = UNSEEN.sub("", svg[svg.index("<svg") :])
        return PATH_POINTS.sub(lambda points: FINE_DIGITS.sub(r"\1", points[0]), svg)

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, object], dict[str, object]]:
        """Hand IPython picture and alt text together; it filters by `include` and `exclude`."""
        data: dict[str, object] = {"image/svg+xml": self.to_svg(), "text/plain": repr(self)}
        return data, {"image/svg+xml": {"alt": self.alt_text}}


_P = ParamSpec("_P")
_R = TypeVar("_R")


def styled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a `fig_*` function build its artists in the book's style, and restore the user's."""

    @wraps(function)
    def in_style(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function in the book's style."""
        with book_style():
            return function(*args, **kwargs)

    in_style.__dict__["is_styled"] = True
    return in_style


def new_figure(
    nrows: int = 1, ncols: int = 1, height_in: float = 3.2, **how: Any
) -> tuple[LabFigure, Any]:
    """Return a figure of the book's width and its axes; `how`: sharex, sharey, width_ratios, ...

    The axes come as `matplotlib.figure.Figure.subplots` returns them: one `Axes` for 1 x 1, an
    array of shape (n,) for one row or column, of shape (nrows, ncols) otherwise; see `panels`.
    """
    with book_style():
        fig = LabFigure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
        return fig, fig.subplots(nrows, ncols, **how)


def panels(axes: Any) -> list[Any]:
    """Return the axes of `new_figure`, one or many, as a list, row by row."""
    return list(np.atleast_1d(axes).flat)


def put(ax: Any, x: float, y: float, text: str, /, **look: Any) -> Any:
    """Write a text centred at a point, small unless `look` says otherwise; return it."""
    return ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 8, **look})


def box(ax: Any, x: float, y: float, width: float, height: float, /, **look: Any) -> Any:
    """Draw a rectangle from its corner with the least x and y, and return it."""
    return ax.add_patch(Rectangle((x, y), width, height, **look))


def stack(ax: Any, row: float, parts: Iterable[tuple[float, Mapping[str, Any]]]) -> float:
    """Draw horizontal bars, (length, look) each, one behind the other; return where they end."""
    end = 0.0
    for length, look in parts:
        ax.barh(row, length, left=end, **look)
        end += length
    return end


def name_rows(ax: Any, names: Collection[str]) -> None:
    """Name the rows 0, 1, 2, ... of a chart, the first on top."""
    ax.set_yticks(range(len(names)), list(names))
    ax.invert_yaxis()


def bare(ax: Any) -> None:
    """Take ticks and border off the axes; their labels stay."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def numbered(axis: Any, ticks: Sequence[float], unit: str = "") -> None:
    """Put ticks with their numbers on a logarithmic axis, and no others."""
    axis.set_ticks(ticks, labels=[f"{tick:,}{unit}" for tick in ticks])
    axis.axes.minorticks_off()


def doubling(ax: Any, ticks: Sequence[float]) -> None:
    """Make the x axis logarithmic to base 2, with its number at each tick."""
    ax.set_xscale("log", base=2)
    numbered(ax.xaxis, ticks)


def key(where: Any, looks: Mapping[str, Mapping[str, Any]], *more: Any, **place: Any) -> None:
    """Add a legend of patches, label -> look, and of `more` handles, to a figure or to axes."""
    handles = [Patch(label=label, **look) for label, look in looks.items()]
    where.legend(handles=[*handles, *more], **place)


def finish(fig: LabFigure, *, alt: str) -> LabFigure:
    """Give the figure its alt text, the data in one or two sentences, and return it.

    Raises `FigureError` below `MIN_ALT_CHARS` characters: a reader who does not see the figure
    must learn from the text what the others see. Labels below `MIN_LABEL_PX` are refused too.
    """
    text = " ".join(alt.split())
    if len(text) < MIN_ALT_CHARS:
        got = f"{len(text)}: {text!r}"
        remedy = "say what the data show: the series, their extremes, the comparison"
        raise FigureError(f"alt text needs at least {MIN_ALT_CHARS} characters", got, remedy)
    for label, size in labels_of(fig):
        if size < MIN_LABEL_PX:
            needed = f"labels need {MIN_LABEL_PX} px on a page of {PAGE_PX}"
            raise FigureError(needed, f"{size:.1f} px for {label!r}", "use a larger font")
    fig.alt_text = text
    return fig


def labels_of(fig: LabFigure) -> list[tuple[str, float]]:
    """Return each text of a figure with the height of its letters on the page, in pixels."""
    scale = PAGE_PX / (72 * fig.get_figwidth())
    texts: list[Any] = [text for text in fig.findobj(Text) if text.get_visible()]
    return [(t.get_text(), scale * t.get_fontsize()) for t in texts if t.get_text().strip()]


def pipe_legend(ax: Any, pipes: Sequence[str], **legend_args: Any) -> None:
    """Add a legend of pipes, colour and hatch, to the axes, in the order given."""
    key(ax, {pipe: PIPE_STYLE[pipe].patch_args() for pipe in pipes}, **legend_args)

"""The book's figure style: alt text, no global state, stable bytes, lazy exports."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb

from ascend_lab.lab import figures
from ascend_lab.lab.figures import style
from ascend_lab.lab.figures.style import (
    PALETTE,
    PIPE_STYLE,
    FigureError,
    LabFigure,
    finish,
    new_figure,
    styled,
)

ALT = "Two points joined by a line that rises from 0 to 1 over one cycle."


@styled
def fig_line(height: float = 1.0) -> LabFigure:
    fig, ax = new_figure(height_in=2.0)
    ax.plot([0, 1], [0, height])
    return finish(fig, alt=ALT)


def test_figure_carries_its_alt_text_in_text_and_metadata() -> None:
    fig = fig_line()
    assert repr(fig) == f"Figure: {ALT}"
    data, metadata = fig._repr_mimebundle_()
    assert data["text/plain"] == repr(fig)
    assert metadata == {"image/svg+xml": {"alt": ALT}}
    assert set(data) == {"image/svg+xml", "text/plain"}


def test_svg_has_the_book_width_and_the_same_text_each_time() -> None:
    first = fig_line().to_svg()
    second = fig_line().to_svg()
    assert first == second
    assert f'width="{72 * style.WIDTH_IN:g}pt"' in first.splitlines()[0]
    assert first != fig_line(height=3.0).to_svg()


def test_svg_of_another_process_is_the_same_and_has_no_date() -> None:
    code = "import test_figures_style as t; print(t.fig_line().to_svg())"
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == fig_line().to_svg() + "\n"
    assert not re.search(r"20\d\d-\d\d|metadata|Matplotlib|<!--", done.stdout)


def test_svg_is_well_formed_and_every_reference_has_its_target() -> None:
    svg = fig_line().to_svg()
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    named = set(re.findall(r' id="([^"]+)"', svg))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= named
    assert "<text" not in svg, "letters are outlines: a browser need not have the font"


def test_marks_by_the_thousand_become_a_picture_inside() -> None:
    def drawn(kind: str, count: int, **look: str) -> str:
        fig, ax = new_figure(height_in=2.0)
        getattr(ax, kind)(range(count), range(count), **look)
        return finish(fig, alt=ALT).to_svg()

    for kind, look in (("scatter", {}), ("plot", {"marker": "o", "linestyle": ""})):
        assert "<image" not in drawn(kind, style.MAX_VECTOR_MARKS, **look)
        assert "<image" in drawn(kind, style.MAX_VECTOR_MARKS + 1, **look)
    assert "<image" not in drawn("plot", 2 * style.MAX_VECTOR_MARKS)


@pytest.mark.parametrize(("points", "refused"), [(6.0, False), (5.8, True)])
def test_labels_have_nine_pixels_on_the_page(points: float, refused: bool) -> None:
    fig, ax = new_figure()
    style.put(ax, 0.5, 0.5, " ", fontsize=2)
    style.put(ax, 0.5, 0.5, "n = 3", fontsize=points)
    if refused:
        with pytest.raises(FigureError, match=r"labels need 9 px .* got 8\.8 px for 'n = 3'"):
            finish(fig, alt=ALT)
    else:
        sizes = [size for _, size in style.labels_of(finish(fig, alt=ALT))]
        assert min(sizes) == pytest.approx(9.1, abs=0.1)


@pytest.mark.parametrize("alt", ["", "   ", "too short", " ".join(["x"] * 19)])
def test_short_alt_text_is_refused(alt: str) -> None:
    fig, _ = new_figure()
    with pytest.raises(FigureError, match=str(style.MIN_ALT_CHARS)):
        finish(fig, alt=alt)
    assert fig.alt_text == ""


def test_alt_text_is_one_line() -> None:
    fig, _ = new_figure()
    assert finish(fig, alt=ALT.replace(" ", "\n   ")).alt_text == ALT


def test_axes_come_in_the_asked_shape() -> None:
    assert new_figure()[1].get_xlim() == (0.0, 1.0)
    assert new_figure(1, 3)[1].shape == (3,)
    assert new_figure(2, 3, sharex=True, width_ratios=[1, 2, 1])[1].shape == (2, 3)


def test_user_settings_survive_building_drawing_and_a_failing_figure() -> None:
    @styled
    def fig_broken() -> LabFigure:
        assert mpl.rcParams["font.size"] == style.STYLE["font.size"]
        raise ValueError("no data")

    before = dict(mpl.rcParams)
    fig_line().to_svg()
    with pytest.raises(ValueError, match="no data"):
        fig_broken()
    assert dict(mpl.rcParams) == before


def test_figures_need_no_pyplot() -> None:
    code = (
        "import sys; from ascend_lab.lab.figures.style import new_figure, finish;"
        "fig, ax = new_figure(); ax.plot([0, 1], [1, 0]); fig.to_svg();"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pipes_differ_in_colour_and_in_hatch() -> None:
    assert set(PIPE_STYLE) == {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"}
    assert len({look.colour for look in PIPE_STYLE.values()}) == 7
    assert len({look.hatch for look in PIPE_STYLE.values()}) == 7
    assert {look.colour for look in PIPE_STYLE.values()} <= set(PALETTE)


def _luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.1 (https://www.w3.org/TR/WCAG21/#dfn-relative-luminance)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("pipe", PIPE_STYLE)
def test_text_on_a_pipe_bar_has_contrast(pipe: str) -> None:
    look = PIPE_STYLE[pipe]
    light, dark = sorted([_luminance(look.colour), _luminance(look.text_colour)], reverse=True)
    # 3:1 is the WCAG 2.1 bound for graphics and large text.
    assert (light + 0.05) / (dark + 0.05) >= 3.0


def test_hatches_have_their_own_colour_where_matplotlib_can() -> None:
    """Artists take `hatchcolor` from 3.11 on, which is pinned; 3.10.8 raises where it is named."""
    assert "hatchcolor" in PIPE_STYLE["V"].patch_args()


def test_pipe_legend_lists_the_pipes_in_order() -> None:
    fig, ax = new_figure()
    style.pipe_legend(ax, ["MTE2", "M"])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["MTE2", "M"]
    assert fig.axes == [ax]


def test_unknown_figure_is_an_attribute_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match="fig_nothing"):
        _ = figures.fig_nothing


def test_every_figure_exists_and_is_styled_where_it_is_looked_up() -> None:
    assert set(figures.FIGURES) <= set(dir(figures))
    for name in figures.FIGURES:
        function = getattr(figures, name)
        assert name.startswith("fig_")
        assert getattr(function, "is_styled", False), name
        assert function.__doc__, f"{name} has no docstring"

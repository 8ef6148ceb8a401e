"""The book's figure style: alt text, no global state, stable bytes, lazy exports."""

import subprocess
import sys
import tomllib
from pathlib import Path

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
    assert metadata == {"image/png": {"alt": ALT}}


def test_png_has_the_book_width_and_the_same_bytes_each_time() -> None:
    first, second = fig_line().to_png(), fig_line().to_png()
    assert first == second
    assert first.startswith(b"\x89PNG")
    width_px = int.from_bytes(first[16:20], "big")
    assert width_px == round(style.WIDTH_IN * style.DPI)
    assert first != fig_line(height=3.0).to_png()


@pytest.mark.parametrize("alt", ["", "   ", "too short", " ".join(["x"] * 19)])
def test_short_alt_text_is_refused(alt: str) -> None:
    fig, _ = new_figure()
    with pytest.raises(FigureError, match=str(style.MIN_ALT_CHARS)):
        finish(fig, alt=alt)
    assert fig.alt_text == ""


def test_alt_text_is_one_line() -> None:
    fig, _ = new_figure()
    assert finish(fig, alt=ALT.replace(" ", "\n   ")).alt_text == ALT


@pytest.mark.parametrize("shape", [(0, 1, 3.0), (1, 0, 3.0), (1, 1, 0.1), (1, 1, 40.0)])
def test_impossible_figures_are_refused(shape: tuple[int, int, float]) -> None:
    with pytest.raises(FigureError, match="new_figure"):
        new_figure(*shape)


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
    fig_line().to_png()
    with pytest.raises(ValueError, match="no data"):
        fig_broken()
    assert dict(mpl.rcParams) == before


def test_figures_need_no_pyplot() -> None:
    code = (
        "import sys; from ascend_lab.lab.figures.style import new_figure, finish;"
        "fig, ax = new_figure(); ax.plot([0, 1], [1, 0]); fig.to_png();"
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


def test_the_floor_of_matplotlib_has_the_hatch_colour_of_bars() -> None:
    """Artists take `hatchcolor` from 3.11 on; 3.10.8 raises where a pipe is drawn."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8")
    (floor,) = [d for d in tomllib.loads(text)["project"]["dependencies"] if "matplotlib" in d]
    assert "hatchcolor" in PIPE_STYLE["V"].patch_args()
    assert tuple(map(int, floor.removeprefix("matplotlib>=").split("."))) >= (3, 11)


def test_pipe_legend_lists_the_pipes_in_order() -> None:
    fig, ax = new_figure()
    style.pipe_legend(ax, ["MTE2", "M"])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["MTE2", "M"]
    assert fig.axes == [ax]


def test_unknown_figure_is_an_attribute_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match="fig_nothing"):
        _ = figures.fig_nothing


def test_every_exported_figure_exists_and_is_styled() -> None:
    assert set(figures.FIGURES) <= set(dir(figures))
    for name in figures.FIGURES:
        function = getattr(figures, name)
        assert name.startswith("fig_")
        assert getattr(function, "is_styled", False), f"{name} lacks the decorator @styled"
        assert function.__doc__, f"{name} has no docstring"

"""Widgets: controls from ranges, a still first frame, and refusals shown instead of lost."""

import pytest

from ascend_lab.lab.figures.style import LabFigure, finish, new_figure, styled
from ascend_lab.lab.widgets import WidgetError, explore


@styled
def fig_bar(height: int = 3, scale: float = 0.5, kind: str = "b", flip: bool = False) -> LabFigure:
    if height == 9:
        raise ValueError("9 is <too> high")
    fig, ax = new_figure(height_in=1.5)
    ax.bar([0], [height * scale])
    return finish(fig, alt=f"One bar of height {height} times {scale}, kind {kind}, flip {flip}.")


def test_the_first_frame_shows_the_defaults_of_the_function() -> None:
    widget = explore(fig_bar, height=(1, 9, 1), scale=(0.0, 1.0, 0.25), kind=["a", "b"], flip=True)
    assert {name: control.value for name, control in widget.controls.items()} == {
        "height": 3,
        "scale": 0.5,
        "kind": "b",
        "flip": False,
    }
    assert bytes(widget.picture.value).decode() == fig_bar().to_svg()
    assert "height 3 times 0.5" in widget.caption.value


def test_moving_a_control_redraws_picture_and_alt_text() -> None:
    widget = explore(fig_bar, height=(1, 9, 1), fixed={"kind": "a"})
    widget.controls["height"].value = 5
    assert bytes(widget.picture.value).decode() == fig_bar(5, kind="a").to_svg()
    assert "height 5" in widget.caption.value


def test_a_refused_setting_keeps_the_picture_and_says_why() -> None:
    widget = explore(fig_bar, height=(1, 9, 1))
    before = bytes(widget.picture.value)
    widget.controls["height"].value = 9
    assert bytes(widget.picture.value) == before
    assert "ValueError: 9 is &lt;too&gt; high" in widget.caption.value
    widget.controls["height"].value = 2
    assert "height 2" in widget.caption.value


def test_the_still_frame_travels_with_the_widget() -> None:
    bundle = explore(fig_bar, height=(1, 9, 1))._repr_mimebundle_()
    assert bundle["image/svg+xml"] == fig_bar().to_svg()
    assert str(bundle["text/plain"]).startswith("explore fig_bar: Figure: One bar of height 3")
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    ("controls", "said"),
    [
        ({"depth": (1, 2, 1)}, "has no parameter 'depth'; it has: height, scale, kind, flip"),
        ({"height": (9, 1, 1)}, "low < high"),
        ({"height": (1, 9, 0)}, "step > 0"),
        ({"height": 5}, r"\(low, high, step\)"),
        ({"kind": []}, "list of choices"),
        ({"height": [9, 3]}, None),
        ({"height": [9]}, "first frame failed: ValueError"),
    ],
)
def test_impossible_controls_are_refused(controls: dict[str, object], said: str | None) -> None:
    if said is None:
        assert explore(fig_bar, **controls).controls["height"].value == 3
        return
    with pytest.raises(WidgetError, match=said):
        explore(fig_bar, **controls)

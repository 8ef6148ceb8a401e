"""What a page has of a widget without a kernel: few settings, all drawn, packed and unpacked."""

import base64
import json
import zlib
from typing import Any

import pytest

from ascend_lab.lab.figures.style import LabFigure, finish, new_figure, styled
from ascend_lab.lab.page_frames import (
    FRAMES_MIME,
    MAX_FRAMES,
    chosen_values,
    counts_of,
    frames_of,
    grid_values,
    settings_of,
    show_frames,
)
from ascend_lab.lab.widgets import Explorer, WidgetError, explore, make_control


@styled
def fig_bar(height: int = 3, scale: float = 0.5, kind: str = "b", flip: bool = False) -> LabFigure:
    if height == 9:
        raise ValueError("9 is too high")
    fig, ax = new_figure(height_in=1.5)
    ax.bar([0], [height * scale])
    return finish(fig, alt=f"One bar of height {height} times {scale}, kind {kind}, flip {flip}.")


def unpacked(saved: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return pictures and captions as the script of the page does."""
    frames = json.loads(zlib.decompress(base64.b64decode(saved["frames"])))
    pictures = ["".join(frames["pieces"][i] for i in parts) for parts in frames["pictures"]]
    return pictures, frames["captions"]


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([7], [7]),
        ([100], [24]),
        ([16, 16], [6, 4]),
        ([256, 256, 4], [4, 3, 2]),
        ([16, 16, 16, 16], [3, 2, 2, 2]),
        ([2, 2, 2, 2], [2, 2, 2, 2]),
    ],
)
def test_few_values_a_control_make_few_settings(sizes: list[int], counts: list[int]) -> None:
    assert counts_of(sizes, MAX_FRAMES) == counts


@pytest.mark.parametrize(
    ("spec", "start", "count", "values"),
    [
        ((16, 256, 16), 64, 4, [16, 64, 96, 256]),
        ((1, 8, 1), 3, 3, [1, 3, 8]),
        ((1, 8, 1), 3, 2, [3, 6]),
        ((0.0, 1.0, 0.1), 0.3, 3, [0.0, 0.3, 1.0]),
        (["a", "b", "c", "d"], "d", 3, ["a", "b", "d"]),
        (True, False, 2, [False, True]),
        ((1, 4, 1), 2, 1, [2]),
    ],
)
def test_the_present_value_is_among_the_chosen(
    spec: object, start: object, count: int, values: list[object]
) -> None:
    assert chosen_values(make_control("x", spec, start), count) == values


def test_controls_that_are_not_combined_move_alone() -> None:
    values: dict[str, list[Any]] = {"a": [1, 2], "b": ["x", "y"], "c": [5, 6, 7]}
    settings = settings_of(values, {"a": 1, "b": "x", "c": 6}, ["a", "b"])
    assert settings == [[0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 2]]


def test_a_cell_names_the_values_of_its_page() -> None:
    widget = explore(fig_bar, height=(1, 9, 1), scale=(0.0, 1.0, 0.25), kind=["a", "b"])
    values, crossed = grid_values(widget.controls, {"height": [1, 9]})
    assert values == {"height": [1, 3, 9], "scale": [0.0, 0.5, 1.0], "kind": ["a", "b"]}
    assert crossed == ["height"]
    with pytest.raises(WidgetError, match="depth"):
        grid_values(widget.controls, {"depth": [1]})


def test_every_frame_is_the_figure_at_its_setting_or_the_reason_why_not() -> None:
    widget = explore(fig_bar, height=(1, 9, 1), flip=True, fixed={"kind": "a"})
    saved: dict[str, Any] = frames_of(widget, {"height": [8, 9]})
    height, flip = saved["controls"]
    assert height == {
        "label": "height",
        "kind": "slider",
        "values": ["3", "8", "9"],
        "all": "1 to 9 in steps of 1",
    }
    assert flip == {"label": "flip", "kind": "box", "values": ["no", "yes"], "all": "no, yes"}
    assert saved["settings"][saved["start"]] == [0, 0]
    pictures, captions = unpacked(saved)
    assert len(pictures) == len(captions) == len(saved["settings"]) == 4
    for setting, picture, caption in zip(saved["settings"], pictures, captions, strict=True):
        drawn = [3, 8, 9][setting[0]]
        if drawn == 9:
            assert (picture, caption) == ("", "ValueError: 9 is too high")
        else:
            figure = fig_bar(drawn, kind="a", flip=bool(setting[1]))
            assert (picture, caption) == (figure.to_svg(), figure.alt_text)


def test_only_widgets_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[object, object]] = []
    monkeypatch.setattr(
        "ascend_lab.lab.page_frames.display",
        lambda data, raw, metadata: shown.append((data, metadata)),
    )
    widget: Explorer = explore(fig_bar, height=(1, 3, 1))
    show_frames({1: 5, 7: widget}, {})
    ((data, metadata),) = shown
    assert metadata == {"shown_by": 7}
    assert data == {FRAMES_MIME: frames_of(widget, {})}

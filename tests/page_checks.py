"""Shared by tests of chapters: texts of a figure keep apart, and what a page has printed."""

import json
from collections.abc import Iterable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from ascend_lab.lab.figures.style import LabFigure

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def assert_apart(fig: LabFigure, texts: Iterable[Text], room: int = 0) -> None:
    """No text leaves the figure on a side, by more than `room`, or covers another."""
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
    for index, (text, box) in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= fig.bbox.x1 + room, text
        for other, second in boxes[index + 1 :]:
            assert not box.overlaps(second), f"{text!r} covers {other!r}"


def printed(page: str) -> str:
    """Return what the code cells of a page have printed."""
    cells = json.loads((NOTEBOOKS / f"{page}.ipynb").read_text("utf-8"))["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    return "\n".join("".join(o.get("text", "")) for o in outputs)

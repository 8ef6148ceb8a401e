"""What the book's extensions make of saved cells: boxes for predictions, controls for widgets."""

import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
guesses = load_script(ROOT / "book" / "guesses.py")
sliders = load_script(ROOT / "book" / "sliders.py")


def code(source: str, *texts: str) -> dict[str, Any]:
    """Return a cell that printed texts."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in texts]
    return {"cell_type": "code", "source": source, "outputs": outputs}


ASKED = "Twice?\nYour guess, as a factor? Add guess=... to predict(...) and run it again.\n"


def test_a_prediction_becomes_a_box_that_knows_the_answer() -> None:
    cells = [
        code('print(7)\none = predict("Twice?", unit="x")', f"7\n{ASKED}"),
        code("compare(two, 3)\ncompare(one, 1045)", "The model says 3.\nThe model says 1,045x.\n"),
        code('two = lab.predict("<Twice?>")', ASKED.replace("Twice?", "<Twice?>")),
    ]
    guesses.add_forms(cells)
    assert cells[0]["outputs"][0]["text"] == "7\n", "what else was printed stays"
    first, second = (cell["outputs"][-1]["data"]["text/html"] for cell in (cells[0], cells[2]))
    assert 'data-answer="1045" data-said="1,045x" data-unit="x"' in first
    assert 'data-answer="3" data-said="3" data-unit=""' in second
    assert "&lt;Twice?&gt;" in second
    assert len(cells[2]["outputs"]) == 1
    (key,) = re.findall('<input id="([^"]+)"', second)
    assert f'for="{key}"' in second


def test_a_prediction_without_an_answer_stops_the_build() -> None:
    with pytest.raises(KeyError, match="one"):
        guesses.add_forms([code('one = predict("Twice?", unit="x")', ASKED)])


def test_frames_become_controls_that_work_once_the_script_runs() -> None:
    controls = [
        {"label": "tile", "kind": "slider", "values": ["16", "64"], "all": "16 to 64"},
        {"label": "chip", "kind": "choice", "values": ["A", "<B>"], "all": "A, <B>"},
        {"label": "flip", "kind": "box", "values": ["no", "yes"], "all": "no, yes"},
    ]
    settings = [[0, 0, 0], [1, 1, 1]]
    frames = {"start": 1, "controls": controls, "settings": settings, "frames": "eJw="}
    shown = {
        sliders.FRAMES_MIME: frames,
        "image/svg+xml": ["<svg>", "</svg>"],
        "text/plain": ["explore fig_x: Figure: It shows <this>."],
    }
    cell = {"cell_type": "code", "outputs": [{"data": shown}]}
    sliders.add_explorers([cell])
    html = str(shown["text/html"])
    assert set(shown) == {"text/html", "text/plain"}
    assert re.findall('id="(explore-0-.)"', html) == re.findall('for="([^"]+)"', html)
    assert 'max="1" step="1" value="1" aria-valuetext="64"' in html
    assert '<option value="1" selected>&lt;B&gt;</option>' in html
    assert 'type="checkbox" checked>' in html
    assert "<fieldset disabled>" in html
    assert "It shows &lt;this&gt;." in html

"""Chapter 9: figures draw the address maps, the checks tell right from wrong, the page is right."""

import re

import pytest
from page_checks import assert_apart, printed

from ascend_lab.lab.figures import fig_address_maps, fig_element, fig_padding
from ascend_lab.lab.figures.layouts import matrix_maps
from ascend_lab.lab.figures.style import LabFigure

# -- figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fig", [fig_address_maps(matrix_maps()), fig_element(), fig_padding()])
def test_titles_and_labels_do_not_overlap(fig: LabFigure) -> None:
    shown = [t for ax in fig.axes for t in (*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label)]
    assert_apart(fig, [*shown, *([fig._suptitle] if fig._suptitle else [])])


# -- the page ---------------------------------------------------------------------------------
def test_the_page_shows_what_its_prose_claims() -> None:
    text = printed("09_layouts")
    assert "(8, 2, 7, 16, 16)" in text and "(72, 16, 16, 16)" in text
    assert "right: True\nfindings: []" in text
    lines = re.findall(r"^(\S+) +(\S+) +([\d,]+) +([\d,]+) +\d+%$", text, re.MULTILINE)
    table = {(a, b): (int(x.replace(",", "")), int(c.replace(",", ""))) for a, b, x, c in lines}
    assert len(table) == 8
    copy = table["NCHW", "NCHW"][1]
    for (_, target), (burst, cycles) in table.items():
        size = copy if target.startswith("N") else table["ND", "FRACTAL_NZ"][1]
        slow = cycles / size
        assert slow > 5 if burst < 32 else slow == pytest.approx(1.0, abs=0.05)
    assert re.search(r"^Ascend910B2 +0 +3$", text, re.MULTILINE)  # alone on S, copies that pad
    assert "False" not in text

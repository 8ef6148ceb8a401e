"""Chapter 9: figures draw the address maps, the checks tell right from wrong, the page is right."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ascend_lab.errors import LayoutError
from ascend_lab.lab.checks.chapter08_09 import check_ex_09_2, check_ex_09_3, check_ex_09_4
from ascend_lab.lab.figures import fig_addresses, fig_element, fig_padding
from ascend_lab.lab.figures.layout import FORMATS, matrix_maps, padded_share
from ascend_lab.lab.figures.style import LabFigure
from ascend_lab.layout import address, address_map, addresses, pack, unpack

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "09_layouts.ipynb"


def texts_of(ax) -> list[str]:
    return [t.get_text() for t in ax.texts if t.get_text()]


# -- figures ----------------------------------------------------------------------------------
def test_colours_are_the_addresses() -> None:
    maps = matrix_maps(32, 48, "fp16")
    fig = fig_addresses(maps)
    panels = [ax for ax in fig.axes if ax.images]
    assert len(panels) == len(maps) == len(FORMATS)
    for ax, layout in zip(panels, maps.values(), strict=True):
        assert (ax.images[0].get_array() == addresses(layout)).all()
        assert ax.images[0].get_clim() == (0, 32 * 48 - 1)


@pytest.mark.parametrize(
    ("name", "order"),
    [("zZ", "0 1 2 3 4 5"), ("zN", "0 1 2 3 4 5"), ("nZ", "0 2 4 1 3 5"), ("ND", "")],
)
def test_fractals_are_numbered_in_storage_order(name: str, order: str) -> None:
    fig = fig_addresses({name: matrix_maps()[name]})
    assert texts_of(fig.axes[0]) == order.split()


def test_a_small_matrix_shows_every_address() -> None:
    layout = address_map("ND", (4, 6))
    fig = fig_addresses({"ND": layout})
    assert texts_of(fig.axes[0]) == [str(n) for n in range(24)]
    assert "the end of row 0 has address 5" in fig.alt_text


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp32"])
@pytest.mark.parametrize("place", [(0, 0), (27, 43), (17, 21)])
def test_an_element_is_marked_with_its_address(dtype: str, place: tuple[int, int]) -> None:
    fig = fig_element(*place, dtype)
    for ax, (name, layout) in zip(fig.axes, matrix_maps(28, 44, dtype).items(), strict=True):
        title = f"{name}: address {address(layout, place):,}, {100 * layout.padded_share:.0f} %"
        assert ax.get_title().startswith(title)
        assert title in fig.alt_text
        marked = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines[-1:]]
        assert marked == [(place[1], place[0])]


def test_an_element_outside_is_an_error_with_its_bounds() -> None:
    with pytest.raises(LayoutError, match=r"0\.\.27.*28"):
        fig_element(28, 0)


@pytest.mark.parametrize(("dtype", "c0"), [("fp16", 16), ("int8", 32)])
def test_padding_is_the_formula_of_the_page(dtype: str, c0: int) -> None:
    for channels in range(1, 100):
        assert padded_share(channels, dtype) == pytest.approx(
            1 - channels / (c0 * -(-channels // c0))
        )
    assert "81 % with 3 channels" in fig_padding().alt_text
    assert "91 % with 3 channels" in fig_padding().alt_text


@pytest.mark.parametrize("fig", [fig_addresses(matrix_maps()), fig_element(), fig_padding()])
def test_titles_and_labels_do_not_overlap(fig: LabFigure) -> None:
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [t for ax in fig.axes for t in (*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label)]
    shown += [fig._suptitle] if fig._suptitle else []
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in shown if t.get_text()]
    for index, (text, box) in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= fig.bbox.x1, text
        for other, second in boxes[index + 1 :]:
            assert not box.overlaps(second), f"{text!r} covers {other!r}"


# -- checks -----------------------------------------------------------------------------------
def nz_right(x):
    layout = address_map("FRACTAL_NZ", x.shape, {1: "int8", 2: "fp16", 4: "fp32"}[x.itemsize])
    return pack(layout, x)


def nd_right(stored, shape):
    layout = address_map("FRACTAL_NZ", shape, {1: "int8", 2: "fp16", 4: "fp32"}[stored.itemsize])
    return unpack(layout, stored)


def nz_always_16(x):
    *lead, m, n = x.shape
    m1, n1 = -(-m // 16), -(-n // 16)
    wide = np.zeros((*lead, m1 * 16, n1 * 16), x.dtype)
    wide[..., :m, :n] = x
    return np.moveaxis(wide.reshape(*lead, m1, 16, n1, 16), -2, -4)


def nd_without_crop(stored, shape):
    *lead, n1, m1, m0, c0 = stored.shape
    return np.moveaxis(stored, -4, -2).reshape(*lead, m1 * m0, n1 * c0)


def weight_right(index, shape, c0):
    return address(address_map("FRACTAL_Z", shape, "fp16", c0=c0), index)


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_right_answers_pass(seed: int) -> None:
    assert check_ex_09_2(nz_right, seed=seed)
    assert check_ex_09_3(nd_right, seed=seed)
    assert check_ex_09_4(weight_right, seed=seed)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (check_ex_09_2, nz_always_16),
        (check_ex_09_2, lambda x: nz_right(x).astype(np.float64)),
        (check_ex_09_2, lambda x: nz_right(x).swapaxes(-1, -2)),
        (check_ex_09_2, lambda x: nz_right(x) + x.dtype.type(1)),
        (check_ex_09_2, lambda x: None),
        (check_ex_09_3, nd_without_crop),
        (check_ex_09_3, lambda stored, shape: nd_right(stored, shape).swapaxes(-1, -2)),
        (check_ex_09_3, lambda stored, shape: np.zeros(shape)),
        (check_ex_09_4, lambda index, shape, c0: weight_right(index, shape, 16)),
        (check_ex_09_4, lambda index, shape, c0: weight_right(index, shape, c0) + 1),
        (check_ex_09_4, lambda index, shape, c0: "far"),
    ],
)
@pytest.mark.parametrize("seed", [7, 8])
def test_wrong_answers_are_named(check, wrong, seed: int) -> None:
    result = check(wrong, seed=seed)
    assert not result
    assert "your function returned" in result.message


# -- the page ---------------------------------------------------------------------------------
def printed() -> str:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    return "\n".join("".join(o.get("text", "")) for o in outputs)


def test_the_page_shows_what_its_prose_claims() -> None:
    text = printed()
    assert "(8, 2, 7, 16, 16)" in text and "(72, 16, 16, 16)" in text
    assert "findings: []  right: True" in text
    lines = re.findall(r"(\S+) +-> (\S+) +burst +([\d,]+) bytes, +([\d,]+) cycles", text)
    table = {(a, b): (int(x.replace(",", "")), int(c.replace(",", ""))) for a, b, x, c in lines}
    assert len(table) == 8
    copy = table["NCHW", "NCHW"][1]
    for (_, target), (burst, cycles) in table.items():
        size = copy if target.startswith("N") else table["ND", "FRACTAL_NZ"][1]
        slow = cycles / size
        assert slow > 5 if burst < 32 else slow == pytest.approx(1.0, abs=0.05)
    assert "Ascend910B2: 0 elements one by one" in text
    assert "False" not in text

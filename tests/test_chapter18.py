"""The checks and figures of chapter 18, and what its prose claims."""

import json
from pathlib import Path

import numpy as np
import pytest

from ascend_lab.lab.checks import (
    check_ex_18_1,
    check_ex_18_2,
    check_ex_18_3,
    check_ex_18_4,
    check_ex_18_5,
)
from ascend_lab.lab.checks.chapter18 import best_cost, colour, four_taps, nv12_pixel, placed_cost
from ascend_lab.lab.figures import fig_cards
from ascend_lab.lab.figures.media import camera_frame, errors, scene
from ascend_lab.media import Station, csc_of

SEEDS = range(3)


def sums(pixel, rows, bias):
    return [sum(m * (p - b) for m, p, b in zip(row, pixel, bias, strict=True)) for row in rows]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, r, b: [min(max(int(s / 256), 0), 255) for s in sums(p, r, (0, 128, 128))],
        lambda p, r, b: [min(max(round(s / 256), 0), 255) for s in sums(p, r, b)],
        lambda p, r, b: [s >> 8 for s in sums(p, r, b)],
        lambda p, r, b: [(s >> 8) % 256 for s in sums(p, r, b)],
        lambda p, r, b: colour(p, r[::-1], b),
        lambda p, r, b: [
            min(max((s >> 8) - x, 0), 255) for s, x in zip(sums(p, r, (0,) * 3), b, strict=True)
        ],
    ],
)
def test_a_pixel_two_sided(wrong):
    for seed in SEEDS:
        assert check_ex_18_1(colour, seed=seed).passed
        assert not check_ex_18_1(wrong, seed=seed).passed


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f, w, h, x, y: f[y * w + x : y * w + x + 3],
        lambda f, w, h, x, y: [(p := nv12_pixel(f, w, h, x, y))[0], p[2], p[1]],  # NV21
        lambda f, w, h, x, y: [f[y * w + x], *(  # planes of their own: I420
            f[w * h + i * w * h // 4 + y // 2 * (w // 2) + x // 2] for i in (0, 1))],
        lambda f, w, h, x, y: [f[y * w + x], *f[w * h + y // 2 * w + x // 2 :][:2]],
        lambda f, w, h, x, y: nv12_pixel(f, h, w, x, y),
    ],
)  # fmt: skip
def test_a_pixel_of_a_frame_two_sided(wrong):
    for seed in SEEDS:
        assert check_ex_18_2(nv12_pixel, seed=seed).passed
        assert not check_ex_18_2(wrong, seed=seed).passed


def cards(stations, rate):
    return int(max(np.ceil(rate * t / s) for s, t in stations))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stations, rate: int(np.ceil(sum(rate * t / s for s, t in stations))),
        lambda stations, rate: int(max(rate * t // s for s, t in stations)),
        lambda stations, rate: int(max(np.ceil(rate * t) for s, t in stations)),
        lambda stations, rate: int(np.ceil(np.mean([rate * t / s for s, t in stations]))),
    ],
)
def test_cards_two_sided(wrong):
    for seed in SEEDS:
        assert check_ex_18_3(cards, seed=seed).passed
        assert not check_ex_18_3(wrong, seed=seed).passed


def wide(weights):
    k, c, r, s = weights.shape
    q = -(-s // 4)
    return np.pad(weights, ((0, 0), (0, 4 - c), (0, 0), (0, 4 * q - s))).reshape(k, 4, r, q, 4), q


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: wide(w)[0].transpose(0, 1, 4, 2, 3).reshape(len(w), 16, w.shape[2], -1),
        lambda w: four_taps(w)[:, :, :, ::-1] if w.shape[3] > 4 else four_taps(w) + 1,
        lambda w: four_taps(w[:, :, :, : w.shape[3] // 4 * 4]),
        lambda w: four_taps(w).astype(np.float64).reshape(len(w), 16, -1),
    ],
)
def test_four_taps_two_sided(wrong):
    for seed in SEEDS:
        assert check_ex_18_4(four_taps, seed=seed).passed
        assert not check_ex_18_4(wrong, seed=seed).passed


def descended(times, edges):
    """Return a local optimum: no single operator can be moved with profit."""
    places = [0 if a <= b else 1 for a, b in times]
    better = True
    while better:
        better = False
        for i in range(len(places)):
            moved = [*places[:i], 1 - places[i], *places[i + 1 :]]
            if placed_cost(times, edges, moved) < placed_cost(times, edges, places) - 1e-12:
                places, better = moved, True
    return places


@pytest.mark.parametrize(
    "wrong",
    [
        lambda times, edges: [0 if a <= b else 1 for a, b in times],
        lambda times, edges: [0] * len(times),
        lambda times, edges: [1] * len(times),
        lambda times, edges: (
            [int(sum(a for a, _ in times) > sum(b for _, b in times))] * len(times)
        ),
        descended,
    ],
)
def test_placement_two_sided(wrong):
    solution = next(
        "".join(cell["source"])
        for cell in json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
        if cell["metadata"].get("exercise") == "ex_18_5"
        and "exercise-solution" in cell["metadata"]["tags"]
    ).partition("checks.")[0]  # fmt: skip
    space: dict = {"np": np}
    exec(solution, space)
    for seed in SEEDS:
        assert check_ex_18_5(space["place"], seed=seed).passed
    assert not all(check_ex_18_5(wrong, seed=seed).passed for seed in SEEDS)


CHAPTER = Path(__file__).resolve().parent.parent / "notebooks" / "18_media_placement_runtime.ipynb"


def test_four_taps_a_step_give_the_same_sum():
    rng = np.random.default_rng(4)
    image, weights = rng.standard_normal((1, 3, 5, 9)), rng.standard_normal((2, 3, 1, 5))
    taps = four_taps(weights)
    # lane 4d + c of a pixel is channel c of the pixel d to the right
    ahead = [np.pad(image[..., d : d + 9], ((0, 0), (0, 1), (0, 0), (0, d))) for d in range(4)]
    lanes = np.concatenate(ahead, axis=1)
    plain = sum(weights[0, :, 0, t] @ image[0, :, 2, t] for t in range(5))
    packed = sum(taps[0, :, 0, q] @ lanes[0, :, 2, 4 * q] for q in range(2))
    assert np.isclose(plain, packed)
    assert best_cost([(1.0, 3.0), (4.0, 1.0)], [(0, 1, 9.0)]) == 4.0


def test_the_camera_sends_the_scene():
    frame = camera_frame()
    assert frame.size == 96 * 64 * 3 // 2 and scene().shape == (3, 64, 96)
    off = errors()
    near, *wrong = off.values()
    assert near < 5 and min(wrong) > 2 * near and off["U and V swapped"] > 50
    assert csc_of("601 narrow", "RGB").matrix[0] == (298, 0, 409)


def test_the_figure_of_cards_names_the_slowest():
    stations = [Station("decode", 2, 0.01), Station("network", 1, 0.002)]
    figure = fig_cards(stations, 1000.0, 500)
    assert "decode 5, network 2" in figure.alt_text and len(figure.axes) == 2

"""Checks of chapters 17 and 18.

17: scale and offset, a layer of whole numbers, where to cut a range, the slope of a step, a choice
of formats within a budget.
18: a colour conversion, a pixel of an NV12 frame, cards for a rate, weights of a first layer, cards
for a limit of latency.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "of 14 bytes, but 10 are enough".
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.deploy.compress.learned_rounding import lsq_slopes
from ascend_lab.deploy.media import STANDARDS, csc_of
from ascend_lab.lab.checks import core as ex

# -- chapter 17 ------------------------------------------------------------------------------------
Options = Sequence[Sequence[tuple[int, int]]]
"""For each layer what it can be: (bytes, harm)."""


def scale_and_offset(low: float, high: float, bits: int) -> tuple[float, int]:
    """Return scale and offset of whole numbers that stand for low to high, and exactly for 0."""
    low = min(low, 0.0)
    high = max(high, 0.0)
    if low == high:
        return 1.0, -(2 ** (bits - 1))
    scale = (high - low) / (2**bits - 1)
    return scale, -(2 ** (bits - 1)) - round(low / scale)


@ex.against(
    scale_and_offset,
    edges=[
        (0.0, 2.55, 8),
        (-1.0, 3.0, 8),
        (0.5, 6.0, 8),
        (-7.0, -2.0, 4),
        (0.0, 0.0, 8),
        (0.0, 0.0, 3),  # the least whole number is not -128
        # the step is 1, and round(-0.5) = 0, round(-1.5) = -2
        (-0.5, 6.5, 3),
        (-1.5, 5.5, 3),
    ],
    rel_tol=1e-9,
)
def check_ex_17_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(low, high, bits)`: (scale, offset) of a range, 0 taken in; (1, least) for zeros."""
    low, high = sorted(float(x) for x in rng.normal(0, 5, 2))
    return {"low": low, "high": high, "bits": int(rng.integers(2, 13))}


def integer_layer(
    q: np.ndarray, offset: int, w: np.ndarray, bias: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Return ((q - offset) w + bias) scale, summed over whole numbers."""
    sums = q.astype(np.int64) @ w.astype(np.int64) - offset * w.astype(np.int64).sum(axis=0)
    return np.asarray((sums + bias) * scale)


_DEEP = {
    "q": np.full((1, 2047), 127, np.int8),
    "offset": -128,
    "w": np.full((2047, 1), 127, np.int8),
    "bias": np.zeros(1, np.int32),
    "scale": np.ones(1),
}
"""Sums of odd numbers above 2**24, such as 127 * 127 * 2047, that no float of 32 bits holds."""


@ex.against(integer_layer, edges=[_DEEP], rel_tol=1e-9, cases=25)
def check_ex_17_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(q, offset, w, bias, scale)`: the floats a product of bytes stands for."""
    rows, inner, columns = (int(n) for n in rng.integers(1, 40, 3))
    return {
        "q": rng.integers(-128, 128, (rows, inner)).astype(np.int8),
        "offset": int(rng.integers(-128, 128)),
        "w": rng.integers(-127, 128, (inner, columns)).astype(np.int8),
        "bias": rng.integers(-5000, 5000, columns).astype(np.int32),
        "scale": rng.uniform(1e-4, 1e-2, columns),
    }


def squared_error(values: Sequence[float], end: float, bits: int) -> float:
    """Return the mean squared error of symmetric rounding with `end` the largest number kept."""
    x = np.asarray(values, float)
    step = end / (2 ** (bits - 1) - 1)
    return float(np.mean((np.rint(np.clip(x, -end, end) / step) * step - x) ** 2))


def _judge_cut(got: Any, case: ex.Case) -> str | None:
    """Judge the largest number kept by the error that rounding then makes."""
    values = case["values"]
    bits = case["bits"]
    most = float(np.max(np.abs(values)))
    try:
        end = float(got)
    except (TypeError, ValueError):
        return "expected one number, the largest to keep"
    if not 0 < end <= most * (1 + 1e-9):
        return f"expected a number above 0, at most {most:.6g}"
    best = min(squared_error(values, share / 100 * most, bits) for share in range(1, 101))
    error = squared_error(values, end, bits)
    return None if error <= best * (1 + 1e-9) else f"whose error is {error:.6g}, not {best:.6g}"


# beside one large number, a hundred small ones: the best end is about a third of the largest
_FAR_OUT = {"values": [1.0, -1.0] * 50 + [10.0], "bits": 3}


@ex.judged(_judge_cut, edges=[_FAR_OUT], cases=12)
def check_ex_17_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(values, bits)`: where to cut, at least as good as all hundredths of the largest."""
    values = rng.normal(size=int(rng.integers(50, 400))) * rng.choice([1, 1, 1, 6])
    values[: int(rng.integers(1, 4))] *= float(rng.uniform(1, 12))
    return {"values": [float(v) for v in values], "bits": int(rng.integers(3, 9))}


def step_slope(x: Sequence[float], s: float, g: Sequence[float], bits: int) -> float:
    """Return the slope of the loss with respect to the step, before any division."""
    values = np.asarray(x, float)
    slopes = np.asarray(g, float)
    scaled_slope = lsq_slopes(values, np.array(s), slopes, bits)[1]
    # LSQ divides the slope by the root of the count times the largest whole number.
    return float(scaled_slope * np.sqrt(len(values) * (2 ** (bits - 1) - 1)))


@ex.against(
    step_slope,
    edges=[
        ([-3.0, -1.2, 0.35, 5.0], 0.5, [1.0, 1.0, 1.0, 1.0], 3),
        ([-2.0, 1.5], 0.5, [1.0, 2.0], 3),
        ([0.25, 0.75], 0.5, [1.0, 3.0], 4),  # ties: 0.5 goes to 0, and 1.5 to 2
    ],
    rel_tol=1e-9,
)
def check_ex_17_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(x, s, g, bits)`: d loss / d step of symmetric rounding, straight through."""
    count = int(rng.integers(1, 30))
    x = rng.normal(0, 2, count).tolist()
    s = float(rng.uniform(0.05, 0.8))
    return {"x": x, "s": s, "g": rng.normal(size=count).tolist(), "bits": int(rng.integers(2, 6))}


def fewest_bytes(options: Options, budget: int) -> int | None:
    """Return the fewest bytes with harm within the budget, by trying everything."""
    sums = (map(sum, zip(*pick, strict=True)) for pick in itertools.product(*options))
    return min((size for size, harm in sums if harm <= budget), default=None)


def _judge_choice(got: Any, case: ex.Case) -> str | None:
    """Judge an option for each layer: harm within the budget, and the fewest bytes."""
    options = case["options"]
    budget = case["budget"]
    best = case["best"]
    if got is None:
        return None if best is None else f"expected a choice of {best} bytes"
    try:
        picked = [options[i][int(place)] for i, place in enumerate(got)]
    except (TypeError, ValueError, IndexError):
        return "expected the place of one option for each layer"
    if len(picked) != len(options) or any(int(place) < 0 for place in got):
        return f"expected {len(options)} places, counted from 0"
    size, harm = (sum(column) for column in zip(*picked, strict=True))
    if best is None or harm > budget:
        return f"whose harm of {harm} is above {budget}"
    return None if size <= best else f"of {size} bytes, but {best} are enough"


@ex.judged(
    _judge_choice,
    edges=[
        ([[(8, 0), (4, 3)], [(8, 0), (2, 3)]], 3, 10),
        # saving most for each harm takes the second layer first, and then nothing else fits
        ([[(10, 0), (4, 5)], [(10, 0), (6, 3)]], 5, 14),
        ([[(8, 2), (4, 3)]], 1, None),
        ([[(2 + i, 12 - i) for i in range(12)]] * 20, 120, 160),
    ],
    cases=30,
    wrap=lambda fn: lambda options, budget, best: fn(options, budget),
)
def check_ex_17_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(options, budget)`: the places of options with fewest bytes, or None."""
    layers = int(rng.integers(2, 6))
    if rng.random() < 0.5:  # savings nearly in proportion to harms: what fits decides
        harms = [int(harm) for harm in rng.integers(3, 20, layers)]
        options = [[(100, 0), (100 - 4 * harm - int(rng.integers(4)), harm)] for harm in harms]
        budget = int(rng.integers(max(harms), sum(harms) + 1))
    else:
        drawn_from = {"size": range(1, 60), "harm": range(25)}
        counts = [int(count) for count in rng.integers(1, 5, layers)]
        options = [
            [tuple(ex.drawn(rng, **drawn_from).values()) for _ in range(count)] for count in counts
        ]
        budget = int(rng.integers(0, 16 * layers))
    return {"options": options, "budget": budget, "best": fewest_bytes(options, budget)}


# -- chapter 18 ------------------------------------------------------------------------------------
Values = np.ndarray
Stations = Sequence[tuple[int, float]]
"""(servers, seconds of a server for a picture), in the order in which a picture passes them."""


def colour(pixel: Sequence[int], rows: Sequence[Sequence[int]], bias: Sequence[int]) -> list[int]:
    """Return a pixel in another colour space: floor shift by 8, limited to 0..255."""
    centred = [p - b for p, b in zip(pixel, bias, strict=True)]
    sums = (sum(m * c for m, c in zip(row, centred, strict=True)) for row in rows)
    return [min(max(s >> 8, 0), 255) for s in sums]


def nv12_pixel(frame: Sequence[int], width: int, height: int, x: int, y: int) -> list[int]:
    """Return Y, U and V of a pixel of a flat NV12 frame."""
    # After all Y there are rows of U, V, U, V ...: one pair for each 2 x 2 pixels.
    uv_index = width * height + y // 2 * width + x // 2 * 2
    return [frame[y * width + x], frame[uv_index], frame[uv_index + 1]]


def cards(stations: Stations, rate: float) -> int:
    """Return the cards for a rate: the most that any station (servers, seconds) asks for."""
    return max(math.ceil(rate * seconds / servers) for servers, seconds in stations)


def four_taps(weights: Values) -> Values:
    """Return weights (k, c, r, s) as (k, 16, r, ceil(s / 4)): lane 4 d + c is column 4 q + d."""
    k, c, rows, columns = weights.shape
    quads = -(-columns // 4)
    folded = np.zeros((k, 16, rows, quads), weights.dtype)
    for q, d in itertools.product(range(quads), range(4)):
        if 4 * q + d < columns:
            folded[:, 4 * d : 4 * d + c, :, q] = weights[:, :, :, 4 * q + d]
    return folded


_NARROW = csc_of("601 narrow", "RGB")


@ex.against(
    colour,
    edges=[
        (pixel, _NARROW.matrix, _NARROW.in_bias)
        for pixel in ((81, 90, 240), (16, 128, 127), (255, 255, 255))
    ],
)
def check_ex_18_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(pixel, rows, bias)`: the pixel behind AIPP's colour conversion."""
    csc = csc_of(STANDARDS[int(rng.integers(len(STANDARDS)))], "RGB")
    pixel = tuple(int(v) for v in rng.integers(0, 256, 3))
    return {"pixel": pixel, "rows": csc.matrix, "bias": csc.in_bias}


@ex.against(nv12_pixel)
def check_ex_18_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(frame, width, height, x, y)`: Y, U, V of a pixel of a flat NV12 frame."""
    width, height = (2 * int(n) for n in rng.integers(1, 5, 2))
    frame = rng.integers(0, 256, width * height * 3 // 2).tolist()
    place = ex.drawn(rng, x=range(width), y=range(height))
    return {"frame": frame, "width": width, "height": height, **place}


@ex.against(cards, edges=[([(2, 1 / 128), (1, 0.001)], 3000.0), ([(1, 0.5), (4, 1.0)], 4.0)])
def check_ex_18_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(stations, rate)`: cards, where a station is (servers, seconds a picture)."""
    count = int(rng.integers(1, 5))
    stations = [(int(rng.integers(1, 5)), float(rng.uniform(1e-4, 0.02))) for _ in range(count)]
    return {"stations": stations, "rate": float(rng.uniform(50, 4000))}


@ex.against(four_taps, cases=20)
def check_ex_18_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(weights)`: (k, c, r, s) as (k, 16, r, ceil(s / 4)), zeros where nothing is."""
    sizes = [int(rng.integers(1, most)) for most in (4, 5, 4, 10)]
    return {"weights": rng.standard_normal(sizes).astype(np.float32)}


def latencies(arrivals: Sequence[float], stations: Stations) -> list[float]:
    """Return how long each picture takes through the stations of one card, first come first."""
    times = list(arrivals)
    for servers, seconds in stations:
        ends = list[float]()
        for picture, came in enumerate(times):
            # the server that this picture gets served the one `servers` pictures before
            free_at = ends[picture - servers] if picture >= servers else 0.0
            ends.append(max(came, free_at) + seconds)
        times = ends
    return [end - came for came, end in zip(arrivals, times, strict=True)]


def cards_in_time(arrivals: Sequence[float], stations: Stations, limit_s: float) -> int:
    """Return the fewest cards with which at most one picture in a hundred takes too long."""
    for count in itertools.count(1):
        late = 0
        for card in range(count):
            late += sum(took > limit_s for took in latencies(arrivals[card::count], stations))
        if late <= len(arrivals) // 100:
            return count
    raise AssertionError("one card for each picture is enough")


@ex.against(
    cards_in_time,
    edges=[
        ([0.0, 0.0, 0.0, 0.0], [(1, 1.0)], 1.5),
        ([0.0, 0.0, 0.0, 0.0], [(2, 1.0), (1, 0.25)], 1.5),
        # twice two pictures at one moment
        ([0.0, 4.0, 4.0, 8.0, 12.0, 12.0], [(1, 3.0)], 3.5),
        # 2 of 200 pictures may be late
        ([*range(200), 200.0, 200.0, 200.0], [(1, 0.75)], 1.0),
        # the first station holds pictures back, so that they come to the second one by one
        ([0.0] * 6, [(1, 0.5), (1, 0.5)], 2.0),
        # the first station lets four through at once, so that they wait at the faster one
        ([0.0] * 4, [(4, 1.0), (1, 0.2)], 1.5),
        # of 4 pictures none may be late, not even by a hundredth
        ([0.0, 10.0, 20.0, 20.0], [(1, 1.0)], 1.99),
    ],
    cases=20,
)
def check_ex_18_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(arrivals, stations, limit_s)`: cards, so that 99 % are through in time."""
    count = int(rng.integers(1, 4))
    stations = [(int(rng.integers(1, 4)), float(rng.uniform(0.002, 0.02))) for _ in range(count)]
    alone_s = sum(seconds for _, seconds in stations)
    gaps = rng.exponential(float(rng.uniform(0.001, 0.01)), int(rng.integers(20, 300)))
    return {
        "arrivals": [float(came) for came in np.cumsum(gaps)],
        "stations": stations,
        "limit_s": alone_s * float(rng.uniform(1.1, 4)),
    }

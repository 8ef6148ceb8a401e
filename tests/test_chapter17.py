"""The checks and figures of chapter 17, from both sides."""

import numpy as np
import pytest
from two_sided import two_sided

from ascend_lab.compress import calibrate, scale_between
from ascend_lab.errors import InputError
from ascend_lab.lab.checks import (
    check_ex_17_1,
    check_ex_17_2,
    check_ex_17_3,
    check_ex_17_4,
    check_ex_17_5,
)
from ascend_lab.lab.checks.chapter17 import (
    fewest_bytes,
    integer_layer,
    scale_and_offset,
    squared_error,
)
from ascend_lab.lab.figures import fig_bits, fig_clipping


def shifted(low, high, bits):
    scale, offset = scale_and_offset(low, high, bits)
    return scale, offset + 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda low, high, bits: ((high - low) / (2**bits - 1), 0),
        lambda low, high, bits: (scale_and_offset(low, high, bits)[0] * (1 - 2**-bits), 0),
        lambda low, high, bits: (
            (high - low) / (2**bits - 1),
            -(2 ** (bits - 1)) - round(low / ((high - low) / (2**bits - 1))) if high > low else 0,
        ),
        shifted,
        lambda low, high, bits: (
            scale_and_offset(low, high, bits)[0], -scale_and_offset(low, high, bits)[1]
        ),
    ],
)  # fmt: skip
def test_scale_and_offset_two_sided(wrong):
    two_sided(check_ex_17_1, scale_and_offset, wrong)


def test_the_reference_is_the_packages():
    for low, high in ((-1.0, 3.0), (0.25, 5.0), (-7.0, -2.0)):
        found = scale_between(low, high, 8, True)
        assert scale_and_offset(low, high, 8) == (pytest.approx(found.scale), found.offset)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, offset, w, bias, scale: (q @ w - offset * w.sum(axis=0) + bias) * scale,
        lambda q, offset, w, bias, scale: (q.astype(int) @ w.astype(int) + bias) * scale,
        lambda q, offset, w, bias, scale: integer_layer(q, offset, w, 0 * bias, scale),
        lambda q, offset, w, bias, scale: integer_layer(q, -offset, w, bias, scale),
        lambda q, offset, w, bias, scale: (
            (q.astype(int) @ w.astype(int) - offset * w.astype(int).sum()) + bias) * scale,
    ],
)  # fmt: skip
def test_integer_layer_two_sided(wrong):
    two_sided(check_ex_17_2, integer_layer, wrong)


def best_cut(values, bits):
    most = max(map(abs, values))
    return min(
        (most * i / 100 for i in range(1, 101)), key=lambda end: squared_error(values, end, bits)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values, bits: max(map(abs, values)),
        lambda values, bits: 0.7 * max(map(abs, values)),
        lambda values, bits: float(np.quantile(np.abs(values), 0.95)),
        lambda values, bits: best_cut(values, 8 if bits < 6 else 3),
        lambda values, bits: None,
    ],
)
def test_cutting_two_sided(wrong):
    two_sided(check_ex_17_3, best_cut, wrong)


def slope(x, s, g, bits, low=None, inner=True, minus=True):
    most = 2 ** (bits - 1) - 1
    least = -most - 1 if low is None else low
    total = 0.0
    for value, grad in zip(x, g, strict=True):
        v = value / s
        if v <= least:
            total += grad * least
        elif v >= most:
            total += grad * most
        elif inner:
            total += grad * (np.rint(v) - (v if minus else 0))
    return total


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, s, g, bits: slope(x, s, g, bits, inner=False),
        lambda x, s, g, bits: slope(x, s, g, bits, minus=False),
        lambda x, s, g, bits: -slope(x, s, g, bits),
        lambda x, s, g, bits: slope(x, s, g, bits + 1),
        lambda x, s, g, bits: 0.0,
    ],
)
def test_slope_two_sided(wrong):
    two_sided(check_ex_17_4, slope, wrong)


def chosen(options, budget):
    kept = {0: (0, [])}
    for layer in options:
        new = {}
        for harm, (size, picked) in kept.items():
            for place, (more, worse) in enumerate(layer):
                total = harm + worse
                if total <= budget and (total not in new or size + more < new[total][0]):
                    new[total] = size + more, [*picked, place]
        kept = new
    return min(kept.values())[1] if kept else None


def greedy(options, budget):
    picked, harm = [], 0
    for layer in options:
        fits = [i for i, (_, worse) in enumerate(layer) if harm + worse <= budget]
        if not fits:
            return None
        picked.append(min(fits, key=lambda i: layer[i][0]))
        harm += layer[picked[-1]][1]
    return picked


@pytest.mark.parametrize(
    "wrong",
    [
        greedy,
        lambda options, budget: [min(range(len(o)), key=lambda i: o[i][1]) for o in options],
        lambda options, budget: [min(range(len(o)), key=lambda i: o[i][0]) for o in options],
        lambda options, budget: None,
        lambda options, budget: [0 for _ in options],
    ],
)
def test_bits_two_sided(wrong):
    two_sided(check_ex_17_5, chosen, wrong)
    assert fewest_bytes([[(8, 0), (4, 3)], [(8, 0), (2, 3)]], 3) == 10


def test_figures_say_what_they_show():
    values = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    values[0] = 9
    fig = fig_clipping(values, bits=4)
    assert f"kl at {calibrate(values, 'kl', bits=4).scale * 7:.2f}" in repr(fig)
    ax = fig.axes[1]
    ends, errors = ax.lines[0].get_data()
    dots = [line for line in ax.lines if line.get_marker() not in ("None", None)]
    assert len(dots) == 4
    for dot in dots:
        x, y = (float(v[0]) for v in dot.get_data())
        assert y == pytest.approx(float(np.interp(x, ends, errors)), rel=0.2)
    with pytest.raises(InputError):
        fig_clipping(np.zeros(4, np.float32))
    rows = {"per tensor": {3: 0.4, 8: 0.9}, "per channel": {3: 0.5, 8: 0.91}}
    fig = fig_bits(rows, 0.92)
    assert "per tensor: 40.0% at 3, 90.0% at 8" in repr(fig)
    with pytest.raises(InputError):
        fig_bits({}, 0.9)

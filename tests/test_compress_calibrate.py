"""Calibrators: golden values of the original tools, ONNX Runtime's own, edges, properties."""

from dataclasses import replace

import numpy as np
import pytest
from command_lines import refused, run, run_json
from hypothesis import given, strategies as st
from onnxruntime.quantization.calibrate import HistogramCollector
from onnxruntime.quantization.quant_utils import QuantType, compute_scale_zp

from ascend_lab.deploy.compress import (
    METHODS,
    calibrate,
    calibrators as rules,
    channel_scales,
    scale_between,
)
from ascend_lab.deploy.compress.scales import broadcast_along, fake_quantise, quantise
from ascend_lab.errors import InputError

U = (np.arange(4096) + 0.5) / 4096
LOGISTIC = np.log(U / (1 - U)).astype(np.float32)
RELU = np.maximum(np.log(U / (1 - U)) + 1, 0).astype(np.float32)
# AMCT's own code (github hicann/amct) run on these inputs in fp32
GOLDEN = [
    ("minmax", False, LOGISTIC, 0.0709511116, 0),
    ("minmax", True, LOGISTIC, 0.0706728697, 0),
    ("ifmr", False, LOGISTIC, 0.0702416003, 0),
    ("ifmr", True, LOGISTIC, 0.0703195035, 0),
    ("hfmg", False, LOGISTIC, 0.0703968033, 0),
    ("hfmg", True, LOGISTIC, 0.0706556141, 0),
    ("kl", False, LOGISTIC, 0.0701218173, 0),
    ("minmax", False, RELU, 0.0788251236, 0),
    ("minmax", True, RELU, 0.0392580032, -128),
    ("ifmr", False, RELU, 0.0772486255, 0),
    ("ifmr", True, RELU, 0.0392580032, -128),
]


@pytest.mark.parametrize(("method", "asymmetric", "values", "scale", "offset"), GOLDEN)
def test_a_calibrator_chooses_what_the_original_does(method, asymmetric, values, scale, offset):
    found = calibrate(values, method, asymmetric=asymmetric)
    assert found.scale == pytest.approx(scale, abs=2e-8)
    assert found.offset == offset


@pytest.mark.parametrize(
    ("values", "bins", "levels", "low", "high"),
    [
        (LOGISTIC, 2048, 128, -5.640544, 5.649343),
        (LOGISTIC, 8001, 255, -4.307746, 4.307746),
        (RELU, 2048, 128, 0.0, 6.266521),
    ],
)
def test_entropy_is_the_one_of_onnx_runtime(values, bins, levels, low, high):
    found = rules.entropy_range(values, bins, levels)
    assert found == pytest.approx((low, high), abs=2e-6)
    if bins == 2048:
        own = HistogramCollector("entropy", False, bins, levels, 99.999, 1)
        own.collect_value({"x": values})
        assert found == tuple(map(float, own.compute_entropy()["x"][:2]))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("percent", [99.9, 99.999, 50.0])
def test_percentiles_are_those_of_onnx_runtime(percent, absolute):
    own = HistogramCollector("percentile", absolute, 2048, 128, percent, 1)
    (own.collect_absolute_value if absolute else own.collect_value)({"x": LOGISTIC})
    wanted = tuple(map(float, own.compute_percentile()["x"][:2]))
    found = rules.percentile_range(LOGISTIC, percent, absolute=absolute)
    assert found == pytest.approx(wanted, rel=1e-6)
    if (percent, absolute) == (99.9, False):
        assert wanted == pytest.approx((-7.409264, 7.400464), abs=2e-6)


def test_scales_of_ranges_are_those_of_onnx_runtime():
    for low, high in ((-1.0, 3.0), (0.5, 6.0), (-7.0, -2.0)):
        rounds = np.float32(low), np.float32(high), np.int8(-128), np.int8(127)
        zero, scale = compute_scale_zp(*map(np.asarray, rounds))
        found = scale_between(low, high, 8, True)
        assert (found.scale, found.offset) == (pytest.approx(float(scale)), int(zero))
    assert QuantType.QInt8.value == 0


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (-2.0, 1.0), (-1.0, 2.0), (0.0, 3.0), (-3.0, 0.0)])
def test_symmetric_scales_hold_both_ends_and_are_the_finest_that_do(ends):
    found = scale_between(*ends, 4)
    values = np.array(ends, np.float32)
    np.testing.assert_allclose(found.fake_quantise(values), values, atol=found.scale / 2)
    largest = values[np.argmax(np.abs(values))]
    finer = replace(found, scale=found.scale * 0.99)
    assert (
        found.fake_quantise(largest)
        == pytest.approx(largest)
        != pytest.approx(finer.fake_quantise(largest))
    )


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        (np.floor(1e6 * np.exp(-np.arange(2048) / 100)), 1109),
        (np.floor(1e6 * np.exp(-((np.arange(2048) / 300) ** 2) / 2)), 1434),
    ],
    ids=["exponential", "normal"],
)
def test_divergence_cuts_where_the_model_optimizer_does(counts, wanted):
    assert rules.tensorrt_threshold(counts) == wanted


def test_weights_get_a_scale_per_channel():
    weights = np.sin(np.arange(1, 73)).reshape(8, 9) * np.linspace(0.1, 2, 8)[:, None]
    weights = weights.astype(np.float32)
    wanted = (
        0.000779022, 0.002901757, 0.004841048, 0.007198466, 0.008998314, 0.011320136,
        0.013501158, 0.014977238,
    )  # fmt: skip
    each = channel_scales(weights, 0)
    assert each == pytest.approx(wanted, abs=1e-8)
    one = channel_scales(weights, None)
    assert one == pytest.approx((0.0149772381,), abs=1e-9)
    assert quantise(weights[0], one[0]).tolist() == [6, 6, 1, -5, -6, -2, 4, 7, 3]
    close, far = (
        np.abs(fake_quantise(weights, broadcast_along(s, 0, 2)) - weights).sum()
        for s in (each, one)
    )
    assert close < far / 1.5


# -- edges ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", sorted(METHODS))
def test_zeros_constants_and_tiny_numbers_have_a_scale(method):
    ways = (False,) if method == "kl" else (False, True)
    for asymmetric in ways:
        nothing = calibrate(np.zeros(5), method, asymmetric=asymmetric)
        assert (nothing.scale, nothing.offset) == (1.0, -128 if asymmetric else 0)
        tiny = calibrate(np.full(9, 1e-9), method, asymmetric=asymmetric)
        assert tiny.scale == 1.0
        five = calibrate(np.full(9, 5.0), method, asymmetric=asymmetric)
        assert (
            np.abs(five.fake_quantise(np.full(1, 5.0, np.float32)) - 5).item() <= five.scale * 1.001
        )
        below = calibrate(-np.arange(1.0, 300.0), method, asymmetric=asymmetric)
        assert below.offset == (127 if asymmetric else 0)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize(
    "values", [[], [np.nan], [1.0, np.inf], [1e39], [-1e19], ["a"], [1j], [[]], [None]], ids=str
)
def test_what_is_no_finite_number_is_refused(method, values):
    with pytest.raises(InputError, match="numbers"):
        calibrate(np.array(values), method)


def test_other_refusals_name_what_is_wrong():
    for arguments, words in (
        (("mean",), "method among"),
        (("kl", 8, True), "symmetric"),
        (("ifmr", 1), "bits from 2 to 16"),
        (("ifmr", 17), "bits from 2 to 16"),
    ):
        method, bits, asymmetric = (*arguments, *(8, False)[len(arguments) - 1 :])[:3]
        with pytest.raises(InputError, match=words):
            calibrate([np.ones(3)], method, bits=bits, asymmetric=asymmetric)
    with pytest.raises(InputError, match="at least one batch"):
        calibrate([], "ifmr")


# -- properties -----------------------------------------------------------------------------------
NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60)


@given(NUMBERS, st.booleans(), st.sampled_from([4, 8]))
def test_values_inside_a_range_come_back_to_half_a_step(numbers, asymmetric, bits):
    values = np.array(numbers, np.float32)
    found = calibrate(values, "minmax", bits=bits, asymmetric=asymmetric)
    whole = found.quantise(values)
    assert np.all(whole == np.rint(whole))
    # Where the largest number is negative, a positive one may be cut, by less than a step.
    held = values if asymmetric else np.minimum(values, found.scale * (2 ** (bits - 1) - 1))
    assert np.all(values - held <= found.scale * 1.001)
    assert np.all(
        abs(found.fake_quantise(values) - held) <= found.scale * (1.0 if asymmetric else 0.501)
    )
    assert np.array_equal(
        found.fake_quantise(found.fake_quantise(values)), found.fake_quantise(values)
    )
    assert found.fake_quantise(np.zeros(1, np.float32)) == 0.0, "zero stays exact"


@given(NUMBERS, st.integers(1, 5))
def test_all_rules_but_hfmg_see_one_tensor_however_it_is_cut(numbers, parts):
    values = np.array(numbers, np.float32)
    batches = [part for part in np.array_split(values, parts) if part.size]
    for method in ("minmax", "ifmr", "kl", "percentile"):
        assert calibrate(batches, method) == calibrate(values, method)


def test_hfmg_merges_histograms_and_depends_on_the_batches():
    rng = np.random.default_rng(7)
    one, two = (rng.normal(0, size, 5000).astype(np.float32) for size in (1, 2.5))
    merged, whole, twice = (
        calibrate(values, "hfmg", bits=4, asymmetric=True)
        for values in ([one, two], np.append(one, two), [two, two])
    )
    ends = tuple((float(v.min()), float(v.max())) for v in (one, two))
    before = rules.histogram(one, 64, *ends[0])[0]
    moved = rules.rebinned(before, *ends)
    direct = rules.histogram(one, 64, *ends[1])[0]
    assert moved.sum() == direct.sum() == one.size
    assert not np.array_equal(moved, direct), "spread evenly inside old bins"
    assert np.abs(np.cumsum(moved - direct)).max() <= before.max()
    assert merged.scale == pytest.approx(whole.scale, rel=0.02)
    once = calibrate(two, "hfmg", bits=4, asymmetric=True)
    assert twice.scale == pytest.approx(once.scale, rel=1e-3)


def test_the_loss_of_a_histogram_is_that_of_its_samples():
    """With samples spread evenly inside the bins, the closed form is their mean squared error."""
    counts = np.array([3, 0, 7, 20, 11, 5, 2, 1])
    points = np.concatenate([i + (np.arange(4000) + 0.5) / 4000 for i in range(8)])
    weight = np.repeat(counts / 4000, 4000)
    for left, right in rules.tail_cuts(counts):
        width = (right - left + 1) / 4
        level = np.clip((points - left) // width, 0, 3)
        error = np.sum(weight * (points - left - (level + 0.5) * width) ** 2)
        assert rules.histogram_loss(rules.moments_of(counts), 8, left, right, 4) == pytest.approx(
            error, rel=1e-5
        )


def test_a_long_tail_is_worth_cutting():
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(size=20000), [60.0, -55.0]]).astype(np.float32)
    inside = values[abs(values) < 5]
    loss = {
        method: np.mean((calibrate(values, method).fake_quantise(inside) - inside) ** 2)
        for method in METHODS
    }
    for method in ("hfmg", "ifmr", "kl", "tensorrt"):
        assert loss[method] < loss["minmax"], method


# -- command --------------------------------------------------------------------------------------
def test_the_command_prints_scale_and_offset(tmp_path, capsys):
    file = tmp_path / "values.npy"
    np.save(file, RELU)
    found = run_json(capsys, "calibrate", file, "--method", "ifmr")
    assert found["scale"] == pytest.approx(0.0772486255, abs=2e-8)
    words = ("calibrate", file, "--method", "minmax", "--asymmetric", "--bits", 4)
    assert run_json(capsys, *words)["offset"] == -8
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "") and "offset -8" in out


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    good, bad, pickled = (tmp_path / f"{name}.npy" for name in ("good", "bad", "pickled"))
    np.save(good, RELU)
    np.save(bad, np.array([1.0, np.nan]))
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    archive = tmp_path / "archive.npz"
    np.savez(archive, x=RELU)
    for words in (
        (bad, "--method", "kl"), (pickled, "--method", "kl"), (archive, "--method", "kl"),
        (tmp_path, "--method", "kl"), (tmp_path / "none", "--method", "kl"), (__file__,),
        (good, "--method", "no"), (good, "--method", "kl", "--asymmetric"), (good,),
        (good, "--method", "hfmg", "--bits", 99), (__file__, "--method", "minmax"),
    ):  # fmt: skip
        refused(capsys, "calibrate", *words)

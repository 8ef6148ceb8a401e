"""Layouts: published shapes and formulas, round trips, address maps, conversions as programs."""

import itertools
import math

import numpy as np
import pytest
from cube_checks import on
from hypothesis import given, settings, strategies as st
from message_lists import assert_messages

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.layout import (
    FORMATS,
    address,
    address_map,
    addresses,
    burst_bytes,
    conversion_launch,
    convert,
    element_at,
    pack,
    unpack,
)
from ascend_lab.machine.sim import execute

ARRAYS = [name for name, form in FORMATS.items() if "..." in form.axes]
IMAGES = [name for name, form in FORMATS.items() if "..." not in form.axes]
TYPES = {"fp16": np.float16, "int8": np.int8, "fp32": np.float32, "int32": np.int32}
SIDES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 30, 31, 32, 33, 48)


@st.composite
def cases(draw):
    """(source, target, shape, dtype) of two layouts of one array."""
    dtype = draw(st.sampled_from(list(TYPES)))
    if draw(st.booleans()):
        names = ARRAYS
        lead = draw(st.lists(st.integers(1, 3), max_size=2))
        shape = (*lead, draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES)))
    else:
        names = IMAGES
        sizes = [(1, 2, 15, 16, 17), (1, 3, 8, 16, 17, 33), (1, 2, 3, 7), (1, 2, 5)]
        shape = tuple(draw(st.sampled_from(s)) for s in sizes)
    return draw(st.sampled_from(names)), draw(st.sampled_from(names)), shape, dtype


def values(shape, dtype, start=1):
    """Different numbers as far as the format goes, none of them zero."""
    limit = {"int8": 127, "fp16": 2047}.get(dtype, 1 << 20)
    flat = (np.arange(math.prod(shape)) + start - 1) % limit + 1
    return flat.reshape(shape).astype(TYPES[dtype])


# -- what is published ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "stored"),
    [
        ("FRACTAL_NZ", (8, 100, 30), "fp16", (8, 2, 7, 16, 16)),
        ("FRACTAL_NZ", (8, 100, 30), "int8", (8, 1, 7, 16, 32)),
        ("FRACTAL_NZ", (100, 30), "fp32", (4, 7, 16, 8)),
        ("FRACTAL_ZZ", (100, 30), "fp16", (7, 2, 16, 16)),
        ("FRACTAL_ZN", (100, 30), "fp16", (7, 2, 16, 16)),
        ("FRACTAL_ZN", (100, 30), "int8", (4, 2, 16, 32)),
        ("NC1HWC0", (8, 3, 224, 224), "fp16", (8, 1, 224, 224, 16)),
        ("NC1HWC0", (8, 64, 56, 56), "int8", (8, 2, 56, 56, 32)),
        ("NHWC", (8, 3, 224, 224), "fp16", (8, 224, 224, 3)),
        ("FRACTAL_Z", (256, 128, 3, 3), "fp16", (72, 16, 16, 16)),
        ("FRACTAL_Z", (1536, 128, 3, 3), "fp16", (72, 96, 16, 16)),
        ("ND", (8, 100, 30), "fp16", (8, 100, 30)),
        ("ND", (7,), "int8", (7,)),
    ],
)
def test_published_shapes(name, shape, dtype, stored):
    assert address_map(name, shape, dtype).storage_shape == stored


@settings(max_examples=100)
@given(st.sampled_from(["fp16", "int8", "fp32"]), st.integers(0, 10**6))
def test_published_formulas(dtype, seed):
    c0 = 32 // np.dtype(TYPES[dtype]).itemsize
    rng = np.random.default_rng(seed)
    n_, c_, h_, w_ = shape = tuple(int(k) for k in rng.integers(1, 40, 4))
    n, c, h, w = index = tuple(int(rng.integers(k)) for k in shape)
    c1_ = -(-c_ // c0)
    n1_ = -(-n_ // 16)
    place = (((n * c1_ + c // c0) * h_ + h) * w_ + w) * c0 + c % c0
    assert address(address_map("NC1HWC0", shape, dtype), index) == place
    place = ((((c // c0 * h_ + h) * w_ + w) * n1_ + n // 16) * 16 + n % 16) * c0 + c % c0
    assert address(address_map("FRACTAL_Z", shape, dtype), index) == place
    m = h
    k = w
    m1_ = -(-h_ // 16)
    k1_ = -(-w_ // c0)
    nz = ((k // c0 * m1_ + m // 16) * 16 + m % 16) * c0 + k % c0
    zz = ((m // 16 * k1_ + k // c0) * 16 + m % 16) * c0 + k % c0
    zn = ((m // c0 * -(-w_ // 16) + k // 16) * 16 + k % 16) * c0 + m % c0
    for name, place in (("FRACTAL_NZ", nz), ("FRACTAL_ZZ", zz), ("FRACTAL_ZN", zn)):
        assert address(address_map(name, (h_, w_), dtype), (m, k)) == place


# -- the map ----------------------------------------------------------------------------------
@settings(max_examples=100)
@given(cases())
def test_every_element_has_one_place_inside_the_storage(case):
    name, _, shape, dtype = case
    layout = address_map(name, shape, dtype)
    found = addresses(layout)
    assert found.shape == shape
    assert found.min() >= 0 and found.max() < layout.elements
    assert len(np.unique(found)) == found.size
    last = tuple(n - 1 for n in shape)
    assert element_at(layout, address(layout, last)) == last
    holes = sum(element_at(layout, place) is None for place in range(layout.elements))
    assert holes * (layout.size_bytes // layout.elements) == layout.padding_bytes
    assert layout.padded_share == layout.padding_bytes / layout.size_bytes < 1


def common_runs(source, target):
    """Return the lengths of all runs of elements that are neighbours in both, by trying all."""
    order = np.argsort(addresses(source), axis=None)
    steps = [np.diff(addresses(m).reshape(-1)[order]) == 1 for m in (source, target)]
    runs = "".join("1" if both else "0" for both in steps[0] & steps[1]).split("0")
    return [len(run) + 1 for run in runs]


@settings(max_examples=100)
@given(cases())
def test_bursts_are_common_runs(case):
    """Where two images meet, last and first element may be neighbours by chance: no burst."""
    first, second, shape, dtype = case
    source = address_map(first, shape, dtype)
    target = address_map(second, shape, dtype)
    size = burst_bytes(source, target) // np.dtype(TYPES[dtype]).itemsize
    assert size == burst_bytes(target, source) // np.dtype(TYPES[dtype]).itemsize
    runs = common_runs(source, target)
    assert size <= max(runs)
    if not source.padding_bytes + target.padding_bytes:
        assert size == runs[0]


# -- values -----------------------------------------------------------------------------------
@given(cases())
def test_round_trips_are_exact_for_all_pairs(case):
    _, _, shape, dtype = case
    x = values(shape, dtype)
    names = IMAGES if len(shape) == 4 else ARRAYS
    for first, second in itertools.product(names, names):
        source = address_map(first, shape, dtype)
        target = address_map(second, shape, dtype)
        stored = pack(source, x)
        there = convert(stored, source, target)
        assert there.shape == target.storage_shape and there.dtype == x.dtype
        assert (there.reshape(-1)[addresses(target)] == x).all()
        assert np.count_nonzero(there) == x.size, "padding is zero"
        assert (convert(there, target, source) == stored).all()
        assert (unpack(target, there.reshape(-1)) == x).all()


# -- programs ---------------------------------------------------------------------------------
@pytest.mark.parametrize("chip_name", on("Toy", "Ascend910A", "Ascend910B2"))
@given(case=cases(), start=st.integers(1, 50))
def test_programs_convert_on_every_chip(chip_name, case, start):
    chip = load_chip(chip_name)
    first, second, shape, dtype = case
    source = address_map(first, shape, dtype)
    target = address_map(second, shape, dtype)
    launch = conversion_launch(shape, dtype, first, second, chip)
    stored = pack(source, values(shape, dtype, start))
    y = execute(launch, {"x": stored}, chip, seed=start)["y"]
    assert (y == convert(stored, source, target).reshape(-1)).all()
    assert sanitize(launch, chip) == []
    assert launch.core_count <= chip.cores_of("vector")
    if chip.combined:
        copies = [i for p in launch.parts for i, _ in p.program.instructions()]
        assert not any(i.attr("pad") for i in copies)


# -- errors -----------------------------------------------------------------------------------

X = np.zeros((4, 4), np.float16)
ND = address_map("ND", (4, 4))
NZ = address_map("FRACTAL_NZ", (4, 4))
TOY = load_chip("Toy")


CALLS = {
    "'NCHWC', NC1HWC0, FRACTAL_Z": lambda: address_map("NCHWC", (1, 2, 3, 4)),
    "4 axes, N C H W, 3: (1, 2, 3)": lambda: address_map("NCHW", (1, 2, 3)),
    "4 axes, 5: (1, 2, 3, 4, 16)": lambda: address_map("NC1HWC0", (1, 2, 3, 4, 16)),
    "at least 2, 1: (5,)": lambda: address_map("FRACTAL_NZ", (5,)),
    "at least 1, 0: ()": lambda: address_map("ND", ()),
    "at least 1, (4, 0)": lambda: address_map("ND", (4, 0)),
    "whole numbers, 2.5": lambda: address_map("ND", (4, 2.5)),
    "number format, 'fp12', int8": lambda: address_map("ND", (4, 4), "fp12"),
    "power of two, 12": lambda: address_map("FRACTAL_NZ", (4, 4), c0=12),
    "index N in 0..3, 4..4": lambda: address(NZ, (0, 4)),
    "index M in 0..3, -1..-1": lambda: address(NZ, (-1, 0)),
    "2 numbers, got 3, M, N": lambda: address(NZ, (0, 0, 0)),
    "index M, float64": lambda: address(NZ, (0.5, 0)),
    "0..3, 0..9": lambda: address(NZ, (np.array([0, 9]), 0)),
    "0..255, 256": lambda: element_at(NZ, 256),
    "(4, 4), (3, 4)": lambda: pack(NZ, X.T[:3]),
    "2 bytes, 1 (int8)": lambda: pack(NZ, X.astype(np.int8)),
    "(1, 1, 16, 16), (4, 4)": lambda: unpack(NZ, X),
    "(4, 4), (2, 8)": lambda: convert(X, ND, address_map("ND", (2, 8))),
    "fp16, int8": lambda: convert(X, ND, address_map("ND", (4, 4), "int8")),
    "same axes, NC1HWC0, NCHW": lambda: burst_bytes(
        address_map("ND", (1, 2, 3, 4)), address_map("NC1HWC0", (1, 2, 3, 4))
    ),
    "FRACTAL_NZ, NHWC": lambda: conversion_launch((1, 2, 3, 4), "fp16", "FRACTAL_NZ", "NHWC", TOY),
    "'NZ', FRACTAL_NZ": lambda: conversion_launch((4, 4), "fp16", "ND", "NZ", TOY),
    "'double'": lambda: conversion_launch((4, 4), "double", "ND", "ND", TOY),
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("isa", "test_layout", CALLS)

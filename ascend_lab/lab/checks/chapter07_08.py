"""Checks of chapters 7 and 8: products, and convolutions as products.

7: a block's shape, bytes of a loop nest, the best tile, a schedule by search. Bytes and cycles are
judged by what real programs count, tiles by trying all of them.
8: sizes of the im2col matrix, its address generator, a layer by Winograd, a stride folded away.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected m k n = 4096".
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.kernels import conv2d_reference, im2col_reference, nest_bytes, product_nest
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip, load_chip
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    default_schedule,
    gemm_launch,
)

# -- chapter 7 ------------------------------------------------------------------------------------
PRODUCT_CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2", "Toy")
ORDERS = tuple("".join(order) for order in permutations("mkn"))
PRODUCT_SLACK = 1.02
"""A schedule found by search may take this many times the cycles of the best one we know."""


def _three_sides(got: Any) -> tuple[int, int, int] | None:
    """Return a tuple or list of three positive whole numbers as one, else None."""
    if not isinstance(got, tuple | list) or len(got) != 3:
        return None
    if not all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in got):
        return None
    m, k, n = (int(x) for x in got)
    return (m, k, n) if min(m, k, n) > 0 else None


def _block_bytes(block: tuple[int, int, int], case: ex.Case) -> int:
    """Return the bytes of a block of a product: A and B are read, C is read and written."""
    m, k, n = block
    return int(case["in_bytes"] * (m * k + k * n) + 2 * case["sum_bytes"] * m * n)


def _judge_nest(got: Any, case: ex.Case) -> str | None:
    """Judge bytes of A, B and C by those that a program of the nest moves."""
    tile = case["tile"]
    trips = {axis: case[axis] // tile for axis in "mkn"}
    chip = load_chip("Ascend910A")
    tile_fractals = tile // 16
    moved = nest_bytes(product_nest(chip, case["order"], trips, tile_fractals), chip)
    return ex.equal_to((moved["A"], moved["B"], moved["C"]))(got)


def _overflow(chip: Chip, dtype: str, slots: int, tile: tuple[int, int, int]) -> str | None:
    """Return which buffer a tile overflows, with two slots of A and B and `slots` of C, or None."""
    (m, k, n) = tile
    itemsize = DTYPE_BYTES[dtype]
    needed_bytes = {
        "L0A": 2 * m * k * itemsize,
        "L0B": 2 * k * n * itemsize,
        "L0C": slots * m * n * 4,
    }
    for space, needed in needed_bytes.items():
        if needed > chip.buffers[space]:
            return f"{space} holds {chip.buffers[space]} bytes and {needed} are needed"
    return None


def _mte1_cycles(chip: Chip, dtype: str, tile: tuple[int, int, int]) -> float:
    """Return cycles of MTE1 per MAC: an element of A is used n times, one of B m times."""
    m, _, n = tile
    a_rate = chip.path("L1", "L0A").rate_bytes_per_cycle
    b_rate = chip.path("L1", "L0B").rate_bytes_per_cycle
    return DTYPE_BYTES[dtype] * (1 / (a_rate * n) + 1 / (b_rate * m))


def _judge_schedule(got: Any, case: ex.Case) -> str | None:
    """Judge a schedule of a product by its cycles."""
    if not isinstance(got, GemmSchedule):
        return "expected a GemmSchedule"
    shape = GemmShape(case["m"], case["k"], case["n"])
    chip = load_chip("Ascend910A")
    try:
        cycles = sim.simulate(gemm_launch(shape, chip, got), chip).cycles
    except errors.AscendLabError as error:
        return f"which cannot run: {error}"
    enough = int(PRODUCT_SLACK * _best_cycles(shape))
    return None if cycles <= enough else f"which takes {cycles} cycles; expected at most {enough}"


SIDES = ("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols")


@cache
def _best_cycles(shape: GemmShape) -> int:
    """Return the cycles at the end of a walk from the default to ever faster neighbours.

    A neighbour has one field doubled, or one halved, or both.
    """
    chip = load_chip("Ascend910A")

    def cycles_of(s: GemmSchedule) -> int:
        try:
            return sim.simulate(gemm_launch(shape, chip, s), chip).cycles
        except errors.AscendLabError:
            return 1 << 60

    best = default_schedule(shape, chip)
    cycles = cycles_of(best)
    while True:
        for doubled, halved in permutations((None, *SIDES), 2):
            change = {doubled: 2 * getattr(best, doubled)} if doubled else {}
            if halved and getattr(best, halved) % 2 == 0:
                change[halved] = getattr(best, halved) // 2
            neighbour = replace(best, **change)
            neighbour_cycles = cycles_of(neighbour)
            if neighbour_cycles < cycles:
                best = neighbour
                cycles = neighbour_cycles
                break
        else:
            return cycles


@ex.judged(
    edges=[(4096, 2, 4), (4096, 2, 0), (64, 2, 4), (1, 2, 4)],
    macs=[2**power for power in range(19)],
    in_bytes=(1, 2, 4),
    sum_bytes=(0, 1, 2, 4, 8),
)
def check_ex_07_1(got: Any, case: ex.Case) -> str | None:
    """Check `fn(macs, in_bytes, sum_bytes)`: (m, k, n) of the block that moves the fewest bytes."""
    macs = case["macs"]
    sides = _three_sides(got)
    if sides is None or any(side & (side - 1) for side in sides):
        return "expected three powers of two, (m, k, n)"
    if sides[0] * sides[1] * sides[2] != macs:
        return f"expected m k n = {macs}"
    powers = [1 << i for i in range(macs.bit_length())]
    blocks = [(m, macs // (m * n), n) for m, n in product(powers, powers) if m * n <= macs]
    block_bytes = _block_bytes(sides, case)
    least = min(_block_bytes(block, case) for block in blocks)
    if block_bytes > least:
        return f"which moves {block_bytes} bytes a cycle; expected one that moves {least}"
    return None


@ex.judged(
    edges=[("Ascend910A", "fp16", 1), ("Ascend910A", "fp16", 2), ("Ascend910A", "int8", 1)],
    cases=12,
    chip_name=PRODUCT_CHIPS,
    dtype=("fp16", "int8"),
    slots=range(1, 5),
)
def check_ex_07_3(got: Any, case: ex.Case) -> str | None:
    """Check `fn(chip_name, dtype, slots)`: (m, k, n) of the tile that is cheapest to feed."""
    chip = load_chip(case["chip_name"])
    dtype = case["dtype"]
    slots = case["slots"]
    c0 = isa.c0_of(dtype)
    sides = _three_sides(got)
    if sides is None or sides[0] % 16 or sides[2] % 16 or sides[1] % c0:
        return f"expected (m, k, n): m and n multiples of 16, k of {c0}"
    m, k, n = sides
    if (full := _overflow(chip, dtype, slots, sides)) is not None:
        return f"but {full}"
    legal_tiles = [
        (tile_m, c0, tile_n)
        for tile_m, tile_n in product(range(16, 2049, 16), repeat=2)
        if _overflow(chip, dtype, slots, (tile_m, c0, tile_n)) is None
    ]
    cycles = _mte1_cycles(chip, dtype, sides)
    least = min(_mte1_cycles(chip, dtype, tile) for tile in legal_tiles)
    if cycles > least * (1 + 1e-9):
        busy = f"which keeps MTE1 busy for {cycles * 4096:.3f} cycles for every 4096 MACs"
        return f"{busy}; expected {least * 4096:.3f}"
    if _overflow(chip, dtype, slots, (m, k + c0, n)) is None:
        return f"but a depth of {k + c0} fits as well"
    return None


@ex.judged(
    _judge_schedule,
    edges=[(64, 65536, 64), (77, 3000, 77), (256, 256, 256), (48, 8000, 400)],
    cases=1,
)
def check_ex_07_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(m, k, n)`: a `GemmSchedule` for an fp16 product on the Ascend910A near the best."""
    m, n = (int(side) for side in rng.integers(20, 400, 2))
    return {"m": m, "k": int(rng.integers(1, 20)) * 100, "n": n}


@ex.judged(
    _judge_nest,
    edges=[
        *((order, 256, 384, 512, 64) for order in ORDERS),
        ("knm", 64, 64, 64, 64),
        ("mkn", 64, 640, 64, 64),
    ],
)
def check_ex_07_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(order, m, k, n, tile)`: bytes of A, B and C that the nest C += A B moves."""
    tile = 16 * int(rng.integers(1, 9))
    m, k, n = (tile * int(x) for x in rng.integers(1, 30, 3))
    return {"order": str(rng.choice(ORDERS)), "m": m, "k": k, "n": n, "tile": tile}


# -- chapter 8 ------------------------------------------------------------------------------------
Values = np.ndarray
Pair = tuple[int, int]
Sides = tuple[int, int, int, int]
Image = tuple[int, int, int, int]
"""(C1, H, W, C0)."""


def _address_case(
    rng: ex.Rng, image: Image, kernel: Pair, stride: Pair, pad: int, dilation: Pair
) -> ex.Case:
    """Return a convolution, and rows m and columns k of up to 12 elements of its im2col matrix."""
    matrix = _matrix(image, kernel, stride, pad, dilation)
    m, k = (rng.integers(0, side, min(12, matrix.size)) for side in matrix.shape)
    return {
        "m": m,
        "k": k,
        "image": image,
        "kernel": kernel,
        "stride": stride,
        "pad": pad,
        "dilation": dilation,
    }


def addresses(
    m: Values, k: Values, image: Image, kernel: Pair, stride: Pair, pad: int, dilation: Pair
) -> Values:
    """Return the address of element (m, k) of the im2col matrix in (C1, H, W, C0), -1 on a pad.

    Columns are ordered (C1, r, s, C0). Read off a matrix of addresses, not computed.
    """
    return np.asarray(_matrix(image, kernel, stride, pad, dilation)[m, k])


def _matrix(image: Image, kernel: Pair, stride: Pair, pad: int, dilation: Pair) -> Values:
    """Return the im2col matrix of an image whose every element holds its own address, -1 on pads.

    The image holds address + 1, as pads are zeros; at the end 1 is subtracted.
    """
    c1, h, w, c0 = image
    numbered = np.arange(1, c1 * h * w * c0 + 1).reshape(image).transpose(0, 3, 1, 2)
    rows = im2col_reference(numbered.reshape(1, c1 * c0, h, w), kernel, stride, pad, dilation)
    taps = kernel[0] * kernel[1]
    ordered = rows.reshape(-1, c1, c0, taps).transpose(0, 1, 3, 2)
    return np.asarray(ordered.reshape(len(rows), -1) - 1)


def _image_case(
    image: Values, weights: Values, product_of: Callable[[Values, Values], Values] | None = None
) -> ex.Case:
    """Return a layer, and a product of matrices that counts its multiplications."""
    return {
        "image": np.asarray(image, np.float64),
        "weights": np.asarray(weights, np.float64),
        "multiply": ex.counting(
            product_of or multiply, lambda result, a, _: result.size * np.shape(a)[-1]
        ),
    }


def multiply(a: Values, b: Values) -> Values:
    """Return the product of two matrices, or of stacks of them."""
    return np.asarray(np.matmul(a, b))


def multiply_and_double(a: Values, b: Values) -> Values:
    """Return twice the product: values that come from elsewhere are not doubled."""
    return 2 * multiply(a, b)


def _judge_winograd(got: Any, case: ex.Case) -> str | None:
    """Judge a layer by its values and by the multiplications that it took."""
    multiplications = ex.spent(case["multiply"])
    (k, c, *_) = case["weights"].shape
    (_, h, w) = case["image"].shape
    convolved = conv2d_reference(case["image"][None], case["weights"], pad=1)[0]
    doubled = case["multiply"].__name__ == multiply_and_double.__name__
    expected = 2 * convolved if doubled else convolved
    if doubled and np.shape(got) == convolved.shape and np.allclose(got, convolved):
        return "made without the products of multiply: those were twice as large here"
    if np.shape(got) != expected.shape or not np.allclose(got, expected, rtol=1e-9, atol=1e-9):
        return ex.equal_to(expected, 1e-9)(got) or "expected the convolution with pad 1"
    # F(2x2, 3x3): 16 products for each channel, kernel and tile of 2 x 2 outputs.
    fewest = 16 * -(-h // 2) * -(-w // 2) * c * k
    if multiplications != fewest:
        return (
            f"with {multiplications:,} products through multiply; {fewest:,} are needed and enough"
        )
    return None


def folded(x: Values) -> Values:
    """Return x (n, c, h, w), h and w even, as (n, 4c, h/2, w/2): 2x2 pixels become channels.

    Channel (2 a + b) c + i holds pixel (a, b) of each 2x2 of channel i.
    """
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, 4 * c, h // 2, w // 2)


@ex.judged(
    _judge_winograd,
    edges=[
        _image_case(np.ones((1, 2, 2)), np.ones((1, 1, 3, 3))),
        _image_case(np.arange(25).reshape(1, 5, 5), np.arange(9).reshape(1, 1, 3, 3)),
        _image_case(np.arange(24).reshape(2, 3, 4), np.arange(54).reshape(3, 2, 3, 3)),
        _image_case(np.ones((1, 3, 3)), np.ones((1, 1, 3, 3)), multiply_and_double),
    ],
    cases=20,
)
def check_ex_08_3(rng: ex.Rng) -> ex.Case:
    """Check Winograd's F(2x2, 3x3): `fn(image, weights, multiply)`, a layer with pad 1."""
    c, h, w, k = (int(v) for v in rng.integers(1, (4, 10, 10, 5)))
    return _image_case(rng.integers(-9, 10, (c, h, w)), 2 * rng.integers(-4, 5, (k, c, 3, 3)))


@ex.judged(
    edges=[
        (np.arange(9.0).reshape(1, 1, 3, 3),),
        (np.ones((1, 1, 1, 1)),),
        (np.arange(2.0 * 3 * 7 * 7).reshape(2, 3, 7, 7),),
    ],
    cases=25,
    weight=lambda rng: rng.integers(-9, 10, rng.integers(1, (4, 4, 8, 8)).tolist()).astype(float),
)
def check_ex_08_4(got: Any, case: ex.Case) -> str | None:
    """Check `fn(weight)`: weights of stride 2 (k, c, r, s) for an image folded into 4c channels."""
    k, c, r, s = case["weight"].shape
    shape = (k, 4 * c, (r + 1) // 2, (s + 1) // 2)
    if np.shape(got) != shape:
        return f"of shape {np.shape(got)}, expected shape {shape}"
    rng = np.random.default_rng(k + 10 * c + 100 * r + 1000 * s)
    sides = (2 * ((r + 1) // 2) + 4, 2 * ((s + 1) // 2) + 2)
    x = rng.integers(-9, 10, (1, c, *sides)).astype(np.float64)
    expected = conv2d_reference(x, case["weight"], 2)
    values = conv2d_reference(folded(x), np.asarray(got, np.float64))
    wrong = int((~np.isclose(values, expected, rtol=1e-9, atol=1e-9)).sum())
    differ = f"expected the outputs of stride 2, {wrong} of {expected.size} differ"
    return differ if wrong else None


@ex.against(
    edges=[
        ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
        ((1, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
        ((1, 1, 9, 7), (2, 1, 3, 2), 2, 0, 2),
        ((3, 2, 1, 1), (5, 2, 1, 1), 4, 0, 1),
    ],
    image=lambda rng: (int(rng.integers(1, 9)), 16, *rng.integers(12, 40, 2).tolist()),
    kernels=lambda rng: (int(rng.integers(1, 99)), 16, *rng.integers(1, 6, 2).tolist()),
    stride=(1, 2, 3),
    pad=(0, 1, 2, 3),
    dilation=(1, 2),
)
def check_ex_08_1(
    image: Sides, kernels: Sides, stride: int, pad: int, dilation: int
) -> tuple[int, int, int]:
    """Return (M, K, N) of a convolution of images (n, c, h, w) with kernels (k, c, r, s)."""
    n, c, h, w = image
    k, _, r, s = kernels
    shape = ConvShape(n, c, h, w, k, r, s, stride, pad, dilation=dilation)
    out_h, out_w = shape.out_hw
    return n * out_h * out_w, c * r * s, k


RNG_8_2 = np.random.default_rng(0)


@ex.against(
    addresses,
    edges=[
        _address_case(RNG_8_2, (1, 3, 3, 2), (3, 3), (1, 1), 0, (1, 1)),
        _address_case(RNG_8_2, (2, 1, 1, 16), (1, 1), (1, 1), 1, (1, 1)),
        _address_case(RNG_8_2, (1, 5, 4, 1), (2, 3), (2, 1), 2, (1, 2)),
    ],
)
def check_ex_08_2(rng: ex.Rng) -> ex.Case:
    """Check the address generator `fn(m, k, image, kernel, stride, pad, dilation)`."""
    kernel = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    stride, dilation = ((int(a), int(b)) for a, b in rng.integers(1, 4, (2, 2)))
    pad = int(rng.integers(0, 3))
    pairs = zip(dilation, kernel, strict=True)
    sides = [d * (r - 1) + 1 + int(rng.integers(0, 6)) for d, r in pairs]
    image = (int(rng.integers(1, 4)), sides[0], sides[1], int(rng.choice((2, 4, 16))))
    return _address_case(rng, image, kernel, stride, pad, dilation)

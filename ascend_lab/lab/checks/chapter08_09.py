"""Checks of chapters 8 and 9.

8: the address generator of implicit im2col, a layer by Winograd, a stride folded away.
9: ND to FRACTAL_NZ, the loops of any conversion, the address of a weight.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.kernels import conv2d_reference, im2col_reference
from ascend_lab.layout import AddressMap, address, address_map, pack
from ascend_lab.layout import addresses as addresses_of

Values = NDArray[Any]
Pair = tuple[int, int]


def _address_case(
    rng: np.random.Generator,
    image: tuple[int, int, int, int],
    kernel: Pair,
    stride: Pair,
    pad: int,
    dilation: Pair,
) -> ex.Case:
    whole = _matrix(image, kernel, stride, pad, dilation)
    count = min(12, whole.size)
    m, k = (rng.integers(0, side, count) for side in whole.shape)
    return {
        "m": m, "k": k, "image": image, "kernel": kernel, "stride": stride, "pad": pad,
        "dilation": dilation,
    }  # fmt: skip


def addresses(
    m: Values,
    k: Values,
    image: tuple[int, int, int, int],
    kernel: Pair,
    stride: Pair,
    pad: int,
    dilation: Pair,
) -> Values:
    """Return the address of element (m, k) of the im2col matrix in (C1, H, W, C0), -1 on a pad.

    Columns are ordered (C1, r, s, C0). Read off a matrix of addresses, not computed.
    """
    picked: Values = _matrix(image, kernel, stride, pad, dilation)[m, k]
    return picked


def _matrix(
    image: tuple[int, int, int, int], kernel: Pair, stride: Pair, pad: int, dilation: Pair
) -> Values:
    """Lay im2col out over an image whose every element holds its own address."""
    c1, h, w, c0 = image
    own = np.arange(1, c1 * h * w * c0 + 1).reshape(image).transpose(0, 3, 1, 2)
    rows = im2col_reference(own.reshape(1, c1 * c0, h, w), kernel, stride, pad, dilation)
    taps = kernel[0] * kernel[1]
    ordered = rows.reshape(-1, c1, c0, taps).transpose(0, 1, 3, 2)
    matrix: Values = ordered.reshape(len(rows), -1) - 1
    return matrix


def _image_case(image: Values, weights: Values) -> ex.Case:
    return {
        "image": np.asarray(image, np.float64),
        "weights": np.asarray(weights, np.float64),
        "multiply": _counting(),
    }


def _counting() -> Any:
    """Return a product of matrices, or of stacks of them, that counts in `products`."""

    def multiply(a: Values, b: Values) -> Values:
        result: Values = np.matmul(a, b)
        multiply.__dict__["products"] += result.size * np.shape(a)[-1]
        return result

    multiply.__dict__["products"] = 0
    multiply.__qualname__ = "multiply"
    return multiply


def _judge_winograd(got: Any, case: ex.Case) -> str | None:
    made = case["multiply"].__dict__["products"]
    case["multiply"].__dict__["products"] = 0
    (k, c, *_), (_, h, w) = case["weights"].shape, case["image"].shape
    expected = conv2d_reference(case["image"][None], case["weights"], pad=1)[0]
    if np.shape(got) != expected.shape or not np.allclose(got, expected, rtol=1e-9, atol=1e-9):
        return ex.equal_to(expected, 1e-9)(got) or "expected the convolution with pad 1"
    fewest = 16 * -(-h // 2) * -(-w // 2) * c * k
    if made != fewest:
        return f"with {made:,} products through multiply; {fewest:,} are needed and enough"
    return None


def folded(x: Values) -> Values:
    """Return x (n, c, h, w), h and w even, as (n, 4c, h/2, w/2): 2x2 pixels become channels.

    Channel (2 a + b) c + i holds pixel (a, b) of each 2x2 of channel i.
    """
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, 4 * c, h // 2, w // 2)


def _judge_fold(got: Any, case: ex.Case) -> str | None:
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
    if wrong:
        return f"expected the outputs of stride 2, {wrong} of {expected.size} differ"
    return None


# -- chapter 9 -------------------------------------------------------------------------------------
TYPES = {"int8": np.int8, "fp16": np.float16, "fp32": np.float32}
SIDES = (1, 7, 15, 16, 17, 30, 31, 32, 33, 50, 100)


def _numbers(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return numbers 1 .. 97 in turn: none is 0."""
    return (np.arange(math.prod(shape)) % 97 + 1).reshape(shape).astype(TYPES[dtype])


@ex.judged(
    _judge_winograd,
    edges=[
        _image_case(np.ones((1, 2, 2)), np.ones((1, 1, 3, 3))),
        _image_case(np.arange(25).reshape(1, 5, 5), np.arange(9).reshape(1, 1, 3, 3)),
        _image_case(np.arange(24).reshape(2, 3, 4), np.arange(54).reshape(3, 2, 3, 3)),
    ],
    cases=20,
)
def check_ex_08_3(rng: ex.Rng) -> ex.Case:
    """Check Winograd's F(2x2, 3x3): `fn(image, weights, multiply)`, a layer with pad 1.

    image (c, h, w), weights (k, c, 3, 3); products of data with weights go through `multiply`,
    which counts them: 16 for 2x2 outputs, channel and kernel, the ragged edge counted as whole.
    """
    c, h, w, k = (int(v) for v in rng.integers(1, (4, 10, 10, 5)))
    return _image_case(rng.integers(-9, 10, (c, h, w)), 2 * rng.integers(-4, 5, (k, c, 3, 3)))


@ex.judged(
    _judge_fold,
    edges=[
        {"weight": np.arange(9.0).reshape(1, 1, 3, 3)},
        {"weight": np.ones((1, 1, 1, 1))},
        {"weight": np.arange(2.0 * 3 * 7 * 7).reshape(2, 3, 7, 7)},
    ],
    cases=25,
)
def check_ex_08_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(weight)`: weights of stride 2 (k, c, r, s) for the image folded into 4c channels.

    The result is (k, 4c, ceil(r/2), ceil(s/2)); with `folded` images, stride 1 must give what
    stride 2 gave.
    """
    sizes = [int(v) for v in rng.integers(1, (4, 4, 8, 8))]
    return {"weight": rng.integers(-9, 10, sizes).astype(np.float64)}


def nest(source: AddressMap, target: AddressMap) -> list[tuple[int, int, int]]:
    """Return the fewest loops (count, source step, target step) that visit every element."""
    loops = []
    for axis, size in enumerate(source.shape):
        maps = [[p for p in own.pieces if p.axis == axis] for own in (source, target)]
        marks = sorted({size, *(p.step for pieces in maps for p in pieces)})
        for low, high in pairwise(marks):
            found = (max((p for p in own if p.step <= low), key=lambda p: p.step) for own in maps)
            loops.append((high // low, *(p.stride * (low // p.step) for p in found)))
    merged: list[tuple[int, int, int]] = []
    for count, there, here in sorted(loops, key=lambda loop: -loop[2]):
        joins = merged and merged[-1][1:] == (count * there, count * here)
        merged.append((count * merged.pop()[0] if joins else count, there, here))
    return merged


def _judge_09_3(got: Any, case: ex.Case) -> str | None:
    maps, places = (case["source"], case["target"]), np.zeros((2, 1), int)
    for count, *steps in got:
        inner = np.multiply.outer(steps, np.arange(count))[:, None]
        places = (places[:, :, None] + inner).reshape(2, -1)
    wanted = np.stack([addresses_of(own).ravel() for own in maps])
    if places.shape != wanted.shape:
        return f"which visits {places.shape[1]:,} elements, expected {wanted.shape[1]:,}"
    if not np.array_equal(places[:, places[1].argsort()], wanted[:, wanted[1].argsort()]):
        return "which takes elements to wrong places"
    if len(got) > (fewest := len(nest(*maps))):
        return f"with {len(got)} loops; {fewest} are enough"
    steps = [loop[2] for loop in got]
    return None if steps == sorted(steps, reverse=True) else "expected the target in rising order"


MATRICES = "ND", "FRACTAL_NZ", "FRACTAL_ZZ", "FRACTAL_ZN"
IMAGES = "NCHW", "NHWC", "NC1HWC0", "FRACTAL_Z"


def _maps(source: str, target: str, shape: tuple[int, ...], dtype: str = "fp16") -> ex.Case:
    maps = (address_map(name, shape, dtype) for name in (source, target))
    return dict(zip(("source", "target"), maps, strict=True))


@ex.judged(
    _judge_09_3,
    edges=[
        _maps("ND", "FRACTAL_NZ", (32, 48)),
        _maps("FRACTAL_ZZ", "FRACTAL_ZN", (64, 64), "int8"),
        _maps("NCHW", "NCHW", (2, 3, 4, 5)),
        _maps("NHWC", "FRACTAL_Z", (16, 32, 1, 3)),
        _maps("ND", "FRACTAL_NZ", (3, 16, 16)),
    ],
    cases=20,
)
def check_ex_09_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(source, target)`: the loops of a conversion between two layouts without padding.

    Each loop is (count, source step, target step), outermost first, steps in elements; together
    they visit every element once, in rising order of the target, and no fewer loops would do.
    """
    lead, high, wide, side = (int(n) for n in rng.integers(1, 4, 4))
    matrix = bool(rng.integers(0, 2))
    shape = (lead, 32 * high, 32 * wide) if matrix else (16 * lead, 32 * high, wide, side)
    one, two = (str(name) for name in rng.choice(MATRICES if matrix else IMAGES, 2))
    return _maps(one, two, shape, str(rng.choice(list(TYPES))))


def _judge_09_4(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, int | np.integer):
        return f"expected a whole number, got a {type(got).__name__}"
    weights = address_map("FRACTAL_Z", case["shape"], "fp16", c0=case["c0"])
    return ex.equal_to(int(address(weights, case["index"])))(got)


@ex.judged(_judge_09_4)
def check_ex_09_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(index, shape, c0)`: the address of weight (n, c, h, w) in FRACTAL_Z."""
    sides = (1, 70), (1, 70), (1, 8), (1, 8)
    shape = tuple(int(rng.integers(low, high)) for low, high in sides)
    index = tuple(int(rng.integers(0, n)) for n in shape)
    return {"index": index, "shape": shape, "c0": int(rng.choice((8, 16, 32)))}


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
    """Check the address generator `fn(m, k, image, kernel, stride, pad, dilation)`.

    image is (C1, H, W, C0), m and k are arrays of rows and columns of the matrix; the result is
    the flat address of each element in the image, and -1 where the window lies on a pad.
    """
    kernel = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    stride, dilation = ((int(a), int(b)) for a, b in rng.integers(1, 4, (2, 2)))
    pad = int(rng.integers(0, 3))
    sides = [
        d * (r - 1) + 1 + int(rng.integers(0, 6)) for d, r in zip(dilation, kernel, strict=True)
    ]
    image = (int(rng.integers(1, 4)), sides[0], sides[1], int(rng.choice((2, 4, 16))))
    return _address_case(rng, image, kernel, stride, pad, dilation)


def _judge_09_2(got: Any, case: ex.Case) -> str | None:
    x = case["x"]
    name = next(name for name, dtype in TYPES.items() if x.dtype == dtype)
    expected = pack(address_map("FRACTAL_NZ", x.shape, name), x)
    wrong = ex.equal_to(expected)(got)
    if wrong is None and got.dtype != expected.dtype:
        wrong = f"of {got.dtype}, expected {expected.dtype}"
    return wrong


@ex.judged(
    _judge_09_2,
    edges=[
        {"x": _numbers((1, 1), "fp16")},
        {"x": _numbers((16, 32), "int8")},
        {"x": _numbers((8, 100, 30), "fp16")},
        {"x": _numbers((8, 100, 30), "int8")},
    ],
    cases=20,
)
def check_ex_09_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(x)`: an array of two or more axes in FRACTAL_NZ, (..., N1, M1, 16, C0)."""
    lead = [int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3)))]
    shape = (*lead, *(int(n) for n in rng.choice(SIDES, 2)))
    return {"x": _numbers(shape, str(rng.choice(list(TYPES))))}

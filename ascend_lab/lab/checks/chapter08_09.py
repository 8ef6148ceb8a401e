"""Checks of chapters 8 and 9.

8: the address generator of implicit im2col, Winograd, a stride folded away.
9: ND to FRACTAL_NZ and back, the address of a weight.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.kernels import conv2d_reference, im2col_reference
from ascend_lab.layout import address, address_map, pack

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


def _tile_case(data: Values, kernel: Values) -> ex.Case:
    return {
        "data": np.asarray(data, np.float64),
        "kernel": np.asarray(kernel, np.float64),
        "multiply": _counting(),
    }


def _counting() -> Any:
    """Return an element-wise product with an attribute `products` that counts its elements."""

    def multiply(a: Values, b: Values) -> Values:
        result: Values = np.asarray(np.multiply(a, b))
        multiply.__dict__["products"] += result.size
        return result

    multiply.__dict__["products"] = 0
    multiply.__qualname__ = "multiply"
    return multiply


def _judge_tile(got: Any, case: ex.Case) -> str | None:
    made = case["multiply"].__dict__["products"]
    case["multiply"].__dict__["products"] = 0
    expected = conv2d_reference(case["data"][None, None], case["kernel"][None, None])[0, 0]
    if np.shape(got) == (2, 2) and np.allclose(got, expected, rtol=1e-9, atol=1e-9):
        if 0 < made <= 16:
            return None
        return f"with {made} products through multiply, expected 1 to 16"
    return ex.equal_to(expected)(got)


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
GARBAGE = 99
"""Stands in the padding of storage that is to be read: padding may hold anything."""


def _name(x: NDArray[Any]) -> str:
    return next(name for name, dtype in TYPES.items() if x.dtype == dtype)


def _numbers(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return numbers 1 .. 97 in turn: none is 0 and none is GARBAGE."""
    return (np.arange(math.prod(shape)) % 97 + 1).reshape(shape).astype(TYPES[dtype])


def _draw_array(rng: np.random.Generator) -> ex.Case:
    lead = [int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3)))]
    shape = (*lead, *(int(n) for n in rng.choice(SIDES, 2)))
    return {"x": _numbers(shape, str(rng.choice(list(TYPES))))}


def _stored(x: NDArray[Any]) -> ex.Case:
    stored = pack(address_map("FRACTAL_NZ", x.shape, _name(x)), x)
    return {"stored": np.where(stored == 0, stored.dtype.type(GARBAGE), stored), "shape": x.shape}


@ex.judged(
    _judge_tile,
    edges=[
        _tile_case(np.eye(4), np.ones((3, 3))),
        _tile_case(np.zeros((4, 4)), np.ones((3, 3))),
        _tile_case(np.arange(16).reshape(4, 4), np.arange(9).reshape(3, 3)),
    ],
)
def check_ex_08_3(rng: ex.Rng) -> ex.Case:
    """Check Winograd's F(2x2, 3x3): `fn(data, kernel, multiply)` on a 4x4 tile and a 3x3 kernel.

    Products of data with kernel go through `multiply`, which counts them: 16 are enough for the
    2x2 outputs, the definition takes 36.
    """
    data, kernel = rng.integers(-9, 10, (4, 4)), 2 * rng.integers(-4, 5, (3, 3))
    return _tile_case(data, kernel)


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


def _judge_09_3(got: Any, case: ex.Case) -> str | None:
    dtype = _name(case["stored"])
    return ex.equal_to(_numbers(case["shape"], dtype))(got)


@ex.judged(
    _judge_09_3,
    edges=[_stored(_numbers((8, 100, 30), dtype)) for dtype in ("fp16", "int8")],
    cases=20,
)
def check_ex_09_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(stored, shape)`: FRACTAL_NZ back to an array of `shape`; padding holds garbage."""
    return _stored(_draw_array(rng)["x"])


def _answer_09_4(index: tuple[int, ...], shape: tuple[int, ...], c0: int) -> int:
    return int(address(address_map("FRACTAL_Z", shape, "fp16", c0=c0), index))


@ex.against(_answer_09_4)
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
    expected = pack(address_map("FRACTAL_NZ", x.shape, _name(x)), x)
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
    return _draw_array(rng)

"""Checks of chapter 9: ND to FRACTAL_NZ and back, the address of a weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.checks.core import (
    DEFAULT_SEED,
    Case,
    CheckResult,
    check_against,
    check_property,
    equal_to,
)
from ascend_lab.layout import address, address_map, pack

TYPES = {"int8": np.int8, "fp16": np.float16, "fp32": np.float32}
SIDES = (1, 7, 15, 16, 17, 30, 31, 32, 33, 50, 100)
GARBAGE = 99
"""Stands in the padding of storage that is to be read: padding may hold anything."""


def check_ex_09_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(x)`: an array of two or more axes in FRACTAL_NZ, (..., N1, M1, 16, C0)."""

    def reference(x: NDArray[Any]) -> NDArray[Any]:
        return pack(address_map("FRACTAL_NZ", x.shape, _name(x)), x)

    def judge(got: Any, case: Case) -> str | None:
        expected = reference(case["x"])
        wrong = equal_to(expected)(got)
        if wrong is None and got.dtype != expected.dtype:
            wrong = f"of {got.dtype}, expected {expected.dtype}"
        return wrong

    edges = [
        {"x": _numbers((1, 1), "fp16")},
        {"x": _numbers((16, 32), "int8")},
        {"x": _numbers((8, 100, 30), "fp16")},
        {"x": _numbers((8, 100, 30), "int8")},
    ]
    return check_property("ex_09_2", fn, judge, _draw_array, edge_cases=edges, cases=20, seed=seed)


def check_ex_09_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(stored, shape)`: FRACTAL_NZ back to an array of `shape`; padding holds garbage."""

    def draw(rng: np.random.Generator) -> Case:
        return _stored(_draw_array(rng)["x"])

    def judge(got: Any, case: Case) -> str | None:
        dtype = _name(case["stored"])
        return equal_to(_numbers(case["shape"], dtype))(got)

    edges = [_stored(_numbers((8, 100, 30), dtype)) for dtype in ("fp16", "int8")]
    return check_property("ex_09_3", fn, judge, draw, edge_cases=edges, cases=20, seed=seed)


def check_ex_09_4(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(index, shape, c0)`: the address of weight (n, c, h, w) in FRACTAL_Z."""

    def reference(index: tuple[int, ...], shape: tuple[int, ...], c0: int) -> int:
        return int(address(address_map("FRACTAL_Z", shape, "fp16", c0=c0), index))

    def draw(rng: np.random.Generator) -> Case:
        sides = (1, 70), (1, 70), (1, 8), (1, 8)
        shape = tuple(int(rng.integers(low, high)) for low, high in sides)
        index = tuple(int(rng.integers(0, n)) for n in shape)
        return {"index": index, "shape": shape, "c0": int(rng.choice((8, 16, 32)))}

    return check_against("ex_09_4", fn, reference, draw, seed=seed)


def _name(x: NDArray[Any]) -> str:
    return next(name for name, dtype in TYPES.items() if x.dtype == dtype)


def _numbers(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return numbers 1 .. 97 in turn: none is 0 and none is GARBAGE."""
    return (np.arange(math.prod(shape)) % 97 + 1).reshape(shape).astype(TYPES[dtype])


def _draw_array(rng: np.random.Generator) -> Case:
    lead = [int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3)))]
    shape = (*lead, *(int(n) for n in rng.choice(SIDES, 2)))
    return {"x": _numbers(shape, str(rng.choice(list(TYPES))))}


def _stored(x: NDArray[Any]) -> Case:
    stored = pack(address_map("FRACTAL_NZ", x.shape, _name(x)), x)
    return {"stored": np.where(stored == 0, stored.dtype.type(GARBAGE), stored), "shape": x.shape}

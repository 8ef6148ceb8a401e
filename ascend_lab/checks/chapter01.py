"""Checks of chapter 1: bracket and upgrade, masks and repeats, divergence, coalescing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.checks.core import (
    DEFAULT_SEED,
    Case,
    CheckResult,
    check_against,
    check_property,
    show,
)
from ascend_lab.errors import MachineError
from ascend_lab.machines import VectorOp, plain_ops, run_vector, units_touched

WARP = 32
SECTOR_BYTES = 32
ITEM_BYTES = 4
FEW_ELEMENTS = 1000


def check_ex_01_1(fn: Any, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(compute, move, wait) -> (low, high, upgrade, gain)`."""

    def make_case(rng: np.random.Generator) -> Case:
        values = rng.integers(1, 1000, 3)
        if rng.random() < 0.25:
            values[rng.integers(3)] = values.max()
        return dict(zip(("compute", "move", "wait"), map(int, values), strict=True))

    edge_cases = [
        {"compute": 100, "move": 30, "wait": 20},
        {"compute": 10, "move": 100, "wait": 90},
        {"compute": 7, "move": 7, "wait": 7},
    ]
    return check_against(
        "ex_01_1",
        fn,
        _bracket_and_upgrade,
        make_case,
        rel_tol=1e-9,
        edge_cases=edge_cases,
        seed=seed,
    )


def _bracket_and_upgrade(compute: int, move: int, wait: int) -> tuple[float, float, str, float]:
    parts = {"compute": compute, "move": move, "wait": wait}
    low, high = max(parts.values()), sum(parts.values())
    gains = {name: low / max({**parts, name: parts[name] / 2}.values()) for name in parts}
    best = max(gains, key=lambda name: gains[name])
    return (low, high, best, gains[best]) if gains[best] > 1 else (low, high, "none", 1.0)


def check_ex_01_2(fn: Any, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(n, x, y, z)`: vector instructions for z = x + y on float32, few of them."""

    def make_case(rng: np.random.Generator) -> Case:
        return _add_case(int(rng.integers(1, 2000)))

    edges = [_add_case(n) for n in (FEW_ELEMENTS, 1, 63, 64, 65, 1024)]
    rng = np.random.default_rng(seed)

    def judge(got: Any, case: Case) -> str | None:
        return _judge_add(got, case, rng)

    return check_property("ex_01_2", fn, judge, make_case, edge_cases=edges, seed=seed)


def _add_case(n: int) -> Case:
    room = -(-n // 8) * 8 + 8
    return {"n": n, "x": 0, "y": room, "z": 2 * room}


def _judge_add(got: Any, case: Case, rng: np.random.Generator) -> str | None:
    n, x, y, z = (case[name] for name in ("n", "x", "y", "z"))
    if not isinstance(got, Sequence) or not all(isinstance(op, VectorOp) for op in got):
        return "expected a list of VectorOp"
    before = rng.integers(-9, 10, z + y).astype(np.float32)
    expected = before.copy()
    expected[z : z + n] = before[x : x + n] + before[y : y + n]
    try:
        after = run_vector(got, before)
    except MachineError as error:
        return f"which the vector unit refuses: {error}"
    wrong = np.flatnonzero(after != expected)
    if wrong.size:
        where = wrong[0] - z
        place = f"z[{where}]" if where >= 0 else f"element {wrong[0]} of the buffer"
        return f"after which {place} is {show(after[wrong[0]])}, not {show(expected[wrong[0]])}"
    limit = 1 if n == FEW_ELEMENTS else len(plain_ops("add", n, z, x, y, "float32"))
    if len(got) > limit:
        return f"which is {len(got)} instructions where {limit} will do"
    return None


def check_ex_01_3(fn: Any, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(mask, then, other)`: instructions that the warps of a branch issue."""

    def make_case(rng: np.random.Generator) -> Case:
        mask = rng.random(int(rng.integers(1, 200))) < rng.choice([0.0, 0.02, 0.5, 1.0])
        return {"mask": mask, "then": int(rng.integers(0, 9)), "other": int(rng.integers(0, 9))}

    edge_cases = [
        {"mask": np.ones(32, bool), "then": 3, "other": 5},
        {"mask": np.arange(64) == 40, "then": 3, "other": 5},
        {"mask": np.ones(33, bool), "then": 2, "other": 7},
    ]
    return check_against("ex_01_3", fn, _warp_issues, make_case, edge_cases=edge_cases, seed=seed)


def _warp_issues(mask: Any, then: int, other: int) -> int:
    issues = 0
    for start in range(0, len(mask), WARP):
        lanes = mask[start : start + WARP]
        issues += 1 + then * bool(np.any(lanes)) + other * bool(not np.all(lanes))
    return issues


def check_ex_01_4(fn: Any, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(stride, offset)`: sectors one warp touches when lane i loads x[stride*i+offset]."""

    def make_case(rng: np.random.Generator) -> Case:
        return {"stride": int(rng.integers(0, 40)), "offset": int(rng.integers(0, 20))}

    edge_cases = [
        {"stride": 1, "offset": 0},
        {"stride": 1, "offset": 1},
        {"stride": 0, "offset": 5},
        {"stride": 8, "offset": 7},
    ]
    return check_against("ex_01_4", fn, _sectors, make_case, edge_cases=edge_cases, seed=seed)


def _sectors(stride: int, offset: int) -> int:
    address = ITEM_BYTES * (stride * np.arange(WARP) + offset)[None, :]
    return int(units_touched(address, np.ones_like(address, bool), SECTOR_BYTES)[0])

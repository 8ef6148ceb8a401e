"""Checks of chapter 2: a route for convolution data, a missing flag, the largest double buffer."""

from __future__ import annotations

from itertools import pairwise
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
from ascend_lab.chip import DTYPE_BYTES, PRESETS, load_chip
from ascend_lab.isa import Program, c0_of, sanitize
from ascend_lab.sim import execute

TILE = 256
"""Elements of one tile in exercise 2.2."""

PROGRAM_SEEDS = (None, 1, 2, 3)
"""Orders of the pipes in which exercise 2.2 is run for values."""


def img2col_hops(
    chip_name: str, c1: int, height: int, width: int, kernel: int, stride: int
) -> list[tuple[str, str, str, int]]:
    """Return the moves (source, destination, pipe, bytes) that bring an im2col matrix to L0A.

    Only load3d unfolds, and only from L1 to L0A, so the image (C1, H, W, 16) crosses GM->L1 once
    and the matrix, of 16-row fractals, crosses L1->L0A.
    """
    chip = load_chip(chip_name)
    out_height, out_width = ((size - kernel) // stride + 1 for size in (height, width))
    rows = -(-out_height * out_width // 16) * 16
    sizes = {("GM", "L1"): c1 * height * width * 32, ("L1", "L0A"): rows * c1 * kernel**2 * 32}
    return [(src, dst, chip.path(src, dst).pipe, size) for (src, dst), size in sizes.items()]


def _judge_hops(hops: Any, case: Case) -> str | None:
    """Judge a route hop by hop, without giving it away."""
    shape = isinstance(hops, list | tuple) and all(
        isinstance(hop, list | tuple) and len(hop) == 4 for hop in hops
    )
    if not shape or not hops:
        return "expected a list of tuples (source, destination, pipe, size_bytes)"
    chip = load_chip(case["chip_name"])
    for src, dst, pipe, _ in hops:
        if (src, dst) not in chip.paths:
            return f"but {chip.name} has no path {src}->{dst}"
        if pipe != chip.paths[src, dst].pipe:
            return f"but {src}->{dst} is not a path of pipe {pipe}"
    ends = [(hop[0], hop[1]) for hop in hops]
    chained = all(first[1] == second[0] for first, second in pairwise(ends))
    if ends[0][0] != "GM" or ends[-1][1] != "L0A" or not chained:
        return "expected a chain that starts in GM and ends in L0A"
    expected = img2col_hops(**case)
    if ends != [hop[:2] for hop in expected]:
        return "but on this way nothing unfolds the image: which instruction does, and from where?"
    for hop, right in zip(hops, expected, strict=True):
        if isinstance(hop[3], bool) or hop[3] != right[3]:
            return f"but {right[3]} bytes cross {hop[0]}->{hop[1]}"
    return None


def check_ex_02_1(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check the moves of an im2col tile against the paths of the chip."""

    def draw(rng: np.random.Generator) -> Case:
        kernel = int(rng.integers(1, 6))
        return {
            "chip_name": str(rng.choice(PRESETS)),
            "c1": int(rng.integers(1, 5)),
            "height": kernel + int(rng.integers(0, 12)),
            "width": kernel + int(rng.integers(0, 12)),
            "kernel": kernel,
            "stride": int(rng.integers(1, 4)),
        }

    easy: Case = {
        "chip_name": "Ascend910A", "c1": 1, "height": 6, "width": 6, "kernel": 3, "stride": 1
    }  # fmt: skip
    return check_property("ex_02_1", fn, _judge_hops, draw, edge_cases=[easy], seed=seed)


def _judge_relu(program: Any, case: Case) -> str | None:
    """Judge a program y = max(x, 0) over `tiles` tiles: ordered by flags, right in every order."""
    if not isinstance(program, Program):
        return "expected the Program that k.finish() returns"
    chip = load_chip("Toy")
    if any(instruction.op == "barrier" for instruction, _ in program.instructions()):
        return "use a flag: a barrier stops all pipes"
    findings = sanitize(program, chip)
    if findings:
        return f"the sanitizer finds {show(str(findings[0]), 110)}"
    x = np.random.default_rng(case["tiles"]).standard_normal(case["tiles"] * TILE)
    x = x.astype(np.float16)
    for order in PROGRAM_SEEDS:
        y = execute(program, {"x": x}, chip, seed=order)["y"]
        if not np.array_equal(y, np.maximum(x, 0)):
            return f"expected y = max(x, 0), wrong with execute(..., seed={order})"
    return None


def check_ex_02_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check that the in-place relu program keeps all its dependences by flags alone."""
    return check_property(
        "ex_02_2",
        fn,
        _judge_relu,
        lambda rng: {"tiles": int(rng.integers(1, 9))},
        edge_cases=[{"tiles": 2}],
        cases=4,
        seed=seed,
    )


def largest_k(chip_name: str, dtype: str, m: int, n: int) -> int:
    """Return the largest k, a multiple of C0, with two A and two B tiles in L0 and C in L0C."""
    chip, itemsize, c0 = load_chip(chip_name), DTYPE_BYTES[dtype], c0_of(dtype)
    if 4 * m * n > chip.buffers["L0C"]:
        return 0
    room = min(chip.buffers["L0A"] // (2 * m), chip.buffers["L0B"] // (2 * n)) // itemsize
    return room - room % c0


def check_ex_02_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check the depth of the largest double-buffered tile."""

    def draw(rng: np.random.Generator) -> Case:
        return {
            "chip_name": str(rng.choice(PRESETS)),
            "dtype": str(rng.choice(["fp16", "int8"])),
            "m": 16 * int(rng.integers(1, 40)),
            "n": 16 * int(rng.integers(1, 40)),
        }

    edges: list[Case] = [
        {"chip_name": "Ascend910A", "dtype": "fp16", "m": 128, "n": 256},
        {"chip_name": "Toy", "dtype": "int8", "m": 256, "n": 256},
        {"chip_name": "Toy", "dtype": "fp16", "m": 16, "n": 192},
    ]
    return check_against("ex_02_3", fn, largest_k, draw, edge_cases=edges, seed=seed)

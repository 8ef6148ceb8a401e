"""Checks of chapter 3: a clearing tile, bytes per level, what memory delivers, alignment.

Tiles, bytes and nests are judged by what a real program counts, not by a formula.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import KernelBuilder, Launch, Part, binding_of
from ascend_lab.kernels import GemmSchedule, GemmShape, gemm_launch
from ascend_lab.lab.checks import core as ex
from ascend_lab.sim import Traffic, analyse

STEP = 16


DEPTH = 64


def _rates(to_l0a: float, to_l0b: float, to_l1: float, l0c_bytes: int) -> ex.Case:
    return {"to_l0a": to_l0a, "to_l0b": to_l0b, "to_l1": to_l1, "l0c_bytes": l0c_bytes}


def _judge_tile(got: Any, case: ex.Case) -> str | None:
    chip = _chip(case)
    if got is not None and (isinstance(got, bool) or not isinstance(got, int | np.integer)):
        return "expected a whole number or None"
    if got is None:
        side = next((t for t in range(STEP, 1024, STEP) if _missing(chip, t) is None), None)
        return None if side is None else f"but a tile of {side} x {side} fits and clears both"
    if got < STEP or got % STEP:
        return f"expected a positive multiple of {STEP}"
    wrong = _missing(chip, int(got))
    if wrong is not None:
        return f"but {wrong}"
    if got > STEP and _missing(chip, int(got) - STEP) is None:
        return f"but {got - STEP} is enough"
    return None


def _chip(case: ex.Case) -> Chip:
    """Return an Ascend910A with the rates and the L0C of the case, and an L2 that never limits."""
    base = load_chip("Ascend910A")
    rates = {("L1", "L0A"): "to_l0a", ("L1", "L0B"): "to_l0b", ("GM", "L1"): "to_l1"}
    changed = {p: replace(base.path(*p), rate_bytes_per_cycle=case[r]) for p, r in rates.items()}
    return replace(
        base, paths={**base.paths, **changed}, buffers={**base.buffers, "L0C": case["l0c_bytes"]}
    )


def _missing(chip: Chip, side: int) -> str | None:
    """Say why a square tile does not do: it overflows, or some wires need longer than the cube."""
    shape = GemmShape(side, DEPTH, side, "fp16", "fp16")
    try:
        launch = gemm_launch(shape, chip, GemmSchedule(side, STEP, side, 1, 1, 1))
    except CapacityError as error:
        return f"it does not fit: {error}"
    moved = analyse(launch, chip).path_bytes
    cube = side * side * DEPTH / chip.macs_per_cycle("fp16")
    cycles = {p: moved[p] / chip.path(*p).rate_bytes_per_cycle for p in moved if p[0] != "L0C"}
    into = {"L0": cycles["L1", "L0A"] + cycles["L1", "L0B"], "L1": cycles["GM", "L1"]}
    for level, needed in into.items():
        if needed > cube * (1 + 1e-9):
            return (
                f"with tiles of {side} the wires into {level} need {needed:.1f} cycles "
                f"while the cube needs {cube:.1f}, both for {DEPTH} steps of k"
            )
    return None


def _traffic(shape: GemmShape, tile_m: int, tile_n: int, chip: Chip) -> Traffic:
    """Count what the program on one core moves."""
    return analyse(gemm_launch(shape, chip, GemmSchedule(tile_m, STEP, tile_n, 4, 1, 1)), chip)


def _counted(m: int, k: int, n: int, tile_m: int, tile_n: int) -> tuple[int, int, int]:
    chip = load_chip("Ascend910A")
    moved = _traffic(GemmShape(m, k, n), tile_m, tile_n, chip).path_bytes
    return moved["L1", "L0A"], moved["L1", "L0B"], moved["GM", "L1"]


Nodes = list[tuple[Any, ...]]
"""Nodes ("read", tensor, size_bytes, loops) and ("loop", name, count, body)."""


def _fetched(nest: Nodes, l2_bytes: int) -> int:
    """Write a nest as a program on one core and return what memory delivers for it."""
    base = load_chip("Ascend910A")
    chip = replace(base, l2=replace(base.l2, size_bytes=l2_bytes))
    k = KernelBuilder("nest", chip)
    tile = k.buffer("tile", "UB", "fp16", 4096)

    def write(nodes: Nodes, around: dict[str, tuple[Any, int]]) -> None:
        for kind, name, size, rest in nodes:
            if kind == "loop":
                with k.loop(name, size) as at:
                    write(rest, {**around, name: (at, size)})
                continue
            pieces = math.prod(around[loop][1] for loop in rest)
            tensor, place, step = k.tensor(name, "fp16", pieces * size // 2), 0, size // 2
            for loop in rest:
                place, step = around[loop][0] * step + place, step * around[loop][1]
            k.copy(tile.region(0, size // 2), tensor.region(place, size // 2))

    write(nest, {})
    launch = Launch("nest", (Part(k.finish(), (binding_of({}),)),))
    return analyse(launch, chip).memory_read_bytes


def _sizes(nodes: Nodes, inside: dict[str, int]) -> list[int]:
    """Return the bytes that each list of nodes touches in one pass, the whole nest last."""
    found, total = list[int](), 0
    for kind, name, size, rest in nodes:
        if kind == "loop":
            found += _sizes(rest, {})
            total += _sizes(rest, {**inside, name: size})[-1]
        else:
            total += size * math.prod(inside.get(loop, 1) for loop in rest)
    return [*found, total]


def _nest(rng: ex.Rng, depth: int, around: tuple[str, ...] = ()) -> Nodes:
    """Draw reads, and a loop or two with a nest of its own inside."""
    nodes: Nodes = []
    for _ in range(int(rng.integers(1, 3))):
        loops = tuple(loop for loop in around if rng.random() < 0.5)
        size = 32 * int(rng.integers(1, 200))
        nodes.append(("read", f"t{rng.integers(1 << 60)}", size, loops))
    for _ in range(int(rng.integers(1, 3)) if depth else 0):
        name = f"i{rng.integers(1 << 60)}"
        body = _nest(rng, depth - 1, (*around, name))
        nodes.insert(
            int(rng.integers(len(nodes) + 1)), ("loop", name, int(rng.integers(2, 9)), body)
        )
    return nodes


CLIFF: Nodes = [
    ("loop", "strip", 4, [
        ("read", "a", 1024, ("strip",)),
        ("loop", "column", 8, [("read", "w", 4096, ("column",))]),
    ]),
]  # fmt: skip
"""Four strips of rows that pass over all weights, 33,792 bytes a pass."""


def _worst_side(limit: int, dtype: str) -> int:
    return max(side for side in range(1, limit + 1) if useful_share(side, dtype) < 0.5)


def useful_share(side: int, dtype: str) -> float:
    """Return side cubed over the multiply-accumulates the cube does for it, whole fractals."""
    m1, k1, n1 = GemmShape(side, side, side, dtype).fractals
    m0, k0, n0 = load_chip("Ascend910A").cube_shape(dtype)
    return float(side**3 / (m1 * m0 * k1 * k0 * n1 * n0))


@ex.judged(
    _judge_tile,
    edges=[
        _rates(512.0, 256.0, 110.0, 262144),  # Ascend910A
        _rates(256.0, 128.0, 80.5, 131072),  # a tile of 208 would not fit
        _rates(512.0, 256.0, 128.0, 65536),  # exactly on the ridge, and it just fits
        _rates(128.0, 96.0, 900.0, 262144),  # L0 is the narrow place
    ],
)
def check_ex_03_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(to_l0a, to_l0b, to_l1, l0c_bytes)`: side of the smallest clearing square tile."""
    to_a, to_b = (float(rng.uniform(60, 600)) for _ in "ab")
    to_l1 = float(rng.uniform(50, 400))
    return _rates(to_a, to_b, to_l1, 1024 * int(rng.choice([16, 64, 128, 256])))


@ex.against(
    _counted,
    edges=ex.rows(
        "m k n tile_m tile_n", (256, 128, 256, 64, 128), (16, 16, 16, 64, 64), (100, 50, 70, 48, 32)
    ),
)
def check_ex_03_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(m, k, n, tile_m, tile_n)`: bytes a tiled matmul copies into L0A, L0B and L1."""
    m, k, n = (int(side) for side in rng.integers(1, 300, 3))
    tile_m, tile_n = (16 * int(side) for side in rng.integers(1, 9, 2))
    return {"m": m, "k": k, "n": n, "tile_m": tile_m, "tile_n": tile_n}


@ex.against(
    _worst_side,
    edges=[{"limit": limit, "dtype": d} for d in ("fp16", "int8") for limit in (1, 16, 17, 300)],
)
def check_ex_03_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(limit, dtype)`: largest side of a cubic matmul that wastes over half the cube."""
    return {"limit": int(rng.integers(1, 90)), "dtype": str(rng.choice(["fp16", "int8"]))}


@ex.against(
    _fetched,
    edges=[{"nest": CLIFF, "l2_bytes": size} for size in (33791, 33792, 36863, 36864, 1023)],
    cases=30,
)
def check_ex_03_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(nest, l2_bytes)`: bytes that a loop nest fetches from device memory."""
    nest = _nest(rng, int(rng.integers(1, 4)))
    edge = int(rng.choice(_sizes(nest, {})))
    return {"nest": nest, "l2_bytes": edge - int(rng.integers(0, 2))}

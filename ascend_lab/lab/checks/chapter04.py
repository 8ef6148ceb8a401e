"""Checks of chapter 4: repair a deadlocked kernel, power in the (max, +) algebra, a simulator."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError, SyncError
from ascend_lab.isa import KernelBuilder, Program, parse_program, sanitize
from ascend_lab.lab.checks import core as ex
from ascend_lab.sim import Compiled, Surroundings, compile_program, execute, run_reference, simulate
from ascend_lab.sim.compiled import SET, WAIT, WORK, Nest

Matrix = NDArray[np.float64]


Product = Callable[[Matrix, Matrix], Matrix]


TILE = 1024
"""Elements of one tile of the ping-pong kernel."""


SLACK = 1.05
"""A repaired kernel may take this many times the cycles of ours, not more."""


def max_plus_product(a: Matrix, b: Matrix) -> Matrix:
    """Return the (max, +) product, c_ij = max_k (a_ik + b_kj), of two square matrices."""
    c: Matrix = (a[:, :, None] + b[None, :, :]).max(axis=1)
    return c


def _counting(product: Product) -> Product:
    """Return `product` with an attribute `calls` that counts (a copied function is itself)."""

    def counted(a: Matrix, b: Matrix) -> Matrix:
        counted.__dict__["calls"] += 1
        return product(a, b)

    counted.__dict__["calls"] = 0
    counted.__name__ = counted.__qualname__ = "product"
    return counted


def _matrix(rng: np.random.Generator) -> Matrix:
    size = int(rng.integers(1, 6))
    a = rng.integers(0, 500, (size, size)).astype(np.float64)
    a[rng.random((size, size)) < 0.4] = -np.inf
    return a


def _judge_power(got: Any, case: ex.Case) -> str | None:
    a, n, calls = case["a"], case["n"], case["product"].__dict__["calls"]
    case["product"].__dict__["calls"] = 0
    expected = a
    for _ in range(n - 1):
        expected = max_plus_product(expected, a)
    wrong = ex.equal_to(expected)(got)
    if wrong is not None:
        return wrong
    allowed = 2 * math.floor(math.log2(n)) + 2
    return None if calls <= allowed else f"with {calls} products, expected at most {allowed}"


def _judge_ping_pong(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, Program):
        return "expected a Program (end with k.finish())"
    chip, pairs = load_chip("Toy"), case["pairs"]
    tensors = sorted((t.name, t.dtype, t.elements) for t in got.tensors)
    size = 2 * pairs * TILE
    if tensors != [("x", "fp16", size), ("y", "fp16", size)]:
        return f"expected fp16 tensors x and y of {size} elements"
    findings = sanitize(got, chip)
    if findings:
        worst = next((f for f in findings if f.kind == "deadlock"), findings[0])
        return f"expected no findings, the sanitizer has {len(findings)}, for example {worst}"
    return _wrong_values(got, chip, size) or _too_slow(got, chip, pairs)


def _wrong_values(program: Program, chip: Chip, size: int) -> str | None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float16)
    for order in (None, 1, 2):
        try:
            y = execute(program, {"x": x}, chip, seed=order)["y"]
        except AscendLabError as error:
            return f"expected a program that runs, but: {error}"
        wrong = int((y != np.maximum(x, 0)).sum())
        if wrong:
            return f"expected y = relu(x), {wrong} of {size} elements differ"
    return None


def _too_slow(program: Program, chip: Chip, pairs: int) -> str | None:
    cycles, ours = simulate(program, chip).cycles, _our_cycles(pairs)
    if cycles > SLACK * ours:
        return f"expected tiles that overlap: {cycles} cycles, {ours} are enough"
    return None


@cache
def _our_cycles(pairs: int) -> int:
    return simulate(_ping_pong(pairs), load_chip("Toy")).cycles


def _ping_pong(pairs: int) -> Program:
    """Return relu in place on two slots, flags by hand: the kernel the exercise asks for."""
    k = KernelBuilder("ping_pong", load_chip("Toy"))
    x, y = (k.tensor(name, "fp16", 2 * pairs * TILE) for name in "xy")
    slots = [k.buffer(f"slot{s}", "UB", "fp16", TILE) for s in (0, 1)]
    for s in (0, 1):
        k.set_flag("MTE3", "MTE2", s)
    with k.loop("i", pairs) as i:
        for s, slot in enumerate(slots):
            at, lanes = (2 * i + s) * TILE, slot.region(0, (TILE // 128, 128))
            k.wait_flag("MTE3", "MTE2", s)
            k.copy(slot.region(), x.region(at, TILE))
            k.set_flag("MTE2", "V", s)
            k.wait_flag("MTE2", "V", s)
            k.vector("vrelu", lanes, lanes)
            k.set_flag("V", "MTE3", s)
            k.wait_flag("V", "MTE3", s)
            k.copy(y.region(at, TILE), slot.region())
            k.set_flag("MTE3", "MTE2", s)
    for s in (0, 1):
        k.wait_flag("MTE3", "MTE2", s)
    return k.finish()


KINDS = {WORK: "work", SET: "set", WAIT: "wait"}


class Queues(dict[str, list[tuple[Any, ...]]]):
    """The steps of each pipe of a kernel, loops unrolled; `cycles` is what `simulate` says."""

    cycles: int | None = None


def _queues(compiled: Compiled) -> Queues:
    """Return the queues of a compiled program."""
    queues = Queues({pipe: [] for pipe in compiled.pipes})

    def visit(nodes: tuple[int | Nest, ...]) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                for _ in range(compiled.counts[node.loop]):
                    visit(node.body)
                continue
            step, cycles = compiled.steps[node], compiled.cycles[node]
            flag = () if step.kind == WORK else (step.event,)
            more = (compiled.latency[node],) if step.kind == SET else ()
            queues[compiled.pipes[step.pipe]].append((KINDS[step.kind], *flag, cycles, *more))

    visit(compiled.tree)
    with suppress(SyncError):
        queues.cycles = run_reference(compiled)[0]
    return queues


def _kernel_case(rounds: int, depths: tuple[int, int], works: int, damaged: bool) -> ex.Case:
    """Return the queues of a load, `works` vector instructions and a store, `rounds` times."""
    chip = load_chip("Toy")
    k = KernelBuilder("kernel", chip)
    x, y = (k.tensor(name, "fp16", 512 * rounds) for name in "xy")
    x_in = k.queue("x_in", "UB", "fp16", 512, src="MTE2", dst="V", depth=depths[0])
    y_out = k.queue("y_out", "UB", "fp16", 512, src="V", dst="MTE3", depth=depths[1])
    with k.loop("i", rounds) as i:
        k.copy(x_in.alloc().region(), x.region(i * 512, 512))
        x_in.enqueue()
        tile, out = x_in.dequeue().region(0, (4, 128)), y_out.alloc().region(0, (4, 128))
        for _ in range(works):
            k.vector("vrelu", out, tile)
        x_in.free()
        y_out.enqueue()
        k.copy(y.region(i * 512, 512), y_out.dequeue().region())
        y_out.free()
    text = str(k.finish())
    start = next(line for line in text.splitlines() if line.startswith("set_flag V>MTE2"))
    program = parse_program(text.replace(f"{start}\n", "", 1) if damaged else text)
    return {"queues": _queues(compile_program(program, chip, Surroundings()))}


@ex.judged(_judge_ping_pong, cases=6)
def check_ex_04_2(rng: ex.Rng) -> ex.Case:
    """Check a repaired ping-pong kernel: `fn(pairs)` returns a `Program` for the Toy chip.

    No finding of the sanitizer, y = relu(x) in every order the flags allow, and still overlapped:
    barriers everywhere are no repair.
    """
    return {"pairs": int(rng.integers(1, 7))}


@ex.judged(
    _judge_power,
    edges=[
        {
            "product": _counting(max_plus_product),
            "a": np.array([[3.0, -np.inf], [5.0, 4.0]]),
            "n": n,
        }
        for n in (1, 2, 3, 64, 127)
    ],
)
def check_ex_04_3(rng: ex.Rng) -> ex.Case:
    """Check a power: `fn(product, a, n)` returns the n-th (max, +) power of a, n >= 1.

    At most 2 log2(n) + 2 calls of `product` are allowed: a loop over n is right, and too slow.
    """
    n = int(rng.integers(1, 2 ** int(rng.integers(2, 12))))
    return {"product": _counting(max_plus_product), "a": _matrix(rng), "n": n}


@ex.judged(
    lambda got, case: ex.equal_to(case["queues"].cycles)(got),
    edges=[
        _kernel_case(3, (1, 1), 1, damaged=False),
        _kernel_case(8, (2, 2), 3, damaged=False),
        _kernel_case(2, (1, 2), 1, damaged=True),
    ],
    cases=20,
)
def check_ex_04_6(rng: ex.Rng) -> ex.Case:
    """Check `fn(queues)`: the last cycle of a kernel, or None if it never ends."""
    rounds, works = int(rng.integers(1, 10)), int(rng.integers(1, 6))
    depths = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return _kernel_case(rounds, depths, works, damaged=bool(rng.random() < 0.2))

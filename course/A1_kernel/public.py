"""A1: cases that students see, the plain kernel, two bounds, and the judge.

The full mark stands at 1.02 times `vector_bound` of the formula in fp32: no schedule of that
formula beats it, a kernel that computes in another way may. No kernel at all beats `least_cycles`:
every byte of x comes from memory once. What x holds is drawn when the answer is there.
"""

from functools import cache

import numpy as np

from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.course.assignment import Case, Judged, draw
from ascend_lab.course.sandbox import Call
from ascend_lab.errors import AscendLabError, ProgramError
from ascend_lab.machine.chip import DTYPE_BYTES, load_chip
from ascend_lab.machine.isa import (
    KernelBuilder,
    Launch,
    Part,
    check_program,
    parse_program,
    sanitize,
)
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators import dsl as te

TOLERANCE = {"fp16": 4e-3, "fp32": 1e-4}
ORDERS = 5
FEW_ROWS = 64
NAMES = ("fits", "values", "sanitizer", "orders", "quicker")
TWISTS = {
    "relu": {
        "says": "a step behind the norm: `y = max(0, ...)`, the norm without its negative values. "
        "`plain`, `wanted` and the bound in `public.py` have it."
    }
}
"""What a term may add to the task: no argument of `kernel` says it, the hand-out does."""
CHIP = """\
name = "{name}"
summary = "Toy with cores, UB and memory of its own."
base = "Toy"
[core]
count = {{ value = {cores}, source = "TEAM", trust = "assumed" }}
vector_per_core = {{ value = 1, source = "TEAM", trust = "assumed" }}
[buffer]
UB.size_bytes = {{ value = {ub_bytes}, source = "TEAM", trust = "assumed" }}
[memory]
rate_bytes_per_s = {{ value = {rate}, source = "TEAM", trust = "assumed" }}
latency_cycles = {{ value = {latency}, source = "TEAM", trust = "assumed" }}
"""


def instance(rng, twist):
    """Return a student's own chip, and which norm the term asks for."""
    cores = int(rng.choice([2, 3, 4]))
    return {
        "cores": cores,
        "chip.toml": CHIP.format(
            name="ToyA1",
            cores=cores,
            ub_bytes=int(rng.choice([36, 38, 40])) * 1024,
            rate=cores * float(rng.choice([19e9, 20e9, 21e9])),
            latency=int(rng.integers(180, 260)),
        ),
        "norm": twist.get("norm", "rms"),
        "eps": float(twist.get("eps", 1e-5)),
        "adds": twist.get("adds", ""),
    }


def case(drawn, rows, width, dtype="fp16", timed=False, chip=None):
    """Return the case of one shape."""
    text = chip or drawn["chip.toml"]
    arguments = {"chip_file": "chip.toml", "rows": rows, "width": width, "dtype": dtype,
                 "norm": drawn["norm"], "eps": drawn["eps"]}  # fmt: skip
    call = Call("kernel", arguments, {"chip.toml": text})
    known = {"chip": text, "adds": drawn["adds"]}
    return Case(f"{rows} x {width} {dtype}", call, known, timed)


def cases(drawn, rng):
    """Return the public cases: small ones for the values, three for the cycles, of rows a core."""
    del rng
    cores = drawn["cores"]
    return [case(drawn, 4, 64), case(drawn, 5, 128, "fp32"), case(drawn, 2, 12800, "fp32"),
            case(drawn, 160 * cores, 256, timed=True), case(drawn, 110 * cores, 336, timed=True),
            case(drawn, 60 * cores, 512, "fp32", timed=True)]  # fmt: skip


@cache
def chip_of(text):
    """Read a chip from its text."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chip.toml")
        path.write_text(text, "utf-8")
        return load_chip(path)


def shares(rows, cores):
    """Return (first row, rows) of each core."""
    ends = [rows * i // cores for i in range(cores + 1)]
    return [(a, b - a) for a, b in zip(ends, ends[1:]) if b > a]


def plain(chip, rows, width, dtype, norm, eps, adds=""):
    """Return the programs of the hand-out, one a core; a width in whole repeats of 64 lanes."""
    width = -(-width // 64) * 64
    return [one_core(chip, rows, width, dtype, norm, eps, adds, *share)
            for share in shares(rows, chip.core_count)]  # fmt: skip


def one_core(chip, rows, width, dtype, norm, eps, adds, first, count):
    """Return a program that does a row at a time, in pieces; everything waits for everything."""
    k = KernelBuilder("plain", chip)
    x, y = (k.tensor(name, dtype, rows * width) for name in "xy")
    size = min(width, 512)
    pieces = [(start, min(size, width - start)) for start in range(0, width, size)]
    given = k.buffer("given", "UB", dtype, size)
    wide, square = (k.buffer(name, "UB", "fp32", size) for name in ("wide", "square"))
    part, spread = (k.buffer(name, "UB", "fp32", few) for name, few in (("part", 64), ("one", 8)))

    def load(row, start, few):
        k.copy(given.region(0, few), x.region((row + first) * width + start, few))
        k.barrier()
        if dtype == "fp16":
            k.each("vconv", few, (wide, 0), (given, 0))
        else:
            k.each("vmuls", few, (wide, 0), (given, 0), scalar=1.0)

    with k.loop("row", count) as row:
        k.vector("vdup", part.region(0, (1, 64)), scalar=0.0)
        for start, few in pieces:
            load(row, start, few)
            if norm == "rms":
                k.each("vmul", few, (square, 0), (wide, 0), (wide, 0))
            else:
                k.each("vabs", few, (square, 0), (wide, 0))
            for lane in range(0, few, 64):
                k.each("vadd", 64, (part, 0), (part, 0), (square, lane))
        k.vector("vcadd", part.region(0, 1), part.region(0, (1, 64)))
        one = part.region(0, (1, 1))
        k.vector("vmuls", one, one, scalar=1 / width)
        k.vector("vadds", one, one, scalar=eps)
        k.vector("vrsqrt" if norm == "rms" else "vrec", one, one)
        k.vector("vbrcb", spread.region(0, (1, 8)), part.region(0, 1))
        for start, few in pieces:
            if len(pieces) > 1:
                load(row, start, few)
            for lane in range(0, few, 64):
                chunk = wide.region(lane, (1, 8, 8))
                k.vector("vmul", chunk, chunk, spread.region(0, (1, 8, 8), (8, 0, 1)))
            if adds == "relu":
                k.each("vrelu", few, (wide, 0), (wide, 0))
            if dtype == "fp16":
                k.each("vconv", few, (given, 0), (wide, 0))
            else:
                k.each("vmuls", few, (given, 0), (wide, 0), scalar=1.0)
            k.barrier()
            k.copy(y.region((row + first) * width + start, few), given.region(0, few))
            k.barrier()
    return k.finish()


def formula(rows, width, dtype, norm, eps, adds=""):
    """Return the norm as an expression in fp32, for the bound."""
    x = te.placeholder((rows, width), dtype, "x")
    wide = te.cast_to(x, "fp32") if dtype == "fp16" else x
    one = te.vmul(wide, wide) if norm == "rms" else te.vabs(wide)
    mean = te.vadds(te.vmuls(te.reduce_sum(one, -1, keepdims=True), 1 / width), eps)
    scale = te.broadcast(te.vrsqrt(mean) if norm == "rms" else te.vrec(mean), x.shape)
    made = te.vmul(wide, scale)
    if adds == "relu":
        made = te.vrelu(made)
    return te.renamed(te.cast_to(made, "fp16") if dtype == "fp16" else made, "y")


def wanted(x, norm, eps, adds=""):
    """Return the values, in double precision."""
    wide = x.astype(np.float64)
    if norm == "rms":
        size = np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    else:
        size = np.abs(wide).mean(-1, keepdims=True) + eps
    made = wide / size
    return np.maximum(made, 0) if adds == "relu" else made


def launch_cycles(chip):
    """Return the cycles of a cold launch, which the scale leaves out."""
    return round(chip.launch_overhead_s * chip.clock_hz)


def least_cycles(chip, rows, width, dtype):
    """Return cycles that no kernel is below: every byte of x comes from memory, once."""
    size_bytes = rows * width * DTYPE_BYTES[dtype]
    return int(size_bytes / chip.shared_rate_bytes_per_cycle("memory", 1))


@cache
def scale(text, adds, *problem):
    """Return the cycles of the plain programs and the bound of the formula, launch left out."""
    chip = chip_of(text)
    bound = vector_bound(formula(*problem, adds), chip) - launch_cycles(chip)
    return simulate(launch_of(plain(chip, *problem, adds)), chip).cycles, bound


def judge(case, answer):
    """Judge the texts of programs: do they fit, are they right, silent, and quick?"""
    found = dict.fromkeys(NAMES, "")
    chip = chip_of(case.known["chip"])
    given = case.call.arguments
    adds = case.known["adds"]
    problem = [given[name] for name in ("rows", "width", "dtype", "norm", "eps")]
    rows, width, dtype, norm, eps = problem
    try:
        launch = read(answer, chip, rows * width, dtype)
    except AscendLabError as error:
        return Judged(dict.fromkeys(found, str(error)))
    x = values_of(rows, width, dtype, draw(case, answer))
    try:
        found["sanitizer"] = "; ".join(map(str, sanitize(launch, chip, filled=["x"])[:2]))
        results = [execute(launch, {"x": x.ravel()}, chip, seed=seed)["y"].reshape(x.shape)
                   for seed in (None, *range(1 if case.timed else ORDERS))]  # fmt: skip
    except AscendLabError as error:
        return Judged(found | dict.fromkeys(("values", "orders", "quicker"), str(error)))
    right = wanted(x, norm, eps, adds)
    said = [difference(got, right, TOLERANCE[dtype]) for got in results]
    found["values"], found["orders"] = said[0], next(filter(None, said[1:]), "")
    if found["values"] or found["orders"]:
        return Judged(found)
    slow, bound = scale(case.known["chip"], adds, *problem)
    cycles = simulate(launch, chip).cycles
    limit = round(slow / 1.5) if case.timed else slow
    if cycles >= limit:
        found["quicker"] = f"{cycles} cycles, fewer than {limit} are asked; the plain: {slow}"
    least = least_cycles(chip, rows, width, dtype)
    return Judged(found, cycles, slow, 1.02 * bound, least)


def launch_of(programs):
    """Return the launch in which every core runs a program of its own."""
    return Launch("norm", tuple(map(Part, programs)))


def values_of(rows, width, dtype, rng):
    """Return x (rows, width): every row has a size and a middle of its own, drawn with `rng`.

    In one row, wherever it stands, squares are beyond fp16, and where rows are few, eps counts in
    another one.
    """
    x = rng.standard_normal((rows, width)) + rng.uniform(-1, 1, (rows, 1))
    x *= np.exp2(rng.uniform(-3, 3, (rows, 1)))
    first, *others = (x[row] for row in rng.permutation(rows))
    first *= 400 / np.abs(first).max()
    if others and rows <= FEW_ROWS:
        others[0] *= 1e-3 / np.abs(others[0]).mean()
    return x.astype({"fp16": np.float16, "fp32": np.float32}[dtype])


def read(answer, chip, elements, dtype):
    """Return the launch of an answer; raise an `AscendLabError` that says why it is none."""
    if not (isinstance(answer, list) and all(isinstance(text, str) for text in answer)):
        needed = "a list of texts of programs, one a core"
        raise ProgramError(needed, type(answer).__name__, "return [str(k.finish()), ...]")
    if not 1 <= len(answer) <= chip.core_count:
        raise ProgramError(
            f"1 to {chip.core_count} programs", f"{len(answer)}", "one for each core"
        )
    programs = [check_program(chip, parse_program(text)) for text in answer]
    for program in programs:
        outside = {b.name: (b.dtype, b.elements) for b in program.buffers if b.space == "GM"}
        if outside != dict.fromkeys("xy", (dtype, elements)):
            needed = f"tensors x and y of {elements} {dtype} and no other in GM"
            raise ProgramError(needed, str(outside), "use k.tensor for these two only")
    return launch_of(programs)


def difference(got, right, tolerance):
    """Return "" where all values are within tolerance, else the first that is not."""
    off = ~(np.abs(got.astype(np.float64) - right) <= tolerance * (1 + np.abs(right)))
    if not off.any():
        return ""
    row, column = np.argwhere(off)[0]
    return f"y[{row}, {column}] is {got[row, column]:.5g}, expected {right[row, column]:.5g}"


def chart(case, answer):
    """Draw the program's timeline as SVG."""
    import io

    from ascend_lab.lab import fig_gantt

    chip = chip_of(case.known["chip"])
    figure = fig_gantt(simulate(launch_of(map(parse_program, answer)), chip))
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]

"""A1: cases that students see, the plain kernel that sets the scale, and the judge.

The bound beside a cost is `vector_bound` of the formula in fp32: no schedule of that formula beats
it. Its copies are certified for every kernel; its vector work is not, a kernel that computes in
another way may need less. The full mark stands at 1.02 times the bound.
"""

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.chip import load_chip
from ascend_lab.course.assignment import Case, Judged
from ascend_lab.course.sandbox import Call
from ascend_lab.errors import AscendLabError
from ascend_lab.isa import KernelBuilder, parse_program, sanitize
from ascend_lab.sim import execute, simulate

TOLERANCE = 4e-3
ORDERS = 5
CHIP = """\
name = "{name}"
summary = "Toy with one core, and memory of its own."
base = "Toy"
[core]
count = {{ value = 1, source = "TEAM", trust = "assumed" }}
vector_per_core = {{ value = 1, source = "TEAM", trust = "assumed" }}
[buffer]
UB.size_bytes = {{ value = {ub_bytes}, source = "TEAM", trust = "assumed" }}
[memory]
rate_bytes_per_s = {{ value = {rate}, source = "TEAM", trust = "assumed" }}
latency_cycles = {{ value = {latency}, source = "TEAM", trust = "assumed" }}
"""


def instance(rng, twist):
    """Return a student's own chip, and which norm the term asks for."""
    return {
        "chip": CHIP.format(
            name="ToyA1",
            ub_bytes=int(rng.choice([24, 28, 32])) * 1024,
            rate=float(rng.choice([24e9, 32e9, 40e9])),
            latency=int(rng.integers(100, 400)),
        ),
        "norm": twist.get("norm", "rms"),
        "eps": float(twist.get("eps", 1e-5)),
    }


def case(drawn, rows, width, timed=False, chip=None):
    """Return the case of one shape."""
    text = chip or drawn["chip"]
    arguments = {"chip_file": "chip.toml", "rows": rows, "width": width,
                 "norm": drawn["norm"], "eps": drawn["eps"]}  # fmt: skip
    call = Call("kernel", arguments, {"chip.toml": text})
    return Case(f"{rows} x {width}", call, {"chip": text}, timed)


def cases(drawn, rng):
    """Return the public cases: small ones for the values, two for the cycles."""
    del rng
    return [case(drawn, 4, 64), case(drawn, 5, 128), case(drawn, 64, 256, timed=True),
            case(drawn, 96, 512, timed=True)]  # fmt: skip


def chip_of(text):
    """Read a chip from its text."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chip.toml")
        path.write_text(text, "utf-8")
        return load_chip(path)


def plain(chip, rows, width, norm, eps):
    """Return the program of the hand-out: a row at a time, everything waits for everything."""
    width = -(-width // 64) * 64
    k = KernelBuilder("plain", chip)
    x, y = (k.tensor(name, "fp16", rows * width) for name in "xy")
    narrow = k.buffer("narrow", "UB", "fp16", width)
    wide, square = (k.buffer(name, "UB", "fp32", width) for name in ("wide", "square"))
    part, spread = (k.buffer(name, "UB", "fp32", size) for name, size in (("part", 64), ("one", 8)))
    with k.loop("row", rows) as row:
        k.copy(narrow.region(0, width), x.region(row * width, width))
        k.barrier()
        k.each("vconv", width, (wide, 0), (narrow, 0))
        if norm == "rms":
            k.each("vmul", width, (square, 0), (wide, 0), (wide, 0))
        else:
            k.each("vabs", width, (square, 0), (wide, 0))
        k.vector("vdup", part.region(0, (1, 64)), scalar=0.0)
        for start in range(0, width, 64):
            k.each("vadd", 64, (part, 0), (part, 0), (square, start))
        k.vector("vcadd", part.region(0, 1), part.region(0, (1, 64)))
        one = part.region(0, (1, 1))
        k.vector("vmuls", one, one, scalar=1 / width)
        k.vector("vadds", one, one, scalar=eps)
        k.vector("vrsqrt" if norm == "rms" else "vrec", one, one)
        k.vector("vbrcb", spread.region(0, (1, 8)), part.region(0, 1))
        for start in range(0, width, 64):
            chunk = wide.region(start, (1, 8, 8))
            k.vector("vmul", chunk, chunk, spread.region(0, (1, 8, 8), (8, 0, 1)))
        k.each("vconv", width, (narrow, 0), (wide, 0))
        k.barrier()
        k.copy(y.region(row * width, width), narrow.region(0, width))
        k.barrier()
    return k.finish()


def formula(rows, width, norm, eps):
    """Return the norm as an expression in fp32, for the bound."""
    x = te.placeholder((rows, width), "fp16", "x")
    wide = te.cast_to(x, "fp32")
    one = te.vmul(wide, wide) if norm == "rms" else te.vabs(wide)
    mean = te.vadds(te.vmuls(te.reduce_sum(one, -1, keepdims=True), 1 / width), eps)
    scale = te.broadcast(te.vrsqrt(mean) if norm == "rms" else te.vrec(mean), x.shape)
    return te.renamed(te.cast_to(te.vmul(wide, scale), "fp16"), "y")


def wanted(x, norm, eps):
    """Return the values, in double precision."""
    wide = x.astype(np.float64)
    if norm == "rms":
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return wide / (np.abs(wide).mean(-1, keepdims=True) + eps)


def launch_cycles(chip):
    """Return the cycles of a cold launch, which the scale leaves out."""
    return round(chip.launch_overhead_s * chip.clock_hz)


def judge(case, answer):
    """Judge the text of a program: does it fit, is it right, silent, and quick?"""
    found = dict.fromkeys(("fits", "values", "sanitizer", "orders", "quicker"), "")
    chip = chip_of(case.known["chip"])
    given = case.call.arguments
    rows, width, norm, eps = (given[name] for name in ("rows", "width", "norm", "eps"))
    base = simulate(plain(chip, rows, width, norm, eps), chip).cycles
    bound = vector_bound(formula(rows, width, norm, eps), chip) - launch_cycles(chip)
    try:
        program = read(answer, chip, rows * width)
    except AscendLabError as error:
        return Judged(dict.fromkeys(found, str(error)))
    x = np.random.default_rng(rows * width).standard_normal((rows, width)).astype(np.float16)
    x[0] *= 60  # squares beyond fp16
    x[-1] *= 1e-3  # and a row in which eps counts
    try:
        found["sanitizer"] = "; ".join(map(str, sanitize(program, chip, filled=["x"])[:2]))
        results = [execute(program, {"x": x.ravel()}, chip, seed=seed)["y"]
                   for seed in (None, *range(ORDERS))]  # fmt: skip
    except AscendLabError as error:
        return Judged(found | dict.fromkeys(("values", "orders", "quicker"), str(error)))
    right = wanted(x, norm, eps)
    found["values"] = difference(results[0].reshape(x.shape), right)
    found["orders"] = next(filter(None, (difference(r.reshape(x.shape), right)
                                         for r in results[1:])), "")  # fmt: skip
    cycles = simulate(program, chip).cycles
    if cycles >= base:
        found["quicker"] = f"{cycles} cycles, the plain kernel takes {base}"
    return Judged(found, cycles, base, 1.02 * bound, bound)


def read(answer, chip, elements):
    """Return the program of an answer; raise an `AscendLabError` that says why it is none."""
    from ascend_lab.errors import ProgramError
    from ascend_lab.isa import check_program

    if not isinstance(answer, str):
        raise ProgramError("the text of a program", type(answer).__name__, "return str(k.finish())")
    program = check_program(chip, parse_program(answer))
    outside = {b.name: (b.dtype, b.elements) for b in program.buffers if b.space == "GM"}
    if outside != dict.fromkeys("xy", ("fp16", elements)):
        needed = f"tensors x and y of {elements} fp16 and no other in GM"
        raise ProgramError(needed, str(outside), "use k.tensor for these two only")
    return program


def difference(got, right):
    """Return "" where all values are within tolerance, else the first that is not."""
    off = ~(np.abs(got.astype(np.float64) - right) <= TOLERANCE * (1 + np.abs(right)))
    if not off.any():
        return ""
    row, column = np.argwhere(off)[0]
    return f"y[{row}, {column}] is {got[row, column]:.5g}, expected {right[row, column]:.5g}"


def chart(case, answer):
    """Draw the program's timeline as SVG."""
    import io

    from ascend_lab.lab import fig_gantt

    chip = chip_of(case.known["chip"])
    figure = fig_gantt(simulate(parse_program(answer), chip))
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]

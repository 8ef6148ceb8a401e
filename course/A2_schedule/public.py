"""A2: products, convolutions and chips, the cost of a tiling, its certified optimum, the judge.

The optimum is proven: closed bounds of every legal tiling, and the simulator on those whose bound
is least, until no bound is below the best cycles (or after `TRIALS` kernels, the least bound).
"""

import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np

from ascend_lab.aoe.cube import CubeMeasure, cube_space, prove
from ascend_lab.course.assignment import Case, Judged, draw
from ascend_lab.course.sandbox import Call
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine import execute, load_chip, simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    conv_launch,
    gemm_launch,
    pack_conv,
    pack_gemm,
    unpack_conv,
    unpack_gemm,
)

NAMES = ("replays", "values", "quicker")
TRIALS = 24
FORESEEN = 2.0
TWISTS = {
    "foreseen": {
        "weights": {"foreseen": 3},
        "says": "a property, *foreseen*, of weight 3: the table has one more field, `cycles`, the "
        "whole number of cycles (launch left out) that your own model expects of this schedule. "
        "It must lie between half and twice of what the simulator takes.",
    }
}
"""What a term may add to the task: no argument of `schedule` says it, the hand-out does."""
FIELDS = {f.name: f.type for f in fields(GemmSchedule)}
CHIP = """\
name = "A2chip"
summary = "Ascend310 with memory and buffers of its own."
base = "Ascend310"
[core]
count = {{ value = {cores}, source = "TEAM", trust = "assumed" }}
[buffer]
L1.size_bytes = {{ value = {l1_bytes}, source = "TEAM", trust = "assumed" }}
L0C.size_bytes = {{ value = {l0c_bytes}, source = "TEAM", trust = "assumed" }}
[memory]
rate_bytes_per_s = {{ value = {rate}, source = "TEAM", trust = "assumed" }}
"""


def instance(rng, twist):
    """Return a student's chip: cores, and memory that grows with them; L1."""
    cores = int(rng.choice(twist.get("cores", [2, 3, 4])))
    return {
        "cores": cores,
        "l1_bytes": int(rng.choice([768, 896, 1024])) * 1024,
        "l0c_bytes": 256 * 1024,
        "rate": cores * float(rng.choice([19e9, 20e9, 21e9])),
        "adds": twist.get("adds", ""),
    }


@cache
def chip_of(text):
    """Read a chip from its text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chip.toml")
        path.write_text(text, "utf-8")
        return load_chip(path)


def facts(chip):
    """Return what a schedule needs to know of a chip, as plain numbers."""
    rate = chip.device_memory.rate_bytes_per_s / chip.clock_hz
    found = {
        "cores": chip.core_count,
        "macs_per_cycle": chip.macs_per_cycle("fp16"),
        "memory_bytes_per_cycle": rate,
        "l2_bytes_per_cycle": chip.l2.rate_bytes_per_s / chip.clock_hz,
        "memory_latency_cycles": chip.device_memory.latency_cycles,
        "buffers": {name: chip.buffers[name] for name in ("L1", "L0A", "L0B", "L0C", "UB")},
        "paths": {},
    }
    for source, target in (("GM", "L1"), ("L1", "L0A"), ("L1", "L0B"), ("L0C", "UB"), ("UB", "GM")):
        path = chip.path(source, target)
        found["paths"][f"{source}->{target}"] = {
            "bytes_per_cycle": path.rate_bytes_per_cycle, "startup_cycles": path.startup_cycles,
            "latency_cycles": path.latency_cycles,
        }  # fmt: skip
    return found


def case(drawn, m, k, n, timed=True, conv=None):
    """Return one product on a chip; `conv` makes it the product of a convolution's windows."""
    text = CHIP.format(**drawn)
    problem = {"m": m, "k": k, "n": n, "dtype": "fp16"} | ({"conv": conv} if conv else {})
    call = Call("schedule", {"problem": problem, "chip": facts(chip_of(text))})
    name = "{channels} x {height} x {width}, {window} x {window} to ".format(**conv) if conv else ""
    known = {"chip": text, "adds": drawn["adds"]}
    return Case(f"{name}{n}" if conv else f"{m} x {k} x {n}", call, known, timed)


def conv_case(drawn, channels, height, width, n, window=3, stride=1, timed=True):
    """Return a convolution of an image, padded so that stride 1 keeps its size."""
    conv = {"channels": channels, "height": height, "width": width, "window": window,
            "stride": stride, "pad": window // 2}  # fmt: skip
    pixels = -(-height // stride) * -(-width // stride)
    return case(drawn, pixels, -(-channels // 16) * 16 * window**2, n, timed, conv)


def cases(drawn, rng):
    """Return the public products and convolutions; the more cores, the more rows."""
    cores = drawn["cores"]
    return [case(drawn, 64, 64, 64, timed=False), conv_case(drawn, 20, 7, 9, 24, timed=False),
            case(drawn, 256 * cores, 512, 16 * int(rng.integers(31, 34))),
            case(drawn, 333 * cores, 333, 250), case(drawn, 48 * cores, 2048, 128),
            conv_case(drawn, 64, 8 * cores, 28, 96)]  # fmt: skip


def shape_of(problem):
    """Return the package's shape of a problem."""
    c = problem.get("conv")
    if not c:
        return GemmShape(**problem)
    sizes = (1, c["channels"], c["height"], c["width"], problem["n"], c["window"], c["window"])
    return ConvShape(*sizes, c["stride"], c["pad"], problem["dtype"])


def launch_of(shape, chip, schedule):
    """Return the kernel of a schedule; raises what is wrong with it."""
    build = conv_launch if isinstance(shape, ConvShape) else gemm_launch
    return build(shape, chip, schedule)


def cost(problem, chip, answer):
    """Return the cycles of a tiling, launch left out; raises what is wrong with it."""
    return simulate(launch_of(shape_of(problem), chip, tiling(answer)), chip).cycles


def tiling(answer):
    """Return the schedule an answer stands for."""
    if not isinstance(answer, dict):
        raise InputError("a table of a schedule's fields", type(answer).__name__, "return a dict")
    odd = [name for name, value in answer.items()
           if name not in FIELDS or type(value) is not (str if name in WORDS else int)]  # fmt: skip
    lacking = [name for name in ("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols")
               if name not in answer]  # fmt: skip
    if odd or lacking:
        got = f"odd {', '.join(map(str, odd)) or 'none'}, lacking {', '.join(lacking) or 'none'}"
        raise InputError("a schedule's fields, whole numbers and words", got, "see README.md")
    return GemmSchedule(**answer)


WORDS = ("order", "keep", "window", "bypass")


def plain(chip):
    """Return the plain schedule: a middling tile, all cores along the rows, slots as they come."""
    return {"base_m": 64, "base_k": 64, "base_n": 64, "step_k": 1, "grid_rows": chip.core_count,
            "grid_cols": 1}  # fmt: skip


@cache
def least_cycles(text, shape):
    """Return a bound that no tiling is below, launch left out: proven, or the least bound left."""
    chip = chip_of(text)
    proof = prove(cube_space(shape, chip), CubeMeasure(shape, chip), most=TRIALS)
    return proof.lower_bound - round(chip.launch_overhead_s * chip.clock_hz)


def judge(case, answer):
    """Judge a schedule: legal, right, quick; where the term asks for it, foreseen."""
    problem = case.call.arguments["problem"]
    chip = chip_of(case.known["chip"])
    shape = shape_of(problem)
    asked = case.known["adds"] == "foreseen"
    found = dict.fromkeys((*NAMES, *(["foreseen"] if asked else [])), "")
    rest, expected = apart(answer) if asked else (answer, None)
    try:
        launch = launch_of(shape, chip, tiling(rest))
    except AscendLabError as error:
        return Judged(dict.fromkeys(found, str(error)))
    if not case.timed:
        found["values"] = wrong_values(shape, chip, launch, draw(case, answer))
    if found["values"]:
        return Judged(found)
    cycles = simulate(launch, chip).cycles
    if asked:
        found["foreseen"] = not_foreseen(expected, cycles)
    base = cost(problem, chip, plain(chip))
    if cycles > base or (case.timed and cycles == base):
        found["quicker"] = f"{cycles} cycles, the plain schedule takes {base}"
    least = least_cycles(case.known["chip"], shape)
    return Judged(found, cycles, base, 1.02 * least, least)


def apart(answer):
    """Return (schedule, expected cycles or None) of an answer that may hold both."""
    if not isinstance(answer, dict):
        return answer, None
    rest = {name: value for name, value in answer.items() if name != "cycles"}
    return rest, answer.get("cycles")


def not_foreseen(expected, cycles):
    """Return "" if the cycles were foreseen, else what is wrong with what was expected."""
    if type(expected) is not int:
        return f"a field `cycles`, a whole number, is asked; got {str(expected)[:40]}"
    if not cycles / FORESEEN <= expected <= cycles * FORESEEN:
        return f"{expected} cycles were expected, {cycles} it takes"
    return ""


def wrong_values(shape, chip, launch, rng):
    """Return "" if the kernel multiplies or convolves, else the first wrong element."""
    conv = isinstance(shape, ConvShape)
    sizes = ((shape.m, shape.k), (shape.k, shape.n)) if not conv else (
        (1, shape.c, shape.h, shape.w), (shape.k, shape.c, shape.r, shape.s))  # fmt: skip
    a, b = (rng.standard_normal(size).astype(np.float16) for size in sizes)
    made = execute(launch, (pack_conv if conv else pack_gemm)(shape, a, b), chip)
    got = (unpack_conv if conv else unpack_gemm)(shape, made)
    wide = a.astype(np.float32), b.astype(np.float32)
    right = convolved(*wide, shape.stride, shape.pad) if conv else wide[0] @ wide[1]
    off = np.argwhere(np.abs(got - right) > 1e-2 * (1 + np.abs(right)))
    return f"C{tuple(map(int, off[0]))} is wrong" if len(off) else ""


def convolved(x, weight, stride, pad):
    """Return the convolution of one image (1, C, H, W) with weights (K, C, R, R)."""
    window = weight.shape[-1]
    x = np.pad(x[0], ((0, 0), (pad, pad), (pad, pad)))
    seen = np.lib.stride_tricks.sliding_window_view(x, (window, window), (1, 2))
    return np.einsum("cyxrs,kcrs->kyx", seen[:, ::stride, ::stride], weight)[None]


def chart(case, answer):
    """Draw the pipes of the slowest core."""
    import io

    from ascend_lab.lab import fig_gantt

    chip = chip_of(case.known["chip"])
    shape = shape_of(case.call.arguments["problem"])
    schedule, _ = apart(answer)
    figure = fig_gantt(simulate(launch_of(shape, chip, tiling(schedule)), chip))
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]

"""Run a kernel from a file: compare its values with a reference, time it, check for races.

The file defines `kernel(chip)` returning a `Program` or `Launch`, `inputs(rng)` returning arrays
by tensor name, and `reference(inputs)` returning the expected output arrays by name.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError, InputError, SimulationError
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa.program import REDUCING, VECTOR_OPS

TOLERANCE = {np.dtype(np.float16): 2e-2, np.dtype(np.float32): 1e-3}
"""Share of 1 + |expected| by which a result of long sums may be off."""
SELECTING_OR_SIGN = ("vabs", "vrelu", "vmax", "vmin", "vmaxs", "vmins", "vsel", "vcmp", "vdup")
BITWISE = ("vnot", "vand", "vor")
MOVING = ("vcopy", "vbrcb", "vtranspose")
EXACT = frozenset((*SELECTING_OR_SIGN, *BITWISE, *MOVING))
"""Vector instructions that do not round: they select, copy or permute numbers, clear a sign, or
work on bits."""
CANCELLATION = 16
"""A small difference of large numbers keeps their rounding errors, so the unit in the last place is
at least that of the largest output / 16."""
REQUIRED_FUNCTIONS = ("kernel", "inputs", "reference")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element of a tensor that is out of tolerance."""

    tensor: str
    index: tuple[int, ...]
    expected: float
    got: float
    tolerance: float

    def __str__(self) -> str:
        """Print as `y[3]: expected 1.5, got 0, tolerance 0.05`."""
        place = f"{self.tensor}[{', '.join(map(str, self.index))}]"
        return (
            f"{place}: expected {self.expected:g}, got {self.got:g}, tolerance {self.tolerance:.2g}"
        )


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Outcome of one run: largest error and first element out of tolerance of each output."""

    values_ok: bool
    errors: dict[str, float]
    mismatches: tuple[Mismatch, ...]
    timeline: sim.Timeline
    findings: tuple[isa.Finding, ...]

    @property
    def text(self) -> str:
        """The values, the time, the longest stalls and the findings, one line each."""
        verdict = "correct" if self.values_ok else "WRONG"
        errors = ", ".join(f"{name} {error:.3g}" for name, error in self.errors.items())
        lines = [f"values {verdict}, largest error: {errors}", *map(str, self.mismatches)]
        timeline = self.timeline
        shares = (f"{pipe} {share:.1%}" for pipe, share in timeline.busy.items())
        cycles_text = f"{timeline.cycles} cycles + {timeline.launch_cycles} launch"
        lines.append(
            f"{timeline.name}: {cycles_text} = {timeline.time_s * 1e6:.2f} us, "
            f"bound by {timeline.bound_by}"
        )
        lines.append(f"cores: {timeline.core_count}")
        lines.append(f"busy, launch included: {', '.join(shares)}")
        try:
            stalls = list(timeline.stalls.items())[:3]
        except SimulationError:  # too long to be drawn instruction by instruction
            stalls = []
        texts = [f"\n  {pipe} {cycles} cycles on {event}" for (pipe, event), cycles in stalls]
        return "\n".join([*lines, f"longest stalls:{''.join(texts) or ' none known'}"])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            **self.timeline.summary(),
            "values_ok": self.values_ok,
            "max_error": self.errors,
            "mismatches": [str(mismatch) for mismatch in self.mismatches],
            "findings": [{"kind": f.kind, "message": f.message} for f in self.findings],
        }


def run_kernel_file(
    file: str | Path, chip: Chip, *, check_sync: bool = False, seed: int = 0
) -> KernelReport:
    """Load, execute, check and time the kernel in `file`.

    Raises `InputError` naming file, line and error for anything wrong in the file itself.
    """
    if seed < 0:
        raise InputError("a seed of at least 0", str(seed), "leave it out for 0")
    functions = _load(file)
    program = _call(file, "kernel", functions["kernel"], chip)
    if not isinstance(program, isa.Program | isa.Launch):
        needed = f"{file}: kernel(chip) returning a Program or Launch"
        raise InputError(needed, type(program).__name__, "end it with `return k.finish()`")
    arrays = _call(file, "inputs", functions["inputs"], np.random.default_rng(seed))
    expected_arrays = _call(file, "reference", functions["reference"], arrays)
    for name, value in (("inputs", arrays), ("reference", expected_arrays)):
        if not isinstance(value, dict):
            raise InputError(f"{file}: {name} returning a dict of arrays", type(value).__name__)
    findings = tuple(isa.sanitize(program, chip, filled=arrays)) if check_sync else ()
    # If a program accesses memory outside its buffers, its values mean nothing: stop here.
    if any(f.kind == "out-of-bounds" for f in findings):
        raise InputError(f"{file}: accesses inside their buffers", str(findings[0]), "correct it")
    outputs = sim.execute(program, arrays, chip)
    errors = {}
    mismatches = []
    rounding_count = roundings(program)
    for name, expected_array in expected_arrays.items():
        if name not in outputs:
            raise InputError(f"{file}: output tensor {name}", ", ".join(outputs), "rename it")
        errors[name], mismatch = compare(
            name, outputs[name], _numbers(file, name, expected_array), rounding_count
        )
        if mismatch is not None:
            mismatches.append(mismatch)
    # A reference that returns nothing proves nothing.
    ok = bool(expected_arrays) and not mismatches
    return KernelReport(ok, errors, tuple(mismatches), sim.simulate(program, chip), findings)


def _numbers(file: str | Path, name: str, expected: Any) -> Any:
    """Return an expected output as an array of numbers; raise `InputError` for anything else."""
    try:
        array = np.asarray(expected)
    except ValueError as error:
        raise InputError(f"{file}: reference {name} as one array", str(error)) from error
    if array.dtype.kind not in "fiub":
        needed = f"{file}: reference {name} of numbers"
        got = str(array.dtype)
        raise InputError(needed, got, "return a NumPy array")
    return array


def roundings(program: isa.Program | isa.Launch) -> int | None:
    """Return how often an element is rounded at most; None if the kernel adds elements up.

    Only vector instructions are counted, each once: y = 1.5 x + 2 in two instructions rounds twice.
    With the cube, reductions, or sums over a loop the number of roundings is not known.
    """
    programs = [program] if isinstance(program, isa.Program) else [p.program for p in program.parts]
    # an element goes through one core's program: the longest chain counts, not the sum
    largest = 0
    for core_program in programs:
        count = _roundings_of(core_program.body, in_loop=False)
        if count is None:
            return None
        largest = max(largest, count)
    return largest


def _roundings_of(nodes: Sequence[isa.Node], in_loop: bool) -> int | None:
    """Return the vector instructions that round in `nodes`; None if elements are added up."""
    total = 0
    for node in nodes:
        if isinstance(node, isa.Loop):
            inner = _roundings_of(node.body, in_loop=True)
            if inner is None:
                return None
            total += inner
        elif node.op in ("mmad", *REDUCING) or node.attr("atomic", ""):
            return None
        elif node.pipe == "V" and node.op in VECTOR_OPS and node.op not in EXACT:
            # y = y + x with y at one place in all turns is a sum over the loop
            writes_one_place = node.dst is not None and not node.dst.offset.terms
            if in_loop and writes_one_place and any(src == node.dst for src in node.srcs):
                return None
            total += 1
    return total


def compare(
    name: str, values: Any, expected: Any, rounding_count: int | None = None
) -> tuple[float, Mismatch | None]:
    """Return (largest absolute error, first element out of tolerance or None).

    With `rounding_count` (how often an element is rounded) the tolerance is that many units in the
    last place, and one more for the reference's own rounding. Without it, the tolerance for long
    sums, `TOLERANCE`, applies.
    """
    if values.size != expected.size:
        raise InputError(f"{expected.size} output elements", str(values.size), "check the shape")
    got = values.reshape(expected.shape).astype(np.float64)
    expected_values = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Infinities of one sign are equal; their difference would be NaN.
        difference = np.where(got == expected_values, 0.0, np.abs(got - expected_values))
    if rounding_count is None or values.dtype not in TOLERANCE:
        # 2 % of 1 + |expected| in fp16: results near 0 may be off by 0.02.
        allowed = TOLERANCE.get(values.dtype, 0.0) * (1.0 + np.abs(expected_values))
    else:
        finite = np.abs(expected_values[np.isfinite(expected_values)])
        size = np.maximum(np.abs(expected_values), finite.max(initial=0.0) / CANCELLATION)
        allowed = (rounding_count + 1) * np.spacing(size.astype(values.dtype)).astype(np.float64)
    # not `>`: a NaN compares false with everything, and must count as wrong
    out_of_tolerance = ~(difference <= allowed)
    mismatch = None
    if out_of_tolerance.any():
        # argmax of truth values is the first True: in (2, 3), place 4 is index (1, 1)
        index = tuple(
            int(i) for i in np.unravel_index(int(out_of_tolerance.argmax()), out_of_tolerance.shape)
        )
        mismatch = Mismatch(
            name, index, float(expected_values[index]), float(got[index]), float(allowed[index])
        )
    if not np.isfinite(difference).all():
        return float("inf"), mismatch
    return float(difference.max(initial=0.0)), mismatch


def _load(file: str | Path) -> dict[str, Any]:
    """Return the functions of a kernel file by name; raise `InputError` if one is missing."""
    path = Path(file)
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise InputError("a readable kernel file", got, "check the path") from error
    functions: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        # The file is the reader's own program: it runs with all rights of this process.
        exec(compile(source, str(path), "exec"), functions)
    except AscendLabError:
        raise
    except (Exception, SystemExit) as error:
        raise _file_error(file, "loading", error) from error
    missing = [n for n in REQUIRED_FUNCTIONS if not callable(functions.get(n))]
    if missing:
        needed = f"{file}: functions {', '.join(REQUIRED_FUNCTIONS)}"
        got = f"no {', '.join(missing)}"
        raise InputError(needed, got, "copy notebooks/my_kernel.py and change it")
    return functions


def _call(file: str | Path, name: str, function: Any, argument: Any) -> Any:
    """Return what a function of the file returns; raise `InputError` if it fails."""
    try:
        return function(argument)
    except AscendLabError:
        raise
    except (Exception, SystemExit) as error:
        raise _file_error(file, f"{name}()", error) from error


def _file_error(file: str | Path, where: str, error: BaseException) -> InputError:
    # The last line of the file itself, not one of NumPy's or ours.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    got = f"line {line or '?'}: {type(error).__name__}: {error}"
    return InputError(f"{file} to run ({where})", got, "correct the line")

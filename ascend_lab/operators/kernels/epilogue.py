"""What happens to the sums of a tile before they are stored: vector steps as data.

An epilogue is a straight line of lane-by-lane vector operations on the tile the cube has summed.
On chips whose vector unit shares the cube's core it runs in UB, between L0C and memory, so that
bias, residual and activation cost no trip through memory; their way out of L0C can apply ReLU and
convert. On chips with separate cores the fix pipe between L0C and memory can scale, too, and the
bias table adds a bias.
"""

from dataclasses import dataclass, replace

from ascend_lab.errors import InputError, PathError, TypeMismatchError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL
from ascend_lab.machine.isa.program import BINARY, UNARY, WITH_SCALAR

SUMS = "sums"
"""The source name of the tile of sums."""
ONE_BY_ONE = {*BINARY, *UNARY, *WITH_SCALAR, "vsel"} - {"vand", "vor", "vnot", "vcopy"}
"""Operations an epilogue may use: each lane of the result depends on that lane only."""
FORMATS = ("fp16", "bf16", "fp32", "int32")
"""Formats an epilogue may load and store: 16 channels are whole 32-byte blocks."""
PAIR = 2 * FRACTAL
"""Channels of a block in int8: two fractals side by side."""
RISING = ("vconv", "vadd", "vadds", "vmax", "vmaxs", "vmin", "vmins", "vrelu", "vexp")
"""Operations that make no smaller number of larger ones."""


@dataclass(frozen=True, slots=True)
class Step:
    """One vector operation on whole tiles.

    A source is "sums", an operand's name or the index of an earlier step. `number` belongs to
    vadds, vmuls, vmaxs, vmins; `dtype` to vconv: the format it converts to.
    """

    op: str
    sources: tuple[str | int, ...]
    number: float | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor the steps read.

    Kind "channel": a number per output channel, (n1, 16) in memory, the same for every pixel or
    row. Kind "tile": a number per output element, laid out as the output. Kind "sums": not in
    memory, but sums of their own that the cube leaves beside the others.
    """

    name: str
    kind: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Deq:
    """How int32 sums leave L0C: round(relu((sums + bias) scale)) + offset, in a format.

    `scale` and `bias` ("": none) name operands with a number per channel, fp32 and int32; what
    is no byte is neither rounded nor moved.
    """

    scale: str
    bias: str = ""
    relu: bool = False
    offset: int = 0
    dtype: str = "int8"

    @property
    def names(self) -> tuple[str, ...]:
        """Operands it reads."""
        return (self.scale, self.bias) if self.bias else (self.scale,)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operands, steps (the last one is stored) and the stored format.

    With `deq` the steps see dequantised sums. Where bytes are loaded or stored, tiles on the core
    have blocks of 32 channels; floats are put there, and back, block by block of 16.

    `second` says how sums beside the others leave L0C, for the operand of kind "sums".

    `bias` names what the cube of a convolution adds before the first step (`pack_bias`), which
    takes `bias_bytes` of L1.

    Raises `InputError` for a step that names no operation, source or number it could use.
    """

    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    out_dtype: str
    deq: Deq | None = None
    bias: str = ""
    bias_bytes: int = 0
    second: Deq | None = None

    def __post_init__(self) -> None:
        """Check names, operations and the order of the steps."""
        for deq in self.deqs:
            self._check_deq(deq)
        names = [SUMS, *(o.name for o in self.operands)]
        kinds = {o.kind for o in self.operands}
        known = (*FORMATS, "int8") if self.deq else FORMATS
        formats = {self.out_dtype, *(o.dtype for o in self.operands)} - set(known)
        if len(set(names)) < len(names) or kinds - {"channel", "tile", "sums"}:
            wanted = "operands of kind channel, tile or sums, each with a name of its own"
            raise InputError(wanted, str(self.operands), f"rename it; {SUMS} is taken")
        if not (self.steps or self.deq) or formats:
            needed = f"a step at least, and numbers in {', '.join(FORMATS)}"
            got = f"{len(self.steps)} steps, {', '.join(sorted(formats)) or self.out_dtype}"
            raise InputError(needed, got, "convert with vconv")
        for index, step in enumerate(self.steps):
            self._check_step(index, step, names)

    @property
    def rises(self) -> bool:
        """Whether the largest of some sums of a channel becomes the largest of their results."""
        if self.deq is not None or any(o.kind != "channel" for o in self.operands):
            return False
        ways = dict[str | int, int]({SUMS: 1})
        above = set[str | int]()
        for i, s in enumerate(self.steps):  # 1 rises, -1 falls; `above` are never below 0
            number = s.number or 0.0
            known = above.issuperset(s.sources)
            falls = (s.op == "vrec" and known) or (s.op == "vmuls" and number < 0)
            way = {ways[x] for x in s.sources if x in ways}
            if len(way) > 1 or not (falls or s.op in RISING or (s.op == "vmuls" and number > 0)):
                return False
            ways[i] = -way.pop() if falls else way.pop()
            if s.op == "vexp" or (s.op in ("vadds", "vconv") and known and number >= 0):
                above.add(i)
        return not self.steps or ways[len(self.steps) - 1] == 1

    def _check_deq(self, deq: Deq) -> None:
        kinds = {o.name: (o.kind, o.dtype) for o in self.operands}
        wanted = {deq.scale: ("channel", "fp32"), deq.bias: ("channel", "int32")}
        if any(kinds.get(name) != wanted[name] for name in deq.names):
            raise InputError("a scale in fp32, a bias in int32, per channel", str(kinds), "add it")
        known = {name for one in self.deqs for name in one.names}
        others = [o.name for o in self.of_kind("channel") if o.name not in known]
        if others and self.width == PAIR:
            needed = "numbers per channel for the sums only, beside bytes"
            raise InputError(needed, ", ".join(others), "run the steps as a kernel of their own")

    @property
    def deqs(self) -> tuple[Deq, ...]:
        """How sums leave L0C where they are int32: the others, and those beside."""
        return tuple(deq for deq in (self.deq, self.second) if deq)

    @property
    def width(self) -> int:
        """Channels of a block on the core."""
        kinds = {self.out_dtype, *(o.dtype for o in self.of_kind("tile"))}
        return PAIR if "int8" in kinds else FRACTAL

    def unit(self, operand: Operand) -> int:
        """Return the elements of UB that hold a block of an operand per channel."""
        once = any(operand.name in deq.names for deq in self.deqs)
        return FRACTAL if once else pattern(operand.dtype)

    def _check_step(self, index: int, step: Step, names: list[str]) -> None:
        count = 3 if step.op == "vsel" else 1 + (step.op in BINARY)
        if step.op not in ONE_BY_ONE or len(step.sources) != count:
            raise InputError(
                f"step {index}: a lane-by-lane operation with its sources",
                f"{step.op} of {len(step.sources)}",
                f"use {', '.join(sorted(ONE_BY_ONE))}",
            )
        for source in step.sources:
            known = source in names if isinstance(source, str) else 0 <= source < index
            if not known:
                wanted = f"step {index}: a source that is there"
                got = repr(source)
                raise InputError(wanted, got, f"use {names} or a step")
        if all(self.kind(source) == "channel" for source in step.sources):
            wanted = f"step {index}: a source with a number per element"
            got = str(step.sources)
            raise InputError(wanted, got, "compute on numbers per channel once, before the launch")
        if (step.number is None) == (step.op in WITH_SCALAR) or bool(step.dtype) != (
            step.op == "vconv"
        ):
            wanted = f"step {index}: a number for {', '.join(WITH_SCALAR)}, a dtype for vconv"
            raise InputError(wanted, f"{step.op} with {step.number}, {step.dtype!r}", "mend it")

    def kind(self, source: str | int) -> str:
        """Return the kind of a source: "channel", "tile" or "sums"."""
        return next((o.kind for o in self.operands if o.name == source), "tile")

    def of_kind(self, kind: str) -> tuple[Operand, ...]:
        """Return the operands of one kind."""
        return tuple(o for o in self.operands if o.kind == kind)


PLAIN = Epilogue((), (Step("vconv", (SUMS,), None, "fp16"),), "fp16")
"""What is done to sums where nothing else is: they are rounded."""


def step_formats(epilogue: Epilogue, sums: str) -> tuple[str, ...]:
    """Return the number format of each step for sums in the format `sums`.

    Raises `TypeMismatchError` where the sources of a step differ, or the result is not stored.
    """
    arrival = epilogue.deq.dtype if epilogue.deq else sums
    formats: dict[str | int, str] = {SUMS: arrival, **{o.name: o.dtype for o in epilogue.operands}}
    for index, step in enumerate(epilogue.steps):
        kinds = {formats[source] for source in step.sources}
        if len(kinds) > 1:
            raise TypeMismatchError(
                f"step {index}, {step.op}: one number format",
                " and ".join(sorted(kinds)),
                "convert one with vconv, or pass the operand in the other",
            )
        formats[index] = step.dtype or kinds.pop()
    last = formats[len(epilogue.steps) - 1 if epilogue.steps else SUMS]
    if last != epilogue.out_dtype:
        wanted = f"a last step in {epilogue.out_dtype}"
        got = last
        raise TypeMismatchError(wanted, got, "add a vconv step at the end")
    return tuple(formats[index] for index in range(len(epilogue.steps)))


@dataclass(frozen=True, slots=True)
class Fix:
    """What the fix pipe and the bias table do: C = relu(scale * (A @ B + bias))."""

    bias: str = ""
    scale: float = 1.0
    relu: bool = False


def fix_of(epilogue: Epilogue) -> Fix | str:
    """Return the epilogue as a setting of the fix pipe, or the reason why it is none."""
    bias = ""
    scale = 1.0
    relu = False
    stage = 0
    rank = {"vadd": 1, "vmuls": 2, "vrelu": 3, "vconv": 4}
    for index, step in enumerate(epilogue.steps):
        before = index - 1 if index else SUMS
        if step.op not in rank or before not in step.sources:
            return f"the fix pipe has no {step.op} of {step.sources}"
        if step.op == "vconv" and step.dtype == "fp32" and stage < 4:
            continue  # what the pipe computes in
        if rank[step.op] <= stage and not (step.op == "vrelu" and stage == 4 and not relu):
            return "the fix pipe adds a bias, scales, applies ReLU, converts: once each, in order"
        stage = max(stage, rank[step.op])
        if step.op == "vadd":
            bias = next(str(s) for s in step.sources if s != before)
            if epilogue.kind(bias) != "channel":
                return "a cube core cannot add a tile: vector cores have a memory of their own"
        elif step.op == "vmuls":
            scale = float(step.number or 0.0)
        elif step.op == "vrelu":
            relu = True
    if len(epilogue.operands) > bool(bias):
        return "an operand that no step reads"
    return Fix(bias, scale, relu)


def supported(epilogue: Epilogue, chip: Chip, sums: str = "fp32") -> str:
    """Return "" if the chip can fuse this epilogue into a product, otherwise the reason.

    `sums` is the accumulator's format: fp32, or int32 for int8 operands. Whether the tiles fit is
    the schedule's matter (`CapacityError`).
    """
    try:
        step_formats(epilogue, sums)
    except TypeMismatchError as error:
        return str(error)
    used = {epilogue.out_dtype, *(o.dtype for o in epilogue.operands)}
    if "bf16" in used and "bf16" not in chip.cube:
        return f"{chip.name} has no bf16"
    if chip.combined:
        return ""
    if epilogue.deq:
        return "the fix pipe has one scale for all channels"
    fix = fix_of(epilogue)
    if isinstance(fix, str):
        return fix
    if fix.bias:
        if "BT" not in chip.buffers:
            return f"{chip.name} has no bias table"
        if next(o.dtype for o in epilogue.operands) != sums:
            return f"the bias table holds {sums}, the format of the sums"
    return ""


def halves(
    epilogue: Epilogue | None, chip: Chip, sums: str
) -> tuple[Epilogue | None, Epilogue | None]:
    """Return what follows a product in its own core, and what is left for vector cores.

    Raises `TypeMismatchError` where number formats differ, `PathError` for what neither can do.
    """
    if epilogue is None or chip.combined or not supported(epilogue, chip, sums):
        return epilogue, None
    step_formats(epilogue, sums)
    if epilogue.deq:
        epilogue = _spelled(epilogue, epilogue.deq)
    formats = step_formats(epilogue, sums)
    for cut in range(len(epilogue.steps) - 1, 0, -1):
        found = _cut(epilogue, cut, formats[cut - 1])
        if found and not supported(found[0], chip, sums):
            return found
    return None, epilogue


def _spelled(epilogue: Epilogue, deq: Deq) -> Epilogue:
    """Return the epilogue with steps for what the way out of L0C does where there is one."""
    if deq.dtype == "int8" or epilogue.width == PAIR or epilogue.second:
        needed = "vector cores that pack blocks of 32 channels"
        got = "blocks of 16"
        raise PathError(needed, got, "run the steps as a kernel of their own")
    new = [Step("vadd", (SUMS, deq.bias))] if deq.bias else []
    new.append(Step("vconv", (len(new) - 1 if new else SUMS,), dtype="fp32"))
    new.append(Step("vmul", (len(new) - 1, deq.scale)))
    new += [Step("vrelu", (len(new) - 1,))] if deq.relu else []
    new += [Step("vconv", (len(new) - 1,), dtype=deq.dtype)] if deq.dtype != "fp32" else []
    named: dict[str | int, str | int] = {SUMS: len(new) - 1}
    named |= {i: i + len(new) for i in range(len(epilogue.steps))}
    steps = [replace(s, sources=tuple(named.get(x, x) for x in s.sources)) for s in epilogue.steps]
    return Epilogue(epilogue.operands, (*new, *steps), epilogue.out_dtype)


def _cut(epilogue: Epilogue, cut: int, dtype: str) -> tuple[Epilogue, Epilogue] | None:
    """Return the first `cut` steps and the others, if these read the last of those alone."""
    first = epilogue.steps[:cut]
    rest = epilogue.steps[cut:]
    before = {s for step in first for s in step.sources}
    after = {s for step in rest for s in step.sources}
    if after & {SUMS, *range(cut - 1)} or before & after & {o.name for o in epilogue.operands}:
        return None
    new: dict[str | int, str | int] = {cut - 1: SUMS}
    new |= {i: i - cut for i in range(cut, len(epilogue.steps))}
    moved = [replace(s, sources=tuple(new.get(x, x) for x in s.sources)) for s in rest]
    own = tuple(o for o in epilogue.operands if o.name in before)
    others = tuple(o for o in epilogue.operands if o.name in after)
    return Epilogue(own, first, dtype), Epilogue(others, tuple(moved), epilogue.out_dtype)


def check_epilogue(epilogue: Epilogue | None, chip: Chip, sums: str) -> None:
    """Raise `TypeMismatchError` or `PathError` with the reason `supported` gives."""
    if epilogue is None:
        return
    step_formats(epilogue, sums)
    if reason := supported(epilogue, chip, sums):
        wanted = f"an epilogue that {chip.name} can fuse"
        raise PathError(wanted, reason, "run the steps as a kernel of their own")


def pattern(dtype: str) -> int:
    """Elements in UB for 16 channels: a 32-byte block, or a repeat where 16 do not fit one.

    An instruction can read one block again and again, or one repeat; 16 fp32 are neither.
    """
    wide = FRACTAL * DTYPE_BYTES[dtype] > BLOCK_BYTES
    return 4 * FRACTAL if wide else FRACTAL

"""Describe an epilogue: what happens to the sums of a tile before they are stored.

An epilogue is a sequence of lane-by-lane vector operations on a tile that the cube has summed.
Where the vector unit shares the cube's core, it runs in UB between L0C and memory, so that bias,
residual and activation cost no trip through memory; the copy out of L0C can apply ReLU and convert.
Where cube and vector cores are separate, the fix pipe between L0C and memory can also scale, and
the bias table adds a bias.
"""

from dataclasses import dataclass, replace

from ascend_lab.errors import InputError, PathError, TypeMismatchError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL
from ascend_lab.machine.isa.program import BINARY, UNARY, WITH_SCALAR

SUMS = "sums"
"""The source name of the tile of sums."""
LANE_BY_LANE = {*BINARY, *UNARY, *WITH_SCALAR, "vsel"} - {"vand", "vor", "vnot", "vcopy"}
"""Operations an epilogue may use: each lane of the result depends on that lane only."""
FORMATS = ("fp16", "bf16", "fp32", "int32")
"""Formats an epilogue may load and store: 16 channels are whole 32-byte blocks."""
PAIR = 2 * FRACTAL
"""Channels of a block in int8: two fractals side by side."""
INCREASING = ("vconv", "vadd", "vadds", "vmax", "vmaxs", "vmin", "vmins", "vrelu", "vexp")
"""Operations that are monotonic: a larger source never makes a smaller result."""


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
    """A tensor that the steps read; `kind` says what it has numbers for.

    "channel": a number per output channel, (n1, 16) in memory, the same for all pixels or rows.
    "tile": a number per output element, laid out like the output.
    "sums": not in memory, but a second tile of sums in L0C, that of a second convolution.
    """

    name: str
    kind: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Deq:
    """How int32 sums are dequantised on their way out of L0C.

    They become round(relu((sums + bias) scale)) + offset, in the format `dtype`. `scale` (fp32) and
    `bias` (int32; "" for none) name operands with a number per channel. Only int8 results are
    rounded and get the offset.
    """

    scale: str
    bias: str = ""
    relu: bool = False
    offset: int = 0
    dtype: str = "int8"

    @property
    def names(self) -> tuple[str, ...]:
        """The operands that the dequantisation reads."""
        return (self.scale, self.bias) if self.bias else (self.scale,)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operands, steps (the last one is stored) and the stored format.

    With `deq` the steps read dequantised sums. If int8 is loaded or stored, tiles on the core have
    blocks of 32 channels; float tensors keep blocks of 16, two of which make one on the core.

    `second` says how the operand of kind "sums" leaves L0C.

    `bias` names a tensor that the cube of a convolution adds before the first step (`pack_bias`);
    it takes `bias_bytes` of L1.

    Raises `InputError` for a step whose operation, sources and number do not fit together.
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
        allowed_formats = (*FORMATS, "int8") if self.deq else FORMATS
        unknown_formats = {self.out_dtype, *(o.dtype for o in self.operands)} - set(allowed_formats)
        if len(set(names)) < len(names) or kinds - {"channel", "tile", "sums"}:
            needed_operands = "operands of kind channel, tile or sums, each with a name of its own"
            raise InputError(needed_operands, str(self.operands), f"rename it; {SUMS} is taken")
        if not (self.steps or self.deq) or unknown_formats:
            needed = f"a step at least, and numbers in {', '.join(FORMATS)}"
            got = f"{len(self.steps)} steps, {', '.join(sorted(unknown_formats)) or self.out_dtype}"
            raise InputError(needed, got, "convert with vconv")
        for index, step in enumerate(self.steps):
            self._check_step(index, step, names)

    @property
    def is_increasing(self) -> bool:
        """Whether the steps are increasing in the sums of a channel.

        Then pooling may come first: the largest sum gives the largest result.
        """
        if self.deq is not None or any(o.kind != "channel" for o in self.operands):
            return False
        # Direction 1 increases with the sums, -1 decreases.
        direction = dict[str | int, int]({SUMS: 1})
        # The steps whose results are at least 0.
        not_negative = set[str | int]()
        for index, step in enumerate(self.steps):
            number = step.number or 0.0
            sources_not_negative = not_negative.issuperset(step.sources)
            # 1 / x decreases only where x keeps its sign.
            decreases = (step.op == "vrec" and sources_not_negative) or (
                step.op == "vmuls" and number < 0
            )
            source_directions = {
                direction[source] for source in step.sources if source in direction
            }
            increases = step.op in INCREASING or (step.op == "vmuls" and number > 0)
            # max(x, -x) mixes both directions: it is neither.
            if len(source_directions) > 1 or not (decreases or increases):
                return False
            source_direction = source_directions.pop()
            direction[index] = -source_direction if decreases else source_direction
            keeps_sign = step.op in ("vadds", "vconv") and number >= 0
            if step.op == "vexp" or (keeps_sign and sources_not_negative):
                not_negative.add(index)
        return not self.steps or direction[len(self.steps) - 1] == 1

    def _check_deq(self, deq: Deq) -> None:
        """Raise `InputError` unless the operands of a dequantisation have its kinds and formats."""
        kinds = {o.name: (o.kind, o.dtype) for o in self.operands}
        needed_kinds = {deq.scale: ("channel", "fp32"), deq.bias: ("channel", "int32")}
        if any(kinds.get(name) != needed_kinds[name] for name in deq.names):
            raise InputError("a scale in fp32, a bias in int32, per channel", str(kinds), "add it")
        deq_names = {name for deq_of_sums in self.deqs for name in deq_of_sums.names}
        other_names = [o.name for o in self.of_kind("channel") if o.name not in deq_names]
        if other_names and self.width == PAIR:
            needed = "numbers per channel for the sums only, beside bytes"
            raise InputError(
                needed, ", ".join(other_names), "run the steps as a kernel of their own"
            )

    @property
    def deqs(self) -> tuple[Deq, ...]:
        """How int32 sums leave L0C: the first tile of sums and, if there is one, the second."""
        return tuple(deq for deq in (self.deq, self.second) if deq)

    @property
    def width(self) -> int:
        """Channels of a block on the core."""
        # int8 blocks of 32 channels are 32 bytes; two fractals of sums make one.
        kinds = {self.out_dtype, *(o.dtype for o in self.of_kind("tile"))}
        return PAIR if "int8" in kinds else FRACTAL

    def unit(self, operand: Operand) -> int:
        """Return the elements that a block of 16 numbers of a channel operand takes in UB."""
        read_by_deq = any(operand.name in deq.names for deq in self.deqs)
        return FRACTAL if read_by_deq else pattern(operand.dtype)

    def _check_step(self, index: int, step: Step, names: list[str]) -> None:
        """Raise `InputError` if a step's operation, sources, number and format do not fit."""
        # vsel takes a condition and two values, vadd two, vrelu one.
        if step.op == "vsel":
            source_count = 3
        elif step.op in BINARY:
            source_count = 2
        else:
            source_count = 1
        if step.op not in LANE_BY_LANE or len(step.sources) != source_count:
            raise InputError(
                f"step {index}: a lane-by-lane operation with its sources",
                f"{step.op} of {len(step.sources)}",
                f"use {', '.join(sorted(LANE_BY_LANE))}",
            )
        for source in step.sources:
            # A step reads operands by name, and only results of steps before it.
            is_defined = source in names if isinstance(source, str) else 0 <= source < index
            if not is_defined:
                needed = f"step {index}: a source that is there"
                raise InputError(needed, repr(source), f"use {names} or a step")
        if all(self.kind(source) == "channel" for source in step.sources):
            needed_kind = f"step {index}: a source with a number per element"
            remedy = "compute on numbers per channel once, before the launch"
            raise InputError(needed_kind, str(step.sources), remedy)
        number_fits = (step.number is not None) == (step.op in WITH_SCALAR)
        dtype_fits = bool(step.dtype) == (step.op == "vconv")
        if not number_fits or not dtype_fits:
            needed_number = (
                f"step {index}: a number for {', '.join(WITH_SCALAR)}, a dtype for vconv"
            )
            got = f"{step.op} with {step.number}, {step.dtype!r}"
            raise InputError(needed_number, got, "correct it")

    def kind(self, source: str | int) -> str:
        """Return the kind of a source: "channel", "tile" or "sums"."""
        return next((o.kind for o in self.operands if o.name == source), "tile")

    def of_kind(self, kind: str) -> tuple[Operand, ...]:
        """Return the operands of one kind."""
        return tuple(o for o in self.operands if o.kind == kind)


PLAIN = Epilogue((), (Step("vconv", (SUMS,), None, "fp16"),), "fp16")
"""The epilogue that only rounds the sums to fp16."""


def step_formats(epilogue: Epilogue, sums: str) -> tuple[str, ...]:
    """Return the number format of each step for sums in the format `sums`.

    Raises `TypeMismatchError` where the sources of a step differ in format, or where the
    format of the last step is not the stored one.
    """
    sums_format = epilogue.deq.dtype if epilogue.deq else sums
    formats: dict[str | int, str] = {
        SUMS: sums_format,
        **{o.name: o.dtype for o in epilogue.operands},
    }
    for index, step in enumerate(epilogue.steps):
        source_formats = {formats[source] for source in step.sources}
        if len(source_formats) > 1:
            raise TypeMismatchError(
                f"step {index}, {step.op}: one number format",
                " and ".join(sorted(source_formats)),
                "convert one with vconv, or pass the operand in the other",
            )
        formats[index] = step.dtype or source_formats.pop()
    last_format = formats[len(epilogue.steps) - 1 if epilogue.steps else SUMS]
    if last_format != epilogue.out_dtype:
        needed = f"a last step in {epilogue.out_dtype}"
        raise TypeMismatchError(needed, last_format, "add a vconv step at the end")
    return tuple(formats[index] for index in range(len(epilogue.steps)))


@dataclass(frozen=True, slots=True)
class Fix:
    """What the fix pipe and the bias table do: C = relu(scale * (A @ B + bias))."""

    bias: str = ""
    scale: float = 1.0
    relu: bool = False


UNCHANGED = Fix()
"""The fix pipe leaves the sums as they are."""


def fix_of(epilogue: Epilogue) -> Fix | str:
    """Return the epilogue as a setting of the fix pipe, or the reason why it cannot be one."""
    bias = ""
    scale = 1.0
    relu = False
    last_order = 0
    # The hardware's order: the bias table adds, then the fix pipe scales, rectifies, converts.
    order = {"vadd": 1, "vmuls": 2, "vrelu": 3, "vconv": 4}
    for index, step in enumerate(epilogue.steps):
        previous = index - 1 if index else SUMS
        if step.op not in order or previous not in step.sources:
            return f"the fix pipe has no {step.op} of {step.sources}"
        if step.op == "vconv" and step.dtype == "fp32" and last_order < 4:
            continue  # the pipe computes in fp32 anyway
        # ReLU may also follow the conversion: rounding changes no sign.
        relu_after_conversion = step.op == "vrelu" and last_order == 4 and not relu
        if order[step.op] <= last_order and not relu_after_conversion:
            return "the fix pipe adds a bias, scales, applies ReLU, converts: once each, in order"
        last_order = max(last_order, order[step.op])
        if step.op == "vadd":
            bias = next(str(s) for s in step.sources if s != previous)
            # The bias table holds numbers per channel; a residual is a whole tile.
            if epilogue.kind(bias) != "channel":
                return "a cube core cannot add a tile: vector cores have a memory of their own"
        elif step.op == "vmuls":
            scale = float(step.number or 0.0)
        elif step.op == "vrelu":
            relu = True
    operands_read = 1 if bias else 0
    if len(epilogue.operands) > operands_read:
        return "an operand that no step reads"
    return Fix(bias, scale, relu)


def unsupported_reason(epilogue: Epilogue, chip: Chip, sums: str = "fp32") -> str:
    """Return "" if the chip can fuse this epilogue into a product, otherwise the reason.

    `sums` is the accumulator's format: fp32, or int32 for int8 operands. Whether the tiles fit the
    buffers is checked elsewhere, with the schedule (`CapacityError`).
    """
    try:
        step_formats(epilogue, sums)
    except TypeMismatchError as error:
        return str(error)
    formats = {epilogue.out_dtype, *(o.dtype for o in epilogue.operands)}
    if "bf16" in formats and "bf16" not in chip.cube:
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
    """Return the part of an epilogue for the cube's own core, and the part for vector cores.

    None stands for an empty part. The cut is as late as the fix pipe allows. Raises
    `TypeMismatchError` if number formats differ, `PathError` if neither part can do a step.
    """
    if epilogue is None or chip.combined or not unsupported_reason(epilogue, chip, sums):
        return epilogue, None
    step_formats(epilogue, sums)  # raises if formats differ
    in_steps = _with_deq_as_steps(epilogue, epilogue.deq) if epilogue.deq else epilogue
    formats = step_formats(in_steps, sums)
    # Try the latest cut first: what the fix pipe does is free, what vector cores do takes time.
    for cut in range(len(in_steps.steps) - 1, 0, -1):
        two_epilogues = _cut(in_steps, cut, formats[cut - 1])
        if two_epilogues and not unsupported_reason(two_epilogues[0], chip, sums):
            return two_epilogues
    return None, in_steps


def _with_deq_as_steps(epilogue: Epilogue, deq: Deq) -> Epilogue:
    """Return the epilogue with dequantisation written out as vector steps.

    Chips whose vector unit shares the cube's core dequantise on the copy out of L0C; others do not.
    """
    if deq.dtype == "int8" or epilogue.width == PAIR or epilogue.second:
        needed = "vector cores that pack blocks of 32 channels"
        got = "blocks of 16"
        raise PathError(needed, got, "run the steps as a kernel of their own")
    # Sums in int32: add the bias, convert to fp32, scale, rectify, convert to the format.
    deq_steps: list[Step] = []

    def last() -> int:
        return len(deq_steps) - 1

    if deq.bias:
        deq_steps.append(Step("vadd", (SUMS, deq.bias)))
    deq_steps.append(Step("vconv", (last() if deq_steps else SUMS,), dtype="fp32"))
    deq_steps.append(Step("vmul", (last(), deq.scale)))
    if deq.relu:
        deq_steps.append(Step("vrelu", (last(),)))
    if deq.dtype != "fp32":
        deq_steps.append(Step("vconv", (last(),), dtype=deq.dtype))
    # The later steps read the last of these instead of the sums, and are numbered after them.
    new_source: dict[str | int, str | int] = {SUMS: last()}
    for index in range(len(epilogue.steps)):
        new_source[index] = index + len(deq_steps)
    later_steps = _with_sources(epilogue.steps, new_source)
    return Epilogue(epilogue.operands, (*deq_steps, *later_steps), epilogue.out_dtype)


def _with_sources(
    steps: tuple[Step, ...], new_source: dict[str | int, str | int]
) -> tuple[Step, ...]:
    """Return steps that read other sources: those in `new_source` instead of its keys."""

    def with_sources(step: Step) -> Step:
        return replace(step, sources=tuple(new_source.get(s, s) for s in step.sources))

    return tuple(map(with_sources, steps))


def _cut(epilogue: Epilogue, cut: int, dtype: str) -> tuple[Epilogue, Epilogue] | None:
    """Return the first `cut` steps and the others as two epilogues; None if that is impossible.

    The second epilogue may read only the last of the first steps, as "sums", and its own operands.
    """
    first_steps = epilogue.steps[:cut]
    other_steps = epilogue.steps[cut:]
    first_reads = {s for step in first_steps for s in step.sources}
    other_reads = {s for step in other_steps for s in step.sources}
    reads_earlier_results = other_reads & {SUMS, *range(cut - 1)}
    shared_operands = first_reads & other_reads & {o.name for o in epilogue.operands}
    if reads_earlier_results or shared_operands:
        return None
    # The result of step cut - 1 is the sums of the second epilogue, and step `cut` its step 0.
    new_source: dict[str | int, str | int] = {cut - 1: SUMS}
    for index in range(cut, len(epilogue.steps)):
        new_source[index] = index - cut
    first_operands = tuple(o for o in epilogue.operands if o.name in first_reads)
    other_operands = tuple(o for o in epilogue.operands if o.name in other_reads)
    first_epilogue = Epilogue(first_operands, first_steps, dtype)
    renumbered_steps = _with_sources(other_steps, new_source)
    return first_epilogue, Epilogue(other_operands, renumbered_steps, epilogue.out_dtype)


def check_epilogue(epilogue: Epilogue | None, chip: Chip, sums: str) -> None:
    """Raise `TypeMismatchError` or `PathError` with the reason from `unsupported_reason`."""
    if epilogue is None:
        return
    step_formats(epilogue, sums)
    if reason := unsupported_reason(epilogue, chip, sums):
        needed = f"an epilogue that {chip.name} can fuse"
        raise PathError(needed, reason, "run the steps as a kernel of their own")


def pattern(dtype: str) -> int:
    """Return the elements of UB for 16 channels: a 32-byte block, or a repeat if 16 need more.

    An instruction can reread one block or one repeat; 16 fp32 numbers (64 bytes) are neither.
    """
    # 16 fp16 numbers are one block of 32 bytes; 16 fp32 numbers are two.
    exceeds_block = FRACTAL * DTYPE_BYTES[dtype] > BLOCK_BYTES
    return 4 * FRACTAL if exceeds_block else FRACTAL

"""Programs as data: instructions on pipes and nested loops, with a text form that can be read back.

In the text form a loop that loads and stores one tile per pass reads:

    loop i 4:
      MTE2 data_copy a[i | 0 | 16:1] <- x[16*i | 16:1]
      MTE3 data_copy y[16*i | 16:1] <- a[i | 0 | 16:1]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab.errors import ProgramError
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, whole_number

AttrValue = int | float | str | Affine | tuple[int, ...]

BINARY = ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin", "vand", "vor")
UNARY = ("vabs", "vrelu", "vexp", "vln", "vsqrt", "vrsqrt", "vrec", "vnot", "vconv", "vcopy")
WITH_SCALAR = ("vadds", "vmuls", "vmaxs", "vmins")
REDUCING = ("vcadd", "vcmax", "vcmin", "vcgadd", "vcgmax")
WHOLE_BLOCKS = ("vbrcb", "vtranspose")
OTHERS = ("vdup", "vsel", "vcmp", "vaxpy")
VECTOR_OPS = (*BINARY, *UNARY, *WITH_SCALAR, *REDUCING, *OTHERS, *WHOLE_BLOCKS)
TAKES_SCALAR = (*WITH_SCALAR, "vdup", "vaxpy")
MOVES = ("data_copy", "load2d", "load3d", "fixpipe", "vdeq")
FLAGS = ("set_flag", "wait_flag")
CROSS = ("cross_set", "cross_wait")
"""Flags between the cores of a mix launch; a cross_wait holds up all pipes of its core."""
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")

SOURCES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys((*VECTOR_OPS, *MOVES), (1,)),
    **dict.fromkeys((*BINARY, "vcmp", "vaxpy"), (2,)),
    "vdup": (0,),
    "data_copy": (1, 2),
    "vdeq": (2, 3),
    "vsel": (2, 3),
    "mmad": (2, 3),
}
"""How many source regions an instruction may have."""


@dataclass(frozen=True, slots=True)
class Event:
    """A flag from pipe `src` to pipe `dst`.

    With `count` 1 the flag uses one hardware id. With `count` n it uses the ids `id` to `id + n -
    1` in rotation, one per slot of a queue: the k-th wait belongs to the k-th set.
    """

    src: str
    dst: str
    id: int
    count: int = 1

    def __str__(self) -> str:
        """Print as `MTE2>V:0` or `MTE2>V:0x2`."""
        return f"{self.src}>{self.dst}:{self.id}" + (f"x{self.count}" if self.count > 1 else "")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of one pipe: the region it writes, the regions it reads, its attributes.

    Only set_flag and wait_flag have an `event`.
    """

    op: str
    pipe: str
    dst: Region | None = None
    srcs: tuple[Region, ...] = ()
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    event: Event | None = None

    def attr(self, name: str, default: AttrValue = 0) -> AttrValue:
        """Return an attribute by name."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def int_attr(self, name: str, default: int = 0) -> int:
        """Return an integer attribute by name."""
        value = self.attr(name, default)
        if not isinstance(value, int):
            raise ProgramError(f"{self.op}: an integer attribute {name}", repr(value))
        return value

    @property
    def regions(self) -> tuple[Region, ...]:
        """All operand regions, destination first."""
        return self.srcs if self.dst is None else (self.dst, *self.srcs)

    @property
    def out(self) -> Region:
        """The destination region, for instructions that always have one."""
        assert self.dst is not None
        return self.dst

    def attr_at(self, name: str, env: Mapping[str, int]) -> int:
        """Return the value of an integer or affine attribute for loop variables `env`."""
        value = self.attr(name)
        return value.at(env) if isinstance(value, Affine) else self.int_attr(name)

    def __str__(self) -> str:
        """Print as one line of the program's text form."""
        if self.event is not None:
            return f"{self.op} {self.event}"
        # e.g. `MTE2 data_copy a[i | 0 | 16:1] <- x[16*i | 16:1] pad=1`
        sources = ", ".join(map(str, self.srcs))
        regions = " <- ".join(filter(None, [str(self.dst or ""), sources]))
        attrs = (f"{name}={_attr_text(value)}" for name, value in self.attrs)
        return " ".join(filter(None, [f"{self.pipe:<4} {self.op}", regions, *attrs]))


def _attr_text(value: AttrValue) -> str:
    return "(" + ",".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


# A copy may pick its row at run time: GM address = offset + index * pitch, 0 <= index < bound.
# Checks and time models do not know the index: they assume that it touches all `bound` rows.
def index_of(instruction: Instruction) -> Region | None:
    """Return the index operand of an indexed data_copy or scalar, None for the others."""
    if instruction.op not in ("data_copy", "scalar") or len(instruction.srcs) < 2:
        return None
    return instruction.srcs[1]


def reach_of(instruction: Instruction, region: Region) -> Region:
    """Return every element that `region` may touch: all rows, on the GM side of an indexed copy.

    The rows become a new outermost axis of `bound` steps of `pitch` elements. Other regions are
    returned as they are.
    """
    if region.space != "GM" or index_of(instruction) is None:
        return region
    bound = instruction.int_attr("bound", 1)
    pitch = instruction.int_attr("pitch")
    return replace(region, sizes=(bound, *region.sizes), strides=(pitch, *region.strides))


@dataclass(frozen=True, slots=True)
class Loop:
    """Run `body` for var = 0 .. count-1."""

    var: str
    count: int
    body: tuple["Node", ...]

    def __post_init__(self) -> None:
        """Check name and trip count."""
        if not self.var.isidentifier():
            raise ProgramError("a loop variable such as i", repr(self.var), "rename it")
        count = whole_number(self.count, f"loop {self.var}: its trip count")
        object.__setattr__(self, "count", count)
        if self.count < 0:
            raise ProgramError(f"loop {self.var}: a trip count >= 0", str(self.count))
        _check_nodes(f"loop {self.var}", self.body)


Node = Instruction | Loop


def _check_nodes(where: str, nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        if not isinstance(node, (Instruction, Loop)):
            needed = f"{where}: a body of instructions and loops"
            raise ProgramError(needed, repr(node), "build them")


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one core: its buffers, its body, and parameters that the launch sets per core.

    `params` pairs a name with the number of values it may take: ("block", 32) is 0 .. 31.
    """

    name: str
    buffers: tuple[Buffer, ...]
    body: tuple[Node, ...]
    params: tuple[tuple[str, int], ...] = ()
    _with_counts: list[tuple[Instruction, int]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Check the body, and that params have different names and at least one value each."""
        _check_nodes(self.name, self.body)
        names = [name for name, _ in self.params]
        if len(set(names)) < len(names) or any(count < 1 for _, count in self.params):
            needed = f"{self.name}: params with different names and counts >= 1"
            got = str(self.params)
            raise ProgramError(needed, got, "declare each once, for at least one core")

    def __hash__(self) -> int:
        """Hash by name, buffers, params and length; equality compares every instruction."""
        return hash((self.name, self.buffers, self.params, len(self.body)))

    def instructions(self) -> Sequence[tuple[Instruction, int]]:
        """Return each static instruction with the number of times it runs."""
        if not self._with_counts:
            counted = list[tuple[Instruction, int]]()
            _add_counted(self.body, 1, counted)
            # Filled in one step: another thread must never see half of the list.
            self._with_counts[:] = counted
        return self._with_counts

    def scoped(self) -> list[tuple[Instruction, dict[str, int]]]:
        """Return each static instruction with the trip counts of the loops around it."""
        scoped = list[tuple[Instruction, dict[str, int]]]()
        _add_scoped(self.body, dict(self.params), scoped)
        return scoped

    @property
    def executed_count(self) -> int:
        """How many instructions run, flags included: a loop of 4 with 3 in it counts 12."""
        return sum(times for _, times in self.instructions())

    @property
    def pipes(self) -> tuple[str, ...]:
        """Pipes the program uses, in the order of `PIPES`."""
        used = {i.pipe for i, _ in self.instructions()}
        return tuple(p for p in PIPES if p in used)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """The GM tensors."""
        return tuple(b for b in self.buffers if b.space == "GM")

    def __str__(self) -> str:
        """Print params, buffers, instructions; `parse_program` reads it back."""
        lines = [f"program {self.name}"]
        lines += [f"param {name} {count}" for name, count in self.params]
        for b in self.buffers:
            # A GM tensor has no address or slots to print; a ring in GM has slots.
            is_tensor = b.space == "GM" and b.slots == 1
            place = "" if is_tensor else f" slots={b.slots} at={b.address} pitch={b.slot_bytes}"
            lines.append(f"buffer {b.name} {b.space} {b.dtype} {b.elements}{place}")
        return "\n".join([*lines, *_printed(self.body, "")]) + "\n"


# These walks are functions of the module on purpose: a recursive function defined inside a method
# is a reference cycle that holds `self`, so a program would stay in memory until the next run of
# the garbage collector.
def _add_counted(nodes: tuple[Node, ...], times: int, out: list[tuple[Instruction, int]]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _add_counted(node.body, times * node.count, out)
        else:
            out.append((node, times))


def _add_scoped(
    nodes: tuple[Node, ...], ranges: dict[str, int], out: list[tuple[Instruction, dict[str, int]]]
) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _add_scoped(node.body, {**ranges, node.var: node.count}, out)
        else:
            out.append((node, ranges))


def _printed(nodes: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{indent}loop {node.var} {node.count}:"
            yield from _printed(node.body, indent + "  ")
        else:
            yield f"{indent}{node}"


# -- the text form, read back: parse_program(str(program)) == program ------------------------------
_EVENT = re.compile(r"(\w+)>(\w+):(\d+)(?:x(\d+))?$")
# name[slot | offset | sizes:strides]; buffers with one slot print no slot
_REGION = re.compile(r"(?<![\w.])([\w.]+)\[(?:([^][|]+) \| )?([^][|]+) \| ([-\d:,]+)\]")
_ATTR = re.compile(r"(?<!\w)(\w+)=(\([^()]*\)|\S+)")
# The lookbehind of _REGION and _ATTR lets a match begin only at the start of a word. Without it a
# word of n letters that leads to no match would be tried from each letter, in O(n^2) time.
_TERM = re.compile(r"([+-]?)(?:(\d+)\*)?([A-Za-z_]\w*)|([+-]?\d+)")
_WORD_ATTRS = ("op", "round", "atomic")
_AFFINE_ATTRS = ("accumulate", "m_start", "k_start")


def parse_program(text: str) -> Program:
    """Read the text form back; raise `ProgramError` with the line that cannot be read."""
    name = ""
    params = []
    buffers = dict[str, Buffer]()
    # Open loops, outermost first: indent, variable, trip count, body so far. The first entry is
    # the program itself; no line is indented by -1, so that it is never closed.
    open_loops: list[tuple[int, str, int, list[Node]]] = [(-1, "", 1, [])]

    def close_to(indent: int) -> None:
        """Close the loops whose lines are indented at least as far as the current line."""
        while open_loops[-1][0] >= indent:
            _, loop_var, count, body = open_loops.pop()
            open_loops[-1][3].append(Loop(loop_var, count, tuple(body)))

    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        indent = len(line) - len(line.lstrip())
        try:
            close_to(indent)
            if words[0] == "program":
                name = line.split(maxsplit=1)[1].strip()
            elif words[0] == "param":
                params.append((words[1], int(words[2])))
            elif words[0] == "buffer":
                buffers[words[1]] = _buffer(words)
            elif words[0] == "loop":
                loop = Loop(words[1], int(words[2].rstrip(":")), ())
                open_loops.append((indent, loop.var, loop.count, []))
            else:
                open_loops[-1][3].append(_instruction(line.strip(), buffers))
        except (ValueError, KeyError, IndexError, AttributeError, ProgramError) as error:
            raise ProgramError(
                f"line {number} in program text form", line.strip(), f"correct it ({error})"
            ) from error
    close_to(0)
    return Program(name, tuple(buffers.values()), tuple(open_loops[0][3]), tuple(params))


def _buffer(words: list[str]) -> Buffer:
    options = {k: int(v) for k, v in (w.split("=") for w in words[5:])}
    name, space, dtype, elements = words[1:5]
    slots = options.get("slots", 1)
    address = options.get("at", 0)
    slot_bytes = options.get("pitch", 0)
    return Buffer(
        name, space, dtype, int(elements), slots=slots, address=address, slot_bytes=slot_bytes
    )


def _event(text: str) -> Event:
    match = _EVENT.match(text)
    if match is None:
        raise ValueError(f"event {text}")
    return Event(match[1], match[2], int(match[3]), int(match[4] or 1))


def _affine(text: str) -> Affine:
    const = 0
    position = 0
    terms: dict[str, int] = {}
    for match in _TERM.finditer(text):
        if match.start() != position:
            raise ValueError(f"affine expression {text}")
        position = match.end()
        sign, coefficient, name, digits = match.groups()
        if name:
            factor = int(coefficient or 1) * (-1 if sign == "-" else 1)
            terms[name] = terms.get(name, 0) + factor
        else:
            const += int(digits)
        # `i+-2` is read as `i` and `-2`: step over a plus only where a minus follows it
        if text.startswith("+-", position):
            position += 1
    if position != len(text):
        raise ValueError(f"affine expression {text}")
    return Affine(const, tuple(sorted((name, c) for name, c in terms.items() if c)))


def _region(match: re.Match[str], buffers: dict[str, Buffer]) -> Region:
    dims = [dim.split(":") for dim in match[4].split(",")]
    sizes = tuple(int(dim[0]) for dim in dims)
    strides = tuple(int(dim[1]) for dim in dims)
    slot = _affine(match[2]) if match[2] else Affine()
    return Region(buffers[match[1]], _affine(match[3]), sizes, strides, slot)


def _instruction(line: str, buffers: dict[str, Buffer]) -> Instruction:
    words = line.split()
    if words[0] in ("set_flag", "wait_flag"):
        event = _event(words[1])
        pipe = event.src if words[0] == "set_flag" else event.dst
        return Instruction(words[0], pipe, event=event)
    pipe = words[0]
    op = words[1]
    operands = line[line.index(op, len(pipe)) + len(op) :]
    regions = [_region(m, buffers) for m in _REGION.finditer(operands)]
    dst = None
    srcs = regions
    if _has_destination(operands):
        dst, *srcs = regions
    without_regions = _REGION.sub("", operands)
    attrs = tuple((m[1], _attr(m[1], m[2])) for m in _ATTR.finditer(without_regions))
    return Instruction(op, pipe, dst, tuple(srcs), attrs)


def _has_destination(operands: str) -> bool:
    """Tell whether the operands of a line begin with the region that the instruction writes."""
    # `vdup x[...] scalar=0.0` has a destination and no arrow
    return " <- " in operands or bool(_REGION.match(operands.strip()))


def _attr(key: str, text: str) -> AttrValue:
    if key in _AFFINE_ATTRS:
        return _affine(text)
    if key in _WORD_ATTRS:
        return text
    if text.startswith("("):
        return tuple(int(v) for v in text[1:-1].split(",") if v)
    try:
        return int(text)
    except ValueError:
        return float(text)

"""Programs as data: instructions on pipes and nested loops, and the text that says the same."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ascend_lab.errors import ProgramError
from ascend_lab.machine.isa.memory import Affine, Buffer, Region, whole

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
"""Flags between the cores of a mix launch; no pipe begins what stands behind a cross_wait."""
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

    One hardware id when `count` is 1; with `count` n the n ids from `id` on are used in rotation,
    so the k-th wait belongs to the k-th set, as for the slots of a queue.
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
    """One instruction of one pipe: what it writes, what it reads, its attributes.

    `event` is present for set_flag and wait_flag only.
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

    def number(self, name: str, default: int = 0) -> int:
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
        """What it writes, of an instruction that is known to write."""
        assert self.dst is not None
        return self.dst

    def at(self, name: str, env: Mapping[str, int]) -> int:
        """Return an integer or affine attribute where the loop variables are `env`."""
        value = self.attr(name)
        return value.at(env) if isinstance(value, Affine) else self.number(name)

    def __str__(self) -> str:
        """Print as one line of the program's text form."""
        if self.event is not None:
            return f"{self.op} {self.event}"
        moved = " <- ".join(filter(None, [str(self.dst or ""), ", ".join(map(str, self.srcs))]))
        attrs = (f"{k}={_show(v)}" for k, v in self.attrs)
        return " ".join(filter(None, [f"{self.pipe:<4} {self.op}", moved, *attrs]))


def _show(value: AttrValue) -> str:
    return "(" + ",".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


# A copy may pick its row at run time: GM address = offset + index * pitch, 0 <= index < bound.
# Whoever looks at a program without values takes the whole range of rows it may touch.
def index_of(instruction: Instruction) -> Region | None:
    """Return the index operand of an indexed data_copy or scalar, None for the others."""
    if instruction.op not in ("data_copy", "scalar") or len(instruction.srcs) < 2:
        return None
    return instruction.srcs[1]


def reach_of(instruction: Instruction, region: Region) -> Region:
    """Return what `region` may touch: every row, for the GM side of an indexed copy.

    The rows become a new outermost axis of `bound` steps of `pitch` elements.
    """
    if region.space != "GM" or index_of(instruction) is None:
        return region
    bound = instruction.number("bound", 1)
    pitch = instruction.number("pitch")
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
        object.__setattr__(self, "count", whole(self.count, f"loop {self.var}: its trip count"))
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
    """What one core runs: buffers and a body; `params` are set per core at launch.

    `params` maps a name to the number of values it may take, e.g. {"block": 32}.
    """

    name: str
    buffers: tuple[Buffer, ...]
    body: tuple[Node, ...]
    params: tuple[tuple[str, int], ...] = ()
    _flat: list[tuple[Instruction, int]] = field(
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
        if not self._flat:
            found = list[tuple[Instruction, int]]()
            _counted(self.body, 1, found)
            self._flat[:] = found  # at once: threads may ask, too
        return self._flat

    def scoped(self) -> list[tuple[Instruction, dict[str, int]]]:
        """Return each static instruction with the trip counts of the loops around it."""
        found = list[tuple[Instruction, dict[str, int]]]()
        _scoped(self.body, dict(self.params), found)
        return found

    @property
    def event_count(self) -> int:
        """Dynamic instructions, flags included."""
        return sum(times for _, times in self.instructions())

    @property
    def pipes(self) -> tuple[str, ...]:
        """Pipes the program uses, in a fixed order."""
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
            plain = b.space == "GM" and b.slots == 1
            at = "" if plain else f" slots={b.slots} at={b.address} pitch={b.slot_bytes}"
            lines.append(f"buffer {b.name} {b.space} {b.dtype} {b.elements}{at}")
        return "\n".join([*lines, *_printed(self.body, "")]) + "\n"


# Functions of their own: one that calls itself from inside a method would keep the program alive
# until the garbage collector comes round.
def _counted(nodes: tuple[Node, ...], times: int, out: list[tuple[Instruction, int]]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _counted(node.body, times * node.count, out)
        else:
            out.append((node, times))


def _scoped(
    nodes: tuple[Node, ...], ranges: dict[str, int], out: list[tuple[Instruction, dict[str, int]]]
) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _scoped(node.body, {**ranges, node.var: node.count}, out)
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
_REGION = re.compile(r"(?<![\w.])([\w.]+)\[(?:([^][|]+) \| )?([^][|]+) \| ([-\d:,]+)\]")
_ATTR = re.compile(r"(?<!\w)(\w+)=(\([^()]*\)|\S+)")  # both from a word to a bracket: O(letters)
_TERM = re.compile(r"([+-]?)(?:(\d+)\*)?([A-Za-z_]\w*)|([+-]?\d+)")
_WORD_ATTRS = ("op", "round", "atomic")
_AFFINE_ATTRS = ("accumulate", "m_start", "k_start")


def parse_program(text: str) -> Program:
    """Read the text form back; raise `ProgramError` with the line that cannot be read."""
    name = ""
    params = []
    buffers = dict[str, Buffer]()
    stack: list[tuple[int, str, int, list[Node]]] = [(-1, "", 1, [])]

    def close(indent: int) -> None:
        while stack[-1][0] >= indent:
            _, loop_var, count, body = stack.pop()
            stack[-1][3].append(Loop(loop_var, count, tuple(body)))

    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        indent = len(line) - len(line.lstrip())
        try:
            close(indent)
            if words[0] == "program":
                name = line.split(maxsplit=1)[1].strip()
            elif words[0] == "param":
                params.append((words[1], int(words[2])))
            elif words[0] == "buffer":
                buffers[words[1]] = _buffer(words)
            elif words[0] == "loop":
                loop = Loop(words[1], int(words[2].rstrip(":")), ())
                stack.append((indent, loop.var, loop.count, []))
            else:
                stack[-1][3].append(_instruction(line.strip(), buffers))
        except (ValueError, KeyError, IndexError, AttributeError, ProgramError) as error:
            raise ProgramError(
                f"line {number} in program text form", line.strip(), f"mend it ({error})"
            ) from error
    close(0)
    return Program(name, tuple(buffers.values()), tuple(stack[0][3]), tuple(params))


def _buffer(words: list[str]) -> Buffer:
    extra = {k: int(v) for k, v in (w.split("=") for w in words[5:])}
    name, space, dtype, elements = words[1:5]
    places = extra.get("slots", 1), extra.get("at", 0), extra.get("pitch", 0)
    return Buffer(name, space, dtype, int(elements), *places)


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
        if position < len(text) and text[position] == "+":
            position += 1 if text[position + 1] == "-" else 0
    if position != len(text):
        raise ValueError(f"affine expression {text}")
    return Affine(const, tuple(sorted((name, c) for name, c in terms.items() if c)))


def _region(match: re.Match[str], buffers: dict[str, Buffer]) -> Region:
    pairs = [dim.split(":") for dim in match[4].split(",")]
    sizes = tuple(int(p[0]) for p in pairs)
    strides = tuple(int(p[1]) for p in pairs)
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
    rest = line[line.index(op, len(pipe)) + len(op) :]
    left, arrow, _ = rest.partition(" <- ")
    regions = [_region(m, buffers) for m in _REGION.finditer(rest)]
    has_dst = bool(arrow) or (bool(_REGION.match(left.strip())) and bool(regions))
    dst = regions.pop(0) if has_dst else None
    tail = _REGION.sub("", rest)
    attrs = tuple((m[1], _attr(m[1], m[2])) for m in _ATTR.finditer(tail))
    return Instruction(op, pipe, dst, tuple(regions), attrs)


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

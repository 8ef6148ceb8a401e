"""Programs as data: instructions on pipes, nested loops, and launches over several cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ascend_lab.errors import ProgramError
from ascend_lab.isa.memory import Affine, Buffer, Region, whole

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

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
"""What vcmp's attribute `op` may ask of two lanes."""

ROUNDINGS = ("rint", "floor", "ceil", "trunc")
"""How vconv reaches a whole number; rint, to nearest even, is the default."""

ATOMIC_FORMATS = ("fp32", "fp16", "int32")
"""Number formats a copy can add in memory."""

CUBE_OUTPUT = {"fp16": ("fp32", "fp16"), "int8": ("int32",), "bf16": ("fp32",)}
"""Accumulator formats per input format (hardware facts, mmad types)."""


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
    bound, pitch = instruction.number("bound", 1), instruction.number("pitch")
    return replace(region, sizes=(bound, *region.sizes), strides=(pitch, *region.strides))


@dataclass(frozen=True, slots=True)
class Loop:
    """Run `body` for var = 0 .. count-1."""

    var: str
    count: int
    body: tuple[Node, ...]

    def __post_init__(self) -> None:
        """Check name and trip count."""
        if not self.var.isidentifier():
            raise ProgramError("a loop variable such as i", repr(self.var), "rename it")
        object.__setattr__(self, "count", whole(self.count, f"loop {self.var}: its trip count"))
        if self.count < 0:
            raise ProgramError(f"loop {self.var}: a trip count >= 0", str(self.count))
        _check_nodes(f"loop {self.var}", self.body)


Node = Instruction | Loop
_Placed = tuple[Instruction, int, dict[str, int]]
"""An instruction, how often it runs, and the trip counts of the loops around it."""


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

    def instructions(self) -> list[tuple[Instruction, int]]:
        """Return each static instruction with the number of times it runs."""
        return [(node, times) for node, times, _ in _walked(self.body, 1, {}, [])]

    def scoped(self) -> list[tuple[Instruction, dict[str, int]]]:
        """Return each static instruction with the trip counts of the loops around it."""
        found = _walked(self.body, 1, dict(self.params), [])
        return [(node, ranges) for node, _, ranges in found]

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
        """Print params, buffers, instructions; `isa.parse_program` reads it back."""
        lines = [f"program {self.name}"]
        lines += [f"param {name} {count}" for name, count in self.params]
        for b in self.buffers:
            plain = b.space == "GM" and b.slots == 1
            at = "" if plain else f" slots={b.slots} at={b.address} pitch={b.slot_bytes}"
            lines.append(f"buffer {b.name} {b.space} {b.dtype} {b.elements}{at}")
        return "\n".join([*lines, *_printed(self.body, "")]) + "\n"


# Functions of their own: one that calls itself from inside a method would keep the program alive
# until the garbage collector comes round.
def _walked(
    nodes: tuple[Node, ...], times: int, ranges: dict[str, int], out: list[_Placed]
) -> list[_Placed]:
    for node in nodes:
        if isinstance(node, Loop):
            _walked(node.body, times * node.count, {**ranges, node.var: node.count}, out)
        else:
            out.append((node, times, ranges))
    return out


def _printed(nodes: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{indent}loop {node.var} {node.count}:"
            yield from _printed(node.body, indent + "  ")
        else:
            yield f"{indent}{node}"


@dataclass(frozen=True, slots=True)
class Part:
    """One program and the cores that run it: a binding of its params per core."""

    program: Program
    bindings: tuple[tuple[tuple[str, int], ...], ...] = ((),)

    def __post_init__(self) -> None:
        """Check that there is a core, and on each a value in range for every param."""
        counts = dict(self.program.params)
        for binding in self.bindings:
            values = dict(binding)
            same = values.keys() == counts.keys()
            if not same or any(not 0 <= v < counts[name] for name, v in values.items()):
                ranges = ", ".join(f"{name} in 0..{n - 1}" for name, n in counts.items())
                needed = f"{self.program.name}: a binding of {ranges or 'no params'}"
                raise ProgramError(needed, str(values), "bind each param once per core")
        if not self.bindings:
            raise ProgramError(f"{self.program.name}: a binding per core", "no core", "add one")

    @property
    def core_count(self) -> int:
        """How many cores run this part."""
        return len(self.bindings)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on several cores: full cores and tail cores are different parts.

    In a mix launch cube and vector cores work together: `mix` parts at a time are the program of
    the cube core and those of its vector cores; binding i of each belongs to the same AI core.
    """

    name: str
    parts: tuple[Part, ...]
    mix: int = 0

    def __post_init__(self) -> None:
        """Check that every cube core of a mix launch has its vector cores."""
        alone = self.mix < 2 or len(self.parts) % self.mix
        if self.mix and (alone or any(len({p.core_count for p in t}) > 1 for t in self.teams)):
            needed = f"{self.name}: a cube part, then its vector parts, with a binding per AI core"
            got = f"mix {self.mix}, cores {[p.core_count for p in self.parts]}"
            raise ProgramError(needed, got, "let spread() write the parts")

    @property
    def teams(self) -> tuple[tuple[Part, ...], ...]:
        """Parts whose cores work together: each by itself, or those of an AI core."""
        step = self.mix or 1
        return tuple(self.parts[i : i + step] for i in range(0, len(self.parts), step))

    @property
    def core_count(self) -> int:
        """Active cores of all parts; in a mix launch AI cores."""
        return sum(team[0].core_count for team in self.teams)

    @property
    def event_count(self) -> int:
        """Dynamic instructions on all cores, flags included."""
        return sum(part.program.event_count * part.core_count for part in self.parts)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all parts, each once."""
        seen = {b.name: b for part in self.parts for b in part.program.tensors}
        return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class Kernel:
    """Phases that run one after another; between two of them all cores wait for each other.

    A phase reads what earlier phases wrote to GM, on whatever core: partial sums first, then their
    sum. The host launches the whole once.
    """

    name: str
    phases: tuple[Launch, ...]

    def __post_init__(self) -> None:
        """Check that there is a phase, and that a tensor is the same one in all phases."""
        if not self.phases:
            raise ProgramError(f"{self.name}: a kernel of at least one phase", "none", "add one")
        seen: dict[str, Buffer] = {}
        for phase in self.phases:
            for tensor in phase.tensors:
                first = seen.setdefault(tensor.name, tensor)
                if first != tensor:
                    raise ProgramError(
                        f"{self.name}: one size and format of tensor {tensor.name} in all phases",
                        f"{first.elements} {first.dtype} and {tensor.elements} {tensor.dtype}",
                        "rename one, or view the tensor with sizes and strides",
                    )

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses most of them."""
        return max(phase.core_count for phase in self.phases)

    @property
    def event_count(self) -> int:
        """Dynamic instructions of all phases on all cores, flags included."""
        return sum(phase.event_count for phase in self.phases)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all phases, each once."""
        return tuple({b.name: b for phase in self.phases for b in phase.tensors}.values())


def as_launch(program: Program | Launch) -> Launch:
    """Return `program` as a launch on one core (params at 0) unless it is one already."""
    if isinstance(program, Launch):
        return program
    binding = tuple((name, 0) for name, _ in program.params)
    return Launch(program.name, (Part(program, (binding,)),))


def as_kernel(program: Program | Launch | Kernel) -> Kernel:
    """Return `program` as a kernel of one phase unless it is a kernel already."""
    if isinstance(program, Kernel):
        return program
    launch = as_launch(program)
    return Kernel(launch.name, (launch,))


def binding_of(values: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return a params binding from a mapping."""
    return tuple(sorted(values.items()))


def renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return a launch with its GM tensors under other names; tiles make way for them."""

    @cache
    def buffer(old: Buffer) -> Buffer:
        if old.space == "GM":
            return replace(old, name=names[old.name]) if old.name in names else old
        return replace(old, name=f"{old.name}_tile") if old.name in names.values() else old

    def region(old: Region) -> Region:
        return replace(old, buffer=buffer(old.buffer))

    def node(old: Node) -> Node:
        if isinstance(old, Loop):
            return replace(old, body=tuple(map(node, old.body)))
        if not old.regions:
            return old
        dst = None if old.dst is None else region(old.dst)
        return replace(old, dst=dst, srcs=tuple(map(region, old.srcs)))

    def part(old: Part) -> Part:
        body = tuple(map(node, old.program.body))
        buffers = tuple(dict.fromkeys(map(buffer, old.program.buffers)))
        return replace(old, program=replace(old.program, buffers=buffers, body=body))

    return replace(launch, parts=tuple(map(part, launch.parts)))

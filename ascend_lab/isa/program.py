"""Programs as data: instructions on pipes, nested loops, and launches over several cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ascend_lab.errors import ProgramError
from ascend_lab.isa.memory import Affine, Buffer, Region, whole

AttrValue = int | float | str | Affine | tuple[int, ...]


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

    def __str__(self) -> str:
        """Print as one line of the program's text form."""
        if self.event is not None:
            return f"{self.op} {self.event}"
        parts = [f"{self.pipe:<4} {self.op}"]
        parts.append(
            " <- ".join(filter(None, [str(self.dst or ""), ", ".join(map(str, self.srcs))]))
        )
        parts += [f"{k}={_show(v)}" for k, v in self.attrs]
        return " ".join(p for p in parts if p)


def _show(value: AttrValue) -> str:
    return "(" + ",".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


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


def _check_nodes(where: str, nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        if not isinstance(node, (Instruction, Loop)):
            what = f"{where}: a body of instructions and loops"
            raise ProgramError(what, repr(node), "build them")


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
            raise ProgramError(
                f"{self.name}: params with different names and counts >= 1",
                str(self.params),
                "declare each once, for at least one core",
            )

    def __hash__(self) -> int:
        """Hash by name, buffers, params and length; equality compares every instruction."""
        return hash((self.name, self.buffers, self.params, len(self.body)))

    def instructions(self) -> list[tuple[Instruction, int]]:
        """Return each static instruction with the number of times it runs."""
        out: list[tuple[Instruction, int]] = []
        _count(self.body, 1, out)
        return out

    def scoped(self) -> list[tuple[Instruction, dict[str, int]]]:
        """Return each static instruction with the trip counts of the loops around it."""
        out: list[tuple[Instruction, dict[str, int]]] = []
        _scope(self.body, dict(self.params), out)
        return out

    @property
    def event_count(self) -> int:
        """Dynamic instructions, flags included."""
        return sum(times for _, times in self.instructions())

    @property
    def pipes(self) -> tuple[str, ...]:
        """Pipes the program uses, in a fixed order."""
        used = {i.pipe for i, _ in self.instructions()}
        return tuple(p for p in ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX") if p in used)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """The GM tensors."""
        return tuple(b for b in self.buffers if b.space == "GM")

    def __str__(self) -> str:
        """Print params, buffers, instructions; `isa.parse_program` reads it back."""
        lines = [f"program {self.name}"]
        lines += [f"param {name} {count}" for name, count in self.params]
        for b in self.buffers:
            at = "" if b.space == "GM" else f" slots={b.slots} at={b.address} pitch={b.slot_bytes}"
            lines.append(f"buffer {b.name} {b.space} {b.dtype} {b.elements}{at}")
        return "\n".join([*lines, *_printed(self.body, "")]) + "\n"


# Functions of their own: one that calls itself from inside a method would keep the program alive
# until the garbage collector comes round.
def _count(nodes: tuple[Node, ...], times: int, out: list[tuple[Instruction, int]]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _count(node.body, times * node.count, out)
        else:
            out.append((node, times))


def _printed(nodes: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{indent}loop {node.var} {node.count}:"
            yield from _printed(node.body, indent + "  ")
        else:
            yield f"{indent}{node}"


def _scope(
    nodes: tuple[Node, ...], ranges: dict[str, int], out: list[tuple[Instruction, dict[str, int]]]
) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            _scope(node.body, {**ranges, node.var: node.count}, out)
        else:
            out.append((node, ranges))


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
                raise ProgramError(
                    f"{self.program.name}: a binding of {ranges or 'no params'}",
                    str(values),
                    "bind each param once per core",
                )
        if not self.bindings:
            raise ProgramError(f"{self.program.name}: a binding per core", "no core", "add one")

    @property
    def core_count(self) -> int:
        """How many cores run this part."""
        return len(self.bindings)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on several cores: full cores and tail cores are different parts."""

    name: str
    parts: tuple[Part, ...]

    @property
    def core_count(self) -> int:
        """Active cores of all parts."""
        return sum(part.core_count for part in self.parts)

    @property
    def event_count(self) -> int:
        """Dynamic instructions on all cores, flags included."""
        return sum(part.program.event_count * part.core_count for part in self.parts)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all parts, each once."""
        seen = {b.name: b for part in self.parts for b in part.program.tensors}
        return tuple(seen.values())


def as_launch(program: Program | Launch) -> Launch:
    """Return `program` as a launch on one core (params at 0) unless it is one already."""
    if isinstance(program, Launch):
        return program
    binding = tuple((name, 0) for name, _ in program.params)
    return Launch(program.name, (Part(program, (binding,)),))


def binding_of(values: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return a params binding from a mapping."""
    return tuple(sorted(values.items()))

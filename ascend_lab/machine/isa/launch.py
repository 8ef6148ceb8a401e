"""Launches: which programs run on which cores, and what the cores of a mix launch share.

A core of a mix launch has 16 counters of 4 bits. A set of mode 2 by a cube core adds 1 in each of
its vector cores; one by a vector core waits for those of its brothers, and all of them add 1 in the
cube core. Mode 1 is among the vector cores of an AI core, mode 0 among all cores of a kind. Source:
Ascend C, CrossCoreSetFlag and CrossCoreWaitFlag (developer documentation).

Tiles pass between the cube core and the vector cores of an AI core through a ring of slots in GM.
The producer waits for an empty slot, stores a tile and tells that it is ready; the consumer waits
for that, loads it and tells that the slot is empty. What the cores exchange stays in L2. Source of
the protocol: hw-native-sys/pto-isa, TPush.hpp (with one message a tile).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product

from ascend_lab.errors import CapacityError, PathError, ProgramError, SyncError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa.memory import Affine, Buffer, Index, Region, Sizes, Strides
from ascend_lab.machine.isa.program import CROSS, PIPES, Instruction, Loop, Node, Program

Binding = tuple[tuple[str, int], ...]
Share = tuple[int, int, int]
"""Of an axis: what one core owns, the step from core to core, how many cores stand along it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One program and the cores that run it: a binding of its params per core."""

    program: Program
    bindings: tuple[Binding, ...] = ((),)

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
    def programs(self) -> tuple[Program, ...]:
        """Programs of all parts, those that several share once."""
        return tuple({id(part.program): part.program for part in self.parts}.values())

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all parts, each once: a ring with the most slots that a part gives it."""
        found: dict[str, Buffer] = {}
        for program in self.programs:
            for buffer in program.tensors:
                known = found.get(buffer.name, buffer)
                found[buffer.name] = known if known.slots > buffer.slots else buffer
        return tuple(found.values())


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


Runnable = Program | Launch | Kernel


def as_launch(program: Program | Launch) -> Launch:
    """Return `program` as a launch on one core (params at 0) unless it is one already."""
    if isinstance(program, Launch):
        return program
    binding = tuple((name, 0) for name, _ in program.params)
    return Launch(program.name, (Part(program, (binding,)),))


def as_kernel(program: Runnable) -> Kernel:
    """Return `program` as a kernel of one phase unless it is a kernel already."""
    if isinstance(program, Kernel):
        return program
    launch = as_launch(program)
    return Kernel(launch.name, (launch,))


def binding_of(values: Mapping[str, int]) -> Binding:
    """Return a params binding from a mapping."""
    return tuple(sorted(values.items()))


def renamed(launch: Launch, names: Mapping[str, str], **places: tuple[int, int]) -> Launch:
    """Return a launch with GM tensors under other names, or at (element, of so many) of larger."""

    @cache
    def buffer(old: Buffer) -> Buffer:
        if old.name in places:
            return replace(old, elements=places[old.name][1], slot_bytes=0)
        if old.space == "GM":
            return replace(old, name=names[old.name]) if old.name in names else old
        return replace(old, name=f"{old.name}_tile") if old.name in names.values() else old

    def region(old: Region) -> Region:
        new = buffer(old.buffer)
        first = places.get(old.buffer.name, (0,))[0]
        return old if new is old.buffer else old.on(new, first)

    def node(old: Node) -> Node:
        if isinstance(old, Loop):
            return Loop(old.var, old.count, tuple(map(node, old.body)))
        if all(buffer(r.buffer) is r.buffer for r in old.regions):
            return old
        dst = None if old.dst is None else region(old.dst)
        return Instruction(old.op, old.pipe, dst, tuple(map(region, old.srcs)), old.attrs)

    def program(old: Program) -> Program:
        buffers = tuple(dict.fromkeys(map(buffer, old.buffers)))
        return replace(old, buffers=buffers, body=tuple(map(node, old.body)))

    new = {id(old): program(old) for old in launch.programs}
    parts = (replace(part, program=new[id(part.program)]) for part in launch.parts)
    return replace(launch, parts=tuple(parts))


def spread(
    name: str,
    axes: Mapping[str, Sequence[int]],
    program: Callable[..., Program | tuple[Program, ...]],
    *,
    apart: Sequence[int] = (),
) -> Launch:
    """Return a launch over a grid of cores; `axes[param]` lists what the cores along it own.

    All but the last along an axis own equally much. Cores with equal shares run one program,
    `program(*shares)`, bound to their places; along `apart` every place has a program of its own,
    called with (place, its first, its end) as well. A program that is a tuple, of a cube core and
    its vector cores, makes a mix launch; a parameter `aiv` of theirs tells the first from the next.
    """
    sides: list[dict[Share, list[int]]] = []
    for sizes in axes.values():
        groups: dict[int, list[int]] = {}
        for place, size in enumerate(sizes):
            groups.setdefault(size, []).append(place)
        sides.append({(size, sizes[0], at[-1] + 1): at for size, at in groups.items()})
    ends = [(i, i * apart[0], i * apart[0] + size) for i, size in enumerate(apart)]
    parts = list[Part]()
    mix = 0
    for shares in product(*sides):
        places = product(*(side[share] for side, share in zip(sides, shares, strict=True)))
        bindings = tuple(binding_of(dict(zip(axes, at, strict=True))) for at in places)
        made = [program(*shares, end) for end in ends] if ends else [program(*shares)]
        for one in made:
            team = one if isinstance(one, tuple) else (one,)
            mix = len(team) if isinstance(one, tuple) else 0
            parts += [Part(p, numbered(p, bindings, i - 1)) for i, p in enumerate(team)]
    return Launch(name, tuple(parts), mix)


def numbered(program: Program, bindings: tuple[Binding, ...], number: int) -> tuple[Binding, ...]:
    """Add the `number` of a vector core to the bindings of a program that has a param `aiv`."""
    if "aiv" not in dict(program.params):
        return bindings
    return tuple(binding_of({**dict(at), "aiv": number}) for at in bindings)


# -- flags between the cores of a mix launch -------------------------------------------------------
IDS = 16
LIMIT = 15
MODES = (0, 1, 2)
BETWEEN = 2
"""Flag ids of a core, what the counter of each holds, the modes, that of a ring's two sides."""


def check_cross(chip: Chip, instruction: Instruction) -> Instruction:
    """Return a cross-core flag instruction if the chip can run it; see `check_instruction`."""
    op = instruction.op
    flag = instruction.number("id", -1)
    sets = instruction.op == "cross_set"
    if chip.combined:
        needed = f"{op}: a chip whose cube and vector cores are separate"
        raise PathError(needed, chip.name, "use flags between pipes")
    if not 0 <= flag < IDS:
        needed = f"{op}: a flag id of 0..{IDS - 1}"
        raise CapacityError(needed, str(flag), "use an id again once it is drained")
    if sets and instruction.number("mode", -1) not in MODES:
        raise ProgramError(f"{op}: mode 0, 1 or 2", str(instruction.attr("mode")), "choose one")
    pipes = PIPES[1:] if sets else ("ALL",)  # all but the scalar unit can tell other cores
    if instruction.pipe not in pipes:
        needed = f"{op}: pipe {' or '.join(pipes)}"
        raise ProgramError(needed, instruction.pipe, "mend it")
    return instruction


def cross_set(chip: Chip, mode: int, pipe: str, flag: int) -> Instruction:
    """Tell other cores, when all before it on `pipe` has finished: counter `flag` of each + 1.

    Mode 2: a cube core tells its vector cores, or they it once all have set; mode 1: the vector
    cores of an AI core each other; mode 0: all cores of a kind each other.
    """
    attrs = (("mode", mode), ("id", flag))
    return check_cross(chip, Instruction("cross_set", pipe, attrs=attrs))


def cross_wait(chip: Chip, flag: int) -> Instruction:
    """Begin nothing behind it, on any pipe of this core, until counter `flag` is above 0; take 1.

    What stands before it runs on.
    """
    return check_cross(chip, Instruction("cross_wait", "ALL", attrs=(("id", flag),)))


def senders(core: int, mode: int, cores: int, team: int) -> list[int]:
    """Return whose sets of `mode` a core waits for, of `cores` that stand AI core by AI core.

    `team` cores make an AI core, the cube core first.
    """
    home = core - core % team
    cube = core % team == 0
    if mode == 0:
        return [c for c in range(cores) if (c % team == 0) == cube]
    if mode == 1:
        return [] if cube else list(range(home + 1, home + team))
    return list(range(home + 1, home + team)) if cube else [home]


def uses(program: Program) -> dict[tuple[int, int], set[str]]:
    """Return the pipes that set each (mode, flag)."""
    found: dict[tuple[int, int], set[str]] = {}
    for i, _ in program.instructions():
        if i.op == "cross_set":
            found.setdefault((i.number("mode"), i.number("id")), set()).add(i.pipe)
    return found


def meets(launch: Launch) -> bool:
    """Tell whether all cores of a kind wait for each other somewhere."""
    programs = [part.program for part in launch.parts if launch.mix]
    return any(mode == 0 for program in programs for mode, _ in uses(program))


def crews(launch: Launch) -> list[tuple[tuple[Program, dict[str, int]], ...]]:
    """Return the cores that work together, each with its binding: those of an AI core, or all."""
    found = [
        tuple((part.program, dict(at)) for part, at in zip(team, places, strict=True))
        for team in launch.teams
        for places in zip(*(part.bindings for part in team), strict=True)
    ]
    return [tuple(chain(*found))] if meets(launch) else found


def check_launch(chip: Chip, launch: Launch) -> None:
    """Raise `PathError` or `ProgramError` for flags that a launch, or its cores, cannot have."""
    for place, part in enumerate(launch.parts):
        if not any(i.op in CROSS for i, _ in part.program.instructions()):
            continue
        found = uses(part.program)
        name = part.program.name
        if not launch.mix:
            needed = f"{name}: a mix launch for cross-core flags"
            got = "cores of one kind alone"
            raise PathError(needed, got, "launch cube and vector programs together")
        if place % launch.mix == 0 and any(mode == 1 for mode, _ in found):
            needed = f"{name}: mode 0 or 2 on a cube core"
            raise ProgramError(needed, "mode 1", "it is of vector cores")
        for (_, flag), pipes in found.items():
            if len(pipes) > 1:
                needed = f"{name}: one pipe that sets cross-core flag {flag}"
                raise ProgramError(needed, ", ".join(sorted(pipes)), "use a flag for each")
    if launch.mix and launch.mix - 1 > chip.vector_cores_per_core:
        needed = f"{launch.name}: at most {chip.vector_cores_per_core} vector cores to a cube core"
        raise PathError(needed, str(launch.mix - 1), f"{chip.name} has no more")
    if launch.mix and launch.core_count > chip.core_count:
        needed = f"{launch.name}: at most {chip.core_count} AI cores, which start together"
        raise PathError(needed, str(launch.core_count), "launch fewer blocks")


class Counters:
    """The counters of cores that stand AI core by AI core, `team` to each, the cube core first."""

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        modes = [(r, m, senders(r, m, cores, team)) for r in range(cores) for m in MODES]
        self.hears = {(r, m): who for r, m, who in modes}
        self.tells = {
            (c, m): [r for r, n, who in modes if n == m and c in who]
            for c in range(cores)
            for m in MODES
        }
        self.sent, self.taken = Counter[tuple[int, int, int, int]](), Counter[tuple[int, int]]()

    def ready(self, core: int, flag: int) -> int:
        """Return what counter `flag` of a core holds."""
        arrived = sum(
            min((self.sent[core, mode, flag, s] for s in self.hears[core, mode]), default=0)
            for mode in MODES
        )
        return arrived - self.taken[core, flag]

    def set(self, core: int, mode: int, flag: int) -> None:
        """Count a set of one core; raise `SyncError` for the 16th that nobody has waited for."""
        for r in self.tells[core, mode]:
            self.sent[r, mode, flag, core] += 1
            if self.sent[r, mode, flag, core] - self.taken[r, flag] > LIMIT:
                needed = f"at most {LIMIT} sets of cross-core flag {flag} that wait to be consumed"
                raise SyncError(needed, str(LIMIT + 1), "let the other side tell that it is ready")


def core_name(core: int, team: int) -> str:
    """Return what messages call a core: `AIV1`, or of the third AI core `AIC of core 2`."""
    member = core % team
    kind = f"AIV{member - 1}" if member else "AIC"
    return kind if core < team else f"{kind} of core {core // team}"


# -- a ring of slots -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ring:
    """`slots` tiles of `elements` for each of `cores` AI cores, and its two flag ids.

    `ready` tells that a slot is full, `empty` that it is free again.
    """

    name: str
    dtype: str
    elements: int
    slots: int
    cores: int
    ready: int
    empty: int

    def __post_init__(self) -> None:
        """Check that the counters can hold all slots."""
        if not 1 <= self.slots <= LIMIT or self.ready == self.empty:
            needed = f"ring {self.name}: 1 to {LIMIT} slots, and two different flag ids"
            got = f"{self.slots} slots, ids {self.ready} and {self.empty}"
            raise CapacityError(needed, got, "use fewer slots, other ids")

    @property
    def buffer(self) -> Buffer:
        """The tensor in GM: slot by slot, AI core by AI core."""
        return Buffer(self.name, "GM", self.dtype, self.elements * self.cores, self.slots)


@dataclass(frozen=True, slots=True)
class RingTile:
    """A slot of one AI core's ring, held between alloc/enqueue or dequeue/free."""

    ring: Ring
    slot: int
    start: Affine

    def region(self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None) -> Region:
        """Return a region of the tile, as `Buffer.region`; default: the whole tile."""
        sizes = self.ring.elements if sizes is None else sizes
        return self.ring.buffer.region(self.start + offset, sizes, strides, slot=self.slot)

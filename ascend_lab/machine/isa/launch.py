"""Launches and kernels: which program runs on which core, and how cores signal each other.

In a mix launch the cube core and the vector cores of an AI core work together. Each core has 16
counters of 4 bits, one per cross-core flag. A cross_set of mode 2 by the cube core adds 1 to the
counter of each of its vector cores. In the other direction the vector cores must all have set the
flag before 1 is added to the counter of the cube core. Mode 1 synchronises the vector cores of one
AI core, mode 0 all cores of one type (cube or vector). Source: Ascend C, CrossCoreSetFlag and
CrossCoreWaitFlag (developer documentation).

A ring of slots in GM passes tiles between the cube core and the vector cores of an AI core. The
producer waits for an empty slot, stores a tile and reports that it is ready; the consumer waits for
the report, loads the tile and reports that the slot is empty. The tiles stay in L2. Source of the
protocol: hw-native-sys/pto-isa, TPush.hpp (with one message per tile).
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
"""A share of an axis: its elements, the step from core to core, the cores up to its last owner.

100 elements over 3 cores: (40, 40, 2) for cores 0 and 1, (20, 40, 3) for core 2.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One program and the cores that run it: for each core, the values of the program's params."""

    program: Program
    bindings: tuple[Binding, ...] = ((),)

    def __post_init__(self) -> None:
        """Check that there is a core, and that each core binds every param to a value in range."""
        counts = dict(self.program.params)
        for binding in self.bindings:
            values = dict(binding)
            # a param without a value would leave the addresses of a core undefined
            binds_all = values.keys() == counts.keys()
            if not binds_all or any(not 0 <= v < counts[name] for name, v in values.items()):
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
    """A kernel on several cores; each part is a program with the cores that run it.

    If the work does not divide evenly, the cores with a full share are one part, and the core with
    the remainder another. In a mix launch the parts come in teams of `mix`: the program of the cube
    core, then those of its vector cores. Binding i of each part of a team belongs to the same AI
    core.
    """

    name: str
    parts: tuple[Part, ...]
    mix: int = 0

    def __post_init__(self) -> None:
        """Check that every cube core of a mix launch has its vector cores."""
        has_incomplete_team = self.mix < 2 or len(self.parts) % self.mix != 0
        if self.mix and not has_incomplete_team:
            # a cube part on 20 cores goes with vector parts on 20 cores each
            has_incomplete_team = any(len({p.core_count for p in t}) > 1 for t in self.teams)
        if self.mix and has_incomplete_team:
            needed = f"{self.name}: a cube part, then its vector parts, with a binding per AI core"
            got = f"mix {self.mix}, cores {[p.core_count for p in self.parts]}"
            raise ProgramError(needed, got, "let spread() write the parts")

    @property
    def teams(self) -> tuple[tuple[Part, ...], ...]:
        """Groups of parts whose cores work together: those of an AI core, or one part alone."""
        # With mix 3: (cube, vector, vector), (cube, vector, vector), ...
        step = self.mix or 1
        return tuple(self.parts[i : i + step] for i in range(0, len(self.parts), step))

    @property
    def core_count(self) -> int:
        """Active cores of all parts; in a mix launch the number of AI cores."""
        return sum(team[0].core_count for team in self.teams)

    @property
    def executed_count(self) -> int:
        """How many instructions all cores run, flags included."""
        return sum(part.program.executed_count * part.core_count for part in self.parts)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Programs of all parts; a program that several parts share appears once."""
        # By id: parts that share a program share the object, and comparing two takes long.
        return tuple({id(part.program): part.program for part in self.parts}.values())

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all parts, each once.

        A ring may have different numbers of slots in different parts: the largest counts.
        """
        by_name: dict[str, Buffer] = {}
        for program in self.programs:
            for buffer in program.tensors:
                earlier = by_name.get(buffer.name, buffer)
                by_name[buffer.name] = earlier if earlier.slots > buffer.slots else buffer
        return tuple(by_name.values())


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: launches that run one after another as phases, with a barrier between two phases.

    A phase may read what any core wrote to GM in an earlier phase: for example, a first phase
    computes partial sums and a second one adds them up. The host launches the kernel once.
    """

    name: str
    phases: tuple[Launch, ...]

    def __post_init__(self) -> None:
        """Check that there is a phase, and that equal names mean equal tensors in all phases."""
        if not self.phases:
            raise ProgramError(f"{self.name}: a kernel of at least one phase", "none", "add one")
        tensor_by_name: dict[str, Buffer] = {}
        for phase in self.phases:
            for tensor in phase.tensors:
                earlier = tensor_by_name.setdefault(tensor.name, tensor)
                if earlier != tensor:
                    raise ProgramError(
                        f"{self.name}: one size and format of tensor {tensor.name} in all phases",
                        f"{earlier.elements} {earlier.dtype} and {tensor.elements} {tensor.dtype}",
                        "rename one, or view the tensor with sizes and strides",
                    )

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses the most."""
        return max(phase.core_count for phase in self.phases)

    @property
    def executed_count(self) -> int:
        """How many instructions all cores run in all phases, flags included."""
        return sum(phase.executed_count for phase in self.phases)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all phases, each once."""
        return tuple({b.name: b for phase in self.phases for b in phase.tensors}.values())


Runnable = Program | Launch | Kernel


def as_launch(program: Program | Launch) -> Launch:
    """Return a program as a launch on one core, with all params at 0; a launch is unchanged."""
    if isinstance(program, Launch):
        return program
    binding = tuple((name, 0) for name, _ in program.params)
    return Launch(program.name, (Part(program, (binding,)),))


def as_kernel(program: Runnable) -> Kernel:
    """Return a program or a launch as a kernel of one phase; a kernel is unchanged."""
    if isinstance(program, Kernel):
        return program
    launch = as_launch(program)
    return Kernel(launch.name, (launch,))


def binding_of(values: Mapping[str, int]) -> Binding:
    """Return the values of params, given by name, as a tuple of (name, value) pairs."""
    return tuple(sorted(values.items()))  # sorted: equal bindings are equal tuples


def renamed(launch: Launch, names: Mapping[str, str], **windows: tuple[int, int]) -> Launch:
    """Return a launch whose GM tensors have other names, or have become parts of larger tensors.

    `names` maps old names to new ones. A keyword `x=(first, elements)` makes tensor `x` the part
    from element `first` on of a tensor of `elements` elements.
    """

    @cache
    def buffer(old: Buffer) -> Buffer:
        if old.name in windows:
            # x=(100, 1000): the buffer gets 1000 elements; a pitch of 0 is computed anew
            return replace(old, elements=windows[old.name][1], slot_bytes=0)
        if old.space == "GM":
            return replace(old, name=names[old.name]) if old.name in names else old
        # an on-chip buffer that has the new name of a tensor gets another name
        return replace(old, name=f"{old.name}_tile") if old.name in names.values() else old

    def region(old: Region) -> Region:
        new_buffer = buffer(old.buffer)
        first = windows.get(old.buffer.name, (0,))[0]
        # x=(100, 1000) moves every address in x by 100 elements
        return old if new_buffer is old.buffer else old.in_buffer(new_buffer, first)

    def node(old: Node) -> Node:
        if isinstance(old, Loop):
            return Loop(old.var, old.count, tuple(map(node, old.body)))
        # most instructions touch no renamed buffer: these remain the same objects
        if all(buffer(r.buffer) is r.buffer for r in old.regions):
            return old
        dst = None if old.dst is None else region(old.dst)
        return Instruction(old.op, old.pipe, dst, tuple(map(region, old.srcs)), old.attrs)

    def program(old: Program) -> Program:
        buffers = tuple(dict.fromkeys(map(buffer, old.buffers)))
        return replace(old, buffers=buffers, body=tuple(map(node, old.body)))

    # by id, so that parts that share a program share the renamed one as well
    renamed_programs = {id(old): program(old) for old in launch.programs}
    parts = (replace(part, program=renamed_programs[id(part.program)]) for part in launch.parts)
    return replace(launch, parts=tuple(parts))


def spread(
    name: str,
    axes: Mapping[str, Sequence[int]],
    program: Callable[..., Program | tuple[Program, ...]],
    *,
    apart: Sequence[int] = (),
) -> Launch:
    """Return a launch over a grid of cores; `axes[param]` lists the cores' shares along one axis.

    All shares along an axis are equal, except that the last may be smaller. Cores with equal shares
    run the same program, which `program(*shares)` returns; the params of a core are its position in
    the grid. `apart` is a further axis, along which every position gets a separate program:
    `program(*shares, (position, first element, end))`.

    If `program` returns a tuple (cube core's program, vector cores' programs ...), the launch is a
    mix launch. A vector program with a param `aiv` gets the number of its vector core in it.
    """
    # Per axis, the positions with the same share: {"row": (40, 40, 20)} gives
    # {(40, 40, 2): [0, 1], (20, 40, 3): [2]}.
    positions_of_share: list[dict[Share, list[int]]] = []
    for sizes in axes.values():
        by_size: dict[int, list[int]] = {}
        for position, size in enumerate(sizes):
            by_size.setdefault(size, []).append(position)
        shares_of_axis = {(size, sizes[0], at[-1] + 1): at for size, at in by_size.items()}
        positions_of_share.append(shares_of_axis)
    # apart (100, 100, 50): (0, 0, 100), (1, 100, 200), (2, 200, 250)
    spans_apart = [(i, i * apart[0], i * apart[0] + size) for i, size in enumerate(apart)]
    parts = list[Part]()
    mix = 0
    # rows (40, 40, 20), columns (64, 64): a program for 40 x 64 on 4 cores, one for 20 x 64 on 2
    for shares in product(*positions_of_share):
        axis_positions = (at[share] for at, share in zip(positions_of_share, shares, strict=True))
        grid = product(*axis_positions)
        bindings = tuple(binding_of(dict(zip(axes, at, strict=True))) for at in grid)
        if spans_apart:
            programs = [program(*shares, span) for span in spans_apart]
        else:
            programs = [program(*shares)]
        for core_program in programs:
            team = core_program if isinstance(core_program, tuple) else (core_program,)
            mix = len(team) if isinstance(core_program, tuple) else 0
            # the cube core is first: vector core i of the team has the number i - 1
            parts += [Part(p, _with_aiv(p, bindings, i - 1)) for i, p in enumerate(team)]
    return Launch(name, tuple(parts), mix)


def _with_aiv(program: Program, bindings: tuple[Binding, ...], aiv: int) -> tuple[Binding, ...]:
    """Bind the number of a vector core as well, if the program has a param `aiv`."""
    if "aiv" not in dict(program.params):
        return bindings
    return tuple(binding_of({**dict(binding), "aiv": aiv}) for binding in bindings)


# -- flags between the cores of a mix launch -------------------------------------------------------
CROSS_FLAG_COUNT = 16
"""Cross-core flags of a core: ids 0 to 15."""
MAX_COUNTER = 15
"""The largest value of a flag's counter, which has 4 bits."""
MODES = (0, 1, 2)
MODE_CUBE_AND_VECTOR = 2
"""The mode of flags between the cube core and the vector cores of an AI core."""


def check_cross(chip: Chip, instruction: Instruction) -> Instruction:
    """Return a cross-core flag instruction if the chip can run it; see `check_instruction`."""
    op = instruction.op
    flag = instruction.int_attr("id", -1)
    is_set = instruction.op == "cross_set"
    if chip.combined:
        needed = f"{op}: a chip whose cube and vector cores are separate"
        raise PathError(needed, chip.name, "use flags between pipes")
    if not 0 <= flag < CROSS_FLAG_COUNT:
        needed = f"{op}: a flag id of 0..{CROSS_FLAG_COUNT - 1}"
        raise CapacityError(needed, str(flag), "use an id again once it is drained")
    if is_set and instruction.int_attr("mode", -1) not in MODES:
        raise ProgramError(f"{op}: mode 0, 1 or 2", str(instruction.attr("mode")), "choose one")
    # every pipe but S, the scalar unit, can set a flag of another core; a wait stops all pipes
    pipes = PIPES[1:] if is_set else ("ALL",)
    if instruction.pipe not in pipes:
        needed = f"{op}: pipe {' or '.join(pipes)}"
        raise ProgramError(needed, instruction.pipe, "correct it")
    return instruction


def cross_set(chip: Chip, mode: int, pipe: str, flag: int) -> Instruction:
    """Add 1 to counter `flag` of other cores, once all earlier work on `pipe` has finished.

    In mode 2 a cube core signals its vector cores; in the other direction the cube core is
    signalled once all its vector cores have set the flag. Mode 1 synchronises the vector cores of
    an AI core, mode 0 all cores of one type.
    """
    attrs = (("mode", mode), ("id", flag))
    return check_cross(chip, Instruction("cross_set", pipe, attrs=attrs))


def cross_wait(chip: Chip, flag: int) -> Instruction:
    """Wait until counter `flag` of this core is above 0, then subtract 1 from it.

    Later instructions of the core wait on all pipes; earlier ones continue.
    """
    return check_cross(chip, Instruction("cross_wait", "ALL", attrs=(("id", flag),)))


def senders(core: int, mode: int, cores: int, team: int) -> list[int]:
    """Return the cores whose sets of `mode` a core waits for; all must have set the flag.

    `team` cores make an AI core, the cube core first. With team = 3, cores 0 and 3 are cube cores;
    in mode 2 core 0 waits for 1 and 2, and core 4 waits for 3.
    """
    cube_core = core - core % team
    vector_cores = range(cube_core + 1, cube_core + team)
    is_cube = core % team == 0
    # in modes 0 and 1 a core is among its own senders: it must have set the flag as well
    if mode == 0:
        return [c for c in range(cores) if (c % team == 0) == is_cube]
    if mode == 1:
        return [] if is_cube else list(vector_cores)
    return list(vector_cores) if is_cube else [cube_core]


def pipes_by_cross_flag(program: Program) -> dict[tuple[int, int], set[str]]:
    """Return, for each (mode, flag) of a program's cross_sets, the pipes that set it."""
    pipes: dict[tuple[int, int], set[str]] = {}
    for i, _ in program.instructions():
        if i.op == "cross_set":
            pipes.setdefault((i.int_attr("mode"), i.int_attr("id")), set()).add(i.pipe)
    return pipes


def ai_cores_wait_for_each_other(launch: Launch) -> bool:
    """Tell whether a mix launch has flags of mode 0, with which AI cores wait for each other."""
    programs = [part.program for part in launch.parts if launch.mix]
    return any(mode == 0 for program in programs for mode, _ in pipes_by_cross_flag(program))


def crews(launch: Launch) -> list[tuple[tuple[Program, dict[str, int]], ...]]:
    """Return the crews of a launch: groups of cores that may wait for each other.

    A crew is one AI core, or with flags of mode 0 all cores of the launch. Each core is given as
    its program and the values of its params.
    """
    # 3 AI cores of a cube and two vector cores are 3 crews of 3 cores, with mode 0 one crew of 9
    ai_cores = []
    for team in launch.teams:
        for bindings in zip(*(part.bindings for part in team), strict=True):
            cores = zip(team, bindings, strict=True)
            ai_cores.append(tuple((part.program, dict(binding)) for part, binding in cores))
    return [tuple(chain(*ai_cores))] if ai_cores_wait_for_each_other(launch) else ai_cores


def check_launch(chip: Chip, launch: Launch) -> None:
    """Raise `PathError` or `ProgramError` if the chip cannot run the flags or cores of a launch.

    Cross-core flags need a mix launch; mode 1 is for vector cores; only one pipe of a program may
    set a flag. The cores of a mix launch all start together, so that the chip must have them.
    """
    for position, part in enumerate(launch.parts):
        if not any(i.op in CROSS for i, _ in part.program.instructions()):
            continue
        pipes_of_flags = pipes_by_cross_flag(part.program)
        name = part.program.name
        if not launch.mix:
            needed = f"{name}: a mix launch for cross-core flags"
            got = "cores of one kind alone"
            raise PathError(needed, got, "launch cube and vector programs together")
        # with mix 3 the parts are cube, vector, vector, cube, ...: positions 0, 3, 6 are cube parts
        is_cube_part = position % launch.mix == 0
        if is_cube_part and any(mode == 1 for mode, _ in pipes_of_flags):
            needed = f"{name}: mode 0 or 2 on a cube core"
            raise ProgramError(needed, "mode 1", "it is of vector cores")
        for (_, flag), pipes in pipes_of_flags.items():
            if len(pipes) > 1:
                needed = f"{name}: one pipe that sets cross-core flag {flag}"
                raise ProgramError(needed, ", ".join(sorted(pipes)), "use a flag for each")
    # `mix` counts the cube core as well
    if launch.mix and launch.mix - 1 > chip.vector_cores_per_core:
        needed = f"{launch.name}: at most {chip.vector_cores_per_core} vector cores to a cube core"
        raise PathError(needed, str(launch.mix - 1), f"{chip.name} has no more")
    if launch.mix and launch.core_count > chip.core_count:
        needed = f"{launch.name}: at most {chip.core_count} AI cores, which start together"
        raise PathError(needed, str(launch.core_count), "launch fewer blocks")


class Counters:
    """The flag counters of several cores; each `team` cores form an AI core, the cube core first.

    `senders_to[receiver, mode]` lists the cores whose sets a core waits for, `receivers_of[sender,
    mode]` those that wait for its sets. `sets` counts per (receiver, mode, flag, sender), `waits`
    the finished waits per (core, flag).
    """

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        self.senders_to = {(r, m): senders(r, m, cores, team) for r in range(cores) for m in MODES}
        self.receivers_of: dict[tuple[int, int], list[int]] = {
            (core, mode): [] for core in range(cores) for mode in MODES
        }
        for (receiver, mode), sending_cores in self.senders_to.items():
            for core in sending_cores:
                self.receivers_of[core, mode].append(receiver)
        # neither count ever falls; the value of a flag's counter is their difference
        self.sets = Counter[tuple[int, int, int, int]]()
        self.waits = Counter[tuple[int, int]]()

    def ready(self, core: int, flag: int) -> int:
        """Return the value of counter `flag` of a core."""
        # A set counts when all senders have made it: after 3 sets by vector core 0 and 2 by vector
        # core 1 the cube core has received 2.
        received = sum(
            min((self.sets[core, mode, flag, s] for s in self.senders_to[core, mode]), default=0)
            for mode in MODES
        )
        return received - self.waits[core, flag]

    def set(self, core: int, mode: int, flag: int) -> None:
        """Count a set by one core; raise `SyncError` if 16 of them wait to be consumed."""
        for r in self.receivers_of[core, mode]:
            self.sets[r, mode, flag, core] += 1
            if self.sets[r, mode, flag, core] - self.waits[r, flag] > MAX_COUNTER:
                needed = (
                    f"at most {MAX_COUNTER} sets of cross-core flag {flag} that wait to be consumed"
                )
                remedy = "let the other side tell that it is ready"
                raise SyncError(needed, str(MAX_COUNTER + 1), remedy)


def core_name(core: int, team: int) -> str:
    """Return the name of a core in messages: `AIV1`, or on the third AI core `AIC of core 2`."""
    # in teams of 3 core 4 is AIV0 of core 1: cores 3, 4, 5 make the second AI core
    member = core % team
    kind = f"AIV{member - 1}" if member else "AIC"
    return kind if core < team else f"{kind} of core {core // team}"


# -- a ring of slots -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ring:
    """A ring buffer in GM: `slots` tiles of `elements` elements for each of `cores` AI cores.

    The flag with the id `ready` reports a full slot, the flag with the id `empty` an empty slot.
    """

    name: str
    dtype: str
    elements: int
    slots: int
    cores: int
    ready: int
    empty: int

    def __post_init__(self) -> None:
        """Check that the flag counters, of at most 15, can count all slots."""
        if not 1 <= self.slots <= MAX_COUNTER or self.ready == self.empty:
            needed = f"ring {self.name}: 1 to {MAX_COUNTER} slots, and two different flag ids"
            got = f"{self.slots} slots, ids {self.ready} and {self.empty}"
            raise CapacityError(needed, got, "use fewer slots, other ids")

    @property
    def buffer(self) -> Buffer:
        """The ring as a tensor in GM: slots outermost, in each slot the AI cores in order."""
        return Buffer(self.name, "GM", self.dtype, self.elements * self.cores, self.slots)


@dataclass(frozen=True, slots=True)
class RingTile:
    """One slot of a ring; the producer has it from alloc to enqueue, then the consumer.

    A slot has room for all AI cores; `start` is the first element of this one.
    """

    ring: Ring
    slot: int
    start: Affine

    def region(self, offset: Index = 0, sizes: Sizes = None, strides: Strides = None) -> Region:
        """Return a region of the tile, as `Buffer.region`; default: the whole tile."""
        sizes = self.ring.elements if sizes is None else sizes
        return self.ring.buffer.region(self.start + offset, sizes, strides, slot=self.slot)

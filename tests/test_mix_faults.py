"""Every kind of fault between cores is found, and told by what it is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from message_lists import assert_messages
from mix_cases import CHIP, Relay
from strategies import edited

from ascend_lab.deploy.runtime.kernel_data import kernel_data, kernel_of
from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Instruction,
    KernelBuilder,
    Launch,
    Part,
    as_kernel,
    cross_set,
    cross_wait,
    parse_program,
    sanitize,
    spread,
)
from ascend_lab.machine.sim import execute, simulate

PLAIN = Relay(tiles=(6, 6), slots=2)
Change = Callable[[Instruction], Instruction | None]


def changed(launch: Launch, member: int, change: Change) -> Launch:
    """Return the launch with every instruction of one core of each team changed, or dropped."""
    parts = [
        replace(part, program=edited(part.program, change))
        if place % launch.mix == member
        else part
        for place, part in enumerate(launch.parts)
    ]
    return replace(launch, parts=tuple(parts))


def drops(op: str, flag: int) -> Change:
    return lambda i: None if (i.op, i.attr("id", -1)) == (op, flag) else i


def moved(pipe: str) -> Change:
    return lambda i: replace(i, pipe=pipe) if i.op == "cross_set" else i


FAULTS = {
    "the tile is never said to be ready": (0, drops("cross_set", 0), "deadlock"),
    "the tile is not waited for": (1, drops("cross_wait", 0), "race"),
    "and its flag is left": (2, drops("cross_wait", 0), "leak"),
    "the slot is never said to be empty": (1, drops("cross_set", 1), "deadlock"),
    "the slot is not waited for": (0, drops("cross_wait", 1), "race"),
    "a store's flag on another pipe": (0, moved("M"), "race"),
    "a load's flag on another pipe": (2, moved("V"), "race"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(name: str) -> None:
    member, change, kind = FAULTS[name]
    launch = changed(PLAIN.launch(), member, change)
    if member and kind != "deadlock" and launch.parts[1].program != launch.parts[2].program:
        assert launch.mix == 3
    found = sanitize(launch, CHIP)
    assert kind in {f.kind for f in found}, [str(f) for f in found]


def team(*programs: KernelBuilder) -> Launch:
    """Return a launch of one AI core."""
    written = tuple(k.finish() for k in programs)
    return spread("team", {"core": [1]}, lambda _: written)


def builders() -> list[KernelBuilder]:
    made = [KernelBuilder(name, CHIP) for name in ("cube", "vector0", "vector1")]
    for k in made:
        k.param("core", 1)
    return made


def test_a_deadlock_names_the_flags() -> None:
    cube, *vectors = builders()
    cube.cross_wait(3)
    cube.cross_set(2, "FIX", 4)
    for k in vectors:
        k.cross_wait(4)
        k.cross_set(2, "MTE3", 3)
    launch = team(cube, *vectors)
    (finding,) = sanitize(launch, CHIP)
    assert finding.kind == "deadlock"
    for text in ("AIC waits for cross-core flag 3", "AIV0 waits for cross-core flag 4"):
        assert text in finding.message
    with pytest.raises(SyncError, match="AIV1 waits for cross-core flag 4"):
        execute(launch, {}, CHIP)
    for engine in ("fast", "reference"):
        with pytest.raises(SyncError):
            simulate(launch, CHIP, engine=engine)


@pytest.mark.parametrize("sets", [15, 16])
def test_the_sixteenth_set_that_nobody_has_waited_for_overflows(sets: int) -> None:
    cube, *vectors = builders()
    with cube.loop("i", sets):
        cube.cross_set(2, "FIX", 0)
    for k in vectors:
        with k.loop("i", sets):
            k.cross_wait(0)
    kinds = {finding.kind for finding in sanitize(team(cube, *vectors), CHIP)}
    assert kinds == ({"event-overflow"} if sets == 16 else set())


@pytest.mark.parametrize("drained", [True, False])
def test_a_flag_in_two_modes_must_be_drained_between(drained: bool) -> None:
    cube, *vectors = builders()
    cube.cross_set(2, "FIX", 5)
    cube.cross_wait(6)
    for k in vectors:
        if drained:
            k.cross_wait(5)
        k.cross_set(2, "MTE3", 6)
        k.cross_set(1, "MTE3", 5)
        k.cross_wait(5)
        if not drained:
            k.cross_wait(5)
    launch = team(cube, *vectors)
    found = sanitize(launch, CHIP)
    assert bool(found) != drained and all("mode" in f.message for f in found)
    with pytest.raises(SimulationError, match="one mode"):
        simulate(launch, CHIP)


def test_all_cores_of_a_kind_meet() -> None:
    """The slow core holds up the others, by mode 0; each engine tells so."""
    teams = []
    for copies in (1, 50):
        cube, *vectors = builders()
        for k in vectors:
            tile = k.buffer("t", "UB", "fp16", 128)
            for _ in range(copies):
                k.vector("vdup", tile.region(0, (1, 128)), scalar=0.0)
            k.cross_set(0, "V", 2)
            k.cross_wait(2)
            k.vector("vdup", tile.region(0, (1, 128)), scalar=0.0)
        teams.append([Part(k.finish(), ((("core", 0),),)) for k in (cube, *vectors)])
    both = Launch("meet", (*teams[0], *teams[1]), 3)
    alone = Launch("meet", tuple(teams[0]), 3)
    times = {e: simulate(both, CHIP, engine=e).cycles for e in ("fast", "reference")}
    assert times["fast"] == times["reference"] > 4 * simulate(alone, CHIP).cycles
    assert sanitize(both, CHIP) == []


def test_what_is_refused_says_what_is_needed() -> None:
    cube, vector, *_ = PLAIN.launch().parts
    assert [f.kind for f in sanitize(Launch("alone", (cube,)), CHIP)] == ["illegal"]
    many = Relay(tiles=(1,) * 25).launch()
    assert "at most 24 AI cores" in str(sanitize(many, CHIP)[0])
    calls = {
        "a cube core alone": lambda: simulate(Launch("alone", (cube,)), CHIP),
        "a team of two": lambda: Launch("odd", (cube, vector), 3),
        "coupled cores": lambda: cross_wait(load_chip("Ascend910A"), 0),
        "flag -1": lambda: cross_set(CHIP, 2, "FIX", -1),
        "flag 16": lambda: cross_set(CHIP, 2, "FIX", 16),
        "mode 4": lambda: cross_set(CHIP, 4, "FIX", 0),
        "a scalar pipe": lambda: cross_set(CHIP, 2, "S", 0),
    }
    assert_messages("isa", "test_mix_faults", calls)


def test_a_mix_kernel_survives_its_text() -> None:
    kernel = as_kernel(PLAIN.launch())
    assert kernel_of(kernel_data(kernel)) == kernel
    assert parse_program(str(kernel.phases[0].parts[0].program)).buffers

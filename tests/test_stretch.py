"""The slowdown of memory: a search that finds what plain halving finds, when asked for."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st
from strategies import gemm_cases, launches

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Event, Instruction, Loop, Program
from ascend_lab.machine.sim import (
    NotComposableError,
    Surroundings,
    analyse,
    compile_program,
    run_fast,
    run_reference,
    simulate,
)
from ascend_lab.machine.sim.fast import MAX_SLOWDOWN, run_quickest, stretch
from ascend_lab.operators.kernels import elementwise_launch, gemm_launch

TOY = load_chip("Toy")
B2 = load_chip("Ascend910B2")


def slowed(launch, chip, around, slowdown: float, made: list) -> list:
    """The parts with the durations of programs compiled anew; when flags are raised stays."""
    slower = replace(around, memory_slowdown=slowdown)
    anew = [compile_program(p.program, chip, slower) for p in launch.parts]
    return [replace(one, cycles=other.cycles) for one, other in zip(made, anew, strict=True)]


def halved(launch, chip, around, cycles, made) -> float:
    """The slowdown by recompiling everything for every guess."""

    def fits(slowdown: float) -> bool:
        parts = slowed(launch, chip, around, slowdown, made)
        return max(run_reference(part)[0] for part in parts) <= cycles

    low = 1.0
    high = 2.0
    while high < MAX_SLOWDOWN and fits(high):
        low = high
        high = 2.0 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@given(
    st.one_of(gemm_cases().map(lambda c: (gemm_launch(c[0], c[2], c[1]), c[2])), launches()),
    st.floats(1.0, 40.0),
)
def test_the_search_finds_what_halving_finds(case, stretch_by):
    launch, chip = case
    around = Surroundings(launch.core_count, analyse(launch, chip).memory_share)
    parts = tuple(compile_program(p.program, chip, around) for p in launch.parts)
    cycles = int(max(run_reference(part)[0] for part in parts) * stretch_by)
    assume(cycles > 0)
    found = stretch(parts, chip, around, cycles)
    assert found.slowdown == halved(launch, chip, around, cycles, parts)
    assert found.slowest in slowed(launch, chip, around, found.slowdown, parts)
    assert run_reference(found.slowest)[0] <= cycles


def test_cycles_are_known_before_the_search(monkeypatch):
    launch = elementwise_launch(B2, 48 * 2048 * 1600)
    expected = simulate(launch, B2)
    assert expected.memory_slowdown > 1.0

    def refuse(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("ascend_lab.machine.sim.timeline.stretch", refuse)
    timeline = simulate(launch, B2)
    assert timeline.cycles == expected.cycles
    assert timeline.energy_j == expected.energy_j
    with pytest.raises(AssertionError, match="searched"):
        timeline.busy  # noqa: B018


def test_programs_without_a_matrix_are_timed_by_the_reference():
    """A loop body that leaves a flag up cannot be repeated as a matrix power."""
    event = Event("S", "MTE2", 0)
    work = elementwise_launch(TOY, 2 * 2048).parts[0].program
    load = next(i for i, _ in work.instructions() if i.op == "data_copy")
    up = Instruction("set_flag", "S", event=event)
    down = Instruction("wait_flag", "MTE2", event=event)
    program = Program("surplus", work.buffers, (Loop("j", 2, (up,)), down, load, down), work.params)
    compiled = compile_program(program, TOY, Surroundings())
    with pytest.raises(NotComposableError):
        run_fast(compiled)
    slow = replace(compiled, cycles=tuple(2 * c for c in compiled.cycles))
    for candidate in (compiled, slow):
        assert run_quickest(candidate) == run_reference(candidate)[0]

"""The fast engine, the plain reference and the compiled reference agree to the cycle."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from strategies import flag_programs, gemm_cases, kernels, launches

from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Event, Instruction, Loop, Program, as_launch, sanitize
from ascend_lab.machine.sim import (
    Compiled,
    NotComposableError,
    Surroundings,
    analyse,
    compile_program,
    compiled as reference_engine,
    numba_available,
    run_batch,
    run_fast,
    run_reference,
    simulate,
)
from ascend_lab.machine.sim.fast import run_walked
from ascend_lab.operators.kernels import ConvShape, GemmShape, conv_launch, gemm_launch

TOY = load_chip("Toy")
needs_numba = pytest.mark.skipif(not numba_available(), reason="Numba is not installed")


def compiled(program: Program, chip=TOY) -> Compiled:
    memory_share = analyse(as_launch(program), chip).memory_share
    return compile_program(program, chip, Surroundings(1, memory_share))


def assert_engines_agree(launch, chip):
    fast = simulate(launch, chip)
    plain = simulate(launch, chip, engine="reference")
    assert fast.cycles == plain.cycles
    assert fast.summary() == plain.summary()
    return fast


@settings(max_examples=100)
@given(kernels())
def test_fast_equals_reference_on_random_kernels(case):
    program, chip = case
    code = compiled(program, chip)  # legal kernels never need the fallback
    assert run_fast(code) == run_walked(code) == run_reference(code)[0]
    assert_engines_agree(program, chip)


@given(launches())
def test_fast_equals_reference_on_several_cores_with_a_tail(case):
    launch, chip = case
    timeline = assert_engines_agree(launch, chip)
    assert timeline.core_count == launch.core_count


@given(gemm_cases())
def test_fast_equals_reference_on_random_matrix_products(case):
    shape, schedule, chip = case
    assert_engines_agree(gemm_launch(shape, chip, schedule), chip)


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize("sizes", [(2, 20, 9, 11, 24, 3, 3, 1, 1), (3, 40, 13, 10, 33, 5, 3, 2, 2)])
def test_fast_equals_reference_on_convolutions(chip_name, sizes):
    chip = load_chip(chip_name)
    assert_engines_agree(conv_launch(ConvShape(*sizes), chip), chip)


def test_short_and_long_programs_take_equally_long_in_every_engine():
    for n in (64, 512):
        code = compiled(gemm_launch(GemmShape(n, n, n), TOY).parts[0].program)
        assert run_walked(code) == run_fast(code)


@needs_numba
@given(kernels())
def test_compiled_reference_equals_plain_reference(case):
    program, chip = case
    code = compiled(program, chip)
    plain = run_reference(code, record=True)
    quick = run_reference(code, record=True, compiled=True)
    assert plain == quick


@given(kernels(), st.integers(0, 2**32 - 1))
def test_every_candidate_of_a_batch_equals_the_reference(case, seed):
    program, chip = case
    code = compiled(program, chip)
    rng = np.random.default_rng(seed)
    batch = 5

    def numbers(count: int, high: int) -> np.ndarray:
        return rng.integers(0, high, (count, batch))

    cycles = numbers(len(code.steps), 300)
    latency = numbers(len(code.steps), 90)
    tails = numbers(len(code.pipes), 90)
    # The builder leaves out the flags of a queue that never runs, so loops of 0 turns stay so.
    runs = np.array(code.counts).reshape(-1, 1) > 0
    counts = rng.choice([0, 1, 2, 3, 6], (len(code.counts), batch)) * runs
    got = run_batch(code, cycles, latency, tails, counts)
    for i in range(batch):
        one = replace(
            code,
            cycles=tuple(cycles[:, i].tolist()),
            latency=tuple(latency[:, i].tolist()),
            tail_latency=tuple(tails[:, i].tolist()),
            counts=tuple(counts[:, i].tolist()),
        )
        assert got[i] == run_reference(one)[0] == run_fast(one)


def outcome(program: Program, engine: str) -> int | str:
    try:
        return simulate(program, TOY, engine=engine).cycles
    except SyncError:
        return "deadlock"


STUCK = Program(
    "stuck",
    (),
    (
        Instruction("wait_flag", "V", event=Event("S", "V", 0)),
        Instruction("set_flag", "V", event=Event("V", "S", 0)),
        Instruction("wait_flag", "S", event=Event("V", "S", 0)),
        Instruction("set_flag", "S", event=Event("S", "V", 0)),
    ),
)


@settings(max_examples=100)
@given(flag_programs())
@example(STUCK)
def test_raw_flags_end_alike_in_both_engines_and_in_the_sanitizer(program):
    plain = outcome(program, "reference")
    assert outcome(program, "fast") == plain
    kinds = {finding.kind for finding in sanitize(program, TOY)}
    assert ("deadlock" in kinds) == (plain == "deadlock")


def test_raw_flag_programs_cover_both_outcomes():
    """The strategy above is worth something only if it draws deadlocks and runs that end."""
    seen = set()

    @settings(max_examples=100, database=None)
    @given(flag_programs())
    def draw(program):
        flags = sum(i.event is not None for i, _ in program.instructions())
        seen.add((outcome(program, "reference") == "deadlock", flags > 3))

    draw()
    assert {(True, True), (False, True)} <= seen


def surplus(count: int) -> Program:
    """Sets more flags in a loop than it waits for: legal in time, no (max, +) power of one pass."""
    event = Event("S", "V", 0)
    body = (Instruction("set_flag", "S", event=event), Instruction("scalar", "S"))
    wait = Loop("j", count, (Instruction("wait_flag", "V", event=event),))
    return Program("surplus", (), (Loop("i", count, body), wait))


def test_unbalanced_loops_fall_back_to_the_reference():
    with pytest.raises(NotComposableError, match="as many sets as waits"):
        run_fast(compiled(surplus(7)))
    assert outcome(surplus(7), "fast") == outcome(surplus(7), "reference")


def test_the_reference_refuses_what_would_never_end():
    with pytest.raises(SimulationError, match="at most 100000000 steps"):
        simulate(surplus(10**9), TOY)


def test_the_fast_engine_refuses_times_beyond_its_integers():
    deep = Loop("i", 2**30, (Loop("j", 2**30, (Instruction("scalar", "S"),)),))
    with pytest.raises(SimulationError, match="cycles of work"):
        simulate(Program("forever", (), (Loop("k", 8, (deep,)),)), TOY)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 10**12])
def test_long_loops_cost_no_time_to_simulate(count):
    body = (Instruction("scalar", "S", attrs=(("steps", 5),)),)
    assert simulate(Program("long", (), (Loop("i", count, body),)), TOY).cycles == 5 * count


def test_an_empty_program_takes_no_cycles():
    for engine in ("fast", "reference"):
        assert simulate(Program("empty", (), ()), TOY, engine=engine).cycles == 0


def test_an_unknown_engine_is_refused():
    with pytest.raises(SimulationError, match="engine 'fast' or 'reference'"):
        simulate(STUCK, TOY, engine="magic")


def test_the_compiled_engine_without_numba_says_so(monkeypatch):
    monkeypatch.setattr(reference_engine, "numba_available", lambda: False)
    with pytest.raises(SimulationError, match="Numba"):
        run_reference(compiled(Program("empty", (), ())), compiled=True)

"""What a simulation tells: bounds on its cycles, spans, stalls, critical path, energy, summary."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from strategies import assert_bounds, gemm_cases, kernels

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Event, Instruction, Launch, Part, Program
from ascend_lab.machine.sim import Surroundings, instruction_cost, simulate
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators.kernels import (
    GemmShape,
    elementwise_launch,
    elementwise_program,
    gemm_launch,
)

TOY = load_chip("Toy")


@settings(max_examples=150)
@given(kernels())
def test_cycles_lie_between_the_busiest_pipe_and_no_overlap_at_all(case):
    assert_bounds(simulate(*case))


@settings(max_examples=100)
@given(gemm_cases())
def test_matrix_products_keep_the_bounds(case):
    shape, schedule, chip = case
    assert_bounds(simulate(gemm_launch(shape, chip, schedule), chip))


@given(kernels(budget=40))
def test_spans_fill_each_pipe_in_order(case):
    timeline = simulate(*case)
    free = dict.fromkeys(timeline.compiled.pipes, 0)
    busy = dict.fromkeys(timeline.compiled.pipes, 0)
    for span in timeline.spans:
        assert span.start == free[span.pipe]
        assert span.end - span.start >= span.stall_cycles >= 0
        assert bool(span.waited_for) == bool(span.stall_cycles)
        assert span.previous < len(timeline.spans)
        free[span.pipe] = span.end
        if not span.name.startswith(("wait_flag", "set_flag", "barrier")):
            busy[span.pipe] += span.end - span.start
    assert busy == timeline.busy_cycles
    tails = dict(zip(timeline.compiled.pipes, timeline.compiled.tail_latency, strict=True))
    assert max((end + tails[pipe] for pipe, end in free.items()), default=0) == timeline.cycles


@given(kernels(budget=40))
def test_stalls_add_up_and_name_their_cause(case):
    timeline = simulate(*case)
    assert sum(timeline.stalls.values()) == sum(s.stall_cycles for s in timeline.spans)
    assert list(timeline.stalls.values()) == sorted(timeline.stalls.values(), reverse=True)
    for pipe, cause in timeline.stalls:
        assert cause.split(">")[1].startswith(f"{pipe}:")


@given(kernels(budget=40))
def test_the_critical_path_is_a_chain_from_start_to_end(case):
    timeline = simulate(*case)
    path = timeline.critical_path
    if not timeline.spans:
        assert path == ()
        return
    assert path[0].start == 0
    assert path[0].stall_cycles == 0
    tails = dict(zip(timeline.compiled.pipes, timeline.compiled.tail_latency, strict=True))
    assert path[-1].end + tails[path[-1].pipe] == timeline.cycles
    for before, after in pairwise(path):
        begin = after.start + after.stall_cycles
        assert begin >= before.end
        assert begin == before.end or after.stall_cycles  # only a flag may add latency
    shares = timeline.critical_share()
    assert sum(shares.values()) == pytest.approx(1.0 if timeline.cycles else 0.0)


def test_known_cycles_of_a_copy():
    """startup 10 + 256 bytes at the memory's rate of 40 bytes/cycle but 32 on the path = 18."""
    program = elementwise_program(TOY, 128, op="vrelu", tile=128, depth=1)
    copy = next(i for i, _ in program.instructions() if i.op == "data_copy")
    cost = instruction_cost(TOY, copy, Surroundings())
    assert cost.occupancy_cycles == 10 + 8
    assert cost.latency_cycles == 200
    assert cost.energy_pj == 256 * (5.0 + 12.5 + 162.5)  # path, L2, device memory
    hit = instruction_cost(TOY, copy, Surroundings(memory_share={"x1": 0.0}))
    assert hit.latency_cycles == 50
    assert hit.energy_pj == 256 * (5.0 + 12.5)
    crowd = instruction_cost(TOY, copy, Surroundings(active_cores=4))
    assert crowd.occupancy_cycles == 10 + 26  # 40 / 4 = 10 bytes/cycle each


def test_known_cycles_of_the_units():
    launch = gemm_launch(GemmShape(64, 32, 64), TOY)
    costs = {
        i.op: instruction_cost(TOY, i, Surroundings()).occupancy_cycles
        for i, _ in launch.parts[0].program.instructions()
        if i.op in ("mmad", "set_flag", "wait_flag")
    }
    sizes = next(i for i, _ in launch.parts[0].program.instructions() if i.op == "mmad")
    fractals = sizes.srcs[0].sizes[0] * sizes.srcs[0].sizes[1] * sizes.srcs[1].sizes[1]
    assert costs == {"mmad": 6 + fractals, "set_flag": 1, "wait_flag": 1}
    relu = elementwise_program(TOY, 1024, op="vrelu", tile=1024)
    vector = next(i for i, _ in relu.instructions() if i.op == "vrelu")
    cost = instruction_cost(TOY, vector, Surroundings())
    assert (cost.occupancy_cycles, cost.latency_cycles) == (10 + 8, 13)
    assert cost.energy_pj == 2048 * 0.75
    scalar = Instruction("scalar", "S", attrs=(("steps", 9),))
    assert instruction_cost(TOY, scalar, Surroundings()).occupancy_cycles == 9


def test_known_cycles_of_flags():
    """S: 5 cycles of work, 1 to set; V waits until 6, takes 1 for the wait, then 16 of its own."""
    event = Event("S", "V", 0)
    body = (
        Instruction("scalar", "S", attrs=(("steps", 5),)),
        Instruction("set_flag", "S", event=event),
        Instruction("wait_flag", "V", event=event),
        Instruction("barrier", "V"),
    )
    timeline = simulate(Program("flags", (), body), TOY)
    assert timeline.cycles == 5 + 1 + 1 + 16
    assert timeline.stalls == {("V", "S>V:0"): 6}
    assert [(s.pipe, s.start, s.end) for s in timeline.spans] == [
        ("S", 0, 5),
        ("S", 5, 6),
        ("V", 0, 7),
        ("V", 7, 23),
    ]


def test_a_barrier_pays_the_latency_once():
    """After a barrier the result is there: a flag set behind it adds no latency again."""
    load = next(
        i
        for i, _ in elementwise_program(TOY, 128, op="vrelu", tile=128).instructions()
        if i.op == "data_copy"
    )
    barrier = Instruction("barrier", "ALL")
    program = elementwise_program(TOY, 128, op="vrelu", tile=128)
    alone = Program("load", program.buffers, (load,), program.params)
    closed = Program("load", program.buffers, (load, barrier), program.params)
    cycles = simulate(alone, TOY).cycles
    assert cycles == 18 + 200
    assert simulate(closed, TOY).cycles == 18 + TOY.barrier_cycles


def test_energy_counts_every_core_and_every_byte():
    chip = load_chip("Ascend910A")
    launch = elementwise_launch(chip, 32 * 2048)
    one = Launch("one", (Part(launch.parts[0].program, launch.parts[0].bindings[:1]),))
    whole = simulate(launch, chip)
    single = simulate(one, chip)
    assert whole.energy_j == pytest.approx(32 * single.energy_j)
    assert whole.energy_j > 0
    program = gemm_launch(GemmShape(64, 64, 64), TOY)
    cube_only = 64**3 * TOY.mac_energy_pj["fp16"]
    assert simulate(program, TOY).energy_pj > cube_only


def test_the_summary_is_plain_data():
    timeline = simulate(gemm_launch(GemmShape(64, 64, 64), TOY), TOY)
    data = json.loads(json.dumps(timeline.summary()))
    assert data["cycles"] == timeline.cycles
    assert data["bytes"]["GM->L1"] == timeline.path_bytes["GM", "L1"]
    assert timeline.name in repr(timeline)
    page = timeline._repr_html_()
    for pipe in timeline.busy_cycles:
        assert f"<td>{pipe}</td>" in page


# -- refusals --------------------------------------------------------------------------------------
def test_a_launch_of_its_own_waits_for_cores_of_both_kinds():
    more = {way: start_cycles(TOY, way, 7) - start_cycles(TOY, way)
            for way in ("cold", "queued", "inside", "across", "both")}  # fmt: skip
    assert more == {"cold": 7, "queued": 7, "inside": 0, "across": 0, "both": 0}

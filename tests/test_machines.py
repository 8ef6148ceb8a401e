"""The small machines: values against NumPy, cycles against bounds, counts against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.errors import MachineError
from ascend_lab.lab import machines
from ascend_lab.lab.machines import (
    Arith,
    Cube,
    Kernel,
    Load,
    Matmul,
    Port,
    Scalar,
    Simd,
    Simt,
    Store,
    Systolic,
    VectorOp,
    bank_ways,
    plain_ops,
    roofline as fact_file,
    run,
    run_vector,
    sample_inputs,
    units_touched,
)
from ascend_lab.lab.machines.lanes import blocking, tiled
from ascend_lab.lab.machines.matrix_units import array_cycles, frames
from ascend_lab.lab.machines.program import walk
from ascend_lab.lab.machines.roofline import Dot, Level, attainable, binding_level, ridge_point
from ascend_lab.lab.machines.simd import instruction_count
from ascend_lab.lab.machines.simt import last_cycle, schedule, tree_steps

LANE_MACHINES = [Scalar(), Simd(), Simt()]
MATRIX_MACHINES = [Systolic(), Cube(), Cube(fold=16)]
ALL_MACHINES = [*LANE_MACHINES, *MATRIX_MACHINES]
SIZES = [1, 2, 31, 32, 33, 64, 97, 257, 1000, 4099]
KERNELS = {
    "saxpy": machines.saxpy,
    "masked add": machines.masked_add,
    "reduction": machines.total,
    "two-sided": machines.two_sided,
    "strided copy": lambda n: machines.strided_copy(n, 3),
    "gather": machines.gather,
}


def named(machine: object) -> str:
    return type(machine).__name__


def reference(program, inputs):
    """Return what plain NumPy computes for a program of chapter 1."""
    if isinstance(program, Matmul):
        return {"C": np.matmul(inputs["A"].astype(np.float64), inputs["B"].astype(np.float64))}
    x = inputs["x"]
    if program.name == "saxpy":
        return {"y": inputs["a"] * x + inputs["y"]}
    if program.name == "masked add":
        return {"y": np.where(inputs["mask"], x + inputs["y"], inputs["y"])}
    if program.name == "reduction":
        return {"s": np.array([x.sum(dtype=np.float64)])}
    if program.name == "strided copy":
        load = program.body[0]
        stride = load.stride if isinstance(load, Load) else 1
        return {"y": x[::stride][: program.n]}
    if program.name == "gather":
        return {"y": x[inputs["idx"]]}
    slope = np.where(inputs["mask"], inputs["a"], inputs["b"])
    depth = sum(isinstance(instr, Arith) for instr in walk(program.body)) // 2
    return {"y": inputs["y"] + x.dtype.type(depth) * slope * x}


def assert_bounds(one: machines.Run) -> None:
    parts = (one.parts.compute, one.parts.move, one.parts.wait)
    assert max(parts) <= one.cycles <= sum(parts)
    assert one.bar.total == one.cycles
    assert min(one.bar.compute, one.bar.move, one.bar.wait) >= 0
    assert one.bar.move <= one.parts.move
    assert one.bar.wait <= one.parts.wait


# A SIMD machine refuses to gather; that is tested with the bad input.
PAIRS = [(m, k) for m in LANE_MACHINES for k in KERNELS if (named(m), k) != ("Simd", "gather")]
PAIRS += [(m, k) for m in MATRIX_MACHINES for k in ("saxpy", "reduction")]  # sums of products


@pytest.mark.parametrize(("machine", "name"), PAIRS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("n", SIZES)
def test_machines_compute_what_numpy_computes(machine, name, n):
    kernel = KERNELS[name](n)
    inputs = sample_inputs(kernel, seed=n)
    one = run(machine, kernel, inputs)
    for key, expected in reference(kernel, inputs).items():
        np.testing.assert_array_equal(one.values[key], expected)
    assert_bounds(one)


@settings(max_examples=100)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["float32", "float16", "int8"]),
    st.sampled_from(range(len(ALL_MACHINES))),
)
def test_matmul_values_and_bounds(m, k, n, dtype, which):
    program = Matmul(m, k, n)
    inputs = sample_inputs(program, seed=m * 71 + n, dtype=dtype)
    one = run(ALL_MACHINES[which], program, inputs)
    np.testing.assert_array_equal(one.values["C"], reference(program, inputs)["C"])
    assert one.values["C"].dtype == ("int32" if dtype == "int8" else "float32")
    assert_bounds(one)


def test_sums_round_in_the_order_of_each_machine():
    x = np.full(4096, 1.0, np.float16)
    kernel = machines.total(4096)
    sums = {named(m): float(run(m, kernel, {"x": x}).values["s"][0]) for m in LANE_MACHINES}
    # fp16 counts exactly to 2048; one running sum stops there, partial sums do not.
    assert sums == {"Scalar": 2048.0, "Simd": 4096.0, "Simt": 4096.0}


@pytest.mark.parametrize("machine", LANE_MACHINES, ids=named)
def test_counts_are_exact_for_saxpy(machine):
    n = 1000
    one = run(machine, machines.saxpy(n))
    assert one.counters["ops"] == 2 * n
    assert one.counters["bytes_used"] == 12 * n
    warps = math.ceil(n / 32)
    expected = {
        "Scalar": 6 * n,  # two loads, mad, store, increment, jump
        "Simd": 3 + 2,  # three copies; 15 repeats and a masked tail
        "Simt": 7 * warps,  # index, bound, exit and the four of the body
    }
    assert one.instructions == expected[named(machine)]


# --- divergence -----------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_divergent_warps_and_issues_match_brute_force(n, seed, density):
    kernel = machines.two_sided(n, depth=5)
    inputs = sample_inputs(kernel, seed=seed, density=density)
    one = run(Simt(), kernel, inputs)
    warps = [inputs["mask"][i : i + 32] for i in range(0, n, 32)]
    assert one.counters["divergent_warps"] == sum(w.any() and not w.all() for w in warps)
    sides = sum(5 * bool(w.any()) + 5 * bool(not w.all()) for w in warps)
    assert one.instructions == sides + (3 + 5) * len(warps)


# --- memory ----------------------------------------------------------------------------------
@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40))
def test_sectors_and_banks_match_brute_force(seed, groups, spread):
    rng = np.random.default_rng(seed)
    address = 4 * rng.integers(0, 8 * spread, (groups, 32))
    active = rng.random((groups, 32)) < 0.7
    for row in range(groups):
        wanted = [int(a) for a, on in zip(address[row], active[row], strict=True) if on]
        assert units_touched(address, active, 32)[row] == len({a // 32 for a in wanted})
        words = {a // 4 for a in wanted}
        per_bank = [sum(word % 32 == bank for word in words) for bank in range(32)]
        assert bank_ways(address, active)[row] == max(per_bank)


@settings(max_examples=100)
@given(st.integers(1, 400), st.integers(1, 20))
def test_coalescing_counts_of_a_run_match_brute_force(n, stride):
    one = run(Simt(), machines.strided_copy(n, stride))
    sectors = 0
    for start in range(0, n, 32):
        lanes = range(start, min(start + 32, n))
        sectors += len({4 * stride * i // 32 for i in lanes}) + len({4 * i // 32 for i in lanes})
    assert one.counters["bytes_moved"] == 32 * sectors


def test_interleaved_reduction_conflicts_and_is_slower():
    kernel = machines.total(65536)
    good = run(Simt(), kernel)
    bad = run(Simt(interleaved=True), kernel)
    assert bad.cycles > good.cycles
    assert good.values["s"] == bad.values["s"]
    assert [warps for warps, _ in tree_steps(Simt())] == [4, 2, 1, 1, 1, 1, 1, 1]
    # 2*s*t falls on 32 / (2*s) banks while all 32 lanes are active; then lanes run out.
    assert [ways for _, ways in tree_steps(Simt(interleaved=True))] == [2, 4, 8, 8, 8, 4, 2, 1]


# --- warps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("registers", [32, 64, 128, 250])
@pytest.mark.parametrize("warps", [1, 3, 16, 64, 250])
@pytest.mark.parametrize("rate", [8, 32, 1000])
def test_closed_form_brackets_the_warp_scheduler(registers, warps, rate):
    machine = Simt(
        threads_per_block=64,
        registers_per_thread=registers,
        port=Port(rate_bytes_per_cycle=rate),
    )
    kernel = machines.saxpy(32 * warps)
    modelled = run(machine, kernel).cycles
    parts = run(machine, kernel).parts
    scheduled = last_cycle(schedule(kernel, machine, warps))
    assert max(parts.compute, parts.move) <= scheduled <= 1.02 * parts.total
    assert 0.65 < modelled / scheduled < 1.4
    sides = sorted((parts.compute, parts.move, parts.wait))
    if sides[2] > 10 * sides[1]:
        assert modelled == pytest.approx(scheduled, rel=0.1)


# --- systolic and cube ----------------------------------------------------------------------
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 16, 16), (100, 33, 17), (64, 64, 64)])
def test_systolic_cycles_are_the_closed_form(m, k, n):
    machine = Systolic(port=Port(rate_bytes_per_cycle=1e9, latency_cycles=0))
    one = run(machine, Matmul(m, k, n))
    tiles = math.ceil(k / 16) * math.ceil(n / 16)
    assert one.cycles == array_cycles(machine, Matmul(m, k, n)) == tiles * (16 + m + 16 + 16 - 2)


def test_systolic_steps_are_the_frames_of_the_figure():
    a = np.arange(6).reshape(3, 2)
    b = np.array([[1, 10], [2, 20]])
    states = frames(a, b)
    assert len(states) == 3 + 2 + 2 - 2
    leaving = [states[m + 1 + c][1][1, c] for m in range(3) for c in range(2)]
    np.testing.assert_array_equal(np.reshape(leaving, (3, 2)), a @ b)


@pytest.mark.parametrize(
    ("dtype", "k_block", "passes"), [("float16", 16, 1), ("int8", 32, 1), ("float32", 8, 2)]
)
def test_cube_blocks(dtype, k_block, passes):
    machine = Cube(port=Port(rate_bytes_per_cycle=1e9, latency_cycles=0), local_bytes=1 << 24)
    program = Matmul(33, 40, 17)
    one = run(machine, program, sample_inputs(program, dtype=dtype))
    steps = 3 * math.ceil(40 / k_block) * 2
    assert one.parts.compute == steps * passes + machine.startup_cycles
    assert one.counters["macs_used"] == 33 * 40 * 17 <= one.counters["macs_issued"]


@settings(max_examples=100)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 16]))
def test_blocking_fits_and_never_moves_less_than_the_data(m, k, n, unit):
    local = 64 * 1024
    cut = blocking(Matmul(m, k, n), 2, 4, local, unit)
    deep = min(k, math.isqrt(local // 8) // unit * unit)
    assert 2 * deep * (cut.rows + cut.columns) + 4 * cut.rows * cut.columns <= local
    assert cut.bytes_in >= 2 * (m * k + k * n)
    assert cut.tiles == math.ceil(m / cut.rows) * math.ceil(n / cut.columns)


@settings(max_examples=100)
@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(0, 1000),
    st.integers(1, 50),
)
def test_tiled_time_lies_in_its_bracket(compute, move, latency, tiles):
    cycles, parts = tiled(Port(1.0, latency), compute, move, tiles)
    assert parts.longest <= cycles <= parts.total


# --- vector instructions ---------------------------------------------------------------------
@settings(max_examples=100)
@given(st.integers(1, 40_000), st.sampled_from(["float32", "float16"]))
def test_plain_ops_cover_exactly_and_are_counted(n, dtype):
    room = -(-n // 16) * 16
    rng = np.random.default_rng(n)
    buffer = rng.integers(-9, 10, 3 * room).astype(dtype)
    ops = plain_ops("add", n, 2 * room, 0, room, dtype)
    after = run_vector(ops, buffer)
    expected = buffer.copy()
    expected[2 * room : 2 * room + n] = buffer[:n] + buffer[room : room + n]
    np.testing.assert_array_equal(after, expected)
    assert len(ops) == instruction_count(n, 256 // np.dtype(dtype).itemsize)


def test_one_thousand_elements_in_one_instruction():
    one = [VectorOp("add", 2000, 0, 1000, mask=40, repeats=25, stride_blocks=5)]
    two = plain_ops("add", 1000, 2000, 0, 1000, "float32")
    buffer = np.arange(3000, dtype=np.float32)
    np.testing.assert_array_equal(run_vector(one, buffer), run_vector(two, buffer))
    assert [machines.vector_cycles(Simd(), ops) for ops in (one, two)] == [74, 80]


# --- bad input --------------------------------------------------------------------------------
def _bad_programs() -> dict:
    product = Arith("x", "mad", ("x", "x", "x"))
    return {
        "simd gather": lambda: run(Simd(), machines.gather(2)),
        "cube mask": lambda: run(Cube(), machines.masked_add(4)),
        "cube product": lambda: run(
            Cube(), Kernel("k", 4, (Load("x", "x"), product, Store("z", "x")))
        ),
        "cube format": lambda: run(
            Cube(), Matmul(2, 2, 2), sample_inputs(Matmul(2, 2, 2), dtype=np.int32)
        ),
        "mask": lambda: run_vector([VectorOp("add", 0, 0, 0, 65)], np.ones(99, np.float32)),
        "repeats": lambda: run_vector(
            [VectorOp("add", 0, 0, 0, 1, 256, 0)], np.ones(99, np.float32)
        ),
        "overrun": lambda: run_vector([VectorOp("add", 64, 0, 0, 64)], np.ones(99, np.float32)),
        "alignment": lambda: run_vector([VectorOp("add", 1, 0, 0, 1)], np.ones(99, np.float32)),
    }


@pytest.mark.parametrize("name", _bad_programs())
def test_bad_input_is_a_typed_error_with_remedy(name):
    with pytest.raises(MachineError) as caught:
        _bad_programs()[name]()
    assert caught.value.needed
    assert caught.value.got
    assert caught.value.remedy


# --- facts ------------------------------------------------------------------------------------
def test_every_fact_has_a_known_source_and_a_unit():
    units = ("_tops", "_w", "_hz", "_bytes", "_bytes_per_s", "_cycles")
    suffixes = (*units, "_repeat", "_lanes", "_core", "cores")
    for machine in fact_file._data()["machine"]:
        for key, fact in fact_file.facts_of(machine).items():
            assert fact.value > 0
            assert fact_file.source_text(fact.source)
            assert fact.trust in ("published", "derived", "borrowed", "assumed")
            assert key.endswith(suffixes), key


def test_tops_per_watt_rows():
    rows = {(r.machine, r.kind, r.number_format): r for r in machines.tops_per_watt()}
    assert rows["ascend310", "matrix", "int8"].tops_per_watt == 2.0
    assert rows["ascend910a", "matrix", "int8"].tops_per_watt == pytest.approx(512 / 310)
    assert rows["ascend910b2", "matrix", "fp16"].tops_per_watt is None  # power not published
    assert rows["h100", "matrix", "int8"].peak_tops is None
    by_kind = {
        kind: [r.tops_per_watt for r in rows.values() if r.kind == kind and r.tops_per_watt]
        for kind in ("scalar", "vector", "matrix")
    }
    assert max(by_kind["scalar"]) < min(by_kind["vector"])
    assert max(by_kind["vector"]) < min(by_kind["matrix"])


def test_facts_agree_with_the_chip_files():
    chip = pytest.importorskip("ascend_lab.machine.chip").load_chip("Ascend910A")
    assert machines.fact("ascend910a", "cores") == chip.facts["core.count"].value
    assert machines.fact("ascend910a", "ub_bytes") == chip.facts["buffer.UB.size_bytes"].value
    memory = chip.facts["memory.rate_bytes_per_s"].value
    assert machines.fact("ascend910a", "memory_rate_bytes_per_s") == memory


# --- roofline ---------------------------------------------------------------------------------
def test_roofline_by_hand():
    hbm = Level("HBM", 1e12)
    l2 = Level("L2", 4e12)
    assert ridge_point(200e12, hbm) == 200
    assert attainable(50, 200e12, hbm) == 50e12
    assert attainable(500, 200e12, hbm) == 200e12
    dot = Dot("matmul", 1e12, {"HBM": 1e9, "L2": 1e11}, time_s=0.05)
    assert dot.ops_per_byte("HBM") == 1000
    assert math.isinf(dot.ops_per_byte("L1"))
    assert binding_level(dot, 200e12, [hbm, l2]) == ("L2", 40e12)
    assert dot.ops_per_s == pytest.approx(20e12)


@pytest.mark.parametrize("name", KERNELS)
def test_no_run_is_above_its_roof(name):
    for machine in (Scalar(), Simd(), Simt()):
        if isinstance(machine, Simd) and name == "gather":
            continue
        one = run(machine, KERNELS[name](5000))
        if one.counters["ops"]:
            port = Level("memory", machine.port.rate_bytes_per_cycle)  # at one cycle per second
            dot = Dot(
                name, one.counters["ops"], {"memory": one.counters["bytes_moved"]}, one.cycles
            )
            roof = binding_level(dot, machine.peak_ops_per_cycle(), [port])[1]
            assert dot.ops_per_s <= roof


# --- figures and checks -----------------------------------------------------------------------

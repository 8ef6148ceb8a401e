"""Kernels of several phases: values over one GM memory, time as a sum, faults between phases."""

import json
from dataclasses import replace

import numpy as np
import pytest
from strategies import through

from ascend_lab.errors import ProgramError, SyncError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel, KernelBuilder, Launch, Part, binding_of, sanitize
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators.kernels import elementwise_launch

TOY = load_chip("Toy")
B2 = load_chip("Ascend910B2")
CORES = 2
LANES = 128


def double(source: str, target: str, chip=TOY, cores: int = CORES) -> Launch:
    """target = source + source, one tile per core; core i writes the tile it read."""
    k = KernelBuilder(f"{target}=2{source}", chip)
    total = LANES * cores
    x = k.tensor(source, "fp16", total)
    y = k.tensor(target, "fp16", total)
    at = k.param("core", cores) * LANES

    def twice(out, tile):
        row = tile.region(0, (1, LANES))
        k.vector("vadd", out.region(0, (1, LANES)), row, row)

    through(k, y.region(at, LANES), x.region(at, LANES), work=twice)
    bindings = tuple(binding_of({"core": core}) for core in range(cores))
    return Launch(f"{target}=2{source}", (Part(k.finish(), bindings),))


def total(source: str, target: str, chip=TOY) -> Launch:
    """One core adds the tiles of all cores of `source`."""
    k = KernelBuilder("total", chip)
    x = k.tensor(source, "fp16", LANES * CORES)
    y = k.tensor(target, "fp16", LANES)
    loads = k.queue("in_ub", "UB", "fp16", LANES, src="MTE2", dst="V", depth=2)
    stores = k.queue("sum_ub", "UB", "fp16", LANES, src="V", dst="MTE3", depth=1)
    out = stores.alloc().region(0, (1, LANES))
    k.vector("vdup", out, scalar=0.0)
    with k.loop("i", CORES) as i:
        k.copy(loads.alloc().region(), x.region(i * LANES, LANES))
        loads.enqueue()
        k.vector("vadd", out, out, loads.dequeue().region(0, (1, LANES)))
        loads.free()
    stores.enqueue()
    k.copy(y.region(0, LANES), stores.dequeue().region())
    stores.free()
    return Launch("total", (Part(k.finish()),))


TWO = Kernel("double and add", (double("x", "partial"), total("partial", "y")))


# -- the kernel as data ----------------------------------------------------------------------------
def test_a_kernel_has_a_phase():
    with pytest.raises(ProgramError, match="empty: a kernel of at least one phase; got none"):
        Kernel("empty", ())


def test_a_tensor_is_the_same_one_in_all_phases():
    with pytest.raises(ProgramError, match="tensor partial in all phases; got 256 fp16 and 512"):
        Kernel("sizes", (double("x", "partial"), double("partial", "y", B2, cores=4)))


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_phase_reads_what_all_cores_wrote_before(seed):
    x = np.arange(LANES * CORES, dtype=np.float16) % 61
    out = execute(TWO, {"x": x}, TOY, seed=seed)
    assert set(out) == {"x", "partial", "y"}
    assert np.array_equal(out["partial"], 2 * x)
    assert np.array_equal(out["y"], (2 * x).reshape(CORES, LANES).sum(axis=0, dtype=np.float16))


# -- faults ----------------------------------------------------------------------------------------
def test_written_in_an_earlier_phase_counts_as_filled():
    assert sanitize(TWO, TOY) == []
    assert "uninitialised-read" in [f.kind for f in sanitize(Kernel("w", TWO.phases[::-1]), TOY)]


def test_an_input_overwritten_later_is_named_by_the_caller():
    kernel = Kernel("there and back", (double("x", "y"), double("y", "x")))
    assert [f.kind for f in sanitize(kernel, TOY)] == ["uninitialised-read"]
    assert sanitize(kernel, TOY, filled=("x",)) == []


def test_between_two_phases_all_cores_wait():
    """In one launch the sum would race with the cores that write what it adds."""
    joined = Launch("joined", TWO.phases[0].parts + TWO.phases[1].parts)
    assert "race" in {f.kind for f in sanitize(joined, TOY)}


# -- time ------------------------------------------------------------------------------------------
def test_cycles_are_those_of_the_phases_and_of_the_barrier():
    timeline = simulate_kernel(TWO, TOY)
    phases = [simulate(phase, TOY) for phase in TWO.phases]
    assert TOY.all_cores_cycles == 2 * TOY.l2.latency_cycles > 0
    assert timeline.cycles == sum(p.cycles for p in phases) + TOY.all_cores_cycles
    assert timeline.total_cycles == timeline.cycles + phases[0].launch_cycles
    assert timeline.time_s == pytest.approx(timeline.total_cycles / TOY.clock_hz)
    assert timeline.energy_j == pytest.approx(sum(p.energy_j for p in phases))
    assert timeline.memory_bytes == sum(p.memory_bytes for p in phases)
    moved = LANES * CORES * 2
    assert timeline.path_bytes == {("GM", "UB"): 2 * moved, ("UB", "GM"): moved + moved // CORES}
    for pipe, cycles in timeline.busy_cycles.items():
        assert cycles == sum(p.busy_cycles.get(pipe, 0) for p in phases)
        assert timeline.busy[pipe] == pytest.approx(cycles / timeline.total_cycles)


def test_what_binds_most_of_the_cycles():
    assert simulate_kernel(TWO, B2).bound_by == "launch"
    long = elementwise_launch(TOY, 1 << 19)
    mixed = Kernel("mixed", (long, double("u", "v")))
    assert simulate_kernel(mixed, TOY).bound_by == simulate(long, TOY).bound_by == "memory"
    slow = replace(TOY, all_cores_cycles=10 * simulate(long, TOY).cycles)
    assert simulate_kernel(mixed, slow).bound_by == "sync"


def test_the_summary_is_plain_data():
    timeline = simulate_kernel(TWO, TOY)
    data = json.loads(json.dumps(timeline.summary()))
    assert data["cycles"] == timeline.cycles
    assert sum(p["cycles"] for p in data["phases"]) + TOY.all_cores_cycles == timeline.cycles
    assert [p["name"] for p in data["phases"]] == ["partial=2x", "total"]
    assert repr(timeline).startswith("KernelTimeline(double and add: 2 phases, ")


def test_a_deadlock_in_a_later_phase_is_found():
    k = KernelBuilder("stuck", TOY)
    k.wait_flag("V", "MTE3", 0)
    stuck = Launch("stuck", (Part(k.finish()),))
    kernel = Kernel("stuck", (elementwise_launch(TOY, 2 * 4096), stuck))
    with pytest.raises(SyncError, match="pipe MTE3 waits forever"):
        simulate_kernel(kernel, TOY)
    assert "deadlock" in {f.kind for f in sanitize(kernel, TOY)}

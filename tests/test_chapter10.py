"""The figures and checks of the fusion chapter, and what its prose claims."""

import pytest

from ascend_lab.lab.checks.chapter09_10 import gain
from ascend_lab.lab.figures.fusing import chain_kernels, crossings, operations
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate_kernel

TOY = load_chip("Toy")
A910 = load_chip("Ascend910A")


# -- figures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("each", ["relu", "add"])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize(("chip", "elements"), [(TOY, 2**20), (A910, 2**22), (A910, 2**24)])
def test_the_columns_add_up_to_what_the_kernel_moves(chip, elements, length, each):
    for kernel in chain_kernels(chip, length, elements, each):
        way = crossings(kernel, chip)
        run = simulate_kernel(kernel, chip)
        assert sum(c.path_bytes for c in way) == sum(run.path_bytes.values())
        assert sum(c.memory_bytes for c in way) == run.memory_bytes
        assert {c.port_bytes for c in way} == {2 * elements}
        assert sum(len(operations(phase)) for phase in kernel.phases) == length


# -- what the chapter says -------------------------------------------------------------------------
@pytest.mark.parametrize(("length", "each"), [(2, "relu"), (5, "relu"), (2, "add"), (5, "add")])
def test_the_closed_form_is_what_memory_counts(length, each):
    before, after = (simulate_kernel(k, TOY) for k in chain_kernels(TOY, length, 2**21, each))
    own = [2, *[int(each == "add")] * (length - 1)]
    assert before.memory_bytes / after.memory_bytes == pytest.approx(gain(own))
    cycles = before.cycles - before.sync_cycles
    assert cycles / after.cycles == pytest.approx(gain(own), rel=0.01)

"""The figures and checks of the fusion chapter, and what its prose claims."""

from dataclasses import replace

import pytest

from ascend_lab.compiler import compile_stages, simulate_graph
from ascend_lab.compiler.fusion import (
    Count,
    fusion_rule,
    rules_restored,
)
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.lab.checks.chapter09_10 import gain, misgrouped, network
from ascend_lab.lab.figures import fig_fusion
from ascend_lab.lab.figures.fusing import chain_kernels, crossings, operations
from ascend_lab.lab.kernels.split_conflict import Points, case_graph
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


def test_a_small_ub_is_slower():
    cycles = []
    for kib in (256, 8):
        small = replace(A910, buffers={**A910.buffers, "UB": 1024 * kib})
        cycles.append(simulate_kernel(chain_kernels(small, 2, 2**22, "relu")[1], small).cycles)
        assert f"one kernel: {cycles[-1]:,} cycles" in fig_fusion(mib=8, ub_kib=kib).alt_text
    assert cycles[1] > 2 * cycles[0]


# -- what the chapter says -------------------------------------------------------------------------
@pytest.mark.parametrize(("length", "each"), [(2, "relu"), (5, "relu"), (2, "add"), (5, "add")])
def test_the_closed_form_is_what_memory_counts(length, each):
    before, after = (simulate_kernel(k, TOY) for k in chain_kernels(TOY, length, 2**21, each))
    own = [2, *[int(each == "add")] * (length - 1)]
    assert before.memory_bytes / after.memory_bytes == pytest.approx(gain(own))
    cycles = before.cycles - before.sync_cycles
    assert cycles / after.cycles == pytest.approx(gain(own), rel=0.01)


def test_a_fused_relu_is_free_where_memory_is_the_limit():
    before, after = (simulate_kernel(k, A910) for k in chain_kernels(A910, 2, 2**24, "relu"))
    assert after.cycles == before.phases[0].cycles


def test_long_chains_lose_in_a_small_ub_only():
    def faster(kib, length):
        small = replace(A910, buffers={**A910.buffers, "UB": 1024 * kib})
        before, after = chain_kernels(small, length, 2**22, "add")
        return simulate_kernel(before, small).cycles / simulate_kernel(after, small).cycles

    assert faster(256, 29) > faster(256, 6) > 1
    assert faster(4, 6) > 1 > faster(4, 29)


def test_the_convolution_before_mish_has_two_readers_so_no_chain_rule_matches():
    graph = network("c=conv(x) s=softplus(c) t=tanh(s) y=mul(c,t) -> y")
    whole = compile_stages(graph, A910).fused
    off = compile_stages(graph, A910, switches=parse_switches("AutomaticUbFusion:off")).fused
    assert list(whole.counts) == ["AutomaticUbFusion"]
    assert off.counts == {}
    with rules_restored():
        fusion_rule("ConvMish")(lambda g, n: g.nodes[1:5] if n.op == "conv2d" else None)
        own = compile_stages(graph, A910, switches=parse_switches("AutomaticUbFusion:off")).fused
    assert own.counts == {"ConvMish": Count(1, 1)}
    assert own.groups == whole.groups


def test_a_rule_for_all_three_saves_launches_only():
    graph = case_graph(Points(2048, 2, 512, 512))
    apart = compile_stages(graph, A910)
    with rules_restored():
        fusion_rule("AllThree")(lambda g, n: g.nodes if n.op == "reduce_max" else None)
        together = compile_stages(graph, A910)
    one, three = (simulate_graph(s.compiled).operators for s in (together, apart))
    assert (len(one), len(three)) == (1, 3)
    cycles = sum(op.timeline.cycles for op in three)
    assert one[0].timeline.cycles >= cycles
    assert one[0].timeline.total_cycles < sum(op.timeline.total_cycles for op in three)


# -- checks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "groups", "complaint"),
    [
        ("c=conv(x) d=conv(x) y=add(c,d) -> y", [["c", "d", "y"]], "one convolution"),
        ("r=relu(x) c=conv(r) -> c", [["r", "c"]], "one convolution"),
        ("c=conv(x) s=exp(c) y=mul(c,s) -> y s", [["c", "s", "y"]], "s, inside"),
        ("c=conv(x) s=exp(c) y=mul(c,s) -> y", [["c"], ["c", "s", "y"]], "each once"),
        ("c=conv(x) s=exp(c) y=mul(c,s) -> y", [["c", "s", "y"]], None),
    ],
)
def test_a_group_is_one_kernel_with_one_result(line, groups, complaint):
    wrong = misgrouped(network(line), groups)
    assert wrong is None if complaint is None else complaint in wrong

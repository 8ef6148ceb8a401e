"""The figures and checks of the fusion chapter, and what its prose claims."""

from dataclasses import replace

import pytest

from ascend_lab import dsl
from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph import compile_stages, simulate_graph
from ascend_lab.graph.decide import parse_switches
from ascend_lab.graph.fusion import (
    Count,
    automatic_groups,
    elementwise_chain,
    fusion_rule,
    rules_restored,
)
from ascend_lab.isa import KernelBuilder, parse_program
from ascend_lab.lab.checks import check_ex_10_3, check_ex_10_4, check_ex_10_5
from ascend_lab.lab.checks.chapter10 import fused_gradient, gain, misgrouped, network, tanh_gradient
from ascend_lab.lab.figures.fusing import chain_kernels, crossings, fig_fusion, operations
from ascend_lab.lab.kernels.fused_turns import Points
from ascend_lab.lab.split_conflict import case_graph
from ascend_lab.sim import simulate_kernel

TOY, A910 = load_chip("Toy"), load_chip("Ascend910A")


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", ["relu", "add"])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize(("chip", "elements"), [(TOY, 2**20), (A910, 2**22), (A910, 2**24)])
def test_the_columns_add_up_to_what_the_kernel_moves(chip, elements, length, each):
    for kernel in chain_kernels(chip, length, elements, each):
        way, run = crossings(kernel, chip), simulate_kernel(kernel, chip)
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


@pytest.mark.parametrize(("length", "each"), [(0, "relu"), (2, "gelu")])
def test_other_chains_are_refused(length, each):
    with pytest.raises(InputError, match="relu or add"):
        chain_kernels(TOY, length, 4096, each)


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


def named(groups):
    return [[node.name for node in group] for group in groups]


def chains(graph):
    """The stub's groups: each elementwise node behind its only maker."""
    found, taken = [], set()
    for node in graph.nodes:
        names = [n.name for n in (node, *elementwise_chain(graph, node))]
        found.append([name for name in names if name not in taken])
        taken.update(names)
    return found


def test_groups_are_legal_and_as_few_as_the_packages():
    assert check_ex_10_3(lambda graph: named(automatic_groups(graph, ()))).passed
    assert "1 are possible" in str(check_ex_10_3(chains))
    everything = check_ex_10_3(lambda graph: [[node.name for node in graph.nodes]])
    assert "wanted outside" in str(everything)
    for wrong, message in (
        (lambda graph: [], "are possible"),
        (lambda graph: [["nobody"]], "names of nodes"),
        (lambda graph: None, "cannot be judged"),
    ):
        assert message in str(check_ex_10_3(wrong))


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


def test_the_schedule_check_tells_what_is_wrong():
    def good(elements):
        return fused_gradient(tanh_gradient(elements), A910)

    def apart(elements):
        return dsl.create_schedule(tanh_gradient(elements), A910)

    def two_phases(elements):
        fused = fused_gradient(tanh_gradient(elements), A910).steps
        kept = [x for x in fused if x.primitive != "compute_at" and x.arguments[0] != "t"]
        s = dsl.replay(tanh_gradient(elements), A910, kept)
        s = dsl.split(dsl.split(s, "t", "i", elements // 32), "t", "i_i", 8192)
        return dsl.vectorise(dsl.bind(s, "t", "i_o"), "t", "i_i_i")

    def narrow(elements):
        return fused_gradient(tanh_gradient(elements), A910, width=1024)

    def other(elements):
        x, dy = (dsl.placeholder((elements,), name=name) for name in ("x", "dy"))
        y = dsl.renamed(dsl.vmul(x, dy), "y")
        return dsl.auto_schedule(y, A910)

    assert check_ex_10_4(good).passed
    for wrong, message in (
        (apart, "lowers"),
        (two_phases, "through memory"),
        (narrow, "cycles"),
        (other, "tanh"),
        (lambda n: fused_gradient(tanh_gradient(n), TOY), "for the Ascend910A"),
        (lambda n: None, "a Schedule"),
    ):
        result = check_ex_10_4(wrong)
        assert not result.passed
        assert message in str(result)


def shifted_program(tiles, shift):
    """Return the program exercise 10.5 asks for: the last tile first, on one core of the Toy."""
    chip, shape = load_chip("Toy"), (8, 128)
    k = KernelBuilder("shifted", chip)
    x, b = k.tensor("x", "fp16", tiles * 1024 + shift), k.tensor("b", "fp16", tiles * 1024)
    loads = [k.queue(f"{n}_ub", "UB", "fp16", 1024, src="MTE2", dst="V", depth=2) for n in "xb"]
    out = k.queue("y_ub", "UB", "fp16", 1024, src="V", dst="MTE3", depth=2)
    with k.loop("i", tiles) as i:
        at = (tiles - 1 - i) * 1024
        for queue, tensor in zip(loads, (x, b), strict=True):
            k.copy(queue.alloc().region(), tensor.region(at, 1024))
            queue.enqueue()
        one, two = (queue.dequeue().region(0, shape) for queue in loads)
        result = out.alloc().region(0, shape)
        k.vector("vadd", result, one, two)
        k.vector("vrelu", result, result)
        for queue in loads:
            queue.free()
        out.enqueue()
        k.copy(x.region(at + shift, 1024), out.dequeue().region())
        out.free()
    return k.finish()


def test_the_in_place_check_tells_what_is_wrong():
    assert check_ex_10_5(shifted_program).passed

    def upward(tiles, shift):
        top = 1024 * (tiles - 1)
        text = str(shifted_program(tiles, shift)).replace(f"-1024*i+{top + shift} |", "1024*i+S |")
        text = text.replace(f"-1024*i+{top} |", "1024*i |").replace("+S |", f"+{shift} |")
        return parse_program(text if tiles > 1 else str(shifted_program(tiles, shift)))

    def unchanged(tiles, shift):
        return parse_program(str(shifted_program(tiles, shift)).replace("vrelu", "vabs"))

    for wrong, message in (
        (lambda tiles, shift: None, "a Program"),
        (lambda tiles, shift: shifted_program(tiles + 1, shift), "of 1040 and b"),
        (unchanged, "differ"),
        (upward, "race"),
    ):
        result = check_ex_10_5(wrong)
        assert not result.passed
        assert message in str(result)

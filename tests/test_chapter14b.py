"""Chapter 14b: what fusion rules make of mish and of the file, and the check of the grouping."""

import pytest

from ascend_lab.compiler import compile_stages, fusion
from ascend_lab.compiler.fusion import Count, fusion_rule, rules_restored
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.lab import one_file
from ascend_lab.lab.checks.chapter14b import misgrouped, network
from ascend_lab.lab.figures import fig_fused, networks
from ascend_lab.machine.chip import load_chip

A910 = load_chip("Ascend910A")


# -- what the chapter says -------------------------------------------------------------------------
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


def test_the_rule_for_two_convolutions_saves_one_kernel_more_than_the_tree():
    graph = one_file.stage(one_file.graph(), "layouts placed").laid_out
    joined = sum(len(group) - 1 for group in fusion.automatic_groups(graph, taken=()))
    groups = one_file.stage(one_file.graph(), "fused").fused.groups
    assert len(graph.nodes) - len(groups) == joined + 1


@pytest.mark.parametrize("rules", networks.ALLOWED)
def test_the_drawing_of_kernels_says_what_it_shows(rules):
    alt = fig_fused("mish", rules).alt_text
    assert ("A: conv, softplus, tanh, mul." in alt) is (rules != "no automatic one")


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

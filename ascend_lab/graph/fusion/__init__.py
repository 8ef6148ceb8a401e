"""Operator fusion: rules by name, automatic groups by dominators, switches, report."""

from ascend_lab.graph.fusion.agreement import Agreement, Split, common_split
from ascend_lab.graph.fusion.automatic import automatic_groups, kind_of
from ascend_lab.graph.fusion.dominators import immediate_post_dominators
from ascend_lab.graph.fusion.fuse import Count, Fused, fuse, unfused
from ascend_lab.graph.fusion.rules import RULES, Rule, fusion_rule, rules_restored
from ascend_lab.graph.fusion.switches import Switches, parse_switches, read_switches

__all__ = [
    "RULES",
    "Agreement",
    "Count",
    "Fused",
    "Rule",
    "Split",
    "Switches",
    "automatic_groups",
    "common_split",
    "fuse",
    "fusion_rule",
    "immediate_post_dominators",
    "kind_of",
    "parse_switches",
    "read_switches",
    "rules_restored",
    "unfused",
]

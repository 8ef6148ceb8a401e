"""Layouts of a graph's tensors: who chooses, who follows, where conversions stand."""

from ascend_lab.graph.layouts.assign import assign_layouts
from ascend_lab.graph.layouts.cancel import cancel_trans_data, moves_nothing

__all__ = ["assign_layouts", "cancel_trans_data", "moves_nothing"]

"""Widgets: one line over a pure figure function, with a still first frame.

Moving a slider needs a running kernel; the page alone shows the first frame.
"""

from ascend_lab.widgets.controls import WidgetError
from ascend_lab.widgets.explorer import Explorer, explore

__all__ = ["Explorer", "WidgetError", "explore"]

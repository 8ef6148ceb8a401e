"""A Da Vinci NPU you can program, run and time: the package behind the ascend_lab book."""

from ascend_lab.errors import AscendLabError
from ascend_lab.moved import find_old_names

__version__ = "0.31.0"
__all__ = ["AscendLabError", "__version__"]

find_old_names()

"""A Da Vinci NPU you can program, run and time: the package behind the ascend_lab book."""

from ascend_lab.errors import AscendLabError

__version__ = "0.26.0"
__all__ = ["AscendLabError", "__version__"]

"""Offline models, and the runtime that launches them."""

from ascend_lab.runtime.container import is_offline, unpack_parts
from ascend_lab.runtime.offline import Gear, OfflineModel, compile_offline, load_offline
from ascend_lab.runtime.precheck import import_error, precheck

__all__ = [
    "Gear",
    "OfflineModel",
    "compile_offline",
    "import_error",
    "is_offline",
    "load_offline",
    "precheck",
    "unpack_parts",
]

"""Offline models, AscendCL in small, operators as functions; time is simulated, values are real."""

# fmt: off
# isort: off
from ascend_lab.runtime import acl as acl, mdl as mdl, op as op, rt as rt
from ascend_lab.runtime.codes import CODES, AclError, DeadlockError
from ascend_lab.runtime.container import is_offline, unpack_parts
from ascend_lab.runtime.inference import Inference, precheck
from ascend_lab.runtime.offline import Gear, OfflineModel, compile_offline, load_offline
from ascend_lab.runtime.streams import (
    Record, Span, Task, WaitFor, pipeline_programs, pipeline_s, run_streams,
)

__all__ = [
    "CODES", "AclError", "DeadlockError", "Gear", "Inference", "OfflineModel", "Record", "Span",
    "Task", "WaitFor", "compile_offline", "is_offline", "load_offline", "pipeline_programs",
    "pipeline_s", "precheck", "run_streams", "unpack_parts",
]

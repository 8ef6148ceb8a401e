"""A simulated runtime in the manner of AscendCL: offline models, streams, events and operators.

Values are computed, time is simulated. The package takes the place of AscendCL's `acl` and can be
imported under that name: a program calls `init` first, then functions of `rt` (device, memory,
streams), `mdl` (models) and `op` (operators), and `finalize` last.
"""

# fmt: off
# isort: off
import sys

from ascend_lab.deploy.runtime import mdl as mdl, op as op, rt as rt
from ascend_lab.deploy.runtime.container import is_offline, unpack_parts
from ascend_lab.deploy.runtime.mdl import create_data_buffer, destroy_data_buffer
from ascend_lab.deploy.runtime.offline import Gear, Inference, OfflineModel, load_offline
from ascend_lab.deploy.runtime.precheck import precheck
from ascend_lab.deploy.runtime.process import finalize, init
from ascend_lab.deploy.runtime.streams import (
    CODES, AclError, DeadlockError, Record, Span, Task, WaitFor, pipeline_programs, pipeline_s,
    run_streams,
)
from ascend_lab.deploy.runtime.writer import compile_offline

acl = sys.modules[__name__]

__all__ = [
    "CODES", "AclError", "DeadlockError", "Gear", "Inference", "OfflineModel", "Record", "Span",
    "Task", "WaitFor", "compile_offline", "create_data_buffer", "destroy_data_buffer", "finalize",
    "init", "is_offline", "load_offline", "pipeline_programs", "pipeline_s", "precheck",
    "run_streams", "unpack_parts",
]

"""Defines a machine for a language model: chip, links between chips, and gap between kernels.

For example, `machine_of("Ascend910B2", "", Plan(tp=8))` is a server of eight Ascend910B2 whose
kernels wait in the device's queue, so that 0.9 us pass between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ascend_lab.errors import InputError
from ascend_lab.limits import shown
from ascend_lab.llm.plan import MAX_DEVICES, Plan
from ascend_lab.machine.chip import Chip, load_chip

if TYPE_CHECKING:
    from ascend_lab.cluster import Topology


@dataclass(frozen=True, slots=True)
class Gap:
    """The seconds that a device waits between two kernels, their source, and how certain they are.

    `is_task_start` is true if each kernel is a task of its own, which the device has to start.
    """

    time_s: float
    source: str
    trust: str
    is_task_start: bool = True


GAPS: Mapping[str, Gap] = MappingProxyType(
    {
        # DeepSeek-V3 decode: 18 us of waiting in a layer of about 20 kernels.
        "graph": Gap(0.9e-6, "CANN Learning Hub, DeepSeek-V3 decode: waits of a layer", "derived"),
        # All kernels are one task, and three barriers of 100 cycles separate two of them.
        "super": Gap(
            0.17e-6, "hicann/graph-autofusion, super_kernel", "derived", is_task_start=False
        ),
        # The host sends one operator after another, and the device is faster than the host.
        "eager": Gap(20e-6, "ours", "assumed"),
    }
)
"""Mode -> its gap. In graph mode all kernels of a step are in the device's queue beforehand."""
CLUSTER_ALIASES: Mapping[str, str] = MappingProxyType(
    {"a2-server": "910b-server", "a2": "910b-roce"}
)
"""Names under which machines are sold -> the preset of `cluster`."""
USUAL_CLUSTER = {"Ascend910A": "910a-server", "Ascend910B": "910b-server", "Ascend910C": "a3-pod"}
"""Prefix of a chip's name -> the topology of its servers."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A chip, its cluster (None: one device), and the mode, a name of `GAPS`."""

    chip: Chip
    topology: Topology | None
    mode: str

    @property
    def gap_s(self) -> float:
        """Seconds between two kernels."""
        return GAPS[self.mode].time_s


def machine_of(chip: Chip | str, cluster: str, plan: Plan, mode: str = "graph") -> Machine:
    """Return the machine of a plan; an empty `cluster` stands for the usual server of the chip.

    One device alone has no cluster, unless one is named.
    Raises `InputError` for an unknown mode, a plan of too many devices, a cluster with too few
    devices, and a plan of several devices on a chip without a known cluster.
    """
    loaded = load_chip(chip) if isinstance(chip, str) else chip
    if mode not in GAPS:
        raise InputError(f"a mode: {', '.join(GAPS)}", shown(mode), "write one of them")
    if plan.devices > MAX_DEVICES:
        needed = f"a plan of at most {MAX_DEVICES} devices"
        raise InputError(needed, f"{plan.devices} ({plan})", "lower one of its numbers")
    if plan.devices == 1 and not cluster:
        return Machine(loaded, None, mode)
    return Machine(loaded, _topology(loaded, cluster, plan), mode)


def _topology(chip: Chip, cluster: str, plan: Plan) -> Topology:
    """Return a topology with room for a plan's devices."""
    from ascend_lab.cluster import load_topology
    from ascend_lab.cluster.loader import TOPOLOGIES

    alias, colon, count = (cluster or _usual_cluster(chip, plan)).partition(":")
    preset_name = CLUSTER_ALIASES.get(alias, alias)
    preset = TOPOLOGIES.get(preset_name)
    # "910b-roce" for a plan of 16 devices becomes "910b-roce:16".
    if preset is not None and preset.limit and not colon:
        sized_name = f"{preset_name}:{max(2, plan.devices)}"
    else:
        sized_name = f"{preset_name}{colon}{count}"
    topology = load_topology(sized_name)
    if topology.size < plan.devices:
        needed = f"a cluster of at least {plan.devices} devices ({plan})"
        got = f"{sized_name} with {topology.size}"
        raise InputError(needed, got, "take a larger one or fewer parts")
    return topology


def _usual_cluster(chip: Chip, plan: Plan) -> str:
    """Return the usual topology of a chip: its server, or several for a plan of more devices."""
    servers = [name for prefix, name in USUAL_CLUSTER.items() if chip.family.startswith(prefix)]
    if not servers:
        needed = f"a cluster for {plan.devices} devices of {chip.name}"
        raise InputError(needed, "none", "name a topology or a .toml file")
    if servers[0] == "910b-server" and plan.devices > 8:
        return "910b-roce"
    return servers[0]

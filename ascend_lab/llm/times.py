"""Times single kernels on a chip, and collectives between devices.

A layer of a language model starts about twenty kernels, and all layers start the same ones: each is
timed once and looked up afterwards. A time includes the start of the task on the device. Waits
between two tasks are not in it: `machine.GAPS` has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ascend_lab.compare.model import estimate
from ascend_lab.compare.rows import Work
from ascend_lab.errors import PathError, UnsupportedError
from ascend_lab.llm.formats import CUBE_AND_VECTOR, INT4, Call
from ascend_lab.llm.layer import LATENT, ROTARY
from ascend_lab.llm.routing import (
    GATING,
    INIT_ROUTING,
    LISTED_GROUPS,
    gating_s,
    group_list_s,
    init_routing_s,
)
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.cluster import Topology


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds of a kernel, and the part of them in which its task starts on the device."""

    call: Call
    time_s: float
    start_s: float


class KernelTimer:
    """Times kernels on one chip and collectives on its cluster, and keeps the results."""

    def __init__(self, chip: Chip, topology: Topology | None = None) -> None:
        self.chip = chip
        self.topology = topology
        self._kernel_seconds: dict[tuple[object, ...], float] = {}
        self._collective_seconds: dict[tuple[str, float, int], tuple[float, float]] = {}

    def collective_seconds(
        self, operation: str, size_bytes: float, ranks: int
    ) -> tuple[float, float]:
        """Return the seconds of a collective among the first `ranks` devices, and their bound.

        `size_bytes` is what each rank holds. A single rank takes no time.
        """
        from ascend_lab.cluster import collective_time

        # before the assertion: a plan of one device has no topology
        if ranks == 1:
            return 0.0, 0.0
        assert self.topology is not None  # `Model` refuses a plan of several devices without one
        # 61 layers with one size of all-reduce: timed once
        key = (operation, size_bytes, ranks)
        if key not in self._collective_seconds:
            quickest_schedule = collective_time(
                operation, self.topology, size_bytes, placement=range(ranks)
            )
            self._collective_seconds[key] = (
                quickest_schedule.time_s,
                quickest_schedule.lower_bound_s,
            )
        return self._collective_seconds[key]

    def call_time(self, call: Call) -> CallTime:
        """Return the seconds of a kernel.

        Raises `UnsupportedError` if the chip cannot move rows of the kernel's width, or if the
        operator refuses its shapes.
        """
        start_s = self.chip.queued_launch_s
        try:
            time_s = self._work_seconds(call.work)
        except PathError:
            needed = f"{call.name}: rows of whole blocks of 32 bytes on {self.chip.name}"
            hint = "take a model with wider heads, or a chip of the 910B class"
            raise UnsupportedError(needed, str(call.work.shapes), hint) from None
        if call.unit == CUBE_AND_VECTOR:
            # The work of the vector cores overlaps with the cube's, but their start does not.
            start_s += self.chip.mix_start_s
            time_s += self.chip.mix_start_s
        if call.fetches_code:
            fetch_s = self.chip.library_fetch_s * self.chip.cores_of("vector")
            start_s += fetch_s
            time_s += fetch_s
        return CallTime(call, time_s, min(start_s, time_s))

    def _work_seconds(self, work: Work) -> float:
        """Return the seconds of a kernel without extra starts: looked up, or else computed."""
        # sorted: {"a": 1, "b": 2} and {"b": 2, "a": 1} are one kernel
        attributes = tuple(sorted(work.attributes.items()))
        key = (work.operator, work.shapes, work.dtypes, attributes)
        if key not in self._kernel_seconds:
            self._kernel_seconds[key] = self._computed_seconds(work)
        return self._kernel_seconds[key]

    def _computed_seconds(self, work: Work) -> float:
        """Return the seconds of a kernel by the model of its operator."""
        chip = self.chip
        if work.operator == ROTARY:
            return rotary_kernel_s(work, chip)
        if work.operator == GATING:
            return gating_s(work, chip)
        if work.operator == INIT_ROUTING:
            pairs = int(work.attributes["pairs"])
            # Copying the rows costs as much as a gather of the same number of rows.
            rows = replace(work, operator="gather", attributes={})
            return init_routing_s(pairs, chip) + self._work_seconds(rows)
        if LISTED_GROUPS in work.attributes:
            groups = int(work.attributes[LISTED_GROUPS])
            # without the attribute, the work is that of plain products
            products = replace(work, attributes={})
            return group_list_s(groups, chip) + self._work_seconds(products)
        if work.operator == LATENT and "int8" in work.dtypes:
            return int8_latent_attention_s(work, chip)
        if INT4 in work.dtypes:
            return int4_product_s(work, chip)
        return estimate(work, chip).model_s


def int4_product_s(work: Work, chip: Chip) -> float:
    """Return the seconds of a product whose weights are stored in int4.

    The time is that of the int8 kernel with half as many bytes of weights. Two assumptions: vector
    cores convert int4 with as many instructions as int8, and two int4 products at twice the rate
    take as long as one int8 product. Weights are nearly all bytes that the kernel reads, so half
    of the bytes are modelled as memory of twice the rate.
    Source of the two products: hicann/ops-transformer, gmm/grouped_matmul (A8W4, MSD).
    """
    activation_dtype = work.dtypes[0]
    if activation_dtype == "int8":
        # w4a8: both operands of the kernel that stands for it are int8.
        int8_work = replace(work, dtypes=(activation_dtype,))
    else:
        # w4a16: int8 weights with one scale a column, not one for each group of 128 weights.
        x, weights, (_, columns) = work.shapes
        int8_work = replace(
            work,
            shapes=(x, weights, (columns,)),
            dtypes=(activation_dtype, "int8", activation_dtype),
        )
    memory = chip.device_memory
    faster_memory = replace(memory, rate_bytes_per_s=2 * memory.rate_bytes_per_s)
    return estimate(int8_work, replace(chip, device_memory=faster_memory)).model_s


def int8_latent_attention_s(work: Work, chip: Chip) -> float:
    """Return the seconds of attention on int8 latent vectors with positions in two bytes.

    In one cycle the cube multiplies twice as many int8 numbers as two-byte numbers. A key has 512
    latent numbers and 64 with the position, a value 512 latent numbers. The 1024 latent numbers
    count half, 512 + 64 = 576 of 1088. So the two-byte kernel's time without its start is
    multiplied by 576 / 1088.
    Source of the formats: torch_npu.npu_fused_infer_attention_score, MLA with int8 q, k and v.
    """
    two_byte_s = estimate(replace(work, dtypes=work.dtypes[:1]), chip).model_s
    rank = work.shapes[2][-1]
    rope_dim = work.shapes[3][-1]
    # rank 512 and rope 64: 576 / 1088 = 0.53.
    cycle_share = (rank + rope_dim) / (2 * rank + rope_dim)
    start_s = chip.queued_launch_s
    # 10 us, 2 of them the start: 2 + 0.53 * 8 = 6.24 us
    return start_s + cycle_share * (two_byte_s - start_s)


def rotary_kernel_s(work: Work, chip: Chip) -> float:
    """Return the seconds of the kernel that rotates q and k by sines that it reads from memory."""
    from ascend_lab.machine.isa import as_kernel
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
    from ascend_lab.operators.kernels.rotary import Rotary, rotary_launch

    (rows, heads, dim), (_, kv_heads, _) = work.shapes
    shape = Rotary(rows, (heads, kv_heads), dim, work.dtypes[0])
    kernel = as_kernel(rotary_launch(shape, chip))
    timeline = simulate_kernel(kernel, chip, DeviceMemory.of(chip))
    # in a step the device's queue starts every kernel, not the host
    return replace(timeline, start="queued").task_s

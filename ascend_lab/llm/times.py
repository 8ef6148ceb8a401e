"""Seconds of calls on a chip, and of collectives between devices; each is computed once.

A kernel is timed as a task on the device, in the structure of the vendor's library where that is
known (`compare`). Between two tasks the device waits for the next: in graph mode for its own
scheduler, in eager mode for the host, which sends one operator after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ascend_lab.compare.model import estimate
from ascend_lab.compare.rows import Work
from ascend_lab.errors import PathError, UnsupportedError
from ascend_lab.llm.formats import HALF_BYTES, MIXED, Call
from ascend_lab.llm.layer import LATENT, ROTARY
from ascend_lab.llm.routing import GATING, INIT_ROUTING, LISTED, gating_s, listed_s, order_s
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.cluster import Topology


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds of a call: all of it, and of that the start of its task on the device."""

    call: Call
    time_s: float
    start_s: float


class Times:
    """Times calls on one chip, and collectives of its cluster; what repeats is looked up."""

    def __init__(self, chip: Chip, topology: Topology | None = None) -> None:
        self.chip = chip
        self.topology = topology
        self._known: dict[tuple[object, ...], float] = {}
        self._collectives: dict[tuple[str, float, int], tuple[float, float]] = {}

    def collective(self, operation: str, size_bytes: float, ranks: int) -> tuple[float, float]:
        """Return the seconds of a collective among the first `ranks` devices, and their bound.

        `size_bytes` is what each rank holds. A single rank takes no time.
        """
        from ascend_lab.cluster import collective_time

        if ranks == 1:
            return 0.0, 0.0
        assert self.topology is not None  # `Model` has seen to it
        key = (operation, size_bytes, ranks)
        if key not in self._collectives:
            quickest = collective_time(operation, self.topology, size_bytes, placement=range(ranks))
            self._collectives[key] = (quickest.time_s, quickest.lower_bound_s)
        return self._collectives[key]

    def of(self, call: Call) -> CallTime:
        """Return the seconds of a call.

        Raises `UnsupportedError` where the chip has no path for the kernel's rows, or as the
        operator's own check of its shapes.
        """
        start_s = self.chip.queued_launch_s
        try:
            time_s = self._seconds(call.work)
        except PathError:
            needed = f"{call.name}: rows of whole blocks of 32 bytes on {self.chip.name}"
            hint = "take a model with wider heads, or a chip of the 910B class"
            raise UnsupportedError(needed, str(call.work.shapes), hint) from None
        if call.unit == MIXED:
            # The vector cores' own work is hidden behind the cube's, their start is not.
            start_s += self.chip.mix_start_s
            time_s += self.chip.mix_start_s
        if call.fetches_code:
            fetch_s = self.chip.library_fetch_s * self.chip.cores_of("vector")
            start_s += fetch_s
            time_s += fetch_s
        return CallTime(call, time_s, min(start_s, time_s))

    def _seconds(self, work: Work) -> float:
        """Return the seconds of a work from the table, or of its kernel."""
        attributes = tuple(sorted(work.attributes.items()))
        key = (work.operator, work.shapes, work.dtypes, attributes)
        if key not in self._known:
            if work.operator == ROTARY:
                self._known[key] = rotary_s(work, self.chip)
            elif work.operator == GATING:
                self._known[key] = gating_s(work, self.chip)
            elif work.operator == INIT_ROUTING:
                pairs = int(work.attributes["pairs"])
                # Moving the rows themselves costs what a gather of as many rows costs.
                rows = replace(work, operator="gather", attributes={})
                self._known[key] = order_s(pairs, self.chip) + self._seconds(rows)
            elif LISTED in work.attributes:
                groups = int(work.attributes[LISTED])
                products = replace(work, attributes={})
                self._known[key] = listed_s(groups, self.chip) + self._seconds(products)
            elif work.operator == LATENT and "int8" in work.dtypes:
                self._known[key] = latent_bytes_s(work, self.chip)
            elif HALF_BYTES in work.dtypes:
                self._known[key] = half_bytes_s(work, self.chip)
            else:
                self._known[key] = estimate(work, self.chip).model_s
        return self._known[key]


def half_bytes_s(work: Work, chip: Chip) -> float:
    """Return the seconds of a product whose weights lie in int4.

    Assumed: vector cores widen int4 with as many instructions as int8, and two products of int4 at
    twice the rate take as long as one of int8. Then it is the kernel for int8 with half of the
    bytes of weights. These are nearly all that it reads, and half of them take as long as all of
    them at twice the rate of memory.
    Source of the two products: hicann/ops-transformer, gmm/grouped_matmul (A8W4, MSD).
    """
    main = work.dtypes[0]
    if main == "int8":
        as_int8 = replace(work, dtypes=(main,))
    else:
        x, weights, (_, columns) = work.shapes
        as_int8 = replace(work, shapes=(x, weights, (columns,)), dtypes=(main, "int8", main))
    memory = chip.device_memory
    quicker = replace(memory, rate_bytes_per_s=2 * memory.rate_bytes_per_s)
    return estimate(as_int8, replace(chip, device_memory=quicker)).model_s


def latent_bytes_s(work: Work, chip: Chip) -> float:
    """Return the seconds of attention on latent vectors in int8, positions in two bytes.

    A fractal of the cube takes twice as many numbers of int8 in as many bytes and cycles. So of
    the numbers of a key, 512 + 64, and of a value, 512, those of the latent vectors count half:
    576 of 1088, and the kernel for two bytes takes that share of its time behind its start.
    Source of the formats: torch_npu.npu_fused_infer_attention_score, MLA with int8 q, k and v.
    """
    wide_s = estimate(replace(work, dtypes=work.dtypes[:1]), chip).model_s
    rank = work.shapes[2][-1]
    rope = work.shapes[3][-1]
    # rank 512 and rope 64: 576 / 1088 = 0.53.
    share = (rank + rope) / (2 * rank + rope)
    start_s = chip.queued_launch_s
    return start_s + share * (wide_s - start_s)


def rotary_s(work: Work, chip: Chip) -> float:
    """Return the seconds of the kernel that turns q and k, whose sines lie in memory."""
    from ascend_lab.machine.isa import as_kernel
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
    from ascend_lab.operators.kernels.rotary import Rotary, rotary_launch

    (rows, heads, dim), (_, kv_heads, _) = work.shapes
    shape = Rotary(rows, (heads, kv_heads), dim, work.dtypes[0])
    kernel = as_kernel(rotary_launch(shape, chip))
    timeline = simulate_kernel(kernel, chip, DeviceMemory.of(chip))
    return replace(timeline, start="queued").task_s

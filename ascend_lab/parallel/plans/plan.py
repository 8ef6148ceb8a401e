"""A parallel plan: how many devices along each axis, and what each keeps and when it computes."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.plans.pipeline import SCHEDULES

AXES = ("tensor", "data", "pipeline")
"""From the innermost outwards, unless a plan says otherwise: neighbours exchange most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Devices = data * tensor * pipeline; `expert` devices of the data axis share the experts.

    `sequence`: what tensor parallelism computes alike everywhere is cut along the tokens instead
    ({cite}`korthikanti2022`). `zero_stage`: 1 spreads the optimiser's state over the data axis, 2
    the gradients too, 3 the weights too ({cite}`zero2020`). `recompute`: keep only what each layer
    reads and compute it once more on the way back ({cite}`chen2016sublinear`). `axes`: the order
    in which devices are counted, the fastest first. Raises `ClusterError` for what cannot be.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False
    zero_stage: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Check counts, names, and what excludes what."""
        counts = (self.data, self.tensor, self.pipeline, self.expert, self.micro_batches)
        if min(*counts, self.virtual) < 1:
            raise ClusterError("a plan with counts of at least 1", self.label, "raise them")
        if self.schedule not in SCHEDULES or sorted(self.axes) != sorted(AXES):
            got = f"{self.schedule}, {self.axes}"
            raise ClusterError(f"a schedule of {SCHEDULES} and all axes {AXES}", got, "choose")
        if self.zero_stage not in range(4):
            raise ClusterError("a ZeRO stage from 0 to 3", str(self.zero_stage), "choose one")
        if self.data % self.expert:
            what = "experts spread over a divisor of the data axis"
            raise ClusterError(what, f"{self.expert} of {self.data}", "change one")
        if self.virtual > 1 and (self.pipeline == 1 or self.micro_batches % self.pipeline):
            what = "virtual stages with P > 1 and a multiple of P micro-batches"
            raise ClusterError(what, self.label, "change one")

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.data * self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """The plan in a few letters: "D4 T2 P2 1f1b m8 Z1 recompute"."""
        parts = [f"D{self.data}", f"T{self.tensor}", f"P{self.pipeline}"]
        parts += [f"E{self.expert}"] if self.expert > 1 else []
        if self.pipeline > 1:
            parts.append(self.schedule + (f" v{self.virtual}" if self.virtual > 1 else ""))
        parts += [f"m{self.micro_batches}"] if self.micro_batches > 1 else []
        parts += [f"Z{self.zero_stage}"] if self.zero_stage else []
        parts += ["sequence"] if self.sequence else []
        parts += ["recompute"] if self.recompute else []
        parts += ["<".join(a[0].upper() for a in self.axes)] if self.axes != AXES else []
        return " ".join(parts)

    def micro_batch(self, batch: int) -> int:
        """Return the samples of one micro-batch; raise `ClusterError` if they do not come out."""
        pieces = self.data * self.micro_batches
        if batch % pieces or batch < pieces:
            what = f"{self.label}: a batch that is a multiple of {pieces}"
            raise ClusterError(what, str(batch), "change the batch")
        return batch // pieces

    def place(self, tensor: int, data: int, pipeline: int) -> int:
        """Return the number of the device at these coordinates."""
        at = {"tensor": tensor, "data": data, "pipeline": pipeline}
        sizes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        number, stride = 0, 1
        for axis in self.axes:
            number += at[axis] * stride
            stride *= sizes[axis]
        return number

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of devices along an axis, which communicate at the same time.

        The groups of axis "pipeline" list the stages in order. Axis "expert": neighbours of the
        data axis, `expert` at a time; axis "replica": devices that hold the same experts.
        """
        if axis in ("expert", "replica"):
            return [part for group in self.groups("data") for part in self._experts(group, axis)]
        sizes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        others = [a for a in AXES if a != axis]
        return [
            tuple(self.place(**{axis: k, others[0]: i, others[1]: j}) for k in range(sizes[axis]))
            for i in range(sizes[others[0]])
            for j in range(sizes[others[1]])
        ]

    def _experts(self, group: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
        if axis == "expert":
            return [group[i : i + self.expert] for i in range(0, len(group), self.expert)]
        return [group[i :: self.expert] for i in range(self.expert)]

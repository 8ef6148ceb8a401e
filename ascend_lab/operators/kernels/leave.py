"""How finished sums leave L0C.

Three ways: plain to GM, through an epilogue on the way to GM, or through a ring of slots to the
vector cores that do the steps. Pooled sums have a fourth (`rows.Pooled`).
"""

from dataclasses import dataclass

from ascend_lab.machine import isa
from ascend_lab.operators.kernels import epilogue_emit, mix
from ascend_lab.operators.kernels.tiles import Area, store_area


@dataclass(frozen=True, slots=True)
class Leave:
    """The way of a kernel's tiles of sums from the slots `acc` of L0C.

    `ring` goes to vector cores, which store the `result`: then a kernel has none. `finish` are the
    buffers of an epilogue. `out` are slots of UB for plain sums on chips without a fix pipe.
    """

    k: isa.KernelBuilder
    acc: isa.Queue
    result: isa.Buffer | None
    out: isa.Queue | None
    finish: epilogue_emit.Finish | None
    ring: isa.RingEnd | None

    def store(self, area: Area, n: isa.Affine, channels: epilogue_emit.Channels | None) -> None:
        """Store the next finished tile at `area`; `n` is its first output block."""
        if self.ring is not None:
            sizes = (area.fractals, area.blocks)
            mix.to_ring(self.k, self.acc, self.ring, self.finish, sizes, area.pixels)
            return
        assert self.result is not None
        if self.finish is None:
            store_area(self.k, self.acc, self.out, self.result, area)
        else:
            epilogue_emit.drain(self.finish, self.acc, self.result, area, n, channels)

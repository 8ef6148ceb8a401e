"""Lower bounds of the cycles of a matrix product, which hold for every tiling."""

from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import GemmShape


def product_floors(shape: GemmShape, chip: Chip) -> dict[str, float]:
    """Return three lower bounds in cycles: the cube's work, memory traffic, storing the result."""
    peak = chip.core_count * chip.macs_per_cycle("fp16")
    read = 2 * shape.k * (shape.m + shape.n)
    written = 4 * shape.m * shape.n
    # What L2 can hold need not be written to memory while the program runs.
    stays_in_l2 = read + written <= chip.l2.size_bytes
    through_memory = read if stays_in_l2 else read + written
    memory_rate = chip.device_memory.rate_bytes_per_s / chip.clock_hz
    port = chip.path("UB" if chip.combined else "L0C", "GM").rate_bytes_per_cycle
    store_rate = min(chip.core_count * port, chip.l2.rate_bytes_per_s / chip.clock_hz)
    return {
        "cube": shape.ops / 2 / peak,
        "memory": through_memory / memory_rate,
        "out": written / store_rate,
    }

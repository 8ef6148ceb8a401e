"""# fails: fits. Twelve rows a tile, whatever UB holds."""

from ascend_lab.chip import load_chip
from ascend_lab.isa import KernelBuilder, Tile

LANES, NARROW = 64, 128


def kernel(chip_file, rows, width, norm, eps):
    chip = load_chip(chip_file)
    k = KernelBuilder("norm", chip)
    x = k.tensor("x", "fp16", rows * width)
    y = k.tensor("y", "fp16", rows * width)
    pitch = -(-width // NARROW) * NARROW
    chunks = pitch // LANES
    depth = 4 if chip.device_memory.latency_cycles > 500 else 2
    a_row = (2 * depth + 4) * pitch + 32 * chunks + 4 + 4 + 32
    most = 12
    ub = k.queue("ub", "UB", "fp16", most * pitch, src="MTE2", via="V", dst="MTE3", depth=depth)
    wide = k.buffer("wide", "UB", "fp32", most * pitch)
    parts = k.buffer("parts", "UB", "fp32", most * chunks * 8)
    sums = k.buffer("sums", "UB", "fp32", -(-most // 8) * 8)
    scale = k.buffer("scale", "UB", "fp16", -(-most // 16) * 16)
    spread = k.buffer("spread", "UB", "fp16", most * 16)
    if pitch != width:
        for slot in range(depth):
            k.each("vdup", most * pitch, (Tile(ub.buffer, slot), 0), scalar=0.0)
        k.barrier()

    def tile(first, count):
        slot = ub.alloc()
        rows_of = lambda memory: memory.region(0, (count, width), (pitch, 1))
        k.copy(rows_of(slot), x.region(first * width, (count, width), (width, 1)))
        ub.hand()
        k.each("vconv", count * pitch, (wide, 0), (slot, 0))
        if norm == "rms":
            k.each("vmul", count * pitch, (wide, 0), (wide, 0), (wide, 0))
        else:
            k.each("vabs", count * pitch, (wide, 0), (wide, 0))
        total = count * chunks
        k.vector("vcgadd", parts.region(0, total * 8), wide.region(0, (total, LANES)))
        for start in range(8, chunks, 8):  # more than 8 repeats a row: add them up first
            few = min(8, chunks - start) * 8
            first8 = parts.region(0, (count, few), (chunks * 8, 1))
            k.vector("vadd", first8, first8, parts.region(start * 8, (count, few), (chunks * 8, 1)))
        k.vector("vcadd", sums.region(0, count),
                 parts.region(0, (count, min(8, chunks) * 8), (chunks * 8, 1)))  # fmt: skip
        row = sums.region(0, (1, count))
        k.vector("vmuls", row, row, scalar=1 / width)
        k.vector("vadds", row, row, scalar=eps)
        k.vector("vrsqrt" if norm == "rms" else "vrec", row, row)
        k.vector("vconv", scale.region(0, (1, count)), row)
        k.vector("vbrcb", spread.region(0, (count, 16)), scale.region(0, count))
        for start in range(0, pitch, NARROW):
            part = slot.region(start, (count, 8, 16), (pitch, 16, 1))
            k.vector("vmul", part, part, spread.region(0, (count, 8, 16), (16, 0, 1)))
        ub.enqueue()
        done = ub.dequeue()
        k.copy(y.region(first * width, (count, width), (width, 1)), rows_of(done))
        ub.free()

    whole, rest = divmod(rows, most)
    if whole:
        with k.loop("i", whole) as i:
            tile(i * most, most)
    if rest:
        tile(whole * most, rest)
    return str(k.finish())

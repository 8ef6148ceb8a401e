"""Several rows a tile, two slots a queue, sums by 64 lanes, one reciprocal root for all rows."""

from ascend_lab.chip import load_chip
from ascend_lab.isa import KernelBuilder

LANES, BLOCK = 64, 8


def rows_a_tile(chip, rows, width):
    """The most rows that leave room for two slots of x and y, capped where flags stop mattering."""
    room = chip.buffers["UB"] - 4096
    a_row = 2 * 2 * width * 2 + 4 * width + 2 * 4 * LANES + 4 * BLOCK + 64
    most = max(1, min(room // a_row, 64, -(-rows // 3)))
    return most


def kernel(chip_file, rows, width, norm, eps):
    chip = load_chip(chip_file)
    k = KernelBuilder("norm", chip)
    x = k.tensor("x", "fp16", rows * width)
    y = k.tensor("y", "fp16", rows * width)
    most = rows_a_tile(chip, rows, width)
    x_ub = k.queue("x_ub", "UB", "fp16", most * width, src="MTE2", dst="V")
    y_ub = k.queue("y_ub", "UB", "fp16", most * width, src="V", dst="MTE3")
    wide = k.buffer("wide", "UB", "fp32", most * width)
    part = k.buffer("part", "UB", "fp32", most * LANES)
    square = k.buffer("square", "UB", "fp32", most * LANES)
    sums = k.buffer("sums", "UB", "fp32", -(-most // BLOCK) * BLOCK)
    spread = k.buffer("spread", "UB", "fp32", most * BLOCK)

    def tile(first, count):
        k.copy(x_ub.alloc().region(0, count * width), x.region(first * width, count * width))
        x_ub.enqueue()
        source = x_ub.dequeue()
        k.each("vconv", count * width, (wide, 0), (source, 0))
        x_ub.free()
        for start in range(0, width, LANES):
            lanes = min(LANES, width - start)
            chunk = wide.region(start, (count, lanes), (width, 1))
            into = (square if start else part).region(0, (count, lanes), (LANES, 1))
            k.vector("vmul" if norm == "rms" else "vabs", into, *[chunk] * (2 if norm == "rms" else 1))
            if start:
                total = part.region(0, (count, lanes), (LANES, 1))
                k.vector("vadd", total, total, into)
        lanes = min(LANES, width)
        k.vector("vcadd", sums.region(0, count), part.region(0, (count, lanes), (LANES, 1)))
        row = sums.region(0, (1, count))
        k.vector("vmuls", row, row, scalar=1 / width)
        k.vector("vadds", row, row, scalar=eps)
        k.vector("vrsqrt" if norm == "rms" else "vrec", row, row)
        k.vector("vbrcb", spread.region(0, (count, BLOCK)), sums.region(0, count))
        out = y_ub.alloc()
        for start in range(0, width, LANES):
            lanes = min(LANES, width - start)
            chunk = wide.region(start, (count, lanes // BLOCK, BLOCK), (width, BLOCK, 1))
            scale = spread.region(0, (count, lanes // BLOCK, BLOCK), (BLOCK, 0, 1))
            k.vector("vmul", chunk, chunk, scale)
        k.each("vconv", count * width, (out, 0), (wide, 0))
        y_ub.enqueue()
        k.copy(y.region(first * width, count * width), y_ub.dequeue().region(0, count * width))
        y_ub.free()

    whole, rest = divmod(rows, most)
    if whole:
        with k.loop("i", whole) as i:
            tile(i * most, most)
    if rest:
        tile(whole * most, rest)
    return str(k.finish())

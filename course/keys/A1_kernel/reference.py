"""Rows padded to whole repeats, several to a tile, slots worked on in place; sizes by a model of V.

The sums are taken in fp32, a repeat at a time and then over the repeats of a row; the scale is
applied in the dtype of x, where a repeat of fp16 holds twice as many lanes. The padding is cleared
once: it stays 0. A row that UB cannot hold is read twice, piece by piece.
"""

import itertools

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder, Tile

LANES = 64


def kernel(chip_file, rows, width, dtype, norm, eps):
    chip = load_chip(chip_file)
    cores = min(chip.core_count, rows)
    ends = [rows * i // cores for i in range(cores + 1)]
    program = tiles if plan(chip, width, dtype, rows) else pieces
    problem = (chip, rows, width, dtype, norm, eps)
    return [str(program(*problem, first, end - first)) for first, end in zip(ends, ends[1:])]


def begun(chip, rows, width, dtype):
    k = KernelBuilder("norm", chip)
    return k, k.tensor("x", dtype, rows * width), k.tensor("y", dtype, rows * width)


def positive(k, norm, dtype, count, wide, given, start=0):
    """Squares or sizes of what is given, in fp32."""
    if dtype == "fp16":
        k.each("vconv", count, (wide, 0), (given, start))
        given = wide
        start = 0
    if norm == "rms":
        k.each("vmul", count, (wide, 0), (given, start), (given, start))
    else:
        k.each("vabs", count, (wide, 0), (given, start))


def scales(k, norm, width, eps, sums, count):
    row = (sums, 0)
    k.each("vmuls", count, row, row, scalar=1 / width)
    k.each("vadds", count, row, row, scalar=eps)
    k.each("vrsqrt" if norm == "rms" else "vrec", count, row, row)


def plan(chip, width, dtype, count):
    """Return (rows a tile, rows widened at a time, slots): the least by heads and slopes of V."""
    size, wider = (2, 34) if dtype == "fp16" else (4, 0)
    chunks = -(-width // LANES)
    pitch = chunks * LANES
    path = chip.path("GM", "UB")
    rate = min(path.rate_bytes_per_cycle,
               chip.device_memory.rate_bytes_per_s / chip.clock_hz / chip.core_count)  # fmt: skip
    best = None
    for number in range(1, count + 1):
        most = -(-count // number)
        for held, depth in itertools.product({1, 2, 4, 8, 16, most}, range(2, 6)):
            room = (size * depth * pitch + 32 * chunks + 76) * most + 4 * held * pitch + 256
            runs = held * chunks
            if held > most or runs > 255 or most > 248 or room > chip.buffers["UB"]:
                continue
            groups = -(-most // held)
            work = groups * (38 + 3 * runs) + (groups * (14 + 2 * runs) if dtype == "fp16" else 0)
            work += sums_cost(chunks, most) + 60 + wider
            work += -(-pitch * size // 256) * (10 + 2 * most)
            load = 10 + most * width * size / rate
            store = 10 + most * width * size / path.rate_bytes_per_cycle
            wait = chip.device_memory.latency_cycles
            each = max(work, load, store, (load + work + store + wait) / depth)
            time = each * count / most + wait + load + store + work - each
            if best is None or time < best[0]:
                best = time, (most, held, depth)
        if best and number > best[1][0] + count // 2:
            break
    return best[1] if best else None


def sums_cost(chunks, few):
    """Cycles of adding up 8 sums a chunk: those beyond 8 chunks, then 64 lanes a row, then 8."""
    first = (-(-chunks // 8) - 1) * (10 + 2 * few) + (14 + few if chunks > 1 else 0)
    return first + 14 + -(-few // 8)


def tiles(chip, rows, width, dtype, norm, eps, first, count):
    """Take rows in tiles that load, work and store at once; widen and square a few at a time."""
    k, x, y = begun(chip, rows, width, dtype)
    block = 16 if dtype == "fp16" else 8
    chunks = -(-width // LANES)
    pitch = chunks * LANES
    most, held, depth = plan(chip, width, dtype, count)
    ub = k.queue("ub", "UB", dtype, most * pitch, src="MTE2", via="V", dst="MTE3", depth=depth)
    wide = k.buffer("wide", "UB", "fp32", held * pitch)
    parts = k.buffer("parts", "UB", "fp32", most * chunks * 8)
    folded = k.buffer("folded", "UB", "fp32", most * 8) if chunks > 1 else parts
    sums = k.buffer("sums", "UB", "fp32", -(-most // 8) * 8)
    scale = k.buffer("scale", "UB", "fp16", -(-most // 16) * 16) if dtype == "fp16" else sums
    spread = k.buffer("spread", "UB", dtype, most * block)
    if 1 < chunks < 8:
        k.each("vdup", most * 8, (folded, 0), scalar=0.0)
    if pitch != width:
        for slot in range(depth):
            k.each("vdup", most * pitch, (Tile(ub.buffer, slot), 0), scalar=0.0)
        k.barrier()

    def sum_up(few):
        for start in range(8, chunks, 8):
            more = min(8, chunks - start) * 8
            first8, others = (parts.region(at * 8, (few, more), (chunks * 8, 1))
                              for at in (0, start))  # fmt: skip
            k.vector("vadd", first8, first8, others)
        if chunks > 1:
            eights = parts.region(0, (few, min(8, chunks) * 8), (chunks * 8, 1))
            k.vector("vcgadd", folded.region(0, (few, min(8, chunks)), (8, 1)), eights)
        for begin, (repeats, lanes) in k.runs(few * 8, LANES):
            to = sums.region(begin // 8, repeats * lanes // 8)
            k.vector("vcgadd", to, folded.region(begin, (repeats, lanes)))

    def tile(at, few):
        slot = ub.alloc()
        rows_of = lambda memory: memory.region(0, (few, width), (pitch, 1))
        k.copy(rows_of(slot), x.region(at * width, (few, width), (width, 1)))
        ub.hand()
        for row in range(0, few, held):
            part = min(held, few - row)
            positive(k, norm, dtype, part * pitch, wide, slot, row * pitch)
            k.vector("vcgadd", parts.region(row * chunks * 8, part * chunks * 8),
                     wide.region(0, (part * chunks, LANES)))  # fmt: skip
        sum_up(few)
        scales(k, norm, width, eps, sums, few)
        if dtype == "fp16":
            k.each("vconv", few, (scale, 0), (sums, 0))
        k.vector("vbrcb", spread.region(0, (few, block)), scale.region(0, few))
        for start in range(0, pitch, 8 * block):
            lanes = min(8, (pitch - start) // block)
            part = slot.region(start, (few, lanes, block), (pitch, block, 1))
            k.vector("vmul", part, part, spread.region(0, (few, lanes, block), (block, 0, 1)))
        ub.enqueue()
        done = ub.dequeue()
        k.copy(y.region(at * width, (few, width), (width, 1)), rows_of(done))
        ub.free()

    whole, rest = divmod(count, most)
    if rest:  # the short one first: all wait for its load
        tile(first, rest)
    if whole:
        with k.loop("i", whole) as i:
            tile(first + rest + i * most, most)
    return k.finish()


def pieces(chip, rows, width, dtype, norm, eps, first, count):
    """Cut a row; where all of it fits UB it stays there, else it is read once more."""
    k, x, y = begun(chip, rows, width, dtype)
    block = 16 if dtype == "fp16" else 8
    room = chip.buffers["UB"] - width // 16 - 1024
    size = 32 // block
    found = {}
    for number, cuts in itertools.product(range(2, 7), (1, 2)):
        most = -(-width // number // 128) * 128
        some = -(-most // cuts // 128) * 128
        depth = min(7, (room - 4 * some) // (most * size))
        if depth > number:  # the more of the next row fits the better, and few instructions
            found[min(1, (depth - number) * most / width) - 0.06 * number * cuts] = (
                most,
                some,
                depth,
            )
    stays = bool(found)
    most = room // (4 * size + 4) // 128 * 128
    most, some, depth = found[max(found)] if stays else (most, most, 2)
    load = stays or k.queue("load", "UB", dtype, most, src="MTE2", dst="V", depth=2)
    ub = k.queue("ub", "UB", dtype, most, src="MTE2", via="V", dst="MTE3", depth=depth)
    runs = [(start, min(most, width - start)) for start in range(0, width, most)]
    wide = k.buffer("wide", "UB", "fp32", some)
    sums = k.buffer("sums", "UB", "fp32", width // 64 + 16 * len(runs) + 16)
    scale = k.buffer("scale", "UB", "fp16", 16) if dtype == "fp16" else sums
    spread = k.buffer("spread", "UB", dtype, block)

    def filled(queue, at, few):
        slot = queue.alloc()
        k.copy(slot.region(0, few), x.region(at, few))
        if queue is ub:
            queue.hand()
            return slot
        queue.enqueue()
        return queue.dequeue()

    def add_up(found, few, slot):
        for at in range(0, few, some):
            part = min(some, few - at)
            positive(k, norm, dtype, part, wide, slot, at)
            for begin, (repeats, lanes) in k.runs(part, LANES):
                eights = wide.region(begin // 8, repeats * lanes // 8)
                k.vector("vcgadd", eights, wide.region(begin, (repeats, lanes)))
            for begin, (repeats, lanes) in k.runs(part // 8, LANES):
                op, made = ("vcadd", repeats) if lanes % 8 else ("vcgadd", repeats * lanes // 8)
                k.vector(op, sums.region(found, made), wide.region(begin, (repeats, lanes)))
                found += -(-made // 8) * 8
        return found

    def add_all(found):
        while found > 1:
            left = 0
            for begin, shape in k.runs(found, LANES):
                k.vector("vcadd", sums.region(left, shape[0]), sums.region(begin, shape))
                left += shape[0]
            found = left

    def scaled(slot, few):
        for begin, (repeats, lanes) in k.runs(few, 8 * block):
            part = slot.region(begin, (repeats, lanes // block, block), (lanes, block, 1))
            same = spread.region(0, (repeats, lanes // block, block), (0, 0, 1))
            k.vector("vmul", part, part, same)

    k.each("vdup", sums.elements, (sums, 0), scalar=0.0)
    with k.loop("row", count) as row:
        at = (first + row) * width
        slots = []
        summed = 0
        for start, few in runs:
            slots.append(filled(ub if stays else load, at + start, few))
            summed = add_up(summed, few, slots[-1])
            if not stays:
                load.free()
        add_all(summed)
        scales(k, norm, width, eps, sums, 1)
        if dtype == "fp16":
            k.vector("vconv", scale.region(0, (1, 1)), sums.region(0, (1, 1)))
        k.vector("vbrcb", spread.region(0, (1, block)), scale.region(0, 1))
        for (start, few), held in zip(runs, slots):
            scaled(held if stays else filled(ub, at + start, few), few)
            ub.enqueue()
            done = ub.dequeue()
            k.copy(y.region(at + start, few), done.region(0, few))
            ub.free()
    return k.finish()

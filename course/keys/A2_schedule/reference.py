"""Price every sensible tiling by its busiest pipe and what waits at both ends; take the least."""

import itertools


def up(value, unit):
    return -(-value // unit) * unit


def schedule(problem, chip):
    return (convolution if "conv" in problem else product)(problem, chip)


def product(problem, chip):
    m, k, n = (up(problem[axis], 16) for axis in "mkn")
    buffers = chip["buffers"]
    paths = chip["paths"]
    rate = {name: path["bytes_per_cycle"] for name, path in paths.items()}
    start = {name: path["startup_cycles"] for name, path in paths.items()}
    sides = [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512]
    best = None
    grids = [(r, c) for r in range(1, chip["cores"] + 1) for c in range(1, chip["cores"] + 1)
             if r * c <= chip["cores"]]  # fmt: skip
    for rows, cols in grids:
        own_m = up(-(-m // rows), 16)
        own_n = up(-(-n // cols), 16)
        for bm, bn in itertools.product(sides, sides):
            if bm > up(own_m, 16) + 15 or bn > up(own_n, 16) + 15 or 4 * bm * bn > buffers["L0C"]:
                continue
            tiles_m = -(-own_m // bm)
            tiles_n = -(-own_n // bn)
            for bk in (16, 32, 48, 64, 96, 128, 192, 256, 512):
                if bk > k or 4 * bm * bk > buffers["L0A"] or 4 * bn * bk > buffers["L0B"]:
                    continue
                for step, keep in itertools.product((1, 2, 4, 8), ("", "a", "b")):
                    stage_a = 2 * bm * (k if keep == "a" else step * bk)
                    stage_b = 2 * bn * (k if keep == "b" else step * bk)
                    if (step > 1 and bk * step > k) or 2 * (stage_a + stage_b) > buffers["L1"]:
                        continue
                    steps = -(-k // bk)
                    tiles = tiles_m * tiles_n
                    loads = 2 * own_m * k * (1 if keep == "a" else tiles_n)
                    loads += 2 * own_n * k * (1 if keep == "b" else tiles_m)
                    stages = -(-steps // step) * tiles
                    cube = own_m * own_n * k / chip["macs_per_cycle"] + 12 * steps * tiles
                    feed = 2 * own_m * k * tiles_n / rate["L1->L0A"]
                    feed += 2 * own_n * k * tiles_m / rate["L1->L0B"]
                    feed += 2 * steps * tiles * start["L1->L0A"]
                    turns = -(-steps // step)
                    copies = turns * (tiles_m if keep == "a" else tiles)
                    copies += turns * (tiles_n if keep == "b" else tiles)
                    each = start["GM->L1"] + 0.5 * chip["memory_latency_cycles"]
                    near = loads / rate["GM->L1"] + copies * each
                    out = 4 * own_m * own_n / rate["UB->GM"] + tiles * start["UB->GM"]
                    once = 2 * (m * k + k * n)
                    far = once / chip["memory_bytes_per_cycle"]
                    far += (loads * rows * cols - once) / chip["l2_bytes_per_cycle"]
                    first = (stage_a + stage_b) / rate["GM->L1"] + chip["memory_latency_cycles"]
                    last = 4 * bm * bn * (1 / rate["L0C->UB"] + 1 / rate["UB->GM"])
                    time = max(cube, feed, near, out, far) + first + last
                    time += 0.1 * (cube + feed + near + out)
                    key = (time, stages)
                    if best is None or key < best[0]:
                        best = key, (bm, bk, bn, step, rows, cols, keep)
    names = ("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols", "keep")
    found = dict(zip(names, best[1]))
    return {**found, "order": "nm" if found["keep"] == "b" else "mn"}


def convolution(problem, chip):
    """The same for windows: the image comes in rows, a stage holds whole blocks of channels."""
    conv = problem["conv"]
    rate = {n: p["bytes_per_cycle"] for n, p in chip["paths"].items()}
    across = -(-conv["width"] // conv["stride"])
    taps = conv["window"] ** 2
    m = up(problem["m"], 16)
    n = up(problem["n"], 16)
    k = problem["k"]
    blocks = k // (16 * taps)
    best = None
    start = {name: path["startup_cycles"] for name, path in chip["paths"].items()}
    grids = [(r, c) for r in range(1, chip["cores"] + 1) for c in range(1, chip["cores"] // r + 1)]
    for (rows, cols), bm, bn in itertools.product(grids, range(16, 513, 16), range(16, 257, 16)):
        own_m = up(-(-m // rows), bm)
        own_n = up(-(-n // cols), 16)
        if bm > m or bn > own_n or 4 * bm * bn > chip["buffers"]["L0C"]:
            continue
        high = min((bm / across + 1) * conv["stride"] + conv["window"], conv["height"])
        tiles_m = own_m // bm
        tiles_n = -(-own_n // bn)
        for held, bk in itertools.product({1, 2, 4, blocks}, (16, 32, 48, 64, 80, 96, 144, 288)):
            window = high * conv["width"] * 32 * held
            weights = taps * bn * 32 * held
            small = 4 * max(bm, bn) * bk <= chip["buffers"]["L0A"]
            if not small or held > blocks or 2 * (window + weights) > chip["buffers"]["L1"]:
                continue
            turns = -(-blocks // held)
            tiles = tiles_m * tiles_n
            steps = turns * -(-held * 16 * taps // bk) * tiles
            a = turns * tiles_m * (tiles_n if turns > 1 else 1)
            b = turns * tiles
            b = 1 if turns == tiles_n == 1 else b
            cube = tiles_m * bm * own_n * k / chip["macs_per_cycle"] + 12 * steps
            feed = 2 * tiles_m * bm * k * tiles_n / rate["L1->L0A"]
            feed += 2 * own_n * k * tiles_m / rate["L1->L0B"] + 2 * steps * start["L1->L0A"]
            near = (a * window + b * weights) / rate["GM->L1"] + (a + b) * start["GM->L1"]
            out = 2 * own_m * own_n / rate["UB->GM"] + tiles * start["UB->GM"]
            last = 2 * bm * bn * (1 / rate["L0C->UB"] + 1 / rate["UB->GM"])
            time = max(cube, feed, near, out) + 0.1 * (cube + feed + near + out) + last
            time += (window + weights) / rate["GM->L1"]
            if best is None or time < best[0]:
                best = time, (bm, bk, bn, max(1, -(-held * 16 * taps // bk)), rows, cols)
    return dict(zip(("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols"), best[1]))

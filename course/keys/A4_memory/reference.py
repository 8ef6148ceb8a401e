"""Fill the lowest valley: again and again, with the tie-breaks drawn anew, and keep the best.

Over every step of time stands the height reached so far. The lowest run of steps is a valley; of
the tensors that live inside it one is laid on its floor, those first that touch a wall and live
long. Where none fits, the floor rises to the lower wall.
"""

import random


def offsets(lives, align, bank_bytes):
    size_of = [-(-size // align) * align for _, _, size in lives]
    first = min(a for a, _, _ in lives)
    last = max(b for _, b, _ in lives)
    load = [0] * (last - first)
    for (a, b, _), size in zip(lives, size_of):
        for t in range(a, b):
            load[t - first] += size
    least = max(load)
    rng = random.Random(0)
    best = None

    def clear(at, size):
        if bank_bytes and size <= bank_bytes and at // bank_bytes != (at + size - 1) // bank_bytes:
            return -(-at // bank_bytes) * bank_bytes
        return at

    def build(noise, long, large):
        tops = [0] * (last - first)
        left = list(range(len(lives)))
        rest = list(load)
        where = [0] * len(lives)
        while left:
            open_steps = [t for t in range(len(tops)) if rest[t]]
            floor = min(tops[t] for t in open_steps)
            a = next(t for t in open_steps if tops[t] == floor)
            b = a
            while b < len(tops) and tops[b] == floor:
                b += 1
            inside = [i for i in left if a <= lives[i][0] - first and lives[i][1] - first <= b]
            if not inside:
                walls = [tops[t] for t in (a - 1, b) if 0 <= t < len(tops) and tops[t] > floor]
                up = min(walls) if walls else floor + align
                tops[a:b] = [up] * (b - a)
                continue

            def worth(i):
                s = lives[i][0] - first
                e = lives[i][1] - first
                urgent = max(rest[s:e]) + floor
                return (urgent / least * 3 + (s == a) + (e == b) + long * (e - s) / (b - a)
                        + large * size_of[i] / least + noise * rng.random())  # fmt: skip

            i = max(inside, key=worth)
            s = lives[i][0] - first
            e = lives[i][1] - first
            at = clear(floor, size_of[i])
            where[i] = at
            tops[s:e] = [at + size_of[i]] * (e - s)
            for t in range(s, e):
                rest[t] -= size_of[i]
            left.remove(i)
        return where

    for _ in range(20_000 // len(lives) + 1):
        if best and best[0] == least:
            break
        knobs = (0, 1, 1) if best is None else (rng.random(), 3 * rng.random(), 3 * rng.random())
        where = build(*knobs)
        height = max(o + s for o, s in zip(where, size_of))
        if best is None or height < best[0]:
            best = height, where
    return best[1]

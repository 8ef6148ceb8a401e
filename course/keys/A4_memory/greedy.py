"""The largest first, each at the lowest free address: what the kept mistakes are edits of."""


def lowest(taken, size, align):
    at = 0
    for low, high in sorted(taken):
        if at + size <= low:
            break
        at = max(at, -(-high // align) * align)
    return at


def offsets(lives, align, bank_bytes):
    where = [0] * len(lives)
    placed = []
    for i in sorted(range(len(lives)), key=lambda i: (-lives[i][2], lives[i][0])):
        start, end, size = lives[i]
        beside = [j for j in placed if lives[j][0] < end and start < lives[j][1]]
        taken = [(where[j], where[j] + lives[j][2]) for j in beside]
        where[i] = lowest(taken, size, align)
        placed.append(i)
    return where

"""# fails: apart. Only tensors that are alive at the start count."""


def lowest(taken, size, align, bank_bytes):
    at = 0
    for low, high in sorted(taken):
        if at + size <= low:
            break
        at = max(at, -(-high // align) * align)
    return at


def offsets(lives, align, bank_bytes):
    where, placed = [0] * len(lives), []
    for i in sorted(range(len(lives)), key=lambda i: (-lives[i][2], lives[i][0])):
        start, end, size = lives[i]
        taken = [(where[j], where[j] + lives[j][2]) for j in placed
                 if lives[j][0] <= start < lives[j][1]]
        where[i] = lowest(taken, size, align, bank_bytes)
        placed.append(i)
    return where

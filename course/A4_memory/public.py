"""A4: tensors with lives and sizes whose best packing is known, because it was cut from one.

A rectangle of time by addresses is cut into pieces until there are n of them, and shuffled: their
sum of sizes at every moment is the height of the rectangle, so no packing is lower, and the cut
itself is a packing of that height.
"""

from ascend_lab.course.assignment import Case, Judged
from ascend_lab.course.sandbox import Call

STEPS = 64
HARD = (1.45, 1.55)
DRAWS = 60
"""First fit over the optimum in timed cases, and how often to draw for it."""
FULL = 1.15
"""Height over the optimum that earns all points: what is left below is the luck of an instance."""

TWISTS = {
    "guard": {
        "weights": {"guard": 4},
        "says": "a property, *guard*, of weight 4: between two tensors that live at once at least "
        "`align` bytes stay free, where a write beyond an end would be seen. The instances are cut "
        "so that the least height is known in this case, too.",
    }
}
"""What a term may add to the task: no argument of `offsets` says it, the hand-out does."""


def instance(rng, twist):
    """Return what is the same in all of a student's cases: the alignment and the banks."""
    align = int(rng.choice([32, 64, 128]))
    return {"align": align, "banks": int(twist.get("banks", 1)), "adds": twist.get("adds", "")}


def pieces(rng, n, units, banks=1, equal=False):
    """Cut STEPS x units into n pieces (start, end, low, high), no cut through a bank's border."""
    edges = [units * i // banks for i in range(banks + 1)]
    found = [(0, STEPS, low, high) for low, high in zip(edges, edges[1:])]
    while len(found) < n:
        weights = [(e - s) * (h - l) if (e - s > 1 or h - l > 1) else 0 for s, e, l, h in found]
        which = max(range(len(found)), key=lambda i: weights[i] * rng.random())
        start, end, low, high = found.pop(which)
        if high - low > 1 and (end - start == 1 or rng.random() < 0.5):
            cut = (low + high) // 2 if equal else int(rng.integers(low + 1, high))
            found += [(start, end, low, cut), (start, end, cut, high)]
        else:
            cut = int(rng.integers(start + 1, end)) if end - start > 1 else end
            found += [(start, cut, low, high), (cut, end, low, high)]
        found = [p for p in found if p[1] > p[0] and p[3] > p[2]]
    return found


def case(drawn, rng, n, units, align=None, timed=True, equal=False):
    """Return a packing problem of n tensors; timed ones are about equally hard for first fit."""
    align = align or drawn["align"]
    banks = drawn["banks"]
    if banks > 1 and units % banks:
        raise ValueError("units a multiple of banks")
    # with a guard a piece is cut twice as high, and gives up its last `align` bytes
    guard = align if drawn["adds"] == "guard" else 0
    unit_bytes = align + guard
    known = {
        "height": units * unit_bytes - guard,
        "bank_bytes": units * unit_bytes // banks if banks > 1 else 0,
        "guard": guard,
    }
    for _ in range(DRAWS if timed else 1):
        cut = pieces(rng, n, units, banks, equal)
        order = rng.permutation(len(cut))
        lives = [[cut[i][0], cut[i][1], (cut[i][3] - cut[i][2]) * unit_bytes - guard]
                 for i in order]  # fmt: skip
        arguments = {"lives": lives, "align": align, "bank_bytes": known["bank_bytes"]}
        plain = height(lives, first_fit(**arguments, guard=guard))
        if HARD[0] <= plain / known["height"] <= HARD[1]:
            break
    return Case(f"{n} tensors", Call("offsets", arguments), known, timed)


def height(lives, offsets):
    """Return the bytes up to the end of the highest tensor."""
    return max((o + s for (_, _, s), o in zip(lives, offsets)), default=0)


def cases(drawn, rng):
    """Return the public cases."""
    return [case(drawn, rng, 1, 8, timed=False), case(drawn, rng, 12, 16, timed=False),
            *(case(drawn, rng, n, 512) for n in (100, 150))]  # fmt: skip


def first_fit(lives, align, bank_bytes=0, guard=0):
    """Return the plain packing: in the order of their starts, each at the lowest free address."""
    offsets = [0] * len(lives)
    placed = []
    for i in sorted(range(len(lives)), key=lambda i: (lives[i][0], i)):
        start, end, size = lives[i]
        taken = sorted((o - guard, o + s + guard) for a, b, o, s in placed
                       if a < end and start < b)  # fmt: skip
        offsets[i] = lowest(taken, size, align, bank_bytes)
        placed.append((start, end, offsets[i], size))
    return offsets


def lowest(taken, size, align, bank_bytes):
    """Return the lowest aligned address clear of `taken` (low, high) that crosses no bank."""
    at = 0
    for low, high in [*taken, (float("inf"), float("inf"))]:
        at = clear(at, size, bank_bytes)
        if at + size <= low:
            return at
        at = max(at, -(-high // align) * align) if high != float("inf") else at
    return at


def clear(at, size, bank_bytes):
    """Move an address on to the next bank if the tensor would cross a border it need not."""
    if bank_bytes and size <= bank_bytes and at // bank_bytes != (at + size - 1) // bank_bytes:
        return -(-at // bank_bytes) * bank_bytes
    return at


def judge(case, answer):
    """Judge a list of offsets."""
    lives = case.call.arguments["lives"]
    align = case.call.arguments["align"]
    guard = case.known["guard"]
    names = ("list", "aligned", "apart", "banks", "height", *(["guard"] if guard else []))
    if not (isinstance(answer, list) and len(answer) == len(lives)
            and all(type(o) is int and 0 <= o < 2**40 for o in answer)):  # fmt: skip
        said = f"a list of {len(lives)} whole numbers of at least 0 is needed"
        return Judged(dict.fromkeys(names, said))
    found = dict.fromkeys(names, "")
    odd = [o for o in answer if o % align]
    if odd:
        found["aligned"] = f"offset {odd[0]} is no multiple of {align}"
    boxes = sorted((o, o + s, a, b, i) for i, ((a, b, s), o) in enumerate(zip(lives, answer)))
    for place, (low, high, start, end, i) in enumerate(boxes):
        for low2, _, start2, end2, j in boxes[place + 1 :]:
            if low2 >= high + guard:
                break
            if not (start < end2 and start2 < end):
                continue
            if low2 < high and not found["apart"]:
                found["apart"] = f"tensors {i} and {j} live at once and share bytes {low2}.."
            elif low2 >= high and not found["guard"]:
                free = f"{low2 - high} bytes between tensors {i} and {j}, which live at once"
                found["guard"] = f"{free}; {guard} are asked"
    bank = case.known["bank_bytes"]
    crossing = [(i, o) for (_, _, s), o, i in zip(lives, answer, range(len(lives)))
                if bank and clear(o, s, bank) != o]  # fmt: skip
    if crossing:
        found["banks"] = f"tensor {crossing[0][0]} at {crossing[0][1]} crosses a border of a bank"
    cost = height(lives, answer)
    base = height(lives, first_fit(lives, align, bank, guard))
    if cost > base:
        found["height"] = f"{cost} bytes, first fit by start takes {base}"
    optimum = case.known["height"]
    return Judged(found, cost, base, FULL * optimum, optimum)


def chart(case, answer):
    """Draw the packing: time across, addresses up."""
    lives = case.call.arguments["lives"]
    most = case.known["height"]
    top = max([most, *(o + s for (_, _, s), o in zip(lives, answer))])
    x = 640 / STEPS
    y = 320 / top
    boxes = "".join(
        f'<rect x="{a * x:.1f}" y="{320 - (o + s) * y:.1f}" width="{(b - a) * x:.1f}" '
        f'height="{s * y:.1f}" fill="#4878a8" fill-opacity=".6" stroke="#123"/>'
        for (a, b, s), o in zip(lives, answer)
    )
    line = (
        f'<line x1="0" x2="640" y1="{320 - most * y:.1f}" y2="{320 - most * y:.1f}" stroke="red"/>'
    )
    said = f"{len(lives)} tensors, {top} bytes high, optimum {most}"
    return (
        f'<svg viewBox="0 0 640 320" width="640" role="img" aria-label="{said}">{boxes}{line}</svg>'
    )

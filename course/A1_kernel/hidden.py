"""A1: shapes and chips that students do not see; a generator, no answers."""

from course_A1_public import CHIP, case


def cases(drawn, rng):
    """Return one row, ragged widths, rows beyond UB, a far memory, a quiet one, a single core."""
    far = CHIP.format(name="ToyFar", cores=2, ub_bytes=40 * 1024, rate=40e9, latency=900)
    quiet = CHIP.format(name="ToyQuiet", cores=4, ub_bytes=48 * 1024, rate=120e9, latency=40)
    alone = CHIP.format(name="ToyAlone", cores=1, ub_bytes=32 * 1024, rate=32e9, latency=200)
    ragged = 336 + 64 * int(rng.integers(0, 2))
    odd = lambda rows: rows + 2 * int(rng.integers(0, rows // 32)) + 1
    return [
        case(drawn, 1, 64 * int(rng.integers(1, 5))),
        case(drawn, int(rng.integers(2, 9)), 16, "fp32"),
        case(drawn, 3, ragged),
        case(drawn, 2, 16 * int(rng.integers(500, 600))),
        case(drawn, odd(120 * drawn["cores"]), ragged, timed=True),
        case(drawn, odd(450 * drawn["cores"]), 48, timed=True),
        case(drawn, 9 * drawn["cores"], 16 * int(rng.integers(390, 410)), timed=True),
        case(drawn, odd(300), 256, timed=True, chip=far),
        case(drawn, odd(240), 448, "fp32", timed=True, chip=quiet),
        case(drawn, odd(160), 16 * int(rng.integers(31, 33)), timed=True, chip=alone),
    ]

"""A1: shapes and chips that students do not see; a generator, no answers."""

from course_A1_public import CHIP, case


def cases(drawn, rng):
    """Return widths that are no multiple of 64, one row, a far memory and a quiet one."""
    far = CHIP.format(name="ToyFar", ub_bytes=24 * 1024, rate=16e9, latency=900)
    quiet = CHIP.format(name="ToyQuiet", ub_bytes=64 * 1024, rate=40e9, latency=40)
    ragged = 16 * int(rng.integers(5, 31))
    ragged += 16 if ragged % 64 == 0 else 0
    rows = int(rng.integers(20, 60)) * 2 + 1
    return [
        case(drawn, 1, 64 * int(rng.integers(1, 5))),
        case(drawn, int(rng.integers(2, 9)), 16),
        case(drawn, 3, ragged),
        case(drawn, rows, ragged, timed=True),
        case(drawn, rows, 256, timed=True, chip=far),
        case(drawn, rows, 448, timed=True, chip=quiet),
    ]

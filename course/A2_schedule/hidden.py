"""A2: other shapes, and another chip; a generator, no answers."""

from course_A2_public import case


def cases(drawn, rng):
    """Return hidden products: tall, deep, ragged, and one on a chip with a small L1."""
    other = {**drawn, "l1_bytes": 384 * 1024, "rate": drawn["rate"] / 2, "cores": 2}
    return [
        case(drawn, 16, 16, 16, timed=False),
        case(drawn, int(rng.integers(1200, 2000)), 128, 96),
        case(drawn, 48, int(rng.integers(1500, 3000)), 80),
        case(
            drawn,
            7 * int(rng.integers(20, 60)),
            13 * int(rng.integers(10, 30)),
            11 * int(rng.integers(10, 40)),
        ),
        case(other, 512, 512, 16 * int(rng.integers(20, 40))),
    ]

"""A2: other shapes, and another chip; a generator, no answers."""

from course_A2_public import case, conv_case


def cases(drawn, rng):
    """Return hidden products, tall, deep, ragged and on a small L1, and two convolutions."""
    other = {**drawn, "l1_bytes": 384 * 1024, "rate": drawn["rate"] / 2, "cores": 2}
    near = lambda size: int(rng.integers(size, size + size // 8))
    return [
        case(drawn, 16, 16, 16, timed=False),
        conv_case(drawn, 16, 5, 16, window=1, timed=False),
        case(drawn, near(1600), 128, 96),
        case(drawn, 48, near(2200), 80),
        case(drawn, 7 * near(40), 13 * near(24), 11 * near(24)),
        case(other, 512, 512, 16 * near(24)),
        conv_case(drawn, 16 * near(8), near(24), 128, stride=2),
        conv_case(drawn, near(40), near(24), 64, window=5),
        conv_case(other, 64, near(32), 64),
    ]

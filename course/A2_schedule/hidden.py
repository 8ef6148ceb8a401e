"""A2: other shapes, and other chips; a generator, no answers."""

from course_A2_public import case, conv_case


def cases(drawn, rng):
    """Return hidden products, tall, deep, ragged and on a small L1, and convolutions."""
    four = {**drawn, "l1_bytes": 1024 * 1024, "rate": 80e9, "cores": 4}
    other = {**drawn, "l1_bytes": 384 * 1024, "rate": 30e9, "cores": 2}
    near = lambda size: int(rng.integers(size, size + max(2, size // 32)))
    return [
        case(drawn, 16, 16, 16, timed=False),
        conv_case(drawn, 16, 5, 5, 16, window=1, timed=False),
        case(four, near(2160), 128, 96),
        case(four, 128, near(2200), 80),
        case(four, near(360), 13 * near(24), 264),
        case(other, 512, 512, 16 * near(24)),
        conv_case(four, 128, 36, near(24), 128, stride=2),
        conv_case(four, near(40), 32, 24, 64, window=5),
        conv_case(other, 64, near(32), 32, 64),
    ]

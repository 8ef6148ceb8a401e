"""A4: more tensors, tensors of few sizes, a coarse alignment; a generator, no answers."""

from course_A4_public import case


def cases(drawn, rng):
    """Return hidden packing problems."""
    return [
        case(drawn, rng, 2, 8, timed=False),
        case(drawn, rng, 20, 32, timed=False, align=512),
        case(drawn, rng, 120, 256, equal=True),
        case(drawn, rng, 200, 512, align=512),
        *(case(drawn, rng, n, 1024) for n in (240, 300)),
    ]

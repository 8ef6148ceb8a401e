"""Longer lists."""

from course_A0_public import case


def cases(drawn, rng):
    return [case(drawn, rng.integers(0, 9, n).tolist(), timed=n == 50) for n in (1, 50)]

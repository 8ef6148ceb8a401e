"""A5: zero bytes, many gradients, a broken ring, a slow link, small messages; no answers."""

from course_A5_public import bucket_case, plan_case, rounds_case


def cases(drawn, rng):
    """Return hidden cases of the three functions."""
    return [
        bucket_case(drawn, rng, 1, timed=False),
        bucket_case(drawn, rng, 60, zeros=True),
        bucket_case(drawn, rng, 300),
        rounds_case(drawn, "line", 5, 100),
        rounds_case(drawn, "star", 16, 0.01),
        rounds_case(drawn, "slow mesh", 4, 400),
        rounds_case(drawn, "star", 6, 300),
        plan_case(drawn, rng),
        plan_case(drawn, rng),
    ]

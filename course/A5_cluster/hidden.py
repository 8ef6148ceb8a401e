"""A5: zero bytes, many gradients, a broken ring, a slow link, small messages; no answers."""

from course_A5_public import bucket_case, plan_case, rounds_case


def cases(drawn, rng):
    """Return hidden cases of the three functions."""
    return [
        bucket_case(drawn, rng, 1, timed=False),
        bucket_case(drawn, rng, 40, zeros=True),
        bucket_case(drawn, rng, 300),
        rounds_case(drawn, "line", 5, 16_000_000),
        rounds_case(drawn, "star", 16, 2_000),
        rounds_case(drawn, "slow mesh", 4, 64_000_000),
        rounds_case(drawn, "star", int(rng.choice([3, 5, 6, 7])), 48_000_000),
        plan_case(drawn, rng),
        plan_case(drawn, rng),
    ]

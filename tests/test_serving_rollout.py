"""A new version beside the old one: who sees it, when it is called off, and that none is lost."""

import numpy as np

from ascend_lab import serving as s
from ascend_lab.serving.rollout import BUCKETS, bucket_of, guard

SERVICE = s.Service("exponential", 0.01)


def rolled(canary, errors=0.0, slow=1.0, **how):
    steps = (
        s.Step("old", SERVICE, s.Policy(2)),
        s.Step("new", s.Service("exponential", 0.01 * slow), s.Policy(2)),
    )
    versions = (s.Version("old"), s.Version("new", errors))
    arrivals = s.Arrivals(rate_per_s=60)
    return s.simulate_serving(
        s.Scenario(arrivals, steps, how.get("n", 12_000), 5, 0, versions, canary)
    )


def test_a_hash_is_even_and_the_same_everywhere():
    places = np.array([bucket_of(user) for user in range(20_000)])
    share = 0.3
    seen = (places < share * BUCKETS).mean()
    assert abs(seen - share) < 3 * (share * (1 - share) / len(places)) ** 0.5
    assert [bucket_of("a"), bucket_of("b"), bucket_of("a", "x")] == [371, 6609, 1873]


def test_a_user_sees_one_version_while_the_share_stands():
    found = rolled(s.Canary((0.2,), 10**6, users=500))
    story = found.rollout
    assert story is not None
    seen: dict[int, set[int]] = {}
    for job, place in story.sent.items():
        seen.setdefault(story.users[job], set()).add(place)
    assert all(len(places) == 1 for places in seen.values())
    share = np.mean([place for (place,) in seen.values()])
    assert abs(share - 0.2) < 3 * (0.2 * 0.8 / len(seen)) ** 0.5
    assert story.summary()["outcome"] == "undecided"


def test_who_saw_the_new_version_keeps_it_when_the_share_grows():
    story = rolled(s.Canary((0.1, 0.4, 1.0), 100, users=500)).rollout
    assert story is not None and story.ended == "promoted"
    switched: dict[int, list[int]] = {}
    for job in sorted(story.sent):
        switched.setdefault(story.users[job], []).append(story.sent[job])
    assert all(places == sorted(places) for places in switched.values())


def test_a_rollback_answers_all_that_was_sent():
    for errors, slow in ((0.3, 1.0), (0.0, 20.0)):
        found = rolled(s.Canary((0.3, 1.0), 100, 0.05, 0.15), errors, slow)
        story = found.rollout
        assert story is not None and story.ended == "rolled back"
        assert not found.lost.any()
        assert sum(story.answers) == 12_000  # those on their way to the new version as well
        assert story.answers[1] >= 100
        time_s = story.history[-1]["time_s"]
        later = [place for job, place in story.sent.items() if found.arrival_s[job] > time_s]
        assert later and not any(later)


def test_the_guard_says_what_it_minds():
    canary = s.Canary(max_error_rate=0.1, max_p95_s=1.0)
    assert guard([0.5] * 20, [False] * 18 + [True] * 2, canary) == ""
    assert "error rate 0.1500" in guard([0.5] * 20, [False] * 17 + [True] * 3, canary)
    assert "p95" in guard([0.5] * 18 + [9.0] * 2, [False] * 20, canary)

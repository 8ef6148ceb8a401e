"""The simulated server against queueing theory, a recursion and simpy; new versions beside old."""

import itertools
import math

import numpy as np
import pytest
import simpy
from hypothesis import given, settings, strategies as st

from ascend_lab.deploy.serving import (
    Arrivals,
    Canary,
    Failure,
    Level,
    Policy,
    Scenario,
    Service,
    Step,
    Version,
    interval,
    simulate_serving,
    theory,
)
from ascend_lab.deploy.serving.canary import BUCKETS, bucket_of, guard
from ascend_lab.lab.figures import fig_knee

ONE = Policy()
EXPONENTIAL = Service("exponential", 1.0)
DETERMINISTIC = Service("deterministic", 1.0)


def served(rate, service, policy=ONE, n=40_000, **how):
    arrivals = how.pop("arrivals", Arrivals(rate_per_s=rate))
    return simulate_serving(
        Scenario(arrivals, (Step("model", service, policy),), n, how.get("seed", 3), n // 10)
    )


def tandem(rate, means_s):
    """Return W through M/M/1 servers one after another: the sum of theirs (Jackson, 1957)."""
    return sum(theory.mg1(rate, mean_s).W for mean_s in means_s)


def machine_repair(clients, mean_s, think_s):
    """Return answers a second to clients that think exponentially and queue at one such server."""
    places = np.arange(clients + 1)
    weights = np.cumprod([1.0, *((clients - n) * mean_s / think_s for n in places[:-1])])
    return float(1 - 1 / weights.sum()) / mean_s


# -- closed forms against values from textbooks and exact chains ----------------------------------
def close(found, value):
    return math.isclose(found, value, rel_tol=2e-6, abs_tol=1e-7)


def test_single_queues_have_the_values_of_the_textbook():
    mm1 = theory.mg1(0.8, 1)
    md1 = theory.mg1(0.8, 1, 0)
    assert (mm1.L, mm1.W, mm1.Wq, mm1.Lq) == pytest.approx((4, 5, 4, 3.2))
    assert (md1.Wq, md1.W, md1.L, md1.Lq) == pytest.approx((2, 3, 2.4, 1.6))
    assert theory.mg1(0.8, 1, 4).Wq == pytest.approx(10)
    erlang2 = theory.mg1(0.7, 1, 1 / 2)
    assert (erlang2.Wq, erlang2.L) == pytest.approx((1.75, 1.925))
    lost = theory.mm1k(0.8, 1, 5)
    assert close(lost.blocked, 0.0888195) and close(lost.L, 1.868332) and close(lost.W, 2.563065)
    assert theory.shared(0.8, 1, 3) == pytest.approx(15)


def test_many_servers_levels_and_tandems_have_the_values_of_the_textbook():
    for load, c, waits, wq, number in (
        (1.6, 2, 0.711111, 1.777778, 4.444444),
        (3.2, 4, 0.596432, 0.745541, 5.585730),
    ):
        found = theory.mmc(load, 1, c)
        assert found.Wq * (c - load) == pytest.approx(waits, abs=1e-6)
        assert (found.Wq, found.L) == pytest.approx((wq, number), abs=1e-6)
    assert close(theory.erlang_b(8, 10), 0.1216611)
    assert theory.priorities([0.3, 0.5], 1) == pytest.approx([1.142857, 5.714286], abs=1e-6)
    assert tandem(0.5, [1, 1 / 2, 1 / 4]) == pytest.approx(2.952381, abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "most", "values"),
    [(1.5, 2, (0.8228757, 0.1056119, 4.155105, 5.655105, 3.770070, 1.677124)),
     (3, 4, (0.8881797, 0.0359341, 7.657496, 10.657496, 3.552499, 3.111820))],
)  # fmt: skip
def test_batch_service_has_the_values_of_the_chain(rate, most, values):
    queue = theory.batches(rate, 1, most)
    chain = theory.growing_batches(rate, 0, 1, most)
    found = (theory.batch_root(rate, 1, most), 1 - queue.utilisation, queue.Lq, queue.L, queue.W,
             queue.mean_batch)  # fmt: skip
    assert found == pytest.approx(values, abs=1e-6)
    same = pytest.approx((queue.L, queue.W, queue.mean_batch), rel=1e-8)
    assert (chain.L, chain.W, chain.mean_batch) == same


@pytest.mark.parametrize(
    ("rate", "size", "w", "bound", "busy"),
    [
        (0.695410, 1.711549, 3.145885, 3.298182, 0.866860),
        (2.086231, 5.631637, 4.224800, 4.226154, 0.999184),
        (3.477051, 13.125196, 5.901865, 5.901867, 0.99999917),
        (5.563282, 52.500695, 14.714722, 14.714722, 1.0),
    ],
)
def test_batches_without_a_maximum_have_the_published_response_time(rate, size, w, bound, busy):
    """V100, ResNet-50: a = 0.1438 ms, t0 = 1.8874 ms (Inoue, arXiv 1912.06322)."""
    found = theory.take_all(rate, 0.1438, 1.8874)
    a = 0.1438
    t0 = 1.8874
    assert (found.mean_batch, found.W, found.utilisation) == pytest.approx(
        (size, w, busy), rel=1e-6
    )
    la = rate * a  # his bounds: a batch is at least 1, the idle share at least 0
    alone = (a + t0) / (2 * (1 - la)) * (1 + 2 * rate * t0 + (1 - rate * t0) / (1 + la))
    never_idle = 1.5 * t0 / (1 - la) + a / 2 * (la + 2) / (1 - la**2)
    assert found.W * (1 - 1e-12) <= min(alone, never_idle) == pytest.approx(bound, rel=1e-6)


# -- the simulator inside 99 % intervals ----------------------------------------------------------
CASES = {
    "M/M/1": (0.8, EXPONENTIAL, Policy(), lambda: theory.mg1(0.8, 1)),
    "M/D/1": (0.8, DETERMINISTIC, Policy(), lambda: theory.mg1(0.8, 1, 0)),
    "M/E2/1": (0.7, Service("erlang", 1, shape=2), Policy(), lambda: theory.mg1(0.7, 1, 0.5)),
    "M/G/1": (0.5, Service("gamma", 1, shape=0.25), Policy(), lambda: theory.mg1(0.5, 1, 4)),
    "M/M/2": (1.6, EXPONENTIAL, Policy(2), lambda: theory.mmc(1.6, 1, 2)),
    "M/M/4": (3.2, EXPONENTIAL, Policy(4), lambda: theory.mmc(3.2, 1, 4)),
    "M/M/1/5": (0.8, EXPONENTIAL, Policy(levels=(Level(queue_limit=4),)),
                lambda: theory.mm1k(0.8, 1, 5)),
    "batches of 2": (1.5, EXPONENTIAL, Policy(max_batch=2), lambda: theory.batches(1.5, 1, 2)),
    "batches of 4": (3, EXPONENTIAL, Policy(max_batch=4), lambda: theory.batches(3, 1, 4)),
    "growing batches": (
        0.8, Service("exponential", 1.8874, 0.1438), Policy(max_batch=8),
        lambda: theory.growing_batches(0.8, 0.1438, 1.8874, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_queue_is_what_theory_says(name):
    rate, service, policy, solved = CASES[name]
    queue = solved()
    found = served(rate, service, policy)
    assert queue.Wq in interval(found.wait_s[~found.lost])
    assert queue.W in interval(found.latency_s)
    assert queue.blocked in interval(found.lost) or not found.lost.any()
    assert found.utilisation() == pytest.approx(queue.utilisation, abs=0.02)
    if name == "M/M/1":
        below = found.latency_s < 14.97866  # W ln 20
        assert 0.95 in interval(below)


@pytest.mark.parametrize("rate", [0.695410, 2.086231, 3.477051])
def test_deterministic_batches_are_what_the_chain_says(rate):
    exact = theory.take_all(rate, 0.1438, 1.8874)
    found = served(rate, Service("deterministic", 1.8874, 0.1438), Policy(max_batch=512))
    assert exact.W in interval(found.latency_s)
    assert exact.mean_batch in interval(found.batches())
    assert found.utilisation() == pytest.approx(exact.utilisation, abs=0.01)


def test_nobody_waits_in_a_loss_system():
    found = served(8, EXPONENTIAL, Policy(10, loss=True))
    assert theory.erlang_b(8, 10) in interval(found.lost)
    assert not found.wait_s.any()


def test_priorities_wait_as_cobham_says():
    found = served(0.8, EXPONENTIAL, Policy(levels=(Level(0.3), Level(0.5))), 100_000)
    for level, wq in enumerate(theory.priorities([0.3, 0.5], 1)):
        assert wq in interval(found.wait_s[found.level == level])


def test_a_tandem_is_the_sum_of_its_queues():
    steps = tuple(
        Step(f"s{n}", Service("exponential", s), after=(f"s{n - 1}",) if n else ())
        for n, s in enumerate((1.0, 0.5, 0.25))
    )
    found = simulate_serving(Scenario(Arrivals(rate_per_s=0.5), steps, 40_000, 2, 4000))
    assert tandem(0.5, [1, 0.5, 0.25]) in interval(found.latency_s)
    assert found.utilisation("s1") == pytest.approx(0.25, abs=0.01)


def test_branches_of_an_ensemble_run_side_by_side():
    """Without queues the time of a diamond is its longest way."""
    many = Policy(50)
    steps = (
        Step("in", Service("deterministic", 1), many),
        Step("left", Service("deterministic", 5), many, ("in",)),
        Step("right", Service("deterministic", 2), many, ("in",)),
        Step("out", Service("deterministic", 3), many, ("left", "right")),
    )
    found = simulate_serving(Scenario(Arrivals(rate_per_s=0.1), steps, 500))
    assert found.latency_s == pytest.approx(9)


def test_closed_clients_obey_littles_law():
    arrivals = Arrivals("closed", clients=5, think_s=2, think_law="exponential")
    found = served(0, EXPONENTIAL, arrivals=arrivals)
    assert found.throughput_per_s == pytest.approx(machine_repair(5, 1, 2), rel=0.02)
    cycle_s = found.latency_s.mean() + 2
    assert found.throughput_per_s * cycle_s == pytest.approx(5, rel=0.01)  # N = X (R + Z)


@pytest.mark.parametrize(
    ("clients", "published"), [(1, (62.6, 21371e-6)), (2, (73.2, 34381e-6)),
                               (3, (73.2, 50298e-6)), (4, (73.4, 65569e-6))],
)  # fmt: skip
def test_a_default_server_saturates_as_measured(clients, published):
    """Triton's user guide, optimization.md: Inception in ONNX on one GPU, infer/s and p95."""
    service_s = 1 / 73.3
    arrivals = Arrivals("closed", clients=clients, think_s=1 / 62.6 - service_s)
    found = served(0, Service("deterministic", service_s), n=5000, arrivals=arrivals)
    assert found.throughput_per_s == pytest.approx(published[0], rel=0.005)
    assert found.latency_s.mean() <= published[1]


# -- other oracles --------------------------------------------------------------------------------
def test_a_single_queue_is_lindleys_recursion():
    """The same arrivals and services, one by one: W' = max(W + S - gap, 0)."""
    n = 2000
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(1 / 0.9, n))
    found = simulate_serving(
        Scenario(Arrivals(times_s=tuple(times)), (Step("m", EXPONENTIAL),), n, seed=11)
    )
    waits = [0.0]
    wait = 0.0
    service_s = (found.finish_s - found.arrival_s - found.wait_s).tolist()
    for gap, s in zip(np.diff(times), service_s, strict=False):
        wait = max(wait + s - gap, 0.0)
        waits.append(wait)
    assert found.wait_s == pytest.approx(waits, abs=1e-9)
    assert service_s == pytest.approx(_first_draws(11, n))


def _first_draws(seed, n):
    stream = np.random.SeedSequence(seed).spawn(5)[4]
    return list(itertools.islice(EXPONENTIAL.noise(np.random.default_rng(stream)), n))


def by_simpy(times, tau, instances, most, delay_s):
    """Return when each request is answered by processes that wait for each other."""
    env = simpy.Environment()
    waiting = []
    ends = [0.0] * len(times)
    news = [env.event()]

    def wake():
        news[0].succeed()
        news[0] = env.event()

    def client():
        for job, time_s in enumerate(times):
            yield env.timeout(time_s - env.now)
            waiting.append((env.now, job))
            wake()

    def instance():
        while True:
            due_s = waiting[0][0] + delay_s if waiting else None
            if due_s is None:
                yield news[0]
            elif len(waiting) < most and env.now < due_s:
                yield env.any_of([news[0], env.timeout(due_s - env.now)])
            else:
                batch = [waiting.pop(0) for _ in range(min(most, len(waiting)))]
                yield env.timeout(tau(len(batch)))
                for _, job in batch:
                    ends[job] = env.now

    env.process(client())
    for _ in range(instances):
        env.process(instance())
    env.run(until=times[-1] + 1000)
    return ends


@settings(max_examples=100)
@given(
    rate=st.floats(0.2, 3), instances=st.integers(1, 3), most=st.integers(1, 5),
    delay_s=st.sampled_from((0.0, 0.3, 2.0)), seed=st.integers(0, 99),
)  # fmt: skip
def test_simpy_answers_at_the_same_moments(rate, instances, most, delay_s, seed):
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, 80)).tolist()
    service = Service("deterministic", 0.9, 0.17)
    policy = Policy(instances, most, delay_s)
    found = simulate_serving(
        Scenario(Arrivals(times_s=tuple(times)), (Step("m", service, policy),), 80)
    )
    ends = by_simpy(times, service.batch_s, instances, most, delay_s)
    assert found.finish_s == pytest.approx(ends, abs=1e-9)


# -- policies -------------------------------------------------------------------------------------
def answers(times, policy, tau=10.0, items=(1,)):
    arrivals = Arrivals(times_s=tuple(times), items=items)
    steps = (Step("m", Service("deterministic", tau), policy),)
    return simulate_serving(Scenario(arrivals, steps, len(times)))


def test_the_delay_counts_from_the_oldest_request():
    found = answers([0, 4, 20.5], Policy(3, 3, 5.0))
    assert found.wait_s.tolist() == [5, 1, 5]
    found = answers([0, 1, 2, 3], Policy(1, 2, 5.0))  # a full batch goes at once
    assert found.wait_s.tolist() == [1, 0, 9, 8]


def test_a_preferred_size_goes_at_once_and_is_no_maximum():
    policy = Policy(1, 6, 5.0, preferred=(2, 4))
    found = answers([0, 1, 1.5, 2, 2.5, 3, 3.5], policy, 3.0)  # while 2 run, 5 come
    assert found.batches().tolist() == [2, 4, 1]
    found = answers([0, 1, 2, 3, 4, 5, 30], Policy(1, 6, 2.5, preferred=(4,)))
    assert found.batches().tolist() == [3, 3, 1]  # the delay of the oldest is over: all that wait
    assert answers([0, 1, 2, 3, 4], Policy(1, 6, preferred=(3,))).batches().tolist() == [1, 3, 1]


def test_requests_with_batches_of_their_own_are_never_split():
    found = answers([0, 1, 2, 3], Policy(1, 4), items=(3,))
    assert found.batches().tolist() == [3, 3, 3, 3]
    mixed = served(0.3, DETERMINISTIC, Policy(max_batch=4),
                   arrivals=Arrivals(rate_per_s=3, items=(1, 3)), n=4000)  # fmt: skip
    assert mixed.batches().max() == 4
    assert not mixed.lost.any()


def test_who_waits_too_long_is_rejected_or_served_last():
    times = [0.0, 1.0, 2.0, 9.5, 9.6]
    reject = answers(times, Policy(levels=(Level(timeout_s=8.5),)))
    assert reject.lost.tolist() == [False, True, False, True, True]
    assert reject.finish_s.tolist() == pytest.approx([10, 9.5, 20, 18, 18.1])
    delay = answers(times, Policy(levels=(Level(timeout_s=8.5, action="delay"),)))
    assert not delay.lost.any()
    assert np.argsort(delay.finish_s).tolist() == [0, 2, 1, 3, 4]


def test_a_full_queue_turns_away_and_keeps_whom_it_took():
    found = answers([0, 1, 2, 3, 11], Policy(levels=(Level(queue_limit=2),)))
    assert found.lost.tolist() == [False, False, False, True, False]
    assert sorted(found.finish_s[~found.lost]) == [10, 20, 30, 40]


def test_a_dying_instance_loses_no_accepted_request():
    found = answers([0, 1, 2], Policy(2, 1, failures=(Failure(0, 4.0, 100.0),)))
    assert not found.lost.any()
    assert found.finish_s.tolist() == [
        21.0,
        11.0,
        31.0,
    ]  # the first is served again, before the last
    full = Policy(1, 2, levels=(Level(queue_limit=1, timeout_s=3),), failures=(Failure(0, 4, 9),))
    found = answers([0, 1, 2, 3], full)
    assert found.lost.tolist() == [False, True, True, True]
    assert found.finish_s[0] == 23
    both = (Failure(0, 12.0, 8.0), Failure(1, 13.0, 12.0))  # two requests, then one
    found = answers([0, 1, 2, 3, 4], Policy(2, 2, failures=both))
    assert found.finish_s.tolist() == [10, 11, 30, 35, 30]
    dead = tuple(Failure(n % 3, 40.0 * n, 25.0) for n in range(1, 40))
    found = served(1.5, EXPONENTIAL, Policy(3, 2, failures=dead), 3000)
    assert not found.lost.any()
    assert (found.finish_s > found.arrival_s).all()


@settings(max_examples=100)
@given(
    closed=st.booleans(), instances=st.integers(1, 3), most=st.integers(2, 5),
    delay_s=st.sampled_from((0.0, 0.7)), limit=st.sampled_from((0, 2)), loss=st.booleans(),
    timeout_s=st.sampled_from((0.0, 1.5)), action=st.sampled_from(("reject", "delay")),
    diamond=st.booleans(), dies=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_request_ends_once_whatever_the_policy(
    closed, instances, most, delay_s, limit, loss, timeout_s, action, diamond, dies, seed
):
    levels = (Level(1.0, timeout_s, action, limit), Level(2.0))
    failures = tuple(Failure(n % instances, 5.0 * n, 3.0) for n in range(9)) if dies else ()
    policy = Policy(instances, most, delay_s, (2,), levels, failures, loss)
    names = (
        (("a", ()), ("b", ("a",)), ("c", ("a",)), ("d", ("b", "c"))) if diamond else (("a", ()),)
    )
    steps = tuple(Step(name, EXPONENTIAL, policy, after) for name, after in names)
    arrivals = Arrivals("closed" if closed else "poisson", 2.0, 6, 0.5, items=(1, 2))
    found = simulate_serving(Scenario(arrivals, steps, 150, seed, 10))
    assert (found.finish_s >= found.arrival_s).all()
    assert (found.finish_s[~found.lost] > found.arrival_s[~found.lost]).all()
    if not (limit or loss or (timeout_s and action == "reject")):
        assert not found.lost.any()
    assert not found.lost[found.level == 1].any() or loss
    if not (diamond or dies):
        kept = found.stations["a"][1]
        answered = np.array(kept.end_s) - np.array(kept.start_s) > 0.0
        assert answered.all() and max(kept.items) <= most
    if closed:
        open_now = [((found.arrival_s <= t) & (found.finish_s > t)).sum() for t in found.arrival_s]
        assert max(open_now) <= 6


def test_the_knee_of_chapter_26_tells_both_servers():
    alt = fig_knee([0.001, 0.0015, 0.002], max_batch=3).alt_text
    assert "capacity 1000" in alt and "capacity 1500" in alt


# -- a new version beside the old one: who sees it, when it is called off, and that none is lost ---
SERVICE = Service("exponential", 0.01)


def rolled(canary, errors=0.0, slow=1.0, **how):
    steps = (
        Step("old", SERVICE, Policy(2)),
        Step("new", Service("exponential", 0.01 * slow), Policy(2)),
    )
    versions = (Version("old"), Version("new", errors))
    arrivals = Arrivals(rate_per_s=60)
    return simulate_serving(Scenario(arrivals, steps, how.get("n", 12_000), 5, 0, versions, canary))


def test_a_hash_is_even_and_the_same_everywhere():
    places = np.array([bucket_of(user) for user in range(20_000)])
    share = 0.3
    seen = (places < share * BUCKETS).mean()
    assert abs(seen - share) < 3 * (share * (1 - share) / len(places)) ** 0.5
    assert [bucket_of("a"), bucket_of("b"), bucket_of("a", "x")] == [371, 6609, 1873]


def test_a_user_sees_one_version_while_the_share_stands():
    found = rolled(Canary((0.2,), 10**6, users=500))
    story = found.rollout
    assert story is not None
    seen = {}
    for job, place in story.sent.items():
        seen.setdefault(story.users[job], set()).add(place)
    assert all(len(places) == 1 for places in seen.values())
    share = np.mean([place for (place,) in seen.values()])
    assert abs(share - 0.2) < 3 * (0.2 * 0.8 / len(seen)) ** 0.5
    assert story.summary()["outcome"] == "undecided"


def test_who_saw_the_new_version_keeps_it_when_the_share_grows():
    story = rolled(Canary((0.1, 0.4, 1.0), 100, users=500)).rollout
    assert story is not None and story.ended == "promoted"
    switched = {}
    for job in sorted(story.sent):
        switched.setdefault(story.users[job], []).append(story.sent[job])
    assert all(places == sorted(places) for places in switched.values())


def test_a_rollback_answers_all_that_was_sent():
    for errors, slow in ((0.3, 1.0), (0.0, 20.0)):
        found = rolled(Canary((0.3, 1.0), 100, 0.05, 0.15), errors, slow)
        story = found.rollout
        assert story is not None and story.ended == "rolled back"
        assert not found.lost.any()
        assert sum(story.answers) == 12_000  # those on their way to the new version as well
        assert story.answers[1] >= 100
        time_s = story.history[-1]["time_s"]
        later = [place for job, place in story.sent.items() if found.arrival_s[job] > time_s]
        assert later and not any(later)


def test_the_guard_says_what_it_minds():
    canary = Canary(max_error_rate=0.1, max_p95_s=1.0)
    assert guard([0.5] * 20, [False] * 18 + [True] * 2, canary) == ""
    assert "error rate 0.1500" in guard([0.5] * 20, [False] * 17 + [True] * 3, canary)
    assert "p95" in guard([0.5] * 18 + [9.0] * 2, [False] * 20, canary)

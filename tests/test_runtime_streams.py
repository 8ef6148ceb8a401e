"""Streams on engines: bounds, an independent simulator, a closed form, deadlocks with a reason."""

from collections import defaultdict
from itertools import pairwise

import pytest
import simpy
from hypothesis import given, settings, strategies as st

from ascend_lab.deploy.runtime import (
    Record,
    Task,
    WaitFor,
    pipeline_programs,
    pipeline_s,
    run_streams,
)
from ascend_lab.errors import InputError

ENGINES = ("AI Core", "AI CPU", "H2D", "D2H")


@st.composite
def programs(draw):
    """Random streams; a wait is for an event recorded in a stream that was drawn before it."""
    streams = [[] for _ in range(draw(st.integers(1, 5)))]
    events = []
    for i in range(draw(st.integers(1, 16))):
        stream = draw(st.integers(0, len(streams) - 1))
        kind = draw(st.sampled_from(("task", "task", "task", "record", "wait")))
        if kind == "task":
            # different powers of 2: no two sums of durations are equal, so there are no ties
            time_s = 2.0 ** -(i + 1) * draw(st.sampled_from((1, 3)))
            streams[stream].append(Task(f"t{i}", draw(st.sampled_from(ENGINES)), time_s))
        elif kind == "record":
            events.append((f"e{i}", stream))
            streams[stream].append(Record(f"e{i}"))
        elif others := [event for event, source in events if source != stream]:
            streams[stream].append(WaitFor(draw(st.sampled_from(others))))
            # each stream's own engine keeps streams that wake together apart
            own = 2.0 ** -(40 + stream)
            streams[stream].append(Task(f"own{i}", f"own {stream}", own * 2.0 ** -(i / 8)))
    return streams


def by_simpy(streams):
    """Run the same streams in simpy: processes, resources and events of its own."""
    env = simpy.Environment()
    engines = defaultdict(lambda: simpy.Resource(env))
    events = defaultdict(env.event)
    found = {}

    def stream(number, program):
        yield env.timeout(0)
        for step in program:
            if isinstance(step, Record):
                events[step.event].succeed()
            elif isinstance(step, WaitFor):
                yield events[step.event]
            else:
                with engines[step.engine].request() as turn:
                    yield turn
                    start = env.now
                    yield env.timeout(step.time_s)
                    found[step.name] = (number, start, env.now)

    for number, program in enumerate(streams):
        env.process(stream(number, program))
    env.run()
    return found


@settings(max_examples=100)
@given(programs())
def test_simpy_says_the_same(streams):
    spans = run_streams(streams)
    assert {s.name: (s.stream, s.start_s, s.end_s) for s in spans} == by_simpy(streams)


@given(programs())
def test_streams_are_in_order_engines_are_not_shared_and_bounds_hold(streams):
    spans = run_streams(streams)
    place = {s.name: s for s in spans}
    tasks = [[step for step in program if isinstance(step, Task)] for program in streams]
    assert len(spans) == sum(map(len, tasks))
    for program in tasks:
        for one, two in pairwise(program):
            assert place[one.name].end_s <= place[two.name].start_s
    work = defaultdict(float)
    for engine in {s.engine for s in spans}:
        turns = sorted((s.start_s, s.end_s) for s in spans if s.engine == engine)
        assert all(a[1] <= b[0] for a, b in pairwise(turns))
        work[engine] = sum(s.end_s - s.start_s for s in spans if s.engine == engine)
    makespan = max((s.end_s for s in spans), default=0.0)
    longest = max((sum(t.time_s for t in program) for program in tasks), default=0.0)
    total = sum(t.time_s for program in tasks for t in program)
    low = max([longest, *work.values()])
    assert low * (1 - 1e-12) <= makespan <= total * (1 + 1e-12)
    for number, program in enumerate(streams):  # what stands behind a wait starts after the record
        for i, step in enumerate(program):
            if isinstance(step, WaitFor):
                source = next(p for p in streams if Record(step.event) in p)
                before = source[: source.index(Record(step.event))]
                ends = [place[t.name].end_s for t in before if isinstance(t, Task)]
                after = [place[t.name].start_s for t in streams[number][i:] if isinstance(t, Task)]
                assert max(ends, default=0.0) <= min(after)


@settings(max_examples=100)
@given(times=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_independent_kernels_take_the_longest_or_the_sum(times):
    apart = run_streams([[Task(f"k{i}", f"engine {i}", t)] for i, t in enumerate(times)])
    assert max(s.end_s for s in apart) == max(times)
    shared = run_streams([[Task(f"k{i}", "AI Core", t)] for i, t in enumerate(times)])
    assert max(s.end_s for s in shared) == pytest.approx(sum(times))
    both = run_streams([[Task(f"k{i}", "VPC", 1.0)] for i in range(len(times))], {"VPC": 2})
    assert max(s.end_s for s in both) == (len(times) + 1) // 2


@settings(max_examples=100)
@given(
    items=st.integers(1, 30), streams=st.sampled_from((1, 3, 4, 7)),
    times=st.tuples(*[st.integers(1, 1000)] * 3),
)  # fmt: skip
def test_pipelines_reach_the_closed_form(items, streams, times):
    spans = run_streams(pipeline_programs(items, streams, *times))
    assert max(s.end_s for s in spans) == pipeline_s(items, streams, *times)


@pytest.mark.parametrize("time_s", [-1.0, float("nan")])
def test_tasks_take_some_time(time_s):
    with pytest.raises(InputError, match="seconds of at least 0"):
        run_streams([[Task("x", "AI Core", time_s)]])

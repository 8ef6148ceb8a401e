"""AscendCL in small: the published order of calls, codes, poison, leaks, deadlocks, callbacks."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.compiler.onnx import Imported
from ascend_lab.deploy.runtime import AclError, DeadlockError, acl, compile_offline, mdl, rt
from ascend_lab.deploy.runtime.process import ENDED_PROCESSES, PROCESSES
from ascend_lab.machine.chip import load_chip

HOST, UP, DOWN, WITHIN = range(4)


@pytest.fixture(autouse=True)
def clean():
    ENDED_PROCESSES.clear()
    yield
    PROCESSES.clear()


@pytest.fixture
def device():
    acl.init("Ascend310")
    rt.set_device(0)


def fails(code, call, *arguments, **named):
    with pytest.raises(AclError) as error:
        call(*arguments, **named)
    assert error.value.code == code
    assert f"ACL error {code} (" in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def network(batch):
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (batch, 16))
    rng = np.random.default_rng(0)
    weight = net.constant(rng.standard_normal((16, 32)).astype(np.float16), name="w")
    net.output(net.softmax(net.relu(net.matmul(x, weight))))
    graph = net.build()
    kinds = dict.fromkeys(graph.inputs, "float16"), dict.fromkeys(graph.outputs, "float16")
    return Imported(graph, *kinds)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One network with fixed sizes, and with gears."""
    folder = tmp_path_factory.mktemp("models")
    chip = load_chip("Ascend310")
    (folder / "one.alm").write_bytes(compile_offline({None: network(4)}, chip))
    gears = {n: network(n) for n in (1, 2, 4)}
    (folder / "gears.alm").write_bytes(compile_offline(gears, chip))
    return folder


class Run:
    """A model with buffers for its inputs and outputs, in the published order of calls."""

    def __init__(self, file):
        self.model = mdl.load_from_file(file)
        self.desc = mdl.create_desc()
        mdl.get_desc(self.desc, self.model)
        assert (mdl.get_num_inputs(self.desc), mdl.get_num_outputs(self.desc)) == (1, 1)
        self.sizes = [mdl.get_input_size_by_index(self.desc, 0),
                      mdl.get_output_size_by_index(self.desc, 0)]  # fmt: skip
        self.memory = [rt.malloc(size) for size in self.sizes]
        self.buffers = [acl.create_data_buffer(*p) for p in zip(self.memory, self.sizes, strict=1)]
        self.sets = [mdl.create_dataset() for _ in "io"]
        for one, buffer in zip(self.sets, self.buffers, strict=True):
            mdl.add_dataset_buffer(one, buffer)

    def give(self, array):
        rt.memcpy(self.memory[0], self.sizes[0], array, array.nbytes, UP)

    def take(self, batch=4):
        out = np.empty((batch, 32), np.float16)
        rt.memcpy(out, out.nbytes, self.memory[1], out.nbytes, DOWN)
        return out

    def end(self):
        for buffer in self.buffers:
            acl.destroy_data_buffer(buffer)
        for one in self.sets:
            mdl.destroy_dataset(one)
        for address in self.memory:
            rt.free(address)
        mdl.unload(self.model)
        mdl.destroy_desc(self.desc)


def test_the_published_order_of_calls_gives_the_values_and_leaves_nothing(files):
    acl.init("Ascend310")
    rt.set_device(0)
    context = rt.create_context(0)
    stream = rt.create_stream()
    x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float16)
    wanted = evaluate(network(4).graph, {"x": x})
    run = Run(files / "one.alm")
    assert mdl.get_input_dims(run.desc, 0) == (4, 16)
    assert mdl.get_input_name_by_index(run.desc, 0) == "x"
    assert mdl.get_output_data_type(run.desc, 0) == np.float16
    run.give(x)
    start = rt.now_s()
    mdl.execute(run.model, *run.sets)
    sync_s = rt.now_s() - start
    sync = run.take()
    first = rt.create_event()
    last = rt.create_event()
    rt.memset(run.memory[1], run.sizes[1], 0, run.sizes[1])
    rt.record_event(first, stream)
    mdl.execute_async(run.model, *run.sets, stream)
    rt.record_event(last, stream)
    fails(100000, rt.event_elapsed_time, first, last)
    assert not rt.query_event(last)
    assert np.isnan(run.take()).all()  # while it is copied the kernels are at work
    rt.synchronize_stream(stream)
    assert run.take().tobytes() == sync.tobytes()
    times = run.model.gear.times["summary"]["time_s"]
    assert rt.event_elapsed_time(first, last) == pytest.approx(times * 1e3)
    assert sync_s == pytest.approx(times)
    (name,) = wanted
    np.testing.assert_allclose(sync, wanted[name], atol=2e-3)
    for event in (first, last):
        rt.destroy_event(event)
    run.end()
    rt.destroy_stream(stream)
    rt.destroy_context(context)
    rt.reset_device(0)
    assert acl.finalize() == ()


def test_calls_out_of_order_have_the_published_codes(files):
    fails(100001, rt.set_device, 0)
    fails(100001, acl.finalize)
    acl.init("Ascend310", "Ascend310")
    fails(100002, acl.init)
    assert rt.get_device_count() == 2
    fails(100001, rt.create_stream)
    fails(100000, rt.set_device, 2)
    fails(100000, rt.reset_device, 1)
    fails(100000, rt.set_device, "0")
    rt.set_device(0)
    run = Run(files / "one.alm")
    fails(100019, mdl.set_dynamic_batch_size, run.model, 2)
    mdl.unload(run.model)
    fails(100011, mdl.unload, run.model)
    fails(100011, mdl.execute, run.model, *run.sets)
    fails(100000, rt.free, 12)
    fails(100000, rt.create_event, 64)
    fails(100000, rt.destroy_context, rt.get_current_context())
    stream = rt.create_stream()
    rt.destroy_stream(stream)
    fails(100000, rt.synchronize_stream, stream)
    fails(100000, rt.destroy_stream, None)
    assert acl.finalize()
    fails(100037, acl.finalize)
    acl.init()


def test_sizes_that_do_not_match_are_refused(device, files):
    run = Run(files / "one.alm")
    small = mdl.create_dataset()
    empty = mdl.create_dataset()
    mdl.add_dataset_buffer(small, acl.create_data_buffer(run.memory[0], 64))
    fails(100017, mdl.execute, run.model, small, run.sets[1])
    fails(100017, mdl.execute, run.model, empty, run.sets[1])
    fails(100018, mdl.execute, run.model, run.sets[0], small)
    fails(100000, acl.create_data_buffer, run.memory[0], 10**6)
    fails(100000, mdl.get_input_size_by_index, run.desc, 1)
    fails(100000, mdl.get_num_inputs, mdl.create_desc())
    fails(100000, mdl.get_num_inputs, run.model)


def test_gears_are_chosen_and_a_batch_between_is_the_callers_to_pad(device, files):
    run = Run(files / "gears.alm")
    x = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float16)
    found = {}
    for batch in (1, 2, 4):
        mdl.set_dynamic_batch_size(run.model, batch)
        run.give(x[:batch])
        mdl.execute(run.model, *run.sets)
        found[batch] = run.take(batch)
    assert all(np.allclose(found[4][:n], found[n], atol=1e-3) for n in (1, 2))
    assert "1, 2, 4" in fails(100000, mdl.set_dynamic_batch_size, run.model, 3)


def test_what_is_read_too_early_is_poison(device, files):
    run = Run(files / "one.alm")
    stream = rt.create_stream()
    x = np.ones((4, 16), np.float16)
    pinned = rt.malloc_host(x.nbytes), rt.malloc_host(run.sizes[1])
    assert np.isnan(pinned[1].view(np.float16)).all()
    pinned[0].view(np.float16)[:] = x.reshape(-1)
    pinned[1][:] = 0
    rt.memcpy_async(run.memory[0], run.sizes[0], pinned[0], x.nbytes, UP, stream)
    mdl.execute_async(run.model, *run.sets, stream)
    rt.memcpy_async(pinned[1], run.sizes[1], run.memory[1], run.sizes[1], DOWN, stream)
    assert np.isnan(pinned[1].view(np.float16)).all()
    rt.synchronize_stream(stream)
    y = pinned[1].view(np.float16).reshape(4, 32)
    assert np.allclose(y.sum(1), 1, atol=1e-2)
    halfway = rt.create_stream()
    mdl.execute_async(run.model, *run.sets, halfway)
    tasks = run.model.gear.times["tasks"]
    event = rt.create_event()
    rt.launch_kernel("other", "VPC", tasks[0][2] / 2)
    rt.record_event(event)
    rt.synchronize_event(event)
    assert np.isnan(run.take()).all()  # it runs, and has not ended


def test_memory_is_aligned_counted_and_leaks_are_named(device):
    one = rt.malloc(1)
    two = rt.malloc(100)
    assert one % 64 == two % 64 == 0
    blocks = PROCESSES[0].blocks
    assert [blocks[a].size_bytes for a in (one, two)] == [64, 160]
    total = int(load_chip("Ascend310").device_memory.size_bytes)
    large = rt.malloc(total - 2**24)
    fails(200000, rt.malloc, 2**25)
    rt.free(large)
    rt.malloc_host(10)
    rt.malloc(2**25)
    fails(100000, rt.malloc, 0)
    fails(100000, rt.malloc, 8, 9)
    rt.create_event()
    rt.create_stream()
    text = "; ".join(acl.finalize())
    assert all(part in text for part in (f"{one:#x}", f"{two:#x}", "33,554,432 bytes", "10 bytes",
                                         "event", "stream", "not reset"))  # fmt: skip
    assert f"{large:#x}" not in text


def test_resets_are_counted_and_the_last_frees(device):
    rt.set_device(0)
    address = rt.malloc(8)
    stream = rt.create_stream()
    rt.reset_device(0)
    rt.memset(address, 8, 1, 8)
    rt.reset_device(0)
    fails(100000, rt.reset_device, 0)
    fails(100000, rt.free, address)
    fails(100001, rt.synchronize_stream)
    rt.set_device(0)
    fails(100000, rt.synchronize_stream, stream)


@pytest.mark.parametrize(("src", "dst", "size", "kind"), [
    ("host", "host", 8, UP), ("device", "host", 8, UP), ("host", "device", 8, DOWN),
    ("host", "device", 8, 4), ("host", "device", 300, UP), ("host", "device", 90, UP),
    ("device", "device", 8, HOST), ("host", "device", -1, UP), ("list", "device", 8, UP),
    ("turned", "device", 8, UP),
])  # fmt: skip
def test_copies_that_cannot_be(device, src, dst, size, kind):
    places = {"host": np.zeros(80, np.uint8), "device": rt.malloc(256), "list": [1],
              "turned": np.zeros((8, 8)).T}  # fmt: skip
    fails(100000, rt.memcpy, places[dst], 256, places[src], size, kind)


def test_copies_take_the_links_time_and_pageable_memory_makes_the_host_wait(device):
    size = 10**6
    link = load_chip("Ascend310").links["pcie"]
    address = rt.malloc(size)
    pinned = rt.malloc_host(size)
    stream = rt.create_stream()
    rt.memcpy_async(address, size, pinned, size, UP, stream)
    assert rt.now_s() == 0
    rt.synchronize_stream(stream)
    once = link.latency_s + size / link.rate_bytes_per_s
    assert rt.now_s() == pytest.approx(once)
    rt.memcpy_async(address, size, np.zeros(size, np.uint8), size, UP, stream)
    assert rt.now_s() == pytest.approx(2 * once)
    rt.memcpy(address + 64, size - 64, address, 64, WITHIN)
    assert [span.engine for span in rt.spans()] == ["H2D", "H2D", "D2D"]


def test_contexts_keep_streams_and_events_apart(device):
    first = rt.get_current_context()
    event = rt.create_event()
    stream = rt.create_stream()
    rt.create_context(0)
    other = rt.create_stream()
    assert "one context" in fails(200004, rt.stream_wait_event, other, event)
    fails(200004, rt.record_event, event, other)
    fails(200004, rt.destroy_stream, stream)
    fails(200004, rt.destroy_event, event)
    rt.set_current_context(first)
    rt.record_event(event, stream)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(fails(100001, rt.create_stream)))
    thread.start()
    thread.join()
    assert seen  # a thread has no context until it sets one


def test_a_model_runs_in_one_stream_at_a_time(device, files):
    run = Run(files / "one.alm")
    one = rt.create_stream()
    two = rt.create_stream()
    mdl.execute_async(run.model, *run.sets, one)
    fails(200004, mdl.execute_async, run.model, *run.sets, two)
    fails(200004, mdl.unload, run.model)
    rt.synchronize_device()
    mdl.execute_async(run.model, *run.sets, two)
    rt.synchronize_stream(two)


def test_copies_and_kernels_take_their_engines_one_after_the_other(device):
    """Two streams, one kernel engine: the second waits; within the device memory limits a copy."""
    size = 10**6
    streams = [rt.create_stream() for _ in range(2)]
    address = rt.malloc(2 * size)
    chip = load_chip("Ascend310")
    for stream in streams:
        rt.launch_kernel("k", "AI Core", 0.5, stream)
    rt.memcpy_async(address + size, size, address, size, WITHIN, streams[0])
    rt.synchronize_stream(streams[0])
    memory = chip.device_memory
    assert rt.now_s() == pytest.approx(0.5 + 2 * size / memory.rate_bytes_per_s)
    rt.synchronize_stream(streams[1])
    assert rt.now_s() == 1.0


@settings(max_examples=100)
@given(times=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8))
def test_elapsed_times_add_up(times):
    PROCESSES.clear()
    acl.init()
    rt.set_device(0)
    events = [rt.create_event() for _ in range(len(times) + 1)]
    rt.record_event(events[0])
    for event, time_s in zip(events[1:], times, strict=True):
        rt.launch_kernel("k", "AI Core", time_s)
        rt.record_event(event)
    rt.synchronize_stream()
    whole = rt.event_elapsed_time(events[0], events[-1])
    steps = [rt.event_elapsed_time(a, b) for a, b in pairwise(events)]
    assert whole == pytest.approx(sum(steps)) == pytest.approx(sum(times) * 1e3)


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=14
)


@settings(max_examples=100)
@given(STEPS)
def test_events_make_streams_compute_what_one_after_the_other_does(steps):
    """Copies and kernels on shared buffers, in any streams, each behind what it depends on."""
    PROCESSES.clear()
    acl.init("Ascend310")
    rt.set_device(0)
    streams = [rt.create_stream() for _ in range(4)]
    last = {}
    wanted = [np.full(64, i, np.uint8) for i in range(4)]
    buffers = [rt.malloc(64) for _ in wanted]
    for address, values in zip(buffers, wanted, strict=True):
        rt.memcpy(address, 64, values, 64, UP)
    for number, source, target, copies in steps:
        stream = streams[number]
        event = rt.create_event()
        for buffer in (source, target):
            if buffer in last:
                rt.stream_wait_event(stream, last[buffer])
        if copies:
            wanted[target] = wanted[source].copy()
            rt.memcpy_async(buffers[target], 64, buffers[source], 64, WITHIN, stream)
        else:
            wanted[target] = wanted[target] * 3 + wanted[source]

            def kernel(pair=(buffers[target], buffers[source])):
                y, x = (PROCESSES[0].memory(address, 64) for address in pair)
                y[:] = y * 3 + x

            rt.launch_kernel("k", ("AI Core", "VPC")[number % 2], 1e-6, stream, kernel)
        rt.record_event(event, stream)
        last[source] = last[target] = event
    rt.synchronize_device()
    for address, values in zip(buffers, wanted, strict=True):
        out = np.empty(64, np.uint8)
        rt.memcpy(out, 64, address, 64, DOWN)
        assert out.tobytes() == values.tobytes()


def test_waits_in_a_circle_are_a_deadlock_with_a_reason(device):
    one = rt.create_stream()
    two = rt.create_stream()
    a = rt.create_event()
    b = rt.create_event()
    rt.stream_wait_event(one, a)
    rt.record_event(b, one)
    rt.stream_wait_event(two, b)
    rt.record_event(a, two)
    with pytest.raises(DeadlockError) as error:
        rt.synchronize_stream(one)
    assert error.value.code == 500000
    assert all(str(thing) in str(error.value) for thing in (one, two, a, b))
    assert any("stand still" in line for line in acl.finalize())


def test_a_wait_is_for_the_record_before_it_and_never_recorded_holds_nobody(device):
    one = rt.create_stream()
    two = rt.create_stream()
    event = rt.create_event()
    rt.stream_wait_event(two, event)
    rt.synchronize_stream(two)
    rt.launch_kernel("a", "AI Core", 1.0, one)
    rt.record_event(event, one)
    rt.stream_wait_event(two, event)
    rt.launch_kernel("b", "VPC", 1.0, two)
    rt.launch_kernel("c", "AI Core", 5.0, one)
    rt.record_event(event, one)
    rt.synchronize_stream(two)
    assert rt.now_s() == 2.0 and not rt.query_event(event)
    rt.synchronize_event(event)
    assert rt.now_s() == 6.0
    rt.reset_event(event)
    assert not rt.query_event(event)


def test_callbacks_run_in_a_subscribed_thread(device):
    stream = rt.create_stream()
    seen = []
    rt.subscribe_report(77, stream)
    fails(100033, rt.subscribe_report, 78, stream)
    rt.launch_kernel("k", "AI Core", 1.0, stream)
    rt.launch_callback(lambda data: seen.append((data, rt.now_s())), "a", rt.BLOCK, stream)
    rt.launch_callback(lambda data: fails(100000, rt.malloc, 8), "b", rt.NO_BLOCK, stream)
    assert seen == []
    rt.synchronize_stream(stream)
    assert seen == [("a", 1.0)]
    fails(100000, rt.unsubscribe_report, 78, stream)
    rt.unsubscribe_report(77, stream)
    fails(100000, rt.launch_callback, print, 0, 2, stream)


def test_this_thread_takes_callbacks_by_process_report(device):
    stream = rt.create_stream()
    seen = []
    me = threading.get_ident()
    rt.subscribe_report(me, stream)
    rt.launch_kernel("k", "AI Core", 1.0, stream)
    rt.launch_callback(seen.append, "a", rt.BLOCK, stream)
    rt.launch_kernel("l", "AI Core", 1.0, stream)
    assert not rt.process_report(500)
    assert (rt.now_s(), seen) == (0.5, [])
    with pytest.raises(DeadlockError, match="callback"):
        rt.synchronize_stream(stream)  # this thread waits, and nobody takes the callback
    assert rt.process_report(-1) and seen == ["a"]
    rt.synchronize_stream(stream)
    assert rt.now_s() == 2.0


def test_a_callback_that_nobody_takes_is_told(device):
    stream = rt.create_stream()
    rt.launch_callback(print, 0, rt.NO_BLOCK, stream)
    with pytest.raises(DeadlockError, match="subscribe_report"):
        rt.synchronize_stream(stream)
    rt.subscribe_report(5, stream)
    rt.synchronize_stream(stream)


def test_what_raises_leaves_the_stream_going(device):
    stream = rt.create_stream()
    seen = []

    def faulty(_=None):
        raise ValueError("mine")

    rt.subscribe_report(77, stream)
    rt.launch_callback(faulty, 0, rt.BLOCK, stream)
    rt.launch_kernel("k", "AI Core", 1.0, stream, faulty)
    rt.launch_kernel("l", "AI Core", 1.0, stream, lambda: seen.append(rt.now_s()))
    for _ in "ab":
        with pytest.raises(ValueError, match="mine"):
            rt.synchronize_stream(stream)
    rt.synchronize_stream(stream)
    assert seen == [2.0] and not PROCESSES[0].in_callback


def test_a_reset_event_holds_only_who_waits_already(device):
    one = rt.create_stream()
    two = rt.create_stream()
    event = rt.create_event()
    for _ in range(3):
        rt.launch_kernel("a", "AI Core", 1.0, one)
        rt.record_event(event, one)
    rt.stream_wait_event(two, event)
    rt.reset_event(event)
    rt.launch_kernel("b", "VPC", 1.0, two)
    rt.synchronize_stream(two)
    assert rt.now_s() == 4.0
    rt.stream_wait_event(two, event)
    rt.synchronize_stream(two)
    assert rt.now_s() == 4.0

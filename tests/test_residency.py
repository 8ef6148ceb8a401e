"""What L2 holds between kernels: the published allocator, hints of last reads, prefetch."""

from dataclasses import replace

import pytest

from ascend_lab.compiler import GraphBuilder, bound_of, compile_stages, simulate_graph
from ascend_lab.compiler.compile import ledger
from ascend_lab.compiler.placement import MAX_BUFFER_TENSORS, Use, allocate
from ascend_lab.machine.chip import load_chip

MIB = 1 << 20
A310, A910, P310 = (load_chip(name) for name in ("Ascend310", "Ascend910A", "Ascend310P3"))


# -- the allocator of the scratch buffer -----------------------------------------------------------
def resnet50_ops(batch):
    """ResNet-50 as 56 fused operators: uses, bytes by tensor (C1HWC0, first input C0=4), weights.

    Convolutions with their ReLU, the last of a block with the sum; a block's shortcut comes first.
    """
    sizes = {"x": batch * 224 * 224 * 4 * 2}
    uses = []
    weights = 0

    def op(name, reads, channels, side, elements):
        nonlocal weights
        sizes[name] = batch * -(-channels // 16) * 16 * side * side * 2
        weights += elements * 2
        uses.append(Use(reads, (name,)))
        return name

    x = op("pool", (op("conv1", ("x",), 64, 112, 64 * 147),), 64, 56, 0)
    before = 64
    for stage, (blocks, mid, side) in enumerate(
        ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))
    ):
        for i in range(blocks):
            name = f"{stage}.{i}."
            out = 4 * mid
            kept = op(f"{name}s", (x,), out, side, before * out) if i == 0 else x
            y = op(f"{name}a", (x,), mid, side * 2 if stage and i == 0 else side, before * mid)
            y = op(f"{name}b", (y,), mid, side, 9 * mid * mid)
            x = op(f"{name}c", (y, kept), out, side, mid * out)
            before = out
    op("fc", (op("gap", (x,), 2048, 1, 0),), 1000, 1, 2048 * 1000)
    return uses, sizes, weights


@pytest.mark.parametrize(
    ("batch", "without", "with_buffer"),
    [(1, 107.9, 51.4), (2, 164.8, 51.8), (4, 278.6, 97.6), (8, 506.3, 288.7), (16, 961.6, 725.4)],
)
def test_the_published_allocator_on_resnet50(batch, without, with_buffer):
    uses, sizes, weights = resnet50_ops(batch)
    assert len(uses) == 56

    def moved(held):
        return weights + sum(
            sum(sizes[n] for n in (*use.reads, *use.writes) if n not in here)
            for use, here in zip(uses, held, strict=True)
        )

    never = {"x", "fc"}
    assert moved([()] * 56) / 1e6 == pytest.approx(without, abs=0.15)
    assert moved(allocate(uses, sizes, never, 8 * MIB)) / 1e6 == pytest.approx(
        with_buffer, abs=0.15
    )


def test_the_four_steps_of_the_allocator():
    page = 128 * 1024
    sizes = dict.fromkeys("abcdefghij", 128 * 1024)
    chain = [Use((), ("a",)), Use(("a",), ("b",)), Use(("b",), ("c",)), Use(("c",), ())]
    two = allocate(chain, sizes, set(), 2 * page)
    assert two == [{"a"}, {"a", "b"}, {"b", "c"}, {"c"}]
    one = allocate(chain, sizes, set(), page)  # what is read now makes room for nothing
    assert one == [{"a"}, {"a"}, {"c"}, {"c"}]
    assert allocate(chain, {**sizes, "b": page + 1}, set(), 2 * page)[1] == {"a"}  # whole pages
    assert allocate(chain, sizes, {"b"}, 8 * page)[1:3] == [{"a"}, {"c"}]
    many = [*(Use((), (name,)) for name in sizes), Use(tuple(sizes), ())]
    assert (
        allocate(many, sizes, set(), 64 * page)[-1] == set("abcdefgh") and MAX_BUFFER_TENSORS == 8
    )


def chain(batch, side=56, blocks=4):
    """Convolutions, each of one tensor that the next one reads."""
    net = GraphBuilder("chain", "fp16")
    x = net.input("x", (batch, 64, side, side))
    for _ in range(blocks):
        x = net.relu(net.conv2d(x, net.weight((64, 64, 1, 1))))
    net.output(x)
    return net.build()


def test_a_buffer_holds_what_fits_and_a_cache_forgets_what_is_dead():
    image = 64 * 56 * 56 * 2
    weights = 4 * 64 * 64 * 2
    for batch, stays in ((8, True), (16, False)):  # 3.2 and 6.4 MB each, of 8 MiB
        compiled = compile_stages(chain(batch), A310).compiled
        times = simulate_graph(compiled)
        between = 0 if stays else 2 * 2 * image * batch  # every other one, written and read
        spilt = [op.timeline.memory_bytes for op in times.operators]
        assert sum(spilt) == times.memory_bytes == weights + 2 * image * batch + between
        shares = [op.timeline.hits for op in times.operators]
        assert all(share.get("in0", 0.0) in (0.0, 1.0) for share in shares)
    stages = compile_stages(chain(16), P310)  # 6.4 MB each, of 16 MiB
    times = simulate_graph(stages.compiled)
    assert times.memory_bytes == weights + 2 * image * 16  # no dead byte written
    least_s = (times.memory_bytes - times.written_back_bytes) / P310.device_memory.rate_bytes_per_s
    assert least_s == pytest.approx(bound_of(stages.rewritten, P310).memory)  # the bound is reached


def test_what_a_part_passes_on_lies_in_the_buffer():
    compiled = compile_stages(chain(4, blocks=1), A310).compiled
    (x,) = compiled.graph.inputs
    (y,) = compiled.graph.outputs
    image = 4 * 64 * 56 * 56 * 2
    weights = 64 * 64 * 2
    alone = simulate_graph(compiled)
    inner = simulate_graph(compiled, written=[x], passed=[y], first="queued")
    assert alone.memory_bytes == weights + 2 * image and inner.memory_bytes == weights
    assert inner.time_s < alone.time_s


# -- prefetch --------------------------------------------------------------------------------------
def test_prefetch_uses_the_time_in_which_memory_is_idle():
    net = GraphBuilder("deep", "fp16")
    x = net.input("x", (2048, 1024))
    for _ in range(4):
        x = net.relu(net.matmul(x, net.weight((1024, 1024))))
    net.output(x)
    for chip in (P310, A910):
        stages = compile_stages(net.build(), chip)
        late, soon = (simulate_graph(replace(stages.compiled, prefetch=on)) for on in (False, True))
        assert soon.memory_bytes == late.memory_bytes  # the same bytes, earlier
        assert 3 < soon.prefetched_bytes / (1024 * 1024 * 2) <= 4  # the first in part
        assert soon.l2_hit_rate > late.l2_hit_rate and soon.time_s <= late.time_s
        bound = bound_of(stages.rewritten, chip)
        assert bound.time_s <= soon.time_s
        found = ledger(soon, bound)
        assert sum(found.values()) == pytest.approx(soon.time_s, abs=1e-12)
    onto = compile_stages(net.build(), A310).compiled  # a buffer holds no weights
    assert simulate_graph(replace(onto, prefetch=True)) == simulate_graph(onto)


def test_prefetch_is_late_where_nothing_is_idle_and_takes_no_more_than_fits():
    net = GraphBuilder("thin", "fp16")
    x = net.input("x", (16, 2048))
    for _ in range(4):
        x = net.relu(net.matmul(x, net.weight((2048, 2048))))
    net.output(x)
    compiled = replace(compile_stages(net.build(), A910).compiled, prefetch=True)
    times = simulate_graph(compiled)
    rate = A910.device_memory.rate_bytes_per_s
    assert 0 < times.prefetched_bytes < 3 * 2048 * 2048 * 2
    first_s = A910.launch_overhead_s
    assert times.memory_bytes / rate <= times.time_s - first_s  # no byte in no time
    small = replace(A910, l2=replace(A910.l2, size_bytes=2 * MIB))
    tight = simulate_graph(replace(compiled, chip=small))
    assert tight.prefetched_bytes == 2 * (MIB - 16 * 2048 * 2)  # once; then those in use fill L2

"""Bytes per path, and what comes from memory: against brute force where that is possible."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import gemm_cases, kernels, launches

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder, Region, as_launch, interleave
from ascend_lab.machine.sim import analyse, simulate
from ascend_lab.machine.sim.cost import unique_elements
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, gemm_launch

TOY = load_chip("Toy")


def steps(launch):
    """Every executed instruction of every core, with its loop variables."""
    for part in as_launch(launch).parts:
        for binding in part.bindings:
            yield from interleave(part.program, dict(binding))


def elements(region: Region, env) -> np.ndarray:
    offsets = np.array([region.offset.at(env)])
    for size, stride in zip(region.sizes, region.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return offsets


def counted_paths(launch) -> dict[tuple[str, str], int]:
    out: dict[tuple[str, str], int] = {}
    for instruction, _ in steps(launch):
        if instruction.dst is None or not instruction.srcs or instruction.op == "mmad":
            continue
        key = (instruction.srcs[0].space, instruction.dst.space)
        if key[0] != key[1]:
            out[key] = out.get(key, 0) + instruction.dst.size_bytes
    return out


def touched_bytes(launch) -> dict[str, int]:
    """Distinct bytes of each GM tensor that are read."""
    seen: dict[str, set[int]] = {}
    size: dict[str, int] = {}
    for instruction, env in steps(launch):
        for region in instruction.srcs:
            if region.space == "GM":
                name = region.buffer.name
                seen.setdefault(name, set()).update(elements(region, env).tolist())
                size[name] = region.buffer.itemsize
    return {name: len(found) * size[name] for name, found in seen.items()}


@given(kernels(budget=40))
def test_path_bytes_are_what_the_instructions_move(case):
    program, chip = case
    moved = {k: n for k, n in analyse(as_launch(program), chip).path_bytes.items() if n}
    assert moved == counted_paths(program)


@given(launches(budget=15))
def test_path_bytes_of_several_cores(case):
    launch, chip = case
    moved = {k: n for k, n in analyse(launch, chip).path_bytes.items() if n}
    assert moved == counted_paths(launch)


@settings(max_examples=100)
@given(gemm_cases())
def test_what_fits_in_l2_is_fetched_once(case):
    shape, schedule, chip = case
    launch = gemm_launch(shape, chip, schedule)
    traffic = analyse(launch, chip)
    first = touched_bytes(launch)
    reads = {n: traffic.memory_share[n] for n in first}
    assert traffic.memory_read_bytes == sum(first.values())
    assert traffic.memory_write_bytes == 0
    assert all(0 < share <= 1 for share in reads.values())


@given(kernels(budget=30))
def test_memory_never_sends_less_than_the_distinct_bytes_nor_more_than_is_asked(case):
    program, chip = case
    traffic = analyse(as_launch(program), chip)
    asked = sum(n for (src, _), n in counted_paths(program).items() if src == "GM")
    assert sum(touched_bytes(program).values()) <= traffic.memory_read_bytes <= asked


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-9, 9)), max_size=4))
def test_unique_elements_is_an_upper_bound(dims):
    points = {
        sum(i * stride for i, (_, stride) in zip(index, dims, strict=True))
        for index in itertools.product(*(range(count) for count, _ in dims))
    }
    assert len(points) <= unique_elements(dims) <= math.prod(max(c, 1) for c, _ in dims)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ([], 1),
        ([(7, 0)], 1),
        ([(4, 1)], 4),
        ([(4, 16), (16, 1)], 64),
        ([(4, 8), (16, 1)], 40),
        ([(3, 100), (10, 1)], 30),
        ([(2, -1)], 2),
    ],
)
def test_unique_elements_of_tiles_halos_and_rows(dims, expected):
    assert unique_elements(dims) == expected


def test_a_matrix_too_large_for_l2_is_fetched_again():
    """B is read by every row of tiles; only a cache that holds it saves the repeats."""
    shape = GemmShape(256, 256, 256)
    schedule = GemmSchedule(64, 32, 64, 1, 1, 1)
    launch = gemm_launch(shape, TOY, schedule)
    matrix = 256 * 256 * 2
    held = analyse(launch, TOY)
    assert held.memory_read_bytes == 2 * matrix
    assert held.memory_share == {"a": 0.25, "b": 0.25}
    tiny = replace(TOY, l2=replace(TOY.l2, size_bytes=4096))
    streamed = analyse(launch, tiny)
    assert streamed.memory_read_bytes == 2 * 4 * matrix
    assert streamed.memory_share == {"a": 1.0, "b": 1.0}
    assert streamed.memory_write_bytes == 256 * 256 * 4
    # One row of A tiles and all of B fit, but not everything: A comes once, B four times or less.
    middle = analyse(launch, replace(TOY, l2=replace(TOY.l2, size_bytes=400_000)))
    assert held.memory_read_bytes <= middle.memory_read_bytes < streamed.memory_read_bytes


def test_pieces_never_add_up_to_more_than_the_tensor():
    """Two loads of the same tensor, side by side in one program, fetch it once."""
    k = KernelBuilder("twice", TOY)
    x = k.tensor("x", "fp16", 256)
    t = k.buffer("t", "UB", "fp16", 256)
    k.copy(t.region(), x.region())
    k.copy(t.region(), x.region())
    k.copy(t.region(0, 128), x.region(128, 128))
    traffic = analyse(as_launch(k.finish()), TOY)
    assert traffic.path_bytes["GM", "UB"] == 512 + 512 + 256
    assert traffic.memory_read_bytes == 512
    assert traffic.memory_share["x"] == 512 / 1280


def test_a_smaller_cache_never_helps():
    launch = gemm_launch(GemmShape(320, 192, 256), TOY)
    sizes = [1 << n for n in range(10, 22)]
    bytes_read = [
        analyse(launch, replace(TOY, l2=replace(TOY.l2, size_bytes=s))).memory_read_bytes
        for s in sizes
    ]
    assert bytes_read == sorted(bytes_read, reverse=True)
    assert bytes_read[0] > bytes_read[-1]


def test_cores_share_what_they_fetch():
    """Two cores in a row read the same A: memory sends it once, L2 sends it twice."""
    shape = GemmShape(64, 64, 128)
    both = gemm_launch(shape, TOY, GemmSchedule(64, 32, 64, 1, 1, 2))
    traffic = analyse(both, TOY)
    assert traffic.memory_read_bytes == (64 * 64 + 64 * 128) * 2
    assert traffic.memory_share == {"a": 0.5, "b": 1.0}
    timeline = simulate(both, TOY)
    assert timeline.l2_bytes == 64 * 64 * 2
    assert timeline.memory_bytes == traffic.memory_bytes


def test_no_launch_beats_its_memory():
    slow = replace(TOY, device_memory=replace(TOY.device_memory, rate_bytes_per_s=1e9))
    launch = gemm_launch(GemmShape(256, 256, 256), slow)
    timeline = simulate(launch, slow)
    assert timeline.cycles >= timeline.memory_bytes / 1e9 * slow.clock_hz
    assert timeline.cycles == simulate(launch, slow, engine="reference").cycles
    assert timeline.cycles > simulate(launch, TOY).cycles

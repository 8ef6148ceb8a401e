"""Products whose rows are no whole 256 bytes: converted in the same kernel, then multiplied."""

from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_compare import one

from ascend_lab.compare.unaligned import is_unaligned, with_conversions
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.layout import address_map, pack, unpack
from ascend_lab.machine.sim import DeviceMemory, execute, simulate_kernel
from ascend_lab.operators import ops

B2 = load_chip("Ascend910B2")

PRODUCTS = [
    ((33, 70), (70, 150), "", "ab"),
    ((33, 300), (150, 300), "trans_b", "ab"),
    ((300, 70), (300, 128), "trans_a", "a"),
    ((1, 1040), (1040, 1024), "", "a"),
    ((3, 33, 200), (3, 200, 150), "", "ab"),
    ((64, 128), (128, 256), "", ""),
]


@pytest.mark.parametrize(("a", "b", "turned", "converted"), PRODUCTS)
def test_what_is_brought_into_blocks_is_multiplied(a, b, turned, converted):
    rng = np.random.default_rng(len(a))
    dtype = "bf16"
    arrays = {"a": rng.standard_normal(a), "b": rng.standard_normal(b)}
    arrays = {name: x.astype(bfloat16) for name, x in arrays.items()}
    attributes = {turned: True} if turned else {}
    name = "matmul" if len(a) == 2 else "batch_matmul"
    kernel = ops.compile(name, (a, b), (dtype, dtype), B2, **attributes)
    whole = with_conversions(kernel, (a, b), (dtype, dtype), attributes, B2)
    given = {buffer.name for buffer in whole.tensors}
    assert {n for n in "ab" if f"{n}_rows" in given} == set(converted)
    right = "FRACTAL_NZ" if turned == "trans_b" else "FRACTAL_ZN"
    left = "FRACTAL_NZ"
    layouts = {"a": "FRACTAL_ZN" if turned == "trans_a" else left, "b": right}
    feed = {}
    for n, x in arrays.items():
        place = address_map(layouts[n], x.shape, dtype)
        feed |= {f"{n}_rows": x} if n in converted else {n: pack(place, x).reshape(-1)}
    memory = execute(whole, {n: x.reshape(-1) for n, x in feed.items()}, B2)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    if turned:
        last = turned[-1]
        wide[last] = np.swapaxes(wide[last], -1, -2)
    wanted = wide["a"] @ wide["b"]
    place = address_map("FRACTAL_NZ", wanted.shape, dtype)
    got = unpack(place, memory["c"].reshape(-1)).astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2.0**-7, atol=2e-2)


def test_rows_of_whole_256_bytes_and_some_short_ones_are_loaded_as_they_are():
    assert is_unaligned((512, 1040), "fp16") and is_unaligned((512, 1023), "bf16")
    assert not is_unaligned((512, 1024), "fp16") and not is_unaligned((512, 48), "fp16")
    assert is_unaligned((4, 65536), "fp16")
    assert not is_unaligned((512, 1040), "fp32")
    assert not is_unaligned((512, 1), "fp16")
    assert is_unaligned((8, 5, 1040), "fp16") and not is_unaligned((8, 4, 1040), "fp16")


def test_a_conversion_costs_its_bytes_and_the_start_of_both_kinds_of_cores(tmp_path: Path):
    row = {"operator": "matmul", "dtype": "fp16"}
    found = one(tmp_path, **row, inputs="512x1040;1040x1024", timing="kernel")
    near = one(tmp_path, **row, inputs="512x1024;1024x1024", timing="kernel")
    assert found.model_s - near.model_s > B2.mix_start_s
    shapes = (512, 1040), (1040, 1024)
    kernel = ops.compile("matmul", shapes, ("fp16", "fp16"), B2)
    whole = with_conversions(kernel, shapes, ("fp16", "fp16"), {}, B2)
    line = simulate_kernel(whole, B2, DeviceMemory.of(B2))
    assert line.hits["a"] == 1.0
    first, *_ = line.phases
    assert first.path_bytes["GM", "UB"] >= 2 * 512 * 1040
    for other in map(load_chip, ("Ascend910A", "Ascend950PR")):
        alone = ops.compile("matmul", shapes, ("fp16", "fp16"), other)
        assert with_conversions(alone, shapes, ("fp16", "fp16"), {}, other) is alone

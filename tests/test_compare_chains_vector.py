"""Chains of the vector unit: their graphs' values against NumPy in fp64, and one row of each."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_compare import PLAIN, one

from ascend_lab.compare.chains import KERNELS, vector
from ascend_lab.compare.rows import Work
from ascend_lab.compiler import tasks
from ascend_lab.compiler.compile import Road, front_stages
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.ops.formats import numpy_type, spacing

B2 = load_chip("Ascend910B2")
FLOATS = ("fp16", "bf16", "fp32")
SIZES = st.sampled_from((1, 2, 3, 7, 16, 17, 31, 129))
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(FLOATS)


def work_of(name, shapes, dtypes, **attributes):
    return Work(name, "Ascend910B2", tuple(shapes), None, tuple(dtypes), attributes)


def numbers(shape, dtype, seed=0, low=-3.0, high=3.0):
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return values.astype(numpy_type(dtype))


def wide(values):
    return values.astype(np.float64)


def values_of(work, *arrays):
    """Return a chain's results as the kernels it is cut into compute them on the chip."""
    front = front_stages(vector.BUILDERS[work.operator](work), B2, Road(dtype=""))
    laid_out = front.laid_out
    feed = {
        name: array.reshape(laid_out.types[name].shape)
        for name, array in zip(laid_out.inputs, arrays, strict=True)
    }
    compiled = tasks.compile_tasks(laid_out, B2, KERNELS[work.operator](work, laid_out))
    known = run_tasks(compiled, feed)
    return tuple(known[name] for name in laid_out.outputs)


def check_close(found, wanted, dtype, *, ulps=2.0, atol=2.0**-18):
    """Two rounded steps in a narrow format, few units in fp32."""
    room = (16 if dtype == "fp32" else ulps) * spacing(wanted, dtype) + atol
    assert (np.abs(wide(found) - wanted) <= room).all()


# -- values ----------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(SHAPES, DTYPES)
def test_mish(shape, dtype):
    x = numbers(shape, dtype, high=6.0, low=-6.0)
    (y,) = values_of(work_of("mish", [shape], [dtype]), x)
    check_close(y, wide(x) * np.tanh(np.logaddexp(0, wide(x))), dtype)


@settings(max_examples=12, deadline=None)
@given(SHAPES, DTYPES, st.sampled_from((-1.0, 1.0, 2.0, 10.0)), st.sampled_from(("", "Mul+Exp")))
def test_powers_of_a_line(shape, dtype, base, kernels):
    """Each step of the chain rounds, so in a narrow format up to |exponent| units are lost."""
    work = work_of("exp", [shape], [dtype], base=base, scale=0.5, shift=0.25)
    x = numbers(shape, dtype, low=-2.0, high=2.0)
    plain = base in (-1.0, 1.0)
    line = [0.0, 0.0] if base == 1 else [0.5, 0.25]
    factors = line if plain else [*line, np.log(base)]
    (y,) = values_of(
        replace(work, kernels=kernels), x, *(np.array([n], numpy_type(dtype)) for n in factors)
    )
    check_close(y, (np.e if base == -1 else base) ** (0.5 * wide(x) + 0.25), dtype, ulps=8)


@settings(max_examples=12, deadline=None)
@given(SHAPES, DTYPES, st.sampled_from((*FLOATS, "int8", "uint8")))
def test_masked_and_scaled(shape, dtype, mask_dtype):
    x = numbers(shape, dtype)
    mask = np.random.default_rng(1).integers(0, 2, shape).astype(numpy_type(mask_dtype))
    product = "fp32" if mask_dtype in FLOATS and mask_dtype != dtype else dtype
    scale = np.array([1.5], numpy_type(product))
    work = work_of("masked_scale", [shape, shape], [dtype, mask_dtype], scale=1.5)
    (y,) = values_of(replace(work, kernels="Cast+Mul*2"), x, mask, scale)
    check_close(y, wide(x) * wide(mask) * 1.5, product)


@settings(max_examples=8, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3), DTYPES)
def test_lists_of_quotients(shapes, dtype):
    count = sum(int(np.prod(shape)) for shape in shapes)
    x1 = numbers((count,), dtype)
    x2 = numbers((count,), dtype, 1)
    x3 = numbers((count,), dtype, 2, low=0.5)
    work = work_of("foreach_addcdiv_scalar", shapes * 3, [dtype], scalar=-0.5)
    (y,) = values_of(work, x1, x2, x3, np.array([-0.5], np.float32))
    check_close(y, wide(x1) - 0.5 * wide(x2) / wide(x3), dtype)


@settings(max_examples=16, deadline=None)
@given(SHAPES, DTYPES, st.integers(0, 2), st.sampled_from(("", "Slice+SwiGlu")))
def test_gated_halves(shape, dtype, axis, kernels):
    axis %= len(shape)
    shape = tuple(n + (n == 1 and at == axis) for at, n in enumerate(shape))
    half = shape[axis] // 2
    x = numbers(shape, dtype)
    work = replace(work_of("swi_glu", [shape], [dtype], axis=axis - len(shape)), kernels=kernels)
    longer = kernels and shape[axis] % 2 == 0  # what the Slice cuts off
    given = np.concatenate((x, x[..., -1:]), -1) if longer else x
    (y,) = values_of(work, given)
    left, right = (np.take(wide(x), range(i * half, (i + 1) * half), axis) for i in range(2))
    check_close(y, left / (1 + np.exp(-left)) * right, dtype)


POWERS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0, -2.0, 2.5, 0.5, float("inf"), float("-inf"))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("kernels", ["", "LpNormV2*2"])
@settings(max_examples=4, deadline=None)
@given(SHAPES, DTYPES)
def test_norms_of_lists(power, kernels, shape, dtype):
    arrays = [numbers((int(np.prod(shape)),), dtype, seed, low=0.5) for seed in (0, 1)]
    work = work_of("foreach_norm", [shape] * 2, [dtype], p=power, tensors=2)
    wanted = np.array([np.linalg.norm(wide(x), power) for x in arrays])
    if kernels:
        found = values_of(replace(work, kernels=kernels), *(x[None] for x in arrays))
        found = np.concatenate(found)
    else:
        (found,) = values_of(work, np.stack(arrays))
    assert len(found) == 2
    room = (64 if dtype == "fp32" else 2) * spacing(wanted, dtype)
    assert (np.abs(wide(found) - wanted) <= room).all()


@settings(max_examples=16, deadline=None)
@given(SHAPES, DTYPES, st.integers(0, 2), st.sampled_from(("", "ArgMaxV2+Cast")))
def test_where_the_first_largest_is(shape, dtype, axis, kernels):
    axis %= len(shape)
    x = np.random.default_rng(0).integers(-5, 5, shape).astype(numpy_type(dtype))
    work = replace(work_of("arg_max", [shape], [dtype], axis=axis), kernels=kernels)
    (index,) = values_of(work, x)
    np.testing.assert_array_equal(index, wide(x).argmax(axis).reshape(index.shape))


def quantised(y):
    scale = np.maximum(np.abs(y).max(axis=-1, keepdims=True) / 127, 2.0**-126)
    return y / scale, scale[..., 0]


def check_quantised(found, y):
    """A quotient near a half may be rounded to either side."""
    q, scale = found
    wanted, wanted_scale = quantised(y)
    assert q.dtype == np.int8 and q.shape == y.shape
    np.testing.assert_allclose(wide(scale).ravel(), wanted_scale.ravel(), rtol=1e-5)
    assert (np.abs(wide(q) - wanted) <= 0.51).all()


@settings(max_examples=12, deadline=None)
@given(SHAPES, DTYPES)
def test_rows_in_bytes(shape, dtype):
    x = numbers(shape, dtype)
    check_quantised(values_of(work_of("dynamic_quant", [shape], [dtype]), x), wide(x))


def test_a_row_of_zeros_stays_zeros():
    q, scale = values_of(work_of("dynamic_quant", [(2, 40)], ["fp16"]), np.zeros((2, 40), "f2"))
    assert not q.any() and (scale > 0).all()


@settings(max_examples=12, deadline=None)
@given(SIZES, SIZES, st.sampled_from((*FLOATS, "int32")), st.booleans(), st.booleans())
def test_gated_rows_in_bytes(rows, half, dtype, left, smooth):
    shapes = [(rows, 2 * half)]
    dtypes = [dtype]
    if dtype == "int32":
        x = np.random.default_rng(0).integers(-3000, 3000, shapes[0]).astype(np.int32)
        factors = [
            numbers((1, 2 * half), "fp32", 1, 0.001, 0.002),
            numbers((rows,), "fp32", 2, 0.5),
        ]
        y = wide(x) * wide(factors[0]) * wide(factors[1])[:, None]
    else:
        x = numbers(shapes[0], dtype)
        factors = []
        y = wide(x)
    gate, linear = (y[:, :half], y[:, half:])[:: 1 if left else -1]
    y = gate / (1 + np.exp(-gate)) * linear
    if smooth:
        factors.append(numbers((1, half), "fp32", 3, 0.5))
        y = y * wide(factors[-1])
    shapes += [factor.shape for factor in factors]
    dtypes += ["fp32"] * len(factors)
    work = work_of("dequant_swiglu_quant", shapes, dtypes, activate_left=left)
    check_quantised(values_of(work, x, *factors), y)


# -- rows ------------------------------------------------------------------------------------------
ROWS = {
    "mish": ("512x1001", "fp16", "", ""),
    "exp": ("512x1001", "bf16", "base=2.0;scale=0.5;shift=1.0", "Mul*2+Add+Exp"),
    "masked_scale": ("512x1001;512x1001", "fp32;bool", "scale=nan", "Cast+Mul*2"),
    "foreach_addcdiv_scalar": (";".join(["512x1001"] * 6), "bf16", "scalar=nan", ""),
    "swi_glu": ("512x1001", "bf16", "axis=-1", "Slice+SwiGlu"),
    "foreach_norm": ("512x1001;512x1001", "fp16", "p=2.5;tensors=2", "LpNormV2*2"),
    "arg_max": ("512x1001", "fp32", "axis=-1", "ArgMaxV2+Cast"),
    "dynamic_quant": ("3x7x1001", "bf16", "", ""),
    "dequant_swiglu_quant": ("127x514;1x514;127", "int32;fp32;fp32", "activate_left=True", ""),
}
KERNELS_OF = {"exp": 4, "masked_scale": 3, "swi_glu": 2, "foreach_norm": 2, "arg_max": 2}
IN_LIBRARY = ("dynamic_quant", "dequant_swiglu_quant")


@pytest.mark.parametrize("name", vector.BUILDERS)
def test_a_row_is_timed_in_as_many_kernels_as_measured(tmp_path, name):
    inputs, dtype, attributes, kernels = ROWS[name]
    row = {"inputs": inputs, "dtype": dtype, "attributes": attributes, "kernels": kernels}
    found = one(tmp_path, **{**PLAIN, **row, "case": f"x/{name}/1", "operator": ""})
    assert found.refused is None
    assert 0 < found.bound_s <= found.model_s
    if name in IN_LIBRARY:
        assert f"in the library's structure: {name}" in found.marks
    else:
        assert f"kernels of ours: {KERNELS_OF.get(name, 1)}, cut as the source's" in found.marks


def test_an_operator_of_the_same_name_stays_one(tmp_path):
    plain, power = (
        one(tmp_path, operator="exp", inputs="64x64", attributes=text) for text in ("", "base=2.0")
    )
    assert plain.marks == () and "cut as the source's" in power.marks[0]


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("mish", {"attributes": {"beta": 2}}, UnsupportedError),
        ("exp", {"attributes": {"base": -2.0}}, InputError),
        ("exp", {"attributes": {"base": "much"}}, InputError),
        ("masked_scale", {"shapes": ((3,),)}, InputError),
        ("foreach_addcdiv_scalar", {"shapes": ((3,), (4,), (3,))}, InputError),
        ("swi_glu", {"shapes": ((3, 1),)}, InputError),
        ("foreach_norm", {"attributes": {"p": float("nan")}}, InputError),
        ("foreach_norm", {"attributes": {"tensors": 2}}, InputError),
        ("arg_max", {"shapes": ((1, 2**25),)}, UnsupportedError),
        ("dynamic_quant", {"dtypes": ("fp16", "fp32")}, InputError),
        ("dequant_swiglu_quant", {"shapes": ((4, 5),)}, InputError),
        ("dequant_swiglu_quant", {"shapes": ((4, 6),), "dtypes": ("int32",)}, InputError),
    ],
)
def test_what_a_chain_cannot_do_is_refused_by_name(name, changes, error):
    work = replace(work_of(name, [(4, 6)], ["fp16"]), **changes)
    with pytest.raises(error, match=name):
        vector.BUILDERS[name](work)

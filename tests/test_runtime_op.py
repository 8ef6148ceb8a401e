"""Operators as functions, and online against offline inference: the same values to the last bit."""

import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder, evaluate, run_compiled
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.compiler.zoo import load_model
from ascend_lab.deploy.runtime import AclError, Inference, acl, compile_offline, op, rt
from ascend_lab.deploy.runtime.process import PROCESSES
from ascend_lab.errors import AscendLabError, InputError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def clean():
    op.clear_cache()
    op.set_max_op_queue_num(1024)
    yield
    PROCESSES.clear()


def half(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


CALLS = (
    ("matmul", (half(20, 36), half(36, 17)), {}),
    ("matmul", (half(20, 36), half(17, 36)), {"trans_b": True}),
    ("add", (half(3, 5), half(5)), {}),
    ("softmax", (half(7, 33),), {"axis": -1}),
    ("conv2d", (half(1, 16, 9, 9), half(16, 16, 3, 3)), {"pad": 1}),
    ("transpose", (half(4, 6),), {"perm": (1, 0)}),
    ("split", (half(4, 6),), {"sizes": (2, 4), "axis": 1}),
    ("relu", (RNG.standard_normal((4, 6)).astype(np.float32),), {}),
)


@pytest.mark.parametrize(("name", "arrays", "attrs"), CALLS, ids=[c[0] for c in CALLS])
def test_an_operator_gives_what_it_gives_in_a_graph(name, arrays, attrs):
    net = GraphBuilder("g")
    kinds = {"float16": "fp16", "float32": "fp32"}
    inputs = [net.input(f"i{i}", a.shape, kinds[str(a.dtype)]) for i, a in enumerate(arrays)]
    found = net.add_node(name, *inputs, **attrs)
    net.output(*(found if isinstance(found, tuple) else (found,)))
    graph = net.build()
    given = {f"i{i}": a for i, a in enumerate(arrays)}
    wanted = [*run_compiled(graph, given, "Ascend910A", dtype="").values()]
    alone = op.call(name, *arrays, chip="Ascend910A", **attrs)
    acl.init("Ascend910A")
    rt.set_device(0)
    inside = getattr(op, name)(*arrays, **attrs)
    for results in (alone, inside):
        many = results if isinstance(results, tuple) else (results,)
        assert [r.tobytes() for r in many] == [w.tobytes() for w in wanted]
        assert [r.dtype for r in many] == [w.dtype for w in wanted]
    assert (op.cache_info().hits, op.cache_info().misses) == (1, 1)
    values = evaluate(graph, given)
    for one, two in zip(values.values(), wanted, strict=True):
        np.testing.assert_allclose(one.astype(float), two.astype(float), atol=0.05)
    assert rt.now_s() > 0


def test_the_cache_knows_shapes_formats_attributes_and_chips_and_is_bounded():
    a = half(16, 16)
    b = half(16, 16)
    op.matmul(a, b)
    assert op.cache_info().compile_s > 0
    op.matmul(a + 1, b)
    assert (op.cache_info().hits, op.cache_info().misses) == (1, 1)
    op.matmul(a, b, trans_a=False)  # as the default
    assert op.cache_info().hits == 2
    op.matmul(a, b, trans_a=True)
    op.matmul(a[:8], b)
    op.matmul(a, b, chip="Ascend910A")
    op.add(a, b)
    op.add(a.astype(np.float32), b.astype(np.float32))
    assert (op.cache_info().hits, op.cache_info().misses, op.cache_info().size) == (2, 6, 6)
    op.set_max_op_queue_num(2)
    assert op.cache_info().size == 2
    op.add(a, b)
    op.matmul(a, b)
    assert (op.cache_info().hits, op.cache_info().misses, op.cache_info().size) == (3, 7, 2)
    op.add(a, b)
    op.sub(a, b)
    op.add(a, b)
    assert (op.cache_info().hits, op.cache_info().misses) == (5, 8)  # what was used last stays


def test_in_a_stream_the_result_is_poison_until_it_is_synchronised():
    acl.init()
    rt.set_device(0)
    stream = rt.create_stream()
    a = half(16, 16)
    y = op.matmul(a, a, stream=stream)
    assert np.isnan(y).all()
    rt.synchronize_stream(stream)
    assert y.tobytes() == op.matmul(a, a).tobytes()
    assert {s.engine for s in rt.spans()} == {"AI Core"}
    z = op.relu(op.matmul(a, a, stream=stream), stream=stream)
    assert np.isnan(z).all()
    rt.synchronize_stream(stream)
    assert z.tobytes() == np.maximum(y, 0).tobytes()
    rt.subscribe_report(1, stream)
    rt.launch_callback(lambda _: op.matmul(a, a), 0, rt.BLOCK, stream)
    with pytest.raises(AclError, match="callback"):
        rt.synchronize_stream(stream)
    before = rt.now_s()
    op.matmul(a, a)
    kernels = [span for span in rt.spans() if span.start_s >= before]
    assert kernels
    assert rt.now_s() - before == pytest.approx(sum(k.end_s - k.start_s for k in kernels))


def test_what_cannot_be_called_is_told():
    a = half(4, 4)
    with pytest.raises(AclError, match=r"100024.*matmul") as error:
        op.matmull(a, a)
    assert error.value.code == 100024
    for call in (
        lambda: op.matmul(a),
        lambda: op.matmul(a, half(5, 4)),
        lambda: op.matmul(a, a, transpose=1),
        lambda: op.matmul(a.astype(np.float64), a.astype(np.float64)),
        lambda: op.matmul(a.astype(np.float32), a.astype(np.float32)),
        lambda: op.matmul(a, a, chip="Ascend9"),
        lambda: op.add(np.array(["x"]), a),
    ):
        with pytest.raises(AscendLabError):
            call()
    with pytest.raises(AclError) as error:
        op.set_max_op_queue_num(0)
    assert error.value.code == 148048
    acl.init()
    with pytest.raises(AclError):
        op.add(a, a)
    rt.set_device(0)
    with pytest.raises(InputError, match="chip"):
        op.add(a, a, chip="Ascend310")
    assert not hasattr(op, "__wrapped__")


@pytest.fixture
def model(tmp_path):
    net = GraphBuilder("net")
    x = net.input("x", (2, 3, 12, 12))
    y = net.relu(net.conv2d(x, net.weight((16, 3, 3, 3)), pad=1))
    net.output(net.add(y, net.weight((16, 1, 1))), net.reduce_sum(y, axis=(2, 3)))
    save_onnx(net.build(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.mark.parametrize("kernels", [True, False])
def test_online_and_offline_inference_are_equal(model, kernels):
    x = RNG.standard_normal((2, 3, 12, 12)).astype(np.float32)
    online = Inference(model, "Ascend310P3", kernels=kernels)
    assert online.online and online.compile_s == 0
    wanted = online({"x": x})
    paid = online.compile_s
    assert paid > 0
    online({"x": x})
    assert online.compile_s == paid
    file = model.with_name("net.alm")
    file.write_bytes(compile_offline({None: load_model(str(model))}, online.chip))
    model.unlink()
    offline = Inference(file, "Ascend310P3", kernels=kernels)
    found = offline({"x": x})
    assert not offline.online and offline.compile_s == 0
    assert {n: (v.dtype, v.tobytes()) for n, v in found.items()} == {
        n: (v.dtype, v.tobytes()) for n, v in wanted.items()
    }
    assert offline.time_s == online.time_s > 0
    with pytest.raises(InputError, match="gear"):
        offline({"x": x[:1]})
    with pytest.raises(InputError, match="chip Ascend310P3"):
        Inference(file, "Ascend910A")

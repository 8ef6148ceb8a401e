"""The real server, asked by Triton's own client: bytes and JSON, types, compression, repository."""

import asyncio
import importlib.util

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto as T
from serving_models import copy_model, host_model, kinds_model, save, service_of, serving

from ascend_lab.deploy.serving import Level, Policy

if importlib.util.find_spec("tritonclient") is None:
    pytest.skip("tritonclient[http] is not installed", allow_module_level=True)
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

REAL = np.array([[1.5, -2.0, 0.1], [3.0, 60000.0, -0.5]], np.float32)
WHOLE = np.array([[1, -2, 2**31 - 1], [4, 5, -(2**31)]], np.int64)
FLAG = np.array([[True, False, True], [True, True, True]])
FEED = {"real": REAL, "whole": WHOLE, "flag": FLAG}
EXPECTED = {
    "sum": REAL + WHOLE.astype(np.float32),
    "both": (WHOLE.astype(np.float32) < REAL) & FLAG,
    "place": REAL.argmax(axis=1, keepdims=True),
    "half": REAL.astype(np.float16),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    path = kinds_model(tmp_path_factory.mktemp("triton") / "kinds.onnx")
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        yield client


def client_of(address, concurrency=1):
    return triton.InferenceServerClient(address, concurrency=concurrency)


def tensors_of(feed, binary=True):
    inputs = []
    for name, array in feed.items():
        one = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        inputs.append(one.set_data_from_numpy(array, binary_data=binary))
    return inputs


def outputs_of(binary):
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in EXPECTED]


def refused(client, model, inputs, status="400", **how):
    """Return the words in which a request is refused."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs, **how)
    assert caught.value.status() == status
    return caught.value.message()


def equal(answer, expected):
    for name, array in expected.items():
        values = answer.as_numpy(name)
        assert values.dtype == array.dtype and values.shape == array.shape
        kind = float if array.dtype.kind == "V" else array.dtype  # NumPy knows no nan of bfloat16
        np.testing.assert_array_equal(values.astype(kind), array.astype(kind))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_bytes_and_json_say_the_same(given, wanted, kinds):
    outputs = None if wanted is None else outputs_of(wanted)
    answer = kinds.infer("kinds", tensors_of(FEED, given), outputs=outputs, request_id="seven")
    equal(answer, EXPECTED)
    said = answer.get_response()
    assert (said["model_name"], said["model_version"], said["id"]) == ("kinds", "1", "seven")


def test_outputs_come_in_the_order_asked_for_each_in_its_form(kinds):
    outputs = [
        triton.InferRequestedOutput("place", binary_data=True),
        triton.InferRequestedOutput("sum", binary_data=False),
        triton.InferRequestedOutput("both", binary_data=True),
    ]
    answer = kinds.infer("kinds", tensors_of(FEED), outputs=outputs)
    equal(answer, {name: EXPECTED[name] for name in ("place", "sum", "both")})
    assert [one["name"] for one in answer.get_response()["outputs"]] == ["place", "sum", "both"]
    assert ["data" in one for one in answer.get_response()["outputs"]] == [False, True, False]


def test_requests_at_once_of_different_sizes_get_their_own(tmp_path):
    path = copy_model(tmp_path / "copy.onnx", T.FLOAT)
    policy = Policy(3, 8, levels=(Level(queue_limit=64),))
    with serving(service_of(path, 8, policy)) as (address, _), client_of(address, 8) as client:
        arrays = [np.full((1 + n % 5, 4), n, np.float32) for n in range(40)]
        waiting = [client.async_infer("copy", tensors_of({"x": array})) for array in arrays]
        for array, one in zip(arrays, waiting, strict=True):
            equal(one.get_result(), {"y": array})
        (stats,) = client.get_inference_statistics("copy")["model_stats"]
    assert stats["inference_count"] == sum(map(len, arrays))
    assert stats["inference_stats"]["success"]["count"] == 40
    batches = stats["batch_stats"]
    assert sum(row["compute_infer"]["count"] for row in batches) == stats["execution_count"]
    counted = sum(row["batch_size"] * row["compute_infer"]["count"] for row in batches)
    assert counted == stats["inference_count"]


def test_the_client_of_asyncio_is_answered_alike(kinds):
    async def ask():
        address = f"{kinds._client_stub.host}:{kinds._client_stub.port}"
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_model_ready("kinds")
            how = {"request_compression_algorithm": "gzip"}
            return await asyncio.gather(
                *(client.infer("kinds", tensors_of(FEED, n % 2 == 0), **how) for n in range(6))
            )

    for answer in asyncio.run(ask()):
        equal(answer, EXPECTED)


def test_what_the_server_and_the_model_say_of_themselves(kinds):
    assert kinds.is_server_live() and kinds.is_server_ready()
    assert kinds.is_model_ready("kinds") and kinds.is_model_ready("kinds", "1")
    assert not kinds.is_model_ready("kinds", "2") and not kinds.is_model_ready("other")
    extensions = kinds.get_server_metadata()["extensions"]
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(extensions)
    metadata = kinds.get_model_metadata("kinds", "1")
    rows = {row["name"]: (row["datatype"], row["shape"])
            for row in metadata["inputs"] + metadata["outputs"]}  # fmt: skip
    assert rows == {
        "real": ("FP32", [-1, 3]), "whole": ("INT64", [-1, 3]), "flag": ("BOOL", [-1, 3]),
        "sum": ("FP32", [-1, 3]), "both": ("BOOL", [-1, 3]), "place": ("INT64", [-1, 1]),
        "half": ("FP16", [-1, 3]),
    }  # fmt: skip
    config = kinds.get_model_config("kinds")
    assert config["max_batch_size"] == 8
    assert config["input"][1] == {"name": "whole", "data_type": "TYPE_INT64", "dims": [3]}
    assert "dynamic_batching" in config and config["instance_group"][0]["count"] == 1


def test_parameters_of_a_request_are_taken(kinds):
    answer = kinds.infer(
        "kinds", tensors_of(FEED), sequence_id=3, sequence_start=True, sequence_end=True,
        priority=1, timeout=10_000_000, parameters={"mine": "x", "number": 3},
    )  # fmt: skip
    equal(answer, EXPECTED)


def test_what_is_not_offered_is_refused_with_a_reason(kinds):
    inputs = tensors_of(FEED)
    inputs[0].set_shared_memory("region", 24)
    assert "shared memory" in refused(kinds, "kinds", inputs)
    output = triton.InferRequestedOutput("sum")
    output.set_shared_memory("region", 24)
    assert "shared memory" in refused(kinds, "kinds", tensors_of(FEED), outputs=[output])
    output = triton.InferRequestedOutput("sum", class_count=2)
    assert "classification" in refused(kinds, "kinds", tensors_of(FEED), outputs=[output])
    texts = tensors_of(FEED)
    texts[0] = tensors_of({"real": np.array([["a", "b", "c"]], object)})[0]
    assert "FP32" in refused(kinds, "kinds", texts)
    for ask in (kinds.get_system_shared_memory_status, kinds.get_cuda_shared_memory_status):
        with pytest.raises(InferenceServerException, match="shared memory is not offered"):
            ask()


def test_texts_are_refused_by_name(tmp_path):
    path = copy_model(tmp_path / "texts.onnx", T.STRING, (2,))
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        assert client.get_model_metadata("texts")["inputs"][0]["datatype"] == "BYTES"
        for binary in (True, False):
            words = np.array(["a", "b"], object)
            assert "BYTES" in refused(client, "texts", tensors_of({"x": words}, binary))


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        (T.FLOAT16, np.array([[0.1, 65504, -0.0, np.inf]], np.float16)),
        (T.BFLOAT16, np.array([[0.1, 3e38, -7, np.nan]], ml_dtypes.bfloat16)),
        (T.DOUBLE, np.array([[0.1, 1e300, -0.0, 5e-324]])),
        (T.INT8, np.array([[-128, 127, 0, 1]], np.int8)),
        (T.UINT8, np.array([[255, 0, 1, 2]], np.uint8)),
        (T.UINT16, np.array([[65535, 0, 1, 2]], np.uint16)),
        (T.UINT64, np.array([[2**64 - 1, 0, 1, 2]], np.uint64)),
        (T.INT64, np.array([[2**31 - 1, -(2**31), 0, 1]])),
        (T.BOOL, np.array([[True, False, False, True]])),
    ],
)
def test_every_type_of_numbers_comes_back_as_it_went(kind, array, tmp_path):
    path = copy_model(tmp_path / "copy.onnx", kind)
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        equal(client.infer("copy", tensors_of({"x": array})), {"y": array})
        metadata = client.get_model_metadata("copy")
        word = np_to_triton_dtype(array.dtype)
        assert [row["datatype"] for row in metadata["inputs"] + metadata["outputs"]] == [word] * 2
        if word != "BF16" and np.isfinite(array.astype(float)).all():
            outputs = [triton.InferRequestedOutput("y", binary_data=False)]
            answer = client.infer("copy", tensors_of({"x": array}, binary=False), outputs=outputs)
            equal(answer, {"y": array})


def test_the_hosts_operators_open_sizes_and_no_sizes_at_all(tmp_path):
    path = host_model(tmp_path / "host.onnx")
    rng = np.random.default_rng(3)
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        metadata = client.get_model_metadata("host")
        assert metadata["inputs"][0]["shape"] == [-1, -1, -1]
        assert [row["shape"] for row in metadata["outputs"]] == [[-1], [3, -1], []]
        for shape in ((2, 3, 3), (1, 2, 2), (2, 3, 3)):
            matrices = np.maximum(rng.standard_normal(shape).astype(np.float32), 0)
            for binary in (True, False):
                outputs = [triton.InferRequestedOutput(name, binary_data=binary)
                           for name in ("det", "places", "largest")]  # fmt: skip
                inputs = tensors_of({"matrices": matrices}, binary)
                answer = client.infer("host", inputs, outputs=outputs)
                det = np.linalg.det(matrices.astype(float))
                np.testing.assert_allclose(answer.as_numpy("det"), det, atol=1e-5)
                places = np.array(np.nonzero(matrices))
                np.testing.assert_array_equal(answer.as_numpy("places"), places)
                assert answer.as_numpy("largest") == matrices.max()
                assert answer.as_numpy("largest").shape == ()
        assert "Det" in refused(client, "host", tensors_of({"matrices": np.zeros((1, 2, 3), "f")}))


def test_a_value_that_steers_a_shape_is_that_of_each_request(tmp_path):
    path = save(
        tmp_path / "steered.onnx", [("Slice", ["x", "first", "last"], ["y"], {})],
        [("x", T.FLOAT, [6]), ("first", T.INT64, [1]), ("last", T.INT64, [1])],
        [("y", T.FLOAT, ["M"])],
    )  # fmt: skip
    x = np.arange(6, dtype=np.float32)
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        for first, last in ((0, 3), (2, 6), (0, 3), (5, 6)):
            feed = {"x": x, "first": np.array([first]), "last": np.array([last])}
            equal(client.infer("steered", tensors_of(feed)), {"y": x[first:last]})


def test_values_that_steer_to_more_than_memory_are_refused(tmp_path):
    path = save(
        tmp_path / "tiles.onnx", [("Tile", ["x", "times"], ["y"], {})],
        [("x", T.FLOAT, [6]), ("times", T.INT64, [1])], [("y", T.FLOAT, ["M"])],
    )  # fmt: skip
    feed = {"x": np.arange(6, dtype=np.float32), "times": np.array([2])}
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        equal(client.infer("tiles", tensors_of(feed)), {"y": np.tile(feed["x"], 2)})
        feed["times"] = np.array([2**34])
        assert "elements" in refused(client, "tiles", tensors_of(feed))


def test_whole_numbers_are_exact_in_64_bits_and_refused_with_the_node_beyond(tmp_path):
    path = save(
        tmp_path / "squares.onnx", [("Mul", ["x", "x"], ["y"], {"name": "y_squared"})],
        [("x", T.INT64, ["N", 2])], [("y", T.INT64, ["N", 2])],
    )  # fmt: skip
    with serving(service_of(path)) as (address, _), client_of(address) as client:
        equal(client.infer("squares", tensors_of({"x": np.array([[3, -4]])})),
              {"y": np.array([[9, 16]])})  # fmt: skip
        equal(client.infer("squares", tensors_of({"x": np.array([[2**20, 1]])})),
              {"y": np.array([[2**40, 1]])})  # fmt: skip
        assert "y_squared" in refused(client, "squares", tensors_of({"x": np.array([[2**40, 1]])}))


def test_a_version_keeps_its_file_though_the_file_changes(tmp_path):
    path = copy_model(tmp_path / "copy.onnx", T.FLOAT)
    service = service_of(path)
    save(path, [("Neg", ["x"], ["y"], {})], [("x", T.FLOAT, ["N", 4])], [("y", T.FLOAT, ["N", 4])])
    x = np.ones((4, 4), np.float32)
    model = service.batcher_of({}).model
    np.testing.assert_array_equal(model.run({"x": x})["y"], x)  # 4 rows were not asked for before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"_raw_data": b"123"}, "bytes behind the JSON"),
        ({"_raw_data": bytes(28)}, "4 bytes more"),
        ({"_shape": [2, 4]}, r"shape [-1, 3]"),
        ({"_shape": [1, 3]}, "12 bytes for shape [1, 3]"),
        ({"_parameters": {"binary_data_size": -1}}, "binary_data_size"),
        ({"_parameters": {"binary_data_size": 1e3}}, "binary_data_size"),
        ({"_datatype": "INT32"}, "datatype FP32"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(change, said, kinds):
    (one,) = tensors_of({"real": REAL})
    others = tensors_of({"whole": WHOLE, "flag": FLAG})
    vars(one).update(change)
    assert said in refused(kinds, "kinds", [*others, one])

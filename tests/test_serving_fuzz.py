"""Thousands of requests that are wrong somewhere: each gets an answer, and none a 500."""

import asyncio
import json
import random
import zlib

import pytest
from onnx import TensorProto as T
from serving_models import copy_model, host_model, kinds_model, save, service_of

from ascend_lab.deploy.serving.rest import application

ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e300, 10**30, -(2**63), 2**63, "", "x", "\ud800", "é",
    [], [[]], [None], {}, {"a": 1}, [1, "a"], [[1, 2], [3]], [[[1]]], ["1"], "FP32", "BYTES", [0],
    [2**40, 2**40], [-1, 3], [True, 3], "INT64", {"binary_data_size": 8}, 64, [1, 3], [10**20, 0],
    {"binary_data": True}, {"binary_data_output": 1}, {"shared_memory_region": "r"}, 1.0, [2.5],
]  # fmt: skip
HEADERS = {
    b"inference-header-content-length": [b"0", b"-1", b"1", b"7", b"99999", b"x", b"", b"1e3",
                                         b"9" * 40, "²".encode("latin-1")],
    b"content-encoding": [b"gzip", b"deflate", b"br", b"identity", b"", b"gzip, deflate", b"\xff"],
    b"accept-encoding": [b"gzip", b"deflate;q=0", b"gzip;q=x", b"*", b"deflate, gzip;q=0.5"],
    b"content-length": [b"3", b"99999999999", b"x", b"9" * 30],
    b"content-type": [b"text/plain", b"\xff\x00"],
}  # fmt: skip
PATHS = [
    "/v2/models/{}/infer", "/v2/models/{}/versions/1/infer", "/v2/models/{}/versions/x/infer",
    "/v2/repository/index", "/v2/repository/models/{}/load", "/v2/models/stats", "/v2/models/{}",
    "/v2/models/{}/stats", "/v2/models/{}/config", "/v2/models//infer", "/v2/",
    "/v2/models/é/infer",
    "/v2/systemsharedmemory/region/r/register", "/v2/logging", "/v2/models/{}/generate",
]  # fmt: skip


async def ask(app, method, path, headers, parts):
    """Return status and body of one request to an ASGI application."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
             "scheme": "http", "path": path, "raw_path": path.encode("utf-8", "replace"),
             "query_string": b"", "root_path": "", "headers": headers,
             "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 5)}  # fmt: skip
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
    messages += [{"type": "http.request", "body": parts[-1], "more_body": False}]
    messages = [{"type": "http.disconnect"} if m["body"] is None else m for m in messages]
    sent = []

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def changed(rng, value, depth=0):
    """Return a value with one place in it changed, dropped or doubled."""
    if depth > 6 or not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(ODD)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        kind = rng.randrange(6)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {
                **value,
                rng.choice(["parameters", "data", "id", "outputs", "new"]): rng.choice(ODD),
            }
        return {**value, key: changed(rng, value[key], depth + 1)}
    place = rng.randrange(len(value))
    kind = rng.randrange(5)
    if kind == 0:
        return value[:place] + value[place + 1 :]
    if kind == 1:
        return [*value, value[place]]
    return [*value[:place], changed(rng, value[place], depth + 1), *value[place + 1 :]]


def request_of(rng, seeds):
    """Return the headers and parts of a body that is wrong in one to three places, or in none."""
    asked, behind = rng.choice(seeds)
    for _ in range(rng.randrange(4)):
        asked = changed(rng, asked)
    head = json.dumps(asked).encode("ascii")
    headers = {b"host": b"127.0.0.1"}
    if behind or rng.random() < 0.2:
        headers[b"inference-header-content-length"] = str(len(head)).encode()
    body = head + behind
    if rng.random() < 0.15:
        body = zlib.compress(body)
        headers[b"content-encoding"] = b"deflate"
    if rng.random() < 0.2:
        name = rng.choice(list(HEADERS))
        headers[name] = rng.choice(HEADERS[name])
    if body and rng.random() < 0.2:
        place = rng.randrange(len(body))
        body = (
            body[:place] + rng.choice([b"", b"\xff", b'"', b"[", b"}", b"\x00"]) + body[place + 1 :]
        )
    cut = rng.randrange(len(body) + 1)
    parts = [body[:cut], body[cut:]] if rng.random() < 0.5 else [body]
    if rng.random() < 0.05:
        parts[-1] = None  # the client leaves
    return list(headers.items()), parts


def seeds_of(service):
    """Return right requests of a model: as JSON, nested, as bytes, with outputs."""
    model = service.batcher_of({}).model
    tensors = []
    plain = []
    behind = b""
    for port in model.inputs:
        shape = [1 if size == -1 else size for size in port.described()["shape"]]
        count = 1
        for size in shape:
            count *= size
        row = {"name": port.name, "shape": shape, "datatype": port.datatype}
        values = [True] * count if port.datatype == "BOOL" else [1] * count
        plain.append({**row, "data": values})
        array = port.read({**row, "data": values}, 8)
        tensors.append({**row, "parameters": {"binary_data_size": array.nbytes}})
        behind += array.tobytes()
    outputs = [{"name": model.outputs[0].name, "parameters": {"binary_data": False}}]
    return [
        ({"id": "a", "inputs": plain, "parameters": {"priority": 1}}, b""),
        ({"inputs": plain, "outputs": outputs}, b""),
        ({"inputs": tensors, "parameters": {"binary_data_output": True}}, behind),
        ({"inputs": tensors, "outputs": outputs}, behind),
    ]


def square_model(path):
    """Whole numbers that soon leave 32 bits."""
    ends = [[(name, T.INT64, ["N", 2])] for name in ("x", "y")]
    return save(path, [("Mul", ["x", "x"], ["y"], {})], *ends)


def steered_model(path):
    """Shapes that the values of inputs decide."""
    return save(
        path, [("Reshape", ["x", "shape"], ["a"], {}), ("Tile", ["a", "times"], ["y"], {})],
        [("x", T.FLOAT, ["N"]), ("shape", T.INT64, [2]), ("times", T.INT64, [2])],
        [("y", T.FLOAT, ["A", "B"])],
    )  # fmt: skip


MODELS = {
    "kinds": (kinds_model, 1500), "host": (host_model, 150), "square": (square_model, 500),
    "steered": (steered_model, 250),
    "byte": (lambda path: copy_model(path, T.UINT8, (2, 2)), 500),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_wrong_requests_are_answered_with_a_reason(name, tmp_path):
    make, number = MODELS[name]
    service = service_of(make(tmp_path / f"{name}.onnx"), body_bytes=2**16)
    app = application(service)
    rng = random.Random(5)
    seeds = seeds_of(service)
    statuses = set()

    async def all_of_them():
        for n in range(number):
            headers, parts = request_of(rng, seeds)
            path = PATHS[0] if n % 10 else rng.choice(PATHS)
            method = "POST" if n % 20 else rng.choice(["GET", "DELETE", "POST"])
            status, body = await ask(app, method, path.format(name), headers, parts)
            statuses.add(status)
            assert status < 500, (status, body, path, headers, parts)
            if status != 200:
                said = json.loads(body)
                assert list(said) == ["error"] and said["error"] and "\n" not in said["error"]
        right = json.dumps(seeds[0][0]).encode()
        assert (await ask(app, "POST", PATHS[0].format(name), [], [right]))[0] == 200

    asyncio.run(all_of_them())
    assert {200, 400} <= statuses

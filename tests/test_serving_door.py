"""Who may ask a server on loopback, what a body may be, and how the server ends."""

import gzip
import http.client
import json
import socket
import struct
import threading
import zlib

import numpy as np
import pytest
from onnx import TensorProto as T
from serving_models import copy_model, kinds_model, service_of, serving

from ascend_lab.deploy.serving import Policy, messages
from ascend_lab.deploy.serving.loopback import is_loopback
from ascend_lab.deploy.serving.opened import Model
from ascend_lab.deploy.serving.rest import Service
from ascend_lab.deploy.serving.tensors import Port
from ascend_lab.errors import InputError

X = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
INFER = "/v2/models/copy/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = copy_model(tmp_path_factory.mktemp("door") / "copy.onnx", T.FLOAT)
    with serving(service_of(path, body_bytes=2**16)) as (address, _):
        yield address


def ask(address, path=INFER, body=None, method="POST", headers=None):
    """Return status, headers and body; a new connection each time."""
    data = json.dumps({"inputs": [X]}).encode() if body is None else body
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        chunked = not isinstance(data, bytes)
        connection.request(method, path, data, headers or {}, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def reason(answer):
    """Return status and words of a refusal."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    said = json.loads(body)
    assert list(said) == ["error"]
    return status, said["error"]


# -- the door -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:3000"},
        {"Origin": "https://{}"}, {"Host": "evil.example:8000"}, {"Sec-Fetch-Site": "cross-site"},
        {"Host": "127.0.0.1.evil.example"}, {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    ],
)  # fmt: skip
def test_a_page_of_somebody_else_changes_nothing(headers, served):
    headers = {name: value.format(served) for name, value in headers.items()}
    for path in ("/v2/repository/models/copy/unload", "/v2/repository/models/copy/load", INFER):
        assert reason(ask(served, path, b"{}", headers=headers))[0] == 403
    assert ask(served, "/v2/models/copy/ready", method="GET")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://{}"}, {"Sec-Fetch-Site": "same-origin"}, {"Host": "localhost:9"},
     {"Host": "[::1]:9"}, {"Host": "LOCALHOST"}, {"Content-Type": "text/plain"}],
)  # fmt: skip
def test_programs_and_its_own_pages_are_let_in(headers, served):
    headers = {name: value.format(served) for name, value in headers.items()}
    assert ask(served, headers=headers)[0] == 200


def test_which_hosts_are_loopback():
    for host in ("localhost", "localhost:80", "127.0.0.1:80", "127.9.9.9", "[::1]", "::1"):
        assert is_loopback(host), host
    for host in ("", "10.0.0.1", "localhost.evil", "[::2]:80", "0.0.0.0", "1", "a:b:c"):
        assert not is_loopback(host), host


@pytest.mark.parametrize("data", [b"\x16\x03\x01rubbish\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_refused_in_json(data, served):
    host, port = served.split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and list(json.loads(body)) == ["error"]


def test_a_sender_of_too_much_hears_so_and_clients_that_leave_harm_nobody(served):
    big = b"1" * 2**22
    for headers in ({"Connection": "close"}, {}, {"Transfer-Encoding": "chunked"}):
        body = iter([big[:1000], big]) if headers.get("Transfer-Encoding") else big
        status, said = reason(ask(served, body=body, headers=headers))
        assert status == 413 and "larger limit" in said
    assert reason(ask(served, "/v2/models/other/infer", big, headers={"Connection": "close"}))
    host, port = served.split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
                               b"Content-Length: 900\r\n\r\n{")  # fmt: skip
            linger = struct.pack("ii", 1, 0)  # closed with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert ask(served)[0] == 200


# -- bodies ---------------------------------------------------------------------------------------
def test_bodies_are_unpacked_within_the_limit(served):
    plain = json.dumps({"inputs": [X]}).encode()
    headless = zlib.compressobj(wbits=-15)
    for encoding, body, status in (
        ("gzip", gzip.compress(plain), 200), ("deflate", zlib.compress(plain), 200),
        ("deflate", headless.compress(plain) + headless.flush(), 200), ("identity", plain, 200),
        ("GZIP", gzip.compress(plain), 200), ("gzip", plain, 400), ("deflate", b"", 400),
        ("gzip", gzip.compress(plain)[:-4], 400), ("gzip", gzip.compress(plain) + b"1", 400),
        ("br", plain, 415), ("gzip, gzip", plain, 415), ("gzip", gzip.compress(bytes(2**25)), 413),
    ):  # fmt: skip
        answer = ask(served, body=body, headers={"Content-Encoding": encoding})
        assert answer[0] == status, (encoding, answer)
    _, headers, body = ask(served, headers={"Accept-Encoding": "gzip;q=0.1, deflate"})
    assert headers["content-encoding"] == "deflate" and json.loads(zlib.decompress(body))["outputs"]
    assert ask(served, headers={"Accept-Encoding": "gzip;q=0, br"})[1]["content-encoding"] is None
    wrong = ask(served, body=b"{}", headers={"Accept-Encoding": "gzip"})
    assert wrong[1]["content-encoding"] is None  # errors can be read by everybody


def test_bytes_without_json_are_the_one_input(served):
    x = np.arange(8, dtype=np.float32)
    status, headers, body = ask(served, body=x.tobytes(), headers={messages.LENGTH_HEADER: "0"})
    end = int(headers[messages.LENGTH_HEADER])
    assert status == 200 and json.loads(body[:end])["outputs"][0]["shape"] == [2, 4]
    assert body[end:] == x.tobytes()
    for wrong in (b"", b"1", x.tobytes() + b"1", bytes(16 * 9)):
        assert reason(ask(served, body=wrong, headers={messages.LENGTH_HEADER: "0"}))[0] == 400


@pytest.mark.parametrize("length", ["-1", "x", "1e2", "99999", "5", "9" * 30])
def test_a_wrong_length_of_the_json_is_refused(length, served):
    assert reason(ask(served, headers={messages.LENGTH_HEADER: length}))[0] == 400


@pytest.mark.parametrize(
    ("shape", "data", "fits"),
    [
        ([2, 3], [1, 2, 3, 4, 5, 6], True),
        ([2, 3], [[1, 2, 3], [4, 5, 6]], True),
        ([2, 3], [[1, 2], [3, 4], [5, 6]], False),
        ([2, 3], [[1, 2, 3, 4, 5, 6]], False),
        ([2, 3], [[[1], [2], [3]], [[4], [5], [6]]], False),
        ([2, 3], [[1, 2, 3], 4, 5, 6], False),
        ([2, 3], [[1, 2, 3], [4, 5]], False),
        ([2, 3], [1, 2, 3, 4, 5], False),
        ([2, 3, 1], [[[1], [2], [3]], [[4], [5], [6]]], True),
        ([2, 3, 1], [[1, 2, 3], [4, 5, 6]], False),
        ([6], [1, 2, 3, 4, 5, 6], True),
        ([6], [[1, 2, 3], [4, 5, 6]], False),
        ([0, 3], [], True),
        ([2, 0], [[], []], True),
        ([2, 0], [[]], False),
        ([], [7], True),
        ([], 7, True),
        ([], [[7]], False),
        ([1], 7, False),
    ],
)
def test_data_are_flat_or_nested_as_the_shape_says(shape, data, fits):
    port = Port("x", "float32", (-1,) * len(shape), batched=False)
    tensor = {"datatype": "FP32", "shape": shape, "data": data}
    if fits:
        found = port.read(tensor, 0)
        np.testing.assert_array_equal(found, np.array(data, np.float32).reshape(shape))
    else:
        with pytest.raises(InputError, match="input 'x': data"):
            port.read(tensor, 0)


@pytest.mark.parametrize(
    ("element", "fine", "wrong"),
    [
        ("uint64", [2**64 - 1, 0], [2**64, 0]), ("int64", [-(2**63), 2**63 - 1], [2**63, 0]),
        ("int8", [-128, 127], [128, 0]), ("uint8", [0, 255], [-1, 0]),
        ("float16", [65504, -1e-8], [65520, 0]), ("float32", [3.4e38, 2**127], [3.5e38, 0]),
        ("double", [1.7e308, -(2**1023)], [10**400, 0]), ("bool", [True, False], [True, 1]),
        ("float32", [1, 2.5], [1, True]), ("int32", [1, 2], [1, 2.0]),
        ("float32", [1, 2], [1, None]),
    ],
)  # fmt: skip
def test_values_are_kept_or_refused(element, fine, wrong):
    port = Port("x", element, (2,), batched=False)
    tensor = {"datatype": port.datatype, "shape": [2], "data": fine}
    found = port.read(tensor, 0)
    assert found.tolist() == np.array(fine, found.dtype).tolist()
    with pytest.raises(InputError, match="input 'x'"):
        port.read({**tensor, "data": wrong}, 0)


def test_json_with_more_lists_than_can_be_read_at_once_is_refused():
    with pytest.raises(InputError, match="lists and objects"):
        messages.decoded(b"[" * (messages.MAX_NESTED + 1))


# -- at once, and at the end ----------------------------------------------------------------------
def test_a_long_body_is_read_beside_the_others(tmp_path, monkeypatch):
    """While the reading of one long body stands still, a short request is answered."""
    service = service_of(kinds_model(tmp_path / "kinds.onnx"))
    read_request = messages.read_request
    gate = threading.Event()
    begun = threading.Event()

    def slow(body, length, model):
        if len(body) > 2**15:
            begun.set()
            assert gate.wait(20)
        return read_request(body, length, model)

    monkeypatch.setattr(messages, "read_request", slow)
    statuses = []
    with serving(service) as (address, _):
        path = "/v2/models/kinds/infer"
        long = threading.Thread(
            target=lambda: statuses.append(ask(address, path, b" " * 2**16 + b"{}")[0])
        )
        long.start()
        assert begun.wait(20)
        assert ask(address, path, b"{}")[0] == 400
        assert not statuses
        gate.set()
        long.join(20)
    assert statuses == [400]


def test_who_comes_late_is_told_and_who_was_in_time_is_answered():
    gate = threading.Event()
    begun = threading.Event()

    def slow(inputs):
        begun.set()
        assert gate.wait(20)
        return {"y": inputs["x"]}

    ports = tuple((Port(name, "float32", (1, 4), batched=True),) for name in ("x", "y"))
    model = Model("copy", "test", *ports, 4, lambda rows: slow)
    answers = []
    with serving(Service("copy", lambda: model, Policy(1, 4))) as (address, door):
        early = threading.Thread(target=lambda: answers.append(ask(address)))
        early.start()
        assert begun.wait(20)
        door.is_stopping = True
        assert not door.can_close(door.last_request_s)
        for method, path in (("POST", INFER), ("GET", "/v2/health/ready")):
            late = ask(address, path, method=method)
            assert reason(late)[0] == 503 and late[1]["connection"] == "close"
        gate.set()
        early.join(20)
        assert answers[0][0] == 200
        assert door.can_close(door.last_request_s - 100)
        assert not door.can_close(door.last_request_s)

"""The real server, asked by a real client: values, wrong requests, full queues, its end."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.deploy.serving import Level, Policy
from ascend_lab.deploy.serving.opened import Model, open_model
from ascend_lab.deploy.serving.rest import Service, application
from ascend_lab.deploy.serving.tensors import Port
from ascend_lab.errors import AscendLabError, InputError

LEVELS = (Level(queue_limit=9),)
WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def save_model(path, scale=1.0):
    net = GraphBuilder("linear")
    x = net.input("x", (1, 4), "fp32")
    net.output(net.relu(net.matmul(x, net.constant(WEIGHT * np.float32(scale)))))
    save_onnx(net.build(), path)


def tensor(values, name="x", datatype="FP32"):
    array = np.asarray(values)
    data = array.ravel().tolist()
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": data}


class Running:
    """A server in a process of its own."""

    def __init__(self, model, *flags):
        words = [sys.executable, "-m", "ascend_lab", "serve", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"serving linear at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, (line, self.process.poll())
        self.url = found[1]

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = tmp_path_factory.mktemp("serve") / "linear.onnx"
    save_model(model)
    running = Running(model, "--max-delay-s", "0.005")
    yield running
    assert running.end() == (0, "linear is served no more\n", "")


def test_a_thousand_requests_at_once_get_their_own_answers(served):
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((1 + n % 3, 4)).astype(np.float32) for n in range(1000)]

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        clients = [  # one with a thousand connections is slow itself
            httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60, trust_env=False)
            for _ in range(20)
        ]
        answers = await asyncio.gather(*(
            clients[n % 20].post("/v2/models/linear/infer",
                                 json={"id": f"r{n}", "inputs": [tensor(row)]})
            for n, row in enumerate(rows)
        ))  # fmt: skip
        for client in clients:
            await client.aclose()
        return answers

    before = metrics(served)
    answers = asyncio.run(all_of_them())
    assert {answer.status_code for answer in answers} == {200}
    for n, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        found = answer.json()
        assert (found["id"], found["model_version"]) == (f"r{n}", "1")
        (out,) = found["outputs"]
        assert out["shape"] == [len(row), 3]
        np.testing.assert_allclose(
            np.reshape(out["data"], out["shape"]), np.maximum(row @ WEIGHT, 0), atol=1e-5
        )
    after = metrics(served)
    grown = {key: after[key] - before[key] for key in after}
    assert grown["nv_inference_request_success"] == 1000
    assert grown["nv_inference_count"] == sum(map(len, rows))
    assert grown["nv_inference_exec_count"] < 1000  # some ran together
    assert after["nv_inference_pending_request_count"] == 0
    parts = sum(grown[f"nv_inference_{name}_duration_us"]
                for name in ("queue", "compute_input", "compute_infer",
                             "compute_output"))  # fmt: skip
    assert 0 < parts <= grown["nv_inference_request_duration_us"]


def metrics(served):
    text = httpx.get(f"{served.url}/metrics").text
    return {
        key: int(value) for key, value in re.findall(r"^(\w+)\{[^}]*\} (\d+)$", text, re.MULTILINE)
    }


GOOD = tensor([[1.0, 2.0, 3.0, 4.0]])
WRONG = {
    "no object": [1],
    "no inputs": {},
    "inputs no list": {"inputs": {"x": 1}},
    "no input": {"inputs": []},
    "an unknown input": {"inputs": [{**GOOD, "name": "z"}]},
    "an input twice": {"inputs": [GOOD, GOOD]},
    "a tensor that is none": {"inputs": [3]},
    "another datatype": {"inputs": [{**GOOD, "datatype": "FP64"}]},
    "no datatype": {"inputs": [{k: v for k, v in GOOD.items() if k != "datatype"}]},
    "another shape": {"inputs": [{**GOOD, "shape": [4]}]},
    "no rows": {"inputs": [{**GOOD, "shape": [0, 4], "data": []}]},
    "too many rows": {"inputs": [tensor(np.zeros((9, 4)))]},
    "a size of another kind": {"inputs": [{**GOOD, "shape": [1, 4.0]}]},
    "a negative size": {"inputs": [{**GOOD, "shape": [-1, 4]}]},
    "too few values": {"inputs": [{**GOOD, "data": [1, 2, 3]}]},
    "texts": {"inputs": [{**GOOD, "data": ["1", "2", "3", "4"]}]},
    "ragged": {"inputs": [{**GOOD, "data": [[1, 2], [3]]}]},
    "null": {"inputs": [{**GOOD, "data": [1, 2, 3, None]}]},
    "too large": {"inputs": [{**GOOD, "data": [1, 2, 3, 1e300]}]},
    "data no list": {"inputs": [{**GOOD, "data": 4}]},
    "an unknown output": {"inputs": [GOOD], "outputs": [{"name": "z"}]},
    "outputs no list": {"inputs": [GOOD], "outputs": 3},
    "an id that is no text": {"id": 4, "inputs": [GOOD]},
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_told_why(what, served):
    answer = httpx.post(f"{served.url}/v2/models/linear/infer", json=WRONG[what])
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v2/models/linear/infer", b"{", 400),
        ("POST", "/v2/models/linear/infer", b"", 400),
        ("POST", "/v2/models/linear/infer", b"\xff\xfe", 400),
        ("POST", "/v2/models/linear/infer", b"[" * 100_000, 400),
        ("POST", "/v2/models/linear/infer", b"1" * 5000, 400),
        ("POST", "/v2/models/other/infer", b"{}", 404),
        ("POST", "/v2/models/linear/versions/2/infer", b"{}", 404),
        ("POST", "/v2/models/linear/versions/%C2%B2/infer", b"{}", 404),
        ("GET", "/v2/models/other", b"", 404),
        ("GET", "/v2/models/other/ready", b"", 404),
        ("GET", "/nothing", b"", 404),
        ("GET", "/v2/models/linear/infer", b"", 405),
        ("DELETE", "/v2/models/linear", b"", 405),
    ],
)
def test_wrong_paths_methods_and_bodies(method, path, body, status, served):
    answer = httpx.request(method, served.url + path, content=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert httpx.get(f"{served.url}/v2/health/live").status_code == 200


def test_a_model_is_loaded_again_and_a_failed_load_keeps_the_old(tmp_path):
    model = tmp_path / "linear.onnx"
    save_model(model)
    running = Running(model)
    with httpx.Client(base_url=running.url) as client:
        base = "/v2/repository/models/linear"

        def ask():
            answer = client.post("/v2/models/linear/infer", json={"inputs": [GOOD]})
            return answer.status_code, answer.json().get("model_version")

        model.write_bytes(b"rubbish")
        assert client.post(f"{base}/load").status_code == 400
        assert ask() == (200, "1")
        save_model(model, 2.0)
        assert client.post(f"{base}/load").json()["version"] == "2"
        assert ask() == (200, "2")
        old = client.post("/v2/models/linear/versions/1/infer", json={"inputs": [GOOD]})
        assert old.status_code == 404
        assert client.post(f"{base}/unload").status_code == 200
        assert ask()[0] == 503
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/health/live").status_code == 200
        assert client.post("/v2/repository/models/other/load").status_code == 404
    assert running.end(signal.SIGINT) == (0, "linear is served no more\n", "")


# -- in this process, with models made for it -----------------------------------------------------
def made(run, max_batch=4):
    ports = tuple((Port(name, "float32", (1, 2), max_batch > 0),) for name in ("x", "y"))
    return Model("made", "test", *ports, max_batch, lambda rows: run)


def asked(service, rows):
    transport = httpx.ASGITransport(application(service))

    async def all_of_them():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(
                client.post("/v2/models/made/infer", json={"inputs": [tensor(row)]}) for row in rows
            ))  # fmt: skip

    return asyncio.run(all_of_them())


def test_a_full_queue_says_so_and_answers_whom_it_took():
    gate = threading.Event()

    def slow(inputs):
        gate.wait(10)
        return {"y": inputs["x"]}

    policy = Policy(1, 4, levels=(Level(queue_limit=20),))
    service = Service("made", lambda: made(slow), policy)
    threading.Timer(0.5, gate.set).start()
    answers = asked(service, [[[n, n]] for n in range(100)])
    taken = [n for n, answer in enumerate(answers) if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 20 <= len(taken) <= 24  # a batch runs, 20 wait
    assert all(answers[n].json()["outputs"][0]["data"] == [n, n] for n in taken)


def test_one_bad_request_spoils_no_other_of_its_batch():
    def picky(inputs):
        if (inputs["x"] < 0).any():
            raise InputError("no negative numbers", "one")
        return {"y": np.full_like(inputs["x"], np.inf)}

    service = Service("made", lambda: made(picky), Policy(1, 4, 0.2, (), LEVELS))
    answers = asked(service, [[[1, 1]], [[-1, 1]], [[2, 2]]])
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    assert answers[0].json()["outputs"][0]["data"] == [None, None]  # JSON has no infinity


def test_batches_are_made_only_where_rows_do_not_touch(tmp_path):
    path = tmp_path / "linear.onnx"
    save_model(path)
    model = open_model(str(path), max_batch=8)
    x = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    (found,) = model.run({"x": x}).values()
    assert found == pytest.approx(np.maximum(x @ WEIGHT, 0), abs=1e-5)
    on_chip = open_model(str(path), "Toy", 2).run({"x": x[:2]})
    assert next(iter(on_chip.values())) == pytest.approx(found[:2], abs=0.02)
    net = GraphBuilder("mixed")
    y = net.input("x", (1, 4), "fp32")
    net.output(net.softmax(y, axis=0))
    save_onnx(net.build(), tmp_path / "mixed.onnx")
    assert open_model(str(tmp_path / "mixed.onnx"), max_batch=8).max_batch == 0
    assert open_model(str(path), shapes={"x": (1, 4)}).max_batch == 0


def test_shutdown_answers_what_is_on_its_way(tmp_path):
    model = tmp_path / "linear.onnx"
    save_model(model)
    running = Running(model, "--max-delay-s", "1")
    found = []

    def ask():
        body = {"inputs": [GOOD]}
        found.append(httpx.post(f"{running.url}/v2/models/linear/infer", json=body, timeout=20))

    client = threading.Thread(target=ask)
    client.start()
    while not metrics(running)["nv_inference_pending_request_count"]:
        time.sleep(0.01)
    running.process.send_signal(signal.SIGTERM)
    late = [200]
    while late[-1] == 200 and len(late) < 100:
        late.append(httpx.get(f"{running.url}/v2/health/ready", timeout=20).status_code)
    assert late[-1] == 503  # not a connection that is reset
    out, err = running.process.communicate(timeout=20)
    client.join()
    assert (running.process.returncode, out, err) == (0, "linear is served no more\n", "")
    assert found[0].status_code == 200


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(AscendLabError, match=r"ascend-lab\[serve\]"):
        application(Service("made", lambda: made(lambda inputs: inputs), Policy()))


@pytest.mark.parametrize(
    ("element", "data", "said"),
    [
        ("float32", [1, 2, 3], "a list of 2 numbers; got 3 whole numbers"),
        ("float32", [1, "b"], "a list of 2 numbers; got 2 values, text among them"),
        ("int64", [0.5, 1.5], "a list of 2 whole numbers; got 2 fractions"),
        ("bool", [0, 1], "a list of 2 true and false; got 2 whole numbers"),
        ("float32", [None, 1], "a list of 2 numbers; got [None, 1]"),
    ],
)
def test_wrong_data_are_told_in_words(element, data, said):
    port = Port("x", element, (2,), batched=False)
    with pytest.raises(InputError, match=re.escape(said)):
        port.read({"datatype": port.datatype, "shape": [2], "data": data}, 0)

"""The simulated server's speed and its distance from theory; what the real one adds to a call."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from ascend_lab.compiler import GraphBuilder
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.deploy.serving import (
    Arrivals,
    Failure,
    Level,
    Policy,
    Scenario,
    Served,
    Service,
    Step,
    interval,
    simulate_serving,
    theory,
)
from ascend_lab.deploy.serving.opened import open_model
from bench.table import Figure, below

EXPONENTIAL = Service("exponential", 1.0)
RATE_PER_S = 50
REQUESTS = 500
WIDTH = 3072


def _served(rate: float, service: Service, policy: Policy, n: int = 200_000) -> Served:
    arrivals = Arrivals(rate_per_s=rate)
    return simulate_serving(Scenario(arrivals, (Step("m", service, policy),), n, 2, n // 10))


def serving_figures() -> list[Figure]:
    """A million requests, theory inside intervals, nobody lost, and the real server."""
    rows = []
    for name, rate, policy in (
        ("M/M/1", 0.8, Policy()),
        ("batches of 4", 3.0, Policy(1, 4)),
        ("M/M/4", 3.2, Policy(4)),
    ):
        start = time.process_time()
        simulate_serving(
            Scenario(Arrivals(rate_per_s=rate), (Step("m", EXPONENTIAL, policy),), 10**6)
        )
        rows.append(below(f"1 M requests, {name}", time.process_time() - start, 20, "s"))
    cases = (
        (0.8, EXPONENTIAL, Policy(), theory.mg1(0.8, 1)),
        (0.8, Service(mean_s=1), Policy(), theory.mg1(0.8, 1, 0)),
        (0.7, Service("erlang", 1, shape=2), Policy(), theory.mg1(0.7, 1, 0.5)),
        (1.6, EXPONENTIAL, Policy(2), theory.mmc(1.6, 1, 2)),
        (3.2, EXPONENTIAL, Policy(4), theory.mmc(3.2, 1, 4)),
        (0.8, EXPONENTIAL, Policy(levels=(Level(queue_limit=4),)), theory.mm1k(0.8, 1, 5)),
        (1.5, EXPONENTIAL, Policy(1, 2), theory.batches(1.5, 1, 2)),
        (3.0, EXPONENTIAL, Policy(1, 4), theory.batches(3, 1, 4)),
        (
            0.8,
            Service("exponential", 1.8874, 0.1438),
            Policy(1, 8),
            theory.growing_batches(0.8, 0.1438, 1.8874, 8),
        ),
    )
    inside = sum(
        exact.W in interval(_served(rate, service, policy).latency_s)
        for rate, service, policy, exact in cases
    )
    rows.append(
        Figure("theory in 99 % intervals", f"{inside} of {len(cases)}", "all", inside == len(cases))
    )
    dead = tuple(Failure(n % 2, 50.0 * n, 30.0) for n in range(1, 200))
    found = _served(1.5, EXPONENTIAL, Policy(2, 2, levels=(Level(queue_limit=8),), failures=dead))
    lost = int((found.finish_s[~found.lost] <= found.arrival_s[~found.lost]).sum())
    rows.append(Figure("accepted and lost, 199 failures", str(lost), "0", lost == 0))
    return [*rows, *_real_server()]


def _real_server() -> list[Figure]:
    """Answers to an open stream of requests, the time of the model's own call taken off."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "linear.onnx")
        net = GraphBuilder("linear")
        weight = np.random.default_rng(0).standard_normal((WIDTH, 10)).astype(np.float32)
        net.output(net.matmul(net.input("x", (1, WIDTH), "fp32"), net.constant(weight)))
        save_onnx(net.build(), model)
        x = np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)
        call = open_model(str(model))
        calls = [_timed(lambda: call.run({"x": x})) for _ in range(200)]
        words = [sys.executable, "-m", "ascend_lab", "serve", str(model)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            found = re.search(r":(\d+)$", (process.stdout or sys.stdin).readline())
            port = int(found[1]) if found else 0
            tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32"}
            body = json.dumps({"inputs": [{**tensor, "data": x.ravel().tolist()}]})
            took = _asked(port, "POST", "/v2/models/linear/infer", body)
            idle = _asked(port, "GET", "/v2/health/live")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    over = float(np.percentile(took, 99)) - float(np.median(calls))
    return [
        below("model call", float(np.median(calls))),
        below(f"  p99 added at {RATE_PER_S} requests/s", over, 10e-3),
        below("  median added", float(np.median(took)) - float(np.median(calls))),
        below("  p99 of /v2/health/live", float(np.percentile(idle, 99))),
    ]


def _timed(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


def _asked(port: int, method: str, path: str, body: str = "") -> list[float]:
    """Return seconds from when each request was due to its answer, on eight connections."""
    took = [0.0] * REQUESTS
    begin = time.perf_counter() + 0.5

    def client(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for n in range(first, REQUESTS, 8):
            due = begin + n / RATE_PER_S
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request(method, path, body)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            took[n] = time.perf_counter() - due
        connection.close()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took[10:]

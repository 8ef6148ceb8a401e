"""Models and servers for the tests of `ascend-lab serve`."""

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import onnx
from onnx import TensorProto as T, helper, numpy_helper

from ascend_lab.deploy.serving import Level, Policy
from ascend_lab.deploy.serving.loopback import LoopbackGuard, loopback_socket, uvicorn_server
from ascend_lab.deploy.serving.opened import open_model
from ascend_lab.deploy.serving.rest import BODY_BYTES, Service, application


def save(path, nodes, inputs, outputs, constants=None):
    """Write a model; nodes, inputs and outputs are rows of what makes them."""
    made = [helper.make_node(op, reads, writes, **how) for op, reads, writes, how in nodes]
    ends = [[helper.make_tensor_value_info(*row) for row in rows] for rows in (inputs, outputs)]
    stored = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(made, path.stem, *ends, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)
    return path


def kinds_model(path):
    """Inputs of three types, outputs of four: sums, comparisons, places and halves."""
    rows = ["N", 3]
    return save(
        path,
        [
            ("Cast", ["whole"], ["wide"], {"to": T.FLOAT}),
            ("Add", ["real", "wide"], ["sum"], {}),
            ("Greater", ["real", "wide"], ["more"], {}),
            ("And", ["more", "flag"], ["both"], {}),
            ("ArgMax", ["real"], ["place"], {"axis": 1}),
            ("Cast", ["real"], ["half"], {"to": T.FLOAT16}),
        ],
        [("real", T.FLOAT, rows), ("whole", T.INT64, rows), ("flag", T.BOOL, rows)],
        [("sum", T.FLOAT, rows), ("both", T.BOOL, rows), ("place", T.INT64, ["N", 1]),
         ("half", T.FLOAT16, rows)],
    )  # fmt: skip


def host_model(path):
    """Operators without a kernel here, sizes that values decide, and an output without sizes."""
    return save(
        path,
        [("Det", ["matrices"], ["det"], {}), ("NonZero", ["matrices"], ["places"], {}),
         ("ReduceMax", ["matrices"], ["largest"], {"keepdims": 0})],
        [("matrices", T.FLOAT, ["B", "S", "S"])],
        [("det", T.FLOAT, ["B"]), ("places", T.INT64, [3, "M"]), ("largest", T.FLOAT, [])],
    )  # fmt: skip


def copy_model(path, kind, shape=("N", 4)):
    """One tensor of a type, passed on."""
    shape = list(shape)
    return save(path, [("Identity", ["x"], ["y"], {})], [("x", kind, shape)], [("y", kind, shape)])


def service_of(path, max_batch=8, policy=None, body_bytes=BODY_BYTES):
    """Return the service of a file."""
    policy = policy or Policy(1, max_batch, levels=(Level(queue_limit=64),))
    return Service(
        path.stem, lambda: open_model(str(path), max_batch=max_batch), policy, body_bytes
    )


@contextmanager
def serving(service):
    """Serve in a thread of this process; give the address and the door."""
    door = LoopbackGuard(application(service))
    server = uvicorn_server(door)
    with loopback_socket(0) as listening:
        port = listening.getsockname()[1]
        run = server.serve(sockets=[listening])
        thread = threading.Thread(target=lambda: asyncio.run(run), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{port}", door
        finally:
            service.close()
            server.should_exit = True
            thread.join(20)

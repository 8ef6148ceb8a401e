"""A real server on loopback: the KServe v2 REST protocol around a model and its dynamic batcher.

    GET  /v2, /v2/health/live, /v2/health/ready, /metrics
    GET  /v2/models/NAME[/versions/V], .../ready
    POST /v2/models/NAME[/versions/V]/infer       tensors as JSON
    POST /v2/repository/models/NAME/load, .../unload

Every request is checked before it waits: 400 wrong, 404 unknown, 405 method, 413 too large, 429 too
many wait, 503 not served now; each as {"error": one line}. JSON has no infinity: null stands there.
Protocol: https://github.com/kserve/open-inference-protocol; metric names are Triton's
(docs/user_guide/metrics.md).
"""

import asyncio
import json
import math
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

import numpy as np

from ascend_lab import __version__, errors
from ascend_lab.limits import json_of, shown
from ascend_lab.serving.model import Arrays, Model
from ascend_lab.serving.queues import Policy


class FullError(Exception):
    """As many requests wait as may."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue."""

    since_s: float
    rows: int
    inputs: Arrays
    answer: asyncio.Future[Arrays]


@dataclass(slots=True)
class Batcher:
    """A model's queue and its instances, one thread each; `counts` are the metrics."""

    model: Model
    policy: Policy
    counts: Counter[str]
    queue: deque[Waiting] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    closed: bool = False

    def check(self) -> None:
        """Raise `FullError` if as many requests wait as may."""
        limit = self.policy.levels[0].queue_limit
        if limit and len(self.queue) >= limit:
            raise FullError

    async def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a request; raises as `check`."""
        self.check()
        if all(task.done() for task in self.tasks):
            self.tasks = [asyncio.create_task(self._serve()) for _ in range(self.policy.instances)]
        rows = len(next(iter(inputs.values()))) if self.model.batched else 1
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.queue.append(Waiting(time.perf_counter(), rows, inputs, answer))
        self.news.set()
        return await answer

    def close(self) -> None:
        """Let the instances end when nothing waits any more."""
        self.closed = True
        self.news.set()

    async def _serve(self) -> None:
        while True:
            if not self.queue:
                if self.closed:
                    return
                self.news.clear()
                await self.news.wait()
            elif (left_s := self._left_s()) > 0 and not self.closed:
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), left_s)
                except TimeoutError:
                    continue
            else:
                await self._run(self._take())

    def _left_s(self) -> float:
        """Return how long the oldest request may still wait for others."""
        if sum(one.rows for one in self.queue) >= self.model.max_batch:
            return 0.0
        return self.queue[0].since_s + self.policy.max_delay_s - time.perf_counter()

    def _take(self) -> list[Waiting]:
        batch = [self.queue.popleft()]
        rows = batch[0].rows
        while self.queue and rows + self.queue[0].rows <= self.model.max_batch:
            rows += self.queue[0].rows
            batch.append(self.queue.popleft())
        return batch

    async def _run(self, batch: list[Waiting]) -> None:
        """Run a batch in a thread; after an error each request alone, so that one spoils none."""
        start_s = time.perf_counter()
        try:
            found = await asyncio.to_thread(self._together, batch)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    await self._run([one])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        took_us = int((time.perf_counter() - start_s) * 1e6)
        self.counts["exec_count"] += 1
        first = 0
        for one in batch:
            self.counts["count"] += one.rows
            self.counts["compute_infer_duration_us"] += took_us
            self.counts["queue_duration_us"] += int((start_s - one.since_s) * 1e6)
            rows = slice(first, first + one.rows) if self.model.batched else ...
            first += one.rows
            if not one.answer.done():  # a client may have gone
                one.answer.set_result({name: array[rows] for name, array in found.items()})

    def _together(self, batch: list[Waiting]) -> Arrays:
        inputs = batch[0].inputs
        if len(batch) > 1:
            inputs = {name: np.concatenate([one.inputs[name] for one in batch]) for name in inputs}
        return self.model.run(inputs)


BODY_BYTES = 2**26
GRACE_S = 30
"""What a server that is told to stop gives the requests on their way."""
DURATIONS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
COUNTERS = ("request_success", "count", "exec_count", *(f"{n}_duration_us" for n in DURATIONS))


class RefusedError(Exception):
    """An answer that is no success: its status and what it says."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, " ".join(text.split())


def _library() -> Any:
    """Return starlette's modules; raise `InputError` naming the extra to install."""
    try:
        import starlette.applications
        import starlette.responses
        import starlette.routing
        import uvicorn  # noqa: F401 - asked for here, so that one message names both
    except ImportError as error:
        remedy = "install ascend-lab[serve]"
        raise errors.InputError("starlette and uvicorn to serve", str(error), remedy) from None
    return starlette


class Service:
    """What stands behind the routes: one version of a model at a time, and what was counted."""

    def __init__(
        self, name: str, load: Callable[[], Model], policy: Policy, body_bytes: int = BODY_BYTES
    ) -> None:
        self.name, self.load_model, self.policy, self.body_bytes = name, load, policy, body_bytes
        self.counts: Counter[str] = Counter()
        self.version = 1
        self.batcher: Batcher | None = Batcher(load(), policy, self.counts)

    def close(self) -> None:
        """Serve no new requests; those on their way are answered."""
        if self.batcher:
            self.batcher.close()
        self.batcher = None

    def found(self, path: Mapping[str, str]) -> Batcher:
        """Return what serves a path's version; raise `RefusedError` if nothing does."""
        if self.batcher is None:
            raise RefusedError(503, f"{self.name} is not loaded")
        if path.get("version", str(self.version)) != str(self.version):
            raise RefusedError(404, f"{self.name} has no version {shown(path['version'])} now")
        return self.batcher

    def ready(self, request: Any) -> Any:
        """Return that the model can be asked; refused if not."""
        return {"ready": bool(self.found(request.path_params))}

    def metadata(self, request: Any) -> Any:
        """Return the names, datatypes and shapes of the model's tensors."""
        model = self.found(request.path_params).model
        return {
            "name": self.name, "versions": [str(self.version)], "platform": model.platform,
            "inputs": [port.described() for port in model.inputs],
            "outputs": [port.described() for port in model.outputs],
        }  # fmt: skip

    async def infer(self, request: Any) -> Any:
        """Return the model's outputs for the tensors of a request."""
        times_s = [time.perf_counter()]
        batcher, version = self.found(request.path_params), self.version
        try:
            batcher.check()
            body = json_of(await self._body(request), "a request")
            inputs, wanted = read_request(body, batcher.model)
            times_s.append(time.perf_counter())
            outputs = await batcher.ask(inputs)
        except FullError:
            self.counts["REJECTED"] += 1
            limit = self.policy.levels[0].queue_limit
            raise RefusedError(429, f"{limit} requests wait already; try again later") from None
        except errors.AscendLabError as error:
            self.counts["OTHER"] += 1
            raise RefusedError(400, str(error)) from error
        times_s.append(time.perf_counter())
        written = [_written(outputs[port.name], port.described()) for port in batcher.model.outputs
                   if wanted is None or port.name in wanted]  # fmt: skip
        times_s.append(time.perf_counter())
        for key, first, last in (("request", 0, 3), ("compute_input", 0, 1),
                                 ("compute_output", 2, 3)):  # fmt: skip
            self.counts[f"{key}_duration_us"] += int((times_s[last] - times_s[first]) * 1e6)
        self.counts["request_success"] += 1
        own = {"id": body["id"]} if "id" in body else {}
        named = {"model_name": self.name, "model_version": str(version), **own}
        return {**named, "outputs": written}

    async def _body(self, request: Any) -> bytes:
        """Return what a request carries; no more than the limit is ever held."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self.body_bytes:
                raise RefusedError(413, f"a request of at most {self.body_bytes:,} bytes")
        return bytes(data)

    async def load(self, request: Any) -> Any:
        """Read the model again and serve it as the next version; the old stays if that fails."""
        try:
            model = await asyncio.to_thread(self.load_model)
        except errors.AscendLabError as error:
            raise RefusedError(400, f"the model cannot be loaded: {error}") from error
        self.close()
        self.version += 1
        self.batcher = Batcher(model, self.policy, self.counts)
        return {"name": self.name, "version": str(self.version)}

    def unload(self, request: Any) -> Any:
        """Serve the model no more."""
        self.close()
        return {}

    def metrics(self) -> str:
        """Return the counters in the text form of Prometheus."""
        model, text = f"model={json.dumps(self.name)}", ""
        rows = {f"{key} counter": {model: self.counts[key]} for key in COUNTERS}
        rows["request_failure counter"] = {f'{model},reason="{reason}"': self.counts[reason]
                                           for reason in ("REJECTED", "OTHER")}  # fmt: skip
        waiting = len(self.batcher.queue) if self.batcher else 0
        for kind, values in (*rows.items(), ("pending_request_count gauge", {model: waiting})):
            text += f"# TYPE nv_inference_{kind}\n"
            name = kind.split()[0]
            for label, value in values.items():
                text += f"nv_inference_{name}{{{label}}} {value}\n"
        return text


def read_request(body: Any, model: Model) -> tuple[Arrays, set[str] | None]:
    """Return a request's arrays and the outputs it asks for; raise `InputError` if it is wrong."""
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        raise errors.InputError("an object with inputs, a list of tensors", shown(body))
    if "id" in body and not isinstance(body["id"], str):
        raise errors.InputError("id, a text", shown(body["id"]))
    ports, found = {port.name: port for port in model.inputs}, {}
    for tensor in body["inputs"]:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or name not in ports or name in found:
            raise errors.InputError(f"inputs {', '.join(ports)}, each once", shown(name or tensor))
        found[name] = ports[name].read(tensor, model.max_batch)
    if missing := ports.keys() - found.keys():
        raise errors.InputError(f"inputs {', '.join(ports)}", f"no {', '.join(sorted(missing))}")
    if model.batched and len({len(array) for array in found.values()}) > 1:
        raise errors.InputError("inputs with as many rows", shown([len(a) for a in found.values()]))
    if body.get("outputs") is None:
        return found, None
    known = {port.name for port in model.outputs}
    asked = body["outputs"] if isinstance(body["outputs"], list) else [None]
    names = [one.get("name") if isinstance(one, dict) else None for one in asked]
    if wrong := [name for name in names if not isinstance(name, str) or name not in known]:
        raise errors.InputError(f"outputs among {', '.join(sorted(known))}", shown(wrong[0]))
    return found, {str(name) for name in names} or None


def _written(array: Any, described: dict[str, Any]) -> dict[str, Any]:
    flat = np.asarray(array).ravel()
    whole = flat.dtype.kind in "biu"
    data = (flat if whole else flat.astype(np.float64)).tolist()
    if not whole and not np.isfinite(flat).all():
        data = [x if math.isfinite(x) else None for x in data]
    return {**described, "shape": list(array.shape), "data": data}


def application(service: Service) -> Any:
    """Return the ASGI application of a service."""
    library = _library()
    answer_of, text_of = library.responses.JSONResponse, library.responses.PlainTextResponse

    def route(path: str, act: Callable[[Any], Any], method: str = "GET") -> Any:
        async def answer(request: Any) -> Any:
            try:
                if (name := request.path_params.get("name", service.name)) != service.name:
                    raise RefusedError(404, f"no model {shown(name)}; there is {service.name}")
                found = act(request)
                found = await found if isawaitable(found) else found
                return text_of(found) if isinstance(found, str) else answer_of(found)
            except RefusedError as error:
                return answer_of({"error": error.text}, error.status)

        return library.routing.Route(path, answer, methods=[method])

    async def no_route(request: Any, error: Any) -> Any:
        text = f"{request.method} {shown(request.url.path)}: {error.detail}"
        return answer_of({"error": text}, error.status_code, error.headers)

    async def ours(request: Any, error: Any) -> Any:
        return answer_of({"error": f"a mistake of ours: {type(error).__name__}"}, 500)

    about = {"name": "ascend_lab", "version": __version__, "extensions": ["model_repository"]}
    routes = [
        route("/v2", lambda _: about), route("/v2/health/live", lambda _: {"live": True}),
        route("/v2/health/ready", service.ready), route("/metrics", lambda _: service.metrics()),
        route("/v2/repository/models/{name}/load", service.load, "POST"),
        route("/v2/repository/models/{name}/unload", service.unload, "POST"),
    ]  # fmt: skip
    for base in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [route(base, service.metadata), route(f"{base}/ready", service.ready),
                   route(f"{base}/infer", service.infer, "POST")]  # fmt: skip
    handlers = {404: no_route, 405: no_route, Exception: ours}
    return library.applications.Starlette(routes=routes, exception_handlers=handlers)


def serve(service: Service, port: int, told: Callable[[int], None]) -> None:
    """Serve on loopback until SIGTERM or SIGINT, then answer what is on its way and return.

    `port` 0 takes any free one; `told` is called with it. Raises `InputError` for one in use.
    """
    app = application(service)
    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            got = f"{port}: {error.strerror}"
            raise errors.InputError("a free port", got, "0 takes a free one") from None
        listening.listen(2048)
        quiet = {"log_config": None, "log_level": "critical", "access_log": False}
        how: dict[str, Any] = {**quiet, "lifespan": "off", "timeout_graceful_shutdown": GRACE_S}
        server = uvicorn.Server(uvicorn.Config(app, **how))

        def stop(number: int, frame: object) -> None:
            server.should_exit = True

        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            told(listening.getsockname()[1])
            server.run(sockets=[listening])
        finally:
            service.close()
            for one, handler in before.items():
                signal.signal(one, handler)

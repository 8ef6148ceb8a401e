"""The HTTP interface of a served model: the KServe v2 REST protocol with Triton's extensions.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/stats, /metrics
    GET  /v2/models/NAME[/versions/V], and the same path with /ready, /config, /stats
    POST /v2/models/NAME[/versions/V]/infer       tensors as JSON or as bytes (`messages`)
    POST /v2/repository/index, /v2/repository/models/NAME/load, .../unload

Every request is checked before it is queued. A refusal is {"error": one line} with a status: 400
wrong request, 404 unknown path or model, 405 wrong method, 413 too large, 415 unknown compression,
429 full queue, 503 not loaded. As JSON has no infinity, null stands for it.

Protocol: https://github.com/kserve/open-inference-protocol; configuration, statistics, repository
and metrics have Triton's names (docs/protocol of github.com/triton-inference-server/server).
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any

from ascend_lab import __version__, errors
from ascend_lab.deploy.serving import messages
from ascend_lab.deploy.serving.batcher import Batcher, FullError
from ascend_lab.deploy.serving.messages import Asked, RefusedError
from ascend_lab.deploy.serving.opened import Model
from ascend_lab.deploy.serving.queues import Policy
from ascend_lab.deploy.serving.statistics import OTHER, REJECTED, Statistics, metrics_text
from ascend_lab.deploy.serving.tensors import Arrays, Port
from ascend_lab.limits import shown

BODY_BYTES = 2**24
"""Largest body of a request after decompression; reading such JSON takes about a second."""
REPOSITORY_BODY_BYTES = 2**20
"""Largest body of a request to the repository."""
THREAD_BODY_BYTES = 2**14
"""A body longer than this is read in a thread, so that other requests are served meanwhile."""
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
NOT_OFFERED = {
    "systemsharedmemory": "shared memory",
    "cudasharedmemory": "shared memory",
    "trace": "tracing",
    "logging": "settings of the log",
}
"""Beginning of a path -> the extension of the protocol that it belongs to."""


def library_or_refuse() -> Any:
    """Return starlette's modules; raises `InputError` with a remedy if it is not installed."""
    try:
        import starlette.applications
        import starlette.requests
        import starlette.responses
        import starlette.routing
        import uvicorn  # noqa: F401 - asked for here, so that one message names both
    except ImportError as error:
        remedy = "install ascend-lab[serve]"
        raise errors.InputError("starlette and uvicorn to serve", str(error), remedy) from None
    return starlette


class Service:
    """The state of the server: the served version of the model, and statistics of all versions."""

    def __init__(
        self, name: str, load: Callable[[], Model], policy: Policy, body_bytes: int = BODY_BYTES
    ) -> None:
        self.name = name
        self.load_model = load
        self.policy = policy
        self.body_bytes = body_bytes
        self.version = 0
        self.versions: list[Statistics] = []
        self.batcher: Batcher | None = None
        # Separate from the batcher's threads, so that reading a body does not wait for a batch.
        self.readers = ThreadPoolExecutor(2, "reader")
        self._serve_next(load())

    def _serve_next(self, model: Model) -> None:
        """Serve a model as the next version."""
        self.close()
        self.version += 1
        self.versions.append(Statistics(self.name, str(self.version)))
        self.batcher = Batcher(model, self.policy, self.versions[-1])

    def close(self) -> None:
        """Accept no new requests; active ones are answered."""
        if self.batcher:
            self.batcher.close()
        self.batcher = None

    def batcher_of(self, path: Mapping[str, str]) -> Batcher:
        """Return the batcher of a path's version; raises `RefusedError` if it is not served."""
        if self.batcher is None:
            raise RefusedError(503, f"{self.name} is not loaded")
        if path.get("version", str(self.version)) != str(self.version):
            # Only the newest version is loaded.
            raise RefusedError(404, f"{self.name} has no version {shown(path['version'])} now")
        return self.batcher

    # -- metadata and statistics ------------------------------------------------------------------
    def ready(self, request: Any) -> Any:
        """Return the answer that the model is ready; raises `RefusedError` if it is not."""
        return {"ready": bool(self.batcher_of(request.path_params))}

    def metadata(self, request: Any) -> Any:
        """Return the names, datatypes and shapes of the model's tensors."""
        model = self.batcher_of(request.path_params).model
        return {
            "name": self.name,
            "versions": [str(self.version)],
            "platform": model.platform,
            "inputs": [port.described() for port in model.inputs],
            "outputs": [port.described() for port in model.outputs],
        }

    def config(self, request: Any) -> Any:
        """Return the model's configuration with the names of Triton's model_config.proto."""
        model = self.batcher_of(request.path_params).model
        batching = {"max_queue_delay_microseconds": round(self.policy.max_delay_s * 1e6)}
        group = {"name": self.name, "kind": "KIND_CPU", "count": self.policy.instances}
        return {
            "name": self.name,
            "platform": model.platform,
            "backend": "ascend_lab",
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": model.max_batch,
            "input": [_config_entry(port) for port in model.inputs],
            "output": [_config_entry(port) for port in model.outputs],
            "instance_group": [group],
            **({"dynamic_batching": batching} if model.batched else {}),
        }

    def stats(self, request: Any) -> Any:
        """Return the statistics of the served version."""
        return {"model_stats": [self.batcher_of(request.path_params).statistics.as_dict()]}

    def all_stats(self, request: Any) -> Any:
        """Return the statistics of the served versions: one or none."""
        return {"model_stats": [self.batcher.statistics.as_dict()] if self.batcher else []}

    def metrics(self, request: Any) -> str:
        """Return the metrics of all past and present versions, in the text format of Prometheus."""
        # Requests wait only for the newest version; older ones keep their counts.
        waiting = len(self.batcher.queue) if self.batcher else 0
        *older, newest = self.versions
        return metrics_text(
            [*(statistics.metrics(0) for statistics in older), newest.metrics(waiting)]
        )

    # -- inference --------------------------------------------------------------------------------
    async def infer(self, request: Any) -> Any:
        """Return the model's outputs for the tensors of a request, as body and headers."""
        start_ns = time.perf_counter_ns()
        batcher = self.batcher_of(request.path_params)
        statistics = batcher.statistics
        # The reason until the answer is computed; unexpected exceptions count as OTHER, too.
        reason = OTHER
        try:
            # Checked before the body is read; `ask` checks again, as the queue may fill up.
            batcher.check()
            answer = await self._compute_answer(request, batcher)
        except FullError:
            reason = REJECTED
            limit = self.policy.levels[0].queue_limit
            raise RefusedError(429, f"{limit} requests wait already; try again later") from None
        except errors.AscendLabError as error:
            raise RefusedError(400, str(error)) from error
        else:
            reason = ""
        finally:
            spent = statistics.failures[reason] if reason else statistics.success
            spent.add(time.perf_counter_ns() - start_ns)
        return answer

    async def _compute_answer(self, request: Any, batcher: Batcher) -> tuple[bytes, dict[str, str]]:
        """Return the body and headers of an answer, and add the times of its parts."""
        parts = batcher.statistics.parts
        # Another version may be loaded before the answer is written.
        head = {"model_name": self.name, "model_version": batcher.statistics.version}
        start_ns = time.perf_counter_ns()
        body = await self._body(request, self.body_bytes)
        encoding = request.headers.get("content-encoding", "")
        length = messages.header_bytes_of(request.headers.get(messages.LENGTH_HEADER))

        def read() -> Asked:
            """Return the request that the body contains."""
            plain = messages.unpacked(body, encoding, self.body_bytes)
            return messages.read_request(plain, length, batcher.model)

        # 10 KB may decompress to 10 MB: every compressed body is treated as a long one.
        is_long = len(body) > THREAD_BODY_BYTES or bool(encoding)
        asked: Asked = await self._in_thread(read) if is_long else read()
        parts["compute_input"].add(time.perf_counter_ns() - start_ns)
        outputs: Arrays = await batcher.ask(asked.inputs)
        answered_ns = time.perf_counter_ns()
        if asked.id is not None:
            head["id"] = asked.id
        answer_encoding = messages.wanted_encoding(request.headers.get("accept-encoding", ""))

        def write() -> tuple[bytes, dict[str, str]]:
            """Return the body of the answer and its headers."""
            text, json_bytes = messages.written(head, asked, outputs)
            headers = {"Content-Type": "application/json"}
            if json_bytes is not None:
                headers["Content-Type"] = "application/octet-stream"
                headers[messages.LENGTH_HEADER] = str(json_bytes)
            if answer_encoding:
                text = messages.packed(text, answer_encoding)
                headers["Content-Encoding"] = answer_encoding
            return text, headers

        size_bytes = sum(outputs[port.name].nbytes for port, _ in asked.outputs)
        answer = await self._in_thread(write) if size_bytes > THREAD_BODY_BYTES else write()
        parts["compute_output"].add(time.perf_counter_ns() - answered_ns)
        return answer

    async def _in_thread(self, act: Callable[[], Any]) -> Any:
        """Run a function in a thread, so that other requests are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, act)

    async def _body(self, request: Any, limit_bytes: int) -> bytes:
        """Return the body of a request, without ever using more memory than the limit."""
        # A too large stated length is refused at once. Only 18 digits are read, as `int` would be
        # slow for a header of thousands of digits.
        stated = request.headers.get("content-length", "")
        if stated.isascii() and stated.isdigit() and int(stated[:18]) > limit_bytes:
            raise messages.too_large(limit_bytes)
        data = bytearray()
        async for chunk in request.stream():
            # A client may send more than it stated, or state no length (chunked).
            data += chunk
            if len(data) > limit_bytes:
                raise messages.too_large(limit_bytes)
        return bytes(data)

    # -- the repository ---------------------------------------------------------------------------
    async def _repository_request(self, request: Any) -> dict[str, Any]:
        """Return the JSON object in a request to the repository; an empty body stands for {}."""
        body = await self._body(request, REPOSITORY_BODY_BYTES)
        try:
            encoding = request.headers.get("content-encoding", "")
            note = (
                messages.decoded(messages.unpacked(body, encoding, REPOSITORY_BODY_BYTES))
                if body
                else {}
            )
            if not isinstance(note, dict):
                raise errors.InputError("an object", shown(note))
            messages.parameters_of(note, "the request")
        except errors.AscendLabError as error:
            raise RefusedError(400, str(error)) from error
        return note

    async def index(self, request: Any) -> Any:
        """Return the models of the repository: the one model of this server."""
        note = await self._repository_request(request)
        ready_only = note.get("ready", False)
        if not isinstance(ready_only, bool):
            raise RefusedError(400, f"ready, true or false; got {shown(ready_only)}")
        # An unloaded model is listed as unavailable.
        if self.batcher is None and ready_only:
            return []
        state, reason = ("READY", "") if self.batcher else ("UNAVAILABLE", "unloaded")
        entry = {"name": self.name, "version": str(self.version), "state": state, "reason": reason}
        return [entry]

    async def load(self, request: Any) -> Any:
        """Read the model again and serve it as the next version; on failure keep the old one."""
        note = await self._repository_request(request)
        if parameters := sorted(note.get("parameters") or {}):
            text = (
                f"a load without parameters: the model stays the same file; got {shown(parameters)}"
            )
            raise RefusedError(400, text)
        try:
            # The old version answers requests while the new one is compiled.
            model = await self._in_thread(self.load_model)
        except errors.AscendLabError as error:
            raise RefusedError(400, f"the model cannot be loaded: {error}") from error
        self._serve_next(model)
        return {"name": self.name, "version": str(self.version)}

    async def unload(self, request: Any) -> Any:
        """Stop serving the model."""
        await self._repository_request(request)
        self.close()
        return {}


def _config_entry(port: Port) -> dict[str, Any]:
    """Return an input or output as in the configuration, without the axis of a batch."""
    word = "STRING" if port.datatype == "BYTES" else port.datatype
    dims = list(port.shape[1:] if port.batched else port.shape)
    return {"name": port.name, "data_type": f"TYPE_{word}", "dims": dims}


# -- the application ------------------------------------------------------------------------------
def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    """Return a response with JSON in plain ASCII."""
    from starlette.responses import Response

    text = json.dumps(value, separators=(",", ":"))
    return Response(text, status, dict(headers or {}), "application/json")


def _answer_of(result: Any) -> Any:
    """Return the HTTP response for a route's result: a text, (body, headers), or plain data."""
    from starlette.responses import PlainTextResponse, Response

    if isinstance(result, str):
        return PlainTextResponse(result)
    if isinstance(result, tuple):
        body, headers = result
        return Response(body, headers=headers)
    return json_answer(result)


def application(service: Service) -> Any:
    """Return the ASGI application of a service."""
    library = library_or_refuse()
    handlers = {404: _no_route, 405: _no_route, Exception: _our_mistake}
    routes = _routes(service, library)
    app = library.applications.Starlette(routes=routes, exception_handlers=handlers)
    # /v2/ is an unknown path with an error in JSON, instead of a redirection to /v2.
    app.router.redirect_slashes = False
    return app


def _routes(service: Service, library: Any) -> list[Any]:
    """Return the routes of a service, in the types of starlette."""

    def route(path: str, act: Callable[[Any], Any], method: str = "GET") -> Any:
        """Return a route whose answer is what `act` returns, or its error as JSON."""

        async def answer(request: Any) -> Any:
            try:
                name = request.path_params.get("name", service.name)
                if name != service.name:
                    raise RefusedError(404, f"no model {shown(name)}; there is {service.name}")
                result = act(request)
                return _answer_of(await result if isawaitable(result) else result)
            except RefusedError as error:
                return json_answer({"error": error.text}, error.status)
            except library.requests.ClientDisconnect:
                # A route has to return an answer, although no client reads it.
                return json_answer({"error": "the client has gone"}, 400)

        return library.routing.Route(path, answer, methods=[method])

    about = {"name": "ascend_lab", "version": __version__, "extensions": list(EXTENSIONS)}
    routes = [
        route("/v2", lambda _: about),
        route("/v2/health/live", lambda _: {"live": True}),
        route("/v2/health/ready", service.ready),
        route("/v2/models/stats", service.all_stats),
        route("/metrics", service.metrics),
        route("/v2/repository/index", service.index, "POST"),
        route("/v2/repository/models/{name}/load", service.load, "POST"),
        route("/v2/repository/models/{name}/unload", service.unload, "POST"),
    ]
    for base in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            route(base, service.metadata),
            route(f"{base}/ready", service.ready),
            route(f"{base}/config", service.config),
            route(f"{base}/stats", service.stats),
            route(f"{base}/infer", service.infer, "POST"),
        ]
    return routes


async def _no_route(request: Any, error: Any) -> Any:
    """Answer a request to an unknown path, or with a method that the path does not have."""
    # in /v2/systemsharedmemory/status the second word names the extension
    extension = request.url.path.strip("/").split("/")[1:2]
    text = f"{request.method} {shown(request.url.path)}: {error.detail}"
    if extension and extension[0] in NOT_OFFERED:
        text = f"{NOT_OFFERED[extension[0]]} is not offered here; got {text}"
    return json_answer({"error": text}, error.status_code, error.headers)


async def _our_mistake(request: Any, error: Any) -> Any:
    """Answer a request that ran into an error of this program."""
    return json_answer({"error": f"a mistake of ours: {type(error).__name__}"}, 500)

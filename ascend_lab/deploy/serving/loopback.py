"""An HTTP server on the loopback address 127.0.0.1, with access control and graceful shutdown.

Every program of the machine can reach a server on loopback, and so can any web page that is open in
a browser. A page can send requests to 127.0.0.1, although it cannot read the answers. It can also
let its own host name resolve to 127.0.0.1, so that the browser takes both for the same origin. The
guard therefore checks that the host named by the request is loopback and that the request does not
come from a page of another server. Otherwise the answer is 403.

After SIGTERM or SIGINT new requests get 503. The port is closed when all active requests have been
answered and none has come for `IDLE_BEFORE_CLOSE_S`.
"""

import asyncio
import ipaddress
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

from ascend_lab import errors
from ascend_lab.deploy.serving.rest import Service, application, json_answer
from ascend_lab.limits import shown

SHUTDOWN_TIMEOUT_S = 30.0
"""Longest time that a stopping server waits for its active requests."""
IDLE_BEFORE_CLOSE_S = 0.5
"""Time without a new request after which a stopping server closes its port."""
REFUSE_LATE_REQUESTS_S = 5.0
"""Longest time that a stopping server answers new requests with 503."""
MAX_DISCARDED_BYTES = 2**28
"""Largest part of a refused body that is read: a client may read the answer only after sending."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class LoopbackGuard:
    """An ASGI application that refuses forbidden requests and passes others to `app`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.is_stopping = False
        self.active_requests = 0
        self.last_request_s = 0.0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the reason of its refusal."""
        if scope["type"] != "http":
            return
        self.last_request_s = time.monotonic()
        refusal = self._refusal(scope)
        body = _RequestBody(scope, receive, send)
        if refusal:
            status, text = refusal
            # An open connection would delay the end of the server.
            headers = {"Connection": "close"} if self.is_stopping else {}
            answer = json_answer({"error": text}, status, headers)
            await answer(scope, body.receive, body.send)
            return
        self.active_requests += 1
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            self.active_requests -= 1
            self.last_request_s = time.monotonic()

    def _refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """Return the status and text of a refusal, or None to accept the request."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "localhost")
        # A page of evil.example that resolves to 127.0.0.1 still sends evil.example as the host.
        if not is_loopback(host):
            return 403, f"a host on loopback, such as 127.0.0.1; got {shown(host)}"
        # A page of http://evil.example sends that as its origin; programs usually send none.
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return 403, f"requests of this server's own pages; got one of {shown(origin)}"
        # Some requests of pages have no origin, but newer browsers send Sec-Fetch-Site.
        site = headers.get(b"sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin") and scope["method"] not in ("GET", "HEAD"):
            return 403, f"requests of this server's own pages; got a {shown(site)} one"
        if self.is_stopping:
            return 503, "the server ends; ask another"
        return None

    def can_close(self, stop_s: float) -> bool:
        """Return whether a server that has been stopping since `stop_s` may close its port."""
        now_s = time.monotonic()
        if now_s - stop_s > SHUTDOWN_TIMEOUT_S:
            return True
        # New requests get 503 for a limited time only.
        has_refused_long_enough = now_s - stop_s > REFUSE_LATE_REQUESTS_S
        return not self.active_requests and (
            has_refused_long_enough
            or now_s - max(self.last_request_s, stop_s) > IDLE_BEFORE_CLOSE_S
        )


class _RequestBody:
    """The body of a request, which is read to its end before an error is sent.

    If a connection is closed while the client is sending, it is reset, and the answer is lost.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # A client that waits for "100 Continue" sends no body before it has an answer.
        self.is_read = any(name == b"expect" for name, _ in scope["headers"])

    async def receive(self) -> Message:
        """Return the next message of the body."""
        message = await self._receive()
        self.is_read = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            size_bytes = 0
            while not self.is_read and size_bytes < MAX_DISCARDED_BYTES:
                size_bytes += len((await self.receive()).get("body", b""))
        await self._send(message)


def is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine: localhost or a loopback address."""
    name = host.strip().lower()
    # A port may follow: [::1]:8000 or 127.0.0.1:8000; ::1 has colons but no port.
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _http_protocol() -> Any:
    """Return uvicorn's protocol class, changed to report invalid HTTP in JSON."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class JsonProtocol(H11Protocol):
        """The HTTP protocol with JSON answers to bytes that are not HTTP."""

        def send_400_response(self, msg: str) -> None:
            """Answer a malformed request with JSON, as all other errors."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                text = json.dumps({"error": msg}).encode("ascii")
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(text)).encode("ascii")),
                    (b"connection", b"close"),
                ]
                for event in (
                    h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                    h11.Data(data=text),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event))
            self.transport.close()

    return JsonProtocol


def uvicorn_server(guard: LoopbackGuard) -> Any:
    """Return uvicorn's server of an application; it writes no log and handles no signals."""
    import uvicorn

    config = uvicorn.Config(
        guard,
        http=_http_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # On a signal uvicorn would close the port at once; `serve` answers with 503 for a while.
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    return server


def loopback_socket(port: int) -> socket.socket:
    """Return a listening socket on loopback; raises `InputError` for a port in use."""
    listener = socket.socket()
    try:
        # Without this, the port of a server that has just ended could not be used (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        got = f"{port}: {error.strerror}"
        raise errors.InputError("a free port", got, "0 takes a free one") from None
    return listener


def serve(service: Service, port: int, report_port: Callable[[int], None]) -> None:
    """Serve on loopback until SIGTERM or SIGINT, then answer the active requests and return.

    `port` 0 stands for any free one; `report_port` is called with the port. Raises `InputError` if
    it is in use.
    """
    guard = LoopbackGuard(application(service))
    server = uvicorn_server(guard)

    def stop(number: int, frame: object) -> None:
        """Let the server finish its requests, at a second signal not even these."""
        if guard.is_stopping:
            # The second signal ends the server at once.
            server.should_exit = True
        guard.is_stopping = True

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not guard.is_stopping and not serving.done():
            await asyncio.sleep(0.05)
        # The signal handler only sets a flag, which this loop checks 20 times a second.
        stop_s = time.monotonic()
        service.close()
        while not server.should_exit and not serving.done() and not guard.can_close(stop_s):
            await asyncio.sleep(0.05)
        server.should_exit = True
        await serving

    with loopback_socket(port) as listener:
        signal_numbers = (signal.SIGTERM, signal.SIGINT)
        old_handlers = {number: signal.signal(number, stop) for number in signal_numbers}
        try:
            report_port(listener.getsockname()[1])
            asyncio.run(run())
        finally:
            service.close()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

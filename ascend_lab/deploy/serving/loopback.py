"""A server on loopback: which requests it lets in, and how it shuts down.

Every program of the machine can reach a server on loopback, and so can a web page of a stranger
that a browser shows. Such a page may send requests to 127.0.0.1, although it cannot read the
answers; or it may let the name of its own host point to 127.0.0.1, which browsers take for the same
origin. The door therefore asks two questions. Is the host that the request names loopback? Does the
page that sends the request, if a page does, come from this very server? If not, the answer is 403.

After SIGTERM or SIGINT late requests get 503 until those on their way are answered and no more have
come for `QUIET_S`; then the port is closed.
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

GRACE_S = 30.0
"""Longest time that a server which was told to stop waits for the requests on their way."""
QUIET_S = 0.5
"""Time without a new request after which its port is closed."""
LATE_S = 5.0
"""Longest time that it answers 503 to clients that do not stop asking."""
DISCARD_BYTES = 2**28
"""Most bytes of a refused body that are read, only so that the sender then reads the refusal."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Door:
    """An ASGI application in front of another: it refuses requests, and counts the others."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.ending = False
        self.on_their_way = 0
        self.last_s = 0.0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why it is refused."""
        if scope["type"] != "http":
            return
        self.last_s = time.monotonic()
        refusal = self._refusal(scope)
        body = _Body(scope, receive, send)
        if refusal:
            status, text = refusal
            # a client that keeps its connection open would hold up the end of the server
            headers = {"Connection": "close"} if self.ending else {}
            answer = json_answer({"error": text}, status, headers)
            await answer(scope, body.receive, body.send)
            return
        self.on_their_way += 1
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            self.on_their_way -= 1
            self.last_s = time.monotonic()

    def _refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """Return the status and text with which a request is refused, None to let it in."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "localhost")
        # a page of evil.example whose name points to 127.0.0.1 still sends that name as the host
        if not is_loopback(host):
            return 403, f"a host on loopback, such as 127.0.0.1; got {shown(host)}"
        # a page of http://evil.example sends that as its origin; programs send none
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return 403, f"requests of this server's own pages; got one of {shown(origin)}"
        # some requests of pages have no origin, but newer browsers say where they come from
        site = headers.get(b"sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin") and scope["method"] not in ("GET", "HEAD"):
            return 403, f"requests of this server's own pages; got a {shown(site)} one"
        if self.ending:
            return 503, "the server ends; ask another"
        return None

    def is_quiet(self, since_s: float) -> bool:
        """Tell whether the port of a server that was told to stop at `since_s` may be closed."""
        now_s = time.monotonic()
        if now_s - since_s > GRACE_S:
            return True
        # late clients get 503 for a while, but not for ever
        is_late = now_s - since_s > LATE_S
        return not self.on_their_way and (is_late or now_s - max(self.last_s, since_s) > QUIET_S)


class _Body:
    """The body of a request, read to its end before an error is sent.

    A connection that is closed while the client is sending is reset, and the answer is lost.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # a client that waits for 100 Continue sends nothing before it has read the answer
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
            while not self.is_read and size_bytes < DISCARD_BYTES:
                size_bytes += len((await self.receive()).get("body", b""))
        await self._send(message)


def is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine: localhost or an address of loopback."""
    name = host.strip().lower()
    # a port may follow: [::1]:8000 or 127.0.0.1:8000; ::1 alone has colons but no port
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
    """Return uvicorn's protocol class, changed to refuse bytes that are no HTTP in JSON."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class JsonProtocol(H11Protocol):
        """HTTP that answers in JSON to bytes that are no HTTP."""

        def send_400_response(self, msg: str) -> None:
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


def server_of(door: Door) -> Any:
    """Return uvicorn's server for a door; it writes no log and handles no signals."""
    import uvicorn

    config = uvicorn.Config(
        door,
        http=_http_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # uvicorn would close the port at once; `serve` lets late requests get their 503 first
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    return server


def listening_on(port: int) -> socket.socket:
    """Return a socket on loopback; raise `InputError` for a port in use."""
    listening = socket.socket()
    try:
        # the port of a server that ended a moment ago is in TIME_WAIT, and would be refused
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        got = f"{port}: {error.strerror}"
        raise errors.InputError("a free port", got, "0 takes a free one") from None
    return listening


def serve(service: Service, port: int, told: Callable[[int], None]) -> None:
    """Serve on loopback until SIGTERM or SIGINT, then answer the requests on their way and return.

    `port` 0 takes any free one; `told` is called with it. Raises `InputError` for one in use.
    """
    door = Door(application(service))
    server = server_of(door)

    def stop(number: int, frame: object) -> None:
        if door.ending:
            # the second signal ends it at once
            server.should_exit = True
        door.ending = True

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not door.ending and not serving.done():
            await asyncio.sleep(0.05)
        # a signal handler can only set a flag: this loop looks at it 20 times a second
        since_s = time.monotonic()
        service.close()
        while not server.should_exit and not serving.done() and not door.is_quiet(since_s):
            await asyncio.sleep(0.05)
        server.should_exit = True
        await serving

    with listening_on(port) as listening:
        handled = (signal.SIGTERM, signal.SIGINT)
        old_handlers = {number: signal.signal(number, stop) for number in handled}
        try:
            told(listening.getsockname()[1])
            asyncio.run(run())
        finally:
            service.close()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

"""A service on loopback: who may come in, and how it ends.

A server on loopback is reached by every program of the machine, also by a browser that shows a
page of somebody else's. Such a page may send requests to 127.0.0.1 (their answers it cannot read),
or let the name of its own host point there, which browsers take for the same origin. So the door
asks two questions: is the host that the request names loopback, and is the page that sends it, if
one does, of this very server? Else the answer is 403.

After SIGTERM or SIGINT nothing new is begun: late requests get 503 until those on their way are
answered and no more have come for `QUIET_S`, then the port is closed.
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
"""What a server that is told to stop gives the requests on their way."""
QUIET_S = 0.5
"""How long nothing may have come in before its port is closed."""
LATE_S = 5.0
"""How long it says 503 at most to clients that do not stop asking."""
DISCARD_BYTES = 2**28
"""Most of a body that is read only so that its sender comes to read why it is refused."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Door:
    """An ASGI application in front of another: it lets in, counts, and lets senders finish."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.ending = False
        self.on_their_way = 0
        self.last_s = 0.0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or say why not."""
        if scope["type"] != "http":
            return
        self.last_s = time.monotonic()
        refusal = self._refusal(scope)
        body = _Body(scope, receive, send)
        if refusal:
            status, text = refusal
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
        """Return the status and words with which a request is turned away, None to let it in."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "localhost")
        if not is_loopback(host):
            return 403, f"a host on loopback, such as 127.0.0.1; got {shown(host)}"
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return 403, f"requests of this server's own pages; got one of {shown(origin)}"
        site = headers.get(b"sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin") and scope["method"] not in ("GET", "HEAD"):
            return 403, f"requests of this server's own pages; got a {shown(site)} one"
        if self.ending:
            return 503, "the server ends; ask another"
        return None

    def is_quiet(self, since_s: float) -> bool:
        """Tell whether the port may be closed, for a server that ends since then."""
        now_s = time.monotonic()
        if now_s - since_s > GRACE_S:
            return True
        is_late = now_s - since_s > LATE_S
        return not self.on_their_way and (is_late or now_s - max(self.last_s, since_s) > QUIET_S)


class _Body:
    """The two ends of a request: before an error is sent, what its sender still sends is read.

    A connection that is closed while the client is sending is reset, and the answer is lost.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # a client that waits for 100 Continue sends nothing before it has read the answer
        self.is_read = any(name == b"expect" for name, _ in scope["headers"])

    async def receive(self) -> Message:
        """Return the next part of the body."""
        message = await self._receive()
        self.is_read = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            size_bytes = 0
            while not self.is_read and size_bytes < DISCARD_BYTES:
                size_bytes += len((await self.receive()).get("body", b""))
        await self._send(message)


def is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine: localhost or an address of loopback."""
    name = host.strip().lower()
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
    """Return uvicorn's HTTP over h11, with what is no HTTP refused in JSON as all else is."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class JsonProtocol(H11Protocol):
        """HTTP whose answer to what is no HTTP is JSON, too."""

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
    """Return uvicorn's server for a door; it is silent, and leaves signals to others."""
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
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    return server


def listening_on(port: int) -> socket.socket:
    """Return a socket on loopback; raise `InputError` for a port in use."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        got = f"{port}: {error.strerror}"
        raise errors.InputError("a free port", got, "0 takes a free one") from None
    return listening


def serve(service: Service, port: int, told: Callable[[int], None]) -> None:
    """Serve on loopback until SIGTERM or SIGINT, then answer what is on its way and return.

    `port` 0 takes any free one; `told` is called with it. Raises `InputError` for one in use.
    """
    door = Door(application(service))
    server = server_of(door)

    def stop(number: int, frame: object) -> None:
        if door.ending:
            server.should_exit = True  # told twice: at once
        door.ending = True

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not door.ending and not serving.done():
            await asyncio.sleep(0.05)
        since_s = time.monotonic()
        service.close()
        while not server.should_exit and not serving.done() and not door.is_quiet(since_s):
            await asyncio.sleep(0.05)
        server.should_exit = True
        await serving

    with listening_on(port) as listening:
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, stop) for number in handled}
        try:
            told(listening.getsockname()[1])
            asyncio.run(run())
        finally:
            service.close()
            for number, handler in before.items():
                signal.signal(number, handler)

"""What stands before every route: the key, the host's name, the body's size, and what a browser may do with the page.

Plain ASGI: nothing here reads a body or holds a response back.
"""

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modicum.serve.errors import ApiError, bad_request
from modicum.serve.limits import Limits

# Free of the key: what a balancer asks, and the page, which must load before anyone can type a key into it.
OPEN_PATHS = ("/health", "/", "/page/")
_OWNER = "modicum.owner"  # of the scope
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Guard:
    """Refuses a request before `app` sees it.

    keys: any one of them opens; none for a server without. hosts: names that may stand in the Host header, which keeps
    other sites' scripts from reaching a server on the reader's own machine under a name of theirs; None for any.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], hosts: Sequence[str] | None, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._keys = [key.encode() for key in keys]
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        body = _Body(receive, self._limits)
        try:
            self._check(scope)
            await self._app(scope, body.receive, send_guarded)
        except ApiError as error:
            await error.response()(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _host_name(headers.get("host", "")).lower() not in self._hosts:
            raise ApiError(421, "this server is not known under that host name", code="unknown_host")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limits.body_bytes:
            raise _too_large(self._limits)
        if not self._keys or _is_open(scope):
            return
        known = self._known(headers.get("authorization", ""))
        if not any(known):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope[_OWNER] = known.index(True)

    def _known(self, authorization: str) -> list[bool]:
        """For each key whether it is the one that was given."""
        scheme, _, given = authorization.partition(" ")
        offered = given.strip().encode("latin-1")  # as headers are read
        # every key is compared, in the same time whatever differs
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        return [scheme.lower() == "bearer" and match for match in matches]


def owner_of(request: Request) -> int | None:
    """Which of the keys a request came with; None where there are none."""
    owner: int | None = request.scope.get(_OWNER)
    return owner


class _Body:
    """Counts what comes, and does not wait for ever for it."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._bytes = 0
        self._deadline: float | None = None  # of the whole body, not of each of its pieces
        self._whole = False

    async def receive(self) -> Message:
        if self._whole:  # what comes now is the disconnect, whenever that is
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._limits.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._bytes > self._limits.body_bytes:
            raise _too_large(self._limits)
        return message


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] == "OPTIONS" or path in OPEN_PATHS or path.startswith("/page/")


def _host_name(header: str) -> str:
    return header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header


def _too_large(limits: Limits) -> ApiError:
    error = bad_request(f"the body is larger than {limits.body_bytes:,} bytes", None, "body_too_large")
    error.status = 413
    return error

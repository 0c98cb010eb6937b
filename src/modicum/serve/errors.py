"""What a client is told when something fails: OpenAI's error object, with the status that says whose fault it is."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from modicum.generate import ModelFault
from modicum.store import UserError

LOG = logging.getLogger("modicum.serve")


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetails


class ApiError(HTTPException):
    """An answer that is a refusal. status: HTTP's; param: the request's field at fault; code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> ErrorBody:
        """The object a client reads, before a stream and inside one."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The same as a response of its own."""
        return json_response(self.body(), status=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client can mend it."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, *, retry_seconds: int = 1) -> ApiError:
    """503: try again later."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(retry_seconds)})


def shutting_down() -> ApiError:
    """503: another server, or the next one here, will answer."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def from_exception(error: BaseException) -> ApiError:
    """What became of a request, in words for its client; what is our fault goes to the log, without the request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ModelFault):
        LOG.error("a request failed: %s", error)
        return ApiError(500, str(error), code="model_fault")
    if isinstance(error, UserError):
        return bad_request(str(error))
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, so that a text that is not valid Unicode cannot break the answer about it."""
    return Response(json.dumps(value, allow_nan=False), status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make every refusal of `app` an error object."""

    async def refused(_: Request, error: Exception) -> Response:
        return from_exception(error).response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _from_validation(error).response()

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(UserError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, refused)


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first fault, with the field's name; the value itself, which may be private, is not repeated."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    # a union's branch stands in the place too, such as `list[TextPart]`; only names and numbers are the client's
    named = ".".join(part for part in place if part.replace("_", "").isalnum())
    if isinstance(first.get("input"), bytes):  # the body was not read as JSON, and must not be: see the CORS rules
        return ApiError(415, "expected a JSON object, sent as content type application/json")
    return bad_request(f"{named}: {first['msg']}" if named else first["msg"], named or None)

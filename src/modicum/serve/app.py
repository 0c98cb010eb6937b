"""The application: which path does what."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from modicum import __version__
from modicum.serve.chat import complete_chat
from modicum.serve.completions import complete_text
from modicum.serve.errors import ErrorBody, install, json_response
from modicum.serve.guard import Guard
from modicum.serve.metrics import Metrics
from modicum.serve.requests import ChatRequest, CompletionRequest
from modicum.serve.responses import ChatCompletion, Health, Model, ModelList, TextCompletion
from modicum.serve.runs import Curve, RunList, Runs, Samples
from modicum.serve.service import Served, Service

PAGE = Path(__file__).with_name("page")
_REFUSED: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "A refusal"}}
# of each event; its data is an object like that of a whole answer, a refusal, or [DONE]
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


@dataclass(frozen=True)
class Access:
    """Who may come in. keys, hosts: as Guard has them. origins: sites whose scripts may call (CORS)."""

    keys: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    origins: Sequence[str] = field(default=())


def create_app(service: Service, *, access: Access | None = None, runs: Path | None = None) -> Any:
    """The ASGI application. It starts and closes `service` with itself; runs: the directory of the page's second
    view."""
    access = access or Access()
    metrics = Metrics()
    service.on_first = metrics.first_token.observe

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.start())
        yield
        await service.close()
        loading.cancel()  # nobody waits for the thread that it goes on in

    middleware = [Middleware(Guard, keys=access.keys, hosts=access.hosts, limits=service.limits)]
    if access.origins:
        cors = Middleware(CORSMiddleware, allow_origins=list(access.origins), allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    app = FastAPI(
        title="modicum",
        version=__version__,
        lifespan=lifespan,
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    install(app)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM | _REFUSED)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await complete_chat(service, request, body)

    @app.post("/v1/completions", response_model=TextCompletion, responses=_STREAM | _REFUSED)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await complete_text(service, request, body)

    @app.get("/v1/models", response_model=ModelList, responses=_REFUSED)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service.ready())]})

    @app.get("/v1/models/{name}", response_model=Model, responses=_REFUSED)
    async def model(name: str) -> Response:
        return json_response(_model(service.ready(name)))

    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        return json_response({"status": service.state}, status=200 if service.state == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_REFUSED)
    async def numbers() -> str:
        return metrics.page(None if service.served is None else service.served.engine.numbers())

    if runs is not None:
        _add_runs(app, Runs(runs))
    _add_page(app)
    return metrics.around(app)


def _model(served: Served) -> Model:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "modicum",
        "context": served.generator.context,
    }


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/runs", response_model=RunList, responses=_REFUSED)
    def all_runs() -> Response:
        return json_response(runs.all())

    @app.get("/runs/{name}/samples", response_model=Samples, responses=_REFUSED)
    def samples(name: str) -> Response:
        return json_response(runs.samples(name))

    @app.get("/runs/{name}/{stage}", response_model=Curve, responses=_REFUSED)
    def curve(name: str, stage: str, cursor: str = "") -> Response:
        return json_response(runs.curve(name, stage, cursor))


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", StaticFiles(directory=PAGE))

"""A reward model as an HTTP server, in the protocol that `remote_rm_url` speaks.

    python -m recipes.reward_model.serve model.path=FOLDER port=5000

    POST /get_reward {"query": [...], "prompts": [...], "labels": [...]} -> {"rewards", "scores", "extra_logs"}
    GET  /health     GET /metrics (Prometheus)

A query is a prompt with its response. 401: no or another token; 413: the request is too large; 422: it is no such
object, with the reason; 503 with Retry-After: too many texts wait. Ctrl-C or SIGTERM ends it, once requests under way
are answered.
"""

import asyncio
import hmac
import math
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from components.models.attention import attention_note, choose_attention
from components.models.reward_model import RewardModel
from components.net.hub import find_model
from components.process.streams import accept_any_text
from components.ranges import Count, Positive, Range
from components.rewards.servers import TOKEN, reward_token
from components.train.config import FrozenConfig, PassLimits
from core.placement import detect_devices
from training.options.config import CommandLine
from training.options.help import print_help
from training.options.schema import ConfigError, Options

from .config import ScorerOptions

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from pydantic import BaseModel, FailFast, ValidationError
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.responses import JSONResponse

    from components.net.http_server import BUSY, GONE, BodyLimits, read_json, server_config

    from .service import QueueFull, Scored, ScoringService
except ModuleNotFoundError as error:
    sys.exit(f"serve: {error.name} is missing; run: bash scripts/setup.sh recipes serve")

UNAUTHORIZED, INVALID, FAILED = 401, 422, 500


@dataclass(kw_only=True)
class ServeConfig(Options):
    """Serve the scores of a reward model over HTTP."""

    ADAPTERS: ClassVar = ("openrlhf.serve_rm",)

    model: ScorerOptions = field(default_factory=ScorerOptions)
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets everybody in who can reach this machine."""
    port: Annotated[int, Range(least=0, most=65535)] = 5000
    """Port; 0 takes a free one."""
    token: str | None = None
    """Bearer token that requests have to bring. Default: TROUPE_REWARD_TOKEN of the environment; without both none."""
    normalize: bool = False
    """Shift and scale scores by the mean and std in the model's config.json."""
    max_text_tokens: Count | None = None
    """Tokens of a text with its end token. Of a longer one the last ones are read, which is counted. Default:
    2048, or the model's positions where these are fewer."""
    batch_size: Count | None = None
    """Texts in one pass, at most. Default: any number."""
    max_tokens: Count = 16384
    """Tokens in one pass, with padding, at most; a longer text goes alone."""
    queue_size: Count = 8192
    """Texts that may wait; beyond that requests get status 503."""
    max_request_mb: Positive = 64.0
    """Size of a request's body."""
    max_text_mb: Positive = 1.0
    """Size of one text in it; a larger one is refused with status 413."""
    max_values: Count = 1_000_000
    """Number of values in a request's body, with those in labels; more are refused with status 413."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is faster on a GPU. A score then depends a little on what shares its pass."""
    grace_s: Count = 60
    """Seconds in which requests under way are answered when the server is stopped. So many has a client for the head of
    a request, and for its body."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token = reward_token(self.token)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not self.model.path:
            yield "model.path is empty; set it to the folder of a reward model"


class Query(BaseModel):
    """The body of a request."""

    # An error for each of a million wrong values would take gigabytes.
    query: Annotated[list[str], FailFast()]
    prompts: list[Any] | None = None
    labels: list[Any] | None = None


def load_service(config: ServeConfig) -> ScoringService:
    """The model and its tokenizer, ready to score.

    Raises:
        ConfigError: there is no such model, or it cannot be used as asked.
    """
    try:
        text_model = find_model(config.model.path).get_text_config()
        positions = getattr(text_model, "max_position_embeddings", None) or math.inf
        max_len = config.max_text_tokens or min(2048, positions)
        if max_len > positions:
            raise ValueError(f"max_text_tokens={max_len} is more than its {positions} positions; set it lower")
        limits = PassLimits(max_tokens=config.max_tokens, max_sequences=config.batch_size or 0)
        model = RewardModel(
            config.model.path,
            FrozenConfig(precision=config.precision, limits=limits),
            normalize=config.normalize,
            value_head_prefix=config.model.value_head_prefix,
            attn_implementation=config.model.attn_implementation,
        )
        tokenizer = config.model.tokenizer()
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    return ScoringService(
        model, tokenizer, max_len=int(max_len), max_tokens=config.max_tokens, queue_size=config.queue_size
    )


def make_app(service: ScoringService, config: ServeConfig) -> FastAPI:
    """The server's three addresses."""
    limits = BodyLimits(
        mb=config.max_request_mb,
        values=config.max_values,
        text_mb=config.max_text_mb,
        seconds=config.grace_s,
        all_mb=4 * config.max_request_mb,
        names={"mb": "max_request_mb", "values": "max_values", "text_mb": "max_text_mb"},
    )

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(lifespan=running, openapi_url=None)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        began = time.monotonic()
        check_token(request, config.token)
        async with limits.body(request) as body:
            asked = read_query(body, service.queue_size)
            with service.metrics.under_way.track_inprogress():
                found = await scored_for(request, service, asked.query)
        rewards = [one.reward for one in found]
        odd = next((number for number, reward in enumerate(rewards) if not math.isfinite(reward)), None)
        if odd is not None:
            raise HTTPException(FAILED, f"the model's score of query {odd} is {rewards[odd]}; try precision=fp32")
        service.metrics.requests.labels(200).inc()
        service.metrics.seconds.observe(time.monotonic() - began)
        logs = {"truncated": [float(one.truncated) for one in found]}
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": logs})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not service.is_alive:
            raise HTTPException(BUSY, "nothing is scored any more; start the server again")
        return {"status": "ok", "model": config.model.path}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_token(request, config.token)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(AnyHTTPException)
    async def refused(_: Request, error: AnyHTTPException) -> JSONResponse:
        service.metrics.requests.labels(error.status_code).inc()
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        service.metrics.requests.labels(FAILED).inc()
        return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, FAILED)

    return app


def check_token(request: Request, token: str | None) -> None:
    """Refuse who does not bring the token; how long that takes says nothing about it."""
    given = request.headers.get("Authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(UNAUTHORIZED, f"send the header Authorization: Bearer <{TOKEN}>")


async def scored_for(request: Request, service: ScoringService, texts: list[str]) -> list[Scored]:
    """Score texts for as long as their caller waits."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    scoring, leaving = asyncio.create_task(service.score(texts)), asyncio.create_task(gone())
    try:
        await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise HTTPException(GONE, "the caller has gone")
        return scoring.result()
    except QueueFull as error:
        raise HTTPException(BUSY, str(error), {"Retry-After": "1"}) from error
    except ValueError as error:
        raise HTTPException(INVALID, str(error)) from error
    except asyncio.CancelledError as error:
        raise HTTPException(BUSY, "the server stops, and its time for that is over") from error
    finally:
        scoring.cancel()
        leaving.cancel()


def read_query(body: bytes, most_texts: int) -> Query:
    """What the body of a request asks for."""
    try:
        asked = Query.model_validate(read_json(body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise HTTPException(INVALID, f"{where}: {first['msg']}; send an object with a list of texts, query") from error
    except ValueError as error:
        raise HTTPException(INVALID, f"the body is no JSON: {error}") from error
    odd = next((number for number, prompt in enumerate(asked.prompts or ()) if not isinstance(prompt, str)), None)
    if odd is not None:
        raise HTTPException(INVALID, f"prompts.{odd}: it is no text; send an object with a list of texts, query")
    for name in ("prompts", "labels"):
        column = getattr(asked, name)
        if column is not None and len(column) != len(asked.query):
            raise HTTPException(INVALID, f"{len(asked.query)} in query, {len(column)} in {name}; send as many")
    if len(asked.query) > most_texts:
        raise HTTPException(INVALID, f"{len(asked.query)} texts, and no more than {most_texts} may wait; send fewer")
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; returns the exit code: 0 stopped, 2 bad input."""
    accept_any_text()
    arguments = sys.argv[1:] if arguments is None else arguments
    if (code := print_help(ServeConfig, arguments, "serve")) is not None:
        return code
    line = CommandLine(ServeConfig, arguments)
    try:
        config = line.config()
        asked = config.model.attn_implementation
        config.model.attn_implementation = choose_attention(asked, detect_devices())
        for note in filter(None, [*line.notes, attention_note(asked, detect_devices())]):
            print(f"serve: {note}", file=sys.stderr)
        with bound(config.host, config.port) as listener:
            serve(listener, load_service(config), config)
    except (ValueError, OSError) as error:
        print(f"serve: {line.renamed(str(error))}", file=sys.stderr)
        return 2
    return 0


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which takes no connection before the model is there.

    Raises:
        OSError: somebody else has the address, or there is none.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"host={host} port={port} cannot be taken ({error.strerror}); set another") from error
    return listener


def serve(listener: socket.socket, service: ScoringService, config: ServeConfig) -> None:
    """Answer requests until a signal comes.

    Raises:
        OSError: another server has begun to listen at the same address.
    """
    listener.listen()
    options = server_config(make_app(service, config), config.grace_s, timeout_graceful_shutdown=config.grace_s)
    # uvicorn answers requests under way, and then raises the signal again, for the handler before its own.
    server = uvicorn.Server(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # of a signal that comes before uvicorn listens to them
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    access = "with a token" if config.token else "to everybody who can reach it"
    print(f"serve: {config.model.path} at http://{host}:{port}/get_reward, {access}", flush=True)
    server.run(sockets=[listener])
    print("serve: stopped", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the model is loaded
        sys.exit(130)

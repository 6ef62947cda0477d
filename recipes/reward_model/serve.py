"""HTTP server for a reward model, with the protocol of OpenRLHF's `remote_rm_url`.

    python -m recipes.reward_model.serve model.path=FOLDER port=5000

    POST /get_reward {"query": [...], "prompts": [...], "labels": [...]} -> {"rewards", "scores", "extra_logs"}
    GET  /health     GET /metrics (Prometheus)

A query is a prompt followed by its response. Status codes: 401, the bearer token is missing or wrong; 413, the request
is too large; 422, the body is invalid (the reply has the reason); 503 with Retry-After, the queue is full. Ctrl-C or
SIGTERM stops the server after it has answered the requests in progress.
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
from components.net.hub_requests import find_model
from components.process.streams import accept_any_text
from components.ranges import Count, Positive, Range
from components.rewards.server_token import TOKEN, reward_token
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
    """Address to listen on. The default accepts connections from this machine only, 0.0.0.0 from every network."""
    port: Annotated[int, Range(least=0, most=65535)] = 5000
    """Port to listen on. 0 selects a free port."""
    token: str | None = None
    """Bearer token that requests must send. Default: the environment variable TROUPE_REWARD_TOKEN; if it is not set, no
    token is required."""
    normalize: bool = False
    """Normalise scores with the mean and standard deviation in the model's config.json."""
    max_text_tokens: Count | None = None
    """Maximum number of tokens in a text, with its end token. Of a longer text only the last tokens are read, and the
    metric `truncated` counts it. Default: 2048, or the model's maximum position if that is smaller."""
    batch_size: Count | None = None
    """Maximum number of texts in one forward pass. Default: no limit."""
    max_tokens: Count = 16384
    """Maximum number of tokens in one forward pass, with padding. A longer text gets a pass of its own."""
    queue_size: Count = 8192
    """Maximum number of waiting texts. Further requests get status 503."""
    max_request_mb: Positive = 64.0
    """Maximum size of a request body in MB. Larger ones get status 413."""
    max_text_mb: Positive = 1.0
    """Maximum size of one text in MB. A request with a larger one gets status 413."""
    max_values: Count = 1_000_000
    """Maximum number of JSON values in a request body, including labels. Requests with more get status 413."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model. `bf16` is faster on a GPU, but a score then varies slightly with the batch it is in."""
    grace_s: Count = 60
    """Timeout in seconds for answering the requests in progress when the server stops. A client has the same time to
    send the head of a request, and to send its body."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token = reward_token(self.token)

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if not self.model.path:
            yield "model.path is empty; set it to the folder of a reward model"


class Query(BaseModel):
    """Body of a request to /get_reward."""

    # FailFast stops at the first wrong value: an error for each of a million values would take gigabytes.
    query: Annotated[list[str], FailFast()]
    prompts: list[Any] | None = None
    labels: list[Any] | None = None


def load_service(config: ServeConfig) -> ScoringService:
    """Load the model and its tokenizer.

    Raises:
        ConfigError: the model does not exist, or it does not support the options.
    """
    try:
        text_model = find_model(config.model.path).get_text_config()
        positions = getattr(text_model, "max_position_embeddings", None) or math.inf
        max_len = config.max_text_tokens or min(2048, positions)
        if max_len > positions:
            raise ValueError(f"max_text_tokens={max_len} exceeds the {positions} positions of the model; set it lower")
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
    """Return the FastAPI app with its three endpoints."""
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
            query = read_query(body, service.queue_size)
            with service.metrics.under_way.track_inprogress():
                scored = await score_until_disconnect(request, service, query.query)
        rewards = [text.reward for text in scored]
        for number, reward in enumerate(rewards):
            # JSON has no NaN, and a client could not use it.
            if not math.isfinite(reward):
                raise HTTPException(FAILED, f"the model's score of query {number} is {reward}; try precision=fp32")
        service.metrics.requests.labels(200).inc()
        service.metrics.seconds.observe(time.monotonic() - began)
        logs = {"truncated": [float(text.truncated) for text in scored]}
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": logs})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not service.is_alive:
            raise HTTPException(BUSY, "the scoring task has ended; restart the server")
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
    """Raise HTTPException 401 unless the request has the bearer token. The comparison takes constant time."""
    authorization = request.headers.get("Authorization", "")
    if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise HTTPException(UNAUTHORIZED, f"send the header Authorization: Bearer <{TOKEN}>")


async def score_until_disconnect(request: Request, service: ScoringService, texts: list[str]) -> list[Scored]:
    """Score texts. Cancel them if the client disconnects, so that no pass is spent on them.

    Raises:
        HTTPException: 499 the client has disconnected, 503 the queue is full or the server stops, 422 a text cannot be
            tokenized.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    scoring = asyncio.create_task(service.score(texts))
    disconnect = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({scoring, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise HTTPException(GONE, "the client has disconnected")
        return scoring.result()
    except QueueFull as error:
        raise HTTPException(BUSY, str(error), {"Retry-After": "1"}) from error
    except ValueError as error:
        raise HTTPException(INVALID, str(error)) from error
    except asyncio.CancelledError as error:
        raise HTTPException(BUSY, "the server has stopped before the texts were scored; send them again") from error
    finally:
        scoring.cancel()
        disconnect.cancel()


def read_query(body: bytes, most_texts: int) -> Query:
    """Parse the body of a request.

    Args:
        body: JSON.
        most_texts: maximum number of texts in one request.

    Raises:
        HTTPException: 422, the body is invalid.
    """
    try:
        query = Query.model_validate(read_json(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise HTTPException(INVALID, f"{place}: {first['msg']}; send an object with a list of texts, query") from error
    except ValueError as error:
        raise HTTPException(INVALID, f"the body is not valid JSON: {error}") from error
    for number, prompt in enumerate(query.prompts or ()):
        if not isinstance(prompt, str):
            raise HTTPException(INVALID, f"prompts.{number} is not a text; send an object with a list of texts, query")
    count = len(query.query)
    for name in ("prompts", "labels"):
        column = getattr(query, name)
        if column is not None and len(column) != count:
            raise HTTPException(INVALID, f"{count} in query, {len(column)} in {name}; send lists of equal length")
    if count > most_texts:
        raise HTTPException(INVALID, f"{count} texts in one request, but the queue holds {most_texts}; send fewer")
    return query


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal stops the server. Return the exit code: 0 stopped, 2 invalid options."""
    accept_any_text()
    arguments = sys.argv[1:] if arguments is None else arguments
    if (code := print_help(ServeConfig, arguments, "serve")) is not None:
        return code
    command_line = CommandLine(ServeConfig, arguments)
    try:
        config = command_line.config()
        attention = config.model.attn_implementation
        config.model.attn_implementation = choose_attention(attention, detect_devices())
        for note in filter(None, [*command_line.notes, attention_note(attention, detect_devices())]):
            print(f"serve: {note}", file=sys.stderr)
        # Before the model is loaded, so that a port that is in use is reported at once.
        with bind(config.host, config.port) as listener:
            serve(listener, load_service(config), config)
    except (ValueError, OSError) as error:
        print(f"serve: {command_line.renamed(str(error))}", file=sys.stderr)
        return 2
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. It does not listen yet, so clients cannot connect.

    Raises:
        OSError: the address is in use, or it does not exist.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"host={host} port={port}: cannot bind this address ({error.strerror}); set another") from error
    return listener


def serve(listener: socket.socket, service: ScoringService, config: ServeConfig) -> None:
    """Answer requests until SIGINT or SIGTERM.

    Raises:
        OSError: another server has started to listen on the same address in the meantime.
    """
    listener.listen()
    options = server_config(make_app(service, config), config.grace_s, timeout_graceful_shutdown=config.grace_s)
    # uvicorn answers the requests in progress, and then raises the signal again for the handler that was set before.
    server = uvicorn.Server(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # for a signal before uvicorn installs its own handlers
    host, port = listener.getsockname()[:2]
    # In a URL an IPv6 address is written in brackets.
    host = f"[{host}]" if ":" in host else host
    access = "with a token" if config.token else "without a token"
    print(f"serve: {config.model.path} at http://{host}:{port}/get_reward, {access}", flush=True)
    server.run(sockets=[listener])
    print("serve: stopped", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the model is loaded
        sys.exit(130)

"""An HTTP server that speaks as OpenAI's does, in the loop of the engine, and records as tokens what goes through it.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

Each episode has an API key of its own, so that the requests of clients that know nothing of episodes are told apart.
A request that begins with the whole history of one of the episode's sequences continues with that one: what is new is
written out and appended, and no token before it is touched. Any other request begins another sequence, and so does one
that comes while that sequence grows. The turns of all of them count for `agent.max_turns`. Answers are drawn whole,
also where a stream is request for.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from uvicorn.server import ServerState

    from components.net.http_server import BodyLimits, server_config
except ModuleNotFoundError as error:
    raise ValueError(f"OpenAIAgentExecutor needs {error.name}; run: bash scripts/setup.sh recipes endpoint") from error

from agents.episode import Episode, EpisodeTask, Policy
from agents.openai_protocol import CompletionRequest, Message, RequestError, as_events, plain, read_request, rest_of
from agents.rendering import feedback_tokens, refuse_rendered
from components.data.text import render_prompt

if TYPE_CHECKING:
    from components.generate.async_engine import Generation
    from components.generate.config import SamplingConfig

BACKLOG = 1024
"""Connections that may wait to be taken."""
BODY_MB, TEXT_MB, MOST_VALUES, MOST_DEPTH = 16.0, 2.0, 100_000, 100
"""Sizes of a request and of one text in it, its number of values, and of brackets in brackets: all of it is rendered
and tokenized in the loop of the engine."""


@dataclass(eq=False)
class Recording:
    """One sequence of an episode, as tokens and as its client sees it."""

    stream: int
    """Of its random numbers."""
    tools: list[dict[str, Any]]
    episode: Episode = field(default_factory=lambda: Episode([], 0))
    history: str | list[Message] = ""
    tail: str | None = ""
    """What the policy wrote at the end of a text and the client was not shown: a stop text and what came with it. None:
    an end token."""
    is_busy: bool = False
    """A response is being drawn."""

    def rest(self, request: CompletionRequest) -> Any:
        """What a request says further; None when it does not continue with all that is recorded."""
        if self.is_busy or not self.episode.turns or self.tools != request.tools:
            return None
        rest = rest_of(request.history, self.history)
        if isinstance(rest, str):
            # Clients add the stop text themselves; here it stands already.
            return None if self.tail is None or not rest.startswith(self.tail) else rest[len(self.tail) :]
        return rest


class Session:
    """What the clients of one episode request."""

    def __init__(self, task: EpisodeTask, policy: Policy) -> None:
        self.id = secrets.token_hex(8)
        self.api_key = f"{self.id}.{secrets.token_urlsafe(24)}"
        self.task = task
        self.limit = ""
        """The limit that a request has met."""
        self.is_aborted = False
        """The last response was not waited for."""
        self.drawing: set[asyncio.Task[Any]] = set()
        self._policy = policy
        self._recordings: list[Recording] = []

    def episodes(self) -> list[Episode]:
        """The sequences, that with the most turns first."""
        sequences = [recording.episode for recording in self._recordings if recording.episode.turns]
        return sorted(sequences, key=lambda episode: -len(episode.turns))

    async def draw(self, request: CompletionRequest, sampling: SamplingConfig) -> dict[str, Any]:
        """Draw responses and record them; RequestError when a request cannot be written out, or meets a limit."""
        turns = sum(len(recording.episode.turns) + recording.is_busy for recording in self._recordings)
        if turns + request.n > self._policy.max_turns:
            self._meet(f"{turns} turns were taken, of at most {self._policy.max_turns}", "max_turns")
        try:
            recordings, tokens = self._find(request)
        except ValueError as error:
            raise RequestError(str(error)) from error
        while len(recordings) < request.n:
            recordings.append(Recording(len(self._recordings), request.tools))
            self._recordings.append(recordings[-1])
        for recording in recordings:
            recording.is_busy = True
        try:
            draws = [self._policy.draw(tokens, sampling, request.stop, recording.stream) for recording in recordings]
            drawn = await asyncio.gather(*draws)
        except ValueError as error:
            self._meet(str(error), "context_length_exceeded")
        finally:
            for recording in recordings:
                recording.is_busy = False
        turns_of = zip(recordings, drawn, strict=True)
        choices = [self._record(recording, request, tokens, *turn) for recording, turn in turns_of]
        return request.completion(choices, len(tokens), sum(keep for _, keep in drawn))

    def _meet(self, limit: str, code: str) -> NoReturn:
        self.limit = limit
        raise RequestError(limit, code)

    def _find(self, request: CompletionRequest) -> tuple[list[Recording], list[int]]:
        """The sequence that a request continues with, or none, and the tokens that the policy is to read."""
        encoder = self._policy.encoder
        rests = [(recording, recording.rest(request)) for recording in self._recordings]
        continued = [(recording, rest) for recording, rest in rests if rest is not None]
        if not continued:
            refuse_rendered(encoder, [message.model_dump() for message in request.messages], self.task.prompt)
            text = render_prompt(plain(request.history), encoder.tokenizer, tools=request.tools)
            return [], list(self.task.tokens) if text == self.task.prompt else encoder.encode_prompt(text)
        recording, rest = max(continued, key=lambda pair: len(pair[0].history))
        before = recording.episode.tokens
        return [recording], before + feedback_tokens(encoder, plain(rest), before)

    def _record(
        self, recording: Recording, request: CompletionRequest, tokens: list[int], drawn: Generation, keep: int
    ) -> dict[str, Any]:
        """Append what was read and written; returns the choice that the client is given."""
        episode, tokenizer = recording.episode, self._policy.tokenizer
        episode.observe(tokens[len(episode.tokens) :])
        if not episode.turns:
            episode.prompt_length = len(tokens)
        turn = episode.act(drawn, keep)
        written = episode.tokens[turn.start :]
        text = str(tokenizer.decode(written, skip_special_tokens=True))
        # A client does not expect to see its own stop texts; the policy has written them nevertheless.
        cut = min((place for stop in request.stop if (place := text.find(stop)) >= 0), default=len(text))
        ends = {str(tokenizer.decode(written[-1:], skip_special_tokens=skips)) for skips in (False, True)}
        recording.tail = text[cut:] if len(ends) == 1 else None
        text = text[:cut]
        tokens_text = [str(tokenizer.decode([token])) for token in written]
        choice = request.choice(text, len(episode.turns), turn.finish, tokens_text, drawn.logprobs[:keep])
        if request.prompt:
            recording.history = request.prompt + text
        else:
            recording.history = [*request.messages, Message(**choice["message"])]
        return choice


class Server:
    """Listens on this machine alone, in the loop in which it is made."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._limits = BodyLimits(mb=BODY_MB, values=MOST_VALUES, text_mb=TEXT_MB, depth=MOST_DEPTH)
        routes = [
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={RequestError: _refused, HTTPException: _refused})
        # A client that keeps its connection must not find it closed just when it asks again.
        config = server_config(app, log_config=None, lifespan="off", timeout_keep_alive=3600)
        config.load()
        # Not uvicorn's Server, which would take the signals of the run.
        self._state = ServerState()
        protocol = partial(config.http_protocol_class, config, self._state, {})
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        begin = asyncio.get_running_loop().create_server(protocol, sock=listening, backlog=BACKLOG)
        self._begun = asyncio.ensure_future(begin)

    @contextmanager
    def session(self, task: EpisodeTask, policy: Policy) -> Iterator[Session]:
        """Serve the clients of an episode."""
        session = Session(task, policy)
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            for drawing in session.drawing:
                drawing.cancel()

    async def close(self) -> None:
        """End it, and its connections."""
        (await self._begun).close()
        for connection in list(self._state.connections):
            connection.shutdown()

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key.partition(".")[0])
        # In a time that tells nothing of the right one.
        if session is None or not hmac.compare_digest(key.encode(), session.api_key.encode()):
            raise RequestError("this is the API key of no episode that is being run", "invalid_api_key", status=401)
        return session

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "troupe"}]})

    async def _complete(self, http: Request) -> Response:
        session = self._session(http)
        async with self._limits.body(http) as body:
            request, sampling = read_request(body, session.task.sampling)
        drawing = asyncio.create_task(session.draw(request, sampling))
        watching = asyncio.create_task(_watch(http, session, drawing))
        session.drawing.add(drawing)
        try:
            whole = await drawing
        except asyncio.CancelledError:
            raise RequestError("the client or its episode has ended", "aborted", status=503) from None
        finally:
            watching.cancel()
            session.drawing.discard(drawing)
        session.is_aborted = False
        if not request.stream:
            return JSONResponse(whole)
        return Response(as_events(whole, request.stream_options), media_type="text/event-stream")


async def _watch(http: Request, session: Session, drawing: asyncio.Task[Any]) -> None:
    """End a request whose client hangs up."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    session.is_aborted = drawing.cancel()


async def _refused(_: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(error.detail, status=error.status_code)
    # Clients would try again what fails again.
    return JSONResponse(error.body, error.status, {"x-should-retry": "false"})

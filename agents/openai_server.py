"""HTTP server with OpenAI's API in the engine's event loop, which records all requests and responses as tokens.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

Each episode has its own API key, which assigns the requests of its clients to it. If a request begins with the complete
history of a sequence of the episode, it continues this sequence: only the new part is rendered and appended, and
earlier tokens stay unchanged. Any other request starts a new sequence, and so does a request that arrives while the
sequence is being extended. The turns of all sequences count towards `agent.max_turns`. Responses are generated as a
whole, also for requests with `stream`.
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
"""Maximum number of connections that wait to be accepted."""
# Limits of a request, because it is rendered and tokenized in the engine's event loop, which a large one would block.
BODY_MB = 16.0
"""Maximum size of a request in MB."""
TEXT_MB = 2.0
"""Maximum size of one text of a request in MB."""
MOST_VALUES = 100_000
"""Maximum number of JSON values of a request."""
MOST_DEPTH = 100
"""Maximum nesting depth of a request."""


@dataclass(eq=False)
class Recording:
    """One sequence of an episode: its tokens, and its history as seen by the client."""

    stream: int
    """Number of its random stream."""
    tools: list[dict[str, Any]]
    episode: Episode = field(default_factory=lambda: Episode([], 0))
    history: str | list[Message] = ""
    tail: str | None = ""
    """End of the policy's last text that was not sent to the client: a stop text and the text after it. None if the
    text ended with an end token."""
    is_busy: bool = False
    """True while a response is being generated."""

    def rest(self, request: CompletionRequest) -> Any:
        """Return the new part of a request, or None if the request does not continue this sequence."""
        if self.is_busy or not self.episode.turns or self.tools != request.tools:
            return None
        rest = rest_of(request.history, self.history)
        if isinstance(rest, str):
            # Clients append the stop text themselves, and the recorded tokens have it already.
            if self.tail is None or not rest.startswith(self.tail):
                return None
            return rest[len(self.tail) :]
        return rest


class Session:
    """State of one episode's clients."""

    def __init__(self, task: EpisodeTask, policy: Policy) -> None:
        self.id = secrets.token_hex(8)
        self.api_key = f"{self.id}.{secrets.token_urlsafe(24)}"
        self.task = task
        self.limit = ""
        """Message of the limit that a request has exceeded, or an empty string."""
        self.is_aborted = False
        """True if the client disconnected before the last response."""
        self.drawing: set[asyncio.Task[Any]] = set()
        self._policy = policy
        self._recordings: list[Recording] = []

    def episodes(self) -> list[Episode]:
        """Return the sequences, the one with the most turns first."""
        sequences = [recording.episode for recording in self._recordings if recording.episode.turns]
        return sorted(sequences, key=lambda episode: -len(episode.turns))

    async def draw(self, request: CompletionRequest, sampling: SamplingConfig) -> dict[str, Any]:
        """Generate responses and record them.

        Raises:
            RequestError: the request cannot be rendered, or exceeds a limit.
        """
        turns = sum(len(recording.episode.turns) + recording.is_busy for recording in self._recordings)
        if turns + request.n > self._policy.max_turns:
            limit = f"agent.max_turns={self._policy.max_turns}"
            self._exceed(f"the episode has {turns} turns, and {request.n} more exceed {limit}", "max_turns")
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
            self._exceed(str(error), "context_length_exceeded")
        finally:
            for recording in recordings:
                recording.is_busy = False
        turns_of = zip(recordings, drawn, strict=True)
        choices = [self._record(recording, request, tokens, *turn) for recording, turn in turns_of]
        return request.completion(choices, len(tokens), sum(keep for _, keep in drawn))

    def _exceed(self, limit: str, code: str) -> NoReturn:
        self.limit = limit
        raise RequestError(limit, code)

    def _find(self, request: CompletionRequest) -> tuple[list[Recording], list[int]]:
        """Return the sequence that a request continues (or none), and the tokens that the policy reads."""
        encoder = self._policy.encoder
        rests = [(recording, recording.rest(request)) for recording in self._recordings]
        continued = [(recording, rest) for recording, rest in rests if rest is not None]
        if not continued:
            refuse_rendered(encoder, [message.model_dump() for message in request.messages], self.task.prompt)
            text = render_prompt(plain(request.history), encoder.tokenizer, tools=request.tools)
            if text == self.task.prompt:
                return [], list(self.task.tokens)
            return [], encoder.encode_prompt(text)
        recording, rest = max(continued, key=lambda pair: len(pair[0].history))
        before = recording.episode.tokens
        return [recording], before + feedback_tokens(encoder, plain(rest), before)

    def _record(
        self, recording: Recording, request: CompletionRequest, tokens: list[int], drawn: Generation, keep: int
    ) -> dict[str, Any]:
        """Append the new prompt tokens and the generated tokens, and return the choice for the client."""
        episode = recording.episode
        tokenizer = self._policy.tokenizer
        episode.observe(tokens[len(episode.tokens) :])
        if not episode.turns:
            episode.prompt_length = len(tokens)
        turn = episode.act(drawn, keep)
        written = episode.tokens[turn.start :]
        text = str(tokenizer.decode(written, skip_special_tokens=True))
        # Clients expect a text without their stop texts. The recorded tokens keep them, because the policy wrote them.
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
    """HTTP server on the loopback address, in the event loop in which it is constructed."""

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
        # A long keep-alive, because a connection closed while the client sends its next request would cause an error.
        config = server_config(app, log_config=None, lifespan="off", timeout_keep_alive=3600)
        config.load()
        # uvicorn's Server is not used, because it would replace the run's signal handlers.
        self._state = ServerState()
        protocol = partial(config.http_protocol_class, config, self._state, {})
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        begin = asyncio.get_running_loop().create_server(protocol, sock=listening, backlog=BACKLOG)
        self._begun = asyncio.ensure_future(begin)

    @contextmanager
    def session(self, task: EpisodeTask, policy: Policy) -> Iterator[Session]:
        """Serve the clients of an episode inside the block."""
        session = Session(task, policy)
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            for drawing in session.drawing:
                drawing.cancel()

    async def close(self) -> None:
        """Stop the server, and close its connections."""
        (await self._begun).close()
        for connection in list(self._state.connections):
            connection.shutdown()

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key.partition(".")[0])
        # compare_digest takes the same time for any key, so that the right one cannot be guessed from the time.
        if session is None or not hmac.compare_digest(key.encode(), session.api_key.encode()):
            raise RequestError("the API key does not belong to a running episode", "invalid_api_key", status=401)
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
            response = await drawing
        except asyncio.CancelledError:
            raise RequestError("the client or its episode has ended", "aborted", status=503) from None
        finally:
            watching.cancel()
            session.drawing.discard(drawing)
        session.is_aborted = False
        if not request.stream:
            return JSONResponse(response)
        return Response(as_events(response, request.stream_options), media_type="text/event-stream")


async def _watch(http: Request, session: Session, drawing: asyncio.Task[Any]) -> None:
    """Cancel the generation of a request when its client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    session.is_aborted = drawing.cancel()


async def _refused(_: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(error.detail, status=error.status_code)
    # Without the header clients would send the request again, which would fail again.
    return JSONResponse(error.body, error.status, {"x-should-retry": "false"})

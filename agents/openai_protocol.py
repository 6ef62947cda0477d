"""Requests and responses of OpenAI's chat completions and completions."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Json, PositiveInt, ValidationError

from agents.tools import OPEN, parse_calls
from components.generate.config import EVALUATION_STEP, SamplingConfig

_ids = itertools.count()


class RequestError(Exception):
    """Raised for a request that is rejected. `body` is the JSON body of the response."""

    def __init__(self, message: str, code: str = "invalid_value", param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


class Function(BaseModel):
    name: str
    arguments: Json[dict[str, Any]] | dict[str, Any]


class ToolCall(BaseModel):
    id: str = ""
    type: str = "function"
    function: Function


class Part(BaseModel):
    text: str


def _text(content: Any) -> Any:
    """Join the parts of a message's content."""
    if isinstance(content, list):
        return "".join(Part.model_validate(part).text for part in content)
    return content or ""


class Message(BaseModel):
    """A chat message, with the fields that chat templates read."""

    role: str
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def compared(self) -> Any:
        """Return a value for comparisons. It omits surrounding white space and call ids of the policy's messages."""
        if self.role == "assistant":
            return self.content.strip(), [call.function for call in self.tool_calls or []]
        return self


class CompletionRequest(BaseModel):
    """A request for chat completions (`messages`) or for completions of a text (`prompt`)."""

    model_config = ConfigDict(extra="forbid")

    # FailFast, because one error per wrong value of a long list would take far more memory than the list.
    messages: Annotated[list[Message], FailFast()] = []
    prompt: str = ""
    model: str = "policy"
    tools: Annotated[list[dict[str, Any]], FailFast()] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: PositiveInt = sys.maxsize
    max_completion_tokens: PositiveInt = sys.maxsize
    stop: Annotated[list[str], FailFast(), BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    n: PositiveInt = 1
    logprobs: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Any = None
    """Ignored: the run's random numbers are used, so that it can be repeated."""
    user: Any = None
    """Ignored."""

    @property
    def history(self) -> str | list[Message]:
        """The messages or the text of the request."""
        return self.messages or self.prompt

    def choice(self, text: str, turn: int, finish: str, tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
        """Return a turn of the policy as one item of the response's `choices`.

        Args:
            text: text of the turn for the client.
            turn: number of the turn, from 1.
            finish: finish reason of the turn. Any value but "length" is reported as "stop".
            tokens: text of each token.
            logprobs: log-probability of each token in nats.
        """
        choice: dict[str, Any] = {"finish_reason": "stop", "logprobs": None}
        if finish == "length":
            choice["finish_reason"] = "length"
        if self.logprobs:
            content = [
                {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            # `content` is the format of chat completions, the other two fields are that of completions.
            choice["logprobs"] = {"content": content, "tokens": tokens, "token_logprobs": logprobs}
        if self.prompt:
            return {**choice, "text": text}
        calls = []
        if self.tools and self.tool_choice == "auto":
            calls = parse_calls(text)
        # If a call cannot be parsed, the client gets the text unchanged.
        if not calls or any(call.error for call in calls):
            return {**choice, "message": {"role": "assistant", "content": text}}
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        # Ids have nine letters and digits, because some chat templates reject others.
        tool_calls = [
            {"index": place, "id": f"call{100 * turn + place:05d}", "type": "function", "function": function}
            for place, function in enumerate(functions)
        ]
        before = text.partition(OPEN if OPEN in text else "{")[0]
        message = {"role": "assistant", "content": before, "tool_calls": tool_calls}
        return {**choice, "finish_reason": "tool_calls", "message": message}

    def completion(self, choices: list[dict[str, Any]], read: int, written: int) -> dict[str, Any]:
        """Return the response. `read` and `written` are the numbers of prompt and completion tokens."""
        kind = "chat.completion" if self.messages else "text_completion"
        head = {"id": f"{kind}-{next(_ids)}", "object": kind, "created": int(time.time()), "model": self.model}
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return head | {"choices": [{"index": i, **choice} for i, choice in enumerate(choices)], "usage": usage}


def _json(body: bytes) -> Any:
    """Parse JSON in UTF-8. The limits of the body were checked before."""
    return json.loads(body.decode())


def read_request(body: bytes, sampling: SamplingConfig) -> tuple[CompletionRequest, SamplingConfig]:
    """Parse a request, and return it with its sampling parameters. A field that is null counts as absent.

    Temperature, top_p and top_k must be the run's, because log-probabilities are trained at them. Evaluations have
    their own temperature and ignore the client's values. A token limit of the client can only lower the run's limit.

    Raises:
        RequestError: a field is missing, unknown, or has an unsupported value.
    """
    try:
        fields = {name: value for name, value in dict(_json(body)).items() if value is not None}
        request = CompletionRequest.model_validate(fields)
        if bool(request.messages) == bool(request.prompt) or not all(request.stop):
            raise ValueError("send either messages or a prompt that is one text, without an empty stop")
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RequestError(f"{where}: {fault['msg']}; omit unsupported fields", fault["type"], where) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the request cannot be read: {error}") from error
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        of_run = getattr(sampling, name)
        if value not in (None, of_run) and sampling.step != EVALUATION_STEP:
            reason = f"this run samples and trains with {name}={of_run}, not with {value}"
            raise RequestError(f"{reason}; omit {name}", param=name)
    most = min(sampling.max_new_tokens, request.max_tokens, request.max_completion_tokens)
    return request, replace(sampling, max_new_tokens=most)


def rest_of(history: str | list[Message], before: str | list[Message]) -> Any:
    """Return the part of `history` after `before`, or None if it begins differently or no message follows."""
    start = history[: len(before)]
    rest = history[len(before) :]
    if isinstance(start, str) or isinstance(before, str):
        return rest if start == before else None
    if [message.compared() for message in start] != [message.compared() for message in before]:
        return None
    return rest or None


def plain(history: str | list[Message]) -> str | list[Mapping[str, Any]]:
    """Return the history in the form that a chat template reads."""
    if isinstance(history, str):
        return history
    return [message.model_dump(exclude_none=True) for message in history]


def as_events(response: dict[str, Any], options: dict[str, Any]) -> str:
    """Return a response as server-sent events. Its content is in one event, because it is generated as a whole."""
    if response["object"] == "chat.completion":
        choices = [{"delta": choice.pop("message"), **choice} for choice in response["choices"]]
        response |= {"object": "chat.completion.chunk", "choices": choices}
    parts = [response]
    if options.get("include_usage"):
        parts = [response | {"usage": None}, response | {"choices": []}]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"

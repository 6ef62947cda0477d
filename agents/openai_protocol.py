"""Completions as OpenAI's clients ask for them and read them."""

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
    """A request that is refused."""

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
    """Join the texts that a content may consist of."""
    return "".join(Part.model_validate(part).text for part in content) if isinstance(content, list) else content or ""


class Message(BaseModel):
    """A chat message; what chat templates do not read is left out."""

    role: str
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def compared(self) -> Any:
        """What makes it the same as another: of the policy's, not the space around a text, nor the ids of calls."""
        if self.role == "assistant":
            return self.content.strip(), [call.function for call in self.tool_calls or []]
        return self


class CompletionRequest(BaseModel):
    """A request for responses to chat messages, or for how a text continues."""

    model_config = ConfigDict(extra="forbid")

    # An error for each of many wrong values would take far more memory than these.
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
    """Not read: random numbers are the run's, so that it can be repeated. Nor is the next."""
    user: Any = None

    @property
    def history(self) -> str | list[Message]:
        """What came before."""
        return self.messages or self.prompt

    def choice(self, text: str, turn: int, finish: str, tokens: list[str], logprobs: list[float]) -> dict[str, Any]:
        """What the policy wrote in its `turn`-th turn, as one of the choices.

        Args:
            text: for the client.
            turn: counted from 1.
            finish: "length", or anything else for an end that was meant.
            tokens: the text of each.
            logprobs: of each, in nats.
        """
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        # Each of the two endpoints has a form of its own, and its clients read that one.
        both = {"content": content, "tokens": tokens, "token_logprobs": logprobs}
        finish_reason = "length" if finish == "length" else "stop"
        choice = {"finish_reason": finish_reason, "logprobs": both if self.logprobs else None}
        if self.prompt:
            return {**choice, "text": text}
        calls = parse_calls(text) if self.tools and self.tool_choice == "auto" else []
        # With one that cannot be read, the client gets all as it was written.
        if not calls or any(call.error for call in calls):
            return {**choice, "message": {"role": "assistant", "content": text}}
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        # Some templates take no ids but of nine letters and digits.
        tool_calls = [
            {"index": place, "id": f"call{100 * turn + place:05d}", "type": "function", "function": function}
            for place, function in enumerate(functions)
        ]
        before = text.partition(OPEN if OPEN in text else "{")[0]
        message = {"role": "assistant", "content": before, "tool_calls": tool_calls}
        return {**choice, "finish_reason": "tool_calls", "message": message}

    def completion(self, choices: list[dict[str, Any]], read: int, written: int) -> dict[str, Any]:
        """The whole response; `read` and `written` are numbers of tokens."""
        kind = "chat.completion" if self.messages else "text_completion"
        head = {"id": f"{kind}-{next(_ids)}", "object": kind, "created": int(time.time()), "model": self.model}
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return head | {"choices": [{"index": i, **choice} for i, choice in enumerate(choices)], "usage": usage}


def _json(body: bytes) -> Any:
    """JSON in UTF-8, in which the limits of the body were checked."""
    return json.loads(body.decode())


def read_request(body: bytes, sampling: SamplingConfig) -> tuple[CompletionRequest, SamplingConfig]:
    """Read a request, and how its responses are drawn; a field that is null counts as absent.

    Temperature, top_p and top_k can only be the run's, as log-probabilities are trained at them. Evaluations play at
    temperatures of their own, and do not read a client's values. A limit of tokens can only lower the run's.

    Raises:
        RequestError: a field is missing, unknown, or not to be had.
    """
    try:
        fields = {name: value for name, value in dict(_json(body)).items() if value is not None}
        request = CompletionRequest.model_validate(fields)
        if bool(request.messages) == bool(request.prompt) or not all(request.stop):
            raise ValueError("it needs messages, or a prompt that is one text, and no empty stop")
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RequestError(f"{where}: {fault['msg']}; leave out what is not supported", fault["type"], where) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the request cannot be read: {error}") from error
    for name in ("temperature", "top_p", "top_k"):
        value, of_run = getattr(request, name), getattr(sampling, name)
        if value not in (None, of_run) and sampling.step != EVALUATION_STEP:
            why = f"this run draws with {name}={of_run}, at which log-probabilities are trained, and not {value}"
            raise RequestError(f"{why}; leave it out", param=name)
    most = min(sampling.max_new_tokens, request.max_tokens, request.max_completion_tokens)
    return request, replace(sampling, max_new_tokens=most)


def rest_of(history: str | list[Message], before: str | list[Message]) -> Any:
    """What follows `before` in `history`; None when it begins otherwise, or no message follows."""
    start, rest = history[: len(before)], history[len(before) :]
    if isinstance(start, str) or isinstance(before, str):
        return rest if start == before else None
    is_same = [message.compared() for message in start] == [message.compared() for message in before]
    return rest or None if is_same else None


def plain(history: str | list[Message]) -> str | list[Mapping[str, Any]]:
    """The same for a chat template."""
    return history if isinstance(history, str) else [message.model_dump(exclude_none=True) for message in history]


def as_events(whole: dict[str, Any], options: dict[str, Any]) -> str:
    """The same response as server-sent events: all of it in one, as it is drawn whole."""
    if whole["object"] == "chat.completion":
        choices = [{"delta": choice.pop("message"), **choice} for choice in whole["choices"]]
        whole |= {"object": "chat.completion.chunk", "choices": choices}
    parts = [whole | {"usage": None}, whole | {"choices": []}] if options.get("include_usage") else [whole]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"

"""Tools for a policy: typed Python functions that it calls by what it writes, and an agent that runs them.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    {"name": "add", "parameters": {"a": 1, "b": 2}}                                       Llama 3
    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]                         Mistral
    <tool_call><function=add><parameter=a>1</parameter>...</function></tool_call>         Qwen3-Coder

A call that cannot be read or run gives an error that the policy can read; it never ends the episode.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call

from agents.environments import TextEnvironment
from agents.user_code import Overdue, in_thread, in_time
from components.data.cells import without_surrogates
from components.process.child_process import cut_text, short_line
from components.registry import load

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOO_DEEP = "too many brackets"

_FUNCTION, _END = "<function=", "</function>"
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"')


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be run; "" where it can be tried."""


def parse_calls(text: str) -> list[Call]:
    """The calls in what a policy wrote, in order; it raises nothing.

    Without marks of its own, a JSON object with a `name` and `arguments` is a call too, wherever it stands.
    """
    if OPEN in text:
        return [_enclosed_call(part) for part in text.split(OPEN)[1:]]
    return list(_plain_calls(text)) or [_function_call(part) for part in text.split(_FUNCTION)[1:]]


def _enclosed_call(part: str) -> Call:
    if part.lstrip().startswith(_FUNCTION):
        return _function_call(part.lstrip().removeprefix(_FUNCTION))
    return _call(*_enclosed(part))


def _function_call(part: str) -> Call:
    """A call of which this follows `<function=`."""
    name, _, rest = part.partition(">")
    body, end, _ = rest.partition(_END)
    if not end:
        return Call("", error=f"the call does not end: there is no {_END}")
    return Call(name.strip(), {key: _value(text) for key, text in _PARAMETER.findall(body)})


def _value(text: str) -> Any:
    """JSON, where it is some, else the text itself."""
    value, error, end = _json_at(text, 0)
    return text if error or text[end:].strip() else value


def _plain_calls(text: str) -> Iterator[Call]:
    end = 0
    for start in re.finditer(r'\{\s*"', text):
        if start.start() < end:
            continue
        value, error, after = _json_at(text, start.start())
        if not error:
            end = after
            if isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value):
                yield _call(value, "")
        elif error == TOO_DEEP or _BEGUN.match(text, start.start()):
            # Meant as one: what was cut off or mistyped gives an error, and does not pass for a final response.
            yield _call(None, error)
            return


def _enclosed(part: str) -> tuple[Any, str]:
    """The JSON between the tags, of which the closing one may be missing; or why it cannot be read."""
    value, error, after = _json_at(part, len(part) - len(part.lstrip()))
    rest = part[after:].lstrip()
    if not error and rest and not rest.startswith(CLOSE):
        error = f"expected {CLOSE}, found {rest[:20]!r}"
    return value, error


def _json_at(text: str, start: int) -> tuple[Any, str, int]:
    """The JSON that begins there, why it cannot be read, and where it ends."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        return None, TOO_DEEP, start
    except ValueError as error:
        return None, short_line(str(error)), start
    return value, "", end


def _call(value: Any, error: str) -> Call:
    example = '{"name": "...", "arguments": {...}}'
    if error:
        return Call("", error=f"the call is no valid JSON ({error}); write {example}")
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        # Some models write them as text in the text.
        arguments = _json_at(arguments, 0)[0]
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return Call("", error=f"the call is no object with a name and arguments; write {example}")
    return Call(value["name"], arguments)


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    function: Callable[..., Any]
    """Takes them by name, checks and converts them; may be async."""

    @staticmethod
    def of(function: Callable[..., Any]) -> Tool:
        """Make a tool of a function with typed arguments and a docstring, whose `Args:` say what they are.

        Raises:
            ValueError: an argument has no type, or one that has no JSON schema, or cannot be given by name.
        """
        name, text = function.__name__, inspect.getdoc(function) or ""
        for argument in inspect.signature(function).parameters.values():
            if argument.annotation is argument.empty or argument.kind not in (
                argument.KEYWORD_ONLY,
                argument.POSITIONAL_OR_KEYWORD,
            ):
                raise ValueError(f"argument {argument.name!r} of the tool {name!r} needs a type and a name of its own")
        if not text:
            raise ValueError(f"the tool {name!r} needs a docstring; the policy reads it")
        anything: Any = function
        try:
            parameters = TypeAdapter(anything).json_schema()
            checked = validate_call(config=ConfigDict(coerce_numbers_to_str=True))(anything)
        except Exception as error:
            raise ValueError(f"the tool {name!r} has a type without a JSON schema: {short_line(str(error))}") from error
        for key, schema in parameters["properties"].items():
            schema.pop("title", None)  # enums and classes have none
            if line := re.search(rf"^\s+{key}(?: \(.*\))?: (.*)", text, re.MULTILINE):
                schema["description"] = line[1]
        return Tool(name, re.split(r"\n\s*(?:Args|Returns|Raises):\n", text)[0].strip(), parameters, checked)

    @property
    def schema(self) -> dict[str, Any]:
        """The way chat templates and APIs describe it."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """What the function gives for these, as text; plain functions run in a thread.

        Raises:
            ValueError: the arguments do not fit; the message says which and why. Whatever else the function raises.
        """
        is_async = inspect.iscoroutinefunction(self.function)
        try:
            call = self.function(**arguments) if is_async else in_thread(lambda: self.function(**arguments))
            result = await call
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ValueError("; ".join(faults)) from error
        if not isinstance(result, str):
            try:
                result = json.dumps(result, ensure_ascii=False)
            except (TypeError, ValueError):
                result = str(result)
        return without_surrogates(result)


def python_tool(limits: Any = None) -> Tool:
    """Make a tool that runs Python in the sandbox; docs/security.md describes its boundary.

    Args:
        limits: `Limits` of plugins/sandbox/sandbox.py. Default: the limits there.

    Raises:
        MissingPlugin: there is no sandbox.
    """
    return load("tool", "python", "python_tool")(limits)


class ToolAgentInstance(TextEnvironment):
    """An agent that may call tools; a response without a call is its last, and is scored.

    The prompt is to be plain text (data.apply_chat_template=false): it becomes the user's message, after a system
    message with the tools.
    """

    tools: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()
    """Functions, or what `Tool.of` or `python_tool` has made."""
    instructions: ClassVar[str] = (
        "You may call these tools. For each call write a JSON object with the tool's name and its arguments:\n"
        f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}\n'
        "The results come in the next message. A response without a call is final."
    )
    """What the policy reads first, before the tools; "" leaves the tools out too. A tokenizer whose chat template has a
    place for tools describes them in its own way instead, as its model has learnt it, unless a subclass changes this.
    """
    result_role: ClassVar[str] = "tool"
    """Of the messages with results; `user` for a template without tools, which then get one for all results of a turn.
    They are text where `chat` is False."""
    result_text: ClassVar[str] = "\n<tool_response>\n{}\n</tool_response>\n"
    """Around a result where `chat` is False."""
    max_result_chars: ClassVar[int] = 2000
    """Of one result; the rest is cut off, with a note."""
    max_calls: ClassVar[int] = 16
    """That are run in one turn."""
    tool_timeout_s: ClassVar[float] = 30.0
    """Seconds that all calls of one turn have together; the policy reads which gave no result in them. Below
    agent.step_timeout_s."""

    def __init__(self) -> None:
        made = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in self.tools]
        self._tools = {tool.name: tool for tool in made}
        self._logs = {"tool_calls": 0, "tool_errors": 0}  # for a `reset` that leaves this class's out

    @abstractmethod
    async def score(self, answer: str, label: Any) -> float:
        """How good a final response is, from 0 to 1; also its reward."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Begin with the tools and the prompt."""
        self._logs = {"tool_calls": 0, "tool_errors": 0}
        prompt = states["observation"]
        schemas = [json.dumps(tool.schema, ensure_ascii=False) for tool in self._tools.values()]
        system = "\n".join([self.instructions, *schemas]) if self.instructions else ""
        if not self.chat:
            return {"observation": f"{system}\n\n{prompt}" if system else prompt}
        messages = [{"role": "system", "content": system}] if system else []
        has_own_words = self.instructions != ToolAgentInstance.instructions
        tools = [] if has_own_words else [tool.schema for tool in self._tools.values()]
        return {"observation": [*messages, {"role": "user", "content": prompt}], "tools": tools}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Run the calls, or score the response."""
        calls = parse_calls(states["action_text"])
        if not calls:
            score = await self.score(states["action_text"], states["label"])
            logs = dict(self._logs)
            return {"rewards": score, "scores": score, "environment_feedback": "", "done": True, "extra_logs": logs}
        before = self._logs["tool_calls"]
        ends_at = time.monotonic() + self.tool_timeout_s
        results = [await self._result(number, call, ends_at) for number, call in enumerate(calls)]
        if self.chat and self.result_role == "user":
            # Many templates want the roles to alternate.
            feedback: Any = [{"role": "user", "content": "\n".join(results)}]
        elif self.chat:
            # Some templates take no ids but of nine letters and digits.
            ids = (f"call{before + number:05d}" for number in range(len(results)))
            feedback = [
                {"role": self.result_role, "tool_call_id": name, "content": result}
                for name, result in zip(ids, results, strict=True)
            ]
        else:
            feedback = "".join(self.result_text.replace("{}", result, 1) for result in results)
        return {"rewards": 0.0, "environment_feedback": feedback, "done": False, "extra_logs": dict(self._logs)}

    async def _result(self, number: int, call: Call, ends_at: float) -> str:
        """Run one call, until `ends_at` (time.monotonic); what the policy reads of it."""
        self._logs["tool_calls"] += 1
        try:
            if number >= self.max_calls:
                raise ValueError(f"at most {self.max_calls} calls are run at once; this one was not")
            if call.error:
                raise ValueError(call.error)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise Overdue
            text = await in_time(self._tools[call.name].run(call.arguments), left_s)
            return cut_text(text, self.max_result_chars)
        except Overdue:
            reason = f"{call.name} gave no result in {self.tool_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the policy is to learn from it
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            reason = f"{kind}{short_line(str(error))}"
        self._logs["tool_errors"] += 1
        return f"error: {reason}"

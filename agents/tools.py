"""Tools of a policy: typed Python functions, the parser of calls, and an environment that runs them.

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    {"name": "add", "parameters": {"a": 1, "b": 2}}                                       Llama 3
    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]                         Mistral
    <tool_call><function=add><parameter=a>1</parameter>...</function></tool_call>         Qwen3-Coder

A call that cannot be parsed or run does not end the episode. Its result is an error message for the policy.
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
from components.process.child_process import short_line
from components.process.programs import cut_text
from components.registry import load

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
TOO_DEEP = "too many brackets"

_FUNCTION = "<function="
_END = "</function>"
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"')


@dataclass(frozen=True)
class Call:
    """A parsed call of the policy."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Reason for which the call cannot be run, or an empty string."""


def parse_calls(text: str) -> list[Call]:
    """Return the calls in a text of the policy, in order. A malformed call has an `error`; nothing is raised.

    In a text without tags, any JSON object with `name` and `arguments` is a call.
    """
    if OPEN in text:
        return [_enclosed_call(part) for part in text.split(OPEN)[1:]]
    return list(_plain_calls(text)) or [_function_call(part) for part in text.split(_FUNCTION)[1:]]


def _enclosed_call(part: str) -> Call:
    if part.lstrip().startswith(_FUNCTION):
        return _function_call(part.lstrip().removeprefix(_FUNCTION))
    return _call(*_enclosed(part))


def _function_call(part: str) -> Call:
    """Parse the text after `<function=` as a call."""
    name, _, rest = part.partition(">")
    body, end, _ = rest.partition(_END)
    if not end:
        return Call("", error=f"the call does not end: {_END} is missing")
    return Call(name.strip(), {key: _value(text) for key, text in _PARAMETER.findall(body)})


def _value(text: str) -> Any:
    """Parse a text as JSON. Return the text itself if it is not JSON."""
    value, error, end = _json_at(text, 0)
    if error or text[end:].strip():
        return text
    return value


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
            # The beginning looks like a call. A truncated or mistyped call must be an error and not a final response.
            yield _call(None, error)
            return


def _enclosed(part: str) -> tuple[Any, str]:
    """Return the JSON value between the tags and an error message. The closing tag may be missing."""
    value, error, after = _json_at(part, len(part) - len(part.lstrip()))
    rest = part[after:].lstrip()
    if not error and rest and not rest.startswith(CLOSE):
        error = f"expected {CLOSE}, found {rest[:20]!r}"
    return value, error


def _json_at(text: str, start: int) -> tuple[Any, str, int]:
    """Return the JSON value at a position, an error message, and the end position."""
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
        return Call("", error=f"the call is not valid JSON ({error}); write {example}")
    arguments = None
    if isinstance(value, dict):
        arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # Some models write the arguments as a string that contains JSON.
        arguments = _json_at(arguments, 0)[0]
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return Call("", error=f"the call is not an object with a name and arguments; write {example}")
    return Call(value["name"], arguments)


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., Any]
    """Sync or async function. It takes keyword arguments, and checks and converts them."""

    @staticmethod
    def from_function(function: Callable[..., Any]) -> Tool:
        """Create a tool from a function with typed arguments and a docstring, whose `Args:` describe the arguments.

        Raises:
            ValueError: an argument has no type, its type has no JSON schema, or it cannot be passed by name.
        """
        name = function.__name__
        text = inspect.getdoc(function) or ""
        for argument in inspect.signature(function).parameters.values():
            if argument.annotation is argument.empty or argument.kind not in (
                argument.KEYWORD_ONLY,
                argument.POSITIONAL_OR_KEYWORD,
            ):
                raise ValueError(f"argument {argument.name!r} of the tool {name!r} needs a type and must have a name")
        if not text:
            raise ValueError(f"the tool {name!r} needs a docstring, which describes it to the policy")
        anything: Any = function
        try:
            parameters = TypeAdapter(anything).json_schema()
            checked = validate_call(config=ConfigDict(coerce_numbers_to_str=True))(anything)
        except Exception as error:
            raise ValueError(f"the tool {name!r} has a type without a JSON schema: {short_line(str(error))}") from error
        for key, schema in parameters["properties"].items():
            schema.pop("title", None)  # schemas of enums and classes have no title
            if described := re.search(rf"^\s+{key}(?: \(.*\))?: (.*)", text, re.MULTILINE):
                schema["description"] = described[1]
        return Tool(name, re.split(r"\n\s*(?:Args|Returns|Raises):\n", text)[0].strip(), parameters, checked)

    @property
    def schema(self) -> dict[str, Any]:
        """Description of the tool in the format of chat templates and OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function, and return its result as text. A sync function runs in a thread.

        Raises:
            ValueError: the arguments are invalid. The message names them.
            Exception: any error of the function.
        """
        try:
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(**arguments)
            else:
                result = await in_thread(lambda: self.function(**arguments))
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
    """Return a tool that runs Python code in the sandbox. docs/security.md describes the boundary of the sandbox.

    Args:
        limits: `Limits` of plugins/sandbox/sandbox.py. Default: the default limits there.

    Raises:
        MissingPlugin: the sandbox plug-in is missing.
    """
    return load("tool", "python", "python_tool")(limits)


class ToolAgentInstance(TextEnvironment):
    """Base class of environments with tools. A response without a call is final, and is scored.

    The prompt must be plain text (data.apply_chat_template=false). It becomes the user's message, after a system
    message with the tools.
    """

    tools: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()
    """Functions, or tools created by `Tool.from_function` or `python_tool`."""
    instructions: ClassVar[str] = (
        "You may call these tools. For each call write a JSON object with the tool's name and its arguments:\n"
        f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}\n'
        "The results come in the next message. A response without a call is final."
    )
    """Text before the schemas of the tools in the system message. "" omits the schemas too. If a subclass does not
    change it and the chat template supports tools, the template renders the tools instead, in the format on which the
    model was trained."""
    result_role: ClassVar[str] = "tool"
    """Role of the messages with results. `user` is for templates without tools, and puts all results of a turn in one
    message. Unused if `chat` is False."""
    result_text: ClassVar[str] = "\n<tool_response>\n{}\n</tool_response>\n"
    """Format of a result if `chat` is False."""
    max_result_chars: ClassVar[int] = 2000
    """Maximum number of characters of one result. The rest is replaced by a note."""
    max_calls: ClassVar[int] = 16
    """Maximum number of calls that are run in one turn."""
    tool_timeout_s: ClassVar[float] = 30.0
    """Timeout of all calls of a turn together in seconds. A call without a result gets an error message. Set it below
    agent.step_timeout_s."""

    def __init__(self) -> None:
        tools = [tool if isinstance(tool, Tool) else Tool.from_function(tool) for tool in self.tools]
        self._tools = {tool.name: tool for tool in tools}
        # for subclasses whose `reset` does not call the one of this class
        self._logs = {"tool_calls": 0, "tool_errors": 0}

    @abstractmethod
    async def score(self, answer: str, label: Any) -> float:
        """Return the score of a final response, from 0 to 1. It is also the reward."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - reserved
        """Return the instructions, the tools and the prompt."""
        self._logs = {"tool_calls": 0, "tool_errors": 0}
        prompt = states["observation"]
        messages = [{"role": "user", "content": prompt}]
        if self.instructions:
            schemas = [json.dumps(tool.schema, ensure_ascii=False) for tool in self._tools.values()]
            system = "\n".join([self.instructions, *schemas])
            messages.insert(0, {"role": "system", "content": system})
            prompt = f"{system}\n\n{prompt}"
        if not self.chat:
            return {"observation": prompt}
        tools: list[dict[str, Any]] = []
        # With instructions of a subclass the template must not render the tools a second time.
        if self.instructions == ToolAgentInstance.instructions:
            tools = [tool.schema for tool in self._tools.values()]
        return {"observation": messages, "tools": tools}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - reserved
        """Run the calls of a response, or score a final response."""
        calls = parse_calls(states["action_text"])
        if not calls:
            score = await self.score(states["action_text"], states["label"])
            logs = dict(self._logs)
            return {"rewards": score, "scores": score, "environment_feedback": "", "done": True, "extra_logs": logs}
        before = self._logs["tool_calls"]
        ends_at = time.monotonic() + self.tool_timeout_s
        results = [await self._result(number, call, ends_at) for number, call in enumerate(calls)]
        if self.chat and self.result_role == "user":
            # One message for all results, because many templates require alternating roles.
            feedback: Any = [{"role": "user", "content": "\n".join(results)}]
        elif self.chat:
            # Ids have nine letters and digits, because some chat templates reject others.
            ids = (f"call{before + number:05d}" for number in range(len(results)))
            feedback = [
                {"role": self.result_role, "tool_call_id": name, "content": result}
                for name, result in zip(ids, results, strict=True)
            ]
        else:
            feedback = "".join(self.result_text.replace("{}", result, 1) for result in results)
        return {"rewards": 0.0, "environment_feedback": feedback, "done": False, "extra_logs": dict(self._logs)}

    async def _result(self, number: int, call: Call, ends_at: float) -> str:
        """Run one call until the deadline `ends_at` (time.monotonic), and return its result or an error message."""
        self._logs["tool_calls"] += 1
        try:
            if number >= self.max_calls:
                raise ValueError(f"at most {self.max_calls} calls are run in one turn; this one was not run")
            if call.error:
                raise ValueError(call.error)
            if call.name not in self._tools:
                raise ValueError(f"there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}")
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise Overdue
            text = await in_time(self._tools[call.name].run(call.arguments), left_s)
            return cut_text(text, self.max_result_chars)
        except Overdue:
            reason = f"{call.name} gave no result in {self.tool_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the policy can learn from the message
            reason = short_line(str(error))
            if type(error) is not ValueError:
                reason = f"{type(error).__name__}: {reason}"
        self._logs["tool_errors"] += 1
        return f"error: {reason}"

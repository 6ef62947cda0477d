"""An agent whose tools are verl's: classes that a YAML file names, with `create`, `execute`, `calc_reward`, `release`.

    tools:
      - class_name: my_tools.Search     # a module beside the file, in a folder above it, or installed
        config: {top_k: 3}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}

It is the file of `agent.func_path`. The prompt has the tools' schemas already, and the run's reward scores the episode.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from uuid import uuid4

import yaml
from pydantic import BaseModel, ConfigDict

from agents.tools import Tool, ToolAgentInstance
from components.process.child_process import described
from components.rewards.score_functions import default_functions

Side = Literal["left", "right", "middle"]
_MISSING = "reads verl's tools by {'tools': [{'class_name', 'config', 'tool_schema'}, ...]}"


class _Flexible(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionSchema(_Flexible):
    """Name, description and JSON schema of the arguments of a function."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class OpenAIFunctionToolSchema(_Flexible):
    """Description of a tool as chat templates read it."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(_Flexible):
    """Result of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """Base class of tools, for files written for verl on a machine without it."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the description of the tool."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:  # noqa: ARG002 - verl's signature
        """Begin with an instance; returns its id, and what the tool says first."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Run the tool; returns its response, a reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:  # noqa: ARG002
        """Return how good the state of an instance is."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""


class Gsm8kTool(BaseTool):
    """Tool that scores a number as the response to a problem of GSM8K, as verl's own of this name."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._states = dict[str, dict[str, Any]]()

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        """Begin with the ground truth of the row, at `tools_kwargs` or its `create_kwargs`."""
        instance_id = instance_id or str(uuid4())
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._states[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Score the number among the arguments. One that is not better than the last earns -0.05."""
        name, state = "answer", self._states[instance_id]
        number = str(parameters.get(name, ""))
        state["response"] = number if number.startswith("#### ") else f"#### {number}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed {name}={number!r} {reward=}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:  # noqa: ARG002
        """Return 1 if the last number is the ground truth."""
        state = self._states[instance_id]
        score = default_functions()["gsm8k_flexible"]("", state["response"], str(state["ground_truth"]))
        return float(score)

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        """Forget the state."""
        del self._states[instance_id]


def _same(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else _same


_STANDINS: Mapping[str, Mapping[str, Any]] = {
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": Gsm8kTool},
    "verl.tools.schemas": {
        "OpenAIFunctionSchema": OpenAIFunctionSchema,
        "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
        "ToolResponse": ToolResponse,
    },
    "verl.utils.rollout_trace": {"rollout_trace_op": _same},
}
"""Modules of verl that files of tools import, where verl is not installed -> what is in them."""


@dataclass(frozen=True)
class ToolEntry:
    """One tool of the file."""

    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None
    """None: the class has it."""


@cache
def read_entries(path: str) -> tuple[ToolEntry, ...]:
    """Read the file of tools.

    Raises:
        ValueError: it is missing, or not of this form.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"tool_config_path={path} cannot be read: {error}") from error
    tools = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tool_config_path={path} has no list `tools`; this recipe {_MISSING}")
    entries = list[ToolEntry]()
    for number, tool in enumerate(tools):
        name, config = tool.get("class_name"), tool.get("config") or {}
        where = f"tool_config_path={path}, tool {number}"
        if not isinstance(name, str) or "." not in name:
            raise ValueError(f"{where}: class_name={name!r}; set it to module.Class")
        if (kind := config.get("type", "native")) != "native":
            raise ValueError(f"{where}: config.type={kind} is not here; write its tools as native ones")
        schema = tool.get("tool_schema")
        if schema is not None and "name" not in (schema.get("function") or {}):
            raise ValueError(f"{where}: tool_schema has no function.name; set it")
        entries.append(ToolEntry(name, config, schema))
    return tuple(entries)


def tool_schemas(path: str) -> list[dict[str, Any]]:
    """Return the descriptions of the tools of a file, as a chat template reads them; ValueError as `make_tools`."""
    entries = read_entries(path)
    if all(entry.schema is not None for entry in entries):
        for entry in entries:
            _find_class(path, entry, load=False)
        return [dict(entry.schema) for entry in entries if entry.schema is not None]
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in make_tools(path).values()]


@cache
def make_tools(path: str) -> Mapping[str, Any]:
    """Make the tools of a file, once in a process, by name.

    Raises:
        ValueError: a class cannot be found, or raises.
    """
    tools = dict[str, Any]()
    for entry in read_entries(path):
        made = _find_class(path, entry, load=True)
        try:
            schemas = importlib.import_module("verl.tools.schemas")
            read = schemas.OpenAIFunctionToolSchema.model_validate
            tool = made(config=dict(entry.config), tool_schema=entry.schema and read(entry.schema))
        except Exception as error:
            raise _failed(path, entry, "cannot be made", error) from error
        tools[tool.name] = tool
    return tools


def _find_class(path: str, entry: ToolEntry, load: bool) -> Any:
    """Return the class of a tool; without `load` only see that its module is there, and run nothing of it."""
    module, _, name = entry.class_name.rpartition(".")
    _provide_verl()
    file = Path(path).absolute()
    for folder in [*file.parents, Path.cwd()]:
        place = folder.joinpath(*module.split("."))
        is_there = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
        if is_there and str(folder) not in sys.path:
            # Last: a helper called random.py must not be taken for Python's own.
            sys.path.append(str(folder))
            break
    try:
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"there is no module {module}")
        return getattr(importlib.import_module(module), name) if load else None
    except (Exception, SystemExit) as error:
        raise _failed(path, entry, "cannot be imported", error) from error


def _provide_verl() -> None:
    """Let files of tools import what they use of verl, where it is not installed."""
    if "verl" not in sys.modules and importlib.util.find_spec("verl") is not None:
        return
    for name, content in _STANDINS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module.__dict__.setdefault("__path__", [])
        vars(sys.modules[name]).update(content)


def _failed(path: str, entry: ToolEntry, what: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(
        f"tool_config_path={path}: {entry.class_name} {what}: {reason}; put its module beside that file, or in a "
        "folder above it, or install it"
    )
    failed.add_note(trace)
    return failed


class AgentInstance(ToolAgentInstance):
    """An episode with verl's tools. Each call has an instance of its tool, as in verl's agent loop."""

    instructions = ""

    def __init__(
        self,
        tool_config_path: str,
        max_parallel_calls: int = 1,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: Side = "middle",
    ) -> None:
        """
        Args:
            tool_config_path: the file of tools.
            max_parallel_calls: calls of one turn that are run; the policy reads which were not.
            max_tool_response_length: characters of a result that are kept.
            tool_response_truncate_side: which of them: the first (left), the last (right), or half of each.
        """
        super().__init__()
        self._made = make_tools(tool_config_path)
        self._longest, self._side = max_tool_response_length, tool_response_truncate_side
        self.max_calls = max_parallel_calls  # pyright: ignore[reportAttributeAccessIssue] (of this episode)
        self.max_result_chars = sys.maxsize  # pyright: ignore[reportAttributeAccessIssue] (cut here)

    async def score(self, answer: str, label: Any) -> float:  # noqa: ARG002 - the run's reward scores the episode
        """Return 0: the run's reward scores the episode."""
        return 0.0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Begin with the prompt as it is, which has the tools' schemas."""
        self._logs = {"tool_calls": 0, "tool_errors": 0, "tool_reward": 0.0, "tool_score": 0.0}
        options = (states.get("extra_info") or {}).get("tools_kwargs") or {}
        for name, tool in self._made.items():
            schema = tool.tool_schema.function
            run = partial(self._call, tool, (options.get(name) or {}).get("create_kwargs") or {})
            self._tools[name] = Tool(name, schema.description, {}, _by_name(run))
        return {"observation": states["observation"]}

    async def _call(self, tool: Any, create_kwargs: Mapping[str, Any], arguments: dict[str, Any]) -> str:
        created = await tool.create(**_accepted(tool.create, {"create_kwargs": dict(create_kwargs), **create_kwargs}))
        # Up to 0.4 it returned the id alone.
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            response, reward, _ = await tool.execute(instance_id, arguments)
            self._logs["tool_reward"] += float(reward or 0.0)
            self._logs["tool_score"] = float(await tool.calc_reward(instance_id) or 0.0)
        finally:
            await tool.release(instance_id)
        return self._cut(_text_of(response))

    def _cut(self, text: str) -> str:
        longest = self._longest
        if len(text) <= longest:
            return text
        if self._side == "left":
            return text[:longest] + "...(truncated)"
        if self._side == "right":
            return "(truncated)..." + text[-longest:]
        half = longest // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]


def _by_name(run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        return await run(arguments)

    return call


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function takes: releases of verl pass them in two ways."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _text_of(response: Any) -> str:
    """Return the text of what a tool returned; ValueError where it has something else than text."""
    if isinstance(response, str):
        return response
    fields = response if isinstance(response, Mapping) else vars(response)
    if media := [name for name in ("image", "video") if fields.get(name)]:
        raise ValueError(f"the tool returned {media[0]}, and the policy reads text alone")
    return str(fields.get("text") or "")

"""Agent with verl's tools and interactions.

Tools are classes with the methods `create`, `execute`, `calc_reward` and `release`, listed in a YAML file:

    tools:
      - class_name: my_tools.Search     # module in the file's folder or a folder above it, or installed
        config: {top_k: 3}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}

or functions of a Python file with verl's decorator `function_tool`. An interaction is a class that plays the user: it
replies to each response without a call. It is listed in a YAML file too:

    interaction:
      - name: gsm8k                     # extra_info.interaction_kwargs.name of a row
        class_name: my_interactions.Gsm8k
        config: {}

This file is the value of `agent.func_path`. The prompt has the tools' schemas already, and the run's reward scores the
episode.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from uuid import uuid4

import yaml
from pydantic import BaseModel, ConfigDict

from agents.tools import Tool, ToolAgentInstance, parse_calls
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
    """Description of a tool in the format of chat templates."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(_Flexible):
    """Result of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """Base class of tools. It replaces verl's class of this name if verl is not installed."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the description of the tool."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:  # noqa: ARG002 - verl's signature
        """Create an instance, and return its id and the first response of the tool."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Run the tool, and return its response, a reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:  # noqa: ARG002
        """Return the score of an instance's state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance."""


class Gsm8kTool(BaseTool):
    """Tool that scores a number as the result of a GSM8K problem. It behaves as verl's tool of this name."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._states = dict[str, dict[str, Any]]()

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        """Create an instance with the ground truth of the row, from `tools_kwargs` or its `create_kwargs`."""
        instance_id = instance_id or str(uuid4())
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._states[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Score the number in the arguments. The step reward is -0.05 unless the score has improved."""
        name = "answer"
        state = self._states[instance_id]
        number = str(parameters.get(name, ""))
        state["response"] = _with_mark(number)
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
        """Delete the state of an instance."""
        del self._states[instance_id]


def _with_mark(number: str) -> str:
    """Return a number in the form of GSM8K's solutions, `#### N`."""
    if number.startswith("#### "):
        return number
    return f"#### {number}"


class FunctionTool(BaseTool):
    """Tool that calls a function. A sync function runs in a thread."""

    def __init__(self, function: Callable[..., Any], tool_schema: Any) -> None:
        super().__init__({}, tool_schema)
        self._function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Call the function. It returns a text or an object, or a tuple of that, a reward and metrics."""
        # A sync function would block the event loop, and with it all other episodes.
        is_async = inspect.iscoroutinefunction(self._function)
        result = await (self._function(**parameters) if is_async else asyncio.to_thread(self._function, **parameters))
        if not isinstance(result, tuple):
            result = (result,)
        response, reward, metrics = (*result, None, None)[:3]
        if isinstance(response, dict):
            response = json.dumps(response, ensure_ascii=False)
        if not isinstance(response, str) and not hasattr(response, "text"):
            response = str(response)
        return response, reward, metrics


_FUNCTIONS: dict[str, SimpleNamespace] = {}
"""Functions marked by `function_tool`, by the name of the tool."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Mark a function as a tool, as verl's decorator of this name does.

    By default the schema is made by `transformers` from the types and the docstring of the function.
    """
    if callable(name):
        return function_tool()(name)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        from transformers.utils.chat_template_utils import get_json_schema

        tool_name = str(name or function.__name__)
        tool_schema = schema
        if tool_schema is None:
            tool_schema = get_json_schema(function)
            tool_schema["function"]["name"] = tool_name
        if isinstance(tool_schema, Mapping):
            tool_schema = OpenAIFunctionToolSchema.model_validate(tool_schema)
        _FUNCTIONS[tool_name] = SimpleNamespace(name=tool_name, fn=function, tool_schema=tool_schema)
        return function

    return mark


class BaseInteraction:
    """Base class of interactions. It replaces verl's class of this name if verl is not installed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:  # noqa: ARG002
        """Start an episode and return its id."""
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # noqa: ARG002
        """Return (True if the episode ends, next message of the user, reward of the turn, metrics)."""
        return True, "", 0.0, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:  # noqa: ARG002
        """Return the score of the episode so far."""
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """End an episode."""


class Gsm8kInteraction(BaseInteraction):
    """Interaction that lets the policy try again until the number is right, as verl's interaction of this name does."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths = dict[str, Any]()

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        """Start an episode with the ground truth of the row."""
        instance_id = await super().start_interaction(instance_id, **kwargs)
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # noqa: ARG002
        """Score the policy's last message. The episode ends when it is right."""
        answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = float(default_functions()["gsm8k_flexible"]("", _with_mark(answer), str(self._truths[instance_id])))
        if score == 1.0:
            return True, "That is right.", score, {}
        return False, "That is wrong. Find the mistake, and give another result.", score, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:  # noqa: ARG002
        """Delete the ground truth of an episode."""
        self._truths.pop(instance_id, None)


def _same(function: Any = None, **_: Any) -> Any:
    """Return the function unchanged. verl's decorator of this name records traces, which are not supported."""
    return function if callable(function) else _same


_STANDINS: Mapping[str, Mapping[str, Any]] = {
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": Gsm8kTool},
    "verl.tools.schemas": {
        "OpenAIFunctionSchema": OpenAIFunctionSchema,
        "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
        "ToolResponse": ToolResponse,
    },
    "verl.tools.function_tool": {"function_tool": function_tool, "FUNCTION_TOOL_REGISTRY": _FUNCTIONS},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": Gsm8kInteraction},
    "verl.utils.rollout_trace": {"rollout_trace_op": _same},
}
"""Stand-ins for modules of verl, which files of tools and interactions import: module -> its contents."""


@dataclass(frozen=True)
class Entry:
    """One class listed in a YAML file."""

    option: str
    """Name of the option with the path of the file."""
    path: str
    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None
    """Schema of a tool in OpenAI's form, or None if the class has its own."""


def _entries(option: str, path: str, group: str, form: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list `group` of a YAML file. Raises ValueError if the file is missing or invalid."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{option}={path} cannot be read: {error}") from error
    entries = content.get(group) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{option}={path} has no list `{group}`; this recipe {form}")
    for number, entry in enumerate(entries):
        if not isinstance(name := entry.get("class_name"), str) or "." not in name:
            raise ValueError(f"{option}={path}, {group} {number}: class_name={name!r}; set it to module.Class")
    return entries


@cache
def read_entries(path: str) -> tuple[Entry, ...]:
    """Read a file of tools.

    Raises:
        ValueError: the file is missing or invalid.
    """
    entries: list[Entry] = []
    tools = _entries("tool_config_path", path, "tools", _MISSING)
    for number, tool in enumerate(tools):
        config = tool.get("config") or {}
        where = f"tool_config_path={path}, tool {number}"
        if (kind := config.get("type", "native")) != "native":
            raise ValueError(f"{where}: config.type={kind} is not supported; write its tools as native ones")
        schema = tool.get("tool_schema")
        if schema is not None and "name" not in (schema.get("function") or {}):
            raise ValueError(f"{where}: tool_schema has no function.name; set it")
        entries.append(Entry("tool_config_path", path, tool["class_name"], config, schema))
    return tuple(entries)


def check_interactions(path: str) -> None:
    """Raise ValueError if the file of interactions or a module that it names is missing, or the file is invalid."""
    for entry in _read_interactions(path).values():
        find_module(entry)


@cache
def _read_interactions(path: str) -> Mapping[str, Entry]:
    interactions: dict[str, Entry] = {}
    option = "interaction_config_path"
    for item in _entries(option, path, "interaction", "reads verl's interactions: [{'name', 'class_name', 'config'}]"):
        class_name = item["class_name"].rpartition(".")[2]
        name = str(item.get("name") or class_name.removesuffix("Interaction").lower())
        interactions[name] = Entry(option, path, item["class_name"], {**(item.get("config") or {}), "name": name})
    return interactions


@cache
def make_interactions(path: str) -> Mapping[str, Any]:
    """Return the interactions of a file by name. They are created once per process.

    Raises:
        ValueError: a class cannot be imported, or raises.
    """
    interactions: dict[str, Any] = {}
    for name, entry in _read_interactions(path).items():
        try:
            interactions[name] = load_class(entry)(config=dict(entry.config))
        except ValueError:
            raise
        except Exception as error:
            raise _failed(entry, "cannot be created", error) from error
    return interactions


def tool_schemas(path: str, functions: str = "") -> list[dict[str, Any]]:
    """Return the schemas of the tools of a file and of the functions of a Python file, for a chat template.

    Raises:
        ValueError: a file is invalid, or a class cannot be imported.
    """
    # If the file has all schemas, no class is imported: an import may load a model or open a connection.
    entries = read_entries(path) if path else ()
    if not functions and all(entry.schema is not None for entry in entries):
        for entry in entries:
            find_module(entry)
        return [dict(entry.schema) for entry in entries if entry.schema is not None]
    tools = make_tools(path, functions).values()
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _function_tools(path: str) -> dict[str, Any]:
    """Load the functions of a Python file that `function_tool` marks."""
    provide_verl()
    registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    before = dict(registry)
    # The name depends on the path, so that files of the same name do not replace each other.
    spec = importlib.util.spec_from_file_location(f"_function_tools_{abs(hash(path))}", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ValueError(f"function_tool_path={path} is not an existing Python file; correct the path")
    module = importlib.util.module_from_spec(spec)
    # Registered before the file runs, because dataclasses and pickle look up their module meanwhile.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    # The user's file may also call sys.exit.
    except (Exception, SystemExit) as error:
        reason, trace = described(error)
        failed = ValueError(f"function_tool_path={path} cannot be imported: {reason}")
        failed.add_note(trace)
        raise failed from error
    # The registry also holds the functions of files that were loaded before.
    marked = {name: entry for name, entry in registry.items() if entry is not before.get(name)}
    if not marked:
        raise ValueError(f"function_tool_path={path} marks no function with verl's function_tool; mark at least one")
    return {name: FunctionTool(entry.fn, entry.tool_schema) for name, entry in marked.items()}


@cache
def make_tools(path: str, functions: str = "") -> Mapping[str, Any]:
    """Return the tools of a file and of the functions of a Python file by name. They are created once per process.

    Raises:
        ValueError: a class cannot be imported, or raises.
    """
    tools = _function_tools(functions) if functions else dict[str, Any]()
    for entry in read_entries(path) if path else ():
        tool_class = load_class(entry)
        try:
            schemas = importlib.import_module("verl.tools.schemas")
            read = schemas.OpenAIFunctionToolSchema.model_validate
            tool = tool_class(config=dict(entry.config), tool_schema=entry.schema and read(entry.schema))
        except Exception as error:
            raise _failed(entry, "cannot be created", error) from error
        tools[tool.name] = tool
    return tools


def load_class(entry: Entry) -> Any:
    """Import the module of an entry, and return the class. Raises ValueError if that fails."""
    module = find_module(entry)
    try:
        return getattr(importlib.import_module(module), entry.class_name.rpartition(".")[2])
    except (Exception, SystemExit) as error:
        raise _failed(entry, "cannot be imported", error) from error


def find_module(entry: Entry) -> str:
    """Return the name of an entry's module, after a check that it exists. The module is not imported.

    Raises:
        ValueError: the module was not found.
    """
    module = entry.class_name.rpartition(".")[0]
    provide_verl()
    file = Path(entry.path).absolute()
    # The folders above the file too, because a class name may begin with a package, such as recipe.search.Tool.
    for folder in [*file.parents, Path.cwd()]:
        place = folder.joinpath(*module.split("."))
        exists = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
        if exists and str(folder) not in sys.path:
            # Appended at the end, so that a helper named random.py does not replace Python's module.
            sys.path.append(str(folder))
            break
    try:
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"module {module} was not found")
    except (Exception, SystemExit) as error:
        raise _failed(entry, "cannot be imported", error) from error
    return module


def provide_verl(modules: Mapping[str, Mapping[str, Any]] = _STANDINS) -> None:
    """Register stand-ins for modules of verl in sys.modules, if verl is not installed.

    Args:
        modules: module -> its names. Default: the modules that files of tools and interactions import.
    """
    # `find_spec` raises an error for a stand-in that is already registered, because it has no spec.
    loaded = sys.modules.get("verl")
    if (importlib.util.find_spec("verl") if loaded is None else loaded.__spec__) is not None:
        return
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            # A module with a `__path__` is a package, so that its submodules can be imported.
            module.__dict__.setdefault("__path__", [])
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(sys.modules[name]).update(content)


def _failed(entry: Entry, problem: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(
        f"{entry.option}={entry.path}: {entry.class_name} {problem}: {reason}; put its module in the folder of that "
        "file or in a folder above it, or install it"
    )
    failed.add_note(trace)
    return failed


class AgentInstance(ToolAgentInstance):
    """Environment with verl's tools, interactions, or both.

    Each call creates an instance of its tool, as in verl's agent loop.
    """

    instructions = ""

    def __init__(
        self,
        tool_config_path: str = "",
        function_tool_path: str = "",
        interaction_config_path: str = "",
        max_parallel_calls: int = 1,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: Side = "middle",
    ) -> None:
        """
        Args:
            tool_config_path: path to the file of tools, or "".
            function_tool_path: path to the Python file of functions that are tools, or "".
            interaction_config_path: path to the file of interactions, or "".
            max_parallel_calls: maximum number of calls run in one turn. The results of the others are error messages.
            max_tool_response_length: maximum number of characters of a result.
            tool_response_truncate_side: characters to keep: the first (left), the last (right), or half of each.
        """
        super().__init__()
        self._verl_tools = make_tools(tool_config_path, function_tool_path)
        self._interactions = make_interactions(interaction_config_path) if interaction_config_path else {}
        self._user: Any = None
        self._interaction_kwargs = dict[str, Any]()
        self._messages = list[dict[str, Any]]()
        self._max_length = max_tool_response_length
        self._side = tool_response_truncate_side
        self.max_calls = max_parallel_calls  # pyright: ignore[reportAttributeAccessIssue] (of this episode)
        self.max_result_chars = sys.maxsize  # pyright: ignore[reportAttributeAccessIssue] (truncated by _cut)

    async def score(self, answer: str, label: Any) -> float:  # noqa: ARG002 - the run's reward scores the episode
        """Return 0: the run's reward scores the episode."""
        return 0.0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Return the prompt unchanged: it has the tools' schemas."""
        self._logs = {"tool_calls": 0, "tool_errors": 0, "tool_reward": 0.0, "tool_score": 0.0}
        options = (states.get("extra_info") or {}).get("tools_kwargs") or {}
        for name, tool in self._verl_tools.items():
            schema = tool.tool_schema.function
            run = partial(self._call, tool, (options.get(name) or {}).get("create_kwargs") or {})
            self._tools[name] = Tool(name, schema.description, {}, _by_name(run))
        if self._interactions:
            await self._begin_interaction(states)
        return {"observation": states["observation"]}

    async def _begin_interaction(self, states: Mapping[str, Any]) -> None:
        extra = states.get("extra_info") or {}
        self._interaction_kwargs = dict(extra.get("interaction_kwargs") or {})
        # If the file has a single interaction, rows need not name it, and their label is the ground truth.
        if "name" not in self._interaction_kwargs and len(self._interactions) == 1:
            self._interaction_kwargs = {
                "ground_truth": states["label"],
                **self._interaction_kwargs,
                "name": next(iter(self._interactions)),
            }
        name = self._interaction_kwargs.get("name")
        if name not in self._interactions:
            raise ValueError(
                f"extra_info.interaction_kwargs.name of a row is {name!r}; set it to one of the file of interactions: "
                f"{', '.join(self._interactions)}"
            )
        self._user = self._interactions[str(name)]
        self._id = str(uuid4())
        self._messages = list(extra.get("raw_prompt") or [{"role": "user", "content": states["observation"]}])
        self._logs["turn_score"] = 0.0
        await self._user.start_interaction(
            self._id, **_accepted(self._user.start_interaction, self._interaction_kwargs)
        )

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the calls of a response. The interaction replies to a response without calls."""
        if self._user is None:
            return await super().step(states, **kwargs)
        self._messages.append({"role": "assistant", "content": states["action_text"]})
        # The interaction replies only to a response without calls, as in verl's agent loop.
        if self._tools and parse_calls(states["action_text"]):
            result = await super().step(states, **kwargs)
            self._messages += result["environment_feedback"]
            return result
        arguments = _accepted(self._user.generate_response, self._interaction_kwargs)
        is_done, reply, reward, _ = await self._user.generate_response(self._id, list(self._messages), **arguments)
        self._logs["turn_score"] = float(reward or 0.0)
        message = {"role": "user", "content": str(reply)}
        self._messages.append(message)
        if is_done:
            await self._user.finalize_interaction(self._id)
        feedback: Any = "" if is_done else [message]
        return {"rewards": 0.0, "environment_feedback": feedback, "done": bool(is_done), "extra_logs": dict(self._logs)}

    async def _call(self, tool: Any, create_kwargs: Mapping[str, Any], arguments: dict[str, Any]) -> str:
        create_arguments = _accepted(tool.create, {"create_kwargs": dict(create_kwargs), **create_kwargs})
        instance_id = await tool.create(**create_arguments)
        # Since verl 0.5 it returns (id, response), up to 0.4 only the id.
        if isinstance(instance_id, tuple):
            instance_id = instance_id[0]
        try:
            response, reward, _ = await tool.execute(instance_id, arguments)
            self._logs["tool_reward"] += float(reward or 0.0)
            self._logs["tool_score"] = float(await tool.calc_reward(instance_id) or 0.0)
        finally:
            # Also after an error. Otherwise the state of the instance would remain until the process ends.
            await tool.release(instance_id)
        return self._cut(_text_of(response))

    def _cut(self, text: str) -> str:
        limit = self._max_length
        if len(text) <= limit:
            return text
        if self._side == "left":
            return text[:limit] + "...(truncated)"
        if self._side == "right":
            return "(truncated)..." + text[-limit:]
        # Below, `len(text) - half` instead of `-half`, which with a half of 0 would keep the complete text.
        half = limit // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]


def _by_name(run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        return await run(arguments)

    return call


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts. Versions of verl pass them in two ways."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _text_of(response: Any) -> str:
    """Return the text of a tool's response. Raises ValueError if the response has images or videos."""
    if isinstance(response, str):
        return response
    fields = response if isinstance(response, Mapping) else vars(response)
    if media := [name for name in ("image", "video") if fields.get(name)]:
        raise ValueError(f"the tool returned {media[0]}, but the policy can only read text")
    return str(fields.get("text") or "")

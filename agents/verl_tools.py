"""An agent whose tools and interactions are verl's.

Tools are classes that a YAML file names, with `create`, `execute`, `calc_reward`, `release`:

    tools:
      - class_name: my_tools.Search     # a module beside the file, in a folder above it, or installed
        config: {top_k: 3}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}

or functions of a Python file with verl's decorator `function_tool`. An interaction is a class of such a file too, and
answers each response without a call as the user:

    interaction:
      - name: gsm8k                     # extra_info.interaction_kwargs.name of a row
        class_name: my_interactions.Gsm8k
        config: {}

It is the file of `agent.func_path`. The prompt has the tools' schemas already, and the run's reward scores the episode.
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


class FunctionTool(BaseTool):
    """Tool that is one function. Each call is a call of the function, in a thread where it is not async."""

    def __init__(self, function: Callable[..., Any], tool_schema: Any) -> None:
        super().__init__({}, tool_schema)
        self._function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # noqa: ARG002
        """Call the function. It returns its text or an object, or a tuple of that, a reward and metrics."""
        is_async = inspect.iscoroutinefunction(self._function)
        called = self._function(**parameters) if is_async else asyncio.to_thread(self._function, **parameters)
        result = await called
        response, reward, metrics = (*result, None, None)[:3] if isinstance(result, tuple) else (result, None, None)
        if not isinstance(response, str) and not hasattr(response, "text"):
            response = json.dumps(response, ensure_ascii=False) if isinstance(response, dict) else str(response)
        return response, reward, metrics


_FUNCTIONS: dict[str, SimpleNamespace] = {}
"""Functions that `function_tool` has marked, by the tool's name."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Mark a function as a tool, as verl's decorator of this name. `transformers` reads its types and docstring."""
    if callable(name):
        return function_tool()(name)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        from transformers.utils.chat_template_utils import get_json_schema

        own = str(name or function.__name__)
        described_as = schema
        if described_as is None:
            described_as = get_json_schema(function)
            described_as["function"]["name"] = own
        if isinstance(described_as, Mapping):
            described_as = OpenAIFunctionToolSchema.model_validate(described_as)
        _FUNCTIONS[own] = SimpleNamespace(name=own, fn=function, tool_schema=described_as)
        return function

    return mark


class BaseInteraction:
    """Base class of interactions, for files written for verl on a machine without it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:  # noqa: ARG002
        """Begin with an episode and return its id."""
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # noqa: ARG002
        """Return whether the episode ends, the user's next message, a reward of the turn, and metrics."""
        return True, "", 0.0, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:  # noqa: ARG002
        """Return how good the episode is so far."""
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """End an episode."""


class Gsm8kInteraction(BaseInteraction):
    """A user who lets the policy try again until the number is right, as verl's own of this name."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths = dict[str, Any]()

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        """Begin with the ground truth of the row."""
        instance_id = await super().start_interaction(instance_id, **kwargs)
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # noqa: ARG002
        """Score the policy's last message. The episode ends once it is right."""
        answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        text = answer if answer.startswith("#### ") else f"#### {answer}"
        score = float(default_functions()["gsm8k_flexible"]("", text, str(self._truths[instance_id])))
        reply = "That is right." if score == 1.0 else "That is wrong. Find the mistake, and give another result."
        return score == 1.0, reply, score, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:  # noqa: ARG002
        """Forget the ground truth."""
        self._truths.pop(instance_id, None)


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
    "verl.tools.function_tool": {"function_tool": function_tool, "FUNCTION_TOOL_REGISTRY": _FUNCTIONS},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": Gsm8kInteraction},
    "verl.utils.rollout_trace": {"rollout_trace_op": _same},
}
"""Modules of verl that files of tools and interactions import, where verl is not installed -> what is in them."""


@dataclass(frozen=True)
class Entry:
    """One class that a file names."""

    option: str
    """The option with the file, and the file."""
    path: str
    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None
    """Schema of a tool in OpenAI's form, or None if the class has its own."""


def _entries(option: str, path: str, group: str, form: str) -> list[Mapping[str, Any]]:
    """Read the mappings in the list `group` of a YAML file; ValueError where it is missing, or not of this form."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{option}={path} cannot be read: {error}") from error
    entries = content.get(group) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{option}={path} has no list `{group}`; this recipe {form}")
    for number, entry in enumerate(entries):
        name = entry.get("class_name")
        if not isinstance(name, str) or "." not in name:
            raise ValueError(f"{option}={path}, {group} {number}: class_name={name!r}; set it to module.Class")
    return entries


@cache
def read_entries(path: str) -> tuple[Entry, ...]:
    """Read the file of tools.

    Raises:
        ValueError: it is missing, or not of this form.
    """
    entries, option = list[Entry](), "tool_config_path"
    tools = _entries(option, path, "tools", _MISSING)
    for number, tool in enumerate(tools):
        config = tool.get("config") or {}
        where = f"tool_config_path={path}, tool {number}"
        if (kind := config.get("type", "native")) != "native":
            raise ValueError(f"{where}: config.type={kind} is not here; write its tools as native ones")
        schema = tool.get("tool_schema")
        if schema is not None and "name" not in (schema.get("function") or {}):
            raise ValueError(f"{where}: tool_schema has no function.name; set it")
        entries.append(Entry(option, path, tool["class_name"], config, schema))
    return tuple(entries)


def check_interactions(path: str) -> None:
    """Raise ValueError where the file of interactions is missing or not of its form, or a module is not there."""
    for entry in _read_interactions(path).values():
        find_class(entry, load=False)


@cache
def _read_interactions(path: str) -> Mapping[str, Entry]:
    found = dict[str, Entry]()
    option = "interaction_config_path"
    for item in _entries(option, path, "interaction", "reads verl's interactions: [{'name', 'class_name', 'config'}]"):
        plain = item["class_name"].rpartition(".")[2]
        name = str(item.get("name") or plain.removesuffix("Interaction").lower())
        found[name] = Entry(option, path, item["class_name"], {**(item.get("config") or {}), "name": name})
    return found


@cache
def make_interactions(path: str) -> Mapping[str, Any]:
    """Make the interactions of a file, once in a process, by name.

    Raises:
        ValueError: a class cannot be found, or raises.
    """
    made = dict[str, Any]()
    for name, entry in _read_interactions(path).items():
        try:
            made[name] = find_class(entry, load=True)(config=dict(entry.config))
        except ValueError:
            raise
        except Exception as error:
            raise _failed(entry, "cannot be made", error) from error
    return made


def tool_schemas(path: str, functions: str = "") -> list[dict[str, Any]]:
    """Return the descriptions of the tools of a file, and of the functions of a Python file, as a chat template reads
    them; ValueError as `make_tools`.
    """
    entries = read_entries(path) if path else ()
    if not functions and all(entry.schema is not None for entry in entries):
        for entry in entries:
            find_class(entry, load=False)
        return [dict(entry.schema) for entry in entries if entry.schema is not None]
    tools = make_tools(path, functions).values()
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _function_tools(path: str) -> dict[str, Any]:
    """Load the functions of a Python file that `function_tool` marks."""
    provide_verl()
    registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    before = dict(registry)
    spec = importlib.util.spec_from_file_location(f"_function_tools_{abs(hash(path))}", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ValueError(f"function_tool_path={path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason, trace = described(error)
        failed = ValueError(f"function_tool_path={path} cannot be imported: {reason}")
        failed.add_note(trace)
        raise failed from error
    marked = {name: known for name, known in registry.items() if known is not before.get(name)}
    found = {name: FunctionTool(known.fn, known.tool_schema) for name, known in marked.items()}
    if not found:
        raise ValueError(f"function_tool_path={path} marks no function with verl's function_tool; do that")
    return found


@cache
def make_tools(path: str, functions: str = "") -> Mapping[str, Any]:
    """Make the tools of a file, and of the functions of a Python file, once in a process, by name.

    Raises:
        ValueError: a class cannot be found, or raises.
    """
    tools = _function_tools(functions) if functions else dict[str, Any]()
    for entry in read_entries(path) if path else ():
        made = find_class(entry, load=True)
        try:
            schemas = importlib.import_module("verl.tools.schemas")
            read = schemas.OpenAIFunctionToolSchema.model_validate
            tool = made(config=dict(entry.config), tool_schema=entry.schema and read(entry.schema))
        except Exception as error:
            raise _failed(entry, "cannot be made", error) from error
        tools[tool.name] = tool
    return tools


def find_class(entry: Entry, load: bool) -> Any:
    """Return the class of an entry; without `load` only see that its module is there, and run nothing of it."""
    module, _, name = entry.class_name.rpartition(".")
    provide_verl()
    file = Path(entry.path).absolute()
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
        raise _failed(entry, "cannot be imported", error) from error


def provide_verl(modules: Mapping[str, Mapping[str, Any]] = _STANDINS) -> None:
    """Let users' files import what they use of verl, where it is not installed.

    Args:
        modules: names in verl's modules, by the module. Default: those that files of tools and interactions import.
    """
    loaded = sys.modules.get("verl")
    if (importlib.util.find_spec("verl") if loaded is None else loaded.__spec__) is not None:
        return
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module.__dict__.setdefault("__path__", [])
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(sys.modules[name]).update(content)


def _failed(entry: Entry, what: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(
        f"{entry.option}={entry.path}: {entry.class_name} {what}: {reason}; put its module beside that file, or in a "
        "folder above it, or install it"
    )
    failed.add_note(trace)
    return failed


class AgentInstance(ToolAgentInstance):
    """An episode with verl's tools, interactions, or both. Each call has an instance of its tool, as in verl's agent
    loop.
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
            tool_config_path: the file of tools; "" for none.
            function_tool_path: the Python file of functions that are tools; "" for none.
            interaction_config_path: the file of interactions; "" for none.
            max_parallel_calls: calls of one turn that are run; the policy reads which were not.
            max_tool_response_length: characters of a result that are kept.
            tool_response_truncate_side: which of them: the first (left), the last (right), or half of each.
        """
        super().__init__()
        self._made = make_tools(tool_config_path, function_tool_path)
        self._interactions = make_interactions(interaction_config_path) if interaction_config_path else {}
        self._user: Any = None
        self._talk = dict[str, Any]()
        self._messages = list[dict[str, Any]]()
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
        if self._interactions:
            await self._begin_interaction(states)
        return {"observation": states["observation"]}

    async def _begin_interaction(self, states: Mapping[str, Any]) -> None:
        extra = states.get("extra_info") or {}
        self._talk = dict(extra.get("interaction_kwargs") or {})
        if "name" not in self._talk and len(self._interactions) == 1:
            self._talk = {"ground_truth": states["label"], **self._talk, "name": next(iter(self._interactions))}
        name = self._talk.get("name")
        if name not in self._interactions:
            raise ValueError(
                f"extra_info.interaction_kwargs.name of a row is {name!r}; the file of interactions has "
                f"{', '.join(self._interactions)}"
            )
        self._user, self._id = self._interactions[str(name)], str(uuid4())
        self._messages = list(extra.get("raw_prompt") or [{"role": "user", "content": states["observation"]}])
        self._logs["turn_score"] = 0.0
        await self._user.start_interaction(self._id, **_accepted(self._user.start_interaction, self._talk))

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the calls, or let the interaction answer a response that has none."""
        if self._user is None:
            return await super().step(states, **kwargs)
        self._messages.append({"role": "assistant", "content": states["action_text"]})
        if self._tools and parse_calls(states["action_text"]):
            result = await super().step(states, **kwargs)
            self._messages += result["environment_feedback"]
            return result
        arguments = _accepted(self._user.generate_response, self._talk)
        is_done, reply, reward, _ = await self._user.generate_response(self._id, list(self._messages), **arguments)
        self._logs["turn_score"] = float(reward or 0.0)
        message = {"role": "user", "content": str(reply)}
        self._messages.append(message)
        if is_done:
            await self._user.finalize_interaction(self._id)
        feedback: Any = "" if is_done else [message]
        return {"rewards": 0.0, "environment_feedback": feedback, "done": bool(is_done), "extra_logs": dict(self._logs)}

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

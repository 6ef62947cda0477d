"""Tools: parsing of calls, execution, and results for the policy."""

import asyncio
import enum
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.rendering import first_tokens
from agents.schema import read_reset
from agents.tools import TOO_DEEP, Call, Tool, ToolAgentInstance, parse_calls, python_tool
from tests.agents.episode_cases import TEMPLATE as CHAT
from tests.agents.test_rendering import encoder_of
from tests.messages import says


def look_up(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", hours: list[int] | None = None, wind: bool = False
) -> str:
    """The weather of a city.

    Some more of it.

    Args:
        city: where
        days: how many, today included

    Returns:
        Text.
    """
    return repr((city, days, unit, hours, wind))


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    await asyncio.sleep(0)
    return a + b


def fail(kind: str) -> str:
    """Raise something."""
    raise {"exit": SystemExit("bye"), "stop": StopIteration(), "lookup": KeyError("k")}[kind]


def wait_long() -> str:
    """Wait for ever."""
    threading.Event().wait()
    return ""


async def nap() -> str:
    """Wait forever without blocking the event loop."""
    await asyncio.Event().wait()
    return ""


async def block() -> str:
    """Block the event loop forever."""
    while True:
        time.sleep(1)


class Color(enum.Enum):
    RED = "r"


def long_text(length: int) -> str:
    """Many letters."""
    return "x" * length


class Agent(ToolAgentInstance):
    tools: ClassVar = (look_up, add, fail, wait_long, long_text, nap, block)
    max_result_chars = 40
    max_calls = 3
    tool_timeout_s = 60

    async def score(self, answer: str, label: Any) -> float:
        return float(answer == label)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run(tool: Tool | Callable[..., Any], **arguments: Any) -> str:
    return asyncio.run((tool if isinstance(tool, Tool) else Tool.from_function(tool)).run(arguments))


def responses(agent: ToolAgentInstance, text: str) -> list[str]:
    """Return the results that the policy reads after it has written `text`."""
    feedback = asyncio.run(agent.step({"action_text": text, "label": "", "observation_text": ""}))[
        "environment_feedback"
    ]
    return [message["content"] for message in feedback]


def is_error(results: list[str], *facts: object) -> bool:
    """True if the only result is an error message with the facts."""
    (text,) = results
    return text.startswith("error: ") and re.search(says(*facts), text) is not None


def test_the_schema_is_made_from_types_and_docstring() -> None:
    assert Tool.from_function(look_up).schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "The weather of a city.\n\nSome more of it.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "default": 1, "description": "how many, today included"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "hours": {
                        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                        "default": None,
                    },
                    "wind": {"type": "boolean", "default": False},
                },
            },
        },
    }


def silent(a: int) -> str:
    return str(a)


def unnamed(a: int, /) -> str:
    """One."""
    return str(a)


def odd(a: asyncio.Queue[int]) -> str:
    """One."""
    return str(a)


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda a: a, ["'a'", "'<lambda>'", "type"]),
        (unnamed, ["'a'", "'unnamed'", "name"]),
        (silent, ["'silent'", "docstring"]),
        (odd, ["'odd'", "JSON schema"]),
    ],
)
def test_a_function_without_types_or_docstring_raises_an_error(function: Callable[..., Any], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        Tool.from_function(function)


def test_arguments_are_converted_by_their_types() -> None:
    assert run(look_up, city=5, days="3", hours=[1, "2"], wind="yes") == "('5', 3, 'C', [1, 2], True)"
    assert run(add, a="1.5", b=2) == "3.5"


def test_invalid_arguments_are_named_one_by_one() -> None:
    with pytest.raises(ValueError, match=says("days: ", "integer", "unit: ", "'C' or 'F'")):
        run(look_up, city="a", days=1.5, unit="K")
    with pytest.raises(ValueError, match=says("city: Missing", "town: Unexpected")):
        run(look_up, town="a")


def test_sync_functions_run_concurrently() -> None:
    def rest() -> str:
        """Sleep."""
        together.wait(300)
        return ""

    async def both() -> list[str]:
        return await asyncio.gather(*(Tool.from_function(rest).run({}) for _ in range(20)))

    together = threading.Barrier(20)  # run sequentially, none would finish within the limit
    assert asyncio.run(both()) == [""] * 20


ONE = {"name": "a", "arguments": {"x": 1}}
TWO = {"name": "b", "arguments": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        (f"I add.\n<tool_call>{json.dumps(ONE)}</tool_call>", [Call("a", {"x": 1})]),
        (
            f"<tool_call>\n{json.dumps(ONE)}\n</tool_call> and <tool_call>{json.dumps(TWO)}</tool_call>",
            [Call("a", {"x": 1}), Call("b")],
        ),
        # A stop text or the end token replaces the closing tag.
        (f"<tool_call>{json.dumps(ONE)}", [Call("a", {"x": 1})]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [Call("a", {"x": 1})]),
        ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', [Call("a", {"x": 1})]),
        (f"```json\n{json.dumps(ONE)}\n```", [Call("a", {"x": 1})]),
        (f"[{json.dumps(ONE)}, {json.dumps(TWO)}]", [Call("a", {"x": 1}), Call("b")]),
        # Plain JSON without a tag is a response, not a call.
        ('{"name": "Ann", "age": 3}', []),
        ('the set {1, 2} and {"a": {"b": 1}}', []),
    ],
)
def test_calls_are_parsed_in_order(text: str, expected: list[Call]) -> None:
    assert parse_calls(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        # The end of the JSON value is found by Python's JSON parser.
        ("<tool_call>{'name': 'a'}</tool_call>", "line 1 column 2"),
        ("<tool_call></tool_call>", "line 1 column 1"),
        ("<tool_call>{} more</tool_call>", "'more"),
        ("<tool_call>[1]</tool_call>", "object with a name and arguments"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "object with a name and arguments"),
        ('<tool_call>{"name": "a", "arguments": "1"}</tool_call>', "object with a name and arguments"),
        ('{"name": "a", "arguments": {"x": ', "line 1 column 34"),
        ("<tool_call>" + '{"a":' * 100_000, TOO_DEEP),
        ('{"a":' * 100_000, TOO_DEEP),
    ],
)
def test_a_malformed_call_becomes_an_error(text: str, error: str) -> None:
    (parsed,) = parse_calls(text)
    assert error in parsed.error


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "a", "arguments": {',
    "}",
    "}}",
    '"',
    "\\",
    "[",
    '{"',
    "NaN",
    "\ud800",
    " ",
]


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30))
def test_the_parser_raises_for_no_text(pieces: list[str]) -> None:
    for parsed in parse_calls("".join(pieces)):
        assert isinstance(parsed.name, str) and isinstance(parsed.arguments, dict)
        json.dumps(parsed.arguments)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(), st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))))
def test_wellformed_calls_are_parsed_unchanged(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n".join(call(name) if not arguments else written(name, arguments) for name, arguments in calls)
    # Only a name that contains the closing tag itself cannot be represented.
    if text.count("<tool_call>") == len(calls):
        assert parse_calls(text) == [Call(name, arguments) for name, arguments in calls]


def written(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def test_the_first_observation_has_the_tools_and_the_prompt() -> None:
    observation = asyncio.run(Agent().reset({"observation": "2 + 2?", "label": ""}))["observation"]
    assert [message["role"] for message in observation] == ["system", "user"]
    assert observation[1]["content"] == "2 + 2?"
    schemas = [json.loads(line) for line in observation[0]["content"].splitlines() if line.startswith('{"type"')]
    assert schemas == [
        Tool.from_function(tool).schema for tool in (look_up, add, fail, wait_long, long_text, nap, block)
    ]


class Quiet(Agent):
    instructions = "Use the tools."


def test_a_chat_template_with_tools_renders_them_unless_the_agent_has_its_own_instructions() -> None:
    template = "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}"
    encoder = encoder_of(f"{template}{CHAT}")
    states = {"observation": "2 + 2?", "label": ""}
    read = []
    for agent, agent_encoder in ((Agent, encoder), (Quiet, encoder), (Agent, encoder_of(CHAT))):
        observation, tools = read_reset(asyncio.run(agent().reset(dict(states))))
        read.append(agent_encoder.tokenizer.decode(first_tokens(agent_encoder, observation, "2 + 2?", tools)))
    assert read[0].startswith("<look_up><add>")
    assert "<tool_call>" not in read[0]
    assert read[1].startswith("[system]Use the tools.")
    assert read[2].startswith("[system]You may call these tools.")
    with pytest.raises(ValueError, match=says("tools", "schemas")):
        read_reset({"observation": "2 + 2?", "tools": ["add"]})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x y"}}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x y"}}]',
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>",
    ],
    ids=["hermes", "llama", "mistral", "qwen xml"],
)
def test_a_call_is_parsed_in_the_syntax_of_every_model_family(text: str) -> None:
    call = Call("add", {"a": 1, "b": "x y"})
    assert parse_calls(f"Let me see. {text}") == [call]
    assert parse_calls(f"{text}\n{text.replace('add', 'sub')}")[:2] == [call, Call("sub", call.arguments)]


def test_a_truncated_call_is_an_error_and_program_code_is_not_a_call() -> None:
    (call,) = parse_calls("<tool_call><function=add><parameter=a>1</parameter><parameter=b>2")
    assert re.search(says("</function>"), call.error)
    code = {"code": "print('<function=add>')"}
    assert parse_calls(written("python", code)) == [Call("python", code)]
    assert parse_calls(json.dumps({"name": "python", "arguments": code})) == [Call("python", code)]


def test_each_call_gets_a_message_and_a_response_without_calls_is_scored() -> None:
    agent = Agent()
    states = {"action_text": call("add", a=1, b=2) + call("look_up", city="Ulm"), "label": "3", "observation_text": ""}
    assert asyncio.run(agent.step(states)) == {
        "rewards": 0.0,
        "environment_feedback": [
            {"role": "tool", "tool_call_id": "call00000", "content": "3.0"},
            {"role": "tool", "tool_call_id": "call00001", "content": "('Ulm', 1, 'C', None, False)"},
        ],
        "done": False,
        "extra_logs": {"tool_calls": 2, "tool_errors": 0},
    }
    right = asyncio.run(agent.step({**states, "action_text": "3"}))
    assert (right["rewards"], right["scores"], right["done"]) == (1.0, 1.0, True)
    assert right["extra_logs"] == {"tool_calls": 2, "tool_errors": 0}
    assert asyncio.run(agent.step({**states, "action_text": "4"}))["rewards"] == 0.0


def test_every_failure_is_an_error_message_for_the_policy_and_is_counted() -> None:
    agent = Agent()
    assert is_error(responses(agent, call("nothing")), "'nothing'", "look_up, add, fail")
    assert is_error(responses(agent, call("fail", kind="lookup")), "KeyError: 'k'")
    assert is_error(responses(agent, call("fail", kind="exit")), "SystemExit: bye")
    assert is_error(responses(agent, call("fail", kind="stop")), "StopIteration")
    assert is_error(responses(agent, "<tool_call>{"), "JSON", "line 1 column 2")
    agent.tool_timeout_s = 0.2  # pyright: ignore[reportAttributeAccessIssue]
    assert is_error(responses(agent, call("wait_long")), "wait_long", "0.2 s")
    assert agent._logs == {"tool_calls": 6, "tool_errors": 6}


def test_all_calls_of_a_turn_share_one_timeout() -> None:
    agent = Agent()
    agent.tool_timeout_s = 0.6  # pyright: ignore[reportAttributeAccessIssue]
    first, *late = responses(agent, call("add", a=1, b=2) + call("nap") + call("add", a=1, b=2))
    assert first == "3.0"
    assert is_error(late[:1], "nap", "0.6 s")
    # This call never started.
    assert is_error(late[1:], "add", "0.6 s")
    assert agent._logs == {"tool_calls": 3, "tool_errors": 2}


def test_a_result_during_a_stopped_loop_is_not_late() -> None:
    class Napping(Agent):
        tools: ClassVar = (nap_until,)
        tool_timeout_s = 0.4

    async def stand_still() -> None:
        await NAPS.get()
        time.sleep(1)
        ENDS.put_nowait(None)

    async def both() -> Any:
        states = {"action_text": call("nap_until"), "label": "", "observation_text": ""}
        return (await asyncio.gather(Napping().step(states), stand_still()))[0]["environment_feedback"]

    assert [message["content"] for message in asyncio.run(both())] == ["it came"]


NAPS: asyncio.Queue[None] = asyncio.Queue()
ENDS: asyncio.Queue[None] = asyncio.Queue()


async def nap_until() -> str:
    """Wait for the tool that blocks the loop."""
    NAPS.put_nowait(None)
    await ENDS.get()
    return "it came"


def test_an_async_tool_that_blocks_is_interrupted() -> None:
    agent = Agent()
    agent.tool_timeout_s = 0.2  # pyright: ignore[reportAttributeAccessIssue]
    assert is_error(responses(agent, call("block")), "block", "0.2 s")


def test_results_with_the_role_user_are_one_message() -> None:
    agent = Agent()
    agent.result_role = "user"  # pyright: ignore[reportAttributeAccessIssue]
    assert responses(agent, call("add", a=1, b=2) * 2) == ["3.0\n3.0"]


def test_an_enum_is_an_argument() -> None:
    def paint(color: Color) -> str:
        """Paint."""
        return color.value

    assert run(paint, color="r") == "r"


def test_a_long_result_is_truncated_with_a_note() -> None:
    assert responses(Agent(), call("long_text", length=40)) == ["x" * 40]
    assert responses(Agent(), call("long_text", length=41)) == ["x" * 40 + "\n... (41 characters, cut after 40)"]


def test_at_most_max_calls_are_run_in_a_turn() -> None:
    agent = Agent()
    results = responses(agent, call("add", a=0, b=0) * 5)
    assert results[:3] == ["0.0"] * 3
    assert [is_error([text], 3) for text in results[3:]] == [True, True]
    assert agent._logs == {"tool_calls": 5, "tool_errors": 2}


def test_a_model_without_a_chat_template_gets_text() -> None:
    class InText(Agent):
        chat = False
        result_text = "[{}]\n"

    begin = asyncio.run(InText().reset({"observation": "2 + 2?", "label": ""}))["observation"]
    assert isinstance(begin, str) and begin.endswith("\n\n2 + 2?")
    states = {"action_text": call("add", a=1, b=2) * 2, "label": "", "observation_text": ""}
    assert asyncio.run(InText().step(states))["environment_feedback"] == "[3.0]\n[3.0]\n"


def test_a_lone_surrogate_is_replaced_before_tokenization() -> None:
    assert run(look_up, city="\ud800").encode()
    text = '<tool_call>{"name": "look_up", "arguments": {"city": "\\ud800"}}</tool_call>'
    assert responses(Agent(), text)[0].encode()


def test_python_in_the_sandbox_is_a_tool() -> None:
    tool = python_tool()
    assert tool.name == "python" and set(tool.parameters["properties"]) == {"code"}
    assert run(tool, code="print(6 * 7)") == "42"
    assert run(tool, code="x = 1") == "(it printed nothing)"
    assert re.search(r'File "main.py", line 1.*ZeroDivisionError', run(tool, code="1 / 0"), re.DOTALL)

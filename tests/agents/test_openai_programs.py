"""Clients of the endpoint: programs in any language, frameworks with tool calls, and malformed requests."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.loading import load_agent
from agents.openai_executor import OpenAIAgentExecutor
from agents.openai_protocol import CompletionRequest, Message, RequestError, read_request, rest_of
from agents.options import AgentOptions
from components.data.text import load_tokenizer
from components.models.loading import load_policy
from tests.agents.episode_cases import TEXTS, Rig, sampling, write_policy
from tests.agents.openai_cases import Blocking, chat, check_drawn, user
from tests.messages import says
from tests.processes import wait_until_gone


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(autouse=True)
def closed(rig: Rig) -> Iterator[None]:
    yield
    rig.close()


SCRIPT = """
# An HTTP client of nothing but bash: it shows that any client will do.
address="${OPENAI_BASE_URL#http://}"; address="${address%/v1}"
body="{\\"prompt\\": \\"$PROMPT\\", \\"max_tokens\\": 3}"
exec 3<>"/dev/tcp/${address%:*}/${address#*:}"
printf 'POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n' >&3
printf 'Authorization: Bearer %s\\r\\n' "$OPENAI_API_KEY" >&3
printf 'Content-Length: %s\\r\\n\\r\\n%s' "${#body}" "$body" >&3
answer="$(cat <&3)"
[[ "$answer" == *text_completion* ]] || exit 3
[[ "$LABEL" != fails ]] || { echo "no such file"; exit 7; }
sleep 1000 &
echo "$!" >>pids
[[ "$LABEL" != hangs ]] || wait
echo "some words"
echo '{"reward": 0.25, "extra_logs": {"length": '"${#LABEL}"'}}'
"""


def test_a_shell_script_is_an_agent(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text(SCRIPT)
    (tmp_path / "agent.py").write_text(
        "from agents.openai_executor import OpenAIAgentExecutor\n\n"
        "class AgentExecutor(OpenAIAgentExecutor):\n    command = ['bash', 'agent.sh']\n"
    )
    agent = load_agent(str(tmp_path / "agent.py"))
    batch = rig.runner(agent, max_failed_share=1.0).generate(rig.prompts(3, 1, ["one", "three", "fails"]), sampling())
    assert batch.objects["status"] == ["finished", "finished", "error"]
    assert batch["reward"].tolist() == [0.25, 0.25, 0]
    assert batch["log_length"].tolist()[:2] == [3, 5]
    assert re.search(says("exit code 7", "'no such file'"), batch.objects["error"][2])
    assert batch["num_turns"].tolist() == [1] * 3
    check_drawn(rig, batch)
    runner = rig.runner(agent, max_failed_share=1.0, max_turns=4, step_timeout_s=0.5)
    hung = runner.generate(rig.prompts(1, 1, ["hangs"]), sampling())
    assert re.search(says("run_agent", "2 s"), hung.objects["error"][0])
    # All processes that the scripts left running have ended.
    wait_until_gone(*map(int, (tmp_path / "pids").read_text().split()), timeout_s=120)


TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


def learn(folder: Path, prompt: str, answer: str) -> None:
    """Train the model in `folder` to reply to a prompt with a fixed answer."""
    tokenizer = load_tokenizer(folder)
    model = load_policy(folder)
    read, written = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    tokens = torch.tensor([[*read, *written]])
    labels = tokens.clone()
    labels[:, : len(read)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(loss.detach()) < 0.01:
            break
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


def test_tool_calls_reach_the_client_and_their_results_the_policy(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    template = "{% if tools %}[tools]{{ tools[0]['function']['name'] }}\n{% endif %}"
    opening = f"[tools]add\n[user]{TEXTS[0]}<eos>\n[assistant]"
    learn(folder, opening, f"Let me {CALL}<eos>")
    rig = Rig(folder)
    rig.tokenizer.chat_template = template + str(rig.tokenizer.chat_template)

    class Caller(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            choice = chat(client, [user(prompt)], tools=[TOOL])
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me "
            (call,) = choice.message.tool_calls
            arguments = json.loads(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            # Agent frameworks serialise the arguments again, without white space.
            said = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b":4,"a":3}'}}
            message = {"role": "assistant", "content": "Let me", "tool_calls": [said]}
            chat(client, [user(prompt), message, result], tools=[TOOL])
            plain = chat(client, [user(prompt)], tools=[TOOL], tool_choice="none")
            assert plain.message.content == f"Let me {CALL}"
            return {"reward": 1.0}

    batch = rig.runner(Caller()).generate(rig.prompts(1, 1), sampling(90, temperature=0))
    rig.close()
    assert batch.objects["error"] == ["", ""]
    assert batch["num_turns"].tolist() == [2, 1]
    text = str(rig.tokenizer.decode(batch.row(0, "tokens").tolist()))
    assert text.startswith(f"{opening}Let me {CALL}<eos>\n[tool]7<eos>\n[assistant]")
    check_drawn(rig, batch)


def test_a_malformed_call_is_returned_as_text() -> None:
    request = CompletionRequest(messages=[Message(role="user", content="?")], tools=[TOOL])
    text = f'{CALL}<tool_call>{{"name": </tool_call>'
    assert request.choice(text, 1, "stop", [], [])["message"] == {"role": "assistant", "content": text}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
names = st.sampled_from([*CompletionRequest.model_fields, "more"])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(names, json_values) | json_values)
def test_any_malformed_request_is_rejected_without_another_error(body: Any) -> None:
    try:
        request, how = read_request(json.dumps(body).encode(), sampling())
    except RequestError as error:
        assert error.status == 400
        assert error.body["error"]["message"]
    else:
        assert 1 <= how.max_new_tokens <= 6
        assert rest_of(request.history, request.history) in (None, "")


PROGRAM = """
import json, os
columns = json.loads(os.environ["EXTRA_INFO"])
direct = "127.0.0.1" in os.environ.get("no_proxy", "").split(",")
print(json.dumps({"reward": columns["solution"], "extra_logs": {"direct": direct}}))
"""


def test_a_program_reads_the_columns_of_the_data_and_reaches_the_endpoint_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reader(OpenAIAgentExecutor):
        command = (sys.executable, "-c", PROGRAM)

    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    reader = Reader()

    async def played() -> Any:
        reader.open(AgentOptions())
        try:
            urls = {"base_url": "http://127.0.0.1:9/v1", "api_key": "", "session_id": ""}
            return await reader.run_agent("p", "l", **urls, extra_info={"solution": 5})
        finally:
            await reader.close()

    assert asyncio.run(played()) == {"reward": 5, "extra_logs": {"direct": True}}
    assert "no_proxy" not in os.environ

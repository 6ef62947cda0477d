"""Agents that use OpenAI's API: their requests become sequences of sampled tokens."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from agents.episode import Episode, EpisodeTask, Policy, Turn
from agents.openai_executor import OpenAIAgentExecutor
from agents.openai_protocol import CompletionRequest, RequestError, read_request
from agents.openai_server import Recording
from components.generate.async_engine import AsyncEngine
from components.generate.config import EVALUATION_STEP
from tests.agents.episode_cases import POSITIONS, TEXTS, Rig, sampling, turns_of, write_policy
from tests.agents.openai_cases import Blocking, chat, check_drawn, user
from tests.messages import says


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(autouse=True)
def closed(rig: Rig) -> Iterator[None]:
    yield
    rig.close()


def rendered(rig: Rig, text: str) -> list[int]:
    """Number of tokens of a conversation's first message, up to the start of the policy's turn."""
    return rig.encoder.encode(f"[user]{text}<eos>\n[assistant]")


class Talker(OpenAIAgentExecutor):
    """An agent with three turns and an asynchronous client. Its reward is the number of turns."""

    async def run_agent(self, prompt: str, label: Any, **options: Any) -> dict[str, Any]:
        messages: list[Any] = [user(prompt)]
        async with openai.AsyncOpenAI(base_url=options["base_url"], api_key=options["api_key"]) as client:
            for _ in range(3):
                response = await client.chat.completions.create(model="any", messages=messages)
                messages += [response.choices[0].message, user("hello again")]
        return {"reward": 3.0, "score": 0.5, "extra_logs": {"said": len(messages)}}


def test_turns_of_one_conversation_are_one_sequence_of_the_generated_tokens(rig: Rig) -> None:
    batch = rig.runner(Talker()).generate(rig.prompts(), sampling())
    assert batch.objects["status"] == ["finished"] * 6
    assert batch["num_turns"].tolist() == [3] * 6
    assert batch["reward"].tolist() == [3.0] * 6
    assert batch["score"].tolist() == [0.5] * 6
    assert batch["log_said"].tolist() == [7.0] * 6
    check_drawn(rig, batch)
    closing = rig.encoder.encode("<eos>\n[user]hello again<eos>\n[assistant]")
    for row in range(6):
        first, second, third = turns_of(batch, row)
        between = [closing[1:] if turn[-1] == closing[0] else closing for turn in (first, second)]
        expected = [*rendered(rig, TEXTS[row // 2]), *first, *between[0], *second, *between[1], *third]
        assert batch.row(row, "tokens").tolist() == expected
        # The reward of an episode is on its last token.
        assert batch.row(row, "turn_reward").tolist() == [0.0] * (len(expected) - 1) + [3.0]


def test_a_template_that_removes_text_of_earlier_turns_changes_no_tokens(tmp_path: Path) -> None:
    rig = Rig(write_policy(tmp_path))
    # The template repeats only the policy's text after its last broken character, as templates do with reasoning.
    rig.tokenizer.chat_template = str(rig.tokenizer.chat_template).replace(
        "message['content']", "message['content'].split('\N{REPLACEMENT CHARACTER}')[-1]"
    )
    batch = rig.runner(Talker()).generate(rig.prompts(), sampling())
    rig.close()
    assert batch["num_turns"].tolist() == [3] * 6
    assert any("\N{REPLACEMENT CHARACTER}" in str(rig.tokenizer.decode(turns_of(batch, row)[0])) for row in range(6))
    check_drawn(rig, batch)


def test_blocking_clients_run_concurrently_with_separate_episodes(rig: Rig) -> None:
    class Own(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            messages: list[Any] = [user(f"I am {label}")]
            for turn in range(3):
                messages += [chat(client, messages).message, user(f"{label} says {turn}")]
            return {"rewards": float(label[6:])}

    batch = rig.runner(Own()).generate(rig.prompts(12, 1), sampling())
    assert batch["reward"].tolist() == [float(i) for i in range(12)]
    for row in range(12):
        text = str(rig.tokenizer.decode(batch.row(row, "tokens")[~batch.row(row, "action_mask")].tolist()))
        assert text.count(f"[user]I am label {row}<eos>") == 1
        assert [text.count(f"[user]label {row} says {turn}<eos>") for turn in range(3)] == [1, 1, 0]
        assert text.count("label") == 3


def test_a_completion_continues_the_recorded_tokens(rig: Rig) -> None:
    class Writer(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            text = prompt
            for more in (" and", ""):
                text += client.completions.create(model="any", prompt=text).choices[0].text + more
            return {"reward": 1}

    prompts = rig.prompts()
    batch = rig.runner(Writer()).generate(prompts, sampling())
    check_drawn(rig, batch)
    for row in range(6):
        first, second = turns_of(batch, row)
        expected = [*prompts.row(row, "tokens").tolist(), *first, *rig.encoder.encode(" and"), *second]
        assert batch.row(row, "tokens").tolist() == expected


def test_a_stop_text_appended_by_the_client_is_not_doubled(rig: Rig) -> None:
    class Reacts(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            ask = client.completions.create
            first = ask(model="any", prompt=prompt, stop=[*"aeiou"], extra_body={"logprobs": True}).choices[0]
            assert first.logprobs is not None and first.logprobs.tokens is not None
            written = "".join(first.logprobs.tokens)
            cut = written[len(first.text) :]
            ask(model="any", prompt=f"{prompt}{first.text}{cut} and")
            # Tokens that are parts of one character have no text on their own.
            return {"reward": float(cut[:1] in set("aeiou") and written.startswith(first.text))}

    prompts = rig.prompts()
    batch = rig.runner(Reacts()).generate(prompts, sampling(30))
    assert batch["reward"].sum() >= 2
    for row in range(6):
        if batch["reward"][row]:
            first, second = turns_of(batch, row)
            expected = [*prompts.row(row, "tokens").tolist(), *first, *rig.encoder.encode(" and"), *second]
            assert batch.row(row, "tokens").tolist() == expected


def test_a_request_continues_a_text_only_if_it_has_all_recorded_text() -> None:
    drawn = Episode([1, 2], 1, turns=[Turn(1, 2)])
    recording = Recording(0, [], drawn, history="Q: act", tail="Observation:")
    assert recording.rest(CompletionRequest(prompt="Q: actObservation: 42")) == " 42"
    assert recording.rest(CompletionRequest(prompt="Q: act 42")) is None
    recording.tail = None  # the end token of the policy is not part of the client's text
    assert recording.rest(CompletionRequest(prompt="Q: act 42")) is None


def test_an_evaluation_ignores_the_sampling_parameters_of_a_client() -> None:
    body = json.dumps({"prompt": "a", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "max_tokens": 2}).encode()
    for temperature in (0.0, 1.0):
        how = read_request(body, sampling(temperature=temperature, step=EVALUATION_STEP))[1]
        assert how == sampling(2, temperature=temperature, step=EVALUATION_STEP)
        with pytest.raises(RequestError, match="temperature"):
            read_request(body, sampling(temperature=temperature))


def test_a_prompt_that_was_already_rendered_is_rejected(rig: Rig) -> None:
    class Twice(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            with pytest.raises(openai.BadRequestError, match=r"data\.apply_chat_template=false"):
                chat(client, [user(prompt)])
            chat(client, [user("another <eos>")])
            return {"reward": 1.0}

    prompts = rig.prompts(1, 1)
    prompts = prompts.with_objects(prompt=["[user]hello<eos>[assistant]"])
    assert rig.runner(Twice()).generate(prompts, sampling()).objects["error"] == [""]


def test_a_changed_history_is_a_further_sequence_of_the_same_sample(rig: Rig) -> None:
    class Editor(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            first = chat(client, [user(prompt)]).message
            chat(client, [user(prompt), {"role": "assistant", "content": "never said"}, user("continue")])
            chat(client, [user(prompt), first, user("continue")])
            return {"reward": 1.0}

    batch = rig.runner(Editor()).generate(rig.prompts(2, 1), sampling())
    assert batch["prompt_id"].tolist() == [10, 10, 11, 11]
    assert batch["branch"].tolist() == [0, 1, 0, 1]
    assert batch["num_turns"].tolist() == [2, 1, 2, 1]
    assert batch["reward"].tolist() == [1.0] * 4
    prompt = f"[user]{TEXTS[0]}<eos>\n[assistant]never said<eos>\n[user]continue<eos>\n[assistant]"
    assert batch.row(1, "tokens").tolist()[: int(batch["prompt_length"][1])] == rig.encoder.encode(prompt)
    check_drawn(rig, batch)


def test_several_choices_are_sequences_with_different_random_numbers(rig: Rig) -> None:
    class Chooser(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            messages: Any = [user(prompt)]
            response = client.chat.completions.create(model="any", messages=messages, n=3)
            assert [choice.index for choice in response.choices] == [0, 1, 2]
            chat(client, [user(prompt), response.choices[1].message, user("continue")])
            return {"reward": 1.0}

    batch = rig.runner(Chooser()).generate(rig.prompts(1, 1), sampling(12))
    assert batch["num_turns"].tolist() == [2, 1, 1]
    assert len({tuple(turns_of(batch, row)[0]) for row in range(3)}) == 3
    check_drawn(rig, batch)


def test_a_request_during_the_extension_of_a_sequence_starts_another_sequence(rig: Rig) -> None:
    class Hasty(OpenAIAgentExecutor):
        async def run_agent(self, prompt: str, label: Any, **options: Any) -> dict[str, Any]:
            async with openai.AsyncOpenAI(base_url=options["base_url"], api_key=options["api_key"]) as client:
                ask = client.chat.completions.create
                messages: Any = [user(prompt)]
                first = await ask(model="any", messages=messages)
                messages += [first.choices[0].message, user("continue")]
                await asyncio.gather(ask(model="any", messages=messages), ask(model="any", messages=messages))
            return {"reward": 1.0}

    batch = rig.runner(Hasty()).generate(rig.prompts(1, 1), sampling())
    assert batch["num_turns"].tolist() == [2, 1]
    check_drawn(rig, batch)


def test_a_streamed_response_equals_a_plain_one(rig: Rig) -> None:
    class Streamer(Blocking):
        streams = False

        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            logprobs: Any
            usage: Any
            request: dict[str, Any] = {
                "model": "any",
                "messages": [user(prompt)],
                "logprobs": True,
                "stream_options": {"include_usage": True},
            }
            if not self.streams:
                response = client.chat.completions.create(**request)
                text = response.choices[0].message.content
                logprobs = response.choices[0].logprobs
                usage = response.usage
            else:
                text = ""
                logprobs = usage = None
                for chunk in client.chat.completions.create(**request, stream=True):
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        logprobs = choice.logprobs or logprobs
            seen.append((prompt, text, [one.logprob for one in logprobs.content], usage.completion_tokens))
            chat(client, [user(prompt), {"role": "assistant", "content": text}, user("continue")])
            return {"reward": 1.0}

    seen: list[Any] = []
    whole = rig.runner(Streamer()).generate(rig.prompts(2, 1), sampling())
    Streamer.streams = True
    streamed = rig.runner(Streamer()).generate(rig.prompts(2, 1), sampling())
    assert streamed["tokens"].equal(whole["tokens"])
    assert whole["num_turns"].tolist() == [2, 2]
    # Concurrent clients in threads may or may not share a batch, and float sums depend on the batch.
    for (*text, logprobs, count), (*same_text, same_logprobs, same_count) in zip(
        sorted(seen[:2]), sorted(seen[2:]), strict=True
    ):
        assert (text, count) == (same_text, same_count)
        assert logprobs == pytest.approx(same_logprobs, abs=1e-5)
    for row, (_, text, logprobs, count) in enumerate(sorted(seen[:2], key=lambda one: TEXTS.index(one[0]))):
        turn = turns_of(whole, row)[0]
        assert text == rig.tokenizer.decode(turn, skip_special_tokens=True)
        assert count == len(turn) == len(logprobs)
        assert logprobs == whole.row(row, "rollout_logprob")[whole.row(row, "turn") == 0].tolist()


def test_only_keys_of_running_episodes_are_accepted(rig: Rig) -> None:
    class Thief(Blocking):
        def run_agent(self, prompt: str, label: Any, **options: Any) -> Any:
            with httpx.Client(base_url=options["base_url"]) as client:
                response = client.get("/../health")
                assert response.json() == {"status": "ok"}
                own_key = options["api_key"]
                for key in (".", "sk-1", options["session_id"], own_key[:-1], f"{own_key}x", *ended):
                    header = {"Authorization": f"Bearer {key}"}
                    for path in ("/chat/completions", "/completions"):
                        refused = client.post(path, headers=header, json={"prompt": prompt})
                        assert refused.status_code == 401
                        assert refused.json()["error"]["code"] == "invalid_api_key"
                    assert client.get("/models", headers=header).status_code == 401
                models = client.get("/models", headers={"Authorization": f"Bearer {own_key}"}).json()
            ended.append(own_key)
            health.append(str(response.url))
            assert [model["id"] for model in models["data"]] == ["policy"]
            return super().run_agent(prompt, label, **options)

        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            chat(client, [user(prompt)])
            return {"reward": 1.0}

    ended: list[str] = []
    health: list[str] = []
    runner = rig.runner(Thief())
    for _ in range(2):
        assert runner.generate(rig.prompts(1, 1), sampling()).objects["error"] == [""]
    rig.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(health[0])


TOO_LARGE = {
    "16 MB": b'{"messages": ["' + b'","'.join([b"a" * 10**6] * 17) + b'"]}',
    "2 MB": b'{"prompt": "' + b"a" * 2_100_000 + b'"}',
    "100000 values": b'{"messages": [' + b"1," * 100_000 + b"1]}",
    "100 brackets": b'{"prompt": "a", "tools": ' + b'[{"a":' * 99 + b"1" + b"}]" * 99 + b"}",
}


def test_a_request_that_is_too_large_is_rejected_before_it_is_parsed(rig: Rig) -> None:
    class Large(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            key = {"Authorization": f"Bearer {client.api_key}"}
            for limit, body in TOO_LARGE.items():
                refused = httpx.post(f"{client.base_url}completions", content=body, headers=key)
                replies.append((limit, refused.status_code, refused.json()["error"]["message"]))
            # A million invalid values give one error message.
            wrong = b'{"messages": [' + b"1," * 90_000 + b"1]}"
            refused = httpx.post(f"{client.base_url}chat/completions", content=wrong, headers=key)
            replies.append(("messages.0", refused.status_code, refused.json()["error"]["message"]))
            chat(client, [user(prompt)])
            return {"reward": 1.0}

    replies: list[tuple[str, int, str]] = []
    assert rig.runner(Large()).generate(rig.prompts(1, 1), sampling()).objects["error"] == [""]
    assert [status for _, status, _ in replies] == [413] * 4 + [400]
    assert all(limit in message for limit, _, message in replies), replies


REFUSED = {
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.9},
    "frequency_penalty": {"frequency_penalty": 1},
    "tool_choice": {"tool_choice": "required"},
    "response_format": {"extra_body": {"response_format": {"type": "json_object"}}},
    "max_tokens": {"max_tokens": 0},
    "logprobs": {"extra_body": {"logprobs": 5}},
    "n": {"n": 0},
    "messages.1.content.text": {"messages": [user("a"), {"role": "user", "content": [{"type": "image_url"}]}]},
    "seeds": {"extra_body": {"seeds": 1}},
}


def test_unsupported_fields_are_rejected_by_name_and_supported_ones_accepted(rig: Rig) -> None:
    class Picky(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            for param, fields in REFUSED.items():
                with pytest.raises(openai.BadRequestError) as refused:
                    chat(client, **{"messages": [user(prompt)], **fields})
                assert refused.value.param == param
            taken = {"temperature": 0.9, "top_p": 1, "seed": 5, "user": "me", "stop": None, "presence_penalty": None}
            response = chat(client, [user(prompt)], max_tokens=9, max_completion_tokens=2, **taken)
            return {"reward": float(response.finish_reason == "length")}

    batch = rig.runner(Picky()).generate(rig.prompts(3, 1), sampling(4, temperature=0.9))
    assert batch["action_mask"].int().sum() <= 6
    for row in range(3):
        turn = turns_of(batch, row)[0]
        # Some responses end early with an end token.
        assert float(batch["reward"][row]) == float(len(turn) == 2 and not 2 <= turn[-1] < 32)


def test_a_stop_text_is_removed_for_the_client_and_kept_in_the_tokens(rig: Rig) -> None:
    class Stopper(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            choice = chat(client, [user(prompt)], stop=[*"aeiou"])
            assert not set("aeiou") & set(choice.message.content)
            assert choice.finish_reason in ("stop", "length")
            stops.append(choice)
            chat(client, [user(prompt), choice.message, user("continue")])
            return {"reward": 1.0}

    stops: list[Any] = []
    batch = rig.runner(Stopper()).generate(rig.prompts(), sampling(30))
    assert batch["num_turns"].tolist() == [2] * 6
    texts = [str(rig.tokenizer.decode(turns_of(batch, row)[0])) for row in range(6)]
    assert any(text[-1:] in set("aeiou") for text in texts)
    check_drawn(rig, batch)


def test_an_agent_that_exceeds_a_limit_is_truncated(rig: Rig) -> None:
    class Endless(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            messages: list[Any] = [user(prompt)]
            try:
                while True:
                    messages += [chat(client, messages).message, user("hello")]
            except openai.BadRequestError as error:
                codes.append(error.code)
                if label == "label 0":
                    raise
            return {"reward": 2.0}

    codes: list[Any] = []
    batch = rig.runner(Endless(), max_turns=3).generate(rig.prompts(2, 1), sampling())
    assert batch.objects["status"] == ["truncated"] * 2
    assert batch.objects["error"] == ["", ""]
    assert batch["num_turns"].tolist() == [3, 3]
    assert batch["reward"].tolist() == [0.0, 2.0]
    assert batch["reward_failed"].tolist() == [0.0, 0.0]
    batch = rig.runner(Endless(), max_turns=999).generate(rig.prompts(2, 1), sampling())
    assert batch["truncated"].all()
    assert int(batch.lengths.max()) <= POSITIONS
    assert codes == ["max_turns"] * 2 + ["context_length_exceeded"] * 2
    check_drawn(rig, batch)


def test_an_agent_without_space_for_a_response_is_an_error(rig: Rig) -> None:
    class Long(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            with pytest.raises(openai.BadRequestError):
                chat(client, [user("0123456789" * 100)])
            return {"reward": 2.0}

    batch = rig.runner(Long(), max_failed_share=1.0).generate(rig.prompts(1, 1), sampling())
    assert (batch["reward"].tolist(), batch["reward_failed"].tolist()) == ([0.0], [1.0])
    assert re.search(says("tokens", f"{POSITIONS}", "agent.max_tokens"), batch["error"][0])


def test_agents_that_fail_end_only_their_own_episodes(rig: Rig) -> None:
    class Failing(Blocking):
        def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
            if label != "silent":
                chat(client, [user(prompt)])
            if label == "raises":
                raise KeyError("no\nsuch tool")
            if label == "hangs":
                threading.Event().wait()
            return {"nothing": None, "text": {"reward": "much"}, "nan": {"reward": float("nan")}}.get(
                label, {"reward": torch.tensor(0.5)}
            )

    labels = ["raises", "nothing", "text", "nan", "silent", "fine"]
    batch = rig.runner(Failing(), max_failed_share=1.0).generate(rig.prompts(6, 1, labels), sampling())
    assert batch.objects["status"] == ["error"] * 5 + ["finished"]
    assert batch["num_turns"].tolist() == [1, 1, 1, 1, 0, 1]
    assert batch["reward"].tolist() == [0.0] * 5 + [0.5]
    assert batch["reward_failed"].tolist() == [1.0] * 5 + [0.0]
    facts = (("run_agent", "KeyError"), ("None", "reward"), ("rewards", "str"), ("rewards", "nan"), ("base_url",), ())
    for expected, error in zip(facts, batch.objects["error"], strict=True):
        assert re.search(says(*expected), error)
        assert "\n" not in error
    runner = rig.runner(Failing(), max_failed_share=1.0, max_turns=4, step_timeout_s=0.25)
    hung = runner.generate(rig.prompts(1, 1, ["hangs"]), sampling())
    assert re.search(says("run_agent", "1 s"), hung.objects["error"][0])


class Leaver(Blocking):
    """A client that disconnects while the engine waits. The label says whether it requests again."""

    engine: AsyncEngine

    async def execute(self, task: EpisodeTask, policy: Policy) -> list[Episode]:
        self.loop = asyncio.get_running_loop()
        return await super().execute(task, policy)

    def run_agent(self, prompt: str, label: Any, **options: Any) -> Any:
        self.session_id = options["session_id"]
        return super().run_agent(prompt, label, **options)

    def run_episodes(self, client: openai.OpenAI, prompt: str, label: Any) -> Any:
        messages: list[Any] = [user(prompt)]
        messages += [chat(client, messages).message, user("continue")]
        asyncio.run_coroutine_threadsafe(self.engine.pause(), self.loop).result()
        with pytest.raises(openai.APITimeoutError):
            chat(client, messages, timeout=0.3)
        # The engine continues once the server has detected the disconnection.
        assert self._server is not None
        while self._server._sessions[self.session_id].drawing:
            time.sleep(0.01)
        asyncio.run_coroutine_threadsafe(self.engine.resume(), self.loop).result()
        if label == "again":
            chat(client, messages)
        return {"reward": 1.0}


def test_a_client_that_disconnects_cancels_its_request(rig: Rig) -> None:
    agent = Leaver()
    runner = rig.runner(agent, concurrency=1)
    assert isinstance(runner.engine, AsyncEngine)
    agent.engine = runner.engine
    batch = runner.generate(rig.prompts(2, 1, ["again", "never"]), sampling())
    assert batch.objects["status"] == ["finished", "aborted"]
    assert batch["num_turns"].tolist() == [2, 1]
    check_drawn(rig, batch)

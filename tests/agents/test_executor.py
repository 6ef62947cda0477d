"""Episodes of one turn and of many, with a real engine and environments as users write them."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import agents.schema
from agents import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from agents.episode import Episode, EpisodeTask, Policy
from agents.options import AgentOptions
from agents.rendering import first_tokens
from agents.runner import open_runner
from agents.schema import read_sampling, read_step, sampling_params
from components.batch import Batch
from components.generate.config import EVALUATION_STEP, HFRolloutConfig
from tests.agents.episode_cases import POSITIONS, Rig, sampling, turns_of, write_policy
from tests.messages import says

PUBLISHED = """
from typing import Any, Dict
import torch

from agents import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = self.step_idx >= 3
        reward = torch.tensor(1.0) if done else torch.tensor(0.0)
        environment_feedback = (
            "\\n\\nHuman: [CORRECT]\\n</s>"
            if done
            else "\\n\\nHuman: [INCORRECT]\\nPlease analyze the issues and try again.\\n</s>\\n\\nAssistant: "
        )
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": environment_feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"step": self.step_idx},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
"""The example of OpenRLHF's guide with another import."""
INCORRECT = "\n\nHuman: [INCORRECT]\nPlease analyze the issues and try again.\n</s>\n\nAssistant: "


class EnvironmentHandle:
    """Environment whose steps return the items of `script` in turn, and which stores the received states."""

    script: tuple[dict[str, Any], ...] = ()
    received: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        type(self).received.append(states)
        response = self.script[self.steps % len(self.script)]
        self.steps += 1
        return {"rewards": 0.0, "environment_feedback": " go on ", "done": False, **response}


def environment(*script: dict[str, Any]) -> type[EnvironmentHandle]:
    return type("Scripted", (EnvironmentHandle,), {"script": script or ({},), "received": []})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(autouse=True)
def closed(rig: Rig) -> Iterator[None]:
    yield
    rig.close()


def played(rig: Rig, instance: type, count: int = 1, max_new_tokens: int = 6, **options: Any) -> Batch:
    runner = rig.runner(MultiTurnAgentExecutor(instance), **options)
    return runner.generate(rig.prompts(count, samples=1), sampling(max_new_tokens))


def test_the_published_example_of_three_steps_runs_unchanged(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "agent_func.py").write_text(PUBLISHED)
    options = AgentOptions(func_path=str(tmp_path / "agent_func.py"))
    runner = open_runner(str(rig.folder), HFRolloutConfig(), options, lambda: rig.tokenizer)
    batch = runner.generate(rig.prompts(3, samples=2), sampling())
    runner.close()
    assert batch["num_turns"].tolist() == [3] * 6
    assert batch["reward"].tolist() == batch["score"].tolist() == [1.0] * 6
    assert batch["log_step"].tolist() == [3.0] * 6
    assert batch["status"] == ["finished"] * 6
    feedback = rig.encoder.encode(INCORRECT)
    for row in range(6):
        turn = batch.row(row, "turn").tolist()
        tokens = batch.row(row, "tokens").tolist()
        prompt, first = int(batch["prompt_length"][row]), turns_of(batch, row)[0]
        assert tokens[prompt + len(first) :][: len(feedback)] == feedback
        # The sequence is: prompt, turn, feedback, turn, feedback, turn. Nothing follows the last turn.
        runs = [number for place, number in enumerate(turn) if place == 0 or turn[place - 1] != number]
        assert runs == [-1, 0, -1, 1, -1, 2]


def test_the_reward_of_a_turn_is_on_its_last_token_and_the_episode_has_the_sum(rig: Rig) -> None:
    batch = played(
        rig,
        environment(
            {"rewards": 0.5, "scores": 0.1, "extra_logs": {"a": 1}},
            {"rewards": np.float32(-0.25), "scores": 0.2},
            {
                "rewards": torch.tensor([2.0]),
                "scores": torch.tensor(0.75),
                "done": np.bool_(True),
                "extra_logs": {"b": 3},
            },
        ),
        count=2,
    )
    assert batch["reward"].tolist() == [2.25, 2.25]
    assert batch["score"].tolist() == [0.75, 0.75]
    for row in range(2):
        turn, reward = batch.row(row, "turn"), batch.row(row, "turn_reward")
        ends = [int((turn == number).nonzero().max()) for number in range(3)]
        assert reward[ends].tolist() == [0.5, -0.25, 2.0]
        assert int((reward != 0).sum()) == 3
    # The last step sets these values.
    assert batch["log_b"].tolist() == [3.0, 3.0]
    assert "log_a" not in batch


def test_without_scores_the_score_is_the_sum_of_the_rewards(rig: Rig) -> None:
    batch = played(rig, environment({"rewards": 0.25}, {"rewards": 0.5, "scores": None, "done": True}))
    assert batch["score"].tolist() == [0.75]


def test_the_states_have_the_texts_of_the_episode(rig: Rig) -> None:
    instance = environment({}, {"done": True})
    batch = played(rig, instance, stop=["#"])
    first, second = instance.received
    prompt = rig.prompts(1, 1)["prompt"][0]
    assert first["observation_text"] == prompt
    assert (first["label"], first["finish"] in ("stop", "length")) == ("label 0", True)
    decode = rig.decode
    turns = turns_of(batch, 0)
    assert first["action_text"] == decode(turns[0], skip_special_tokens=True)
    # All observed and generated text, including special tokens.
    assert second["observation_text"] == decode(
        rig.encoder.encode_prompt(prompt) + turns[0] + rig.encoder.encode(" go on ")
    )
    params = first["sampling_params"]
    assert params == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6, "stop": ["#"]}
    assert params.max_tokens == 6
    assert not hasattr(params, "min_p")


def test_sampling_params_of_a_step_apply_to_the_next_turn_of_its_episode(rig: Rig) -> None:
    class Short(EnvironmentHandle):
        script = ({},)
        received: ClassVar[list[dict[str, Any]]] = []

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            response = await super().step(states)
            shorter = states["label"] == "label 0" and self.steps == 1
            return response | ({"sampling_params": SimpleNamespace(max_tokens=1, temperature=None)} if shorter else {})

    batch = played(rig, Short, count=2, max_turns=3, max_new_tokens=4)
    most = [state["sampling_params"]["max_tokens"] for state in Short.received if state["label"] == "label 0"]
    assert most == [4, 1, 4]
    others = [state["sampling_params"]["max_tokens"] for state in Short.received if state["label"] == "label 1"]
    assert others == [4] * 3
    assert len(turns_of(batch, 0)[1]) == 1


def test_a_greedy_turn_has_the_most_likely_tokens(rig: Rig) -> None:
    batch = played(rig, environment({"sampling_params": {"temperature": 0}}, {"done": True}))
    row = batch.row(0, "tokens")[: -len(turns_of(batch, 0)[1])]
    prompts = Batch.from_rows({"tokens": [row]}, {"prompt_id": [0], "sample_id": [0]})
    greedy = rig.engine.generate(prompts, sampling(temperature=0.0))
    assert turns_of(batch, 0)[1] == greedy["tokens"][len(row) :].tolist()


def test_sampling_params_may_be_dicts_or_objects() -> None:
    run = sampling(8, temperature=0.7)
    assert read_sampling({"max_tokens": 100, "stop": "x", "top_k": -1}, run) == (run, ["x"])
    assert read_sampling(sampling_params(run, ["a"]), run) == (run, ["a"])
    changed, stop = read_sampling(SimpleNamespace(temperature=0.0, top_p=0.5, min_p=0.1), run)
    assert (changed.temperature, changed.top_p, changed.max_new_tokens, stop) == (0.0, 0.5, 8, [])
    for wrong, facts in [
        ({"max_token": 3}, ["'max_token'", "max_tokens", "temperature", "top_p", "top_k", "stop"]),
        (5, ["sampling_params", "int", 5]),
        ({"temperature": "hot"}, ["sampling_params", "'hot'"]),
        ({"stop": [""]}, ["sampling_params", "stop", "['']"]),
        ({"temperature": -1}, ["temperature=-1"]),
        ({"max_tokens": 0}, ["max_new_tokens=0"]),
        ({"max_tokens": 2.5}, ["sampling_params", "max_tokens", "float"]),
        ({"top_k": 2.5}, ["sampling_params", "top_k", "float"]),
    ]:
        with pytest.raises(ValueError, match=says(*facts)):
            read_sampling(wrong, run)


@pytest.mark.parametrize(
    ("response", "facts"),
    [
        ({"rewards": math.nan}, ["step 0", "'rewards'", "nan"]),
        ({"rewards": [1.0, 2.0]}, ["step 0", "'rewards'", "2)"]),
        ({"rewards": "1"}, ["step 0", "'rewards'", "str"]),
        ({"rewards": None}, ["step 0", "'rewards'", "NoneType"]),
        ({"done": "yes"}, ["step 0", "'done'", "str", "'yes'"]),
        ({"environment_feedback": 3}, ["step 0", "'environment_feedback'", "int", 3]),
        ({"environment_feedback": [{"role": "user"}]}, ["step 0", "'environment_feedback'", "role", "content"]),
        ({"extra_logs": {"verdict": "good"}}, ["step 0", "extra_logs['verdict']"]),
        ({"sampling_params": {"tmp": 1}}, ["sampling_params", "'tmp'"]),
    ],
)
def test_an_invalid_step_ends_its_own_episode_with_an_error_of_one_line(
    rig: Rig, response: dict[str, Any], facts: list[object]
) -> None:
    class Wrong(EnvironmentHandle):
        script = ({"rewards": 1.0},)
        received: ClassVar[list[dict[str, Any]]] = []

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            right = await super().step(states)
            return {**right, **response} if states["label"] == "label 1" else {**right, "done": self.steps == 2}

    batch = played(rig, Wrong, count=3)
    assert batch["status"] == ["finished", "error", "finished"]
    assert batch["reward"].tolist() == [2.0, 0.0, 2.0]
    assert batch["reward_failed"].tolist() == [0.0, 1.0, 0.0]
    assert batch["error"][0] == batch["error"][2] == ""
    assert re.search(says(*facts), batch["error"][1])
    # The episode keeps its earlier turns, and has no reward, not even per turn.
    assert batch["num_turns"].tolist() == [2, 1, 2]
    assert batch.row(1, "turn_reward").count_nonzero() == 0


def test_a_step_with_missing_keys_raises_an_error_with_the_required_keys() -> None:
    with pytest.raises(ValueError, match=says("step 4", ["done"], "rewards", "environment_feedback")):
        read_step({"done": True}, "step 4")
    assert read_step({"rewards": 1, "environment_feedback": None, "done": True}, "step 0").feedback == ""


class Failing(AgentInstanceBase):
    """Raises the exception that the label selects."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if states["label"] == "reset":
            raise KeyError("board")
        return {"observation": "" if states["label"] == "empty" else states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if states["label"] == "step":
            raise ZeroDivisionError("by nobody")
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


def test_an_exception_in_an_environment_ends_its_own_episode(rig: Rig) -> None:
    runner = rig.runner(MultiTurnAgentExecutor(Failing), max_failed_share=0.8)
    labels = ["reset", "fine", "step", "empty", "fine"]
    batch = runner.generate(rig.prompts(5, 1, labels), sampling())
    assert batch["status"] == ["error", "finished", "error", "error", "finished"]
    assert "board" in batch["error"][0]
    assert "by nobody" in batch["error"][2]
    assert "observation" in batch["error"][3]
    # Without an action of the policy there is only the prompt, and nothing to train on.
    prompts = rig.prompts(5, 1)
    assert batch.row(0, "tokens").tolist() == prompts.row(0, "tokens").tolist()
    assert not batch.row(0, "action_mask").any()
    assert batch["num_turns"].tolist() == [0, 1, 1, 0, 1]


def test_another_first_observation_replaces_the_prompt(rig: Rig) -> None:
    class Opening(EnvironmentHandle):
        script = ({"done": True},)
        received: ClassVar[list[dict[str, Any]]] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            chat = [{"role": "user", "content": "Higher?"}]
            return {"observation": chat if states["label"] == "label 0" else "Lower: " + states["observation"]}

    batch = played(rig, Opening, count=2)
    starts = [rig.decode(batch.row(i, "tokens")[: batch["prompt_length"][i]]) for i in range(2)]
    assert starts == ["[user]Higher?<eos>\n[assistant]", f"Lower: {rig.prompts(2, 1)['prompt'][1]}"]


def test_feedback_as_messages_changes_no_earlier_token(rig: Rig) -> None:
    opening, chat = ([{"role": "user", "content": text}] for text in ("Higher?", "Higher."))

    class Chat(EnvironmentHandle):
        script = ({"environment_feedback": chat}, {"done": True})
        received: ClassVar[list[dict[str, Any]]] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"observation": opening}

    batch = played(rig, Chat, count=3, max_new_tokens=3)
    end = rig.tokenizer.eos_token_id
    for row in range(3):
        prompt, (first, second) = first_tokens(rig.encoder, opening), turns_of(batch, row)
        tokens = batch.row(row, "tokens").tolist()
        between = tokens[len(prompt) + len(first) : -len(second)]
        # The untrained model also generates other special tokens. Each of them is rendered as an end token.
        closing = [] if first[-1] in rig.tokenizer.all_special_ids else [end]
        assert tokens[: len(prompt) + len(first)] == prompt + first
        assert between == [*closing, *rig.encoder.encode("\n[user]Higher.<eos>\n[assistant]")]


def test_an_episode_is_truncated_at_max_turns(rig: Rig) -> None:
    batch = played(rig, environment({"rewards": 1.0, "scores": 0.5}), max_turns=4)
    assert batch["num_turns"].tolist() == [4]
    assert batch["status"] == ["truncated"]
    assert batch["truncated"].tolist() == [True]
    # The episode keeps its earlier rewards and ends with the policy's text.
    assert (batch["reward"].tolist(), batch["score"].tolist()) == ([4.0], [0.5])
    assert bool(batch["action_mask"][-1])


def test_feedback_that_exceeds_the_limit_is_omitted_as_a_whole(rig: Rig) -> None:
    prompt = len(rig.prompts(1, 1)["tokens"])
    said = len(rig.encoder.encode(" go on "))
    assert said > 1
    # Two turns of one token with feedback in between. Afterwards feedback fits within the limit, but another turn does
    # not.
    full = prompt + 1 + said + 1
    for most, turns in ((full, 2), (full + said, 2), (full + said + 1, 3)):
        batch = played(rig, environment(), max_new_tokens=1, max_tokens=most)
        assert (batch["num_turns"].tolist(), batch["status"]) == ([turns], ["truncated"])
        assert len(batch["tokens"]) == prompt + turns + (turns - 1) * said
        assert bool(batch["action_mask"][-1])


def test_the_last_turn_is_limited_to_the_remaining_tokens(rig: Rig) -> None:
    prompt = len(rig.prompts(1, 1)["tokens"])
    instance = environment({"done": True, "rewards": 1.0})
    batch = played(rig, instance, max_new_tokens=50, max_tokens=prompt + 1)
    assert len(turns_of(batch, 0)[0]) == 1
    # The environment rewarded the truncated turn.
    assert (batch["status"], batch["reward"].tolist()) == (["finished"], [1.0])
    assert instance.received[0]["sampling_params"].max_tokens == 50


def test_a_turn_truncated_by_a_limit_is_still_rewarded(rig: Rig) -> None:
    instance = environment({"done": True})
    played(rig, instance, count=8, max_new_tokens=2)
    finishes = {received["action_text"]: received["finish"] for received in instance.received}
    assert {"length"} <= set(finishes.values()) <= {"length", "stop"}


def test_an_episode_without_space_for_a_turn_is_an_error_with_length_and_limit(rig: Rig) -> None:
    prompts = rig.prompts(2, 1)
    longest = int(prompts.lengths.max())
    alone = SingleTurnAgentExecutor(lambda *_: {"rewards": [1]})
    for executor in (MultiTurnAgentExecutor(environment({"done": True})), alone):
        batch = rig.runner(executor, max_tokens=longest, max_failed_share=1.0).generate(prompts, sampling(3))
        full = prompts.lengths.tolist().index(longest)
        assert batch["status"][full] == "error"
        assert batch["reward_failed"].tolist() == [float(row == full) for row in range(2)]
        assert re.search(says(f"{longest} tokens", f"{longest} ", "agent.max_tokens"), batch["error"][full])
        assert batch.row(full, "tokens").tolist() == prompts.row(full, "tokens").tolist()
        assert not batch.row(full, "action_mask").any()
        assert batch["num_turns"].tolist() == [int(row != full) for row in range(2)]


def test_an_episode_without_turns_is_truncated_to_the_models_positions(rig: Rig) -> None:
    class Long(EnvironmentHandle):
        script = ({},)
        received: ClassVar[list[dict[str, Any]]] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"observation": "0123456789" * 100}

    batch = played(rig, Long, max_failed_share=1.0)
    assert batch.lengths.tolist() == batch["prompt_length"].tolist() == [POSITIONS]
    assert re.search(says("1000 tokens", f"{POSITIONS}"), batch["error"][0])


def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(rig: Rig) -> None:
    free = played(rig, environment({"done": True}), count=12, max_new_tokens=12)
    # The stop text spans two adjacent sampled tokens.
    row, text = next(
        (row, text)
        for row in range(12)
        for turn in [turns_of(free, row)[0]]
        if len(turn) > 5 and (text := rig.decode(turn[2:4])).isascii() and text not in rig.decode(turn[:3])
    )
    instance = environment({"done": True})
    for batch in (
        played(rig, instance, count=12, max_new_tokens=12, stop=["nowhere to be found", text]),
        rig.runner(SingleTurnAgentExecutor(), stop=[text]).generate(rig.prompts(12, 1), sampling(12)),
    ):
        drawn = turns_of(free, row)[0]
        written = rig.decode(drawn)
        assert text in written
        assert turns_of(batch, row)[0] == drawn[:4]
        assert batch["status"][row] == "finished"
        for other in range(12):
            turn = turns_of(batch, other)[0]
            assert turn == turns_of(free, other)[0][: len(turn)]
            assert text not in rig.decode(turn[:-1])
    assert instance.received[0]["sampling_params"].stop == ["nowhere to be found", text]


def test_a_change_of_the_runs_sampling_parameters_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    agents.schema._warn_changed.cache_clear()
    run_sampling = sampling(8, temperature=0.7)
    read_sampling({"temperature": 0.7, "top_p": 1, "max_tokens": 3}, run_sampling)
    read_sampling({"temperature": 0.5}, sampling(8, step=EVALUATION_STEP))
    assert not caplog.records
    for requested in ({"temperature": 0.5}, {"top_k": 3}):
        read_sampling(requested, run_sampling)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(says("temperature", "top_p", "top_k"), caplog.text)


def test_a_reward_besides_those_of_the_turns_is_on_the_last_token(rig: Rig) -> None:
    class Judged(MultiTurnAgentExecutor):
        async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
            episode = await super().execute(task, policy)
            episode.reward = 5.0
            return episode

    class Two(EnvironmentHandle):
        script = ({"rewards": 2.0}, {"rewards": 1.0, "done": True})

    batch = rig.runner(Judged(Two)).generate(rig.prompts(1, 1), sampling())
    turn, earned = batch["turn"], batch["turn_reward"]
    assert [float(earned[turn == number].sum()) for number in (0, 1)] == [2.0, 3.0]


def test_a_reward_function_with_a_responses_parameter_receives_the_responses(rig: Rig) -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[Any], responses: list[str]) -> Any:
        received.extend(responses)
        return {"rewards": [1.0]}

    received: list[str] = []
    batch = rig.runner(SingleTurnAgentExecutor(reward_func)).generate(rig.prompts(2, 1), sampling())
    assert sorted(received) == sorted(rig.decode(turns_of(batch, row)[0], skip_special_tokens=True) for row in range(2))


def test_a_single_turn_is_rewarded_by_its_function_or_left_unrewarded(rig: Rig) -> None:
    calls: list[Any] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any) -> dict[str, Any]:
        calls.append((queries, prompts, labels))
        return {"rewards": torch.tensor([3.0]), "scores": [0.5], "extra_logs": {"words": 2}}

    prompts = rig.prompts(2, 1)
    batch = rig.runner(SingleTurnAgentExecutor(reward_func)).generate(prompts, sampling())
    assert (batch["reward"].tolist(), batch["score"].tolist()) == ([3.0, 3.0], [0.5, 0.5])
    assert batch["log_words"].tolist() == [2.0, 2.0]
    assert sorted(calls) == sorted(
        ([rig.decode(batch.row(i, "tokens"))], [prompts["prompt"][i]], [f"label {i}"]) for i in range(2)
    )
    later = rig.runner(SingleTurnAgentExecutor()).generate(prompts, sampling())
    assert not {"reward", "score", "reward_failed"} & set(later.names)
    assert later["tokens"].tolist() == batch["tokens"].tolist()


def test_a_reward_that_raises_or_hangs_ends_its_own_episode(rig: Rig) -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
        if labels == ["hang"]:
            threading.Event().wait()
        return {"rewards": [float(labels[0])]}

    runner = rig.runner(SingleTurnAgentExecutor(reward_func), step_timeout_s=2, max_failed_share=0.7)
    batch = runner.generate(rig.prompts(4, 1, ["1", "two", "hang", "3"]), sampling())
    assert batch["status"][1:3] == ["error", "error"]
    assert batch["reward"].tolist() == [1.0, 0.0, 0.0, 3.0]
    assert re.search(says("ValueError", "'two'"), batch["error"][1])
    assert re.search(says("TimeoutError", "2 s", "agent.step_timeout_s"), batch["error"][2])


def test_agents_are_imported_without_torch() -> None:
    code = "import agents, sys; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

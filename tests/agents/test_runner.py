"""EpisodeRunner: episodes as a Batch, in one call or in flight."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from agents.episode import Episode, EpisodeTask, Policy
from agents.options import AgentOptions
from agents.rendering import first_tokens
from agents.runner import WINDOW, EpisodeRunner, open_runner
from components.batch import Batch
from components.generate.async_engine import Request
from components.generate.batched_engine import BatchedEngine
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.weights.publisher import WeightHandle, WeightPublisher
from tests.agents.episode_cases import POSITIONS, Rig, sampling, turns_of, write_policy
from tests.messages import says


class Talk(AgentInstanceBase):
    """Environment of two to four turns with text or messages between them, by the number in the label."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.left = 2 + int(states["label"][-1]) % 3
        return {"observation": [{"role": "user", "content": states["observation"]}]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.left -= 1
        said = " hello environment\n" if self.left % 2 else [{"role": "user", "content": "hello <bos> higher"}]
        return {"rewards": 1.0, "environment_feedback": said, "done": not self.left, "extra_logs": {"left": self.left}}


class Flaky(AgentInstanceBase):
    """Environment that raises if the label says so."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if states["label"] == "bad":
            raise KeyError("no such board")
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


class Recording(BatchedEngine):
    """Engine that records its requests."""

    def __init__(self, engine: HFRolloutEngine) -> None:
        super().__init__(engine)
        self.requests: list[tuple[int, int, list[int], Request]] = []

    def submit(self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0) -> Any:
        request = super().submit(tokens, sampling, prompt_id=prompt_id, sample_id=sample_id)
        self.requests.append((prompt_id, sample_id, list(tokens), request))
        return request


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(autouse=True)
def closed(rig: Rig) -> Iterator[None]:
    yield
    rig.close()


def same(a: Batch, b: Batch, but: Sequence[str] = ()) -> None:
    """Check that all columns are equal bit by bit."""
    assert set(a.names) == set(b.names)
    for name in a.names:
        if name in a.objects:
            assert a[name] == b[name]
        elif name not in but:
            assert a[name].dtype == b[name].dtype, name
            assert torch.equal(a[name].nan_to_num(7.5), b[name].nan_to_num(7.5)), name


def test_logprobs_equal_those_of_the_training_forward_pass_in_all_turns(rig: Rig) -> None:
    batch = rig.runner(MultiTurnAgentExecutor(Talk)).generate(rig.prompts(6, 3), sampling(8, temperature=0.8))
    assert batch["num_turns"].tolist() == [2] * 3 + [3] * 3 + [4] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    mask = batch["action_mask"]
    gap = batch["rollout_logprob"] - rig.training_logprobs(batch, 0.8)
    assert int(mask.sum()) > 200
    assert float(gap[mask].abs().max()) < 1e-4
    assert not batch["rollout_logprob"][~mask].any()


def test_most_tokens_change_if_they_are_decoded_and_encoded_again(rig: Rig) -> None:
    batch = rig.runner(MultiTurnAgentExecutor(Talk)).generate(rig.prompts(3, 4), sampling(8))
    turns = [turn for row in range(len(batch)) for turn in turns_of(batch, row)]
    changed = [turn for turn in turns if rig.encoder.encode(rig.decode(turn)) != turn]
    assert len(changed) > len(turns) / 2


def test_every_token_has_its_turn_version_and_reward(rig: Rig) -> None:
    prompts = rig.prompts(3, 2)
    batch = rig.runner(MultiTurnAgentExecutor(Talk)).generate(prompts, sampling(5))
    mask = batch["action_mask"]
    turn = batch["turn"]
    assert torch.equal(mask, turn >= 0)
    assert torch.equal(batch["token_version"], torch.where(mask, 0, -1))
    dtypes = {name: str(batch[name].dtype) for name in batch.names if name not in batch.objects}
    assert dtypes == {
        **dict.fromkeys(("tokens", "turn", "token_version", "prompt_id", "sample_id"), "torch.int64"),
        **dict.fromkeys(("prompt_length", "weight_version", "num_turns", "branch"), "torch.int64"),
        **dict.fromkeys(("action_mask", "truncated"), "torch.bool"),
        **dict.fromkeys(("rollout_logprob", "turn_reward", "reward", "score"), "torch.float32"),
        **dict.fromkeys(("reward_failed", "log_left"), "torch.float32"),
    }
    for name in ("prompt_id", "sample_id"):
        assert torch.equal(batch[name], prompts[name])
    assert (batch["prompt"], batch["label"]) == (prompts["prompt"], prompts["label"])
    openings = [[{"role": "user", "content": text}] for text in prompts["prompt"]]
    assert batch["prompt_length"].tolist() == [len(first_tokens(rig.encoder, chat)) for chat in openings]
    for row in range(len(batch)):
        rewards = batch.row(row, "turn_reward")
        assert float(rewards.sum()) == float(batch["reward"][row]) == float(batch["num_turns"][row])
        ends = rewards.nonzero().flatten()
        numbers = batch.row(row, "turn")
        assert numbers[ends].tolist() == list(range(len(ends)))
        assert all(numbers[end + 1] == -1 for end in ends[:-1])


words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12) | st.sampled_from(
    ["<eos>", " he", "llo"]
)
said = words | st.lists(st.builds(dict, role=st.sampled_from(["user", "tool"]), content=words), max_size=2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(said, min_size=1, max_size=4), seed=st.integers(0, 10**6), most=st.integers(1, 7))
def test_generated_tokens_are_unchanged_for_any_feedback(rig: Rig, script: list[Any], seed: int, most: int) -> None:
    has_messages = any(isinstance(words, list) for words in script)

    class Saying(AgentInstanceBase):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.turns = 0
            return {"observation": [{"role": "user", "content": "?"}] if has_messages else script[-1] or "?"}

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.turns += 1
            return {
                "rewards": 0.0,
                "environment_feedback": script[self.turns - 1],
                "done": self.turns == len(script),
                "sampling_params": {"stop": ["e", "\n"]} if self.turns % 2 else None,
            }

    engine = Recording(rig.engine)
    runner = EpisodeRunner(engine, MultiTurnAgentExecutor(Saying), AgentOptions(max_tokens=150), rig.tokenizer)
    batch = runner.generate(rig.prompts(2, 2), sampling(most, seed=seed))
    assert set(batch["status"]) <= {"finished", "truncated"}
    ids = zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)
    rows = {key: row for row, key in enumerate(ids)}
    for prompt_id, sample_id, before, request in engine.requests:
        row = rows[prompt_id, sample_id]
        tokens = batch.row(row, "tokens").tolist()
        turn = batch.row(row, "turn").tolist()
        start = len(before)
        assert tokens[:start] == before
        drawn = asyncio.run(request.result()).tokens[: turn.count(turn[start])]
        assert turn[start - 1] != turn[start] >= 0
        assert tokens[start : start + len(drawn)] == drawn
    assert len(engine.requests) == int(batch["num_turns"].sum())
    runner.close()


def test_two_runs_with_one_seed_are_equal_and_with_another_seed_differ(rig: Rig) -> None:
    runner = rig.runner(MultiTurnAgentExecutor(Talk))
    first, again, other = (runner.generate(rig.prompts(5, 2), sampling(seed=seed)) for seed in (1, 1, 2))
    same(first, again)
    assert first["tokens"].tolist() != other["tokens"].tolist()


def test_the_concurrency_does_not_change_tokens(rig: Rig) -> None:
    one, many = (
        rig.runner(MultiTurnAgentExecutor(Talk), concurrency=count).generate(rig.prompts(5, 2), sampling())
        for count in (1, 64)
    )
    same(one, many, but=["rollout_logprob"])
    assert float((one["rollout_logprob"] - many["rollout_logprob"]).abs().max()) < 1e-5


def test_at_most_concurrency_episodes_run_and_they_start_in_order(rig: Rig) -> None:
    class Counting(AgentInstanceBase):
        open_now = 0
        most = 0
        begun: ClassVar[list[str]] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            Counting.open_now += 1
            Counting.most = max(Counting.most, Counting.open_now)
            Counting.begun.append(states["label"])
            await asyncio.sleep(0)
            return {"observation": states["observation"]}

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            Counting.open_now -= 1
            return {"rewards": 0.0, "environment_feedback": "", "done": True}

    rig.runner(MultiTurnAgentExecutor(Counting), concurrency=3).generate(rig.prompts(10, 1), sampling())
    assert Counting.most == 3
    assert Counting.begun == [f"label {i}" for i in range(10)]


def test_a_few_errors_are_reported_and_too_many_raise(rig: Rig) -> None:
    labels = ["bad", "good", "good", "bad", "good", "good"]
    batch = rig.runner(MultiTurnAgentExecutor(Flaky)).generate(rig.prompts(6, 1, labels), sampling())
    assert batch["status"] == ["error", "finished", "finished", "error", "finished", "finished"]
    assert batch["reward_failed"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert "no such board" in batch["error"][0]
    strict = rig.runner(MultiTurnAgentExecutor(Flaky), max_failed_share=0.0)
    with pytest.raises(RuntimeError, match=says("1 of 6", "agent.max_failed_share=0", "no such board")):
        strict.generate(rig.prompts(6, 1, labels), sampling())
    with pytest.raises(RuntimeError, match="3 of 6") as caught:
        rig.runner(MultiTurnAgentExecutor(Flaky)).generate(
            rig.prompts(6, 1, ["bad", "bad", "bad", *labels[:3]]), sampling()
        )
    # The traceback has the original position.
    assert any("in reset" in note for note in caught.value.__notes__)
    # The runner can be used again afterwards.
    good = strict.generate(rig.prompts(2, 1, ["good", "good"]), sampling())
    assert good["status"] == ["finished", "finished"]


def test_too_many_errors_raise_before_the_other_episodes_end(rig: Rig) -> None:
    class Waiting(Flaky):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            await asyncio.sleep(3600)
            raise AssertionError

    with pytest.raises(RuntimeError, match="2 of 2"):
        runner = rig.runner(MultiTurnAgentExecutor(Waiting), step_timeout_s=3600.0, max_failed_share=0.5)
        runner.generate(rig.prompts(2, 1, ["bad", "bad"]), sampling())
    with pytest.raises(RuntimeError, match="1 of 2"):
        runner = rig.runner(MultiTurnAgentExecutor(Waiting), step_timeout_s=3600.0)
        runner.generate(rig.prompts(2, 1, ["good", "bad"]), sampling())


def test_a_log_that_an_episode_lacks_is_nan(rig: Rig) -> None:
    class Logging(Flaky):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return await super().step(states) | {"extra_logs": {states["label"]: 2}}

    batch = rig.runner(MultiTurnAgentExecutor(Logging)).generate(rig.prompts(3, 1, ["a", "b", "a"]), sampling())
    assert batch["log_a"].tolist()[::2] == [2.0, 2.0]
    assert [math.isnan(value) for value in batch["log_a"].tolist()] == [False, True, False]
    assert [math.isnan(value) for value in batch["log_b"].tolist()] == [True, False, True]


class Branching(AgentExecutorBase):
    """Executor that generates two sequences with different random streams, and two with the same stream."""

    async def execute(self, task: EpisodeTask, policy: Policy) -> list[Episode]:
        episodes = []
        for stream in (0, 1, 1):
            episode = Episode(list(task.tokens), len(task.tokens), reward=1.0 + stream, score=1.0)
            episode.act(*await policy.draw(episode.tokens, task.sampling, stream=stream))
            episodes.append(episode)
        return episodes[: 1 + 2 * (task.prompt_id % 2)]


def test_branches_follow_their_main_sequence(rig: Rig) -> None:
    batch = rig.runner(Branching()).generate(rig.prompts(2, 2), sampling(8))
    assert batch["prompt_id"].tolist() == [10, 10, 11, 11, 11, 11, 11, 11]
    assert batch["sample_id"].tolist() == [0, 1, 0, 0, 0, 1, 1, 1]
    assert batch["branch"].tolist() == [0, 0, 0, 1, 2, 0, 1, 2]
    assert batch["reward"].tolist() == [1, 1, 1, 2, 2, 1, 2, 2]
    assert batch["label"] == ["label 0"] * 2 + ["label 1"] * 6
    drawn = [turns_of(batch, row)[0] for row in range(8)]
    assert drawn[3] == drawn[4] != drawn[2]
    assert drawn[2] != drawn[5]


@pytest.mark.parametrize(
    ("returned", "facts"),
    [
        (None, ["execute", "None", "Episode"]),
        ([], ["execute", "[]", "Episode"]),
        (Episode([1, 2], 2, logprobs=[0.0] * 3), ["tokens", "logprobs", "versions"]),
    ],
)
def test_an_invalid_return_value_of_an_executor_is_an_error_of_its_episode(
    rig: Rig, returned: Any, facts: list[str]
) -> None:
    class Wrong(AgentExecutorBase):
        async def execute(self, task: EpisodeTask, policy: Policy) -> Any:
            return returned

    batch = rig.runner(Wrong(), max_failed_share=1.0).generate(rig.prompts(1, 1), sampling())
    assert batch["status"] == ["error"]
    assert re.search(says(*facts), batch["error"][0])


def test_an_engine_failure_ends_the_run_for_any_max_failed_share(rig: Rig) -> None:
    class Swallowing(AgentExecutorBase):
        async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
            episode = Episode(list(task.tokens), len(task.tokens))
            try:
                await policy.draw(task.tokens, task.sampling)
            except ValueError:
                episode.fail("it was nothing")
            return episode

    for executor in (MultiTurnAgentExecutor(Talk), Swallowing()):
        runner = rig.runner(executor, max_failed_share=1.0)
        rig.engine.sleep()
        with pytest.raises(ValueError, match="sleeps"):
            runner.generate(rig.prompts(2, 1), sampling())
        rig.engine.wake()
        runner.generate(rig.prompts(2, 1), sampling())


def test_an_episode_whose_request_is_aborted_has_the_status_aborted(rig: Rig) -> None:
    class Aborting(BatchedEngine):
        def submit(
            self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
        ) -> Any:
            request = super().submit(tokens, sampling, prompt_id=prompt_id, sample_id=sample_id)
            if prompt_id == 11 and len(tokens) > 20:
                self.aborting = asyncio.create_task(request.abort())
            return request

    runner = EpisodeRunner(Aborting(rig.engine), MultiTurnAgentExecutor(Talk), AgentOptions(), rig.tokenizer)
    batch = runner.generate(rig.prompts(3, 1), sampling())
    runner.close()
    assert batch["status"] == ["finished", "aborted", "finished"]
    assert batch["reward_failed"].tolist() == [0.0, 1.0, 0.0]
    assert batch["truncated"].tolist() == [False, False, False]


def test_the_models_positions_limit_an_episode(rig: Rig) -> None:
    marks = len(first_tokens(rig.encoder, [{"role": "user", "content": ""}]))

    class Long(Talk):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            await super().reset(states)
            return {"observation": [{"role": "user", "content": "0" * (POSITIONS - 2 - marks)}]}

    batch = rig.runner(MultiTurnAgentExecutor(Long)).generate(rig.prompts(3, 1), sampling(50))
    assert int(batch.lengths.max()) <= POSITIONS
    assert set(batch["status"]) == {"truncated"}


def publish(rig: Rig, folder: Path, version: int, seed: int) -> WeightHandle:
    other = Rig(write_policy(folder / "other", seed)).engine.model
    return WeightPublisher(folder / f"w{version}").publish(version, other.state_dict().items())


@pytest.fixture
def own_rig(tmp_path: Path) -> Iterator[Rig]:
    """Create a rig whose weights a test may change."""
    rig = Rig(write_policy(tmp_path / "own"))
    yield rig
    rig.close()


def test_received_weights_are_used_for_generation(own_rig: Rig, tmp_path: Path) -> None:
    runner = own_rig.runner(MultiTurnAgentExecutor(Talk))
    before = runner.generate(own_rig.prompts(), sampling())
    runner.receive(publish(own_rig, tmp_path, 3, seed=9))
    after = runner.generate(own_rig.prompts(), sampling())
    assert runner.engine.weight_version == 3
    assert set(before["weight_version"].tolist()) == {0}
    assert set(after["weight_version"].tolist()) == {3}
    assert torch.equal(after["token_version"], torch.where(after["action_mask"], 3, -1))
    assert before["tokens"].tolist() != after["tokens"].tolist()


class Gated(Talk):
    """Environment whose first step waits until its label is in `through`."""

    through: ClassVar[set[str]] = set()

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        while states["label"] not in self.through:
            await asyncio.sleep(0.001)
        return await super().step(states)


def test_complete_groups_are_collected_in_the_order_in_which_they_finish(own_rig: Rig, tmp_path: Path) -> None:
    Gated.through = {"label 1"}
    runner = own_rig.runner(MultiTurnAgentExecutor(Gated))
    prompts = own_rig.prompts(3, 2)
    assert runner.collect(60.0).batch is None
    runner.begin(prompts, sampling())
    with pytest.raises(ValueError, match="prompt 10"):
        runner.begin(prompts, sampling())
    first = runner.collect(60.0)
    assert first.batch is not None
    assert first.batch["prompt_id"].tolist() == [11, 11]
    assert first.in_flight == [10, 12]
    waiting = runner.collect(0.02)
    assert (waiting.batch, waiting.in_flight) == (None, [10, 12])
    # The episodes continue with the new weights.
    runner.receive(publish(own_rig, tmp_path, 1, seed=9))
    Gated.through = {"label 2"}
    second = runner.collect(60.0)
    Gated.through = {"label 0"}
    third = runner.collect(60.0)
    assert second.batch is not None and third.batch is not None
    assert (second.batch["prompt_id"].tolist(), second.in_flight) == ([12, 12], [10])
    assert (third.batch["prompt_id"].tolist(), third.in_flight) == ([10, 10], [])
    for batch in (second.batch, third.batch):
        turn = batch["turn"]
        version = batch["token_version"]
        assert set(version[turn == 0].tolist()) == {0}
        assert set(version[turn > 0].tolist()) == {1}
        assert batch["weight_version"].tolist() == [0, 0]
    assert runner.collect(60.0).batch is None


def test_episodes_in_flight_have_the_same_tokens_as_generate(rig: Rig) -> None:
    played = rig.runner(MultiTurnAgentExecutor(Talk)).generate(rig.prompts(3, 2), sampling())
    runner = rig.runner(MultiTurnAgentExecutor(Talk), concurrency=2)
    runner.begin(rig.prompts(3, 2), sampling())
    batches: list[Batch] = []
    while (collected := runner.collect(60.0)).batch is not None:
        batches.append(collected.batch)
    together = Batch.concat(batches)
    same(together.select(together["prompt_id"].argsort(stable=True)), played, but=["rollout_logprob"])


def test_without_an_agent_single_turns_run_in_flight(rig: Rig) -> None:
    runner = open_runner(str(rig.folder), HFRolloutConfig(), AgentOptions(), lambda: rig.tokenizer)
    runner.begin(rig.prompts(2, 2), sampling())
    groups = [runner.collect(60.0).batch]
    if groups[0] is not None and len(groups[0]) < 4:
        groups.append(runner.collect(60.0).batch)
    batch = Batch.concat([group for group in groups if group is not None])
    runner.close()
    plain = rig.engine.generate(rig.prompts(2, 2), sampling())
    order = batch["prompt_id"].argsort(stable=True)
    assert torch.equal(batch.select(order)["tokens"], plain["tokens"])
    assert torch.equal(batch.select(order)["truncated"], plain["truncated"])
    assert "reward" not in batch


def test_errors_in_flight_are_counted_over_the_last_episodes(rig: Rig) -> None:
    runner = rig.runner(MultiTurnAgentExecutor(Flaky))
    runner.begin(rig.prompts(3, 1, ["good", "bad", "bad"]), sampling())
    while runner.collect(60.0).in_flight:
        pass
    # Three failures of three episodes are too many. A few failures are not enough evidence before WINDOW episodes.
    assert WINDOW * 0.1 > 2
    alone = rig.runner(MultiTurnAgentExecutor(Flaky))
    alone.begin(rig.prompts(3, 1, ["bad"] * 3), sampling())
    with pytest.raises(RuntimeError, match="3 of 3"):
        while alone.collect(60.0).in_flight:
            pass


def test_closing_cancels_episodes_in_flight(rig: Rig) -> None:
    begun: list[str] = []
    ended: list[str] = []

    class Endless(Talk):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            begun.append(states["label"])
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(states["label"])
            raise AssertionError

    runner = rig.runner(MultiTurnAgentExecutor(Endless), step_timeout_s=3600.0)
    runner.begin(rig.prompts(2, 2), sampling())
    while len(begun) < 4:
        assert runner.collect(0.02).in_flight == [10, 11]
    assert ended == []
    rig.close()
    assert sorted(ended) == ["label 0", "label 0", "label 1", "label 1"]


def test_no_prompts_give_no_episodes(rig: Rig) -> None:
    batch = rig.runner(MultiTurnAgentExecutor(Talk)).generate(rig.prompts(1, 1)[0:0], sampling())
    assert len(batch) == batch.num_tokens == 0
    assert batch["tokens"].dtype == torch.int64

"""verl's tools: a YAML file of classes. Their calls are run in episodes that the run's reward function scores."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import run_here
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl_runs import batches

from agents.verl_tools import AgentInstance
from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from tests.chat_models import CHATML, chat_model
from tests.messages import says
from training.options.config import load_config
from training.options.schema import ConfigError

pytestmark = pytest.mark.full

TURNS = "actor_rollout_ref.rollout.multi_turn"
TOOL_TEMPLATE = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count to the label.",
        "parameters": {"type": "object", "properties": {"up": {"type": "integer"}}, "required": ["up"]},
    },
}
TOOL = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

released = []


class Count(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.state = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.state["it"] = ground_truth
        return "it", ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        up = parameters["up"]
        self.state["sum"] = up
        text = f"{up} of {self.state['it']}" + "." * up * self.config.get("long", 0)
        return ToolResponse(text=text), -0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(str(self.state["sum"]) == str(self.state["it"]))

    async def release(self, instance_id, **kwargs):
        released.append(instance_id)


class Older:
    """As up to 0.4: without the base class, with its own schema, and texts."""

    name = "older"

    def __init__(self, config, tool_schema):
        from types import SimpleNamespace

        about = SimpleNamespace(name="older", description="An older one.")
        self.tool_schema = SimpleNamespace(function=about, model_dump=lambda **_: {"type": "function"})

    async def create(self, instance_id=None):
        return "id"

    async def execute(self, instance_id, parameters):
        return f"{instance_id}:{sorted(parameters)}", 0.25, {}

    async def calc_reward(self, instance_id):
        return 0.0

    async def release(self, instance_id):
        pass
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # What the policy and its tools wrote: each result of the tool counts.
    return {"score": solution_str.count(f"1 of {ground_truth}") / 4, "turns": extra_info["num_turns"]}
"""
CALL = '<tool_call>{"name": "count", "arguments": {"up": 1}}</tool_call>'


def write_tools(folder: Path, *entries: dict[str, Any], modules: str = "count_tool") -> str:
    """Write a file of tools into a subfolder of the folder that has their module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{modules}.py").write_text(TOOL)
    below = folder / "config"
    below.mkdir(exist_ok=True)
    # JSON is valid YAML.
    (below / "tools.yaml").write_text(json.dumps({"tools": entries}))
    return str(below / "tools.yaml")


def entry(name: str = "count_tool.Count", **more: Any) -> dict[str, Any]:
    return {"class_name": name, "config": {}, "tool_schema": SCHEMA} | more


def calling_model(folder: Path) -> Path:
    """Write a policy that calls the tool in about half of its turns, and otherwise ends. A call is one token."""
    chat_model(folder, template=TOOL_TEMPLATE, eos="<|im_end|>", eos_token_id=[2, 260])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([CALL])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    ids: Any = tokenizer.convert_tokens_to_ids([CALL, "<|im_end|>"])
    model.config.tie_word_embeddings = False
    head: Any = torch.nn.Linear(model.config.hidden_size, len(tokenizer), bias=False)
    model.lm_head = head
    with torch.no_grad():
        # The first number of each token's hidden state is large and positive for any input.
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[:, 0] = 5.0
        head.weight.mul_(0.01)
        head.weight[ids, 0] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_step_trains_on_episodes_that_call_tools_of_verl(tmp_path: Path) -> None:
    tools = write_tools(tmp_path / "repo", entry())
    row = {"data_source": "mine", "agent_name": "tool_agent", "prompt": [{"role": "user", "content": "Count."}]}
    kwargs = {"count": {"create_kwargs": {"ground_truth": "7"}}}
    row |= {"reward_model": {"ground_truth": "7"}, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (tmp_path / "reward.py").write_text(REWARD)
    run = run_here(
        "verl_ppo",
        tmp_path / "run",
        *plain_arguments(
            f"""data.train_files={tmp_path}/rows.jsonl data.train_batch_size=8 data.max_prompt_length=512
            data.max_response_length=256 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4
            actor_rollout_ref.model.path={calling_model(tmp_path / "policy")}
            actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_dynamic_bsz=true
            actor_rollout_ref.rollout.name=hf actor_rollout_ref.actor.optim.lr=1e-3
            actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
            {TURNS}.enable=True {TURNS}.tool_config_path={tools} {TURNS}.max_assistant_turns=3 {TURNS}.format=hermes
            custom_reward_function.path={tmp_path}/reward.py trainer.total_epochs=1""".split()
        ),
    )
    assert run.code == 0, run.err[-3000:]
    (batch,) = batches(run)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    calls = [sum(tokenizer.decode(batch.row(i, "tokens")).count(s) for s in ("1 of 7",)) for i in range(len(batch))]
    assert max(calls) == 2  # after the third turn no result follows
    assert min(calls) == 0
    turns = batch["num_turns"].tolist()
    assert calls == [count - 1 for count in turns]
    # The function gets the whole episode, and its reward is that of the episode.
    assert batch["reward"].tolist() == pytest.approx([count / 4 for count in calls])
    assert batch["log_turns"].tolist() == [2 * count for count in turns]
    assert batch["advantage"].abs().sum() > 0
    # Tool results are not trained on, and the prompt contains the tool's schema.
    for i in range(len(batch)):
        written = tokenizer.decode(batch.row(i, "tokens")[batch.row(i, "action_mask")])
        assert "1 of 7" not in written
        assert "Count to the label." in tokenizer.decode(batch.row(i, "tokens"))


def test_each_tool_call_creates_and_releases_an_instance(tmp_path: Path) -> None:
    path = write_tools(
        tmp_path, entry("once_tool.Count", config={"long": 5}), entry("once_tool.Older", tool_schema=None),
        modules="once_tool",
    )  # fmt: skip

    async def play(**options: Any) -> list[Any]:
        agent = AgentInstance(path, **options)
        extra = {"tools_kwargs": {"count": {"create_kwargs": {"ground_truth": 20}}, "older": None}}
        begun = await agent.reset({"observation": "the prompt", "label": "20", "extra_info": extra})
        assert begun == {"observation": "the prompt"}
        calls = [("count", {"up": 20}), ("older", {"b": 1, "a": 2}), ("count", {"down": 1})]
        texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        action = "".join(f"<tool_call>{text}</tool_call>" for text in texts)
        step = await agent.step({"action_text": action, "label": "20"})
        return [[message["content"] for message in step["environment_feedback"]], step["extra_logs"], step["done"]]

    results, logs, done = asyncio.run(play(max_parallel_calls=3, max_tool_response_length=20))
    assert results[0] == "20 of 20.." + "...(truncated)..." + "." * 10
    assert results[1] == "id:['a', 'b']"
    assert results[2] == "error: KeyError: 'up'"
    assert not done
    assert logs == {"tool_calls": 3, "tool_errors": 1, "tool_reward": -0.25, "tool_score": 0.0}
    import once_tool  # pyright: ignore[reportMissingImports] (written above)

    assert once_tool.released == ["it", "it"]  # also the instance that raised an error
    for side, first in (("left", "20 of ...(truncated)"), ("right", "(truncated)......")):
        results, _, _ = asyncio.run(play(max_tool_response_length=6, tool_response_truncate_side=side))
        assert results[0].startswith(first)
        assert "at most 1 calls" in results[1]  # a second call is not run, and the policy is informed


def test_the_gsm8k_tool_of_verl_runs_without_verl(tmp_path: Path) -> None:
    path = write_tools(tmp_path, entry("verl.tools.gsm8k_tool.Gsm8kTool"), modules="unused_tool")

    async def play(answer: Any) -> tuple[str, float, float]:
        agent = AgentInstance(path)
        extra = {"tools_kwargs": {"count": {"create_kwargs": {"ground_truth": "18"}}}}
        await agent.reset({"observation": "x", "label": "18", "extra_info": extra})
        call = json.dumps({"name": "count", "arguments": {"answer": answer}})
        step = await agent.step({"action_text": f"<tool_call>{call}</tool_call>", "label": "18"})
        logs = step["extra_logs"]
        return step["environment_feedback"][0]["content"], logs["tool_reward"], logs["tool_score"]

    assert asyncio.run(play("18")) == ("Current parsed answer='18' reward=1.0", 0.0, 1.0)
    assert asyncio.run(play(17)) == ("Current parsed answer='17' reward=0.0", -0.05, 0.0)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ([f"{TURNS}.tool_config_path=HERE/none.yaml"], ["tool_config_path", "none.yaml"]),
        ([f"{TURNS}.tool_config_path=HERE/config/tools.yaml", f"{TURNS}.format=gpt-oss"], ["gpt-oss", "hermes"]),
        ([f"{TURNS}.tool_config_path=HERE/lost/config/tools.yaml"], ["lost_tool.Count", "cannot be imported"]),
        ([f"{TURNS}.enable=true"], ["multi_turn.enable", "tool_config_path"]),
        ([f"{TURNS}.interaction_config_path=x.yaml"], ["interaction_config_path", "x.yaml", "cannot be read"]),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=react"], ["default_agent_loop=react"]),
    ],
)
def test_invalid_tools_are_rejected_before_the_start(options: list[str], facts: list[Any], tmp_path: Path) -> None:
    write_tools(tmp_path, entry())
    write_tools(tmp_path / "lost", entry("lost_tool.Count"))
    arguments = [option.replace("HERE", str(tmp_path)) for option in options]
    base = ["actor_rollout_ref.model.path=warm_start:sort", "data.train_files=task:sort"]
    base += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    with pytest.raises(ConfigError, match=says(*facts)):
        load_config(VerlPPOConfig, plain_arguments([*base, *arguments]))


def test_a_hydra_configuration_is_read_by_its_path_and_name(tmp_path: Path) -> None:
    tools = write_tools(tmp_path / "repo", entry("verl.tools.gsm8k_tool.Gsm8kTool"))
    turns = {"enable": True, "max_assistant_turns": 5, "max_user_turns": 2, "tool_config_path": tools}
    config = {
        "hydra": {"searchpath": ["file://verl/trainer/config"]},
        "defaults": ["ppo_trainer", "_self_"],
        "data": {"max_prompt_length": 100, "max_response_length": 60, "train_batch_size": 256},
        "actor_rollout_ref": {"hybrid_engine": True, "rollout": {"name": "vllm", "multi_turn": turns}},
    }
    (tmp_path / "gsm8k_multiturn_grpo.yaml").write_text(json.dumps(config))
    base = ["actor_rollout_ref.model.path=warm_start:sort", "data.train_files=task:sort"]
    base += ["actor_rollout_ref.actor.use_dynamic_bsz=true", "data.max_response_length=50"]
    for words in (
        [f"--config-path={tmp_path}", "--config-name=gsm8k_multiturn_grpo"],
        ["--config-name", "gsm8k_multiturn_grpo.yaml", "--config-path", str(tmp_path)],
    ):
        read = load_config(VerlPPOConfig, plain_arguments([*words, *base]))
        assert (read.prompts_per_step, read.agent.max_tokens, read.agent.max_turns) == (256, 150, 3)
        assert read.tool_files == (tools, "")
        assert read.agent.rewarded_by == "reward"

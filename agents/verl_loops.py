"""An agent that runs episodes by verl's agent loops: classes named in a YAML file, each with a method `run`.

    - name: my_agent                    # agent_name of a row, or `default`
      _target_: my_loops.MyAgentLoop    # a module beside the file, in a folder above it, or installed

`run(sampling_params, raw_prompt=..., **row)` samples with `self.server_manager.generate` and returns token ids, with a
mask that is 1 for tokens sampled by the policy. `agent.func_path` is set to this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from agents.episode import AgentExecutorBase, Episode, EpisodeTask, Policy
from agents.executor import STATUS
from agents.options import AgentOptions
from agents.schema import read_sampling, sampling_params
from agents.verl_tools import Entry, load_class, provide_verl

if TYPE_CHECKING:
    from components.generate.async_engine import Generation

SINGLE_TURN = "single_turn_agent"
"""verl's name of the loop that samples one response."""
RAW_PROMPT = "raw_prompt"
"""Key of `extra_info` with the messages of the prompt."""
AGENT_NAME = "agent_name"
"""Key of `extra_info` with the name of the loop that runs the row."""
OPTION = "agent_loop_config_path"
_TAKEN = ("temperature", "top_p", "top_k", "max_tokens", "stop")
"""Sampling parameters of a loop that are used. Others are ignored."""


class TokenOutput(list[int]):
    """Sampled tokens: a list, as up to verl 0.5, with the attributes that verl has added since."""

    def __init__(self, drawn: Generation, count: int) -> None:
        super().__init__(drawn.tokens[:count])
        self.token_ids = list(self)
        self.log_probs = list(drawn.logprobs[:count])
        self.stop_reason = {"stop": "completed", "abort": "aborted"}.get(drawn.finish, drawn.finish)
        self.routed_experts = None
        self.num_preempted = 0


def token_ids(value: Any) -> list[int]:
    """Return token ids as a list. Accepts the mapping that `apply_chat_template` returns since transformers 5."""
    return list(value["input_ids"] if isinstance(value, Mapping) else value)


class AgentLoopMetrics(BaseModel):
    """Durations of a loop's phases, in seconds."""

    model_config = ConfigDict(extra="allow")
    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """Result of a loop: the tokens of a sequence, and a mask of those that the policy sampled."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = {}

    @field_validator("prompt_ids", mode="before")
    @classmethod
    def _read_ids(cls, value: Any) -> list[int]:
        return token_ids(value)


class AgentLoopBase:
    """Base class of loops, for files written for verl on a machine without it."""

    _class_initialized = False

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **kwargs: Any) -> None:
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = kwargs.pop("processor", None)
        self.dataset_cls = kwargs.pop("dataset_cls", None)
        self.dataset_config = kwargs.pop("dataset_config", None) or {}
        self.apply_chat_template_kwargs = dict(self.dataset_config.get("apply_chat_template_kwargs") or {})
        self.loop = asyncio.get_running_loop()
        self.init_class(config=self.config, tokenizer=tokenizer, processor=self.processor, **kwargs)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:  # noqa: ARG003 - verl's signature
        """Prepare the state that all loops of the class share."""
        cls._class_initialized = True

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        """Return the images of messages. Images are not supported, so the result is empty."""
        return {}

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, remove_system_prompt: bool = False, **_: Any
    ) -> list[int]:
        """Return the token ids of messages, including the generation prompt."""
        render = self.tokenizer.apply_chat_template
        options = {"tools": tools, "tokenize": True, "return_dict": False, **self.apply_chat_template_kwargs}
        ids = render(messages, add_generation_prompt=True, **options)
        if not remove_system_prompt:
            return ids
        # Rendering one and two equal messages gives the length of the system prompt, which precedes the first one.
        single, double = (render([{"role": "user", "content": ""}] * count, **options) for count in (1, 2))
        return ids[2 * len(single) - len(double) :]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Run an episode and return its `AgentLoopOutput`."""
        raise NotImplementedError


class SingleTurnAgentLoop(AgentLoopBase):
    """Loop that samples one response, like verl's loop of this name."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample a response to the prompt."""
        prompt = await self.apply_chat_template(list(kwargs[RAW_PROMPT]))
        drawn = await self.server_manager.generate("", prompt_ids=prompt, sampling_params=sampling_params)
        mask = [1] * len(drawn)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=list(drawn), response_mask=mask, num_turns=2)


_REGISTERED: dict[str, Any] = {}
"""Loops registered by `register`, by name."""


def register(name: str) -> Callable[[Any], Any]:
    """Register a loop under a name, like verl's decorator of this name."""

    def keep(loop: Any) -> Any:
        _REGISTERED[name] = loop
        return loop

    return keep


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to `timing_raw`."""
    began = time.monotonic()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began


_LOOP = {
    "AgentLoopBase": AgentLoopBase,
    "AgentLoopMetrics": AgentLoopMetrics,
    "AgentLoopOutput": AgentLoopOutput,
    "AsyncLLMServerManager": object,
    "register": register,
}
_STANDINS: Mapping[str, Mapping[str, Any]] = {
    "verl.experimental.agent_loop": _LOOP,
    "verl.experimental.agent_loop.agent_loop": _LOOP,
    "verl.experimental.agent_loop.single_turn_agent_loop": {"SingleTurnAgentLoop": SingleTurnAgentLoop},
    "verl.utils.profiler": {"simple_timer": simple_timer, "marked_timer": simple_timer},
    "verl.workers.rollout.replica": {"TokenOutput": TokenOutput},
}
"""Modules of verl that files of loops import -> the names in them."""


@dataclass(frozen=True)
class Draw:
    """One call of `generate`."""

    prompt: list[int]
    drawn: Generation
    """Number of tokens that the loop was given."""


class ServerManager:
    """Interface to the policy that a loop calls during an episode."""

    def __init__(self, task: EpisodeTask, policy: Policy) -> None:
        self.draws: list[Draw] = []
        self._task, self._policy = task, policy
        self._count = 0

    async def generate(self, request_id: Any, *, prompt_ids: Sequence[int], sampling_params: Any, **_: Any) -> Any:  # noqa: ARG002
        """Sample a continuation of `prompt_ids`."""
        parameters = {name: sampling_params[name] for name in _TAKEN if sampling_params.get(name) is not None}
        sampling, stop = read_sampling(parameters, self._task.sampling)
        # Each call has its own random stream. Otherwise two calls with the same prompt would get the same response.
        stream = self._count
        self._count += 1
        prompt = token_ids(prompt_ids)
        drawn, count = await self._policy.draw(prompt, sampling, stop, stream=stream)
        # Tokens after a stop text do not reach the loop, so they are not part of the draw that is trained on.
        kept = replace(
            drawn, tokens=drawn.tokens[:count], logprobs=drawn.logprobs[:count], versions=drawn.versions[:count]
        )
        self.draws.append(Draw(prompt, kept))
        return TokenOutput(drawn, count)


def read_loops(path: str) -> dict[str, tuple[Entry, Mapping[str, Any]]]:
    """Read the file of loops. Return the class and the additional arguments of each loop, by name.

    Raises:
        ValueError: the file is missing, or does not have this format.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{OPTION}={path} cannot be read: {error}") from error
    loops = dict[str, tuple[Entry, Mapping[str, Any]]]()
    for item in content if isinstance(content, list) else [content]:
        target = item.get("_target_") if isinstance(item, Mapping) else None
        if not isinstance(target, str) or "." not in target or not item.get("name"):
            raise ValueError(
                f"{OPTION}={path}: {item!r:.80} is no loop; write a list of {{name, _target_: module.Class}}"
            )
        arguments = {key: value for key, value in item.items() if key not in ("name", "_target_")}
        loops[str(item["name"])] = (Entry(OPTION, path, target, arguments), arguments)
    return loops


class AgentExecutor(AgentExecutorBase):
    """Runs the loops of a file."""

    def __init__(self, path: str, default: str = SINGLE_TURN, config: Mapping[str, Any] | None = None) -> None:
        """Load the classes of the file.

        Args:
            path: path of the YAML file.
            default: name of the loop for rows that do not name one.
            config: config that loops receive, in verl's keys.

        Raises:
            ValueError: a class cannot be loaded, or there is no loop named `default`.
        """
        provide_verl(_STANDINS)
        self._loops: dict[str, tuple[Any, Mapping[str, Any]]] = {SINGLE_TURN: (SingleTurnAgentLoop, {})}
        # All classes are imported now and not in the first episode, so that an error ends the run at its start.
        for name, (entry, arguments) in read_loops(path).items():
            self._loops[name] = (load_class(entry), arguments)
        self._default = default
        self._config = dict(config or {})
        if default not in self._loops:
            raise ValueError(f"default_agent_loop={default} is not in {path}; there are {', '.join(self._loops)}")

    def open(self, options: AgentOptions) -> None:
        """Create the config object that loops receive."""
        from omegaconf import OmegaConf

        self._made = OmegaConf.create(self._config)
        self._is_rewarded = options.rewarded_by == "environment"

    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
        """Run one episode with the loop that its row names."""
        extra = dict(task.extra_info or {})
        messages = extra.pop(RAW_PROMPT, None) or [{"role": "user", "content": task.prompt}]
        name = str(extra.get(AGENT_NAME) or self._default)
        if name not in self._loops:
            raise ValueError(f"agent_name {name!r} of the row is no loop; there are {', '.join(self._loops)}")
        loop_class, arguments = self._loops[name]
        server = ServerManager(task, policy)
        loop = loop_class(
            trainer_config=SimpleNamespace(config=self._made),
            server_manager=server,
            tokenizer=policy.tokenizer,
            processor=None,
            dataset_cls=None,
            dataset_config=self._made.get("data"),
            **arguments,
        )
        # verl passes these columns to every loop, and its loops read them without a default.
        row = {"data_source": task.data_source, "reward_model": {"ground_truth": task.label}, "extra_info": extra}
        row |= {AGENT_NAME: name, "index": extra.get("index", task.prompt_id)}
        row |= {key: extra.get(key) or {} for key in ("tools_kwargs", "interaction_kwargs")}
        params = {**sampling_params(task.sampling, policy.stop), "repetition_penalty": 1.0, "logprobs": True}
        output = await loop.run(params, **{RAW_PROMPT: messages}, **row)
        return self._episode(output, server.draws)

    def _episode(self, output: Any, draws: Sequence[Draw]) -> Episode:
        prompt, response = token_ids(output.prompt_ids), list(output.response_ids)
        episode = Episode(prompt, len(prompt), is_rewarded=self._is_rewarded)
        fill(episode, response, list(output.response_mask), draws)
        if draws:
            episode.status = STATUS.get(draws[-1].drawn.finish, "finished")
        score = getattr(output, "reward_score", None)
        if self._is_rewarded != (score is not None):
            if self._is_rewarded:
                raise ValueError(
                    "the loop returned no reward_score with agent.rewarded_by=environment; set it to reward"
                )
            raise ValueError("the loop returned a reward_score with agent.rewarded_by=reward; set it to environment")
        # The score is for the complete episode, so it is the reward of the last turn.
        if score is not None and episode.turns:
            episode.turns[-1].reward = episode.reward = episode.score = float(score)
        return episode


def fill(episode: Episode, response: Sequence[int], mask: Sequence[int], draws: Sequence[Draw]) -> None:
    """Append a response to an episode. Tokens with a mask of 1 were sampled by the policy, others were observed.

    Raises:
        ValueError: mask and response differ in length, or the mask is 1 for a token that was not sampled there.
    """
    if len(mask) != len(response):
        raise ValueError(f"response_mask has {len(mask)} numbers for {len(response)} response_ids; give one for each")
    start = len(episode.tokens)
    while (done := len(episode.tokens) - start) < len(response):
        end = next((i for i in range(done, len(response)) if mask[i] != mask[done]), len(response))
        if not mask[done]:
            episode.observe(response[done:end])
            continue
        # Several generations may have the same prompt. Only one of them continues with the tokens of the response.
        part = max((_common(episode.tokens, response[done:end], draw) for draw in draws), key=_length, default=None)
        if part is None or not part.tokens:
            raise ValueError(
                f"response_mask is 1 at token {done} of the response, which the policy did not draw there; set it to "
                "0, and join the ids that generate returned without decoding them"
            )
        episode.act(part)


def _length(part: Generation) -> int:
    return len(part.tokens)


def _common(before: Sequence[int], tokens: Sequence[int], draw: Draw) -> Generation:
    """Return the tokens of a draw that follow `before` and are equal to the beginning of `tokens`."""
    skipped = len(before) - len(draw.prompt)
    begins = skipped >= 0 and list(before) == draw.prompt + draw.drawn.tokens[:skipped]
    count = 0
    # Compared token by token, because a loop may cut a response, or decode and encode it again.
    while (
        begins and count < len(tokens) and draw.drawn.tokens[skipped + count : skipped + count + 1] == [tokens[count]]
    ):
        count += 1
    chosen = slice(skipped, skipped + count) if begins else slice(0)
    drawn = draw.drawn
    return replace(drawn, tokens=drawn.tokens[chosen], logprobs=drawn.logprobs[chosen], versions=drawn.versions[chosen])

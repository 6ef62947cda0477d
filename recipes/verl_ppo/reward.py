"""Rewards: a function by the data source of the prompt or of the user's own, a reward model, or both.
B responses. Nothing here imports torch before there are responses.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.registry import load
from components.rewards.functions import PREDICTION
from components.rewards.score_functions import ScoreCode, ScoreFunction, default_functions
from components.rewards.workers import WorkerReward

from .config import VerlPPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

OWN_FUNCTIONS: dict[str, ScoreFunction] = {}
"""Reward functions by data source, beside `default_functions`. Put yours here, from the top level of a module; a `*` at
the end of a name stands for any end.
"""


def score_code(config: VerlPPOConfig) -> ScoreCode:
    """Return the reward function of a run: of a user's file or program (ray_trainer.py), or the built-in ones."""
    if (code := getattr(config, "reward_code", None)) is not None:
        return replace(code, optional=bool(config.reward.model_path) and not config.reward.function_weight)
    own, functions = config.reward, default_functions() | OWN_FUNCTIONS
    arguments = dict(own.arguments)
    if own.source is None:
        method = arguments.pop("method", "strict")
        if arguments or method not in ("strict", "flexible"):
            raise ValueError(
                f"reward.arguments={own.arguments}, but the built-in functions take only method=strict or "
                "method=flexible (of openai/gsm8k); change that, or set reward.source"
            )
        if method == "flexible":
            functions["openai/gsm8k"] = functions["gsm8k_flexible"]
    return ScoreCode(
        path=own.source,
        name=own.function,
        kwargs=arguments,
        lists=own.whole_batches,
        functions=functions,
        optional=bool(own.model_path) and not own.function_weight,
    )


def check_rewards(config: VerlPPOConfig, *parts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse, with a ValueError, a reward that cannot be, or that does not suit the rows of each part."""
    code = score_code(config)
    if config.agent.gives_rewards:
        return
    code.check()
    for rows in parts:
        without = sum(row["label"] == "" for row in rows)
        if config.reward.source and 0 < without < len(rows):
            raise ValueError(
                f"{without} of {len(rows)} rows have no reward_model.ground_truth, and the others have one; add it, or "
                "take it out of all rows"
            )
        check_sources(code, (row["datasource"] for row in rows))
        code.check_labels(rows)


def try_function(config: VerlPPOConfig, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Call the user's function once with rows of each part of the data; see `plugins/reward_trial`."""
    code = score_code(config)
    if config.agent.gives_rewards or code.path is None:
        return []
    if config.agent.func_path is not None:
        rows = {
            part: [{**row, "extra_info": _with_count(row.get("extra_info"), 1)} for row in rows[part]] for part in rows
        }
    option = f"reward.source={code.spec}"
    try_code = load("reward trial", "code", option)
    return try_code(code.reward_code(), option, rows, config.reward.settings())


def check_sources(code: ScoreCode, sources: Iterable[str]) -> None:
    """ValueError where there is no function for a data source that needs one."""
    unknown = ", ".join(map(repr, code.unknown(sources)))
    if unknown and not code.optional:
        raise ValueError(
            f"there is no reward function for the data source {unknown}; set reward.source to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info=None), data.source_key to the column "
            "with the data source, or score with a reward model (reward.model_path); there are functions for "
            f"{', '.join(sorted(code.functions))}"
        )


def _with_count(extra_info: Mapping[str, Any] | None, turns: int) -> dict[str, Any]:
    """Add `num_turns`, counted as in verl: the prompt, each turn of the policy, and the results between two of them."""
    return {**(extra_info or {}), "num_turns": 2 * turns}


def _with_turns(samples: "Batch") -> "Batch":
    """Add `num_turns` to what a function reads of episodes as `extra_info`."""
    if "num_turns" not in samples:
        return samples
    others = samples["extra_info"] if "extra_info" in samples else [None] * len(samples)
    counts = zip(others, samples["num_turns"].tolist(), strict=True)
    return samples.with_objects(extra_info=[_with_count(other, count) for other, count in counts])


class RewardManager:
    """Rewards responses by a function, a reward model, or both. It holds processes until it is closed."""

    def __init__(
        self, config: VerlPPOConfig, tokenizer: "PreTrainedTokenizerBase", info: Callable[[str], None]
    ) -> None:
        """Start the function's processes, unless an agent's environment gives the rewards.

        Args:
            config: of the run.
            tokenizer: of the policy.
            info: told which responses have no reward, the first few by name.
        """
        self.num_examine = config.reward.num_examine
        """Number of scored responses to print per data source and batch."""
        self._code, self._config = score_code(config), config
        self._tokenizer, self._info, self._weight = tokenizer, info, config.reward.function_weight
        self._workers = None
        if not config.agent.gives_rewards:
            self._workers = WorkerReward(self._code.reward_code(), config.reward.settings())

    def __call__(self, samples: "Batch", step: int = 0) -> "Batch":
        """Reward B responses.

        Args:
            samples: with `tokens`, `action_mask` and `prompt_length`, the objects `prompt`, `label`, `datasource` and
                maybe `extra_info`, and where a model has scored them `rm_score`. Those that have a `reward` are
                episodes, and stay as they are.
            step: finished training steps; a function for whole batches may read it.

        Returns:
            With `reward`, `score`, `reward_failed`, a `log_<name>` for each other number that the function gives, NaN
            where a response lacks it, and the objects `info_pred`, what it calls `pred`, as text, and `info`, a mapping
            of whatever else it returns; None where it returns nothing. With a model the reward is its score and
            function_weight times the function's, and the score is the function's where there is one.

        Raises:
            RewardError: the function failed for more responses than reward.max_failed_share allows.
            ValueError: there is no function for a data source.
        """
        from components.data.samples import add_rewards, ask_for_rewards, with_rewards

        if self._workers is None or "reward" in samples:
            return add_rewards(samples, None, self._tokenizer, self._info)
        check_sources(self._code, samples["datasource"])
        samples = _with_turns(samples)
        output = ask_for_rewards(samples, self._workers, self._tokenizer, step)
        what = "score" if self._code.optional else "reward"
        scored = with_rewards(samples, output, self._info, what)
        # Of every batch, as batches of other data sources may come beside it.
        predicted = output.texts.get(PREDICTION, [None] * len(samples))
        others = {name: said for name, said in output.texts.items() if name != PREDICTION}
        told = [{name: said[i] for name, said in others.items() if said[i] is not None} for i in range(len(samples))]
        scored = scored.with_objects(info_pred=predicted, info=[each or None for each in told])
        scored = self._less_overlong(self._with_model(scored) if "rm_score" in samples else scored)
        self._print_examples(scored)
        return scored

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()

    def _print_examples(self, scored: "Batch") -> None:
        """Print the first responses of each data source with what they earned."""
        shown: Counter[str] = Counter()
        for i, source in enumerate(scored["datasource"]):
            if shown[source] == self.num_examine:
                continue
            shown[source] += 1
            tokens, acts = scored.row(i, "tokens"), scored.row(i, "action_mask")
            response = self._tokenizer.decode(tokens[acts], skip_special_tokens=True)
            about = {"prompt": scored["prompt"][i], "response": response, "ground_truth": scored["label"][i]}
            about |= {"score": f"{float(scored['score'][i]):g}", "reward": f"{float(scored['reward'][i]):g}"}
            self._info(f"{source}: " + "; ".join(f"[{name}] {value}" for name, value in about.items()))

    def _with_model(self, scored: "Batch") -> "Batch":
        """Add the model's score to the function's, which a response may lack."""
        import torch

        model_B, function_B = scored["rm_score"].float(), scored["score"]
        knows_B = torch.tensor([self._code.knows(source) for source in scored["datasource"]])
        reward_B = model_B + self._weight * function_B
        # As in any sum of rewards, a response that has failed in a part of it has failed.
        failed_B = scored["reward_failed"] * float(self._weight != 0)
        return scored.with_sequences(
            reward=torch.where(failed_B > 0, 0.0, reward_B),
            reward_failed=failed_B,
            score=torch.where(knows_B, function_B, model_B),
            log_model=model_B,
            log_function=torch.where(knows_B, function_B, torch.nan),
        )

    def _less_overlong(self, scored: "Batch") -> "Batch":
        """Take reward away from responses that come close to the longest that is allowed."""
        from components.rl.rewards import overlong_penalty

        own, longest = self._config.algorithm, self._config.rollout.max_new_tokens
        if own.overlong_buffer is None:
            return scored
        lengths_B = scored.sum_tokens(scored["action_mask"])
        reward_B = overlong_penalty(scored["reward"], lengths_B, longest, own.overlong_buffer, own.overlong_penalty)
        lost_B = reward_B - scored["reward"]
        return scored.with_sequences(reward=reward_B, log_overlong_reward=lost_B, log_overlong=(lost_B < 0).float())

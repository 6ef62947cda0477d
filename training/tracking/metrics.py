"""The registry of metrics: what each name means, in which unit, which way is better, and who watches it.

docs/metrics.md is made of it, the report groups its curves by it, and tests hold every metric that a recipe writes to
it. What a person adds in a copy of a recipe need not be here.
"""

from __future__ import annotations

import functools
import re
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal

Row = Literal["better", "healthy", "says", "fast"]
"""Which question of the report a metric answers: is it better, is it healthy, what does it say, how fast is it."""


@dataclass(frozen=True)
class Metric:
    """One metric, or one family of them."""

    name: str
    """As it is logged; `<word>` stands for any text: `eval/<source>_pass<n>`."""
    meaning: str
    """In one sentence."""
    _: KW_ONLY
    row: Row
    unit: str = ""
    """nats, tokens, s, share, ...; empty for a plain number."""
    better: Literal["higher", "lower", ""] = ""
    """The good direction, where there is one."""
    alarm: str = ""
    """The alarm that watches it, by its name in alarms.py."""
    same_as: str = ""
    """The house's name for the same quantity, where another system's name is logged."""


_better, _healthy = partial(Metric, row="better"), partial(Metric, row="healthy")
_says, _fast = partial(Metric, row="says"), partial(Metric, row="fast")


def _spread(of: Metric) -> tuple[Metric, ...]:
    """The mean, the largest and the least of something, as verl tells them; the mean may be one of the house's."""
    mean = f"{of.name}/mean"
    most = [
        replace(
            of, name=f"{of.name}/{end}", meaning=f"The {word} of what `{mean}` is the mean of.", better="", same_as=""
        )
        for end, word in (("max", "largest"), ("min", "least"))
    ]
    return replace(of, name=mean), *most


REWARD = (
    _better("reward/score", "How good the step's answers are, 1 being right, as the reward tells it.", better="higher"),
    _better("reward/reward", "The mean reward, before anything is taken off it.", better="higher"),
    _better("reward/shaped", "The mean reward as it is learnt from, after penalties on length and the like."),
    _healthy(
        "reward/group_std", "How much the rewards of one prompt's answers differ: their standard deviation, on average."
    ),
    _healthy(
        "reward/zero_variance_share",
        "Answers whose prompt's answers all earned the same, so that comparing them teaches nothing.",
        unit="share",
        better="lower",
        alarm="equal_groups",
    ),
    _healthy(
        "reward/failed",
        "Answers whose reward could not be computed; they got 0.",
        unit="answers",
        better="lower",
        alarm="failed_rewards",
    ),
    # Of the recipe that trains a reward model.
    _better("reward/loss", "How unlikely the reward model holds it that the chosen answers win.", better="lower"),
    _better("reward/accuracy", "Training pairs whose chosen answer gets more.", unit="share", better="higher"),
    _better("reward/margin", "What a chosen answer gets more than the rejected one, on average.", better="higher"),
    _better("reward/chosen_reward", "The mean reward that the model gives chosen answers."),
    _better("reward/rejected_reward", "The mean reward that the model gives rejected answers."),
    _healthy("reward/grad_norm", "The reward model's gradient before it is clipped: its 2-norm."),
    _healthy("reward/learning_rate", "The reward model's learning rate in this step."),
    _fast("reward/gpu_memory_gb", "The most GPU memory that the reward model's tensors took so far.", unit="GB"),
    _better("reward/<name>", "The mean of what the reward function, or an agent's world, logs under this name."),
)

ACTOR = (
    _healthy("actor/loss", "What the optimizer minimises: the surrogate and whatever is added to it."),
    _healthy("actor/policy_loss", "The surrogate alone; that it falls says nothing about how good the policy is."),
    _healthy(
        "actor/entropy",
        "How open the next token is to the policy, per token: 0 when it always writes the same.",
        unit="nats",
        alarm="entropy",
    ),
    _healthy(
        "actor/approx_kl",
        "How far the policy moves within a step, per token: the k3 estimate of the KL from the policy that answered.",
        unit="nats",
        alarm="kl",
    ),
    _healthy(
        "actor/kl_to_reference",
        "How far the policy is from the reference, per token: the mean log-ratio of what it wrote.",
        unit="nats",
        alarm="drift",
    ),
    _healthy("actor/kl_loss", "The estimate of the KL to the reference that the loss contains.", unit="nats"),
    _healthy("actor/kl_coef", "The weight of the KL to the reference."),
    _healthy("actor/clipped_share", "Tokens that a clip range changes the loss of.", unit="share", alarm="clipping"),
    _healthy(
        "actor/dual_clipped_share",
        "Tokens whose loss the second bound (dual clip) cuts, all of bad answers.",
        unit="share",
    ),
    _healthy("actor/dropped_share", "Tokens that clip_cov takes out of the loss.", unit="share"),
    _healthy("actor/held_share", "Tokens that kl_cov holds to the old policy.", unit="share"),
    _healthy("actor/ratio_mean", "How likely the policy holds its tokens beside the old one: 1 when nothing moved."),
    _healthy("actor/first_ratio_mean", "`actor/ratio_mean` in the step's first optimizer step, where it has to be 1."),
    _healthy(
        "actor/engine_gap",
        "How far the engine's log-probabilities are from the trainer's while it learns, per token.",
        unit="nats",
    ),
    _healthy(
        "actor/first_engine_gap",
        "`actor/engine_gap` in the step's first optimizer step, before any weight moved.",
        unit="nats",
    ),
    _healthy("actor/grad_norm", "The gradient before it is clipped: its 2-norm."),
    _healthy("actor/learning_rate", "The policy's learning rate in this step."),
    _fast("actor/gpu_memory_gb", "The most GPU memory that the policy's training took so far on any rank.", unit="GB"),
    # Of sft and dpo.
    _better(
        "actor/nll", "How unlikely the model holds the answers it is shown, per token.", unit="nats", better="lower"
    ),
    _better("actor/accuracy", "Training pairs whose chosen answer is rewarded more.", unit="share", better="higher"),
    _better("actor/margin", "The chosen answer's implicit reward less the rejected one's.", better="higher"),
    _better("actor/chosen_reward", "The mean implicit reward of chosen answers."),
    _better("actor/rejected_reward", "The mean implicit reward of rejected answers."),
    # verl's.
    _healthy("actor/pg_loss", "The surrogate alone.", same_as="actor/policy_loss"),
    _healthy("actor/ppo_kl", "How far the policy moves within a step.", unit="nats", same_as="actor/approx_kl"),
    _healthy("actor/pg_clipfrac", "Tokens that the clip range changes.", unit="share", same_as="actor/clipped_share"),
    _healthy(
        "actor/pg_clipfrac_lower",
        "Tokens whose loss the second bound (clip_ratio_c) cuts.",
        unit="share",
        same_as="actor/dual_clipped_share",
    ),
    _healthy("actor/lr", "The policy's learning rate.", same_as="actor/learning_rate"),
    _healthy("actor/updates", "Optimizer steps of this step."),
    _healthy("actor/reward_kl_penalty", "The KL to the reference that comes off the reward, per token.", unit="nats"),
    _healthy("actor/reward_kl_penalty_coeff", "The weight of the KL in the reward.", same_as="actor/kl_coef"),
)

CRITIC = (
    _healthy(
        "critic/loss", "How far the critic's values are from the returns: half the squared error.", better="lower"
    ),
    _healthy("critic/clipped_share", "Tokens whose value is held close to what it was.", unit="share"),
    _healthy("critic/value", "The mean value before the update, over all tokens of the answers."),
    _healthy("critic/return", "The mean return that values are compared with."),
    _healthy("critic/value_mean", "The mean value while the critic learns."),
    _healthy("critic/return_mean", "The mean return while the critic learns."),
    _healthy("critic/grad_norm", "The critic's gradient before it is clipped: its 2-norm."),
    _healthy("critic/learning_rate", "The critic's learning rate in this step."),
    _fast("critic/gpu_memory_gb", "The most GPU memory that the critic's training took so far on any rank.", unit="GB"),
    # verl's.
    _healthy("critic/vf_loss", "Half the squared error of the values.", better="lower", same_as="critic/loss"),
    _healthy("critic/vf_clipfrac", "Tokens whose value is held close.", unit="share", same_as="critic/clipped_share"),
    _healthy("critic/vpred_mean", "The mean value while the critic learns.", same_as="critic/value_mean"),
    _healthy("critic/lr", "The critic's learning rate.", same_as="critic/learning_rate"),
    _healthy(
        "critic/vf_explained_var",
        "How much of the differences between returns the values foresee: 1 is all, 0 nothing.",
        better="higher",
    ),
    *_spread(_better("critic/score", "The mean reward of answers.", better="higher")),
    *_spread(_better("critic/rewards", "The mean reward less the KL's part.")),
    *_spread(_healthy("critic/advantages", "The mean advantage, over the tokens that are trained on.")),
    *_spread(
        _healthy("critic/returns", "The mean return, over the tokens that are trained on.", same_as="critic/return")
    ),
    *_spread(_healthy("critic/values", "The mean value before the update.", same_as="critic/value")),
)

ROLLOUT = (
    _says("rollout/response_length", "What the policy writes to a prompt, on average.", unit="tokens"),
    _says(
        "rollout/truncated_share",
        "Answers that were cut off at the limit.",
        unit="share",
        better="lower",
        alarm="length",
    ),
    _says("rollout/turns_mean", "Turns that an episode takes.", unit="turns"),
    _says("rollout/finished_share", "Episodes that came to an end of their own.", unit="share", better="higher"),
    _says("rollout/aborted_share", "Episodes that were given up, and earn 0.", unit="share", better="lower"),
    _says("rollout/error_share", "Episodes in which the agent or its world failed.", unit="share", better="lower"),
    _healthy(
        "rollout/staleness_mean", "How old the weights that answered are, on average.", unit="steps", better="lower"
    ),
    _healthy("rollout/staleness_max", "How old the weights of the oldest token are.", unit="steps", better="lower"),
    _healthy("rollout/token_staleness_mean", "How old the weights behind a token are, on average.", unit="steps"),
    _healthy(
        "rollout/logprob_gap_mean",
        "How far the engine's log-probabilities are from the trainer's, per token: rounding, if weights are the same.",
        unit="nats",
        better="lower",
        alarm="mismatch",
    ),
    _healthy(
        "rollout/logprob_gap_max",
        "How far engine and trainer are apart about the worst token.",
        unit="nats",
        better="lower",
    ),
    _healthy("rollout/mismatch_kl", "The KL from the engine to the trainer: the mean log-ratio.", unit="nats"),
    _healthy(
        "rollout/mismatch_k3",
        "The KL from the engine to the trainer by the k3 estimate, never below 0.",
        unit="nats",
        better="lower",
    ),
    _healthy("rollout/chi_square_token", "How uneven the ratios of trainer to engine are: chi-square over tokens."),
    _healthy("rollout/chi_square_sequence", "How uneven the ratios of trainer to engine are: chi-square over answers."),
    _healthy(
        "rollout/effective_sample_size",
        "What share of the tokens would count as much if all weighed the same: 1 when engine and trainer agree.",
        unit="share",
        better="higher",
    ),
    _healthy("rollout/outside_share", "Tokens whose ratio is beyond the correction's range.", unit="share"),
    _healthy("rollout/filter_pass_rate", "Prompts that pass the filter on their answers' mean score.", unit="share"),
    _healthy("rollout/filter_prompts_seen", "Prompts answered for this step, kept or not.", unit="prompts"),
    _healthy("rollout/filter_rounds", "Rounds of answering that it took to fill the step."),
    _fast("rollout/queued_batches", "Steps of answers that waited when the trainer asked for one.", unit="steps"),
    _fast("rollout/carried_groups", "Prompts of this step whose answers began in an earlier one.", unit="prompts"),
    _fast(
        "rollout/restarted_groups", "Prompts that were begun again, as too old or lost with an engine.", unit="prompts"
    ),
)

EVAL = (
    _better("eval/score", "Score on held-out prompts, sampled at temperature 1.", better="higher"),
    _better("eval/score_greedy", "Score on held-out prompts, always the likeliest token.", better="higher"),
    _says("eval/num_samples", "Held-out answers that were looked at.", unit="answers"),
    _says("eval/response_length_mean", "What is written to a held-out prompt, on average.", unit="tokens"),
    _says("eval/truncated_rate", "Held-out answers that were cut off.", unit="share", better="lower"),
    # Of sft, dpo and reward_model.
    _better("eval/loss", "The loss on what is held out.", better="lower"),
    _better(
        "eval/accuracy", "Held-out pairs that are told right; a tie is half of one.", unit="share", better="higher"
    ),
    _better("eval/accuracy_standard_error", "By how much the accuracy may be off by chance.", unit="share"),
    _better("eval/margin", "The chosen answer's reward less the rejected one's, on held-out pairs.", better="higher"),
    _better("eval/chosen_reward", "The mean implicit reward of held-out chosen answers."),
    _better("eval/rejected_reward", "The mean implicit reward of held-out rejected answers."),
    _better("eval/reward_mean", "The mean reward that the model gives held-out answers."),
    _better("eval/reward_std", "The standard deviation of the model's rewards of held-out answers."),
    _better(
        "eval/<source>_pass<n>", "Score of the best of n answers to a held-out prompt of a source.", better="higher"
    ),
    _says("eval/<source>_response_length_mean", "What is written to a prompt of the source.", unit="tokens"),
    _says("eval/<source>_truncated_rate", "Answers to the source that were cut off.", unit="share", better="lower"),
    _better(
        "eval/<source>_<name>", "The mean of what the reward logs under this name, on held-out prompts of a source."
    ),
)

_PHASES = {
    "generate": "drawing answers",
    "reward": "computing rewards",
    "logprobs": "asking policy and reference about the answers",
    "experience": "asking all roles about the answers",
    "train": "training",
    "sync": "bringing the weights to the engines",
    "wait": "waiting for answers that are generated meanwhile",
    "verify": "verifying that engine and trainer have the same weights",
}
_VERL_PHASES = {
    "gen": ("drawing answers", "generate"),
    "old_log_prob": ("asking the policy about the answers", ""),
    "ref": ("asking the reference", ""),
    "values": ("asking the critic", ""),
    "adv": ("computing advantages", ""),
    "update_critic": ("training the critic", ""),
    "update_actor": ("training the policy", ""),
    "update_weights": ("bringing the weights to the engines", "sync"),
}
TIMING = (
    _fast("timing_s/step", "The whole step, without evaluation and checkpoint.", unit="s", better="lower"),
    *(_fast(f"timing_s/{name}", f"Of the step, {what}.", unit="s") for name, what in _PHASES.items()),
    _fast("timing_s/checkpoint", "Writing the checkpoint after the step before.", unit="s"),
    *(
        _fast(f"timing_s/{name}", f"Of the step, {what}.", unit="s", same_as=own and f"timing_s/{own}")
        for name, (what, own) in _VERL_PHASES.items()
    ),
    _fast("timing_s/save_checkpoint", "Writing the checkpoint.", unit="s", same_as="timing_s/checkpoint"),
    _fast("timing_s/testing", "Validation after the step.", unit="s"),
)

PERF = (
    _fast(
        "perf/tokens_per_second", "Tokens trained on, prompts included, for each second.", unit="1/s", better="higher"
    ),
    _fast("perf/samples_per_second", "Sequences trained on for each second.", unit="1/s", better="higher"),
    *(
        _fast(f"perf/{name}_share", f"Of the step's time, {what}.", unit="share", same_as=own and f"perf/{own}_share")
        for name, (what, own) in ({name: (what, "") for name, what in _PHASES.items()} | _VERL_PHASES).items()
    ),
    _fast("perf/memory_gb", "Memory of all processes of the run together; what they share counts once.", unit="GB"),
    _fast("perf/checkpoints_failed", "Checkpoints that could not be written so far.", better="lower"),
    # verl's.
    _fast("perf/throughput", "Tokens trained on for each second and rank.", unit="1/s", better="higher"),
    _fast("perf/time_per_step", "The whole step.", unit="s", better="lower", same_as="timing_s/step"),
    _fast("perf/total_num_tokens", "Tokens of the step, prompts included.", unit="tokens"),
)

_LENGTH = "What an answer has, a world's words included"
VERL = (
    *_spread(_says("response_length", f"{_LENGTH}.", unit="tokens")),
    _says("response_length/clip_ratio", "Answers cut off.", unit="share", same_as="rollout/truncated_share"),
    *_spread(_says("response_length_non_aborted", f"{_LENGTH}, empty answers left out.", unit="tokens")),
    _says("response_length_non_aborted/clip_ratio", "Answers cut off, of those that are not empty.", unit="share"),
    _says("response/aborted_ratio", "Answers that are empty.", unit="share", better="lower"),
    *_spread(_says("prompt_length", "What a prompt has.", unit="tokens")),
    _says("prompt_length/clip_ratio", "Prompts as long as is allowed.", unit="share"),
    *_spread(_says("num_turns", "Turns that an episode takes.", unit="turns", same_as="rollout/turns_mean")),
    *(
        _fast(f"global_seqlen/{name}", f"Tokens of a rank's part of the step: {what}.", unit="tokens")
        for name, what in {
            "mean": "the mean",
            "min": "the least before balancing",
            "max": "the most before balancing",
            "minmax_diff": "the difference of these",
            "balanced_min": "the least",
            "balanced_max": "the most",
        }.items()
    ),
    _fast("timing_per_token_ms/<phase>", "A phase's time for each token that it handled.", unit="ms", better="lower"),
    _fast("training/global_step", "The step's number."),
    _fast("training/epoch", "How often the data were gone through."),
    _healthy("training/rollout_probs_diff_valid", "1 where engine and trainer could be compared."),
    *(
        _healthy(f"training/rollout_probs_diff_{name}", f"Engine against trainer, in probability: {what}.")
        for name, what in {"mean": "the mean", "max": "the worst token", "std": "the standard deviation"}.items()
    ),
    _healthy(
        "training/rollout_actor_probs_pearson_corr",
        "How well the engine's probabilities go with the trainer's: 1 is perfect.",
        better="higher",
    ),
    *(
        _healthy(f"rollout_corr/{name}", f"{what[0].upper()}{what[1:]}.", unit=unit, same_as=own and f"rollout/{own}")
        for name, what, unit, own in (
            ("kl", "the KL from the engine to the trainer", "nats", "mismatch_kl"),
            ("k3_kl", "the KL from the engine to the trainer by the k3 estimate", "nats", "mismatch_k3"),
            ("chi2_token", "how uneven the ratios of tokens are", "", "chi_square_token"),
            ("chi2_seq", "how uneven the ratios of answers are", "", "chi_square_sequence"),
            ("rollout_is_oob_ratio", "tokens whose ratio is beyond the range", "share", "outside_share"),
            ("training_ppl", "perplexity of the answers to the trainer", "", ""),
            ("training_log_ppl", "log-perplexity of the answers to the trainer", "nats", ""),
            ("rollout_ppl", "perplexity of the answers to the engine", "", ""),
            ("rollout_log_ppl", "log-perplexity of the answers to the engine", "nats", ""),
            ("log_ppl_diff", "the trainer's log-perplexity less the engine's", "nats", ""),
            ("log_ppl_abs_diff", "how far the two log-perplexities are apart", "nats", ""),
            ("log_ppl_diff_max", "the largest difference of the two log-perplexities of an answer", "nats", ""),
            ("log_ppl_diff_min", "the least difference of the two log-perplexities of an answer", "nats", ""),
            ("ppl_ratio", "the trainer's perplexity over the engine's", "", ""),
            ("rollout_is_mean", "the mean of the weights that correct the loss", "", ""),
            ("rollout_is_max", "the largest of the weights that correct the loss", "", ""),
            ("rollout_is_min", "the least of the weights that correct the loss", "", ""),
            ("rollout_is_std", "the standard deviation of the weights that correct the loss", "", ""),
            ("rollout_is_eff_sample_size", "what share of tokens would count as much, weighed alike", "share", ""),
            ("rollout_rs_masked_fraction", "tokens that are left out as too far off", "share", ""),
        )
    ),
    *_spread(_says("val-aux/num_turns", "Turns that a held-out episode takes.", unit="turns")),
    _better(
        "val-core/<source>/<variable>/<metric>",
        "Of n answers to a held-out prompt of a source: the mean, the best (`best@n`) or the majority's (`maj@n`).",
        better="higher",
    ),
    _better(
        "val-aux/<source>/<variable>/<metric>",
        "As val-core, for fewer of the answers, and for whatever else is logged.",
    ),
)

GROUPS: dict[str, tuple[Metric, ...]] = {
    "reward/": REWARD,
    "actor/": ACTOR,
    "critic/": CRITIC,
    "rollout/": ROLLOUT,
    "eval/": EVAL,
    "timing_s/": TIMING,
    "perf/": PERF,
    "": VERL,
}
"""By what their names begin with; the last are verl's own, which begin in ways of their own."""
METRICS: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)


@functools.cache
def metric_of(name: str) -> Metric | None:
    """The entry of a logged name, None where there is none; one that is written out goes before a family, and of
    families the first.
    """
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


def house_name(name: str) -> str:
    """The name under which all recipes' metrics can be compared."""
    metric = metric_of(name)
    return metric.same_as if metric is not None and metric.same_as else name


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile(".+".join(re.escape(part) for part in parts))

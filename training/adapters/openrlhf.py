"""The arithmetic of the OpenRLHF table: what takes more than another name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from training.adapter import Adapter, Computed, as_text

TABLE = Path(__file__).parent / "openrlhf.yaml"

INPUT_TEMPLATE = "User: {}\nAssistant: "
"""That train_sft writes around prompts unless it is told otherwise."""
EMA_BETA = 0.992
FILTER_RANGE = [0.0, 1.0]
"""OpenRLHF's, where a flag is on and its number is not given."""
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine_with_min_lr": {},
    "cosine": {"train.lr_scheduler": "cosine_with_min_lr", "train.min_lr_ratio": 0.0},
    "linear": {"train.min_lr_ratio": 0.0},
    "constant": {"train.lr_warmup_ratio": 0.0},
    "constant_with_warmup": {"train.lr_scheduler": "constant"},
}
"""transformers' name of a schedule -> the options that make it here, beside `train.lr_scheduler`."""
_WORKERS = {"actor": "actor_ranks", "critic": "critic_ranks", "ref": "references", "reward": "rewards"}
"""OpenRLHF's role -> the option that says how many workers it has."""

T = TypeVar("T")


class Flags:
    """OpenRLHF's flags of one command that the table computes with, and what comes of them."""

    def __init__(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.given = given
        self.options = options
        self.found = Computed()

    def name(self, *names: str) -> str | None:
        """Which of these the user has written, and not as null."""
        return next((name for name in names if as_text(self.given.get(name)) != "null"), None)

    def text(self, *names: str) -> str | None:
        """The value of the first of these that is given."""
        name = self.name(*names)
        return None if name is None else str(self.given[name])

    def is_on(self, *names: str) -> bool:
        """Whether a switch is given, and on."""
        return _SWITCHES.get(as_text(self.text(*names)), False)

    def number(self, kind: Callable[[Any], T], *names: str) -> T | None:
        """The number that is given; None too where it is none, which is a fault."""
        text = self.text(*names)
        try:
            return None if text is None else kind(text)
        except ValueError:
            self.found.faults.append(f"{self.name(*names)}={text} is no number")
            return None

    def numbers(self, *names: str) -> list[float] | None:
        """The numbers that are given."""
        name = self.name(*names)
        if name is None:
            return None
        value = self.given[name]
        words = value if isinstance(value, list | tuple) else str(value).strip("[]()").replace(",", " ").split()
        try:
            return [float(word) for word in words]
        except ValueError:
            self.found.faults.append(f"{name}={as_text(value)} holds what is no number")
            return None

    def option(self, name: str) -> str | None:
        """What an option of the schema is by now, in lower case; None where nobody has said."""
        value = self.found.options.get(name, self.options.get(name))
        return None if value is None else as_text(value)

    def is_set(self, name: str) -> bool:
        """Whether a switch of the schema is on."""
        return _SWITCHES.get(self.option(name) or "", False)

    def set(self, **values: Any) -> None:
        """Set options: `group__name`, as Python writes it."""
        self.found.options |= {name.replace("__", "."): value for name, value in values.items()}

    def idle(self, why: str, *names: str) -> None:
        """Note which of these is given, and has no effect."""
        found = [name for name in names if name in self.given]
        if found:
            self.found.notes.append(f"no effect of {', '.join(found)}: {why}")


def compute(given: Mapping[str, Any], options: Mapping[str, Any]) -> Computed:
    """Options of PPO that follow from several of OpenRLHF's flags, or from values of another kind.

    Args:
        given: values of the names that the table computes with.
        options: those so far, by their names here.
    """
    flags = Flags(given, options)
    for part in (_reward, _lengths, _placement, _asynchronous, _algorithm, _training, *_SHARED):
        part(flags)
    return flags.found


def compute_supervised(given: Mapping[str, Any], options: Mapping[str, Any]) -> Computed:
    """The same of train_sft, train_rm and train_dpo."""
    flags = Flags(given, options)
    for part in (*_SHARED, _columns):
        part(flags)
    return flags.found


def supervised(*sections: str) -> Adapter:
    """OpenRLHF's names for a supervised recipe, with these sections of the table besides."""
    return Adapter.load(TABLE, "shared", "supervised", *sections, compute=compute_supervised)


def _reward(flags: Flags) -> None:
    """Where rewards come from: of an agent, a URL or file, and reward models the first that is given."""
    sources = {
        "agent.func_path": ("agent_func_path", "train.agent_func_path"),
        "reward.source": ("remote_rm_url", "reward.remote_url"),
        "reward_model.path": ("reward_pretrain", "reward.model_name_or_path"),
    }
    given = {option: names for option, names in sources.items() if flags.name(*names)}
    for position, (option, names) in enumerate(given.items()):
        if position == 0:
            flags.found.options[option] = flags.text(*names)
        else:
            flags.idle(f"{flags.name(*next(iter(given.values())))} says what a response is worth", *names)
    buffer = flags.number(float, "overlong_buffer_len", "reward.overlong_buffer_len")
    if buffer is not None:
        flags.set(algorithm__overlong_buffer=int(buffer))


def _lengths(flags: Flags) -> None:
    """max_len is of prompt and response together; without max_new_tokens a response gets what its prompt leaves."""
    names = ("max_len", "data.max_len")
    most = flags.number(int, *names)
    prompt, new = flags.option("data.max_prompt_tokens"), flags.option("rollout.max_new_tokens")
    of_agent = flags.option("agent.func_path") is not None
    if most is None:
        if of_agent and prompt and new:
            flags.set(agent__max_tokens=int(prompt) + int(new))
    elif prompt is not None:
        flags.idle("prompt_max_len and generate_max_len say it", *names)
    elif new is None:
        flags.set(data__max_prompt_tokens=most - 1, rollout__max_new_tokens=most, agent__max_tokens=most)
    elif int(new) >= most:
        flags.found.faults.append(f"max_len={most} leaves no room for a prompt beside max_new_tokens={new}; raise it")
    else:
        flags.set(data__max_prompt_tokens=most - int(new))
        if of_agent:
            flags.set(agent__max_tokens=most)


def _template(flags: Flags) -> None:
    """OpenRLHF leaves a template away that has no place for the prompt, or beside the tokenizer's."""
    names = ("input_template", "data.input_template")
    template = flags.text(*names)
    if template is None:
        return
    if "{}" not in template:
        flags.found.notes.append(f"no effect of input_template={template!r}: it has no {{}}, where the prompt would go")
    elif flags.is_set("data.apply_chat_template"):
        flags.idle("apply_chat_template is on", *names)
    else:
        flags.set(data__input_template=template)


def _placement(flags: Flags) -> None:
    """Workers by node; what shares devices, and sleeps there, depends on what works at the same time."""
    for role, option in _WORKERS.items():
        nodes = flags.number(int, f"{role}_num_nodes", f"{role}.num_nodes")
        each = flags.number(int, f"{role}_num_gpus_per_node", f"{role}.num_gpus_per_node")
        if role == "reward" and flags.option("reward_model.path") is None:
            continue  # code and servers take no device
        own = "reference" if role == "ref" else role
        if nodes is not None:
            flags.found.options[f"placement.{own}_nodes"] = nodes
        if each is not None:
            flags.found.options[f"placement.{option}"] = (nodes or 1) * each
    overlaps = flags.is_set("asynchronous.enabled")
    colocates = flags.is_on("colocate_all_models", "train.colocate_all")
    if colocates:
        option = "placement.colocate_models" if overlaps else "placement.colocate"
        flags.found.options[option] = True
    if colocates and overlaps:
        flags.found.notes.append("while responses are generated ahead, colocate_all_models is for all but the engines")
    engines_sleep = ("vllm_enable_sleep", "vllm.enable_sleep")
    if flags.is_on(*engines_sleep) and (overlaps or not colocates):
        flags.idle("the engines share no devices", *engines_sleep)
    elif flags.is_on(*engines_sleep):
        flags.set(placement__engines_sleep=True)
    learners_sleep = ("deepspeed_enable_sleep", "ds.enable_sleep")
    if flags.is_on(*learners_sleep) and overlaps:
        flags.idle("actor and critic train while responses are generated", *learners_sleep)
    elif flags.is_on(*learners_sleep):
        flags.set(placement__learners_sleep=True)


def _asynchronous(flags: Flags) -> None:
    """Dynamic sampling, and responses that continue while weights change, of which only one can be."""
    bounds = flags.numbers("dynamic_filtering_reward_range", "algo.dynamic_filtering_range")
    filters = flags.is_on("dynamic_filtering", "algo.dynamic_filtering_enable")
    if filters:
        flags.set(algorithm__filter_range=bounds or FILTER_RANGE)
    elif bounds is not None:
        flags.idle("dynamic_filtering is off", "dynamic_filtering_reward_range", "algo.dynamic_filtering_range")
    partial = ("partial_rollout", "train.partial_rollout_enable")
    ahead = ("vllm_generate_batch_size", "rollout.vllm_generate_batch_size")
    if filters:
        why = "with dynamic_filtering new weights wait until responses are done"
        flags.idle(why, *(name for name in partial if flags.is_on(name)), *ahead)
        return
    if flags.name(*partial):
        flags.set(asynchronous__partial_rollout=flags.is_on(*partial))
    prompts = flags.number(int, *ahead)
    if prompts is not None and str(prompts) != (flags.option("prompts_per_step") or "1024"):
        flags.set(asynchronous__in_flight_prompts=prompts)


def _algorithm(flags: Flags) -> None:
    """The clip range, and the correction of what the engine computes otherwise."""
    one = flags.number(float, "eps_clip", "actor.eps_clip")
    both = flags.numbers("eps_clip_low_high", "actor.eps_clip_low_high")
    if one is not None and both is not None:
        flags.idle("eps_clip_low_high says both bounds", "eps_clip", "actor.eps_clip")
    clips = both or (None if one is None else [one, one])
    if clips is not None:
        flags.set(algorithm__clip_low=clips[0], algorithm__clip_high=clips[-1])
    kinds = ("vllm_is_correction_type", "algo.advantage.is_correction_type")
    kind = "icepop" if flags.is_on("use_icepop") else flags.text(*kinds) or "tis"
    if flags.is_on("enable_vllm_is_correction", "vllm_enable_is_correction", "algo.advantage.is_correction_enable"):
        flags.set(algorithm__correction=kind)
    else:
        flags.idle("enable_vllm_is_correction is off", "use_icepop", *kinds)
    bounds = flags.numbers("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold")
    if bounds:
        # Up to 0.9.0 it was one number, the highest weight.
        flags.set(algorithm__correction_range=bounds if len(bounds) > 1 else [0.0, *bounds])


def _training(flags: Flags) -> None:
    """How batches are cut, and the average of the weights."""
    sizes = ("train.micro_batch_size", "train.forward_micro_batch_size")
    if flags.is_on("use_dynamic_batch", "train.dynamic_batch_enable"):
        named = [size for size in sizes if flags.option(size) is not None]
        flags.found.options |= dict.fromkeys(named)
        if named:
            flags.found.notes.append(f"no effect of {', '.join(named)}: use_dynamic_batch cuts by tokens")
    beta = flags.number(float, "ema_beta")
    if flags.is_on("enable_ema", "train.enable_ema"):
        flags.set(train__ema_beta=beta or flags.options.get("train.ema_beta", EMA_BETA))
    else:
        flags.idle("enable_ema is off", "ema_beta")


def _log(flags: Flags) -> None:
    """W&B's key or `true`, and TensorBoard's folder or `true`."""
    names = {"wandb": ("use_wandb", "logger.wandb.key"), "tensorboard": ("use_tensorboard", "logger.tensorboard_dir")}
    for sink, option in {"wandb": "log.wandb_key", "tensorboard": "log.tensorboard_dir"}.items():
        value = flags.text(*names[sink])
        if value is None:
            continue
        is_on = _SWITCHES.get(value.lower())
        flags.found.options[option if is_on is None else f"log.{sink}"] = value if is_on is None else is_on


def _schedule(flags: Flags) -> None:
    """The learning rate's schedule, by transformers' name, and the layers that get an adapter."""
    schedule = flags.text("lr_scheduler", "actor.lr_scheduler")
    if schedule is not None and schedule not in _SCHEDULES:
        flags.found.faults.append(f"lr_scheduler={schedule}: use one of {', '.join(_SCHEDULES)}")
    elif schedule is not None:
        flags.found.options |= {"train.lr_scheduler": schedule, **_SCHEDULES[schedule]}
    modules = flags.name("target_modules", "ds.lora.target_modules")
    if modules is not None:
        value = flags.given[modules]
        flags.set(train__lora_target_modules=value if isinstance(value, str) else ",".join(value))


def _columns(flags: Flags) -> None:
    """The columns of train_sft, and how it reads them: with a template of its own, and the last response alone."""
    is_plain = flags.is_on("pretrain_mode", "model.pretrain_mode_enable")
    if is_plain:
        flags.set(data__plain_text=True)
    turns = ("multiturn", "data.multiturn")
    if flags.name(*turns):
        flags.set(data__multiturn=flags.is_on(*turns))
    prompt, response = ("input_key", "data.input_key"), ("output_key", "data.output_key")
    if not flags.name(*prompt, *response):
        return
    flags.set(data__prompt_key=flags.text(*prompt) or "input")
    if flags.name(*response):
        flags.set(data__response_key=flags.text(*response))
    if flags.option("data.multiturn") is None:
        flags.set(data__multiturn=False)
    has_template = flags.name("input_template", "data.input_template") is not None
    if not (is_plain or has_template or flags.is_set("data.apply_chat_template")):
        flags.set(data__input_template=INPUT_TEMPLATE)
        text = f"data.input_template={INPUT_TEMPLATE!r}, as input_key is OpenRLHF's; another may be given"
        flags.found.notes.append(text)


_SHARED = (_template, _schedule, _log)

PPO = Adapter.load(TABLE, "shared", "ppo", compute=compute)
"""OpenRLHF's names for the recipe openrlhf_ppo."""

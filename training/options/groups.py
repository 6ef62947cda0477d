"""The groups of options that recipes share: a recipe's config.py embeds them, and adds what is its own.

Nothing here needs torch. Each class refuses what cannot work with a ValueError that says what to set; the prefix of its
group (`data.`, `evaluation.`) is that of the recipes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from components.data.columns import column_names
from components.data.mixture import source_names
from components.generate.choice import ROLLOUT_ENGINES, adapters_fault, choose_rollout_engine
from components.process.heartbeat import listen
from components.ranges import (
    Count,
    CountFromZero,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Share,
    ShareAboveZero,
    out_of_range,
)
from components.rewards.base import RewardSettings
from components.rewards.scorers import REASONING_GYM_PREFIX, TASK_PREFIX
from components.train.config import (
    HFRolloutConfig,
    RolloutConfig,
    SamplingConfig,
    TrainOptions,
    VLLMRolloutConfig,
    product_type,
)
from core import beat
from plugins.plan.machines import Machines
from training.options.schema import Options, active_when, at_home, errors_of, limit_note, recipe_of, refuse
from training.run.checkpoints.checkpoint import Checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.data.prompts import PromptSource

# In each process of a run core's watch for hangs hears what components do.
listen(beat)


def new_run_dir(recipe: str) -> str:
    """Where a run of a recipe goes that was not told where: runs/<recipe>-<time>."""
    return f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


Seed = Annotated[int, Range(least=0, most=2**63 - 1)]
"""Generators of random numbers take no larger ones."""
Steps = Annotated[int, Range(least=1, also=-1)]
"""Between two of something; -1 has a meaning of its own."""


@dataclass(kw_only=True)
class RunOptions(Options):
    """What every run has, whatever it trains."""

    run_dir: str = ""
    """Folder of everything that the run writes. Default: runs/<recipe>-<time>."""
    seed: Seed = 42
    """Fixes the order of the prompts and the samples."""
    dry_run: bool = False
    """Print what would run where, as JSON, and start nothing."""
    assume_devices: str | None = None
    """With dry_run: plan for other machines than this one, written as GPUs of each x machines, 8x2, with a GPU's memory
    8x2x80GB; or as 8, for as many machines as the run asks for. Faults of models and data that are here are notes."""
    print_config: bool = False
    """Print the whole configuration as YAML, and start nothing."""
    resume: str = "auto"
    """`auto` resumes from the latest checkpoint of run_dir if there is one, a path from that step, run or folder of
    checkpoints; `none` begins anew, in a folder without a run."""
    backend: Literal["ray", "local"] = "ray"
    """Where the roles live: each in a process of its own, or all in this one, one at a time (for breakpoints)."""
    max_restarts: CountFromZero = 3
    """How often all starts again from the latest checkpoint when a rank dies, and how often dead engines of a role are
    replaced before that; those that die together, as with their node, count once."""
    stall_timeout: float = 1800.0
    """Seconds without a sign of progress after which a process is ended as hung; 0: never."""
    placement_timeout: float = 30.0
    """Seconds to wait for free resources, at the start and for the replacement of an engine; longer than an
    autoscaler needs to add a node, if there is one."""

    def __post_init__(self) -> None:
        if not self.run_dir:
            self.run_dir = new_run_dir(recipe_of(type(self)))
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.assume_devices is not None:
            yield from errors_of("", Machines.parse, self.assume_devices)
            if not (self.dry_run or self.print_config):
                yield f"assume_devices={self.assume_devices} is for a plan alone; set dry_run as well, or leave it out"


@dataclass(kw_only=True)
class ModelOptions(Options, group="model"):
    """The policy that the run starts from."""

    path: str = ""
    """A folder or hub name that `from_pretrained` takes, or `warm_start:<task>`, which makes and keeps a tiny
    demonstration model."""
    attn_implementation: str | None = None
    """Attention kernels: sdpa, eager, flash_attention_2, or whatever transformers takes. Default: its own choice."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's own: Jinja, or a file with it. Saved with the trained policy."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as `{enable_thinking: false}`. They are set in the template and saved with it."""
    pad_token: str | None = None
    """Token that fills short rows. Default: the tokenizer's own, or its end token where it names none."""
    tokenizer_path: str | None = None
    """Folder or hub name of another tokenizer with the same vocabulary. Default: the model's own."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Other values for the model's config.json, as `{max_position_embeddings: 32768}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = at_home(self.path)

    def prepared(self, run_dir: Path) -> ModelOptions:
        """With the path of a folder that engines can load: a demonstration's model is made where it is not there yet,
        and one that is to be changed is a folder of links in the run folder.
        """
        from plugins.demo.warm_start import resolve_model
        from training.launch.model_folder import model_view

        path = resolve_model(self.path)
        view = model_view(path, run_dir / "model", self.config_overrides, self.tokenizer_path, self.chat_template)
        return replace(self, path=view)

    def tokenizer(self, path: str | None = None) -> PreTrainedTokenizerBase:
        """The model's tokenizer, or that of the model at `path`, with the template and token given here. It pads with
        its end token where it has no other.
        """
        from components.data.text import load_tokenizer, set_template_arguments

        found = self.tokenizer_path or path or self.path
        tokenizer = load_tokenizer(
            found,
            chat_template=self.chat_template,
            pad_token=self.pad_token,
            pad_with_end=True,
            model_path=path or self.path,
        )
        return set_template_arguments(tokenizer, self.template_arguments)


@dataclass(kw_only=True)
class DataOptions(Options, group="data"):
    """The prompts to train on."""

    path: str = ""
    """A json, jsonl, csv, parquet or arrow file, a folder of `save_to_disk` or with such files, a hub name,
    `task:<name>` for a generated task, or `reasoning_gym:<task>`; several with commas between."""
    probs: str | None = None
    """Shares of a mixture, one per source, as `0.7,0.3`. Default: all of one source, then all of the next."""
    split: str = "train"
    """Which split of a hub name or folder."""
    prompt_key: str = "input"
    """Column of the prompt: text, or a list of chat messages. Generated tasks bring their own."""
    label_key: str | None = None
    """Column of the label that the reward sees; `a.b` is the field b of the column a."""
    apply_chat_template: bool = False
    """Wrap each prompt as a user message of the tokenizer's chat template. Chat messages always go through it."""
    input_template: str | None = None
    """Text around each prompt, with `{}` in its place."""
    ignored_columns: str | None = None
    """Columns, with commas between, that the policy is not to read although their names have a well-known meaning, such
    as `tools`, `system` or `images`; without it they are used, or their rows refused. Rewards are given them."""
    max_samples: Count | None = None
    """Use at most this many prompts. Default: all; of a generated task, which has no end, 10,000."""
    max_prompt_tokens: Count = 1024
    """Tokens of a prompt, at most."""
    overlong: Literal["leave_out", "error", "left", "right", "middle"] = "leave_out"
    """What becomes of longer prompts: they are left out and counted, are an error, or the part is named that is cut
    out."""
    shuffle: bool = True
    """Go through the prompts in another order in each epoch."""
    epochs: Count = 1
    """How often the prompts are gone through, each time in another order."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        template = self.input_template
        if template is not None and template.count("{}") != 1:
            yield f"data.input_template={template!r} must hold {{}} once, where the prompt goes"
        if template is not None and self.apply_chat_template:
            yield "data.apply_chat_template and data.input_template exclude each other; unset one of them"

    def rows(self, seed: int, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """The prompts and labels; `seed` draws those of a generated task. `notes` gets how many max_samples leaves
        out.
        """
        from components.data.prompts import load_rows

        return load_rows(
            self.path,
            self.prompt_key,
            self.label_key,
            split=self.split,
            max_rows=self.max_samples,
            seed=seed,
            probs=self.probs,
            note=limit_note(notes, "data.max_samples"),
            ignored=column_names(self.ignored_columns),
        )

    def describe_columns(self, rows: list[dict[str, Any]]) -> str | None:
        """Describe which columns of rows are used; None for generated tasks alone, which have none to choose."""
        from components.data.prompt_rows import describe_columns

        if all(name.startswith((TASK_PREFIX, REASONING_GYM_PREFIX)) for name in source_names(self.path)):
            return None
        return describe_columns(rows, self.used_columns)

    @property
    def used_columns(self) -> list[str]:
        """Columns that the options name."""
        return [key for key in (self.prompt_key, self.label_key) if key is not None]

    def source(
        self, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool = True
    ) -> PromptSource:
        """Rows as token ids, in an order that follows from the seed, without those that are too long."""
        from components.data.prompts import PromptSource

        found = PromptSource(
            rows,
            tokenizer,
            seed,
            shuffle=shuffle and self.shuffle,
            apply_chat_template=self.apply_chat_template,
            input_template=self.input_template,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong="left" if self.overlong == "error" else self.overlong,
        )
        if self.overlong == "error" and found.cut:
            row, length = found.longest
            raise ValueError(
                f"{found.cut} of {len(rows)} prompts have more than data.max_prompt_tokens={self.max_prompt_tokens} "
                f"tokens, the longest {length} (row {row}); raise it, or set data.overlong to leave_out, left, right "
                "or middle"
            )
        return found


@dataclass(kw_only=True)
class RewardOptions(Options, group="reward"):
    """What a response is worth."""

    source: str | None = None
    """A Python file with a reward function, `FILE.py` or `FILE.py:NAME`, in the signature of TRL, OpenRLHF or verl; the
    URL of a reward server (several with commas between); a scorer: `gsm8k`, `gsm8k_flexible`, `math`, `exact_match`,
    `reasoning_gym`, or a task's own; or a weighted sum, as `0.7*gsm8k + 0.3*style.py`, each part with its weight, and
    logged by itself. Default: that of the task which data.path names."""
    workers: Count = 1
    """Processes that run the Python file or the scorer."""
    timeout_s: Seconds = 60.0
    """Seconds that reward code may take over one response, before it is counted as failed."""
    max_failed_share: Share = 0.1
    """Share of a batch's responses that may fail (or two, if that is more and not all); above it the run stops."""
    url_timeout_s: Seconds = 180.0
    """Seconds that a reward server may take over one request; a request is tried five times."""
    url_batch_size: Count = 64
    """Responses per request to a reward server."""

    def settings(self) -> RewardSettings:
        """How reward code and reward servers are used."""
        own = vars(self)
        return RewardSettings(**{part.name: own[part.name] for part in fields(RewardSettings) if part.name in own})


@dataclass(kw_only=True)
class RolloutOptions(Options, group="rollout"):
    """How responses are sampled."""

    temperature: Positive = 1.0
    """Of the training samples. Log-probabilities are taken at the same temperature."""
    top_p: ShareAboveZero = 1.0
    """Sample from the likeliest tokens whose probabilities reach this sum. Below 1 the engine's distribution is not the
    one that is trained."""
    top_k: CountFromZero = 0
    """Sample from so many likeliest tokens; 0: from all. As top_p otherwise."""
    max_new_tokens: Count = 1024
    """Tokens of a response, at most, the end token included."""
    max_num_seqs: Count = 512
    """Responses that an engine generates at the same time. Changes memory and speed, not tokens."""
    engine: str = "auto"
    """Who generates: `vllm`; `hf`, a loop around transformers; or `auto`: vllm where it is installed and faster, on a
    GPU or with a large model. They draw different tokens from the same seed."""
    tensor_parallel: Count = active_when(1, engine=("auto", "vllm"))
    """vllm: devices of one engine, over which the weights are spread; on a CPU processes. Where roles share GPUs these
    are the devices of as many ranks, on one node."""
    gpu_memory: ShareAboveZero | None = active_when(None, engine=("auto", "vllm"))
    """vllm: share of a GPU's memory for weights and cache. Default: 0.9; where others share the GPU 0.45, and with
    placement.learners_sleep 0.7."""
    cpu_cache_gb: Positive = active_when(1.0, engine=("auto", "vllm"))
    """vllm: GiB of an engine's key-value cache on a CPU."""
    enforce_eager: bool = active_when(False, engine=("auto", "vllm"))
    """vllm: no CUDA graphs, which are slower to start and faster to run. On a CPU there are none."""
    prefix_caching: bool = active_when(True, engine=("auto", "vllm"))
    """vllm: read the common beginning of prompts once. Changes speed, not tokens."""
    verify_weight_sync: bool = False
    """After each step compare a digest of every weight on both sides."""
    weight_sync: Literal["auto", "shared_memory", "ipc", "broadcast"] = "auto"
    """How weights get to the engines: `shared_memory`, which those on other nodes read by TCP; past the host, while
    they are gathered, by `ipc`, from a rank to the engine on its GPU, or `broadcast`, by NCCL from rank 0 to all; or
    `auto`: ipc where each rank shares its GPU with an engine, broadcast where engines have GPUs of their own."""
    merge_lora: bool | None = active_when(None, engine=("auto", "vllm"))
    """vllm, with train.lora_rank: true sends the weights with the adapters added to them, false the adapters alone,
    which vLLM adds as it computes. Default: the adapters alone where vLLM can hold them for the model."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.engine not in ROLLOUT_ENGINES:
            yield f"rollout.engine={self.engine}; use one of {', '.join(ROLLOUT_ENGINES)}"
        if self.engine == "hf" and self.tensor_parallel > 1:
            yield f"rollout.tensor_parallel={self.tensor_parallel}, but hf uses one device; leave it out"

    def chosen(
        self, gpus: int, model_path: str, *temperatures: float, lora_rank: int = 0
    ) -> tuple[RolloutOptions, str]:
        """With the engine filled in that the machine and the model suggest; and a line that says which, and why.

        Args:
            gpus: of a machine.
            model_path: of the policy.
            temperatures: that are sampled at besides its own.
            lora_rank: of the policy's adapters; 0: it has none.

        Raises:
            ValueError: the engine that was asked for cannot be had, or cannot hold adapters.
        """
        name, reason = choose_rollout_engine(self.engine, gpus, model_path, self.temperature, *temperatures)
        engine = f"{name} generates: {reason}"
        if self.tensor_parallel > 1 and name == "hf":
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} needs vllm, but {engine}; set rollout.engine=vllm"
            )
        if not lora_rank:
            return replace(self, engine=name), engine
        fault = adapters_fault(name, model_path, lora_rank, asked=self.merge_lora is False)
        if fault and self.merge_lora is False:
            raise ValueError(f"rollout.merge_lora=false: {fault}; leave it out")
        merges = bool(fault) if self.merge_lora is None else self.merge_lora
        sent = "weights with the adapters added" if merges else "the adapters alone"
        because = f", since {fault}" if fault else ""
        return replace(self, engine=name, merge_lora=merges), f"{engine}; it is sent {sent}{because}"

    def sampling(self, seed: int, step: int, temperature: float | None = None) -> SamplingConfig:
        """How the responses of a step are drawn. Evaluations name a temperature of their own, and leave no token
        out.
        """
        narrowed = {"top_p": self.top_p, "top_k": self.top_k} if temperature is None else {}
        return SamplingConfig(
            temperature=self.temperature if temperature is None else temperature,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            step=step,
            **narrowed,
        )

    def engine_config(
        self, precision: str, max_prompt_tokens: int | None, placement: PlacementOptions, lora_rank: int
    ) -> RolloutConfig:
        """What one engine is made with.

        Args:
            precision: that the policy is trained in.
            max_prompt_tokens: of the longest prompt; None: as the model allows.
            placement: who shares a GPU with it, and who sleeps there.
            lora_rank: of the policy's adapters; 0: it has none.
        """
        if self.engine != "vllm":
            return HFRolloutConfig(precision=precision, max_num_seqs=self.max_num_seqs)
        # Those that sleep leave a context on the GPU, and a reference model stays.
        shared = 0.7 if placement.learners_sleep else 0.45
        return VLLMRolloutConfig(
            dtype=product_type(precision),
            max_num_seqs=self.max_num_seqs,
            max_model_len=None if max_prompt_tokens is None else max_prompt_tokens + self.max_new_tokens,
            tensor_parallel_size=self.tensor_parallel,
            gpu_memory_utilization=self.gpu_memory or (shared if placement.shares_devices else 0.9),
            cpu_cache_gb=self.cpu_cache_gb,
            enforce_eager=self.enforce_eager,
            enable_prefix_caching=self.prefix_caching,
            enable_sleep=bool(placement.engines_sleep),
            lora_rank=0 if self.merge_lora else lora_rank,
        )

    def notes(self) -> list[str]:
        """What a user should know of before the run starts."""
        if self.top_p == 1 and not self.top_k:
            return []
        note = (
            f"rollout.top_p={self.top_p} and rollout.top_k={self.top_k} sample from fewer tokens than are trained: the "
            "engine's log-probabilities are not the policy's, and ratios to them mean little; 1 and 0 agree"
        )
        return [note]


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(TrainOptions):
    """How a model is trained; what its engine has against it is told with the faults of all other options."""

    GROUP: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        refuse(out_of_range(self, f"{self.GROUP}."))
        refuse([*self.read_adapters(f"{self.GROUP}."), *self.faults(f"{self.GROUP}.")])


@dataclass(kw_only=True)
class PlacementOptions(Options, group="placement"):
    """What runs where. Without a GPU every worker is a process on the CPU."""

    nodes: Count = 1
    """Machines that the run uses."""
    devices_per_node: Count | None = None
    """Devices of each machine that the run uses; without GPUs processes. Default: all of its GPUs."""
    colocate: bool = True
    """The roles share the devices, and work one after the other. Otherwise each has its own, and what can work at the
    same time does."""
    actor_nodes: Count | None = None
    """Machines over which the ranks of the policy are spread, where the other roles are on the rest. Default: all."""
    actor_ranks: Count | None = None
    """Processes that train the policy, on all machines. Default: one per GPU that is theirs, 1 without GPUs."""
    rollout_engines: Count | None = None
    """Engines that sample. Default: one for each rollout.tensor_parallel GPUs that are theirs, which are those of the
    actor where they share GPUs."""
    references: Count | None = None
    """Instances of the frozen policy, where there is a KL. Default: as for the engines."""
    frozen_models: Literal["whole", "sharded", "offloaded"] = "whole"
    """Reference and reward models: `whole` in each of their processes, which are replaced when they are lost; `sharded`
    over these, which gather a layer for each pass over it, and all starts again when one is lost; or `offloaded`:
    sharded, and in host memory but for the layer at work."""
    engines_sleep: bool | None = None
    """The engines give a GPU's memory back while the policy trains. Default: where vllm shares GPUs with it."""
    learners_sleep: bool = False
    """What trains, actor and critic, waits in host memory while responses are generated."""

    @property
    def shares_devices(self) -> bool:
        """Whether the engines share their devices with other roles."""
        return self.colocate

    def with_sleep(self, gpus: int, engine: str) -> Self:
        """With `engines_sleep` filled in: they do where that gives memory of a GPU to those that train."""
        if self.engines_sleep is not None:
            return self
        return replace(self, engines_sleep=gpus > 0 and engine == "vllm" and self.colocate)

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PlacementOptions:
        """With every number filled in that was left to the machine.

        Args:
            gpus: of each machine.
            groups: roles that hold the policy: 2, or with a reference 3.
            tensor_parallel: devices of an engine.

        Raises:
            ValueError: they cannot be laid out; the message says what to set.
        """
        spread = self.actor_nodes or self.nodes
        if spread > self.nodes or (self.colocate and spread < self.nodes):
            raise ValueError(
                f"placement.actor_nodes={spread} of placement.nodes={self.nodes}: roles that share GPUs are on all "
                "nodes, others on the rest; lower it, with placement.colocate=false, or leave it out"
            )
        if gpus and (self.devices_per_node or 0) > gpus:
            raise ValueError(
                f"placement.devices_per_node={self.devices_per_node}, but a machine has {gpus} GPUs; lower it"
            )
        ranks, other = self._shares(self.devices_per_node or gpus, groups)
        other = ranks if gpus and self.colocate else other
        engines, references = self.rollout_engines or max(1, other // tensor_parallel), self.references or other
        if ranks % spread:
            name = "actor_nodes" if self.actor_nodes else "nodes"
            raise ValueError(f"placement.actor_ranks={ranks} cannot be spread over placement.{name}={spread} evenly")
        devices = {ranks, engines * tensor_parallel, references if groups > 2 else ranks}
        if gpus and self.colocate and (len(devices) > 1 or ranks // spread % tensor_parallel):
            raise ValueError(
                f"placement.actor_ranks={ranks} on {spread} nodes, rollout_engines={engines} x rollout.tensor_parallel="
                f"{tensor_parallel} and references={references} cannot pair up on shared GPUs; set them to the same "
                "number of devices, an engine's all on one node, or placement.colocate=false"
            )
        return replace(self, actor_nodes=spread, actor_ranks=ranks, rollout_engines=engines, references=references)

    def _shares(self, each: int, groups: int) -> tuple[int, int]:
        """Ranks of the policy, and devices of each other role, with so many devices on each machine."""
        if self.colocate:
            every = self.nodes * max(1, each)
            return self.actor_ranks or every, every
        if self.actor_nodes in (None, self.nodes):
            every = self.nodes * max(1, each // groups)
            return self.actor_ranks or every, every
        ranks = self.actor_ranks or self.actor_nodes * max(1, each)
        return ranks, max(1, (self.nodes * each - ranks) // (groups - 1))


@dataclass(kw_only=True)
class AsyncOptions(Options, group="asynchronous"):
    """Whether responses are generated while the policy trains on earlier ones, with weights that are a little older."""

    enabled: bool = False
    """Generate ahead of training. Needs devices of their own for both."""
    queue_size: CountFromZero = active_when(1, enabled=True)
    """How many batches are generated ahead; so many versions behind may a batch's weights be. 0: none, as without."""
    partial_rollout: bool = False
    """Bring new weights to the engines in the middle of episodes. Otherwise an update waits until they are done."""
    in_flight_prompts: int | None = None
    """Prompts in generation at the same time, more than a step's and at most twice as many: the slowest ones come in
    the next batch. Default: a step's, and a batch waits for the slowest. Needs partial_rollout."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        for name in ("partial_rollout", "in_flight_prompts"):
            if getattr(self, name) and not self.enabled:
                yield f"asynchronous.{name} without asynchronous.enabled; set that to true as well"
        if self.partial_rollout and not self.queue_size:
            yield (
                "asynchronous.partial_rollout with asynchronous.queue_size=0: nothing is generated while weights "
                "change; set queue_size=1"
            )
        if self.in_flight_prompts is not None and not self.partial_rollout:
            yield "asynchronous.in_flight_prompts needs asynchronous.partial_rollout=true; set that as well"

    def notes(self, correct: str, corrects: bool) -> list[str]:
        """What a user should know of before the run starts.

        Args:
            correct: what a user sets so that older samples are weighed by how likely they have become.
            corrects: whether they are.
        """
        if self.ahead and not corrects:
            return [
                f"responses are up to {self.most_stale} updates old, and learnt from as if new; {correct} weighs them"
            ]
        return []

    @property
    def ahead(self) -> int:
        """Batches that are generated ahead; 0 where it is not enabled."""
        return self.queue_size if self.enabled else 0

    @property
    def most_stale(self) -> int:
        """So many versions may the weights that drew a token be behind those that train on it."""
        return self.ahead + (self.in_flight_prompts is not None)

    def faults_beside(self, colocated: bool, backend: str, prompts_per_step: int, apart: str) -> Iterator[str]:
        """Why generation and training cannot continue at the same time.

        Args:
            colocated: the roles work one after the other on the same devices.
            backend: of the run.
            prompts_per_step: of the run.
            apart: what a user sets to give the roles devices of their own, as `placement.colocate=false`.
        """
        if self.ahead and colocated:
            yield (
                "asynchronous.enabled, but the roles work one after the other on the same devices, and cannot work at "
                f"the same time; set {apart}"
            )
        if self.ahead and backend == "local":
            yield "asynchronous.enabled, but backend=local runs one role at a time; set backend=ray"
        if self.in_flight_prompts and not prompts_per_step < self.in_flight_prompts <= 2 * prompts_per_step:
            yield (
                f"asynchronous.in_flight_prompts={self.in_flight_prompts}; set {prompts_per_step + 1} to "
                f"{2 * prompts_per_step}: more than the {prompts_per_step} prompts of a step, at most twice as many"
            )


@dataclass(kw_only=True)
class EvaluationOptions(Options, group="evaluation"):
    """How good the policy is on prompts that it is not trained on."""

    path: str | None = None
    """Held-out prompts, as data.path; of a generated task those that are kept for this. Default: no evaluation."""
    split: str | None = active_when(None, path=True)
    """Which split of it. Default: train; of a task: heldout."""
    max_samples: Count | None = active_when(2048, path=True)
    """How many of them. null: all, of a generated task 2,048."""
    every: Steps = active_when(-1, path=True)
    """Evaluate every so many steps; -1 only at the start and at the end."""
    greedy: bool = active_when(False, path=True)
    """Score the likeliest response to each prompt too, as eval/score_greedy."""
    at_start: bool = active_when(True, path=True)
    """Evaluate before the first step."""
    temperature: NotNegative = active_when(1.0, path=True)
    """Of the responses behind eval/score."""
    top_p: ShareAboveZero = active_when(1.0, path=True)
    """Of the same responses: they are drawn from the likeliest tokens whose probabilities reach this sum."""
    top_k: CountFromZero = active_when(0, path=True)
    """Of the same: from so many likeliest tokens; 0: from all."""
    samples_per_prompt: Count = active_when(4, path=True)
    """N: responses per held-out prompt."""
    best_metric: str = active_when("", path=True)
    """The policy with the best of this metric is kept, and named in checkpoints/best. Default: eval/score; `none` keeps
    only the last policy."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield "evaluation.temperature=0 gives the same response every time; set evaluation.samples_per_prompt=1"

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to evaluate after this step."""
        return is_last or (self.every > 0 and step % self.every == 0)

    def rows(self, data: DataOptions, notes: list[str] | None = None) -> list[dict[str, Any]]:
        """The held-out prompts, none without a path. The same for every seed, so that runs compare. `notes` gets how
        many max_samples leaves out.
        """
        from components.data.prompts import load_rows

        if self.path is None:
            return []
        return load_rows(
            self.path,
            data.prompt_key,
            data.label_key,
            split=self.split,
            heldout=True,
            max_rows=self.max_samples,
            note=limit_note(notes, "evaluation.max_samples"),
            ignored=column_names(data.ignored_columns),
        )


@dataclass(kw_only=True)
class CheckpointOptions(Options, group="checkpoint"):
    """When the state of the training is written, and how much of it is kept."""

    every: Steps = -1
    """A checkpoint every so many steps; -1 only for the best policy, when the training ends, or when it is stopped."""
    keep: Count = 3
    """How many checkpoints are kept, the newest ones; the best stays beside them."""
    max_gb: Positive | None = None
    """What all of them may take together. Default: any."""
    path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    export_path: str | None = None
    """A second place for the trained policy; it is always in the checkpoints."""

    def store(self, run_dir: str, least_bytes: int = 0) -> Checkpoints:
        """The step folders of a run, of which each takes `least_bytes` at least."""
        most = math.inf if self.max_gb is None else self.max_gb * 1e9
        return Checkpoints(self.path or Path(run_dir) / "checkpoints", self.keep, most, least_bytes)

"""Search for the most preferred values of the automatic options that fit in GPU memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.generate.config import RolloutConfig
from components.generate.paged_config import PagedRolloutConfig
from components.models.size import ModelSize, model_size
from components.registry import load
from components.train.config import TrainConfig
from plugins.choices.candidates import ENOUGH_ROWS, SMALL_MODEL, TOKENS, Candidate, Domains, row_domain, token_domain
from training.launch.model_use import ModelUse
from training.launch.plan import PLAN, Plan

SPARE = 0.06
"""Share of a GPU that stays free, for fragmentation and for what the estimates miss."""
SPARE_CACHE_BYTES = 2 * 10**9
"""Memory that an engine gets beyond its estimate. vLLM measures its passes and CUDA graphs at the start, and takes what
they need from the cache."""
HF_ROWS = 512
"""Maximum number of rows of an engine without a paged cache."""
STAGE = "train.zero_stage"
RECOMPUTES = "train.gradient_checkpointing"
TOKEN_LIMIT = "train.max_tokens"
ROWS = "rollout.max_num_seqs"
SHARE = "rollout.gpu_memory"
SLEEPS = "placement.engines_sleep"
WIDTH = {"float32": 4, "bfloat16": 2}
"""Number of bytes of a value in the key-value cache, by dtype."""


def value_of(config: Any, name: str) -> Any:
    """Return the value of an option by its dotted name, or None if the configuration has no such option."""
    group, _, option = name.partition(".")
    return getattr(getattr(config, group, None), option, None)


def with_options(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration with other values, given by dotted names."""
    changed = copy.copy(config)
    for name, value in values.items():
        group, _, option = name.partition(".")
        setattr(changed, group, replace(getattr(changed, group), **{option: value}))
    return changed


@dataclass(kw_only=True)
class EngineMemory:
    """Memory of a rollout engine on each of its GPUs in bytes."""

    weights: int
    passes: int
    base: int
    """CUDA context, CUDA graphs and buffers of NCCL."""
    cache: int
    """Key-value cache of the rows that it generates concurrently, each of maximum length."""

    @property
    def total(self) -> int:
        """Number of bytes in total."""
        return self.weights + self.passes + self.base + self.cache + SPARE_CACHE_BYTES


@dataclass(kw_only=True)
class Search:
    """Search over plans of a run, whose automatic options have different values."""

    plan: Plan
    """Plan with the values that need the least memory."""
    requested: Any
    """Configuration in which None stands for an option to choose."""
    replan: Callable[[Any], Plan]
    names: Sequence[str]
    """Options to choose."""
    checked: dict[Candidate, Plan | None] = field(default_factory=dict)
    """Plans of the candidates so far, or None for one that does not fit."""

    def __post_init__(self) -> None:
        uses = self.plan.models
        self.engine: ModelUse | None = next((use for use in uses if isinstance(use.config, RolloutConfig)), None)
        self.trained: ModelUse = next(use for use in uses if isinstance(use.config, TrainConfig))
        capacity: int | None = self._run(self.plan).capacity.device
        self.device_bytes = capacity or 0
        """Memory of a GPU. 0: unknown."""

    @staticmethod
    def _run(plan: Plan) -> Any:
        memory: Any = plan.memory
        return memory.run

    @property
    def is_known(self) -> bool:
        """True if the sizes of all models and of the GPUs are known."""
        sizes = [model_size(use.path) for use in self.plan.models]
        return self.device_bytes > 0 and all(size is not None and size.layers for size in sizes)

    @property
    def engine_processes(self) -> int:
        """Number of engines."""
        assert self.engine is not None
        return self.plan.job.placement.processes[self.engine.role]

    def engine_memory(self, candidate: Candidate) -> EngineMemory | None:
        """Return the memory that an engine needs, or None if the run has no engine with a paged cache."""
        if self.engine is None or not isinstance(self.engine.config, PagedRolloutConfig):
            return None
        rows = value_of(self.requested, ROWS) or candidate.max_num_seqs
        config = replace(self.engine.config, max_num_seqs=rows, enable_sleep=candidate.sleeps)
        use = replace(self.engine, config=config)
        estimate = load(PLAN, "use")(use, self.plan.job, self.plan.longest, self.device_bytes)
        size = model_size(use.path)
        assert size is not None
        # A cache for more sequences than the engine gets in a step would stay unused.
        concurrent = min(candidate.rows, rows, -(-use.sequences // self.engine_processes))
        cache = concurrent * row_bytes(size, config, self.plan.longest)
        return EngineMemory(weights=estimate.weights, passes=estimate.passes, base=estimate.base, cache=cache)

    def domains(self) -> Domains:
        """Return the possible values of each option."""
        train = self.plan.config.train
        # fsdp shards everything between optimizer steps, so it has no stage 1.
        stages = [1, 2, 3]
        if train.engine == "fsdp":
            stages = [2, 3]
        size = model_size(self.trained.path)
        assert size is not None
        stored_tokens = TOKENS[-1]
        if size.parameters < SMALL_MODEL:
            stored_tokens = TOKENS[-2]
        return Domains(
            sleeps=self._values_of(SLEEPS, [False, True]),
            recomputes=self._values_of(RECOMPUTES, [False, True]),
            stages=self._values_of(STAGE, stages),
            tokens=self._values_of(TOKEN_LIMIT, token_domain(self.plan.longest)),
            stored_tokens=stored_tokens,
            rows=self._rows(),
        )

    def _values_of(self, name: str, values: list[Any]) -> list[Any]:
        """Return the possible values of an option: `values` if it is to be chosen, otherwise the value that is set."""
        if name in self.names:
            return values
        # A recipe may lack the option: its engines cannot sleep, for example.
        return [value_of(self.plan.config, name) or False]

    def _rows(self) -> list[int]:
        """Return the numbers of rows that the cache of an engine may hold, largest first."""
        if self.engine is None or not {ROWS, SHARE} & {*self.names}:
            return [ENOUGH_ROWS]
        size = model_size(self.engine.path)
        assert size is not None
        most = value_of(self.requested, ROWS)
        if most is None and not isinstance(self.engine.config, PagedRolloutConfig):
            most = HF_ROWS
        rows = row_domain(size.parameters, -(-self.engine.sequences // self.engine_processes))
        if most is None:
            return rows
        return [most, *(count for count in rows if count < most)]

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """Return the values of the options to choose, except the share of an engine."""
        values = {
            STAGE: candidate.stage,
            RECOMPUTES: candidate.recomputes,
            TOKEN_LIMIT: candidate.tokens,
            SLEEPS: candidate.sleeps,
            ROWS: candidate.max_num_seqs,
        }
        return {name: value for name, value in values.items() if name in self.names}

    def plan_of(self, candidate: Candidate) -> Plan | None:
        """Return the plan of a candidate, or None if it does not fit in the memory of the GPUs."""
        if candidate not in self.checked:
            self.checked[candidate] = self._plan_if_it_fits(candidate)
        return self.checked[candidate]

    def _plan_if_it_fits(self, candidate: Candidate) -> Plan | None:
        values = self.values(candidate)
        memory = self.engine_memory(candidate)
        if memory is not None and SHARE in self.names:
            # Rounded up to a percent: the engine never gets less than it needs, and the value is easy to read.
            values[SHARE] = math.ceil(100 * memory.total / self.device_bytes) / 100
            if values[SHARE] > 1 - SPARE:
                return None
        plan = self.replan(with_options(self.requested, values))
        if self._fits(plan, candidate):
            return plan
        return None

    def pools(self, plan: Plan) -> Sequence[Any]:
        """Return the memory of the GPUs that roles share in a plan."""
        return load(PLAN, "pools")(self._run(plan))

    def _fits(self, plan: Plan, candidate: Candidate) -> bool:
        if any(estimate.short for estimate in self._run(plan).estimates.values()):
            return False
        memory = self.engine_memory(candidate)
        if memory is not None and SHARE not in self.names and memory.total > self._share(plan):
            return False
        return all(pool.most <= (1 - SPARE) * pool.available for pool in self.pools(plan))

    def _share(self, plan: Plan) -> int:
        """Return the number of bytes of a GPU that an engine may take, if the option is not chosen."""
        config: Any = next(use.config for use in plan.models if isinstance(use.config, PagedRolloutConfig))
        return int(config.gpu_memory_utilization * self.device_bytes)

    def best(self) -> Candidate | None:
        """Return the most preferred candidate that fits, or None if none does."""
        domains = self.domains()
        for chain in domains.chains():
            if self.plan_of(chain[-1]) is None:
                continue
            # The memory decreases along a list, so the first candidate that fits is found by bisection.
            low = 0
            high = len(chain) - 1
            while low < high:
                middle = (low + high) // 2
                if self.plan_of(chain[middle]) is None:
                    low = middle + 1
                else:
                    high = middle
            # The list lowers tokens and rows in turns. With the tokens that fit, more rows may fit too.
            more_rows = (replace(chain[low], rows=rows) for rows in domains.rows if rows > chain[low].rows)
            return next((candidate for candidate in more_rows if self.plan_of(candidate) is not None), chain[low])
        return None


def row_bytes(size: ModelSize, config: PagedRolloutConfig, tokens: int) -> int:
    """Return the bytes of the key-value cache of a sequence, on each of the GPUs of an engine."""
    return 2 * size.layers * size.keys * WIDTH[config.dtype] * tokens // config.tensor_parallel_size

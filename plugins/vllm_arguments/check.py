"""Check of the engine arguments that a run passes to vLLM, before anything starts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

from components.train.config import product_type
from plugins.vllm_arguments.table import ALLOWED, CORRECTED, Argument, arguments, content
from training.options.rl_options import RLOptions
from training.options.schema import ConfigError

NEAR = 3
"""Maximum number of similar names in the message about an unknown argument."""
QUANTISED_FROM = "bfloat16"
"""Dtype of the weights that vLLM can quantise while it loads them."""


class ArgumentCheck:
    """Checks the engine arguments of a configuration, and describes their effects."""

    def __init__(self, config: RLOptions) -> None:
        self._config = config
        self._values = config.rollout.vllm
        self._corrects = config.algorithm.correction != "none" or getattr(config.algorithm, "bypass", False)

    def faults(self) -> Iterator[str]:
        """Yield the reasons against the arguments that do not depend on the machine."""
        table = arguments()
        for name, value in self._values.items():
            setting = f"rollout.vllm.{name}={_text(value)}"
            if name not in table:
                yield f"{setting}: vLLM 0.32 has no argument {name!r}{_nearest(name)}"
            elif table[name].kind not in (ALLOWED, CORRECTED):
                yield f"{setting} is refused: {table[name].why}"
            elif table[name].kind == CORRECTED:
                yield from self._faults_of_corrected(setting, name, value, table[name])

    def _faults_of_corrected(self, setting: str, name: str, value: Any, argument: Argument) -> Iterator[str]:
        """Yield the reasons against an argument that makes log-probabilities differ from the trainer's."""
        if value in argument.neutral:
            return
        if argument.values and value not in argument.values:
            yield f"{setting} is refused; set one of {', '.join(map(str, argument.values))}, or leave it out"
        elif name == "speculative_config" and (fault := _speculation_fault(value)):
            yield f"{setting} is refused: {fault}"
        elif not self._corrects and not self._config.rollout.accept_bias:
            yield (
                f"{setting}: {argument.why}, so the engine's log-probabilities differ from the trainer's; set "
                f"{self._config.CORRECT}, or rollout.accept_bias=true to train with the bias"
            )

    def notes(self, on_gpu: bool) -> list[str]:
        """Return a sentence about the effect of each argument.

        Args:
            on_gpu: the engine runs on a GPU.

        Raises:
            ConfigError: the machine, or the precision that is chosen for it, cannot have the arguments.
        """
        engine = self._config.rollout.engine  # `auto` is resolved by now
        if engine != "vllm":
            names = ", ".join(f"rollout.vllm.{name}" for name in self._values)
            return [f"no effect of {names}: {engine} generates"]
        refused = [*self.faults(), *self._faults_of_machine(on_gpu)]
        if refused:
            raise ConfigError(*refused)
        notes: list[str] = []
        for name, value in self._values.items():
            argument = arguments()[name]
            note = f"rollout.vllm.{name}={_text(value)}: {argument.why}"
            if argument.kind == CORRECTED and value not in argument.neutral and self._corrects:
                note += "; importance weights correct the difference to the trainer"
            elif argument.kind == CORRECTED and value not in argument.neutral:
                note += "; gradients are biased, because rollout.accept_bias=true leaves the difference uncorrected"
            notes.append(note)
        return notes

    def _faults_of_machine(self, on_gpu: bool) -> Iterator[str]:
        """Yield the reasons against arguments on this kind of device."""
        dtype = product_type(self._config.train.precision)
        for name, value in self._values.items():
            argument = arguments().get(name)
            setting = f"rollout.vllm.{name}={_text(value)}"
            is_used = argument is not None and value not in argument.neutral
            is_gpu_only = argument is not None and argument.gpu_only and value not in argument.cpu_values
            if argument is not None and is_gpu_only and is_used and value is not False and not on_gpu:
                yield f"{setting} is refused on a CPU: {argument.gpu_only}"
            elif name == "quantization" and is_used and self._values.get("dtype", dtype) != QUANTISED_FROM:
                yield f"{setting} needs weights in bfloat16, not {dtype}; set train.precision=bf16"
        yield from self._faults_of_batch(on_gpu)

    def _faults_of_batch(self, on_gpu: bool) -> Iterator[str]:
        """Yield the reason against a batch of the engine that is too small."""
        batched = self._values.get("max_num_batched_tokens")
        if not isinstance(batched, int):
            return
        # One token of each running response is computed in a step.
        engine: Any = self._config.rollout_engine()
        least: int = engine.max_num_seqs
        why = "rollout.max_num_seqs"
        longest = engine.max_model_len or 0
        if not on_gpu and longest > least:
            least = longest
            why = "the longest prompt and response, which a CPU computes in one piece"
        if batched < least:
            yield f"rollout.vllm.max_num_batched_tokens={batched} is less than {least} ({why}); set at least that"


def _speculation_fault(value: Any) -> str:
    """Return why a `speculative_config` is refused. Empty if it is not."""
    rules = content()["speculation"]
    if not isinstance(value, dict):
        return "write it as a mapping, '{method: ngram, num_speculative_tokens: 3}'"
    for entry in rules["refused"]:
        if names := [name for name in entry["names"] if value.get(name) not in (None, False, "standard")]:
            return f"{', '.join(names)}: {entry['why']}"
    methods = ", ".join(rules["methods"])
    # A model without a method is a draft model.
    if "method" not in value and value.get("model"):
        method = "draft_model"
    else:
        method = value.get("method")
    if method is None:
        return f"it has no method; set one of {methods}"
    if method in rules["methods"]:
        return ""
    return f"a weight sync does not update {method}; set one of {methods}"


def _nearest(name: str) -> str:
    """Return the names of vLLM's arguments that are most similar to a name, as the end of a message."""
    allowed = [known for known, argument in arguments().items() if argument.kind in (ALLOWED, CORRECTED)]
    # Without a similar name a distant one may help, but only one that a run may set.
    near = difflib.get_close_matches(name, arguments(), n=NEAR) or difflib.get_close_matches(name, allowed, NEAR, 0.4)
    if near:
        return f"; did you mean {', '.join(near)}?"
    return "; docs/engines.md lists those that are passed on"


def _text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value)

"""A rollout engine of each model that receives published versions one after the other and reports faults.

    receive_worker.py MODELS KIND PUBLISHED

PUBLISHED is a pickle of what publish_worker.py gives. Prints a line that begins with FAULTS and continues as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from components.generate.config import HFRolloutConfig, RolloutConfig, SamplingConfig
from components.generate.opening import open_rollout_engine
from plugins.vllm.config import VLLMRolloutConfig
from tests.components.helpers.publish_worker import NEW_TOKENS, PROMPTS, Published
from tests.components.helpers.vllm_models import answers_of, uneven_prompts

FAULTS = "faults:"
KINDS: dict[str, RolloutConfig] = {
    "hf": HFRolloutConfig(),
    "in process": VLLMRolloutConfig(cpu_cache_gb=0.1),
    "own process": VLLMRolloutConfig(cpu_cache_gb=0.1, own_process=True),
    "two processes": VLLMRolloutConfig(cpu_cache_gb=0.1, tensor_parallel_size=2),
}


def cut(response: list[int]) -> list[int]:
    """Only up to the first end token, where an engine stops."""
    return response[: response.index(1) + 1] if 1 in response else response


def faults(models: Path, kind: str, published: list[Published]) -> list[str]:
    """Return one message for each difference in the published weights."""
    return [fault for name in ("tied", "untied") for fault in _faults_of(models, name, kind, published)]


def _faults_of(models: Path, name: str, kind: str, published: list[Published]) -> list[str]:
    lines = []
    sampling = SamplingConfig(temperature=0, max_new_tokens=NEW_TOKENS)
    seen: set[str] = set()
    versions = [entry for entry in published if entry[0] == name]
    engine = open_rollout_engine(models / name, KINDS[kind])
    for _, source, handle, expected in sorted(versions, key=lambda entry: entry[2].version):
        engine.receive(handle, verify=True)
        responses = engine.generate(uneven_prompts(PROMPTS), sampling)
        answered = answers_of(responses)
        if answered != [cut(response) for response in expected]:
            lines.append(f"{name} from {source}: {answered} instead of {expected}")
        if set(responses["weight_version"].tolist()) != {handle.version}:
            lines.append(f"{name} from {source}: samples carry {responses['weight_version'].tolist()}")
        seen.add(str(answered))
    engine.close()
    if len(seen) != len(versions):
        lines.append(f"{name}: {len(versions)} versions gave {len(seen)} different responses")
    return lines


if __name__ == "__main__":
    print(FAULTS, json.dumps(faults(Path(sys.argv[1]), sys.argv[2], pickle.loads(Path(sys.argv[3]).read_bytes()))))

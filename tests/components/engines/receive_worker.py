"""A rollout engine that receives published weights, one version after the other, and says what does not fit.

    receive_worker.py MODELS NAME KIND PUBLISHED...

NAME is that of the model, in the folder MODELS. Prints "N versions arrived", and a line before it for each that is
wrong.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from components.engines.config import HFRolloutConfig, RolloutConfig, SamplingConfig, VLLMRolloutConfig
from components.engines.rollout_engine import open_rollout_engine
from tests.components.engines.publish_worker import NEW_TOKENS, PROMPTS
from tests.components.engines.vllm_models import answers_of, uneven_prompts

KINDS: dict[str, RolloutConfig] = {
    "hf": HFRolloutConfig(),
    "in process": VLLMRolloutConfig(cpu_cache_gb=0.1),
    "own process": VLLMRolloutConfig(cpu_cache_gb=0.1, own_process=True),
    "two processes": VLLMRolloutConfig(cpu_cache_gb=0.1, tensor_parallel_size=2),
}


def cut(answer: list[int]) -> list[int]:
    """Up to its first end token, as an engine stops there."""
    return answer[: answer.index(1) + 1] if 1 in answer else answer


def main(models: Path, name: str, kind: str, files: list[Path]) -> None:
    """Receive everything that is of the model."""
    published = [entry for file in files for entry in pickle.loads(file.read_bytes())]
    sampling = SamplingConfig(temperature=0, max_new_tokens=NEW_TOKENS)
    seen: set[str] = set()
    engine = open_rollout_engine(models / name, KINDS[kind])
    for model, source, handle, expected in sorted(published, key=lambda entry: entry[2].version):
        if model != name:
            continue
        engine.receive(handle, verify=True)
        answers = engine.generate(uneven_prompts(PROMPTS), sampling)
        found = answers_of(answers)
        if found != [cut(answer) for answer in expected]:
            print(f"{kind}, {name} from {source}: {found} instead of {expected}")
        if set(answers["weight_version"].tolist()) != {handle.version}:
            print(f"{kind}, {name} from {source}: samples carry {answers['weight_version'].tolist()}")
        seen.add(str(found))
    engine.close()
    print(f"{len(seen)} versions arrived")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [Path(file) for file in sys.argv[4:]])

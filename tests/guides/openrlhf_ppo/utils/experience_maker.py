"""Makes experience: generation, rewards and log-probabilities."""

from typing import Any

from .. import remote_call


class SamplesGenerator:
    """Generates with the rollout engines."""

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        return list(self.__generate_vllm(prompts, {"n": 2}))

    def __generate_vllm(self, all_prompt_token_ids: list[list[int]], sampling_params: Any) -> Any:
        all_outputs = remote_call.vllm_generate(all_prompt_token_ids, sampling_params)
        assert len(all_outputs) == len(all_prompt_token_ids)
        return all_outputs

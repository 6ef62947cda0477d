"""Families of mixtures of experts whose weights can be synchronized to vLLM 0.32, by `model_type`. Nothing here needs
torch or vLLM.

tests/plugins/vllm/test_families.py holds the tables. It compares log-probabilities of engine and trainer as loaded and
after two changes of every parameter. Dense families that pass are not listed: vLLM loads them by transformers' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYOUTS = {
    **dict.fromkeys(("glm4_moe", "granitemoe", "granitemoeshared", "olmoe", "qwen2_moe", "qwen3_moe"), "trainer"),
    **dict.fromkeys(("ernie4_5_moe", "llama4_text", "mixtral"), "checkpoint"),
    "gpt_oss": "experts",
}
"""Layout of the weights that vLLM's loader accepts. "trainer": one tensor for all experts of a layer, as in
transformers, with fewer tensors and no copy. "checkpoint": as written by `save_pretrained`. "experts": one tensor per
expert, split from those of transformers.
"""
PAST_LOADER = ("bailing_moe_v3", "dbrx", "mimo_v2_flash", "minicpm", "minimax_m2", "openpangu", "pangu_ultra_moe")
"""Families whose loader bypasses `weight_loader`, so that a reload may drop weights."""
_AS_LOADED = "vLLM's log-probabilities differ from the trainer's as it is loaded"
WRONG = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "exaone_moe", "lfm2_moe"), f"on a CPU {_AS_LOADED}"),
    "apertus": "vLLM's log-probabilities differ from the trainer's, more after each reload",
}
"""Families that fail the test, and how. Mixtures for which vLLM 0.32 uses transformers' modules (dots1, flex_olmo,
hunyuan_v1_moe, phimoe, solar_open) do not start on a CPU, and are not listed."""
WRONG_ON_CPU = {
    **dict.fromkeys(("cohere", "cohere2"), f"on a CPU {_AS_LOADED}"),
    "ernie4_5_moe": "on a CPU vLLM 0.32 ignores the correction bias of the router",
}
"""Families that fail the test on a CPU for a reason that GPUs need not share."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def sync_fault(config: Mapping[str, Any], on_gpu: bool) -> str:
    """Return why weights of a model cannot be synchronized to vLLM. Empty if they can, or if that is unknown.

    Args:
        config: content of config.json, or the part that describes the language model.
        on_gpu: the engine runs on a GPU.
    """
    family = config.get("model_type", "")
    remedy = f"so that weights of a {family} model cannot be synchronized to it"
    if family in PAST_LOADER:
        return f"vLLM 0.32 may drop reloaded weights of this family without an error, {remedy}"
    wrong = WRONG if on_gpu else WRONG | WRONG_ON_CPU
    if family in wrong:
        return f"{wrong[family]}, {remedy}"
    experts = [config[name] for name in _EXPERTS if isinstance(config.get(name), int)]
    if family not in LAYOUTS and any(count > 1 for count in experts):
        known = ", ".join(sorted(LAYOUTS))
        return f"weight sync of mixtures of experts is tested for {known}, not for {family}"
    return ""

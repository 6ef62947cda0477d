"""Loading a causal language model or a backbone from a folder or a hub name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.models.disk.empty_model import empty_model, small_copy
from components.models.disk.weight_files import ReadWhole
from components.models.end_tokens import use_end_tokens
from components.models.freed_memory import keep_freed_memory
from components.models.head import has_plain_head, mark_plain_head
from components.models.packing.packed_model import use_packing

_log = logging.getLogger(__name__)


def load_policy(
    path: str | Path,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    attn_implementation: str | None = None,
    packing: bool | None = False,
    empty: bool = False,
) -> PreTrainedModel:
    """Load a causal language model from a folder or a hub name.

    Args:
        path: argument of `from_pretrained`.
        dtype: dtype of the parameters, "float32" or "bfloat16".
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        attn_implementation: attention implementation of transformers, such as "sdpa" or "flash_attention_2". None: the
            default of transformers.
        packing: concatenate the sequences of a batch in one row without padding; attention stays within each sequence.
            It uses the attention of packed_model.py, unless `attn_implementation` is flash attention. None: pack if the
            model supports it, and log a warning with the reason otherwise.
        empty: leave the parameters on the meta device. A training engine, or `fill`, reads the rows that a rank keeps.
            A model that cannot be read in parts is loaded whole, and a warning with the reason is logged.

    Raises:
        ValueError: the files lack weights, the model cannot be packed, or the requested sdpa cannot compute its
            attention.
    """
    model, probe = open_model(AutoModelForCausalLM, path, dtype, attn_implementation, empty)
    keep_freed_memory(model)
    use_end_tokens(model, path)
    attention: Any = probe.config._attn_implementation
    # The test calls the model on the CPU, where flash attention fails.
    probe.set_attn_implementation("eager")
    mark_plain_head(model, has_plain_head(probe))
    probe.set_attn_implementation(attention)
    prepare_attention(model, probe, attn_implementation, packing, gradient_checkpointing)
    return model


def open_model(
    kind: Any, path: str | Path, dtype: str, attention: str | None, empty: bool
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load a model.

    Returns:
        The model; and a model of the same architecture that has weights, which is the model itself unless it is empty.
    """
    if empty:
        try:
            model = empty_model(kind, path, _torch_dtype(dtype), attention)
            return model, small_copy(model)
        except ReadWhole as why:
            _log.warning("every process loads %s whole, which takes more host memory: %s", path, why)
    with without_progress_bars():
        model, loading_info = kind.from_pretrained(
            path, dtype=_torch_dtype(dtype), attn_implementation=attention, output_loading_info=True
        )
    # transformers only logs a warning for missing weights, and initializes them with random numbers.
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} among them, which would "
            "be random; give a folder that save_pretrained wrote whole"
        )
    return model, model


def prepare_attention(
    model: PreTrainedModel, probe: PreTrainedModel, requested: str | None, packing: bool | None, checkpointing: bool
) -> None:
    """Enable packing and gradient checkpointing of a model. Without packing, select an attention that computes its soft
    cap.
    """
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention: Any = model.config._attn_implementation
    if packing is not False:
        try:
            use_packing(model, probe)
            return
        except ValueError as why:
            # Packing that the user requested must not be replaced silently; packing by default may be.
            if packing:
                raise
            _log.warning("sequences are padded: %s", why)
            model.set_attn_implementation(attention)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap is None or model.config._attn_implementation != "sdpa":
        return
    if requested == "sdpa":
        raise ValueError(
            f"attention of {type(model).__name__} has a soft cap, which sdpa leaves out; set attn_implementation to "
            "eager or flash_attention_2, or packing=True"
        )
    # The eager attention computes the soft cap. With sdpa the log-probabilities would differ from the engine's.
    model.set_attn_implementation("eager")


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context manager that disables the progress bars and warnings of transformers.

    Bars would fill the logs of many processes. The warnings name unused weights of a backbone, such as a value head,
    which is loaded separately.
    """
    from transformers.utils import logging

    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]

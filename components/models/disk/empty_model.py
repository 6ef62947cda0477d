"""Models without weights, on the meta device, for engines that read only the shard of each rank (see weight_files)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.models.disk.blocks import own_block
from components.models.disk.weight_files import ReadWhole, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def empty_model(kind: Any, path: str | Path, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Create the model of `kind.from_pretrained` with its parameters on the meta device. Buffers have their values.

    Args:
        kind: AutoModelForCausalLM, or another of transformers' auto classes.
        path: argument of `from_pretrained`.
        dtype: dtype of the parameters.
        attention: attention implementation of transformers, or None for its default.

    Returns:
        The model. Its attribute `weight_files` is used by `fill` to read the parameters.

    Raises:
        ReadWhole: loading the model takes more than reading its parameters, for example because it is quantized.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ReadWhole("it is quantized")
    if getattr(config, "transformers_weights", None) or getattr(config, "auto_map", None):
        raise ReadWhole("it has files or code of its own")
    config.name_or_path = str(path)
    # Parameters on the meta device need no memory, so each process can create a model of any size.
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    if model._get_dtype_plan(dtype):
        raise ReadWhole(f"some of its weights are float32 where others are {dtype}")
    files = WeightFiles(model, model_folder(path))
    _make_buffers(model, files)
    model.weight_files = files
    if model.can_generate():
        model.generation_config = generation_config(path)
    return model.eval()


def small_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same architecture with few small layers and random weights, for tests of its computation.

    Raises:
        ReadWhole: the architecture cannot be created in such a size.
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    try:
        _make_small(text)
        # The random numbers of the caller must not depend on whether this copy was made.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:
        # Architectures refuse sizes with different exceptions, so all of them are caught.
        raise ReadWhole(f"a small copy of it cannot be made ({error})") from error
    return small.eval()


def _make_small(text: Any) -> None:
    """Reduce the sizes in a configuration. Settings that change the computation, such as layer types, are kept."""
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or []
    # One layer of each kind.
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)] or [0]
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, [value[layer] for layer in kept])
    text.num_hidden_layers = len(kept)
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    # As many query heads as before share a key head, so that the same code paths run.
    if heads % key_heads == 0:
        heads = 2 * heads // key_heads
        key_heads = 2
    hidden = heads * head_size
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    sizes |= {"hidden_size": hidden, "word_embed_proj_dim": hidden, "vocab_size": 64}
    sizes |= dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 16)
    for name, size in sizes.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)


def _make_buffers(model: PreTrainedModel, files: WeightFiles) -> None:
    """Create the buffers on the CPU. Persistent buffers are read from the files, the others are computed by the
    model.
    """
    for tensor in model.parameters():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]: transformers' mark
    with files:
        for path, module in model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                full = f"{path}.{name}".removeprefix(".")
                made: Any = torch.empty_like(buffer, device="cpu")
                if full in files:
                    files.read(full, made, own_block(made))
                    made._is_hf_initialized = True
                module._buffers[name] = made
    model.initialize_weights()


def generation_config(path: str | Path) -> Any:
    """Return the generation configuration of a model, from generation_config.json or else from config.json."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model's files. A model on the hub is downloaded."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))

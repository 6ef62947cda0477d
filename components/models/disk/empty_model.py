"""Models without weights: made on the meta device, for engines that read what each rank keeps (see weight_files)."""

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
    """What `kind.from_pretrained` makes, but for the parameters, which are on the meta device. Buffers are whole.

    Args:
        kind: AutoModelForCausalLM, or another of transformers' classes for all architectures.
        path: what `from_pretrained` takes.
        dtype: of the parameters.
        attention: as transformers names it; None: its own choice.

    Returns:
        The model; its `weight_files` are what `fill` reads.

    Raises:
        ReadWhole: the model takes more to load than to read its parameters.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ReadWhole("it is quantized")
    if getattr(config, "transformers_weights", None) or getattr(config, "auto_map", None):
        raise ReadWhole("it has files or code of its own")
    config.name_or_path = str(path)
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
    """A model of the same kind with few and small layers and random weights, to be asked how its kind computes.

    Raises:
        ReadWhole: there is none of such a size.
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    try:
        _make_small(text)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:
        # Its configuration may refuse sizes in as many ways as there are architectures.
        raise ReadWhole(f"a small copy of it cannot be made ({error})") from error
    return small.eval()


def _make_small(text: Any) -> None:
    """Change sizes that say nothing about how a model computes; what is computed, such as kinds of layers, stays."""
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    # One layer of each kind.
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)] if kinds else [0]
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, [value[layer] for layer in kept])
    text.num_hidden_layers = len(kept)
    heads, key_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    is_shared = heads % key_heads == 0
    sizes = {
        "num_attention_heads": 2 * heads // key_heads if is_shared else heads,
        "num_key_value_heads": 2 if is_shared else key_heads,
    }
    hidden = sizes["num_attention_heads"] * head_size
    sizes |= {"hidden_size": hidden, "word_embed_proj_dim": hidden, "vocab_size": 64}
    sizes |= dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 16)
    for name, size in sizes.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)


def _make_buffers(model: PreTrainedModel, files: WeightFiles) -> None:
    """Buffers on the CPU: those that are saved as the files have them, others as the model computes them."""
    for tensor in model.parameters():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]: transformers' mark
    with files:
        for path, module in model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                full = f"{path}.{name}" if path else name
                made: Any = torch.empty_like(buffer, device="cpu")
                if full in files:
                    files.read(full, made, own_block(made))
                    made._is_hf_initialized = True
                module._buffers[name] = made
    model.initialize_weights()


def generation_config(path: str | Path) -> Any:
    """Return the generation_config.json of a model, or what its config.json has in place of one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def model_folder(path: str | Path) -> Path:
    """Where the files of the model are; those of the hub are fetched."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))

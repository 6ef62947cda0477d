"""Model folders whose weight files are only headers, which is sufficient to compute sizes."""

import json
from pathlib import Path
from typing import Any

LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
"""config.json of Llama 3 70B."""


def folder_of(path: Path, config: dict[str, Any], **files: dict[str, list[int]]) -> str:
    """Write a model folder with config.json and weight files that consist of headers. `files` maps their names to
    shapes.
    """
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, shapes in files.items():
        entries = {key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        (path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(path)

"""Folders for a model with another tokenizer, chat template or config.json."""

PROVIDES = {"model view": {"links": "links:model_view"}}

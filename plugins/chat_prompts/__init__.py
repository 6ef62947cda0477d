"""Prompts of chat messages, which the chat template of the tokenizer writes as text."""

PROVIDES = {"chat prompt": {"text": "prompts:render_chat", "messages": "prompts:complete_messages"}}

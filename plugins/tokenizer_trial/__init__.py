"""Trial of a tokenizer and a chat template in a child process, before a run uses them."""

PROVIDES = {"tokenizer trial": {"child process": "trial:try_tokenizer"}}

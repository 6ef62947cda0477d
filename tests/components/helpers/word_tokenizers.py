"""Tokenizers with two words, for tests of prompts and templates."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = 1
EOS = 2
NO = 3
YES = 4
"""Ids of `word_tokenizer`: unk 0, bos 1, eos 2, no 3, yes 4."""


def word_tokenizer(adds: str = "$A", template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the words no and yes. `adds` is its post-processing template; $A stands for the text."""
    tokens = ["<unk>", "<s>", "</s>", "no", "yes"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer

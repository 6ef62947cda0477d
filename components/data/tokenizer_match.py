"""Check that two models read the same token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.data.model_tokens import end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 3


def check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, option: str) -> None:
    """Check that another model reads the token ids of the policy as the same texts.

    A larger vocabulary is accepted if its first tokens are the same: models of a family are padded to different sizes.

    Args:
        tokenizer: tokenizer of the policy.
        other: tokenizer of the other model.
        option: option that sets the other model, for the message.

    Raises:
        ValueError: the tokenizers differ. The message shows the first tokens that do.
    """
    token_of = {number: token for token, number in tokenizer.get_vocab().items()}
    other_token_of = {number: token for token, number in other.get_vocab().items()}
    different = [
        f"id {number} is {token_of[number]!r} and {other_token_of[number]!r}"
        for number in sorted(token_of.keys() & other_token_of.keys())
        if token_of[number] != other_token_of[number]
    ]
    if different:
        examples = "; ".join(different[:_SHOWN])
        raise ValueError(
            f"{option}: {len(different)} of its token ids mean other texts than those of the policy ({examples}); its "
            "log-probabilities would be those of other tokens; set a model with the policy's tokenizer"
        )
    if missing := sorted(token_of.keys() - other_token_of.keys()):
        raise ValueError(
            f"{option}: its vocabulary has no token for {len(missing)} ids of the policy, such as "
            f"{token_of[missing[0]]!r} (id {missing[0]}); set a model with the policy's tokenizer"
        )
    # A model that ends its turns with another token would teach the policy not to stop.
    if not set(end_ids(tokenizer)) & set(end_ids(other)):
        raise ValueError(
            f"{option}: it ends a response with the token {end_ids(other)}, and the policy with {end_ids(tokenizer)}; "
            "train the policy on the teacher's format first (recipes/sft), or set another model"
        )

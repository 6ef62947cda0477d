"""components/data/tokenizer_match.py: token ids of two models mean the same, or the difference is named."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from components.data.tokenizer_match import check_same_tokenizer
from tests.messages import says


def tokenizer(*words: str, end: str = "<end>") -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids count its words."""
    vocabulary = {word: number for number, word in enumerate(words)}
    model = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end, pad_token=words[0])


def test_a_padded_vocabulary_of_the_same_tokens_is_accepted() -> None:
    check_same_tokenizer(tokenizer("<unk>", "<end>", "a"), tokenizer("<unk>", "<end>", "a", "more"), "teacher.path=x")


@pytest.mark.parametrize(
    ("other", "facts"),
    [
        (("<unk>", "<end>", "b", "a"), ["teacher.path=x", "2 of its token ids", "'a'", "'b'"]),
        (("<unk>", "<end>", "a"), ["teacher.path=x", "no token for 1", "'b'", "id 3"]),
    ],
)
def test_other_tokens_are_refused_with_the_first_differences(other: tuple[str, ...], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        check_same_tokenizer(tokenizer("<unk>", "<end>", "a", "b"), tokenizer(*other), "teacher.path=x")


def test_another_end_token_is_refused() -> None:
    policy = tokenizer("<unk>", "<end>", "<turn>")
    teacher = tokenizer("<unk>", "<end>", "<turn>", end="<turn>")
    with pytest.raises(ValueError, match=says("ends a response", "[2]", "[1]")):
        check_same_tokenizer(policy, teacher, "teacher.path=x")

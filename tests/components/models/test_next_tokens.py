"""components/models/next_tokens.py: candidates of whole logits, in chunks, packed or padded, with gradients."""

import pytest
import torch
from torch import Tensor

from components.batch import Batch
from components.models import next_tokens
from components.models.head import mark_plain_head
from components.models.loading import load_policy
from components.models.next_tokens import candidate_logprobs, top_logprobs
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(task_tokenizer(get_task("sort")), 0).save_pretrained(path)
    return str(path)


def batch() -> Batch:
    return Batch([5, 1, 7], {"tokens": torch.randint(3, 20, (13,), generator=torch.Generator().manual_seed(1))})


def whole_logprobs(model: torch.nn.Module, sequences: Batch) -> Tensor:
    """Return the log-probabilities of all next tokens, [N, V]; 0 for the first token of a sequence."""
    rows = []
    for tokens in sequences["tokens"].split(sequences.lengths.tolist()):
        logits_TV = model(input_ids=tokens[None]).logits[0]
        logprob_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
        rows.append(torch.cat([torch.zeros_like(logprob_TV[:1]), logprob_TV[:-1]]))
    return torch.cat(rows)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("is_plain", [True, False])
def test_candidates_equal_those_of_whole_logits(
    folder: str, packing: bool, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of two states, so that several are joined.
    monkeypatch.setattr(next_tokens, "_CHUNK_ELEMENTS", 40)
    model = load_policy(folder, "float32", packing=packing)
    mark_plain_head(model, is_plain)
    sequences = batch()
    expected_NV = whole_logprobs(load_policy(folder, "float32", packing=False), sequences)
    with torch.no_grad():
        result_NC = top_logprobs(model, sequences, 4, TEMPERATURE)
    expected_N = expected_NV.gather(1, sequences["tokens"][:, None]).squeeze(1)
    follows_N = sequences.packed().positions > 0
    torch.testing.assert_close(result_NC[:, 0], torch.where(follows_N, expected_N, 0.0), rtol=0, atol=1e-5)
    top = expected_NV.topk(4)
    torch.testing.assert_close(result_NC[follows_N, 1:5], top.values[follows_N], rtol=0, atol=1e-5)
    assert result_NC[follows_N, 5:].long().equal(top.indices[follows_N])
    assert not result_NC[~follows_N].any()


def test_gradients_equal_those_of_whole_logits(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_tokens, "_CHUNK_ELEMENTS", 40)
    sequences = batch()
    ids_NK = torch.randint(0, 20, (13, 3), generator=torch.Generator().manual_seed(2))
    weight_NK = torch.randn(13, 3, generator=torch.Generator().manual_seed(3))
    weight_NK[sequences.packed().positions == 0] = 0.0
    gradients = []
    for is_reference in (True, False):
        model = load_policy(folder, "float32", packing=not is_reference)
        if is_reference:
            result_NK = whole_logprobs(model, sequences).gather(1, ids_NK)
        else:
            result_NK = candidate_logprobs(model, sequences, ids_NK, TEMPERATURE)
        (result_NK * weight_NK).sum().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)

"""The trainer's log-probabilities of a few random sequences, sent to the engines when a check is due.

Random tokens activate more experts than text does. The sequences are the same in every check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.models.layer_marks import marked
from components.train.engine import TrainEngine

SEQUENCES = 4
"""Number of sequences."""
TOKENS = 32
"""Number of tokens of each sequence."""


@dataclass(frozen=True)
class Probe:
    """Sequences, and the trainer's log-probabilities of them with one version of the weights."""

    tokens: list[list[int]]
    """Sequences of equal length."""
    logprobs: list[list[float]]
    """Log-probability, at temperature 1, of each token except the first."""
    marks: dict[str, Tensor]
    """[N, P] marks by group of layers, of the concatenated sequences; see `components/models/layer_marks.py`."""


class EngineProbe:
    """Makes the probe of the current version, on all ranks of the policy."""

    def __init__(self, engine: TrainEngine) -> None:
        """
        Args:
            engine: training engine of the policy.
        """
        self._engine = engine
        config: Any = engine.model.config
        self._tokens = probe_tokens(config)

    def measure(self) -> Probe:
        """Compute the probe with the weights as they are now. Every rank computes all of it."""
        rows = list(range(len(self._tokens)))
        batch = Batch.from_rows({"tokens": self._tokens}, {"row": rows})
        marks: dict[str, dict[int, Tensor]] = {}

        def compute(model: nn.Module, micro: Batch) -> Tensor:
            with marked(model) as layer_marks:
                logprob_N = policy_logprobs(model, micro)
            numbers = micro["row"].tolist()
            for group, parts in layer_marks.items():
                # Sequences of equal length have equal shares of the positions, packed or padded.
                shares = torch.cat(parts).chunk(len(numbers))
                marks.setdefault(group, {}).update(zip(numbers, shares, strict=False))
            return logprob_N

        logprob_N = self._engine.forward(batch, compute)
        logprobs = [row.tolist()[1:] for row in logprob_N.split(len(self._tokens[0]))]
        complete = {group: parts for group, parts in marks.items() if len(parts) == len(rows)}
        joined = {group: torch.cat([parts[row] for row in rows]) for group, parts in complete.items()}
        return Probe(self._tokens, logprobs, joined)


def probe_tokens(config: Any) -> list[list[int]]:
    """Sample the sequences for a model.

    Args:
        config: transformers' configuration of the model.
    """
    text = config.get_text_config()
    settings = {**config.to_dict(), **text.to_dict()}
    special = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    # Special tokens are excluded: a model rejects a text with a placeholder of an image.
    ids = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    positions = getattr(text, "max_position_embeddings", None) or TOKENS
    shape = SEQUENCES, min(TOKENS, positions)
    return ids[torch.randint(len(ids), shape, generator=torch.Generator().manual_seed(0))].tolist()

"""Batched scoring for many concurrent clients.

Texts that arrive during a forward pass wait in a queue. The next pass takes them together, up to a token budget.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.preferences import scored_tokens
from components.data.text import TextEncoder
from components.models.reward_model import RewardModel

PORTION_CHARACTERS = 2**17
"""Number of characters after which the tokenizer thread serves the next request."""


class QueueFull(Exception):
    """Raised when the queue has no room for the texts of a request. The client may retry later."""


@dataclass(frozen=True)
class Scored:
    """The score of one text."""

    reward: float
    truncated: bool
    """True if the text was longer than the limit, so that its beginning was not read."""


@dataclass(eq=False)
class _Waiting:
    tokens: list[int]
    truncated: bool
    score: "asyncio.Future[float]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Metrics:
    """Prometheus metrics of the service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "troupe_reward_"
        self.requests = Counter(f"{name}requests", "Requests by HTTP status", ["status"], registry=self.registry)
        self.seconds = Histogram(
            f"{name}request_seconds", "Duration of a scored request in seconds", registry=self.registry
        )
        self.texts = Counter(f"{name}texts", "Texts scored", registry=self.registry)
        self.truncated = Counter(f"{name}truncated", "Texts whose beginning was truncated", registry=self.registry)
        self.tokens = Counter(f"{name}tokens", "Tokens scored", registry=self.registry)
        self.under_way = Gauge(f"{name}under_way", "Requests in progress", registry=self.registry)
        self.waiting = Gauge(f"{name}waiting", "Texts waiting for a forward pass", registry=self.registry)
        sizes = [2**power for power in range(11)]
        self.together = Histogram(
            f"{name}pass_texts", "Texts in one forward pass", buckets=sizes, registry=self.registry
        )


def _portions(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) of texts that are tokenized in one turn of the tokenizer thread."""
    start = size = 0
    for number, text in enumerate(texts):
        size += len(text)
        if size >= PORTION_CHARACTERS:
            yield start, number + 1
            start = number + 1
            size = 0
    yield start, len(texts)


class ScoringService:
    """Scoring of texts by one model, one forward pass at a time. To be used in one event loop."""

    def __init__(
        self, model: RewardModel, tokenizer: PreTrainedTokenizerBase, *, max_len: int, max_tokens: int, queue_size: int
    ) -> None:
        """
        Args:
            model: the reward model, which runs in a thread of its own.
            tokenizer: the tokenizer of the model, which runs in another thread.
            max_len: maximum number of tokens in a text. Of a longer text only the last tokens are read.
            max_tokens: maximum number of tokens in a forward pass. A longer text gets a pass of its own.
            queue_size: maximum number of waiting texts.
        """
        self.metrics = Metrics()
        self.queue_size = queue_size
        self._model = model
        self._encoder = TextEncoder(tokenizer)
        self._max_len, self._max_tokens = max_len, max_tokens
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._scorer = ThreadPoolExecutor(1, "scorer")
        self._tokenizer = ThreadPoolExecutor(1, "tokenizer")
        self._passes: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ScoringService":
        """Start the task that makes the forward passes."""
        self._passes = asyncio.create_task(self._make_passes())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the task and its threads. No text may be waiting."""
        assert self._passes is not None
        self._passes.cancel()
        self._scorer.shutdown()
        self._tokenizer.shutdown()

    @property
    def is_alive(self) -> bool:
        """True while the task that makes the forward passes is running."""
        return self._passes is not None and not self._passes.done()

    async def score(self, texts: Sequence[str]) -> list[Scored]:
        """Score texts, each a prompt followed by its response.

        Raises:
            QueueFull: the queue has no room for all of them.
            ValueError: one of them cannot be tokenized.
        """
        self._check_space(len(texts))
        loop = asyncio.get_running_loop()
        waiting: list[_Waiting] = []
        for start, end in _portions(texts):
            # In turns with the texts of other clients; otherwise the long texts of one client would delay all others.
            rows = await loop.run_in_executor(self._tokenizer, self._encode, texts, start, end)
            waiting += [_Waiting(*row) for row in rows]
        self._check_space(len(texts))  # other requests may have filled the queue during tokenization
        self._queue += waiting
        self.metrics.waiting.set(len(self._queue))
        self._arrived.set()
        try:
            scores = await asyncio.gather(*(text.score for text in waiting))
        except asyncio.CancelledError:
            # The client has disconnected: its texts must not occupy the queue.
            self._queue = deque(text for text in self._queue if not text.score.cancelled())
            raise
        self.metrics.truncated.inc(sum(text.truncated for text in waiting))
        return [Scored(score, text.truncated) for score, text in zip(scores, waiting)]

    def _check_space(self, count: int) -> None:
        if len(self._queue) + count > self.queue_size:
            raise QueueFull(f"{len(self._queue)} texts are waiting, and the limit is {self.queue_size}; retry later")

    def _encode(self, texts: Sequence[str], start: int, end: int) -> list[tuple[list[int], bool]]:
        """Return (last tokens, is truncated) of the texts from start to end."""
        rows = []
        for number in range(start, end):
            try:
                texts[number].encode()  # JSON can contain lone surrogates, on which tokenizers fail
                row = scored_tokens(texts[number], self._encoder)
            except ValueError as error:
                raise ValueError(f"query {number}: {error}") from error
            rows.append((row[-self._max_len :], len(row) > self._max_len))
        return rows

    async def _make_passes(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            together = self._next()
            self.metrics.waiting.set(len(self._queue))
            if not together:
                self._arrived.clear()
                continue
            batch = Batch.from_rows({"tokens": [text.tokens for text in together]})
            try:
                scores = (await loop.run_in_executor(self._scorer, self._model.score, batch)).tolist()
            except Exception as error:  # noqa: BLE001 - raised in the requests of this pass; the next pass is still made
                for text in together:
                    if not text.score.done():
                        text.score.set_exception(error)
                continue
            for text, score in zip(together, scores):
                if not text.score.done():  # cancelled if the client has disconnected
                    text.score.set_result(score)
            self.metrics.texts.inc(len(together))
            self.metrics.tokens.inc(batch.num_tokens)
            self.metrics.together.observe(len(together))

    def _next(self) -> list[_Waiting]:
        """Remove and return the texts of the next forward pass, in order of arrival."""
        together: list[_Waiting] = []
        tokens = 0
        while self._queue and (not together or tokens + len(self._queue[0].tokens) <= self._max_tokens):
            text = self._queue.popleft()
            if text.score.cancelled():
                continue
            together.append(text)
            tokens += len(text.tokens)
        return together

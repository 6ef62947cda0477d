"""Scores texts of many callers together: what waits when a pass ends goes into the next one, up to a token budget."""

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


class QueueFull(Exception):
    """More texts wait than may; a later try may find room."""


@dataclass(frozen=True)
class Scored:
    """The score of one text."""

    reward: float
    truncated: bool
    """It was longer than the limit, so its beginning was not read."""


@dataclass(eq=False)
class _Waiting:
    tokens: list[int]
    truncated: bool
    score: "asyncio.Future[float]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Metrics:
    """What the service counts, as Prometheus reads it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "troupe_reward_"
        self.requests = Counter(f"{name}requests", "Requests by HTTP status", ["status"], registry=self.registry)
        self.seconds = Histogram(f"{name}request_seconds", "Seconds of a scored request", registry=self.registry)
        self.texts = Counter(f"{name}texts", "Texts scored", registry=self.registry)
        self.truncated = Counter(f"{name}truncated", "Texts whose beginning was cut", registry=self.registry)
        self.tokens = Counter(f"{name}tokens", "Tokens scored", registry=self.registry)
        self.under_way = Gauge(f"{name}under_way", "Requests whose texts are not all scored", registry=self.registry)
        self.waiting = Gauge(f"{name}waiting", "Texts that wait for a pass", registry=self.registry)
        sizes = [2**power for power in range(11)]
        self.together = Histogram(f"{name}pass_texts", "Texts of one pass", buckets=sizes, registry=self.registry)


def _portions(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and last number of texts that are tokenized at once."""
    start = size = 0
    for number, text in enumerate(texts):
        size += len(text)
        if size >= PORTION_CHARACTERS:
            yield start, number + 1
            start = number + 1
            size = 0
    yield start, len(texts)


class ScoringService:
    """One model, one pass at a time. Used in one event loop."""

    def __init__(
        self, model: RewardModel, tokenizer: PreTrainedTokenizerBase, *, max_len: int, max_tokens: int, queue_size: int
    ) -> None:
        """
        Args:
            model: it scores, in a thread of its own.
            tokenizer: the model's.
            max_len: tokens of a text; of a longer one the last ones are read.
            max_tokens: of the texts that go into a pass together; one longer text goes alone.
            queue_size: texts that may wait.
        """
        self.metrics = Metrics()
        self.queue_size = queue_size
        self._model, self._encoder = model, TextEncoder(tokenizer)
        self._max_len, self._max_tokens = max_len, max_tokens
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._scorer = ThreadPoolExecutor(1, "scorer")
        self._tokenizer = ThreadPoolExecutor(1, "tokenizer")
        self._passes: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ScoringService":
        """Begin."""
        self._passes = asyncio.create_task(self._make_passes())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End, once no text waits."""
        assert self._passes is not None
        self._passes.cancel()
        self._scorer.shutdown()
        self._tokenizer.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether passes are made."""
        return self._passes is not None and not self._passes.done()

    async def score(self, texts: Sequence[str]) -> list[Scored]:
        """Score texts, each a prompt with its response.

        Raises:
            QueueFull: there is no room for all of them now.
            ValueError: the tokenizer cannot read one of them.
        """
        self._check_space(len(texts))
        loop = asyncio.get_running_loop()
        waiting: list[_Waiting] = []
        for start, end in _portions(texts):
            # In turns with the texts of other callers, so that one caller's long ones do not hold up all.
            rows = await loop.run_in_executor(self._tokenizer, self._encode, texts, start, end)
            waiting += [_Waiting(*row) for row in rows]
        self._check_space(len(texts))  # others have come meanwhile
        self._queue += waiting
        self.metrics.waiting.set(len(self._queue))
        self._arrived.set()
        try:
            scores = await asyncio.gather(*(one.score for one in waiting))
        except asyncio.CancelledError:  # their caller has gone
            self._queue = deque(one for one in self._queue if not one.score.cancelled())
            raise
        self.metrics.truncated.inc(sum(one.truncated for one in waiting))
        return [Scored(score, one.truncated) for score, one in zip(scores, waiting)]

    def _check_space(self, count: int) -> None:
        if len(self._queue) + count > self.queue_size:
            raise QueueFull(f"{len(self._queue)} texts wait, and no more than {self.queue_size} may; try again")

    def _encode(self, texts: Sequence[str], start: int, end: int) -> list[tuple[list[int], bool]]:
        """The last tokens of some of the texts, and whether there were more."""
        rows = []
        for number in range(start, end):
            try:
                texts[number].encode()  # JSON can write halves of a character, which no tokenizer reads
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
            batch = Batch.from_rows({"tokens": [one.tokens for one in together]})
            try:
                scores = (await loop.run_in_executor(self._scorer, self._model.score, batch)).tolist()
            except Exception as error:  # noqa: BLE001 - it is raised for the callers of this pass, and the next pass is made
                for one in together:
                    if not one.score.done():
                        one.score.set_exception(error)
                continue
            for one, score in zip(together, scores):
                if not one.score.done():  # its caller may have gone
                    one.score.set_result(score)
            self.metrics.texts.inc(len(together))
            self.metrics.tokens.inc(batch.num_tokens)
            self.metrics.together.observe(len(together))

    def _next(self) -> list[_Waiting]:
        """Those that go into the next pass, in the order in which they came."""
        together: list[_Waiting] = []
        tokens = 0
        while self._queue and (not together or tokens + len(self._queue[0].tokens) <= self._max_tokens):
            one = self._queue.popleft()
            if one.score.cancelled():
                continue
            together.append(one)
            tokens += len(one.tokens)
        return together

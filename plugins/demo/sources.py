"""Data source that generates the prompts, demonstrations and pairs of a task: `task:<name>`."""

from __future__ import annotations

from typing import Any

from components.data.sources import DataSource, Split
from plugins.demo.tasks import get_task


class TaskSource(DataSource):
    """Data source over one task."""

    def __init__(self, name: str) -> None:
        """See `DataSource`."""
        super().__init__(name)
        self._task = get_task(name)

    @property
    def scorer(self) -> str:
        """See `DataSource.scorer`."""
        return self.name

    def prompts(self, split: Split, count: int, seed: int) -> list[dict[str, Any]]:
        """See `DataSource.prompts`."""
        return [{**row, "datasource": self.name} for row in self._task.rows(split, count, seed)]

    def demonstrations(self, count: int, seed: int) -> list[dict[str, Any]]:
        """See `DataSource.demonstrations`."""
        return self._task.demonstrations(count, seed)

    def pairs(self, count: int, seed: int) -> list[dict[str, Any]]:
        """See `DataSource.pairs`."""
        return list(self._task.pairs(count, seed))

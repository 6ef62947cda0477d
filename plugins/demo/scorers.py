"""The scorers of the tasks, by the names of these."""

from __future__ import annotations

from plugins.demo.tasks import GuessTask, SortTask, WordTask

sort = SortTask().graded
word = WordTask().graded
guess = GuessTask().graded

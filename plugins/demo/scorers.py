"""Scorers of the tasks. Each has the name of its task."""

from __future__ import annotations

from plugins.demo.tasks import GuessTask, SortTask, WordTask

sort = SortTask().graded
word = WordTask().graded
guess = GuessTask().graded

"""Prompts whose responses are under way on several engines while weights change; who is slow comes a batch later.

A group is all responses to one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from components.data.samples import for_samples

if TYPE_CHECKING:
    from components.generate.sampler import Collected

PATIENCE_S = 0.2
"""Seconds after which the engines are asked again, so that new weights can reach them in between."""


@dataclass
class Group:
    """A prompt that was taken and whose responses were not yet handed out."""

    prompt: Batch
    """One row, as it was taken."""
    step: int
    """For which it was begun; fixes its random numbers."""
    version: int = 0
    """Of the weights when it was begun last."""
    engine: int | None = None
    """Which engine runs it; None: none yet, or it was replaced."""
    responses: Batch | None = None
    """Once they are whole."""
    place: int = 0
    """Which time that the engines were asked brought them."""


@dataclass(kw_only=True)
class PartialRolloutBuffer:
    """Keeps prompts under way on several engines, and hands out the first groups that have finished.

    The others continue, and come in a later batch. One that the next batch could not have without being too old is
    waited for: the weights that a group was begun with are at most `most_stale` versions behind those that train on it.
    """

    take: Callable[[int], Batch]
    """Gives the next so many prompts, with `prompt_id`."""
    begin: Callable[[list[Batch | None], int], object]
    """(prompts, step): lets engines play prompts, drawn as those of this step: for each engine a row for every sample,
    or None.
    """
    collect: Callable[[float], Sequence[Collected]]
    """(seconds): lets every engine play until it has finished a group, at most so long. Gives for each, in order and
    after all that it was told to begin, what it has finished since it was last asked.
    """
    engines: int
    samples: int
    """Of each prompt."""
    in_flight: int
    """Groups that are held at most."""
    most_stale: int
    """See AsyncOptions."""
    version: Callable[[], int]
    """Of the weights that the engines have, or an older one."""
    stopped: Callable[[], bool]
    """Whether to give up the batch at hand; see `RolloutQueue.ending`."""
    info: Callable[[str], None]
    """Shows a line to the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last batch."""
    _groups: dict[int, Group] = field(default_factory=dict)
    """By prompt_id, as they were taken."""
    _asked: int = 0
    """How often the engines were."""

    def __len__(self) -> int:
        """Count the prompts that were taken and whose responses were not yet handed out."""
        return len(self._groups)

    def fill(self, step: int, wanted: int, left: int) -> Batch | None:
        """All responses to the first `wanted` prompts that are done; None when the run is to stop.

        Args:
            step: for which they are.
            wanted: prompts.
            left: prompts that are wanted for this step and all later ones; no more are begun.

        Returns:
            The groups as their prompts were taken, each as it came from its engine.
        """
        # Never more than `in_flight` are held, so of those that were begun for one batch at most
        # in_flight - wanted <= wanted are left behind, and the next batch has room for all of them if it must.
        count = min(self.in_flight, left) - len(self._groups)
        if count > 0:
            self._hold(self.take(count), step)
        assert len(self._groups) >= wanted, f"{wanted} prompts are wanted of {len(self._groups)}, {left} are left"
        restarted = self._begin_old_again(step)
        self._begin_waiting()
        while (chosen := self._choose(step, wanted)) is None:
            if self.stopped():
                return None
            lost = self._wait()
            restarted += lost
            if lost:
                self._begin_waiting()
        groups = [self._groups.pop(prompt_id) for prompt_id in chosen]
        self.metrics = {
            "rollout/carried_groups": float(sum(group.step < step for group in groups)),
            "rollout/restarted_groups": float(restarted),
        }
        return Batch.concat(group.responses for group in groups if group.responses is not None)

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs: the prompts, and the responses that are there already."""
        groups = list(self._groups.values())
        if not groups:
            return {}
        responses = [group.responses for group in groups if group.responses is not None]
        return {
            "prompts": Batch.concat(group.prompt for group in groups),
            "steps": [group.step for group in groups],
            "versions": [group.version for group in groups],
            "answers": Batch.concat(responses) if responses else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with these prompts, anew where their responses were not yet there."""
        self._groups = {}
        if not state:
            return
        self._hold(state["prompts"], 0)
        for group, step, version in zip(self._groups.values(), state["steps"], state["versions"], strict=True):
            group.step, group.version = step, version
        if state["answers"] is not None:
            for prompt_id, responses in state["answers"].group_by("prompt_id").items():
                self._groups[prompt_id].responses = responses

    def _begin_old_again(self, step: int) -> int:
        """Let go of responses that are too old for this step: those of a run that allowed more. Counts them."""
        old = [g for g in self._groups.values() if g.responses is not None and step - 1 - g.version > self.most_stale]
        for group in old:
            group.responses = group.engine = None
        if old:
            self.info(f"{len(old)} prompts have responses of weights that are too old by now; they are begun again")
        return len(old)

    def _hold(self, prompts: Batch, step: int) -> None:
        for i, prompt_id in enumerate(prompts["prompt_id"].tolist()):
            assert prompt_id not in self._groups, f"prompt {prompt_id} was taken twice"
            self._groups[prompt_id] = Group(prompts[i : i + 1], step)

    def _running(self) -> dict[int, Group]:
        return {
            key: group for key, group in self._groups.items() if group.engine is not None and group.responses is None
        }

    def _begin_waiting(self) -> None:
        """Begin what no engine runs, the longest held first, each on the engine that has the fewest."""
        playing = [group.engine for group in self._running().values()]
        loads = [playing.count(engine) for engine in range(self.engines)]
        waiting = [group for group in self._groups.values() if group.engine is None and group.responses is None]
        told: dict[int, list[list[Batch]]] = {}  # by step and engine
        version = self.version()
        for group in waiting[: self.in_flight - len(playing)]:
            engine = loads.index(min(loads))
            loads[engine] += 1
            group.engine, group.version = engine, version
            told.setdefault(group.step, [[] for _ in loads])[engine].append(group.prompt)
        for step, parts in told.items():
            self.begin([for_samples(Batch.concat(part), self.samples) if part else None for part in parts], step)

    def _choose(self, step: int, wanted: int) -> list[int] | None:
        """The prompts of this batch; None as long as too few are done, or one that it must have is not."""
        done = [key for key, group in self._groups.items() if group.responses is not None]
        begun = {*done, *self._running()}
        due = [key for key in self._groups if key in begun and step - self._groups[key].version > self.most_stale]
        if len(done) < wanted or not set(due[:wanted]) <= set(done):
            return None
        others = sorted((key for key in done if key not in due), key=lambda key: self._groups[key].place)
        chosen = {*due[:wanted], *others[: max(wanted - len(due), 0)]}
        return [key for key in self._groups if key in chosen]

    def _wait(self) -> int:
        """Let the engines play on, and take what they have finished; counts the groups that an engine has lost."""
        lost = 0
        self._asked += 1
        for engine, finished in enumerate(self.collect(PATIENCE_S)):
            for prompt_id, responses in (finished.batch.group_by("prompt_id") if finished.batch else {}).items():
                group = self._groups[prompt_id]
                assert group.engine == engine and group.responses is None, f"prompt {prompt_id} was generated twice"
                group.responses, group.place = responses, self._asked
            playing = [key for key, group in self._running().items() if group.engine == engine]
            gone = [key for key in playing if key not in finished.in_flight]
            for key in gone:
                self._groups[key].engine = None
            if gone:
                self.info(f"engine {engine} has lost {len(gone)} prompts in generation; they are begun again")
            lost += len(gone)
        return lost

"""Buffer of prompts whose responses are generated on several engines while weights change.

A group is the set of all responses to one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from components.batch.grouping import group_by
from components.data.samples import for_samples

if TYPE_CHECKING:
    from components.generate.sampler import Collected

PATIENCE_S = 0.2
"""Maximum duration of a `collect` call in seconds. New weights can reach the engines between two calls."""


@dataclass
class Group:
    """A prompt that was taken and whose responses were not returned yet."""

    prompt: Batch
    """One row with the prompt."""
    step: int
    """Step for which generation began. It determines the random numbers."""
    version: int = 0
    """Version of the weights when generation last began."""
    engine: int | None = None
    """Engine that generates the responses. None if it was not assigned yet, or if its engine was replaced."""
    responses: Batch | None = None
    """All responses, once they are complete."""
    place: int = 0
    """Number of the `collect` call that returned the responses."""


@dataclass(kw_only=True)
class PartialRolloutBuffer:
    """Keeps prompts in generation on several engines, and returns the first groups that have finished.

    The other groups continue, and a later batch returns them. The weights with which a group began are at most
    `most_stale` versions behind the weights that are trained on it: a batch waits for groups that would exceed this in
    the next batch.
    """

    take: Callable[[int], Batch]
    """(count) -> the next `count` prompts, with the column `prompt_id`."""
    begin: Callable[[list[Batch | None], int], object]
    """(prompts, step): starts generation with the random numbers of this step. The list has an entry per engine: a
    batch with a row for every sample, or None.
    """
    collect: Callable[[float], Sequence[Collected]]
    """(seconds) -> the groups that each engine has finished since the last call, in the order of the engines.

    It waits at most so many seconds until every engine has finished a group. Prompts that were begun before the call
    are included.
    """
    engines: int
    """Number of engines."""
    samples: int
    """Number of responses per prompt."""
    in_flight: int
    """Maximum number of groups in the buffer."""
    most_stale: int
    """Maximum staleness in weight versions. See `AsyncOptions`."""
    version: Callable[[], int]
    """Returns the version of the engines' weights, or an older one."""
    stopped: Callable[[], bool]
    """Returns True if the current batch is to be abandoned. See `RolloutQueue.ending`."""
    info: Callable[[str], None]
    """Prints a line for the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last batch."""
    _groups: dict[int, Group] = field(default_factory=dict)
    """Groups by prompt_id, in the order in which their prompts were taken."""
    _collects: int = 0
    """Number of `collect` calls."""

    def __len__(self) -> int:
        """Return the number of prompts that were taken and whose responses were not returned yet."""
        return len(self._groups)

    def fill(self, step: int, count: int, left: int) -> Batch | None:
        """Return all responses to the first `count` prompts that are finished, or None if the run is to stop.

        Args:
            step: step that will train on the batch.
            count: number of prompts of the batch.
            left: number of prompts that this step and all later ones need. No more are begun.

        Returns:
            The groups in the order in which their prompts were taken, each as its engine returned it.
        """
        # At most `in_flight` groups are held, so at most in_flight - count <= count groups are left over. The next
        # batch has room for all of them if they must not wait longer.
        missing = min(self.in_flight, left) - len(self._groups)
        if missing > 0:
            self._hold(self.take(missing), step)
        assert len(self._groups) >= count, f"{count} prompts are needed of {len(self._groups)}, {left} are left"
        restarted = self._begin_old_again(step)
        self._begin_waiting()
        while (chosen := self._choose(step, count)) is None:
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
        """Return the state for `load_state_dict`: the prompts, and the responses that are complete."""
        groups = list(self._groups.values())
        if not groups:
            return {}
        responses = [group.responses for group in groups if group.responses is not None]
        answers = None
        if responses:
            answers = Batch.concat(responses)
        return {
            "prompts": Batch.concat(group.prompt for group in groups),
            "steps": [group.step for group in groups],
            "versions": [group.version for group in groups],
            "answers": answers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore prompts and complete responses. Prompts without complete responses are begun again."""
        self._groups = {}
        if not state:
            return
        self._hold(state["prompts"], 0)
        for group, step, version in zip(self._groups.values(), state["steps"], state["versions"], strict=True):
            group.step = step
            group.version = version
        if state["answers"] is not None:
            for prompt_id, responses in group_by(state["answers"], "prompt_id").items():
                self._groups[prompt_id].responses = responses

    def _begin_old_again(self, step: int) -> int:
        """Drop responses that are too old for this step, which a resumed run has if it lowers `most_stale`. Return
        their number.
        """
        old = [g for g in self._groups.values() if g.responses is not None and step - 1 - g.version > self.most_stale]
        for group in old:
            group.responses = group.engine = None
        if old:
            self.info(f"{len(old)} prompts have responses from weights that are too old now; they are generated again")
        return len(old)

    def _hold(self, prompts: Batch, step: int) -> None:
        for i, prompt_id in enumerate(prompts["prompt_id"].tolist()):
            assert prompt_id not in self._groups, f"prompt {prompt_id} was taken twice"
            self._groups[prompt_id] = Group(prompts[i : i + 1], step)

    def _running(self) -> dict[int, Group]:
        """Return the groups that an engine is generating."""
        return {
            key: group for key, group in self._groups.items() if group.engine is not None and group.responses is None
        }

    def _begin_waiting(self) -> None:
        """Begin the groups without an engine, oldest first, each on the engine with the fewest running groups."""
        playing = [group.engine for group in self._running().values()]
        loads = [playing.count(engine) for engine in range(self.engines)]
        waiting = [group for group in self._groups.values() if group.engine is None and group.responses is None]
        prompts: dict[int, list[list[Batch]]] = {}  # step -> prompts for each engine
        version = self.version()
        for group in waiting[: self.in_flight - len(playing)]:
            engine = loads.index(min(loads))
            loads[engine] += 1
            group.engine = engine
            group.version = version
            prompts.setdefault(group.step, [[] for _ in loads])[engine].append(group.prompt)
        for step, parts in prompts.items():
            self.begin([self._samples_of(part) for part in parts], step)

    def _samples_of(self, prompts: list[Batch]) -> Batch | None:
        """Return a row for every sample of the prompts, or None without prompts."""
        if not prompts:
            return None
        return for_samples(Batch.concat(prompts), self.samples)

    def _choose(self, step: int, count: int) -> list[int] | None:
        """Return the prompt_ids of the batch, or None while too few groups, or not all due groups, are finished."""
        done = [key for key, group in self._groups.items() if group.responses is not None]
        begun = {*done, *self._running()}
        # Groups that would be too old in the next step must be in this batch.
        due = [key for key in self._groups if key in begun and step - self._groups[key].version > self.most_stale]
        if len(done) < count or not set(due[:count]) <= set(done):
            return None
        others = sorted((key for key in done if key not in due), key=lambda key: self._groups[key].place)
        chosen = {*due[:count], *others[: max(count - len(due), 0)]}
        return [key for key in self._groups if key in chosen]

    def _wait(self) -> int:
        """Collect finished groups from the engines. Return the number of groups that engines have lost."""
        lost = 0
        self._collects += 1
        for engine, finished in enumerate(self.collect(PATIENCE_S)):
            groups = {}
            if finished.batch:
                groups = group_by(finished.batch, "prompt_id")
            for prompt_id, responses in groups.items():
                group = self._groups[prompt_id]
                assert group.engine == engine and group.responses is None, f"prompt {prompt_id} was generated twice"
                group.responses = responses
                group.place = self._collects
            playing = [key for key, group in self._running().items() if group.engine == engine]
            # A replaced engine knows nothing of the groups that its predecessor was generating.
            missing = [key for key in playing if key not in finished.in_flight]
            for key in missing:
                self._groups[key].engine = None
            if missing:
                self.info(f"engine {engine} has lost {len(missing)} prompts in generation; they are begun again")
            lost += len(missing)
        return lost

"""Roles that print."""

from core import BaseTrainer, BaseWorkload


class Tool(BaseWorkload):
    """A workload that prints one line per call."""

    def work(self) -> None:
        print("tool")


class Trainer(BaseTrainer):
    """A trainer that prints more lines than are shown."""

    def init(self) -> None:
        for name in self.get_role_groups():
            getattr(self, name).work()

    def fit(self) -> None:
        print("trains")
        for number in range(1000):
            print(number)

"""Roles that print."""

from core import BaseTrainer, BaseWorkload


class Tool(BaseWorkload):
    """Prints a line."""

    def work(self) -> None:
        print("tool")


class Trainer(BaseTrainer):
    """Prints more than is shown."""

    def init(self) -> None:
        for name in self.get_role_groups():
            getattr(self, name).work()

    def fit(self) -> None:
        print("trains")
        for number in range(1000):
            print(number)

"""Command line of the recipe: read the configuration, build the job, submit it."""

from dataclasses import replace
from pathlib import Path

from components.data.tokenizer_match import check_same_tokenizer
from components.models.sources import resolve_model
from core import Job, Role
from training.launch.inputs import data_tokenizer
from training.launch.model_use import ModelUse
from training.launch.plan import Plan
from training.launch.policy_command import PolicyCommand, policy_job

from .config import DistillConfig


def build_job(config: DistillConfig) -> Job:
    """Return the job: its roles, their classes and their placement.

    A role of your own takes one more line: `builder.role("style").run(f"{roles}.style:Style")`.
    """
    roles = f"{__package__}.roles"
    teacher = (f"{roles}.teacher:Teacher", f"{roles}.teacher:TeacherRank")
    trainer = f"{__package__}.trainer:DistillTrainer"
    return policy_job(config, trainer=trainer, actor=f"{roles}.actor:Actor", reference=teacher).build()


class DistillCommand(PolicyCommand[DistillConfig]):
    """See `PolicyCommand`. There is a second model, the teacher."""

    def model_uses(self, config: DistillConfig, job: Job) -> list[ModelUse]:
        """See `PolicyCommand.model_uses`."""
        uses = super().model_uses(config, job)
        return [replace(use, path=config.teacher.path) if use.role == Role.REFERENCE else use for use in uses]

    def models(self, config: DistillConfig) -> dict[str, str]:
        """See `Command.models`."""
        return super().models(config) | {"teacher.path": config.teacher.path}

    def check(self, plan: Plan) -> None:
        """See `PolicyCommand.check`. The token ids must mean the same to the teacher as to the student."""
        super().check(plan)
        config = plan.config
        if not {"model.path", "teacher.path"} & set(plan.absent):
            teacher = replace(config.model, path=config.teacher.path, tokenizer_path=None)
            option = f"teacher.path={config.teacher.path}"
            check_same_tokenizer(data_tokenizer(config.model), data_tokenizer(teacher), option)

    def ready(self, config: DistillConfig) -> DistillConfig:
        """See `Command.ready`. A teacher of the demonstration is created if it does not exist."""
        teacher = replace(config.teacher, path=resolve_model(config.teacher.path))
        return replace(super().ready(config), teacher=teacher)


COMMAND = DistillCommand(DistillConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read_resolved
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()

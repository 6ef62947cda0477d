"""Runs that cannot change their number of engines are refused, with all reasons."""

from __future__ import annotations

import re
from typing import Any

import pytest

from plugins.elastic.master import ElasticMaster
from plugins.elastic.worker import ElasticRolloutWorker
from recipes.grpo.main import COMMAND, main
from tests.messages import says
from training.launch.command import Command
from training.options.config import CommandLine

ELASTIC = ["placement.elastic=true", "rollout.engine=hf"]


def test_an_elastic_job_has_another_master_and_other_engines() -> None:
    from plugins.elastic.job import prepare

    command: Command[Any] = COMMAND
    line = CommandLine(command.schema, [*ELASTIC, "elastic.max_engines=3"])
    config = command.plan(command.requested_config(line), line).config
    job = command.build_job(config)
    lines = prepare(job, config)
    assert job.master is ElasticMaster
    module, _, name = job.roles["ROLLOUT"].entrypoint.partition(":")
    assert f"{module}:{name}" == f"{ElasticRolloutWorker.__module__}:{ElasticRolloutWorker.__name__}"
    assert "at most 3" in lines[0]
    assert "master" not in job.model_dump_json()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["backend=local"], ["backend=local", "backend=ray"]),
        (["rollout.weight_sync=broadcast", "placement.colocate=false"], ["weight_sync=broadcast", "shared_memory"]),
        (["elastic.max_engines=1", "placement.rollout_engines=2"], ["elastic.max_engines=1", "starts with 2"]),
        (
            ["placement.colocate=false", "asynchronous.enabled=true", "asynchronous.partial_rollout=true"],
            ["asynchronous.partial_rollout", "false"],
        ),
    ],
)
def test_a_run_that_cannot_be_elastic_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], facts: list[str]
) -> None:
    assert main([*ELASTIC, *words, "--dry_run"]) == 2
    assert re.search(says("placement.elastic=true", *facts), capsys.readouterr().err)

"""Tests of the documentation: commands, code and links of its pages are valid, and the site can be built."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs_pages import PAGES, ROOT, Command, anchors, blocks, commands, links, options_of_shell, text_of
from tests.recipe_copies import RECIPES
from training.options.config import load_config
from training.tracking.metrics import metric_of

A_FILE = """
class AgentInstance: ...
def reward_func(queries, prompts, labels): ...
def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
"""
"""Contents of the reader's files that commands name."""
LANGUAGES = {"bash", "diff", "json", "python", "yaml", ""}
FOREIGN = {
    "cd": r"\S+",
    "cat": r"\S+",
    "tail": r"-n \d+ \S+",
    "$EDITOR": r"\S+\.(py|yaml)",
    "git": r"clone \S+( \S+)?|apply( \S+)?",
    "docker": r"run( --rm| -it| --gpus all| --shm-size=\d+g| -v \S+:\S+)+ \S+( .*)?",
    "export": r"\w+=\S+",
    "sbatch": r"\S+",
    "kubectl": r"create (-f \S+|secret generic \S+( --from-literal=\S+)+)",
    "sky": r"launch \S+( --secret \S+( rand -hex 32\))?)*",
    "scancel": r"(--batch --signal=TERM )?[A-Z]+",
    "mkdocs": r"(build|serve)( --strict)?",
    "pip": r"install \S+ @ file:///\S+\.whl",
    "pre-commit": r"install",
}
"""Patterns of commands that do not belong to the project. Other programs have separate checks."""

OPTIONS_OF = {"recipes.grpo.single_file": "Settings", "plugins.demo.warm_start": "WarmStartSettings"}
"""Modules that are commands -> class whose fields are their options."""

OF_FULL = re.compile(r"reasoning_gym:|rollout[._]engine[= ]vllm")
"""Options that exist only if their package is installed, which is not the case in the default tier."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs_unchanged(page: str, reader: Path) -> None:
    for command in commands(page):
        if not OF_FULL.search(command.text):
            try_command(command, reader)


@pytest.mark.full
def test_commands_that_need_packages_of_the_full_tier_run_unchanged(reader: Path) -> None:
    full_commands = [command for page in PAGES for command in commands(page) if OF_FULL.search(command.text)]
    assert len(full_commands) >= 3
    for command in full_commands:
        try_command(command, reader)


def try_command(command: Command, folder: Path) -> None:
    """Check a command. The AssertionError shows the command and the fault."""
    for name in re.findall(r"(?<![\w/.])\w+\.py\b", command.text):
        (folder / name).write_text(A_FILE)
    try:
        check(command)
    except (AssertionError, ImportError, ValueError, LookupError, OSError, SystemExit) as error:
        raise AssertionError(f"{command}\n{type(error).__name__}: {error}") from error


def check(command: Command) -> None:
    """Check a command according to its program. Raises AssertionError or another error if it is invalid."""
    first, *rest = command.words
    for name in command.environment:
        assert name in sources(), f"nothing reads {name}"
    first = first.removeprefix(".venv/bin/")
    if first in CHECKS:
        CHECKS[first](rest, command)
    elif first in FOREIGN:
        shown = " ".join(rest)
        assert re.fullmatch(FOREIGN[first], shown), f"of {first} the pages show {FOREIGN[first]}, not {shown}"
    else:
        assert (ROOT / first).is_file(), "no test knows such a command: add a check of it to tests/test_docs.py"


PARSERS = {"replay.sh": "plugins.replay.command", "compare.sh": "plugins.replay.compare"}
"""Shell script -> module whose function `parser` parses its command line."""


def check_bash(words: list[str], command: Command) -> None:
    """Check a `bash` command: a recipe, or another shell script of the project."""
    script, *rest = words
    path = Path(script)
    if path.match("recipes/*/run.sh"):
        check_recipe(path.parent.name, rest, command)
        return
    assert (ROOT / script).is_file(), f"there is no {script}"
    if path.name == "setup.sh":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.sub(r"--(quiet|python \S+)", "", " ".join(rest)).split()
        unknown = set(named) - {"base", *extras}
        assert not unknown, f"setup.sh knows no {unknown}"
    elif path.name == "test.sh":
        check_pytest([word for word in rest if word not in options_of_shell(script)], command)
    elif path.name == "prove.sh":
        assert not rest or (rest[0] == "--recipe" and re.search(rf"\b{rest[1]}\b", text_of(script))), rest
    elif path.name in PARSERS:
        importlib.import_module(PARSERS[path.name]).parser().parse_args(rest)
    else:
        assert not rest, f"no test knows the options of {script}"


def check_recipe(recipe: str, options: list[str], command: Command) -> None:
    """Check the options of a recipe as its main parses them."""
    if recipe == "my_algo":  # a copy of grpo, with the fields that the page adds
        added = re.findall(r"^\+ +(\w+): ", text_of(command.page), re.MULTILINE)
        recipe, options = "grpo", [o for o in options if o.partition("=")[0].split(".")[-1] not in added]
    if "--help" in options or any("<" in option for option in options):
        return
    main = importlib.import_module(f"recipes.{recipe}.main")
    main.COMMAND.read(options)


def check_python(words: list[str], command: Command) -> None:
    """Check a script or module of the project, a file that the page itself shows, or the command that a module
    replaces.
    """
    script, *rest = words
    if script == "-m":
        module, *rest = rest
        if module == "pytest":
            check_pytest(rest, command)
        elif match := re.fullmatch(r"(?:troupe\.)?recipes\.(\w+)\.main", module):  # the prefix is that of the wheel
            check_recipe(match[1], rest, command)
        elif module == "recipes.reward_model.serve":
            if rest:  # otherwise it is only mentioned
                load_config(importlib.import_module(module).ServeConfig, rest)
        elif module == "uv":
            assert rest in (["build"], []), f"no test knows uv {rest}"
        elif module == "tests.notebooks":
            assert importlib.util.find_spec(module) and not rest, f"{module} takes no options: {rest}"
        elif module == "tests.sentences":
            known = rest in ([], ["--check"], ["--write"]) or all((ROOT / file).exists() for file in rest)
            assert known, f"tests.sentences takes --check, --write or files, not {rest}"
        elif module == "plugins.vllm_arguments.table":
            assert not rest, f"{module} has no options, not {rest}"
        elif module in OPTIONS_OF:
            schema = getattr(importlib.import_module(module), OPTIONS_OF[module])
            check_flags(rest, {f"--{field.name}" for field in dataclasses.fields(schema)}, module)
        else:
            assert module in ("openrlhf.cli.train_ppo_ray", "verl.trainer.main_ppo"), f"no test knows {module}"
        return
    if any(f"# {kind}{script}\n" in block.text for block in blocks(command.page) for kind in ("", "file: ")):
        return
    path = ROOT / script
    assert path.is_file(), f"there is no {script}"
    if script == "scripts/cluster/submit.py":
        parsed = runpy.run_path(str(path))["parse"](rest)
        check_recipe(parsed.recipe.name, parsed.recipe_options, command)
        return
    # A script of a family may have its options in a file next to it.
    known = options_in(path) | {name for other in path.parent.glob("*_files.py") for name in options_in(other)}
    check_flags(rest, known, script)


def check_flags(words: list[str], known: set[str], script: str) -> None:
    """Check that the flags before `--` are known."""
    flags = words[: words.index("--")] if "--" in words else words
    unknown = {word.partition("=")[0] for word in flags if word.startswith("--")} - known
    assert not unknown, f"{script} has no {unknown}; it has {sorted(known)}"


@functools.cache
def options_in(script: Path) -> set[str]:
    """Return the flags that a script defines."""
    constants = (n.value for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str) and re.fullmatch(r"--[\w-]+", value)}


def check_pytest(words: list[str], command: Command) -> None:
    """Check the paths and options of a pytest command."""
    contract_options = options_in(ROOT / "tests/contracts/conftest.py")
    for word in words:
        if word.removeprefix("~/troupe/").startswith("tests/"):
            assert (ROOT / word.removeprefix("~/troupe/").partition("::")[0]).exists(), f"there is no {word}"
        assert not word.startswith("--") or word in contract_options | {"--durations=10", "--durations=20"}, (
            f"pytest has no {word}"
        )


def check_copy(words: list[str], command: Command) -> None:
    """Check that the copied file exists."""
    assert words[0] == "-r", "a recipe is a folder"
    assert (ROOT / words[1]).is_dir(), f"there is no {words[1]}"


def check_curl(words: list[str], command: Command) -> None:
    """Check that a server of this project has the requested path, and that the body is JSON."""
    served = re.search(r"https?://[\w.:-]+(/\w+)", command.text)
    assert served is not None and f'"{served[1]}"' in sources(), "none of ours serves this"
    json.loads(words[words.index("-d") + 1])


def check_ray(words: list[str], command: Command) -> None:
    """Check the options as Ray declares them, and the submitted command."""
    if "--" in words:
        program, *rest = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
        CHECKS[program](rest, command)
    with warnings.catch_warnings(action="ignore"):
        from ray.scripts.scripts import cli

    group: Any = cli
    while words and not words[0].startswith("-") and words[0] in getattr(group, "commands", {}):
        group, words = group.commands[words[0]], words[1:]
    assert not hasattr(group, "commands"), f"ray has no {words[:1]}"
    check_flags(words, {flag for option in group.params for flag in option.opts}, "ray")


CHECKS: dict[str, Callable[[list[str], Command], None]] = {
    "bash": check_bash,
    "python": check_python,
    "python3": check_python,
    "pytest": check_pytest,
    "cp": check_copy,
    "curl": check_curl,
    "ray": check_ray,
}


@functools.cache
def sources() -> str:
    """Return all code of the project as one text."""
    folders = ("core", "components", "agents", "training", "plugins", "recipes", "scripts")
    files = [file for folder in folders for kind in ("*.py", "*.sh") for file in sorted((ROOT / folder).rglob(kind))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of_a_page_name_a_language_and_can_be_parsed(page: str) -> None:
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block of {block.language}"
        if block.language == "python":
            compile(block.text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "":
            assert not re.search(r"^(\$ |bash |python )", block.text, re.MULTILINE), f"{where}: commands are bash"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_has_an_existing_file_and_heading(page: str) -> None:
    for target, anchor in links(page):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = anchors(str(path.resolve().relative_to(ROOT)))
            assert anchor in headings, f"{page} links to #{anchor} of {target or page}; there are {sorted(headings)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_named_by_a_page_is_logged(page: str) -> None:
    groups = r"reward|actor|critic|rollout|eval|timing_s|perf"
    named = set(re.findall(rf"(?<![\w/.])(?:{groups})/\w+(?=[`=])", text_of(page)))
    assert not {name for name in named if metric_of(name) is None}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as .ci/run does. Return its folder."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


@pytest.mark.full
def test_the_site_has_every_page_and_needs_no_network(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    for recipe in RECIPES:
        assert (site / f"recipes/{recipe}.html").is_file()
        assert f"{recipe}: recipes/{recipe}.md" in text_of("mkdocs.yml"), f"{recipe} is not in the site's menu"
    assert "group_mean_baseline" in (site / "notebooks/components.html").read_text()
    assert "data:image/png" in (site / "notebooks/local_run.html").read_text()
    assert "runs/&lt;recipe&gt;-&lt;time&gt;" in (site / "options.html").read_text()
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?([^\"'> ]+)", page.read_text()
        )
        outside = [address for address in loaded if re.match(r"(https?:)?//", address)]
        assert loaded and not outside, f"{page.name} loads {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\([\"']?|@import [\"'])(https?:)?//", sheet.read_text()), sheet.name


NAMES_ELSEWHERE = {
    "num_generations": "TRL",
    "per_device_train_batch_size": "TRL",
    "max_completion_length": "TRL",
    "reward_funcs": "TRL",
    "n_samples_per_prompt": "OpenRLHF",
    "init_kl_coef": "OpenRLHF",
    "colocate_all_models": "OpenRLHF",
    "rollout_batch_size": "OpenRLHF",
    "actor_rollout_ref.rollout.n": "verl",
    "data.train_batch_size": "verl",
    "ppo_mini_batch_size": "verl",
    "algorithm.adv_estimator": "verl",
}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_site_search_finds_a_page_by_an_option_name(site: Path, name: str) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    words = {word for word in separator.split(name.lower()) if word}
    texts = {page["location"]: re.sub(r"<[^>]+>", " ", page["text"]).lower() for page in index["docs"]}
    locations = [location for location, text in texts.items() if words <= set(separator.split(text))]
    assert any(re.match(r"(option_names|from_(trl|openrlhf|verl))\.html", location) for location in locations), (
        locations
    )


@pytest.mark.full
def test_api_pages_have_the_docstrings_of_their_objects(site: Path) -> None:
    for page, name in {
        "core": "core.workload.BaseWorkload",
        "batch": "components.batch.Batch.concat",
        "rl": "components.rl.advantages.group_norm",
        "engines": "components.generate.opening.open_rollout_engine",
        "run": "training.run.policy_run.PolicyRun.end_step",
        "roles": "training.roles.policy.PolicyWorker",
        "rewards": "components.rewards.opening.open_reward",
        "agents": "agents.tools.ToolAgentInstance.score",
    }.items():
        html = (site / f"api/{page}.html").read_text()
        assert f'id="{name}"' in html, f"{name} is not on api/{page}.html"
        assert ":::" not in html


@pytest.mark.full
def test_the_page_of_options_has_the_options_of_every_recipe(site: Path) -> None:
    html = (site / "options.html").read_text()
    for name in ("train.learning_rate", "algorithm.kl_coef", "data.chosen_key", "critic.learning_rate"):
        assert f"<code>{name}</code>" in html, name


@pytest.mark.full
def test_links_of_the_site_are_valid_and_missing_files_are_named(site: Path) -> None:
    recipes = (site / "recipes/index.html").read_text()
    assert 'href="grpo.html#one-step-from-prompt-to-weights"' in recipes
    assert 'href="../from_openrlhf.html"' in recipes
    assert "the examples (<code>tests/contracts/examples</code>)" in (site / "contracts.html").read_text()
    for page in site.rglob("*.html"):
        assert not re.search(r'href="[^":]*\.(md|py|yaml|sh)\b', page.read_text()), page.name

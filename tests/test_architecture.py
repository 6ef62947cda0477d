"""The layers, sizes and files of the project follow the rules of tests/architecture.py, and violations are reported."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import (
    CLOSURE_LINES,
    IMPORT_CORE_S,
    LAYER_LINES,
    PLUGIN_LINES,
    RECIPE_FILES,
    RECIPE_LINES,
    ROOT,
    STATIC_CHECKS,
    TORCH_FREE_FILES,
    annotation_faults,
    closure_faults,
    code_lines,
    cycle_faults,
    file_size_faults,
    function_size_faults,
    heavy_import_faults,
    import_faults,
    layer_size_faults,
    missing_library_faults,
    plugin_size_faults,
    readme_faults,
    recipe_faults,
    recipes_of,
    run_python,
    shared_line_faults,
    torch_faults,
)


@pytest.mark.parametrize("check", STATIC_CHECKS, ids=lambda check: check.__name__)
def test_the_project_follows_the_rule(check: Callable[[Path], list[str]]) -> None:
    faults = check(ROOT)
    assert not faults, "\n" + "\n".join(faults)


def test_import_core_is_quick() -> None:
    # The minimum of several measurements in CPU seconds, so that a busy machine does not matter.
    code = "import time; t = time.process_time(); import core; print(time.process_time() - t)"
    seconds: list[float] = []
    while len(seconds) < 10 and min(seconds, default=IMPORT_CORE_S) >= IMPORT_CORE_S:
        seconds.append(float(run_python(code)))
    assert min(seconds) < IMPORT_CORE_S, seconds


def test_importing_core_imports_neither_torch_nor_ray() -> None:
    assert heavy_import_faults(ROOT, ["core"], ["torch", "ray"]) == []


def test_planning_a_recipe_does_not_import_torch() -> None:
    recipes = recipes_of(ROOT)
    assert recipes
    modules = [f"recipes.{r.name}.{Path(file).stem}" for r in recipes for file in sorted(TORCH_FREE_FILES)]
    assert heavy_import_faults(ROOT, modules, ["torch"]) == []


def test_components_import_without_ray_vllm_and_deepspeed() -> None:
    assert missing_library_faults(ROOT) == []


# The same checks on small trees with faults in them.


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GOOD_IMPORTS = {
    "core/job.py": "import json\nimport pydantic\nimport ray.actor\nfrom core.roles import Role\nfrom . import config",
    "components/rl/kl.py": "import torch\nfrom components.batch import Batch\nfrom ..batch import Batch as B",
    "plugins/zero/engine.py": "import deepspeed\nfrom plugins.zero import options\nfrom training.run import run",
    "agents/executor.py": "from components.batch import Batch",
    "recipes/a/roles/actor.py": "import core\nimport agents\nfrom components import batch\nfrom ..config import C",
    "recipes/a/main.py": "from .config import C\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    "scripts/report.py": "import core, recipes.a.main",
}


def test_imports_of_lower_layers_are_allowed(tmp_path: Path) -> None:
    root = tree(tmp_path, GOOD_IMPORTS)
    assert import_faults(root) == []
    assert torch_faults(root) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("core/a.py", "def f():\n    import torch", "core/a.py:2: core may not import torch"),
        ("core/a.py", "import numpy as np", "core may not import numpy"),
        ("core/a.py", "from components.batch import Batch", "core may not import components.batch.Batch"),
        ("core/b/a.py", "from ...components import batch", "a relative import that leaves the tree"),
        ("core/b/a.py", "import importlib\nimportlib.import_module('agents.x')", "core may not import agents.x"),
        ("components/a.py", "import core", "components may not import core"),
        ("components/a.py", "if TYPE_CHECKING:\n    from core import Role", "components may not import core.Role"),
        ("components/a.py", "import ray", "components work without ray"),
        ("components/a.py", "from vllm import LLM", "only a plug-in may import vllm"),
        (
            "components/a.py",
            "from plugins.vllm import engine",
            "nothing imports a plug-in, but here: plugins.vllm.engine",
        ),
        ("plugins/b/a.py", "import plugins.vllm.engine", "nothing imports a plug-in, but here: plugins.vllm.engine"),
        ("agents/a.py", "import core", "agents may not import core"),
        ("training/a.py", "from agents.runner import x", "training loads agents.runner.x by components/registry.py"),
        ("agents/a.py", "from training.run.run import Run", "agents may not import training.run.run.Run"),
        ("training/a.py", "import recipes.grpo", "training may not import recipes.grpo"),
        ("agents/a.py", "from recipes.x import y", "agents may not import recipes.x.y"),
        ("recipes/a/t.py", "from recipes.a import config", "a recipe imports only itself, and that relatively"),
        ("recipes/a/t.py", "from ..b import config", "here: recipes.b.config"),
        ("recipes/a/t.py", "from recipes import b", "here: recipes.b"),
        ("recipes/a/t.py", "import scripts.doctor", "recipes may not import scripts.doctor"),
        ("scripts/a.py", "from scripts import b", "scripts may not import scripts.b"),
        ("tests/a.py", "import scripts", "tests may not import scripts"),
    ],
)
def test_an_import_of_a_higher_layer_is_reported(tmp_path: Path, file: str, text: str, fault: str) -> None:
    (reported,) = import_faults(tree(tmp_path, {file: text}))
    assert fault in reported


def test_a_cycle_through_lazy_or_type_checking_imports_is_reported(tmp_path: Path) -> None:
    files = {
        "core/a.py": "from core.b import f",
        "core/b.py": "def f():\n    from core import c",
        "core/c.py": "if TYPE_CHECKING:\n    from core.a import g",
        "core/d.py": "import core.a",
    }
    (reported,) = cycle_faults(tree(tmp_path, files))
    assert set(reported.split(" <- ")) == {"core.a", "core.b", "core.c"}
    (tmp_path / "core/c.py").write_text("import core.e")
    assert cycle_faults(tmp_path) == []


def test_an_import_of_torch_is_reported_in_planning_files_only(tmp_path: Path) -> None:
    files = {f"recipes/a/{name}": "from torch import Tensor" for name in (*TORCH_FREE_FILES, "trainer.py")}
    assert len(torch_faults(tree(tmp_path, files))) == len(TORCH_FREE_FILES) == 3


def test_an_indirect_import_of_torch_is_reported(tmp_path: Path) -> None:
    root = tree(tmp_path, {"plan.py": "import detour", "detour.py": "import wave"})
    assert heavy_import_faults(root, ["plan"], ["wave"]) == ["import plan brings wave"]
    assert heavy_import_faults(root, ["plan"], ["chunk_of_nothing"]) == []


def test_an_import_of_ray_in_components_is_reported(tmp_path: Path) -> None:
    files = {"components/a.py": "import ray", "components/b.py": "", "plugins/zero/c.py": "import deepspeed"}
    (fault,) = missing_library_faults(tree(tmp_path, files))
    assert fault.startswith("components.a: ")


def test_blank_lines_comments_and_docstrings_are_not_code_lines() -> None:
    text = '"""Module.\n\nTwo."""\n\n# why\nx = 1\n"""Of x."""\ndef f(\n    a: int,\n) -> str:\n    """Doc."""\n'
    text += '    return """one\ntwo"""  # why\n'
    assert code_lines(text) == {6, 8, 9, 10, 12, 13}


def test_a_function_of_61_lines_is_reported_and_one_of_60_is_not(tmp_path: Path) -> None:
    def function(name: str, lines: int) -> str:
        return f"def {name}() -> None:\n" + "    # why\n\n    pass\n" * (lines - 1)

    root = tree(tmp_path, {"agents/a.py": function("short", 60) + function("long", 61)})
    (fault,) = function_size_faults(root)
    assert fault == "agents/a.py:179: long has 61 lines of code, over 60"


def test_a_file_of_401_lines_is_reported_unless_it_is_a_schema(tmp_path: Path) -> None:
    files = {"core/a.py": "x = 1\n" * 400, "core/b.py": "x = 1\n" * 401, "training/options/config.py": "x = 1\n" * 401}
    assert file_size_faults(tree(tmp_path, files)) == ["core/b.py has 401 lines of code, over 400"]


def test_a_layer_and_a_recipe_above_their_ceilings_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYER_LINES, "core", 20)
    monkeypatch.setitem(RECIPE_LINES, "grpo", 10)
    files = {f"core/{name}.py": "x = 1\n" * 7 for name in "abc"} | {"core/synonyms.yaml": "# why\na: 1\n\n"}
    files |= {f"recipes/{name}/config.py": "x = 1\n" * 11 for name in ("grpo", "openrlhf_ppo")}
    files |= {"recipes/grpo/single_file.py": "x = 1\n", "recipes/grpo/tiny.yaml": "a: 1\n"}
    assert layer_size_faults(tree(tmp_path, files)) == [
        "core has 21 lines of code, over 20",
        "recipes/grpo has 11 lines of code, over 10",
    ]


def test_a_users_copy_of_a_recipe_is_not_reported(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    shutil.copytree(ROOT / "recipes" / "grpo", recipes / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(recipes / "grpo", recipes / "my_algo")
    tree(tmp_path, {"recipes/my_algo/notes.py": "x = 1\n" * 300, "tests/recipes/test_grpo.py": ""})
    for check in (layer_size_faults, shared_line_faults, recipe_faults, closure_faults):
        assert check(tmp_path) == []
    tree(tmp_path, {"recipes/my_algo/other.py": "from recipes.grpo.config import GRPOConfig"})
    assert any("a recipe imports only itself" in fault for fault in import_faults(tmp_path))


def test_the_closure_includes_lazy_imports_and_roles_named_by_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "recipes/grpo/main.py": 'def f():\n    from training import a\nROLE = "training.b:B"\n',
        "recipes/grpo/single_file.py": "x = 1\n" * 9,
        "training/a.py": "x = 1\n" * 3,
        "training/b.py": "from core import c\n",
        "core/c.py": "x = 1\n" * 2,
        "core/d.py": "x = 1\n" * 9,
    }
    monkeypatch.setitem(CLOSURE_LINES, "recipes/grpo", 8)
    (fault,) = closure_faults(tree(tmp_path, files))
    assert fault == "recipes/grpo and what it imports have 9 lines of code, over 8"


def test_the_closure_of_a_file_excludes_plugins_and_the_rest_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "recipes/grpo/main.py": "x = 1\n" * 9,
        "recipes/grpo/single_file.py": "import training.a\n",
        "training/a.py": "from plugins.vllm import engine\nx = 1\n",
        "plugins/vllm/engine.py": "from core import c\n" * 9,
        "core/c.py": "x = 1\n" * 9,
    }
    monkeypatch.setitem(CLOSURE_LINES, "recipes/grpo/single_file.py", 2)
    (fault,) = closure_faults(tree(tmp_path, files))
    assert fault == "recipes/grpo/single_file.py and what it imports have 3 lines of code, over 2"


def test_two_recipes_that_share_over_40_percent_of_their_lines_are_reported(tmp_path: Path) -> None:
    common = [f"common = {i}" for i in range(5)]
    files = {
        "recipes/dpo/main.py": "\n".join([*common, "a = 1", "a = 2", "a = 3"]),  # 5 of 11 with grpo, 4 of 11 with sft
        "recipes/grpo/main.py": "\n".join([*common, "b = 1", "b = 2", "b = 3"]),
        "recipes/sft/main.py": "\n".join([*common[:4], "c = 1", "c = 2", "c = 3"]),
    }
    root = tree(tmp_path, files)
    assert shared_line_faults(root) == ["of recipes/dpo and recipes/grpo 45% is the same, over 40%"]


def test_a_missing_annotation_is_reported(tmp_path: Path) -> None:
    text = "class A:\n    def f(self, a: int, *b, c, **d): ...\n    def g(self, *a: int) -> None: ...\n"
    (fault,) = annotation_faults(tree(tmp_path, {"core/a.py": text}))
    assert fault == "core/a.py:2: f gives no type for c, b, d, the result"


def test_a_recipe_with_missing_files_or_tests_is_reported(tmp_path: Path) -> None:
    files = {
        f"recipes/{name}/{file}": "" for name in ("dpo", "grpo", "sft") for file in (*RECIPE_FILES, "roles/actor.py")
    }
    tests = {"tests/recipes/test_dpo_learns.py": "", "tests/recipes/grpo/test_b.py": ""}
    root = tree(tmp_path, {**files, **tests, "recipes/_shared/x.py": "", "recipes/__init__.py": ""})
    assert recipe_faults(root) == ["recipes/sft has no tests; write tests/recipes/test_sft.py"]
    (root / "recipes/dpo/run.sh").unlink()
    (root / "recipes/grpo/roles/actor.py").rename(root / "recipes/grpo/roles/__init__.py")
    assert recipe_faults(root)[:2] == ["recipes/dpo has no run.sh", "recipes/grpo has no role in roles/"]


def test_a_large_plugin_and_a_folder_without_readme_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLUGIN_LINES, "each", 2)
    files = {
        "plugins/a/__init__.py": "x = 1\n" * 3,
        "plugins/b/__init__.py": "x = 1\n",
        "plugins/b/README.md": "`gone.py`\n",
    }
    root = tree(tmp_path, files)
    assert plugin_size_faults(root) == ["plugins/a has 3 lines of code, over 2"]
    missing = "plugins/b/README.md names gone.py, which does not exist"
    assert readme_faults(root) == ["plugins/a has no README.md", missing]

"""What the README shows works as it is written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_twenty_lines_of_core_run_as_they_stand(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "my_module.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "6"
    assert "status='finished'" in lines[1]


def test_every_link_of_the_readmes_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("recipes/*/README.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_commands_of_the_readmes_name_files_that_are_there() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("recipes/*/README.md")]:
        for script in re.findall(r"^bash (\S+\.sh)", page.read_text(encoding="utf-8"), re.MULTILINE):
            if "my_algo" not in script:
                assert (ROOT / script).is_file(), f"{page.relative_to(ROOT)} runs {script}"

"""docs/guides.md matches the tables of the guides."""

import subprocess
import sys

from tests.recipe_copies import ROOT


def test_the_page_of_the_guides_is_written_from_their_tables() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "guides_page.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr

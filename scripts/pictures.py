"""Create the pictures of the documentation from a run of the current code.

    python scripts/pictures.py [--out FOLDER] [OPTION=VALUE ...]

It runs the demonstration of grpo in a terminal of 120 columns and writes to FOLDER (default docs/images):

    terminal.png, terminal.txt   the terminal in the middle of the run, and its text
    report.png                   the curves of report.html
    rollouts.png                 the responses to one prompt, in report.html

It needs the extra `dev` and Chromium (apt-get install chromium). Options are passed to the run.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import html
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 120
ROWS = 60
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
COLOURS = {
    30: "#3b3f45",
    31: "#e06c75",
    32: "#98c379",
    33: "#e5c07b",
    34: "#61afef",
    35: "#c678dd",
    36: "#56d1ee",
    37: "#dcdfe4",
}
"""Foreground colours of a terminal by their code; the bright ones are 60 higher."""
PAGE = """<body style="margin: 0; background: #16181d">
<pre id="screen" style="display: inline-block; margin: 0; padding: 16px 20px; color: #e8eaed;
font: 15px/20px DejaVu Sans Mono, monospace">"""
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
_STEP = re.compile(r"\bstep (\d+) of (\d+)")

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Screen:
    """Text and colours of a terminal, updated by the output of a program.

    It implements the codes that a run uses: cursor up, carriage return, erase to the end, colours.
    """

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        """Characters of each line with their style, as CSS."""
        self._row = 0
        self._column = 0
        self._style = ""
        self._rest = ""

    def write(self, text: str) -> None:
        """Process more output of the program."""
        text = self._rest + text
        # A read may end inside an escape code. Its beginning waits for the next read.
        cut = text.rfind("\x1b")
        self._rest = ""
        if cut >= 0 and not _ESCAPE.match(text, cut):
            self._rest = text[cut:]
            text = text[:cut]
        position = 0
        while position < len(text):
            code = _ESCAPE.match(text, position)
            if code:
                self._escape(code[1], code[2])
                position = code.end()
            else:
                self._put(text[position])
                position += 1

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            self._column = 0
            while len(self.lines) <= self._row:
                self.lines.append([])
        elif character == "\r":
            self._column = 0
        else:
            line = self.lines[self._row]
            line.extend([(" ", "")] * (self._column - len(line)))
            line[self._column : self._column + 1] = [(character, self._style)]
            self._column += 1

    def _escape(self, numbers: str, kind: str) -> None:
        if kind == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif kind in "JK":
            del self.lines[self._row][self._column :]
            if kind == "J":
                del self.lines[self._row + 1 :]
        elif kind == "m":
            for number in numbers.split(";"):
                self._style = self._styled(int(number or 0))

    def _styled(self, code: int) -> str:
        if code == 0:
            return ""
        if code == 1:
            return self._style + "font-weight:bold;"
        if code == 2:
            return self._style + "opacity:.55;"
        colour = COLOURS.get(code, COLOURS.get(code - 60, ""))
        if not colour:
            return self._style
        return self._style + f"color:{colour};"

    def text(self) -> str:
        """Return the lines without colours."""
        return "\n".join("".join(c for c, _ in line).rstrip() for line in self.lines).rstrip("\n") + "\n"

    def page(self) -> str:
        """Return the screen as HTML."""
        rows = ["".join(f'<span style="{s}">{html.escape(c)}</span>' for c, s in line) for line in self.lines]
        return f"{PAGE}{chr(10).join(rows)}</pre>"


def output_of(command: list[str]) -> Iterator[str]:
    """Run a command in a terminal and yield its output.

    Raises:
        RuntimeError: the command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "HOME": os.environ.get("HOME", "/"), "COLUMNS": str(COLUMNS)}
    env.pop("CI", None)  # if it is set, a run prints lines instead of the live view
    program = subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    # Otherwise reading would not end with the program, because this process holds the other side too.
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError as error:
            # Linux reports EIO when the other side of the terminal has closed.
            if error.errno != errno.EIO:
                raise
            break
        if not data:
            break
        yield data.decode(errors="replace").replace("\r\n", "\n")
    os.close(ours)
    if program.wait(60) != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {program.returncode}")


def run_demonstration(run_dir: Path, options: list[str]) -> Screen:
    """Run the demonstration of grpo. Return the screen in the middle of the steps, or the first one with a step."""
    screen = Screen()
    middle = Screen()
    command = ["bash", "recipes/grpo/run.sh", f"run_dir={run_dir}", *options]
    for text in output_of(command):
        screen.write(text)
        steps = _STEP.findall(screen.text())
        is_first = not _STEP.search(middle.text())
        if steps and (is_first or int(steps[-1][0]) * 2 <= int(steps[-1][1]) + 1):
            middle.lines = [list(line) for line in screen.lines]
    if not _STEP.search(middle.text()):
        raise RuntimeError(f"the run showed no step:\n{screen.text()}")
    return middle


def take_pictures(browser: Browser, screen: Screen, report: Path, out: Path) -> None:
    """Write the pictures of the terminal and of the report into `out`."""
    page = browser.new_page(viewport={"width": 1200, "height": 820})
    page.set_content(screen.page())
    page.locator("#screen").screenshot(path=out / "terminal.png")
    page.goto(report.as_uri())
    page.wait_for_selector("#rollouts")
    # With smooth scrolling a picture would show the page on its way to the section.
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    for section, name in (("curves", "report"), ("rollouts", "rollouts")):
        page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
        page.wait_for_timeout(1000)  # charts are drawn when they become visible
        page.screenshot(path=out / f"{name}.png")


def main() -> None:
    """Run the demonstration and write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="options of the run")
    arguments = parser.parse_intermixed_args()
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("pictures: no Chromium found; install one: apt-get install chromium")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        # A short name, because the run prints the path.
        run_dir = Path(scratch) / "first"
        screen = run_demonstration(run_dir, arguments.options)
        # The path of a temporary folder would differ in every picture.
        for characters in screen.lines:
            text = "".join(character for character, _ in characters)
            if scratch in text:
                characters[:] = [(character, "") for character in text.replace(scratch, "runs")]
        (arguments.out / "terminal.txt").write_text(screen.text(), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        take_pictures(browser, screen, run_dir / "report.html", arguments.out)
        browser.close()


if __name__ == "__main__":
    main()

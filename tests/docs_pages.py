"""Parser of the documentation pages: code, commands, links and headings."""

import re
import shlex
from dataclasses import dataclass

from tests.recipe_copies import RECIPES, ROOT

PAGES = sorted(
    [str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    + [f"recipes/{recipe}/README.md" for recipe in RECIPES]
)
STARTS = re.compile(
    r"([A-Z_]+=\S+ +)*(bash|python3?|pytest|pip|git|ray|cp|cd|mkdocs|curl|docker|apt-get|sbatch|scancel|\.\S+/\S+) +\S"
)
"""First words of inline code that is a command."""


@dataclass(frozen=True)
class Code:
    """A block of code with its page, first line and language."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a page, with the environment that is set before it."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """Words of the command as a shell splits it, without comment, environment, and words that end in dots."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        shown = [word for word in words if not word.endswith("...")]
        return [word.strip("[]") if re.fullmatch(r"\[--\w+|[A-Z]+\]", word) else word for word in shown]

    @property
    def environment(self) -> list[str]:
        """Names of the variables that the command sets."""
        return re.findall(r"^(?:export )?([A-Z_]+)=", self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def text_of(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Code]:
    """Return the fenced code blocks of a page."""
    text = text_of(page)
    matches = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Code(page, text.count("\n", 0, m.start()) + 1, m[1].strip(), m[2]) for m in matches]


def prose(page: str) -> str:
    """Return the page without its code blocks. Line numbers are unchanged."""
    return re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text_of(page), flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[Command]:
    """Return the commands of a page, from bash blocks and from inline code."""
    commands = []
    for block in blocks(page):
        if block.language == "bash":
            number = block.line + 1
            for line in block.text.replace("\\\n", "\0").splitlines():
                text = line.replace("\0", "")
                if shlex.split(text, comments=True):
                    commands.append(Command(page, number, " ".join(text.split())))
                number += 1 + line.count("\0")
    text = prose(page)
    for m in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        code = " ".join(m[1].split())
        if STARTS.match(code):
            commands.append(Command(page, text.count("\n", 0, m.start()) + 1, code))
    return commands


def options_of_shell(script: str) -> set[str]:
    """Return the options of a shell script: the patterns of its `case`."""
    return set(re.findall(r"^ *(?:-\w \| )?(--[a-z]+)\)", text_of(script), re.MULTILINE))


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page, as code hosts generate them."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = sum(1 for other in names if re.fullmatch(rf"{re.escape(name)}(-\d+)?", other))
        names.add(f"{name}-{again}" if again else name)
    return names


def links(page: str) -> list[tuple[str, str]]:
    """Yield (file, anchor) of each link and image of a page within the repository. Either may be empty."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", text)

"""MkDocs hooks of the documentation site (mkdocs.yml names this file).

Pages link to files by their path in the repository, so that the links work on a code host. The READMEs of the recipes
and CONTRIBUTING.md become pages too. mkdocstrings fills the pages of docs/api from the docstrings. A link to another
page is rewritten to its path on the site. A link to any other file becomes the path of that file as text.
"""

import importlib
import importlib.util
import json
import logging
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
GUESTS = {"contributing.md": "CONTRIBUTING.md"} | {
    f"recipes/{folder.name}.md": f"recipes/{folder.name}/README.md"
    for folder in sorted(ROOT.glob("recipes/*"))
    if (folder / "README.md").is_file()
}
"""Pages outside of docs/: path on the site -> path in the repository."""
NOTEBOOKS = {f"notebooks/{path.stem}.md": path for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))}
"""Pages from notebooks: path on the site -> notebook."""
OPTIONS = "<!-- options: written when the site is built -->"
"""Placeholder of the option tables in docs/options.md."""
DATE = re.compile(r"\w+-\d{8}-\d{6}")
"""Name and start time of a run, in the default of run_dir."""
RECIPES = "recipes/index.md"
"""Page from the section on recipes of README.md."""
HAS_MKDOCSTRINGS = importlib.util.find_spec("mkdocstrings") is not None
LOG = logging.getLogger("mkdocs.hooks.docs_site")
DOCSTRINGS = {
    # Decorators have their types on their overloads, which mkdocstrings would report as missing.
    "docstring_options": {"warn_missing_types": False, "warn_unknown_params": False},
    "docstring_section_style": "list",
    "docstring_style": "google",
    "filters": ["!^_"],
    "heading_level": 3,
    "line_length": 100,
    "members_order": "source",
    "merge_init_into_class": True,
    "separate_signature": True,
    "show_root_full_path": True,
    "show_root_heading": True,
    "show_signature_annotations": True,
    "show_source": False,
}
"""Options of mkdocstrings."""
LINK = re.compile(
    r"^```.*?^```|`[^`]+`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
"""Matches code, which is left unchanged, or a link to a file: `!` of an image, text, path and anchor."""


def on_config(config: MkDocsConfig) -> None:
    """Add mkdocstrings, which fills the pages of docs/api from the docstrings without importing the code."""
    if not HAS_MKDOCSTRINGS:
        LOG.info("mkdocstrings is missing, so the pages of docs/api only list names; run: bash scripts/setup.sh docs")
        return
    from mkdocstrings import MkdocstringsPlugin

    plugin = MkdocstringsPlugin()
    plugin.load_config({"handlers": {"python": {"paths": [str(ROOT)], "options": DOCSTRINGS}}}, config.config_file_path)
    config.plugins["mkdocstrings"] = plugin  # MkDocs runs its on_config after this one


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for place, source in GUESTS.items():
        # NOT_IN_NAV: a copy of a recipe has a README too, but the menu does not list it.
        guest = File.generated(config, place, abs_src_path=str(ROOT / source), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(guest)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipes = readme.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    files.append(File.generated(config, RECIPES, content=f"# Recipes\n{recipes}"))
    for place, notebook in NOTEBOOKS.items():
        files.append(File.generated(config, place, content=notebook_page(notebook)))
    return files


def notebook_page(path: Path) -> str:
    """Convert a notebook with its stored outputs to Markdown. Images become data URIs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "markdown":
            source = f"```python\n{source}\n```"
        parts.append(source)
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]).rstrip("\n") + "\n```")
            elif "image/png" in output.get("data", {}):
                data = "".join(output["data"]["image/png"].split())
                parts.append(f'<img alt="Plot of the cell above" src="data:image/png;base64,{data}">')
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page from paths in the repository to paths on the site."""
    place = page.file.src_uri
    sources = {RECIPES: "README.md", **GUESTS}
    source = sources.get(place, f"docs/{place}")
    if not HAS_MKDOCSTRINGS:
        markdown = re.sub(r"^::: (\S+)$", r"`\1`", markdown, flags=re.MULTILINE)
    if place == "options.md":
        markdown = markdown.replace(OPTIONS, option_tables())
    return LINK.sub(lambda link: rewritten(link, PurePosixPath(source).parent, PurePosixPath(place).parent), markdown)


def rewritten(link: re.Match[str], source: PurePosixPath, place: PurePosixPath) -> str:
    """Return one link of a page with the folder `source` in the repository and the folder `place` on the site."""
    image, text, path, anchor = link.groups(default="")
    if not path:
        return link[0]  # code
    target = os.path.normpath(source / path)
    pages = {guest: page for page, guest in GUESTS.items()} | {"README.md": RECIPES}
    pages |= {str(notebook.relative_to(ROOT)): page for page, notebook in NOTEBOOKS.items()}
    if target in pages:
        on_site = pages[target]
    elif target.startswith("docs/"):
        on_site = target.removeprefix("docs/")
    else:
        # The site has no such file.
        if text.strip("`") == target:
            return text
        return f"{text} (`{target}`)"
    return f"{image}[{text}]({os.path.relpath(on_site, place)}{anchor})"


def option_tables() -> str:
    """Return a Markdown table for each group of options, over the schemas of all recipes."""
    # MkDocs loads this file without adding its folder to the path.
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]
    from migration_page import table

    from training.options.described import options_of

    groups: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {}
    for folder in sorted(ROOT.glob("recipes/*")):
        if f"recipes/{folder.name}.md" not in GUESTS:
            continue
        schema = importlib.import_module(f"recipes.{folder.name}.main").COMMAND.schema
        for option in options_of(schema):
            group = option.name.rpartition(".")[0] or "run"
            defaults = groups.setdefault(group, {}).setdefault((option.name, option.kind, option.meaning), {})
            defaults[folder.name] = f"`{DATE.sub('<recipe>-<time>', repr(option.default))}`"
    lines: list[str] = []
    for group in sorted(groups, key=lambda name: (name != "run", name)):
        rows = [
            (f"`{name}`", f"`{kind.replace(' | ', ' or ')}`", *_in_recipes(defaults), meaning)
            for (name, kind, meaning), defaults in groups[group].items()
        ]
        lines += ["", f"## {group}", "", *table(("option", "type", "default", "recipes", "meaning"), rows)]
    return "\n".join(lines)


def _in_recipes(defaults: dict[str, str]) -> tuple[str, str]:
    """Return (default, recipes) of an option. If the defaults differ, they are listed per recipe."""
    values = set(defaults.values())
    default = ", ".join(f"{text} ({name})" for name, text in defaults.items())
    if len(values) == 1:
        default = values.pop()
    return default, ", ".join(defaults)

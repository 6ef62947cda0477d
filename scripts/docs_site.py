"""What the site of the documentation takes from the rest of the repository: mkdocs.yml names this file as its hooks.

Pages are written to be read on a code host, so they link to files by their place in the repository. The READMEs of the
recipes and the rules become pages too, and those of docs/api are filled from the docstrings by mkdocstrings. A link
between two pages leads to the page on the site; one to any other file of the repository, which the site does not have,
becomes the path of that file.
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
"""Pages that lie outside of docs/: their place on the site, and in the repository."""
NOTEBOOKS = {f"notebooks/{path.stem}.md": path for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))}
"""Pages made of the notebooks: their place on the site -> the notebook."""
OPTIONS = "<!-- options: written when the site is built -->"
"""What the tables of options take the place of."""
DATE = re.compile(r"\w+-\d{8}-\d{6}")
"""In the default of run_dir, which is made when a run starts."""
RECIPES = "recipes/index.md"
"""The page made of the README's section on recipes."""
HAS_MKDOCSTRINGS = importlib.util.find_spec("mkdocstrings") is not None
LOG = logging.getLogger("mkdocs.hooks.docs_site")
DOCSTRINGS = {
    # The types of decorators are those of their overloads.
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
"""How docstrings are shown."""
LINK = re.compile(
    r"^```.*?^```|`[^`]+`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
"""Code, which is to be left alone, or a link to a file: `!` of an image, text, path and anchor."""


def on_config(config: MkDocsConfig) -> None:
    """Let mkdocstrings fill the pages of docs/api from the docstrings; it imports nothing and fetches nothing."""
    if not HAS_MKDOCSTRINGS:
        LOG.info("the pages of docs/api name what there is, and no more: bash scripts/setup.sh docs")
        return
    from mkdocstrings import MkdocstringsPlugin

    plugin = MkdocstringsPlugin()
    plugin.load_config({"handlers": {"python": {"paths": [str(ROOT)], "options": DOCSTRINGS}}}, config.config_file_path)
    config.plugins["mkdocstrings"] = plugin  # its own on_config is run after this one


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/. A copy of a recipe, which the menu does not know, is one too."""
    for place, source in GUESTS.items():
        guest = File.generated(config, place, abs_src_path=str(ROOT / source), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(guest)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipes = readme.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    files.append(File.generated(config, RECIPES, content=f"# Recipes\n{recipes}"))
    for place, notebook in NOTEBOOKS.items():
        files.append(File.generated(config, place, content=notebook_page(notebook)))
    return files


def notebook_page(path: Path) -> str:
    """Convert a notebook with its stored outputs to Markdown; pictures become data URIs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]).rstrip("\n") + "\n```")
            elif "image/png" in output.get("data", {}):
                data = "".join(output["data"]["image/png"].split())
                parts.append(f'<img alt="Plot of the cell above" src="data:image/png;base64,{data}">')
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn the links of a page, which are of the repository, into those of the site."""
    place = page.file.src_uri
    source = "README.md" if place == RECIPES else GUESTS.get(place, f"docs/{place}")
    if not HAS_MKDOCSTRINGS:
        markdown = re.sub(r"^::: (\S+)$", r"`\1`", markdown, flags=re.MULTILINE)
    markdown = markdown.replace(OPTIONS, option_tables()) if place == "options.md" else markdown
    return LINK.sub(lambda found: rewritten(found, PurePosixPath(source).parent, PurePosixPath(place).parent), markdown)


def rewritten(found: re.Match[str], source: PurePosixPath, place: PurePosixPath) -> str:
    """One link of a page that lies in `source` in the repository, and in `place` on the site."""
    image, text, path, anchor = found.groups(default="")
    if not path:
        return found[0]
    target = os.path.normpath(source / path)
    pages = {guest: page for page, guest in GUESTS.items()} | {"README.md": RECIPES}
    pages |= {str(notebook.relative_to(ROOT)): page for page, notebook in NOTEBOOKS.items()}
    if target in pages:
        on_site = pages[target]
    elif target.startswith("docs/"):
        on_site = target.removeprefix("docs/")
    else:
        return text if text.strip("`") == target else f"{text} (`{target}`)"
    return f"{image}[{text}]({os.path.relpath(on_site, place)}{anchor})"


def option_tables() -> str:
    """A table for each group of options, of all recipes' schemas."""
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]
    from migration_page import table

    from training.options.schema import options_of

    groups: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {}
    for folder in sorted(ROOT.glob("recipes/*")):
        if f"recipes/{folder.name}.md" not in GUESTS:
            continue
        schema = importlib.import_module(f"recipes.{folder.name}.main").COMMAND.schema
        for option in options_of(schema):
            group = option.name.rpartition(".")[0] or "run"
            found = groups.setdefault(group, {}).setdefault((option.name, option.kind, option.meaning), {})
            found[folder.name] = f"`{DATE.sub('<recipe>-<time>', repr(option.default))}`"
    lines: list[str] = []
    for group in sorted(groups, key=lambda name: (name != "run", name)):
        rows = [
            (f"`{name}`", f"`{kind.replace(' | ', ' or ')}`", *_in_recipes(defaults), meaning)
            for (name, kind, meaning), defaults in groups[group].items()
        ]
        lines += ["", f"## {group}", "", *table(("option", "type", "default", "recipes", "meaning"), rows)]
    return "\n".join(lines)


def _in_recipes(defaults: dict[str, str]) -> tuple[str, str]:
    """An option's default, or each recipe's where they differ, and the recipes that have it."""
    values = set(defaults.values())
    default = values.pop() if len(values) == 1 else ", ".join(f"{text} ({name})" for name, text in defaults.items())
    return default, ", ".join(defaults)

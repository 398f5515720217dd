"""Hooks of the site: documents outside of docs/, generated pages, links and formulas.

mkdocs calls these functions by their names.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import hf_posenc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from build_pages import FACTS, draw, png  # noqa: E402
from forms import forms  # noqa: E402

# The place of the picture of what was measured.
MEASURED = "<!-- picture of the forms -->"
# Documents outside of docs/: their paths in the repository and on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "results.md",
}


def on_config(config: Any) -> Any:
    """List all schemes in the navigation, and write formulas as MathML, which needs no script."""
    schemes = sorted((ROOT / "docs/schemes").glob("[!R]*.md"))
    for entry in config.nav:
        if "Schemes" in entry:
            entry["Schemes"] += [f"schemes/{path.name}" for path in schemes]
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the documents outside of docs/ and the generated pages."""
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for place, write in {"recipes.md": recipes, "command_line.md": commands}.items():
        files.append(File.generated(config, place, content=write()))
    for name in hf_posenc.schemes():
        files.append(File.generated(config, f"schemes/{name}.png", content=draw(name)))
    files.append(File.generated(config, "forms.png", content=png(forms())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Change links from paths in the repository to paths on the site, and show the pictures that the site draws."""
    here = page.file.src_uri
    markdown = markdown.replace(FACTS[1], f"![Picture of the scheme]({Path(here).stem}.png)")
    markdown = markdown.replace(MEASURED, "![Perplexity, copying and recall by length](forms.png)")
    source = next((path for path, place in ELSEWHERE.items() if place == here), f"docs/{here}")

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        place = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if not (ROOT / target).is_file() or (target == place and target not in ELSEWHERE):
            return match[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}"

    return re.sub(r"\]\(([^\s():#]+)", changed, markdown)


def formula(source: str, *_: Any, **__: Any) -> str:
    """Return a TeX formula as MathML, without the commands that the converter does not know."""
    source = re.sub(r"\\[bB]ig", "", source.replace("{aligned}", "{split}"))
    return f'<div class="formula">{convert(source, display="block")}</div>'


def recipes() -> str:
    """Return a page with every built-in recipe."""
    lines = [
        "# Built-in recipes",
        "",
        "Each recipe lists the keys that differ from [the defaults](adaptation.md#what-a-recipe-says).",
        "`hf-posenc recipes show NAME` prints every key.",
        "",
    ]
    for path in sorted((ROOT / "recipes/library").glob("*.yaml")):
        lines += [f"## {path.stem}", "", "```yaml", path.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


def commands() -> str:
    """Return the help of every command."""
    arguments = [
        sys.executable,
        "-m",
        "typer",
        "hf_posenc.cli",
        "utils",
        "docs",
        "--name",
        "hf-posenc",
        "--title",
        "Command line",
    ]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=ROOT).stdout

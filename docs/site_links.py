"""What mkdocs.yml hooks into the building of the site: links that leave docs/ lead to a copy of the file in the site.

The pages link to sources, tests and the README by relative paths, which hold in the repository. For the site each such
file is copied to ``source/``, a folder as a list of its files; a file that is not there is a warning, and so, in a
strict build, the end of it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()((?!\w+:)[^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
logger = logging.getLogger("mkdocs.hooks")


def leaves(page: Path, target: str) -> Path | None:
    """The file of this repository that a link of a page leads to, where the site does not have it by itself."""
    path = (page.parent / target).resolve()
    is_page = path.is_relative_to(DOCS) and path.suffix in (".md", ".png", ".svg")
    return None if is_page or not path.is_relative_to(ROOT) else path


def place(path: Path) -> str:
    """Where a file's copy lies in the site."""
    name = f"source/{path.relative_to(ROOT).as_posix()}"
    return f"{name}/index.txt" if path.is_dir() else f"{name}.txt"


def on_files(files: Any, *, config: Any) -> Any:
    """Add a copy of each file outside of docs/ that a page links to."""
    wanted = {
        path
        for page in DOCS.rglob("*.md")
        for _, target, _ in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
        if (path := leaves(page, target)) is not None
    }
    for path in sorted(wanted):
        if not path.exists():
            continue  # the link is left as it is, and its page's warning ends the build
        content = "\n".join(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else path.read_bytes()
        files.append(File.generated(config, place(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lead the links of a page to these copies."""
    source = DOCS / page.file.src_uri

    def led(match: re.Match[str]) -> str:
        path = leaves(source, match[2])
        if path is None or not path.exists():
            return match[0]
        up = "../" * page.file.src_uri.count("/")
        return f"{match[1]}{up}{place(path)}{')' if match[3].startswith('#') else match[3]}"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else _LINK.sub(led, part) for index, part in enumerate(parts))

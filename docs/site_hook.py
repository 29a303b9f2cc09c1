"""What turns docs/ into a site: its order is that of docs/README.md, and links that leave docs/
lead to copies.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COPIES = "repository"  # the folder of the site for files that are not in docs/
LINK = re.compile(r"\[([^]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
LIST_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index: its headings, and the first link to each page."""
    nav: list[dict[str, object]] = [{"Start": "README.md"}]
    seen = {"README.md"}
    for section in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
        pages = []
        for title, link, anchor in LINK.findall(section):
            page = _uri_of(_target_of("docs/README.md", link))
            if page and page.endswith(".md") and page not in seen and not anchor:
                seen.add(page)
                pages.append({title[0].upper() + title[1:]: page})
        if pages:
            nav.append({section.partition("\n")[0]: pages})
    config.nav = nav
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what those pages link to."""
    waiting = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages()]
    while waiting:
        uri, path = waiting.pop()
        for _, link, _ in LINK.findall(path.read_text()):
            target = _target_of(_source_of(uri), link)
            copy = _uri_of(target)
            if copy and copy.startswith(f"{COPIES}/") and not files.get_file_from_path(copy):
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
                if copy.endswith(".md"):
                    waiting.append((copy, ROOT / target))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Point links to where their files are in the site, and separate lists from what is above, as
    GitHub does.
    """
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        text, link, anchor = match.groups("")
        target = _target_of(_source_of(here), link)
        if (ROOT / target).is_dir():  # the site has no page of a folder
            return text
        uri = _uri_of(target)
        return (
            f"[{text}]({relpath(uri, str(PurePosixPath(here).parent))}{anchor})"
            if uri
            else match[0]
        )

    lines: list[str] = []
    code = False
    before = ""
    for line in markdown.splitlines():
        code ^= line.lstrip().startswith("```")
        is_below_text = (
            before.strip() and not before.startswith((" ", "|")) and not LIST_ITEM.match(before)
        )
        if not code and LIST_ITEM.match(line) and is_below_text:
            lines.append("")
        lines.append(line if code else LINK.sub(moved, line))
        before = line
    return "\n".join(lines)


def _source_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"


def _target_of(source: str, link: str) -> str:
    """Return the path in the repository that a link of a page means; of a folder its README, if
    there is one.
    """
    target = normpath(f"{PurePosixPath(source).parent}/{link}")
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def _uri_of(target: str) -> str | None:
    """Return where the site has a file; None if it is no file of the repository."""
    if not (ROOT / target).is_file():
        return None
    return target.removeprefix("docs/") if target.startswith("docs/") else f"{COPIES}/{target}"

"""What the site takes from outside docs/: pages elsewhere in the repository, and the files that pages link to.

Links are written for the repository, where they work as they are. Here a link to a file outside docs/ brings that file
into the site, a link to a folder becomes a page that lists it, and `nav` in mkdocs.yml names a reference page for each
public module.
"""

import json
import re
import tomllib
from html import unescape
from pathlib import Path
from posixpath import join, normpath, relpath

import _reference
import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks/overview.md",  # The site makes a README the page of the whole section.
    "docs/tutorials/paper-figure.ipynb": "tutorials/paper-figure.md",
    "examples/README.md": "examples/overview.md",
}
"""Pages with another place in the site than in the repository."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

MATH = re.compile(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.DOTALL)
SHORT = re.compile(r"<code>(?=[^<]{1,30}</code>)")
"""Code that stays on one line, such as `--scheme lb-bsp`; it fits on a phone."""
DISPLAY = {"div": "block", "span": "inline"}


def on_config(config):
    """Take the addresses of the site and the repository from the package, once they are known."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if "OWNER" not in urls["Repository"]:
        config.repo_url, config.site_url = urls["Repository"], f"{urls['Documentation']}/"
        config.repo_name = config.repo_url.removeprefix("https://github.com/")
    return config


def on_files(files, config):
    """Add the pages and files outside docs/ that a page, or `nav`, names."""
    for path in _names(config.nav):
        if path.startswith("reference/"):
            files.append(File.generated(config, path, content=_reference.page(Path(path).stem)))
    waiting = [
        (f"docs/{page.src_uri}", page.content_string) for page in files.documentation_pages() if not page.generated_by
    ]
    waiting += [
        (path, None)
        for path in (*PAGES, *_names(config.nav))
        if (ROOT / path).is_file() and files.get_file_from_path(path) is None
    ]
    seen = {path for path, _ in waiting}
    while waiting:
        path, text = waiting.pop()
        if path.endswith(".ipynb"):
            text = _notebook(path)
            files.append(File.generated(config, _place(path), content=text))
        elif text is None:
            text = _listing(path) if (ROOT / path).is_dir() else (ROOT / path).read_text()
            files.append(File.generated(config, _place(path), content=text))
        if _place(path).endswith(".md"):
            beside = path if (ROOT / path).is_dir() else join(path, "..")
            found = {normpath(join(beside, link[2])) for link in LINK.finditer(CODE.sub("", text))}
            new = {each for each in found - seen if (ROOT / each).exists() and not each.startswith("docs/")}
            waiting += [(each, None) for each in sorted(new)]
            seen |= new
    return files


def on_post_build(config):
    """Fail if a page of the reference lacks what can be looked up there."""
    names = [Path(path).stem for path in _names(config.nav) if path.startswith("reference/")]
    page = {name: Path(config.site_dir, "reference", name, "index.html").read_text() for name in names}
    looked_up = [(name, each) for name in names for each in _reference.anchors(name) if each not in names]
    if missing := [each for name, each in looked_up if f' id="{each}"' not in page[name]]:
        raise PluginError(f"the pages of the reference lack {', '.join(missing)}")


def on_page_markdown(markdown, page, config, files):
    """Make links point to where the site has what they name."""
    own = page.file.src_uri
    if own == "index.md":
        page.meta["hide"] = ["navigation"]  # It has one entry; code lines need the width.
    path = next((there for there, here in PAGES.items() if here == own), None)
    path = path or (own if page.file.generated_by else f"docs/{own}")
    page.edit_url = f"{config.repo_url}/edit/main/{path}" if config.repo_url and (ROOT / path).is_file() else None

    def placed(link):
        target = _place(normpath(join(path, "..", link[2])))
        known = files.get_file_from_path(target)
        return (
            link[0] if known is None else link[1] + relpath(target, join("/", own, "..").lstrip("/") or ".") + link[3]
        )

    if own.startswith("schemes/"):  # The reference says what each of them does.
        there = f"../reference/evenstep.schemes.md#evenstep.schemes.{Path(own).stem.replace('-', '_')}"
        markdown = markdown.replace("**Parameters.**", f"**[Parameters]({there}).**")
    ends = [(found.start(), found.end()) for found in CODE.finditer(markdown)]
    inside = lambda link: any(start <= link.start() < end for start, end in ends)  # noqa: E731
    return LINK.sub(lambda link: link[0] if inside(link) else placed(link), markdown)


def on_page_content(html, page, config, files):
    """Turn equations into MathML, which browsers draw by themselves, and mark short code."""
    html = SHORT.sub('<code class="short">', html)
    return MATH.sub(lambda found: latex2mathml.converter.convert(unescape(found[3]), display=DISPLAY[found[1]]), html)


def _place(path):
    """Where the site has this path of the repository."""
    if path in PAGES:
        return PAGES[path]
    place = path.removeprefix("docs/")
    return f"{place}/index.md" if (ROOT / path).is_dir() else place


def _notebook(path):
    """A page with the cells of a notebook, what they show, and a link to the notebook itself."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [
            f"```text\n{''.join(each['text'])}```" if "text" in each else "".join(each["data"]["image/svg+xml"])
            for each in cell.get("outputs", ())
        ]
    parts.insert(1, f'<a href="../{Path(path).name}" download>This page as a notebook</a>')
    return "\n\n".join(parts)


def _listing(folder):
    """A page with the files of a folder, which the repository shows by itself."""
    files = sorted(each.name for each in (ROOT / folder).iterdir() if each.is_file() and not each.name.startswith("."))
    return f"# {folder}\n\n" + "".join(f"* [{name}]({name})\n" for name in files)


def _names(nav):
    for each in nav:
        for name in each.values() if isinstance(each, dict) else [each]:
            yield from _names(name) if isinstance(name, list) else [name]

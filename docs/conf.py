"""Settings of the documentation site, which scripts/build-docs builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "hpcddp"
copyright = "the authors of hpcddp"  # noqa: A001  the name that Sphinx reads
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Defaults as the source has them: the value of os.environ holds what the builder of the site keeps secret.
autodoc_preserve_defaults = True
exclude_patterns = ["_build"]
root_doc = "index"
html_theme = "furo"
html_title = "hpcddp"
smartquotes = False  # "--resume" stays as it is typed
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# The slugs of headings are GitHub's, so a link with an anchor leads to the same place on both.
myst_heading_anchors = 4
# Output of commands, and files with an excerpt, are no programs that a lexer understands.
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]


class LinksOutOfTheSite(SphinxTransform):
    """Show a link to a file of the repository that is no page of the site as text with its path."""

    default_priority = 300

    def apply(self, **_: Any) -> None:  # noqa: ANN401  the signature of docutils
        """Replace the links of one page."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for link in [
            *self.document.findall(addnodes.pending_xref),
            *self.document.findall(addnodes.download_reference),
        ]:
            target = link["reftarget"].partition("#")[0]
            # MyST has taken the suffix off the name of a page.
            for path in ((folder / target).resolve(), (folder / f"{target}.md").resolve()):
                if target and path.exists() and (path.is_dir() or not path.is_relative_to(DOCS)):
                    link.replace_self(_text_and_path(link.astext(), path))
                    break


def _text_and_path(text: str, path: Path) -> list[nodes.Node]:
    """Return the text of a link and the path that it leads to; the path alone if the text is its end."""
    name = str(path.relative_to(ROOT))
    shown = nodes.literal(name, name)
    return [shown] if name.endswith(text.strip("/")) else [nodes.Text(f"{text} ("), shown, nodes.Text(")")]


def list_other_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the pages that no list names: those of a folder to its README, the others to the start page.

    A new page, and a page that scripts/generate-docs writes, is thus part of the site without another edit.
    """
    folder = docname.removesuffix("README")
    if docname != root_doc and not folder.endswith("/"):
        return
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    others = sorted(app.env.found_docs - listed - {root_doc, docname})
    if docname == root_doc:
        folders = tuple(name.removesuffix("README") for name in app.env.found_docs if name.endswith("/README"))
        others = [name for name in others if name.endswith("/README") or not name.startswith(folders)]
    else:
        others = [f"/{name}" for name in others if name.startswith(folder)]
    if others:
        caption = ":caption: More\n" if docname == root_doc else ""
        source[0] += "\n".join(["", "```{toctree}", f"{caption}:hidden:", "", *others, "```", ""])


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    app.add_transform(LinksOutOfTheSite)
    app.connect("source-read", list_other_pages)

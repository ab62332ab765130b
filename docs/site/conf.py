"""The site that `make site` builds from README.md, CONTRIBUTING.md, docs/ and the benchmarks' results.

The source directory is the repository itself, so that links work on the site as they do in a checkout. A
warning fails the build: dead links, dead anchors and missing pictures are all warnings.
"""

from pathlib import Path

from sphinx.application import Sphinx

project = "gpurun"
copyright = "the authors of gpurun"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "benchmarks/RESULTS.md",
    "launcher/tensorboard_plugin/README.md",
]
exclude_patterns = [".venv*", "build", "runs", "tests"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # sample answers hold `…` and notes
html_theme = "furo"
html_title = "gpurun"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
highlight_language = "none"  # most blocks are what a terminal shows

CHAPTERS = {
    "Use it": [
        "getting-started",
        "your-script",
        "your-model",
        "reading-the-report",
        "the-tab",
        "traces",
        "tuning",
        "gate",
        "clusters",
        "selftest",
        "troubleshooting",
    ],
    "Look it up": ["job-file", "commands", "findings", "workloads"],
    "How it works": ["verdicts", "ARCHITECTURE", "security"],
}
"""The pages of docs/ in the order in which the site lists them."""
MORE = {
    "Results": "benchmarks/RESULTS",
    "The tab's routes": "launcher/tensorboard_plugin/README",
    "Contributing": "CONTRIBUTING",
    "Changes": "CHANGELOG",
    "Reporting a weakness": "SECURITY",
}


def setup(app: Sphinx) -> None:
    """What Sphinx calls first."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_index)


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends the site's contents to the README, which has none for those who read it elsewhere."""
    if docname != root_doc:
        return
    for caption, pages in CHAPTERS.items():
        source[0] += contents(caption, [f"docs/{page}" for page in pages])
    source[0] += contents("More", [f"{title} <{page}>" for title, page in MORE.items()])


def contents(caption: str, entries: list[str]) -> str:
    return "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def write_index(app: Sphinx, error: Exception | None) -> None:
    """`index.html`, where browsers and web servers look first."""
    if error is None:
        refresh = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        text = f"<!DOCTYPE html><title>gpurun</title>{refresh}\n"
        (Path(app.outdir) / "index.html").write_text(text)

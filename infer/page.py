"""One HTML page with a report's tables, figures and provenance; it refers to nothing outside itself."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

from infer.sheets import Sheet
from infer.tables import Run

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 92rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.note, figcaption { max-width: 60rem; color: #777; font-size: .9em; }
figure { margin: 1.5rem 0; }
img { max-width: min(100%, 60rem); background: white; }
pre { overflow-x: auto; font-size: .85em; }
"""


def write_page(run: Run, sheets: Sequence[Sheet], figures: Sequence[tuple[str, str]], folder: Path) -> str:
    """The page's text; `figures` are names and captions of SVG files in `folder`."""
    target = html.escape(str(run.info["target"]))
    draft = html.escape(str(run.info["draft"]))
    identity = run.info["identity"]
    left_out = f" ({len(run.unpaired)} more left out: not all methods have answered)" if run.unpaired else ""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Benchmark of {target}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>Benchmark of {target}</h1>",
        f"<p>Drafter {draft}, {html.escape(identity['dtype'])} on {html.escape(identity['device'])}, at most "
        f"{identity['max_new_tokens']} tokens an answer, {len(run.measurements)} generations{left_out}.</p>",
        *(sheet.html() for sheet in sheets),
        "<h2>Figures</h2>",
        *(_figure(folder / f"{name}.svg", caption) for name, caption in figures),
        "<h2>How it was made</h2>",
        f"<pre>{html.escape(json.dumps(run.info, indent=2, ensure_ascii=False))}</pre>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _figure(path: Path, caption: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    text = html.escape(caption, quote=True)
    image = f'<img alt="{text}" src="data:image/svg+xml;base64,{content}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"

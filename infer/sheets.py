"""A table of texts, written as Markdown, LaTeX, CSV or HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{character: "\\" + character for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "τ": r"$\tau$",
        "×": r"$\times$",
        "−": r"$-$",
        "†": r"$\dagger$",
    }
)


@dataclass(frozen=True)
class Sheet:
    """Columns and rows of text; the first column names the row. `note` explains the cells."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n\n{self.note}\n"

    def latex(self) -> str:
        lines = [" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in (self.columns, *self.rows)]
        body = "\n".join(["\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"])
        alignment = "l" + "r" * (len(self.columns) - 1)
        return (
            f"% {self.title}. Needs \\usepackage{{booktabs}}.\n\\begin{{table}}\n\\centering\n"
            f"\\begin{{tabular}}{{{alignment}}}\n{body}\n\\end{{tabular}}\n"
            f"\\caption{{{self.title.translate(_LATEX)}. {self.note.translate(_LATEX)}}}\n\\end{{table}}\n"
        )

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def html(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = "\n".join(line("td", row) for row in self.rows)
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<div class=wide><table>\n<thead>{line('th', self.columns)}</thead>\n"
            f"<tbody>\n{rows}\n</tbody>\n</table></div>\n<p class=note>{html.escape(self.note)}</p>\n"
        )

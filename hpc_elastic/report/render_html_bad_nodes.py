"""The page's part on bad nodes."""

from __future__ import annotations

from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.render_html_markup import Markup, element, table_head
from hpc_elastic.report.render_html_words import shorten

MOST = 50


def bad_nodes_part(history: RunHistory) -> Markup:
    """Who they are, why, and whether the next attempt does without them."""
    if not history.bad_nodes:
        return Markup("")
    rows = [
        element(
            "tr",
            element("td", shorten(score.node, 80)),
            element("td", f"{score.score:g}", class_="n"),
            element("td", "left out" if score.node in history.excluded else "stays", class_="w"),
            element("td", shorten(score.why, 300), class_="wide"),
        )
        for score in history.bad_nodes[:MOST]
    ]
    more = len(history.bad_nodes) - len(rows)
    return element(
        "section",
        element("h2", "Bad nodes"),
        element(
            "div",
            element("table", table_head("node", "score", "later attempts", "why", numbers=("score",)), *rows),
            class_="scroll",
        ),
        element("p", f"{more} more are in report.json.", class_="muted") if more > 0 else "",
        class_="card",
        aria_label="Bad nodes",
    )

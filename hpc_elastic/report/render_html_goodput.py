"""The page's part on goodput: how much of the time was training, and what each interruption cost."""

from __future__ import annotations

from hpc_elastic.report.render_html_markup import Markup, element, table_head
from hpc_elastic.report.render_html_words import duration, shorten
from hpc_elastic.report.timeline_goodput import Goodput

COSTS = 12


def goodput_part(goodput: Goodput) -> Markup:
    """How much of the time was training, and where the rest went."""
    share = goodput.share
    if share is None:
        return Markup("")
    parts = [
        ("training", "all workers ran", goodput.training),
        ("starting", "until they first ran", goodput.starting),
        ("interrupted", "after failures, until all ran again", goodput.interrupted),
        ("queued", "between attempts", goodput.queued),
        ("ending", "ending", goodput.ending),
    ]
    parts = [part for part in parts if part[2] > 0]
    bar = [element("i", class_=f"f-{key}", style=f"width:{100 * s / goodput.wall:.2f}%") for key, _, s in parts]
    told = [
        element("li", element("i", class_=f"f-{key}"), f"{words}: {duration(s)} ({100 * s / goodput.wall:.1f} %)")
        for key, words, s in parts
    ]
    costs = sorted(goodput.costs, key=lambda cost: -cost.seconds)
    rows = [
        element(
            "tr",
            element("td", _lasted(cost.seconds, cost.queued, cost.recovered), class_="n"),
            element("td", f"attempt {cost.attempt}, round {cost.round}", class_="w"),
            element("td", shorten(cost.what, 300), class_="wide"),
        )
        for cost in costs[:COSTS]
    ]
    table: str = ""
    if rows:
        title = "What each interruption cost"
        if len(costs) > len(rows):
            title += f" (the {len(rows)} dearest of {len(costs)})"
        head = table_head("cost", "where", "what", numbers=("cost",))
        table = element(
            "details",
            element("summary", title),
            element("div", element("table", head, *rows), class_="scroll"),
            open=len(costs) <= COSTS,
        )
    return element(
        "section",
        element("h2", "Goodput"),
        element(
            "div",
            element("div", f"{100 * share:.1f} %", class_="number"),
            element("div", *bar, class_="share", aria_hidden="true"),
            element("ul", *told, class_="parts"),
            class_="goodput",
        ),
        element(
            "p",
            f"of {duration(goodput.wall)} of wall time all workers of the round were running. "
            "Steps that were computed again after a restart are not taken off.",
            class_="muted",
        ),
        table,
        class_="card",
        aria_label="Goodput",
    )


def _lasted(seconds: float, queued: float, recovered: bool) -> str:
    more = [f"{duration(queued)} in the queue"] if queued > 0.05 else []
    more += [] if recovered else ["to the end"]
    return duration(seconds) + (f" ({', '.join(more)})" if more else "")

"""The text report's part on bad nodes."""

from __future__ import annotations

from hpc_elastic.node_score import NodeScore
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.render_text_words import clean_line, plural, split_words


def bad_node_lines(history: RunHistory, width: int, *, cap: int | None) -> list[str]:
    """The worst first, each in as many lines as its reason needs, three at most.

    Args:
        history: The run.
        width: Of a line.
        cap: At most so many; None: all.
    """
    shown = history.bad_nodes[:cap]
    lines = []
    for index, score in enumerate(shown):
        head = "Bad nodes:" if index == 0 else "          "
        lines += split_words(f"{head} {describe_bad_node(history, score)}", width)
    if (more := len(history.bad_nodes) - len(shown)) > 0:
        lines.append(f"           and {plural(more, 'more')} (--all shows them)")
    return lines


def describe_bad_node(history: RunHistory, score: NodeScore) -> str:
    """``n3 (node n3 was lost): left out of later attempts``."""
    done = ": left out of later attempts" if score.node in history.excluded else ""
    return f"{score.node} ({clean_line(score.why)}){done}"

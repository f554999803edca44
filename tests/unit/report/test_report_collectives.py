"""What torch's flight recorder shows, in words: in the text, in report.json and on the page."""

from __future__ import annotations

from html import unescape
from pathlib import Path

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_json import render_json
from hpc_elastic.report.render_text import render_text
from tests.browser.sample_runs import collectives_run

SIZE = "(4.0 MiB bf16)"
WHYS = {
    0: f"it called all_reduce #40 of group default_pg {SIZE} where rank 1 called broadcast",
    1: f"it called broadcast #40 of group default_pg where rank 0 called all_reduce {SIZE}",
    2: f"it never entered all_reduce #40 of group default_pg {SIZE}, which ranks 0-1 wait in; "
    "its last there was all_reduce #39",
}


def test_every_report_says_what_each_suspect_entered_and_what_it_did_not(tmp_path: Path) -> None:
    history = collect_run(collectives_run(tmp_path / "run").root)
    suspects = render_json(Document(history))["verdict"]["suspects"]
    assert {one["rank"]: one["why"] for one in suspects} == WHYS
    text, page = " ".join(render_text(Document(history)).split()), unescape(render_html(Document(history)))
    for rank, why in WHYS.items():
        assert f"rank {rank} (n1): {why}" in text
        assert f"rank {rank} (n1): {why}" in page

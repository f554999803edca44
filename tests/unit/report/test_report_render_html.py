from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpc_elastic.report import render_html_chart
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.render_html import CHEAP_NODE_ROUNDS, ENTRIES, STYLE, render_html
from hpc_elastic.report.write import write_report
from tests.browser.sample_runs import HOSTILE, hostile_run, hung_run, many_nodes_run, requeued_run
from tests.rigs.run_builder import RunBuilder, make_failure


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directories of these tests are large, and need to outlive nothing."""
    monkeypatch.setattr("os.fdatasync", lambda fd: None)
    monkeypatch.setattr("os.fsync", lambda fd: None)


class Page(HTMLParser):
    """Elements and attributes as a parser sees them, which checks that they nest."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in ("meta", "input", "wbr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [a for name, a in self.elements if name == tag and all(a.get(k) == v for k, v in wanted.items())]


def page_of(builder: RunBuilder) -> Page:
    return Page(render_html(Document(collect_run(builder.root))))


def test_what_is_not_known_of_the_clocks_is_said(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=3, compares_clocks=False).begin(at=5)
    assert "These were not compared (no packets passed between the agents)" in page_of(builder).text
    builder = RunBuilder(tmp_path / "other", nodes=3)
    builder.attempt(0)
    builder.round(0, 0, at=5, ahead={1: 3600.0})
    builder.fail(make_failure(1, at=3610.0, exception="ValueError: bad"))
    page = page_of(builder)
    assert "The clock of n2 is 1 h 00 min ahead of the others' (measured, to within 1 ms)" in page.text
    assert "(n2's clock, 3600.0 s ahead of n1's)" in page.text
    assert "n3 is" not in page.text
    builder = RunBuilder(tmp_path / "shifted", nodes=3)
    builder.attempt(0)
    for node in range(3):
        builder.event(0, "agent", node, 5 + 3600 * (node == 1), "round_final", round=0, ranks=[node], world_size=3)
    assert "The clock of n2 is 1 h 00 min ahead of the others' (concluded" in page_of(builder).text


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(requeued_run(tmp_path / "run"))
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert str(policy["content"]).startswith("default-src 'none'; ")
    assert "script" not in str(policy["content"])
    assert not {name for name, _ in page.elements} & {"script", "link", "img", "iframe", "object", "base", "form"}
    for name, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], name
        if name == "a":  # a file beside it, which a reader may open
            assert str(attributes["href"]).startswith("../attempt-00")
            continue
        for key in ("href", "src", "xlink:href"):
            assert str(attributes.get(key) or "#").startswith("#")
    assert "url(" not in render_html(Document(collect_run(tmp_path / "run")))
    assert "@import" not in render_html(Document(collect_run(tmp_path / "run")))


def test_every_mark_leads_to_its_failure(tmp_path: Path) -> None:
    page = page_of(requeued_run(tmp_path / "run"))
    windows = {attributes["id"]: attributes for name, attributes in page.elements if "popover" in attributes}
    targets = [a for _, a in page.elements if a.get("popovertarget")]
    assert {a["popovertarget"] for a in targets} == set(windows)
    marks = [a for a in targets if str(a.get("class")).startswith("m ")]
    # By nodes: 3 in round 0, n4, 3 in round 2. By ranks: two each of n4 and of the nodes that lost their peer.
    assert len(marks) == (3 + 1 + 3) + (5 + 2 + 5)
    for mark in marks:
        assert re.match(r"(n\d|rank \d|\d nodes): .+ at \d\d:\d\d:\d\d: .+", str(mark["aria-label"])), mark
    for window in windows.values():
        assert window["role"] == "dialog"
        assert page.all("h3", id=str(window["aria-labelledby"]))


@pytest.mark.parametrize("make", [requeued_run, hung_run, hostile_run])
def test_ids_are_unique_and_rows_speak(tmp_path: Path, make: object) -> None:
    page = page_of(make(tmp_path / "run"))  # type: ignore[operator]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    rows = page.all("svg", role="img")
    assert rows
    assert re.search(r"n1: .*processes up [\d.]+ (s|min|h)", page.text)


def test_nothing_hostile_becomes_markup(tmp_path: Path) -> None:
    builder = hostile_run(tmp_path / "\"'><img src=x onerror=alert(1)>")
    source = render_html(Document(collect_run(builder.root)))
    page = Page(source)
    assert not {name for name, _ in page.elements} & {"script", "img"}
    assert not [a for _, a in page.elements if "onerror" in a or "src" in a]
    assert HOSTILE in page.text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert source.count("<style") == 1


def test_deception_is_shown() -> None:
    name = "abc\u202efdp.exe\u200b a\ud800b a\x00\x1b[31mb"
    source = render_html(Document(RunHistory(run_id="r", run_dir="/r", name=name)))
    assert "<h1>abc\ufffdfdp.exe\ufffd a?b ab</h1>" in source
    source.encode()
    assert "has no attempt yet" in Page(source).text


def test_512_nodes_are_small_and_fold(tmp_path: Path) -> None:
    source = render_html(Document(collect_run(many_nodes_run(tmp_path / "run", rounds=3).root)))
    assert len(source.encode()) < 2_000_000
    page = Page(source)
    alike = page.all("input", id="v-alike")
    assert [("checked" in a) for a in alike] == [True]
    assert "508 nodes" in page.text
    assert len(page.all("ol")) == 3
    assert sum(1 for a in page.all("li", **{"class": "row"})) == 5 + 512 + 512
    assert "are drawn as thin lines" in page.text  # of so many marks not all can be pressed, and it is said


def test_limits_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=40)
    builder.attempt(0)
    for index in range(9):
        builder.round(0, index, at=100 * index + 1)
        for rank in range(40):
            name = "Kind" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"[rank] + "Error"
            text = f"{name}: odd\n" + "word " * 400
            builder.fail(make_failure(rank, at=100 * index + 50 + rank, exception=text, round_index=index))
    history = collect_run(builder.root)
    for name, limit in {"ROWS": 10, "PICTURE_BYTES": 2000, "BUTTONS": 5}.items():
        monkeypatch.setattr(render_html_chart, name, limit)
    page = Page(render_html(Document(history)))
    for words in (
        "30 of 40 ranks have no row of their own",
        "nodes are not drawn: the page would grow too large",
        f"{360 - ENTRIES} of 360 kinds of failures are left out here",
    ):
        assert words in page.text, words
    assert len(render_html(Document(history)).encode()) < 2_000_000


def test_long_tracebacks_are_cut_at_their_beginning(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=1).begin()
    builder.fail(make_failure(0, at=5, exception="ValueError: the cause\n" + "more\n" * 9000 + "the end"))
    page = page_of(builder)
    assert "characters above" in page.text
    assert "the end" in page.text
    assert len(page.text) < 60_000


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    """WCAG 2: 4.5 for words, 3 for what else has to be seen."""
    roots = re.findall(r":root\{(.*?)\}", STYLE.read_text(), re.DOTALL)
    light, dark = (dict(re.findall(r"--(\w+):(#\w{6})", root)) for root in roots)
    assert set(light) == set(dark)
    palette = (light, dark)[scheme]
    for name in ("text", "muted", "link", "good", "bad", "warn"):
        for behind in ("page", "card", "code"):
            assert contrast(palette[name], palette[behind]) >= 4.5, (name, behind)
    for name in ("running", "starting", "stopping", "rendezvous", "spare", "launching", "done", "lost"):
        assert contrast(palette[name], palette["card"]) >= 3, name
    for name in ("cause", "hang", "symptom", "stopped", "round", "attempt"):
        assert contrast(palette[name], palette["card"]) >= 3, name


def test_a_page_that_takes_long_is_not_made_by_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = requeued_run(tmp_path / "run")
    assert CHEAP_NODE_ROUNDS > 512 * 30
    monkeypatch.setattr("hpc_elastic.report.write.CHEAP_NODE_ROUNDS", 14)
    assert write_report(builder.root, attempt=1, outcome="succeeded", exit_code=0).problems == ()
    assert not builder.paths.attempt(1).report_html.exists()
    monkeypatch.setattr("hpc_elastic.report.write.CHEAP_NODE_ROUNDS", 15)
    write_report(builder.root, attempt=1, outcome="succeeded", exit_code=0)
    assert "succeeded" in builder.paths.attempt(1).report_html.read_text()


def test_a_page_that_fails_hides_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("no page")

    builder = requeued_run(tmp_path / "run")
    monkeypatch.setattr("hpc_elastic.report.write.render_html", fail)
    result = write_report(builder.root, attempt=1, outcome="succeeded", exit_code=0)
    assert [problem.rpartition(": ")[2] for problem in result.problems] == ["no page"]
    assert builder.paths.attempt(1).report_text.exists()


def test_a_hundred_rounds_draw_no_thicket_of_lines(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=2)
    builder.attempt(0)
    for index in range(100):
        builder.round(0, index, at=10 + 60 * index)
        builder.fail(make_failure(index % 2, at=60 + 60 * index, exception="ValueError: bad", round_index=index))
        builder.stopped(0, index, at=61 + 60 * index)
    page = render_html(Document(collect_run(builder.root)))
    lines = page.partition('class="lines"')[2].partition("</div>")[0]
    assert 30 <= lines.count("<i") <= 52

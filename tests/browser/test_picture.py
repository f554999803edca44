"""README's picture: committed, small, of the size that its script takes, and one that the script still can take."""

from __future__ import annotations

import struct
from pathlib import Path

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from tests.browser import picture
from tests.browser.chromium import Browser
from tests.browser.sample_runs import requeued_run


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_picture_that_is_committed() -> None:
    readme = (picture.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"]({picture.PICTURE.relative_to(picture.ROOT)})" in readme
    png = picture.PICTURE.read_bytes()
    assert len(png) < picture.LARGEST
    assert size(png) == (picture.WIDTH, picture.HEIGHT)


def test_a_picture_is_taken_of_a_page(browser: Browser, tmp_path: Path) -> None:
    requeued_run(tmp_path / "run")
    html = render_html(Document(collect_run(tmp_path / "run")))
    assert size(picture.take(browser, html, tmp_path)) == (picture.WIDTH, picture.HEIGHT)

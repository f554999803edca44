"""The options about health checks and figures: what reaches run.json, and what is refused by name."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import parse
from hpc_elastic.options.worker_options import OPTIONS, REFUSED, worker_fields


def fields(*argv: str) -> dict[str, object]:
    return worker_fields(parse(argv, OPTIONS, refused=REFUSED, env={}))


def test_what_was_asked_for_reaches_the_run() -> None:
    given = fields(
        "--health-checks", "default,tmp=10G", "--health-check", "/a/b.sh -x", "--health-check-timeout", "5",
        "--metrics", "jsonl:/var/log/{host}.jsonl",
    )  # fmt: skip
    assert given["health_checks"] == "default,tmp=10G"
    assert given["health_check"] == "/a/b.sh -x"
    assert given["health_check_timeout"] == 5.0
    assert given["metrics"] == "jsonl:/var/log/{host}.jsonl"
    assert not {"health_checks", "health_check", "health_check_timeout", "metrics"} & set(fields())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--health-checks", "disk"), "--health-checks disk: 'disk' is no check"),
        (("--health-check", "'open"), "--health-check 'open"),
        (("--health-check-timeout", "0"), "--health-check-timeout 0"),
        (("--metrics", "statsd:host"), "--metrics 'statsd:host': give jsonl:FILE"),
    ],
)
def test_what_cannot_be_right_is_named(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fields(*argv)
    assert words in str(caught.value)

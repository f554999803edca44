"""A script as a function: what it sees, how it may end, and what becomes of a notice."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.submission import Script
from hpc_elastic.submission.call import Call, function_name
from hpc_elastic.submission.worker import next_call
from hpc_elastic.worker_api import heartbeat


def script(folder: Path, text: str) -> Script:
    path = folder / "train.py"
    path.write_text(text)
    return Script(path)


def test_it_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("value = 7\n")
    before = list(sys.argv), list(sys.path)
    text = (
        "import sys, beside_the_script\nfrom pathlib import Path\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()\n"
        "Path(__file__).with_name('said').write_text(f'{sys.argv} {beside_the_script.value} {sys.path[0]}')\n"
    )
    found = script(tmp_path, text)
    try:
        assert found("--epochs", 90, tmp_path) is None  # type: ignore[func-returns-value]
    finally:
        sys.modules.pop("beside_the_script", None)
    argv = [str(tmp_path / "train.py"), "--epochs", "90", str(tmp_path)]
    assert (tmp_path / "said").read_text() == f"{argv} 7 {tmp_path}"
    assert (sys.argv, sys.path) == before


def test_its_path_holds_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = Script("train.py")
    assert found.path == str(tmp_path / "train.py")
    assert pickle.loads(pickle.dumps(found)).path == found.path
    assert function_name(found) == "train.py"
    with pytest.raises(UsageError, match=r"there is no script \S+/trian.py"):
        Script("trian.py")


@pytest.mark.parametrize("code", ["", "0", "None", "3", "'no data'"])
def test_a_script_that_ends_itself_has_succeeded_or_its_exit_code_goes_out(tmp_path: Path, code: str) -> None:
    run = script(tmp_path, f"import sys\nsys.exit({code})\n")
    if code in ("", "0", "None"):
        run()
        return
    with pytest.raises(SystemExit) as caught:
        run()
    assert repr(caught.value.code) == code


class LeaveError(SystemExit):
    """As a notice's."""


def test_what_leaves_because_of_a_notice_is_not_taken_for_the_scripts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "on_notice", lambda: (_ for _ in ()).throw(LeaveError(0)), raising=False)
    with pytest.raises(LeaveError):
        script(tmp_path, "import os\nos.on_notice()\n")()


def test_it_begins_anew_after_a_notice_unless_it_asks_for_notices_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat.reporter, "asks_for_notices", False)
    call = Call(script(tmp_path, ""), ("--epochs", 90))
    assert call.checkpoint is not None
    again = next_call(call)
    assert again is not None
    assert (again.function, again.args, dict(again.kwargs)) == (call.function, ("--epochs", 90), {})
    monkeypatch.setattr(heartbeat.reporter, "asks_for_notices", True)
    assert call.checkpoint is None

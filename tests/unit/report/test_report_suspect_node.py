from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.failures.evidence import describe_failure, read_failure, write_evidence
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.wording import describe_class

DATA = Path(__file__).resolve().parents[2] / "data" / "failures"


def test_a_node_whose_hardware_spoke_is_called_suspect(tmp_path: Path) -> None:
    facts = WorkerFailure(
        attempt=0, round=0, host="n07", node=6, local_rank=0, global_rank=6, pid=9, exitcode=1, ended_ns=1
    )
    error_file = tmp_path / "error.json"
    failure = describe_failure(facts=facts, error_file=error_file, stderr_log=DATA / "cuda-ecc.txt")
    assert write_evidence(failure, error_file) == ""
    again = read_failure(error_file, facts=facts)
    assert again is not None
    assert describe_class(again).endswith("; n07 is suspect")
    assert "(ECC) error" in describe_class(again)
    assert "suspect" not in describe_class(replace(again, node_suspect=False))

"""What `headwater verify` prints of a comparison."""

from __future__ import annotations

import pytest

from headwater.cli.verify import _print
from headwater.spark.verification import Comparison, VBucketComparison, Verdict

DIGEST = "0123456789abcdef" * 4


def compared(*verdicts: Verdict) -> Comparison:
    return Comparison(
        vbuckets=tuple(
            VBucketComparison(
                vbucket=number,
                verdict=verdict,
                bucket_seqno=12,
                table_seqno=12,
                bucket_documents=3,
                table_documents=2,
                bucket_digest=DIGEST,
                table_digest=DIGEST[::-1],
            )
            for number, verdict in enumerate(verdicts)
        ),
        collections=("_default._default",),
    )


def printed(capsys: pytest.CaptureFixture[str], *verdicts: Verdict) -> list[str]:
    _print(compared(*verdicts), show_all=False)
    return capsys.readouterr().out.splitlines()


def test_all_numbers_are_written_alike(capsys: pytest.CaptureFixture[str]) -> None:
    equal = printed(capsys, *[Verdict.EQUAL] * 1024)
    assert equal == ["1,024 vbuckets: 1,024 equal; 3,072 documents in 1 collection"]
    *_, more, total = printed(capsys, *[Verdict.DIFFERS] * 1024)
    assert more == "and 1,004 more; --all shows them"
    assert total.startswith("1,024 vbuckets: 1,024 differs")


def test_the_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed(capsys, Verdict.EQUAL, Verdict.DIFFERS)
    cells = [cell.strip() for cell in lines[3].strip("│").split("│")]
    assert cells == ["1", "differs", "12", "12", "3", "2", DIGEST[:12], DIGEST[::-1][:12]]

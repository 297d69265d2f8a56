"""`headwater verify` against a model of the bucket in place of a node: all of it but the reading."""

from __future__ import annotations

from headwater.lake.lake import Lake
from headwater.lake.verify import LakeChecks
from headwater.lake.verify_group import Counts, GroupReport, ScannedChanges, judge_group
from headwater.lake.verify_scan import Findings
from support.bucket_model import ModelBucket, batches

BATCH_ROWS = 3


def verify_model(lake: Lake, bucket: ModelBucket) -> GroupReport:
    """What is found in all groups. The places of the tables must be in the history of the model."""
    counts, findings = dict[str, Counts](), Findings()
    for group in range(lake.facts.groups):
        check = LakeChecks(lake).of_group(group, lambda vbucket, place: False)
        reading = check.reading()
        for vbucket in check.vbuckets:
            rows = [bucket.row(vbucket, change, 0) for change in bucket.vbuckets[vbucket].changes]
            for batch in batches(rows, BATCH_ROWS):
                reading.add(batch)
        report = judge_group(check, reading, ScannedChanges.read(check))
        findings.merge(report.findings)
        for name, part in report.counts.items():
            counts.setdefault(name, Counts()).add(part)
    return GroupReport(counts, findings)

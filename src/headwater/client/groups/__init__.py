"""Consumer groups: several processes share the vbuckets of a bucket.

* `StaticMember(2, of=5)`: by numbers that the processes are started with.
* `LeaseGroup("name")`: by leases in a document of the bucket, so that members may come, go and die.
"""

from headwater.client.groups.group_document import KvDocument, group_bucket
from headwater.client.groups.lease_group import LeaseGroup
from headwater.client.groups.membership import (
    Assignment,
    AssignmentChange,
    DocumentPort,
    GroupBucket,
    Membership,
    StaticMember,
    StoredDocument,
    assignments,
    joined,
    vbuckets_of_member,
)

__all__ = [
    "Assignment",
    "AssignmentChange",
    "DocumentPort",
    "GroupBucket",
    "KvDocument",
    "LeaseGroup",
    "Membership",
    "StaticMember",
    "StoredDocument",
    "assignments",
    "group_bucket",
    "joined",
    "vbuckets_of_member",
]

"""Which block leaves first: the protocol, and the policies that come with kvstore.

docs/policies.md says when to choose which.
"""

from kvstore.policy.base import Policy, Rank, Rung
from kvstore.policy.credit import CreditPolicy
from kvstore.policy.lru import LruNPolicy, LruPolicy, LruRPolicy

#: Every policy by the name that it has in a configuration and at the command line.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LruPolicy, LruRPolicy, LruNPolicy, CreditPolicy)
}

__all__ = [
    "POLICIES",
    "CreditPolicy",
    "LruNPolicy",
    "LruPolicy",
    "LruRPolicy",
    "Policy",
    "Rank",
    "Rung",
]

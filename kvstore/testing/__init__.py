"""What others need to test parts of their own against kvstore's contracts. Needs pytest.

from kvstore.testing.tier_contract import TierContract
from kvstore.testing.policy_contract import PolicyContract
"""

from __future__ import annotations

import pytest

# Before the contracts are imported, so that a failed assertion shows its values.
pytest.register_assert_rewrite(
    "kvstore.testing.policy_contract", "kvstore.testing.residents", "kvstore.testing.tier_contract"
)

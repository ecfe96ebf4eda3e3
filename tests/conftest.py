"""How the tests run: how hard hypothesis tries, and what is skipped where there is no GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: the time of one example says more about the machine's other work than about us.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,  # a change is judged on itself; the nightly run looks for new examples
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("KVSTORE_HYPOTHESIS_PROFILE", "dev"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and "long" not in str(item.config.option.markexpr):
        pytest.skip("runs with -m long")
    if item.get_closest_marker("gpu") is not None:
        # Here and not at import: a run without GPU tests shall not pay for loading torch.
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")

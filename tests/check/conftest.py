import secrets

import pytest


@pytest.fixture
def fresh() -> int:
    """A seed that nobody has seen before: sizes and numbers are new in every run. A failed test shows it."""
    return secrets.randbits(31)

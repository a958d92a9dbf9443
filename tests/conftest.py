import random

import pytest
import torch
from hypothesis import HealthCheck, settings

# Drawn afresh on every run; a failure prints what to replay.
settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seed(request):
    """A new seed for each test; shown when it fails."""
    value = random.SystemRandom().randrange(2**31)
    torch.manual_seed(value)
    print(f"torch.manual_seed({value})")


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

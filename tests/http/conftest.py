"""One server per test module; after every test nothing may be left of any request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from overlap_serve.config import FakeModel
from tests.http_rig import HttpRig, http_rig

# What a module may override by a constant of the same name.
FAKE = FakeModel(base_ms=1.0, max_model_len=1024)
CONFIG: dict[str, Any] = {}


@pytest.fixture(scope="module")
def module_rig(request: pytest.FixtureRequest) -> Iterator[HttpRig]:
    fake = vars(request.module).get("FAKE", FAKE)
    config = vars(request.module).get("CONFIG", CONFIG)
    with http_rig(fake, **config) as rig:
        yield rig


@pytest.fixture
def rig(module_rig: HttpRig) -> Iterator[HttpRig]:
    yield module_rig
    module_rig.assert_at_rest()

"""A store in which commands keep what they measure."""

from collections.abc import Iterator

import pytest

from tests.s3 import S3Server


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server

"""One round of tests/chaos.py for each chapter, with fixed seeds."""

import random

import pytest
from chaos import CHAPTERS, Chaos, prepare

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_nothing_is_lost(prepared, tmp_path, chapter):
    prepared.folder = tmp_path
    print(Chaos(prepared, chapter, "round", random.Random(f"{chapter} 0")).run())

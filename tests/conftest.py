"""Profiles and guards for all tests."""

import os
import shutil

import hypothesis
import pytest

from core.config import prepare_native_libraries

# As in every process of a cluster: the bit equalities of the tests are theirs.
prepare_native_libraries()
# Foreign clients would ask the hub about the names of local directories, and where it cannot be reached, for a minute.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several of these processes share the cores; clusters set the threads of their workers themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def needs_tool():
    """Return a finder of programs: a missing one skips the test with its name, and fails it in CI, which installs all."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            reason = f"{name} is not installed; .ci/run installs it"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        return path

    return find

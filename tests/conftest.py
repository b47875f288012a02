"""Profiles and guards for all tests."""

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")

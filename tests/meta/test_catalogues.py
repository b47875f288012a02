"""The catalogue pages say what the code says (style rule 31)."""

import pytest

from deploy.catalogue import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_catalogue_page_is_what_the_code_declares(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run `python -m deploy.catalogue`"


def test_every_setting_has_a_name_with_its_section():
    assert "| `engine.num_pages` | `512` |" in PAGES["config.md"]()

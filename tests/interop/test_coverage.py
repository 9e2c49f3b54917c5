"""The table of docs/hugging_face.md is that of the registry, and each family of it is tested."""

import runpy

from page_blocks import ROOT

from jaxformer.interop.architectures import HF_FAMILIES

FAMILIES = runpy.run_path(str(ROOT / "docs/hooks/families.py"))


def test_the_table_of_the_page_is_that_of_the_registry():
    page = FAMILIES["PAGE"].read_text(encoding="utf-8")
    assert page == FAMILIES["with_table"](page), "run python docs/hooks/families.py"


def test_a_family_has_models_that_test_it_and_says_what_it_covers():
    page = FAMILIES["PAGE"].read_text(encoding="utf-8")
    for family in HF_FAMILIES:
        assert FAMILIES["variants_of"](family), family.model_type
        assert FAMILIES["covers_of"](family, page), family.model_type

"""The table of Hugging Face families in docs/hugging_face.md, from the registry and its tests.

`python docs/hooks/families.py` writes the table again, between its marks in the page. What of a
family is supported beyond the basic model stands in the page alone, and is kept.
tests/interop/test_coverage.py fails where the two differ, or where that is empty.
"""

import sys
from pathlib import Path
from typing import Any

from jaxformer.interop.architectures import HF_FAMILIES
from jaxformer.interop.experts import DenseLayers
from jaxformer.interop.family import Family
from jaxformer.interop.fields import Constant

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hugging_face.md"
START, END = "<!-- families: python docs/hooks/families.py -->\n", "<!-- end of families -->\n"
# What packages of the index ship, read and compared by tests/real, by the class that it is.
SHIPPED = {"LlamaForCausalLM": "SmolLM2-135M-Instruct", "BertModel": "all-MiniLM-L6-v2"}
HEADER = (
    "| family | kind | read and written | supported beyond the basic model | tests (models) |"
    " real weights |\n"
    "|---|---|---|---|---|---|\n"
)


def variants_of(family: Family) -> list[str]:
    """The names of the models of tests/pretrained_variants.py that test a family."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from pretrained_variants import VARIANTS
    finally:
        sys.path.pop(0)
    return [name for name, (made, _) in VARIANTS.items() if made.__name__ in family.architectures]


def kind_of(family: Family) -> str:
    """The kind of model that a family is, by the fields that are the same in all its models."""
    constants: dict[str, Any] = {}
    for row in family.fields:
        constants |= row.fields if isinstance(row, Constant) else {}
    kind = str(constants.get("family", "decoder")).replace("_", "-")
    has_experts = constants.get("feed_forward") == "experts"
    if has_experts or any(isinstance(row, DenseLayers) for row in family.fields):
        return f"{kind} with experts"
    return kind


def row_of(family: Family, page: str) -> str:
    names = ", ".join(f"`{name}`" for name in family.architectures)
    read_only = ", ".join(f"`{name}`" for name in family.bases)
    names += f"; read as these: {read_only}" if read_only else ""
    variants = variants_of(family)
    tests = f"`{variants[0]}` ({len(variants)})"
    shipped = ", ".join(SHIPPED[name] for name in family.architectures if name in SHIPPED)
    covers = covers_of(family, page)
    cells = [f"`{family.model_type}`", kind_of(family), names, covers, tests, shipped]
    return f"| {' | '.join(cells)} |\n"


def covers_of(family: Family, page: str) -> str:
    """What the page says is supported of a family; empty where it does not have the family."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if cells[1:3] == [f"`{family.model_type}`", kind_of(family)]:
            return cells[4]
    return ""


def table(page: str) -> str:
    """The table with a row for each family, in the order of the registry."""
    return HEADER + "".join(row_of(family, page) for family in HF_FAMILIES)


def with_table(page: str) -> str:
    """The page with the table of this code between the marks. Raises ValueError without marks."""
    before, after = page.index(START) + len(START), page.index(END)
    return f"{page[:before]}\n{table(page)}\n{page[after:]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The optimizers that tests try, by what they are called there: every row, and settings of rows."""

from jaxformer.training.optimizers.rule_table import OPTIMIZERS

VARIANTS = {name: {"name": name} for name in OPTIMIZERS} | {
    "muon by heads": {"name": "muon", "muon_unit": "head"},
    "normuon by heads": {"name": "normuon", "muon_unit": "head"},
    "cautious": {"name": "adamw", "cautious": True},
    "bfloat16": {"name": "adamw", "moments": "bfloat16"},
    "int8": {"name": "adamw", "moments": "int8"},
    "sophia in int8": {"name": "sophia", "moments": "int8"},
    "soap in int8": {"name": "soap", "moments": "int8"},
}

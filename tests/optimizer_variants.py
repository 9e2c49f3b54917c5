"""The optimizers that tests of states try, of each shape of state: moments alone, whole or of fewer
bits, by heads, factors, averages of weights."""

VARIANTS = {
    "adamw": {"name": "adamw"},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "normuon by heads": {"name": "normuon", "muon_unit": "head"},
    "soap": {"name": "soap"},
    "schedule_free": {"name": "schedule_free"},
    "bfloat16": {"name": "adamw", "moments": "bfloat16"},
    "sophia in int8": {"name": "sophia", "moments": "int8"},
    "soap in int8": {"name": "soap", "moments": "int8"},
}

"""`jaxformer doctor CONFIG`: checks what a run needs, and does one step of it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxformer.cli.arguments import ConfigArguments, parse_with_config
from jaxformer.report import printable
from jaxformer.report.banner import WIDTH

if TYPE_CHECKING:
    from jaxformer.tools.run_checks import Finding


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(ConfigArguments):
    """Checks what a run needs before it runs: versions, devices, directories and disk space, data,
    the attention kernel, memory, and one step. Writes nothing in the run directory. The exit status
    is 1 if there is a problem."""


def run(argv: Sequence[str]) -> int:
    _, config = parse_with_config(DoctorArguments, "jaxformer doctor", argv)
    from jaxformer.tools.run_checks import examine

    problems = 0
    for finding in examine(config):
        problems += finding.kind == "problem"
        print(_wrapped(finding), flush=True)
    if not problems:
        print("No problem was found.")
        return 0
    print("1 problem." if problems == 1 else f"{problems} problems.")
    return 1


def _wrapped(finding: "Finding") -> str:
    """A finding in lines that are no longer than WIDTH, indented below the first."""
    text = printable(f"{finding.kind:<8}{finding.check}: {finding.text}")
    lines: list[str] = []
    for paragraph in text.splitlines():
        indent = " " * 8 if lines else ""
        lines += textwrap.wrap(
            paragraph.strip(),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)

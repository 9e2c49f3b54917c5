"""`jaxformer doctor CONFIG`: checks what a run needs, and does one step of it."""

import dataclasses
import itertools
import textwrap

from jaxformer.cli.arguments import DoctorArguments
from jaxformer.config.run import RunConfig
from jaxformer.report import printable
from jaxformer.report.banner import WIDTH
from jaxformer.tools.run_checks import Finding, examine


def run(args: DoctorArguments, config: RunConfig) -> int:
    notes: list[Finding] = []
    if config.train.eval_tasks and args.config.endswith(".json"):
        # A run directory may come from somebody else, and a file of tasks is code.
        notes.append(Finding("note", "train.eval_tasks", "not read: of a run they may be code."))
        train = dataclasses.replace(config.train, eval_tasks="", eval_tasks_every=0)
        config = dataclasses.replace(config, train=train)
    problems = 0
    for finding in itertools.chain(notes, examine(config)):
        problems += finding.kind == "problem"
        text = printable(f"{finding.kind:<8}{finding.check}: {finding.text}")
        indent = ""
        for paragraph in text.splitlines():
            lines = textwrap.wrap(
                paragraph.strip(),
                WIDTH,
                initial_indent=indent,
                subsequent_indent=" " * 8,
                break_long_words=False,
                break_on_hyphens=False,
            )
            print("\n".join(lines), flush=True)
            indent = " " * 8
    if not problems:
        print("No problem was found.")
        return 0
    print("1 problem." if problems == 1 else f"{problems} problems.")
    return 1

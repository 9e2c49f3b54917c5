"""The table of checks of a certificate, and what no certificate proves."""

import functools
from collections.abc import Iterator

from jaxformer.arrays.out_of_memory import OutOfMemory
from jaxformer.cluster.processes import together
from jaxformer.tools.certificate import kernel_checks, leaks, step_checks, text_checks
from jaxformer.tools.certificate.evidence import Check, Evidence, Measured, always
from jaxformer.tools.certificate.record import CheckEntry

# In this order. The last one donates the state.
CHECKS = (
    Check(
        "attention kernel",
        "The kernel of attention computes what attention in float32 does, forward and backward.",
        "Random queries, keys and values of the run's own shapes, for each mask and score that its"
        " layers have, on its mesh; the largest error relative to the largest element, at most the"
        " rounding of the dtype.",
        always,
        kernel_checks.attention_kernel,
        "a kernel that is wrong by 1 %",
    ),
    Check(
        "expert kernel",
        "The kernel of experts multiplies as float32 does, forward and backward.",
        "Random rows and groups of the shapes of a device, computed twice.",
        kernel_checks.no_experts,
        kernel_checks.expert_kernel,
        "a kernel that is wrong by 10 %",
    ),
    Check(
        "texts apart",
        "No text reads another text of its row, nor another row.",
        "The gradient of the outputs of some texts by the embedded tokens of others is exactly 0,"
        " for each bit of the numbers of segments and rows, so that every pair is separated once.",
        leaks.no_table,
        leaks.texts_apart,
        "a kernel that ignores segments",
    ),
    Check(
        "padding apart",
        "No text reads padding.",
        "The gradient of the outputs of texts by the embedded tokens of padding is exactly 0.",
        leaks.no_segments,
        leaks.padding_apart,
        "a mask that lets padding be read",
    ),
    Check(
        "future apart",
        "No token reads a later one.",
        "The gradient of the outputs up to a place by the embedded tokens behind it is exactly 0,"
        " at places drawn for each row and at the edge of a block.",
        leaks.no_direction,
        leaks.future_apart,
        "a mask that shows each token the next one",
    ),
    Check(
        "first tokens",
        "Texts begin as data.bos or the template of the tokenizer says.",
        "The first token of each text that begins in the rows of a batch.",
        text_checks.no_beginning,
        text_checks.texts_begin,
        "rows whose texts lack the first token",
    ),
    Check(
        "accumulation",
        "A step in microbatches has the gradient of the batch.",
        "The gradient of real rows in two microbatches and in one, without dropout and without the"
        " balance of experts; for each leaf the norm of the difference.",
        step_checks.compares_rows,
        step_checks.accumulated,
        "an accumulation that leaves out a microbatch",
    ),
    Check(
        "one device",
        "The mesh computes the gradient that one device does.",
        "The gradient of real rows on the mesh and on one device of it, where they fit its memory.",
        step_checks.one_device,
        step_checks.equals_one_device,
        "a gradient on the mesh that lacks half of the rows",
    ),
    Check(
        "replayed steps",
        "Steps drawn at random are those that the run logged.",
        "Each logged step of --steps is done again from the checkpoint before it; its figures and"
        " its state are compared with the log.",
        step_checks.not_replayed,
        step_checks.replayed,
        "a loss that was altered in the log",
    ),
    Check(
        "log chained",
        "No line of metrics.jsonl was altered, removed or inserted.",
        "Each line has the digest of the line before it, and the first that of the run.",
        text_checks.no_chain,
        text_checks.chained,
        "a line that was altered",
    ),
    Check(
        "checkpoint files",
        "The files of all checkpoints are those that were saved.",
        "The sizes and CRC-32 of all files, as their checkpoint has recorded them.",
        step_checks.no_checkpoints,
        step_checks.files_intact,
        "a byte that was altered",
    ),
    Check(
        "resumed step",
        "The run goes on from a saved state as if it had not been saved.",
        "The newest state is saved to a temporary directory and read; the next step of both is"
        " equal to the bit, every leaf of the new state included.",
        always,
        step_checks.resumed,
        "a restore that loses the moments of the optimizer",
    ),
)

NOT_PROVEN = (
    "That the machine, its operating system and its libraries are honest: whoever controls them can"
    " write any certificate. A signature says who vouches for it, not that it is true.",
    "The figures of steps that were not replayed; the chain shows that their lines were not altered"
    " after they were logged, not that they were computed.",
    "Steps far from every checkpoint, which would take long to do again.",
    "Other hardware, other meshes, other shapes and other versions than those named here.",
    "Rows that were not looked at: leaks are looked for in a few rows of one batch, and a kernel is"
    " compared on random arrays.",
    "That the data is what somebody says it is, or fit for its use. Its digests say only that it is"
    " the same data.",
    "That the model is good.",
)


def examined(evidence: Evidence) -> Iterator[CheckEntry]:
    """The results of all checks of a run, in their order."""
    for check in CHECKS:
        reason = check.missing(evidence)
        if reason:
            yield _entry(check, "not applicable", Measured(None, f"{reason}."))
            continue
        try:
            measured = together(functools.partial(check.run, evidence), OutOfMemory)
        except OutOfMemory as error:
            text = f"this machine has not enough memory for it: {str(error).splitlines()[0]}"
            measured = Measured(None, text)
        if measured.holds is None:
            yield _entry(check, "not applicable", measured)
        else:
            yield _entry(check, "proven" if measured.holds else "failed", measured)


def _entry(check: Check, result: str, measured: Measured) -> CheckEntry:
    text = measured.text[:1].upper() + measured.text[1:]
    return {
        "name": check.name,
        "result": result,
        "figure": measured.figure,
        "bound": measured.bound,
        "text": text if text.endswith(".") else f"{text}.",
    }

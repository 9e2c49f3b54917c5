"""The page of a certificate, one HTML file that needs no others."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

from jaxformer.tools import filled_page
from jaxformer.tools.certificate.checks import CHECKS
from jaxformer.tools.certificate.record import Certificate

# By result: the class of a row, and its place in the order of rows.
ROWS = {"failed": ("failed", 0), "proven": ("proven", 1), "not applicable": ("not", 2)}
EQUAL = {"bitwise": "equal to the bit", "rounding": "equal to rounding", "no": "not equal"}


def certificate_page(certificate: Certificate) -> str:
    """The page; failed checks come first."""
    checks = sorted(certificate["checks"], key=lambda entry: ROWS[entry["result"]][1])
    return filled_page(
        "certificate.html",
        {
            "title": f"Certificate of run {_text(certificate['run'].get('run_id', ''))[:12]}",
            "subject": _subject(certificate),
            "verdict": _verdict(certificate),
            "checks": "\n".join(map(_check_row, checks)),
            "replayed": _replays(certificate["replayed"]),
            "not_proven": "\n".join(f"<li>{_text(t)}</li>" for t in certificate["not_proven"]),
            "facts": "\n".join(
                f"<tr><th>{a}</th><td>{b}</td></tr>" for a, b in _facts(certificate)
            ),
        },
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _subject(certificate: Certificate) -> str:
    device, versions = certificate["device"], certificate["versions"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in device["mesh"].items() if size > 1)
    machine = f"{device['count']} x {device['kind']}" + (f" ({mesh})" if mesh else "")
    steps = [*map(int, certificate["checkpoints"])]
    state = f"after step {max(steps):,}" if steps else "before its first checkpoint"
    return _text(f"The run {state}, on {machine} with jax {versions.get('jax', '')}.")


def _verdict(certificate: Certificate) -> str:
    names = {
        result: [entry["name"] for entry in certificate["checks"] if entry["result"] == result]
        for result in ROWS
    }
    failed, proven, left_out = (names[result] for result in ROWS)
    counts = f"{len(proven)} proven, {len(left_out)} not applicable"
    signature = certificate.get("signature")
    signed = "It is not signed."
    if signature:
        signed = f"Signed by the key <span class='digest'>{_text(signature['public_key'])}</span>."
    if failed:
        word = "check" if len(failed) == 1 else "checks"
        head = f"{len(failed)} {word} failed: {_text(', '.join(failed))}"
        return f"<div class='verdict failed'><b>{head}</b>{counts}. {signed}</div>"
    return f"<div class='verdict'><b>No check failed</b>{counts}. {signed}</div>"


def _check_row(entry: Mapping[str, Any]) -> str:
    claims = {check.name: check.proves for check in CHECKS}
    kind = ROWS[entry["result"]][0]
    claim, found = _text(claims.get(entry["name"], "")), _text(entry["text"])
    numbers = (("figure", entry["figure"]), ("bound", entry["bound"]))
    cells = "".join(
        f"<td class='number' data-label='{label}'>{_number(value)}</td>" for label, value in numbers
    )
    return (
        f"<tr class='{kind}'><th>{_text(entry['name'])}</th>"
        f"<td class='result'><span>{entry['result']}</span></td>"
        f"<td>{claim}<p>{found}</p></td>{cells}</tr>"
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def _replays(entries: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{entry['step']}</td><td>{entry['from'] or 'the beginning'}</td>"
        f"<td>{EQUAL[entry['equal']]}</td>"
        f"<td class='number'>{_number(entry['largest_difference'])}</td></tr>"
        for entry in entries
    ]
    if not rows:
        return "<p>None.</p>"
    head = "<tr><th>Step</th><th>From</th><th>Figures and state</th>"
    head += "<th class='number'>Largest difference</th></tr>"
    return f"<div class='table'><table><thead>{head}</thead>{''.join(rows)}</table></div>"


def _facts(certificate: Certificate) -> Iterable[tuple[str, str]]:
    def digest(value: Any) -> str:
        return f"<span class='digest'>{_text(value)}</span>"

    yield "Certificate", digest(certificate["sha256"])
    chain = certificate["chain"]
    yield "metrics.jsonl", f"{chain['lines']:,} lines, the last one {digest(chain['last'])}"
    if chain["state"]:
        yield "Last logged state", digest(chain["state"])
    for name in ("config", "code", "tokenizer"):
        yield name.capitalize(), digest(certificate[name])
    for name, value in certificate["data"].items():
        yield f"Data: {_text(name)}", digest(value)
    for step, value in certificate["checkpoints"].items():
        yield f"Checkpoint {_text(step)}", digest(value)
    versions = ", ".join(f"{name} {number}" for name, number in certificate["versions"].items())
    yield "Versions", _text(versions)

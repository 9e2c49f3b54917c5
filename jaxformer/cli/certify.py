"""`jaxformer certify RUN`: what is proven of a run on this machine, as a file and a page."""

import sys

import jax

from jaxformer.cli.arguments import check_output
from jaxformer.cli.trust_arguments import CertifyArguments
from jaxformer.cluster.launch import joined
from jaxformer.config.format import escaped
from jaxformer.config.train import LaunchConfig
from jaxformer.tools.certificate.record import CERTIFICATE, Certificate
from jaxformer.tools.certificate.writing import certify, failed_checks


def run(args: CertifyArguments) -> int:
    check_output(args.output)
    with joined(LaunchConfig(), _print):
        certificate = certify(args.path, args.steps, args.sign, args.output, args.cache_dir, _print)
    return report(certificate, str(args.output or args.path / CERTIFICATE))


def after_training(run_dir: str, cache_dir: str, is_silent: bool) -> int:
    """The certificate of a run that has just ended, for run.certify; the exit status."""
    log = _ignore if is_silent else _print
    with joined(LaunchConfig(), _ignore):
        certificate = certify(run_dir, cache_dir=cache_dir, log=log)
    return report(certificate, f"{run_dir}/{CERTIFICATE}")


def report(certificate: Certificate, path: str) -> int:
    """Prints the result of a certificate; the exit status."""
    failed, first = failed_checks(certificate), jax.process_index() == 0
    if failed:
        if first:
            listed = ", ".join(failed)
            print(
                f"certificate: {len(failed)} of {len(certificate['checks'])} checks failed:"
                f" {listed}. The run and its checkpoints are as they were; {path} says what was"
                " found.",
                file=sys.stderr,
            )
        return 1
    if first:
        print(f"{path}: no check failed; the page is beside it.")
    return 0


def _print(text: str) -> None:
    print(escaped(text), flush=True)


def _ignore(text: str) -> None:
    pass

"""`jaxformer certify RUN`: what is proven of a run on this machine, as a file and a page."""

import sys

from jaxformer.cli.arguments import CertifyArguments, check_output
from jaxformer.cluster.launch import joined
from jaxformer.config.format import escaped
from jaxformer.config.run import RunConfig
from jaxformer.config.train import LaunchConfig
from jaxformer.tools.certificate.certify import certify, failed_checks
from jaxformer.tools.certificate.record import CERTIFICATE, Certificate


def run(args: CertifyArguments) -> int:
    check_output(args.output)
    with joined(LaunchConfig(), _print):
        certificate = certify(args.path, args.steps, args.sign, args.output, args.cache_dir, _print)
    return report(certificate, str(args.output or args.path / CERTIFICATE))


def after_training(config: RunConfig) -> int:
    """The certificate of a run that has just ended, for run.certify."""
    silent = config.run.progress == "none"
    with joined(LaunchConfig(), _ignore):
        certificate = certify(
            config.run.dir, cache_dir=config.data.cache_dir, log=_ignore if silent else _print
        )
    return report(certificate, f"{config.run.dir}/{CERTIFICATE}")


def report(certificate: Certificate, path: str) -> int:
    """Prints the result of a certificate; the exit status."""
    import jax

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

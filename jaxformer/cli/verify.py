"""`jaxformer verify RUN`: whether a run is what its files say."""

from collections import Counter

from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.cli.trust_arguments import VerifyArguments
from jaxformer.files import ConfigError
from jaxformer.tools.certificate.record import public_key_in
from jaxformer.tools.certificate.verification import verify

VERDICTS = {"equal": "equal", "rounding": "equal to rounding", "no": "NO", "not checked": "unknown"}
VERDICT_WIDTH = max(map(len, VERDICTS.values()))
LIMITS = (
    "Not proven: who computed the run. Somebody who trains all of it again with another program can"
    " write another chain, and a certificate that fits it, unless that is signed and its key is"
    " compared (--key). Times and tokens per second cannot be computed again; the chain and the"
    " certificate alone protect them."
)


def run(args: VerifyArguments) -> int:
    """Prints each statement as soon as there is one. The exit status is 1 if something is not as it
    was."""
    if args.steps < 0:
        raise ConfigError(f"--steps {args.steps}: give a number of steps, at least 0.")
    mesh = {axis: getattr(args, axis) for axis in MESH_AXES}
    verdicts: Counter[str] = Counter()
    for statement in verify(
        args.path,
        lambda line: None,
        steps=args.steps,
        seed=args.seed,
        mesh={axis: size for axis, size in mesh.items() if size is not None},
        cache_dir=args.cache_dir,
        public_key="" if args.key is None else public_key_in(args.key),
    ):
        verdicts[statement.verdict] += 1
        mark = VERDICTS[statement.verdict]
        print(f"{mark:<{VERDICT_WIDTH}}  {statement.subject}: {statement.text}", flush=True)
    print(f"\n{LIMITS}\n")
    counts = [f"{verdicts[name]} {mark}" for name, mark in VERDICTS.items() if verdicts[name]]
    print(f"{args.path}: {', '.join(counts)}.")
    return 1 if verdicts["no"] else 0

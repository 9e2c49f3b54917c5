"""`jaxformer verify RUN`: whether a run is what its files say."""

from collections import Counter

from jaxformer.cli.arguments import VerifyArguments
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError
from jaxformer.tools.verify import verify

LIMITS = (
    "Not known: who computed the run, the figures of evaluations and of steps that were not done"
    " again, and times: whoever trains all of it again with another program can write another"
    " chain."
)


def run(args: VerifyArguments) -> int:
    """Prints each statement as soon as there is one. The exit status is 1 if something is not as it
    was."""
    if args.steps < 0:
        raise ConfigError(f"--steps {args.steps}: give a number of steps, at least 0.")
    verdicts: Counter[str] = Counter()
    for subject, verdict, text in verify(
        args.path,
        lambda line: None,
        steps=args.steps,
        mesh={axis: size for axis, size in vars(args.mesh).items() if size is not None},
        cache_dir=args.cache_dir,
        train=args.train,
        validation=args.validation,
        init_from=args.init_from,
    ):
        verdicts[verdict] += 1
        print(f"{verdict:<17}  {subject}: {escaped(text)}", flush=True)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    print(f"\n{LIMITS}\n{args.path}: {counts}.")
    return 1 if verdicts["NO"] else 0

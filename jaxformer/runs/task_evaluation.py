"""Tasks of EleutherAI's evaluation harness during training: `train.eval_tasks`."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.runs.loading import Loaded
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.state import mesh_of, on_mesh

MOST_NEW_TOKENS = 256  # of a task that does not say how many, if the context has space for them


class Tasks:
    """The tasks, whose texts are read. Calling it with parameters gives the results by names such
    as "tasks/arc_easy/acc", the same for the same parameters, whatever was asked before.

    Of several processes all ask the same, since each has a part of the parameters.
    """

    def __init__(self, names: str, config: ModelConfig, tokenizer: Tokenizer) -> None:
        try:
            import lm_eval
            import lm_eval.tasks
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "lm_eval":
                raise
            raise ConfigError(
                "train.eval_tasks needs the evaluation harness, which is not installed: pip install"
                ' "jaxformer[lm_eval]".'
            ) from None
        specs = [name.strip() for name in names.split(",") if name.strip()]
        files = [name.endswith((".yaml", ".yml")) for name in specs]
        # The index of all tasks of the harness takes seconds.
        manager = lm_eval.tasks.TaskManager(include_defaults=not all(files))
        paths = [
            str(Path(name).expanduser().absolute()) if is_file else name
            for name, is_file in zip(specs, files, strict=True)
        ]
        self._evaluate = functools.partial(
            lm_eval.simple_evaluate,
            tasks=paths,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
            torch_random_seed=None,
        )
        # Imported here, because it imports the harness too.
        from jaxformer.runs.harness import HarnessModel

        count = max(min(MOST_NEW_TOKENS, config.max_length // 2), 1)
        model = Loaded({}, config, tokenizer)
        self._model = HarnessModel(model, "this run", max_gen_toks=count)
        self._model.shows_progress = False  # beside that of training
        with _quiet():
            for name, path in zip(specs, paths, strict=True):
                try:
                    tasks = manager.load([path])["tasks"].values()
                except Exception as error:  # of a file, a data set or code of the task: anything
                    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                    raise ConfigError(
                        f"train.eval_tasks has {name!r}, which the evaluation harness cannot read"
                        f" ({first_line}): `lm-eval ls tasks` lists the names of its tasks, and a"
                        " file of one's own ends with .yaml."
                    ) from error
                writes = any(task.config.output_type == "generate_until" for task in tasks)
                if writes and jax.process_count() > 1:
                    raise ConfigError(
                        f"train.eval_tasks has {name!r}, which lets the model write: in a run of"
                        " several processes take tasks with choices or of perplexity."
                    )
            # Whatever the model cannot answer is said before it is trained.
            try:
                self._evaluate(self._model)  # which has no parameters yet
            except ConfigError as error:
                raise ConfigError(f"train.eval_tasks={names}: {error}") from error

    def __call__(self, params: Params) -> dict[str, float]:
        self._model.params = params
        self._model.batches = 0
        try:
            with _quiet(), on_mesh(mesh_of(params)):
                found = self._evaluate(self._model)
        finally:
            self._model.params = {}  # which the next step donates
        numbers = {}
        for task, metrics in found["results"].items() if found else ():
            for name, value in metrics.items():
                # The harness names a metric with its filter, as in "acc,none".
                metric, _, filtered = name.partition(",")
                if isinstance(value, int | float) and filtered and not metric.endswith("_stderr"):
                    suffix = "" if filtered == "none" else f"/{filtered}"
                    numbers[f"tasks/{task}/{metric}{suffix}"] = float(value)
        return numbers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the harness about what a task leaves open."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""The end of a run: its loss curve, its last evaluation, and a sample of what the model writes."""

import warnings

import jax

from jaxformer.arrays.params import Params
from jaxformer.files import ConfigError
from jaxformer.generation.decode import generate
from jaxformer.report import banner, human_time
from jaxformer.report.banner import framed, result_lines
from jaxformer.report.plot import plot_losses
from jaxformer.runs.evaluation import Evaluation
from jaxformer.runs.prompting import Model, drawing_rules, start_of, turn_of
from jaxformer.runs.setup import RunSetup

# The command that is suggested at the end for heads that do not write text, with its prompt.
SUGGESTED = {
    "masked": ("predict", "Once [MASK] a time"),
    "classes": ("predict", "Once"),
    "tags": ("predict", "Once"),
    "none": ("embed", "Once"),
}


def close_run(setup: RunSetup, params: Params, last: Evaluation, seconds: float) -> str:
    """Plots the losses of a run, and returns what is printed at its end."""
    run = setup.run.run
    summary = result_lines(last)
    summary["run directory"] = f"{run.dir} (loss curve: {plot_losses(setup.directory.path)})"
    chat = " --chat" if setup.run.data.messages_field else ""
    command, prompt = SUGGESTED.get(setup.run.model.output, ("sample", "Once"))
    summary["next"] = (
        f'jaxformer {command} {run.dir}{chat} --prompt "{run.sample_prompt or prompt}"'
    )
    paragraphs = [banner(summary, f"Done in {human_time(seconds)}")]
    writes = run.sample_tokens and setup.model.output == "language"
    if setup.model.family == "encoder_decoder" and not run.sample_prompt:
        writes = 0  # it has nothing to read
    # Only the first process closes a run, and a program over the devices of several processes needs
    # all of them: the first one would wait without an end.
    if writes and jax.process_count() > 1:
        paragraphs.append(
            "There is no sample, which one process alone would write: see the command above."
        )
    elif writes:
        try:
            paragraphs.insert(0, f"Sample\n{framed(_sample(setup, params))}")
        except ConfigError as error:
            # The prompt or the model's files cannot be used; the run itself is complete.
            warnings.warn(f"there is no sample: {error}", stacklevel=2)
    folder = setup.directory.profile
    # JAX writes a trace below `plugins`. There is none where an earlier command, without the
    # setting, made these steps.
    if run.profile and (folder / "plugins").is_dir():
        opened = f'pip install "jaxformer[profile]", and open it with\n  xprof --logdir {folder}'
        paragraphs.insert(0, f"The trace is in {folder}; {opened}")
    elif run.profile:
        done = f"run.profile={run.profile}: these steps were done before; nothing was traced."
        paragraphs.insert(0, done)
    return "\n\n".join(paragraphs)


def _sample(setup: RunSetup, params: Params) -> str:
    """Return the prompt with its continuation, by the rules of `jaxformer sample`."""
    run = setup.run.run
    tokenizer = setup.corpus.tokenizer
    model = Model(params=params, config=setup.model, tokenizer=tokenizer, run=setup.run)
    start, source = start_of(model, run.sample_prompt)
    start = start or [tokenizer.end_token]
    between = ""
    inputs = {}
    if source:
        inputs["source"] = [source]
        between = " => "
    is_chat = setup.run.data.messages_field != "" and run.sample_prompt != ""
    if is_chat:
        model, start = turn_of(model, [{"role": "user", "content": run.sample_prompt}])
        between = " => "
    stated, defaults = drawing_rules(tokenizer, {}, is_chat)
    space = min(run.sample_tokens, model.context() - len(start))
    key = jax.random.key(run.seed)
    rules = model.writing_rules() | defaults | stated | inputs
    written = generate(params, model.config, [start], space, key=key, **rules)
    return run.sample_prompt + between + model.text_after(start, written[0].tolist())

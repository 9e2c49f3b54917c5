"""The end of a run: its loss curve, its last evaluation, and a sample of what the model writes."""

import warnings
from typing import Any

import jax

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunSettings
from jaxformer.files import ConfigError
from jaxformer.generation.decode import generate
from jaxformer.models.transformer import context_of
from jaxformer.report import banner, human_time
from jaxformer.report.banner import framed, result_lines
from jaxformer.report.plot import plot_losses
from jaxformer.runs.evaluation import Evaluation
from jaxformer.runs.model_files import writing_rules
from jaxformer.runs.setup import RunSetup
from jaxformer.tokenizer import Tokenizer

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
    # Only the first process closes a run, and a program over the devices of several processes needs
    # all of them: the first one would wait without an end.
    if writes and jax.process_count() > 1:
        paragraphs.append(
            "There is no sample, which one process alone would write: see the command above."
        )
    elif writes:
        sample = _sample(run, setup.model, setup.corpus.tokenizer, params)
        if sample is not None:
            paragraphs.insert(0, f"Sample\n{framed(sample)}")
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


def _sample(
    run: RunSettings, model: ModelConfig, tokenizer: Tokenizer, params: Params
) -> str | None:
    """A prompt with its continuation; None if the model has nothing to write from."""
    ids = tokenizer.encode(run.sample_prompt)
    source: dict[str, Any] = {}
    prompt = tokenizer.as_prompt(ids) or [tokenizer.end_token]
    between = ""
    if model.family == "encoder_decoder":
        if not ids:
            return None
        prompt = tokenizer.as_target([])
        between = " => "
        source = {"source": [tokenizer.as_source(ids)]}
    space = min(run.sample_tokens, context_of(params, model) - len(prompt))
    if space < 1:
        return None
    try:
        rules = writing_rules(tokenizer)
    except ConfigError as error:
        # The model's files cannot be used; the run itself is complete.
        warnings.warn(f"there is no sample: {error}", stacklevel=2)
        return None
    written = generate(
        params,
        model,
        [prompt],
        space,
        key=jax.random.key(run.seed),
        temperature=0.8,
        top_k=50,
        **rules,
        **source,
    )
    # Decoded together, and then cut: SentencePiece drops the space that begins a text, so the
    # continuation by itself would lose the one between it and the prompt.
    text = tokenizer.decode([*prompt, *written[0].tolist()])
    return run.sample_prompt + between + text[len(tokenizer.decode(prompt)) :]

"""The model of a run as files of Hugging Face, written while it trains (`run.export_every`)."""

import jax
import numpy as np

from jaxformer.adapters.low_rank import is_adapted
from jaxformer.arrays.mesh import whole
from jaxformer.arrays.params import is_custom
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.cluster.processes import together
from jaxformer.files import ConfigError, store_of
from jaxformer.interop.architectures import find_architecture
from jaxformer.interop.peft_modules import adapter_layout
from jaxformer.interop.peft_writing import save_adapter
from jaxformer.interop.pretrained import save_pretrained, standard_config
from jaxformer.runs.setup import RunSetup
from jaxformer.training.state import TrainState


def check_export(setup: RunSetup) -> None:
    """Raises ConfigError for a run whose model has no files of Hugging Face, or that saves no
    checkpoint where one is due."""
    run = setup.run
    every = run.run.export_every
    saves = run.train.checkpoint_every
    name = f"run.export_every={every}"
    if not saves or every % saves:
        raise ConfigError(
            f"{name} is not a multiple of train.checkpoint_every={saves}: files are written where a"
            " checkpoint is saved. Change one of the two."
        )
    try:
        if run.adapter.kind == "none":
            try:
                find_architecture(setup.model)
            except ConfigError:
                if not setup.model.mup_base:
                    raise
                find_architecture(standard_config(setup.model))
        elif run.adapter.kind != "lora":
            raise ConfigError(f"they have no place for adapter.kind={run.adapter.kind!r}.")
        elif setup.added:
            raise ConfigError("an adapter of peft cannot say which tokens the run has added.")
        else:
            adapter_layout(setup.model)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be written as files of Hugging Face: {error}") from None


def export(setup: RunSetup, state: TrainState, step: int) -> None:
    """Writes the model of a state, or its adapter, into hf/STEP of the run directory; a directory
    that is there is written again. With an average of the weights it is that. All processes have
    to call it."""
    params = evaluation_weights(state.params, state.optimizer)
    if jax.process_count() > 1:
        # One leaf after another.
        params = jax.tree.map(lambda leaf: np.asarray(whole(leaf)), params)
    target = setup.directory.path / "hf" / str(step)
    corpus = setup.corpus

    def write() -> None:
        with store_of(target).filled(in_order=False) as folder:
            if any(map(is_adapted, jax.tree.leaves(params, is_leaf=is_custom))):
                assert setup.init_from is not None  # an adapter has a base
                base = setup.init_from.path.absolute()
                learned = setup.learned
                save_adapter(folder, params, setup.model, base=base, learned=learned)
                corpus.tokenizer.save(folder / "tokenizer.json")
            else:
                labels = corpus.labels
                save_pretrained(folder, params, setup.model, corpus.tokenizer, labels=labels)

    together(write if jax.process_index() == 0 else lambda: None)

"""Models made of those settings in transformers, random, with no parameter left at its initial
value, and what they read."""

import copy
import functools
import json
import math
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from pretrained_variants import LENGTH, PAD, SOURCE, VARIANTS, VOCABULARY
from safetensors.torch import load_file
from transformers.utils import logging

import jaxformer as jf
from jaxformer.config import with_settings

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

HOME = tempfile.TemporaryDirectory(prefix="pretrained-")


def each(names, slow=()):
    """`names` as parameters of a test, those of one model on one worker; which of them are slow."""
    marks = {name: [pytest.mark.xdist_group(name)] for name in names}
    for name in slow:
        marks[name].append(pytest.mark.slow)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in names]
    )


def folder(*parts):
    """A new directory of these words."""
    place = Path(HOME.name, *(part.replace(" ", "-").replace(",", "") for part in parts))
    place.mkdir(parents=True, exist_ok=True)
    return place


# Layers whose norms are behind the sums.
POST_NORM = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "electra",
    "albert",
    "mpnet",
    "nomic_bert",
    "deberta-v2",
    "bart",
    "marian",
)
# Encoder-decoders that are padded on the right alone.
RIGHT_PADDED = ("bart", "marian", "pegasus", "mbart", "m2m_100")


def perturbed(model, seed):
    """The model with noise on all that a file would hold of it.

    Matrices get as much as leaves the logits alive: norms behind the sum lose what was read where
    the sublayers are loud.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = 0.1 if model.config.model_type in POST_NORM else 0.25
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]  # not Marian's sinusoids
    buffers = [b for name, b in model.named_buffers() if name in model.state_dict()]
    with torch.no_grad():
        for tensor in [*trained, *buffers]:
            size = 0.6 if tensor in tables else matrices if tensor.ndim > 1 else 0.2
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
            if (
                tensor.ndim == 1
            ):  # scales of both signs: a tied head then writes more than what it has just read
                tensor.mul_(torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1)
    return model.eval()


def made(architecture, settings, seed=0):
    """A model of transformers', float32 and with plain attention."""
    torch.manual_seed(seed)
    config = architecture.config_class(**copy.deepcopy(settings))
    config._attn_implementation = config._experts_implementation = "eager"
    model = perturbed(architecture(config), seed + 1)
    untied = settings.get("tie_word_embeddings") is False
    if model.config.model_type in ("t5", "mt5", "umt5") and untied:
        model.lm_head.weight = torch.nn.Parameter(
            model.lm_head.weight.flip(0) + 0.1
        )  # T5 v1.1 as it was published
    return model


@functools.cache
def reference(name):
    return made(*VARIANTS[name], seed=zlib.crc32(name.encode()) % 1000)


@functools.cache
def directory(name):
    """Where transformers saved the model."""
    place = folder(name, "theirs")
    model = reference(name)
    model.save_pretrained(place)
    if model.config.model_type in ("t5", "umt5") and not model.config.scale_decoder_outputs:
        rewrite(place, tie_word_embeddings=False)
    return place


def rewrite(place, **changes):
    """Changes fields of a directory's config.json; None removes one."""
    path = place / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )


def inputs(name, seed=0):
    return batch_for(reference(name), [seed, zlib.crc32(name.encode())])


# Models that count the positions of their tokens themselves.
COUNTING = ("bloom", "mpt", "mpnet", "roberta", "xlm-roberta", "t5", "mt5", "umt5")


def batch_for(model, seed=0):
    """What transformers' model reads: three rows, the first of full length, the others padded; int
    arrays by name.

    Padding is on the right and, where transformers can place the tokens behind it, on the left.
    """
    rng = np.random.default_rng(seed)
    left = model.config.model_type not in RIGHT_PADDED and "Sequence" not in type(model).__name__

    def rows(length, words=("input_ids", "attention_mask")):
        mask = np.ones((3, length), int)
        mask[1, -5:] = 0
        mask[2, slice(3) if left else slice(-3, None)] = 0
        return dict(
            zip(
                words,
                (np.where(mask, rng.integers(5, VOCABULARY, mask.shape), PAD), mask),
                strict=True,
            )
        )

    # UMT5EncoderModel says that it has a decoder.
    if model.config.is_encoder_decoder and "Encoder" not in type(model).__name__:
        return rows(SOURCE) | rows(LENGTH, ("decoder_input_ids", "decoder_attention_mask"))
    batch = rows(LENGTH)
    if model.config.model_type == "clip_text_model":
        # It reads the vector of the first EOS, here the last token.
        last = LENGTH - 1 - batch["attention_mask"][:, ::-1].argmax(1)
        batch["input_ids"][np.arange(3), last] = model.config.eos_token_id
    if model.config.model_type not in COUNTING:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1) * batch["attention_mask"]
    if getattr(model.config, "type_vocab_size", 0):
        batch["token_type_ids"] = rng.integers(
            0, model.config.type_vocab_size, batch["input_ids"].shape
        )
    return batch


def with_eos_of(model, original):
    """A model that was written without a tokenizer, whose EOS a CLIP reads, with that of
    `original`."""
    for name, module in original.named_modules():
        if hasattr(module, "eos_token_id"):
            model.get_submodule(name).eos_token_id = module.eos_token_id
    return model


def real(batch):
    """Which places of the output are of no padding."""
    return batch.get("decoder_attention_mask", batch["attention_mask"]) == 1


def outputs(model, batch):
    """transformers' outputs for arrays by name."""
    with torch.no_grad():
        return model(**{name: torch.from_numpy(np.asarray(rows)) for name, rows in batch.items()})


def logits(model, batch):
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        return logits_of_rows_alone(model, batch)
    found = outputs(model, batch)
    values = found[next(name for name in LOGITS if name in found)].numpy()
    # ELECTRA's discriminator has one number for each token.
    return values[..., None] if values.shape == batch["input_ids"].shape else values


# The first that a model returns.
LOGITS = ("prediction_logits", "logits", "text_embeds", "last_hidden_state")


@functools.cache
def expected_logits(name):
    """Those of the reference for `inputs(name)`."""
    return logits(reference(name), inputs(name))


def logits_of_rows_alone(model, batch):
    """Those of each row without the others, of which transformers scales all by the longest; for
    dynamic NTK it also keeps the longest of earlier calls, until a call within the original length.
    """
    found = []
    for index in range(len(batch["input_ids"])):
        outputs(model, {name: rows[index : index + 1, :1] for name, rows in batch.items()})
        found.append(
            outputs(model, {name: rows[index : index + 1] for name, rows in batch.items()})
        )
    return np.concatenate([each.logits.numpy() for each in found])


def ours(batch, config):
    """The same inputs by the names of `jf.forward`, as (tokens, the rest)."""
    if "decoder_input_ids" in batch:
        names = {
            "segment_ids": "decoder_attention_mask",
            "source": "input_ids",
            "source_segment_ids": "attention_mask",
        }
        tokens = batch["decoder_input_ids"]
    else:
        names, tokens = {"segment_ids": "attention_mask"}, batch["input_ids"]
        names |= {"token_types": "token_type_ids"} if config.embedding.token_types else {}
    return tokens, {name: batch[word] for name, word in names.items() if word in batch}


@functools.cache
def loaded(name):
    return jf.load(directory(name))


QUICK = {
    "xla_backend_optimization_level": 0
}  # halves the time to compile, which is most of these tests' time
forward = jax.jit(jf.forward, static_argnums=1, compiler_options=QUICK)


def our_logits(model, batch):
    """`jf.forward` of what was loaded, as an array."""
    tokens, rest = ours(batch, model.config)
    return np.asarray(forward(model.params, model.config, tokens, **rest))


def assert_close(found, expected, batch):
    """Logits within 2e-4 of the reference's standard deviation, at every place that is no
    padding."""
    assert found.shape == expected.shape and found.dtype == np.float32
    if expected.ndim == 3:
        found, expected = found[real(batch)], expected[real(batch)]
    assert np.isfinite(expected).all() and expected.std() > 0.1
    np.testing.assert_array_less(np.abs(found - expected).max(), 2e-4 * expected.std())


def filled(config):
    """A config with what it leaves to other fields written out, and without the number of classes
    where it gives none."""
    fields = dict(head_dim=config.head_width, d_ff=config.ff_width, n_kv_heads=config.kv_heads)
    fields["window_pattern"] = (
        (config.window_pattern * config.n_layers)[: config.n_layers] if config.window else "w"
    )
    fields["head.n_classes"] = config.head.n_classes if config.output in ("classes", "tags") else 0
    factor, original = config.rope.factor, config.original_length
    defaults = {
        "yarn": 1 + 0.1 * math.log(factor),
        "longrope": (1 + math.log(factor) / math.log(original)) ** 0.5,
    }
    if config.rope.scaling in defaults:
        scale = config.rope.attention_factor or defaults[config.rope.scaling]
        fields["rope.attention_factor"] = round(scale, 6)
    return with_settings(config, fields)


def tensors(place):
    """Every tensor of a directory's safetensors files by name, as torch's."""
    return {
        name: tensor
        for path in sorted(place.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }

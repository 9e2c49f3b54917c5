"""Adapters of peft on the small models of tests/pretrained.py, random and with nothing left at its
initial value."""

import copy
import dataclasses
import functools
import json

import jax
import numpy as np
import peft
import pretrained
import torch
from pretrained import directory, folder, reference
from transformers.pytorch_utils import Conv1D

import jaxformer as jf

merge = jax.jit(jf.merge)
NOISE = 0.08


def linear_modules(model):
    """The linear layers but the output layer over the vocabulary."""
    output = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not output
    ]


def adapted(model, base="", seed=0, **settings):
    """A copy of a model of transformers with an adapter whose tensors are all random."""
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings)).eval()
    made.peft_config["default"].base_model_name_or_path = str(base) or None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if "lora_" in name:
                tensor.copy_(NOISE * torch.randn(tensor.shape, generator=generator))
            elif tensor.requires_grad:  # of modules_to_save
                tensor.add_(NOISE * torch.randn(tensor.shape, generator=generator))
    return made


def saved(name, what="adapter", base=None, **settings):
    """(model, directory) of an adapter on the model of this name, with its own place for each
    `what`."""
    base = directory(name) if base is None else base
    model = adapted(reference(name), base, **settings)
    place = folder(name, what)
    model.save_pretrained(place)
    return model, place


@functools.cache
def everywhere(name):
    """An adapter of every linear layer, with ranks, alphas and scales of their own."""
    modules = linear_modules(reference(name))
    if name == "deepseek-v3":
        # peft takes the layers of a dense or of a shared feed-forward for parameters of experts.
        modules = [module for module in modules if "self_attn" in module]
    last = modules[-1].rpartition(".")[2]
    # A module that the name of the last does not match: peft writes its patterns sorted.
    first = next((name for name in modules if name.rpartition(".")[2] != last), modules[0])
    return saved(
        name,
        "everywhere",
        r=3,
        lora_alpha=7,
        target_modules=modules,
        rank_pattern={last: 2, first: 5},
        alpha_pattern={first: 11, last: 0.5},
        use_rslora=sum(map(ord, name)) % 2 == 0,
    )


def put_on(name, place):
    """The model of this name with an adapter that was written, as peft loads it."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(reference(name)), place).eval()


def one_layer(config):
    """The same model as a program with one layer, which compiles in half the time."""
    return dataclasses.replace(config, layer_loop="scan")


def logits(config, params, batch):
    tokens, rest = pretrained.ours(batch, config)
    return np.asarray(pretrained.forward(params, one_layer(config), tokens, **rest))


def noised(params):
    """Params whose adapters are no zeros."""
    rng = np.random.default_rng(0)

    def noise(learns, leaf):
        return leaf + np.float32(0.1 * rng.standard_normal(leaf.shape)) if learns else leaf

    return jax.tree.map(noise, jf.adapter_mask(params), jax.tree.map(np.asarray, params))


def settings_of(place):
    return json.loads((place / "adapter_config.json").read_text())


def state(place, **changes):
    """Changes keys of an adapter_config.json; returns its directory."""
    path = place / "adapter_config.json"
    path.write_text(json.dumps(settings_of(place) | changes))
    return place

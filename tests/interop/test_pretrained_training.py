"""What is trained here changes its own tensors in the files as it does in torch."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pretrained import (
    LOGITS,
    QUICK,
    directory,
    each,
    folder,
    inputs,
    loaded,
    ours,
    real,
    reference,
    tensors,
)

import jaxformer as jf

RATE = 0.5
# Tied and untied tables, experts, leaves that share a tensor, heads that no logit follows.
TRAINED = ["llama", "mixtral", "bert classes", "gpt2", "gemma2", "gpt-oss", "deepseek-v3"]
TRAINED += ["bert pre-training", "deberta masked", "albert masked", "t5 v1.1", "marian"]


def written(name, what, params):
    place = folder(name, what)
    jf.save_pretrained(
        place, params, loaded(name).config, architecture=type(reference(name)).__name__
    )
    return tensors(place)


def targets_of(name, batch):
    """A class to be learned at each place of no padding, and which places those are (None: each row
    has one class)."""
    config = loaded(name).config
    width = config.d_model if config.output == "none" else config.vocab_size
    classes = config.head.n_classes or width
    shape = real(batch).shape if loaded(name).config.output != "classes" else (3,)
    targets = np.random.default_rng(3).integers(5 % classes, classes, shape)
    return targets, real(batch) if len(shape) == 2 else np.ones(3, bool)


def their_gradients(name, batch):
    """The gradient of each parameter by name in torch, None where it has none."""
    model = copy.deepcopy(reference(name))
    found = model(**{word: torch.from_numpy(values) for word, values in batch.items()})
    found = found[next(name for name in LOGITS if name in found)]
    targets, keep = (torch.from_numpy(values) for values in targets_of(name, batch))
    torch.nn.functional.cross_entropy(found[keep], targets[keep]).backward()
    return {word: weight.grad for word, weight in model.named_parameters()}


def our_step(name, batch):
    """The parameters after a step down the same gradient."""
    model, (tokens, rest) = loaded(name), ours(batch, loaded(name).config)
    targets, keep = targets_of(name, batch)

    def loss(params):
        nats = -jax.nn.log_softmax(jf.forward(params, model.config, tokens, **rest))
        return jnp.take_along_axis(nats, targets[..., None], -1)[..., 0][keep].mean()

    return jax.tree.map(
        lambda leaf, grad: leaf - RATE * grad,
        model.params,
        jax.jit(jax.grad(loss), compiler_options=QUICK)(model.params),
    )


@each(TRAINED, slow=TRAINED[1:])
def test_a_step_of_training_moves_each_tensor_by_torchs_gradient_and_those_without_one_not_at_all(
    name,
):
    batch = inputs(name)
    gradients, before = their_gradients(name, batch), tensors(directory(name))
    after = written(name, "a step", our_step(name, batch))
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    assert set(after) == set(before)
    for word in set(before) & set(gradients):
        grad = torch.zeros_like(before[word]) if gradients[word] is None else gradients[word]
        still = (grad.reshape(len(grad), -1) == 0).all(
            1
        )  # rows of tables that no token reads, heads that no logit follows
        if grad.ndim > 1 or still.all():
            assert torch.equal(after[word][still], before[word][still]), word
        step = (before[word] - after[word]) / RATE
        assert (step - grad).abs().max() <= 1e-3 * grad.abs().max() + 2e-6 * largest + 1e-6, word

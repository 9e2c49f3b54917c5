"""The losses of preferences beside those of TRL: the same weights, pairs and numbers, with their
gradients."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import jaxformer as jf
from jaxformer.data import RowFormat
from jaxformer.data.templates import PreferenceTemplate
from jaxformer.losses.pairs import pairs_of
from jaxformer.tokenizer import byte_tokenizer

CONFIG = jf.ModelConfig(
    vocab_size=257, d_model=32, n_layers=1, n_heads=2, d_ff=48, max_length=32, norm_eps=1e-6
)
BETA = 0.3
TEXTS = [
    (b"how so?", b" no", b" like this"),
    (b"a", b" b", b" some other words"),
    (b"x y", b"", b"z"),
    (b"x", b"y", b"zz"),
]
# TRL's name of each number that is logged.
LOGGED = {
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "log_prob_chosen": "logps/chosen",
    "log_prob_rejected": "logps/rejected",
}


def ids(text):
    return np.frombuffer(text, np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def models():
    """The params of a model and of its reference, sharper than initial values."""
    initial = jax.jit(jf.init, static_argnums=0)
    return [
        jax.tree.map(lambda leaf: 3 * leaf, initial(CONFIG, jax.random.key(seed)))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def batch():
    template = PreferenceTemplate(RowFormat(24, 24), byte_tokenizer())
    texts = [tuple(part.decode() for part in pair) for pair in TEXTS]
    rows = [
        template.row([template.arrays(*(np.array(part, np.int32) for part in parts))])
        for parts in template.encode(texts, {})
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def trainer(models, tmp_path_factory):
    """TRL's trainer of the two models, which `save_pretrained` has written."""
    folder = tmp_path_factory.mktemp("trl")
    hf = []
    for name, params in zip(("policy", "reference"), models, strict=True):
        jf.save_pretrained(folder / name, params, CONFIG)
        hf.append(LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(257)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="w256", pad_token="w0"
    )
    settings = DPOConfig(
        output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False, beta=BETA
    )
    unused = Dataset.from_dict({"prompt": ["w1"], "chosen": ["w2"], "rejected": ["w3"]})
    return DPOTrainer(hf[0], hf[1], settings, train_dataset=unused, processing_class=tokenizer)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_loss_figures_and_gradients_are_those_of_trl(name, models, batch, trainer, tmp_path):
    end = byte_tokenizer().end_token
    examples = [
        {
            "prompt_ids": ids(prompt).tolist(),
            "chosen_ids": [*ids(chosen).tolist(), end],
            "rejected_ids": [*ids(rejected).tolist(), end],
        }
        for prompt, chosen, rejected in TEXTS
    ]
    trainer.loss_types = [{"dpo": "sigmoid", "ipo": "ipo"}[name]]
    trainer.model.zero_grad()
    trainer._metrics["eval"].clear()
    expected = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(examples))
    expected.backward()
    numbers = {key: values[0] for key, values in trainer._metrics["eval"].items()}

    scores = jf.reference_log_probs(models[1], CONFIG, batch)
    loss = jf.loss_of(name, CONFIG, beta=BETA)

    def mean(params):
        sums = loss(params, batch | scores, None)
        return sums["loss"][0] / sums["loss"][1], sums

    (found, sums), slopes = jax.jit(jax.value_and_grad(mean, has_aux=True))(models[0])
    assert float(found) == pytest.approx(expected.item(), rel=1e-4)
    for ours, theirs in LOGGED.items():
        total, count = sums[ours]
        assert float(total / count) == pytest.approx(numbers[theirs], rel=1e-4), ours
    assert 0 < numbers["rewards/accuracies"] < 1

    # The gradient as a model of its own, so that its tensors have TRL's names and layouts.
    jf.save_pretrained(tmp_path / "gradient", slopes, CONFIG)
    written = LlamaForCausalLM.from_pretrained(tmp_path / "gradient", dtype=torch.float32)
    ours = {path: tensor.detach().numpy() for path, tensor in written.named_parameters()}
    for path, parameter in trainer.model.named_parameters():
        gradient = parameter.grad.numpy()
        largest = np.abs(gradient).max()
        assert largest > 1e-6, path
        np.testing.assert_allclose(ours[path], gradient, rtol=1e-4, atol=1e-4 * largest)


def test_orpo_and_simpo_are_trls_functions_of_mean_log_probabilities(models, batch):
    """Beside the first term of ORPO, which TRL takes over the prompt too."""
    means = np.asarray(pairs_of(models[0], CONFIG, batch).means)
    chosen, rejected = (torch.tensor(means[:, side]) for side in (0, 1))
    cpu = SimpleNamespace(device="cpu")
    orpo = SimpleNamespace(beta=BETA, accelerator=cpu)
    losses, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(orpo, chosen, rejected)
    expected = {"orpo": (-means[:, 0] - losses.numpy(), rewards)}
    simpo = SimpleNamespace(
        beta=BETA,
        simpo_gamma=0.4 * BETA,
        alpha=0.0,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=cpu,
    )
    losses, *rewards = CPOTrainer.cpo_loss(simpo, chosen, rejected)
    expected["simpo"] = (losses.numpy(), rewards)
    for name, (each, (high, low)) in expected.items():
        options = {"margin": 0.4} if name == "simpo" else {}
        sums = jf.loss_of(name, CONFIG, beta=BETA, **options)(models[0], batch, None)
        assert float(sums["loss"][0]) == pytest.approx(each.sum(), rel=1e-5), name
        margin = (high - low).numpy()
        assert float(sums["reward_margin"][0]) == pytest.approx(margin.sum(), rel=1e-4)
        assert float(sums["reward_accuracy"][0]) == (margin > 0).sum()

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
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import jaxformer as jf
from jaxformer.data import RowFormat
from jaxformer.data.templates import PreferenceTemplate, UnpairedTemplate
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


def trainer_of(kind, models, folder):
    """TRL's trainer of the two models, which `save_pretrained` has written."""
    hf = []
    for name, params in zip(("policy", "reference"), models, strict=True):
        jf.save_pretrained(folder / name, params, CONFIG)
        hf.append(LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(257)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="w256", pad_token="w0"
    )
    common = dict(output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False, beta=BETA)
    if kind == "kto":
        unused = {"prompt": ["w1"] * 2, "completion": ["w2"] * 2, "label": [True, False]}
        settings = KTOConfig(desirable_weight=1.5, undesirable_weight=0.5, **common)
        make = KTOTrainer
    else:
        unused = {"prompt": ["w1"], "chosen": ["w2"], "rejected": ["w3"]}
        settings = DPOConfig(**common)
        make = DPOTrainer
    data = Dataset.from_dict(unused)
    return make(hf[0], hf[1], settings, train_dataset=data, processing_class=tokenizer)


@pytest.fixture(scope="module")
def trainer(models, tmp_path_factory):
    return trainer_of("dpo", models, tmp_path_factory.mktemp("trl"))


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

    assert_same_gradients(slopes, trainer.model, tmp_path)


def assert_same_gradients(slopes, model, folder):
    """The gradient as a model of its own, so that its tensors have TRL's names and layouts."""
    jf.save_pretrained(folder / "gradient", slopes, CONFIG)
    written = LlamaForCausalLM.from_pretrained(folder / "gradient", dtype=torch.float32)
    ours = {path: tensor.detach().numpy() for path, tensor in written.named_parameters()}
    for path, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        largest = np.abs(gradient).max()
        assert largest > 1e-6, path
        np.testing.assert_allclose(ours[path], gradient, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize("shift", [1, -1])
def test_kto_is_that_of_trl(shift, models, tmp_path):
    """On the rows of the template, whose second sequence is the prompt with the next completion;
    and with models the other way round, whose divergence has the other sign."""
    records = [(prompt.decode(), text.decode(), i % 2) for i, (prompt, text, _) in enumerate(TEXTS)]
    records = [record for record in records if record[1]]
    template = UnpairedTemplate(RowFormat(24, 24), byte_tokenizer())
    parts = [[np.array(p, np.int32) for p in each] for each in template.encode(records, {})]
    arrays = [template.arrays(*each) for each in parts]
    rows = [template.row([a, b]) for a, b in zip(arrays, arrays[1:] + arrays[:1], strict=True)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    policy, reference = models[::shift]
    trainer = trainer_of("kto", (policy, reference), tmp_path)
    inputs = {"label": torch.tensor(batch["desirable"] > 0)}
    for side, mark in enumerate(("", "KL_")):
        ids = np.concatenate([batch["tokens"][:, side, :1], batch["targets"][:, side]], axis=1)
        weights = np.pad(batch["weights"][:, side], ((0, 0), (1, 0)))
        last = weights.shape[1] - weights[:, ::-1].argmax(axis=1)
        inputs[f"{mark}input_ids"] = torch.tensor(ids).long()
        inputs[f"{mark}completion_mask"] = torch.tensor(weights).long()
        real = np.arange(ids.shape[1]) < last[:, None]
        inputs[f"{mark}attention_mask"] = torch.tensor(real).long()
    expected = trainer._compute_loss(trainer.model.eval(), inputs, False)
    expected.backward()
    numbers = {key: values[0] for key, values in trainer._metrics["eval"].items()}

    scores = jf.reference_log_probs(reference, CONFIG, batch)
    loss = jf.loss_of("kto", CONFIG, beta=BETA, desirable=1.5, undesirable=0.5)

    def mean(params):
        sums = loss(params, batch | scores, None)
        return sums["loss"][0] / sums["loss"][1], sums

    (found, sums), slopes = jax.jit(jax.value_and_grad(mean, has_aux=True))(policy)
    assert float(found) == pytest.approx(expected.item(), rel=1e-4)
    assert float(sums["kl"][0] / sums["kl"][1]) == pytest.approx(numbers["kl"], rel=1e-4)
    assert_same_gradients(slopes, trainer.model, tmp_path)


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

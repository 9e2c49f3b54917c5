"""Tiny directories and tasks for the evaluation harness, and what it gets of a model for them."""

import json
import random

LENGTH = 96
WORDS = (
    "the a cat dog tree sees likes under over and slowly river stone bright über naïve 42 <b> it's"
)
END = {"gpt2": "<|endoftext|>", "llama": "</s>"}
CHAT_TOKENS = ["<|turn|>", "<|over|>"]
# It strips the contents, refuses a system message, and has no token of its own before the text.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system')"
    " }}{% endif %}<|turn|>{{ message.role }}\n{{ message.content | trim }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def text(rng, count):
    return " ".join(rng.choices(WORDS.split(), k=count))


def tokenizer_of(kind):
    """A byte-level BPE trained on the spot; Llama's puts <s> before a text, T5's </s> after it."""
    import tokenizers as tk
    import transformers as tf

    backend = tk.Tokenizer(tk.models.BPE())
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tk.decoders.ByteLevel()
    names = {"gpt2": [END["gpt2"]], "llama": ["<s>", END["llama"]], "t5": ["<pad>", "</s>"]}[kind]
    alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text(random.Random(0), 4000)], trainer)
    if kind == "llama":
        backend.post_processor = tk.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    if kind == "t5":
        backend.post_processor = tk.processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        return tf.PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token=names[0], eos_token=names[1]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=names[0], eos_token=names[-1]
    )


def model_of(kind, tokenizer):
    """A random model that is sure of its next token, and often ends its text."""
    import torch
    import transformers as tf

    torch.manual_seed(3)
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        config = tf.T5Config(vocab_size=len(tokenizer), n_positions=LENGTH, **sizes, **ids)
        model = tf.T5ForConditionalGeneration(config)
        with torch.no_grad():
            model.get_output_embeddings().weight *= 3
        return model
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if kind == "gpt2":
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(**ids, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)
        )
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        model = tf.LlamaForCausalLM(
            tf.LlamaConfig(**ids, **sizes, num_key_value_heads=2, max_position_embeddings=LENGTH)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
        model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 1.5
    return model


def save(kind, folder, chat=False):
    """A Hugging Face directory, with a chat template if asked for."""
    tokenizer = tokenizer_of(kind)
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": CHAT_TOKENS})
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model_of(kind, tokenizer).save_pretrained(folder)


def choices(rng):
    """Texts of all lengths, beyond the model's too; choices of one token and of many, and contexts
    that end in a space."""
    for count in (1, 3, 5, 8, 13, 21, 40, 80, 90, 120, 200):
        question = text(rng, count) + rng.choice(["", " ", "\n", ":"])
        answers = rng.choice(
            [[" A", " B", " C", " D"], [text(rng, rng.randint(1, 30)) for _ in range(3)]]
        )
        yield {"question": question, "choices": answers, "label": 0}
    yield {"question": "", "choices": ["the cat", " dog"], "label": 1}


TASKS = {
    "tiny_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
    "tiny_writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "the cat",
        "generation_kwargs": {"until": ["e", " do"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_endless": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "the cat",
        "generation_kwargs": {"until": [], "max_gen_toks": 40},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder):
    rng = random.Random(1)
    texts = [{"text": text(rng, count)} for count in (1, 2, 4, 9, 30, 60, 100, 300)]
    texts.append({"text": f"{END['gpt2']} and {END['llama']}<s> the"})
    for name, task in TASKS.items():
        rows = list(choices(rng)) if name == "tiny_choices" else texts
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"task": name, "dataset_path": "json", "test_split": "test"}
        files = {"test": str(folder / f"{name}.jsonl")}
        data["dataset_kwargs"] = {"data_files": files, "cache_dir": str(folder / "cache")}
        (folder / f"{name}.yaml").write_text(json.dumps(data | task))  # JSON is YAML


def answered(model, tasks, names=tuple(TASKS), **settings):
    """What the harness asked and got, by task, and the metrics."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=list(names), task_manager=manager, bootstrap_iters=0, **settings
    )
    samples = {
        name: [(sample["arguments"], sample["resps"]) for sample in found["samples"][name]]
        for name in names
    }
    return samples, {
        name: {k: v for k, v in found["results"][name].items() if "," in k} for name in names
    }

"""train.eval_tasks: a run asks its model the tasks of the evaluation harness."""

import random
import sys

import jax
import pytest
from tiny_run import PLAIN, assert_same_run, copy_until, line, logged, train_here, write_text

pytest.importorskip("lm_eval")
from harness import answered, text, write_tasks
from several import SMALL, finished, launch_all

import jaxformer as jf
from jaxformer.config.config_file import check
from jaxformer.config.train import TrainConfig
from jaxformer.runs.evaluation import Tasks
from jaxformer.tokenizer import train_bpe_tokenizer

pytestmark = pytest.mark.xdist_group("lm_eval")
ACCURACY = "tasks/tiny_choices/acc"
LONG = {"model.max_length": 128}  # tokens of the longest choice
CHANGES = PLAIN | {
    "train.steps": 8,
    "train.eval_every": 2,
    "train.eval_tasks_every": 4,
    "train.microbatches": 1,
    "optimizer.decay_steps": 8,
    **LONG,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def small_model(length=80):
    tokenizer = train_bpe_tokenizer([text(random.Random(0), 400)], 280)
    config = jf.ModelConfig(vocab_size=280, d_model=32, n_layers=1, n_heads=2, max_length=length)
    return config, tokenizer


def files(tasks, *names):
    return ",".join(str(tasks / f"{name}.yaml") for name in names)


@pytest.mark.slow
def test_the_results_are_those_of_the_harness_and_the_same_each_time(tasks):
    from jaxformer.runs.harness import HarnessModel
    from jaxformer.runs.loading import Loaded

    config, tokenizer = small_model(length=128)
    ask = Tasks(files(tasks, "tiny_choices", "tiny_writing"), config, tokenizer)
    params = [jf.init(config, jax.random.key(seed)) for seed in (0, 1)]
    first, other, again = ask(params[0]), ask(params[1]), ask(params[0])
    assert first == again != other
    model = HarnessModel(Loaded(params[0], config, tokenizer), "a model", max_gen_toks=40)
    _, results = answered(model, tasks, ["tiny_choices", "tiny_writing"])
    assert first == {
        f"tasks/{task}/{name.partition(',')[0]}": value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if "_stderr" not in name
    }


@pytest.mark.slow
def test_a_run_logs_the_tasks_and_a_resumed_one_gives_the_same(tasks, tmp_path, capsys):
    changes = CHANGES | {"train.eval_tasks": files(tasks, "tiny_choices")}
    arguments = line(tmp_path / "run", write_text(tmp_path / "text.txt"), changes)
    assert train_here(arguments) == 0
    steps = [entry["step"] for entry in logged(tmp_path / "run") if ACCURACY in entry]
    assert steps == [4, 8] and "tiny_choices/acc 0." in capsys.readouterr().out
    resumed = copy_until(4, tmp_path / "run", tmp_path / "resumed")
    arguments = line(resumed, tmp_path / "text.txt", changes)
    assert train_here(arguments) == 0
    assert_same_run(resumed, tmp_path / "run")


@pytest.mark.slow
def test_the_tasks_are_asked_by_all_processes_of_a_run(tasks, tmp_path):
    """Each has a part of the parameters, and the first one logs the results."""
    changes = SMALL | LONG | {"train.eval_tasks": files(tasks, "tiny_choices", "tiny_perplexity")}
    text_file = write_text(tmp_path / "text.txt")
    finished(launch_all(2, tmp_path / "two", text_file, changes | {"mesh.fsdp": 2}))
    one = line(tmp_path / "one", text_file, changes)
    assert train_here(one) == 0
    found, expected = (logged(tmp_path / name)[-1] for name in ("two", "one"))
    names = [name for name in expected if name.startswith("tasks/")]
    assert len(names) == 5
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name


REFUSED = {
    "an unknown task": ("nothing_like_it.yaml", "nothing_like_it.yaml', which the evaluation"),
    "a choice that is too long": ("tiny_choices.yaml", "tokens does not fit into max_length=80"),
    "a task that writes too much": ("tiny_long.yaml", "max_gen_toks=80 leaves no space"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_said_before_training(tasks, name):
    file, message = REFUSED[name]
    if file == "tiny_long.yaml":
        task = (tasks / "tiny_writing.yaml").read_text()
        long = task.replace('"max_gen_toks": 40', '"max_gen_toks": 80')
        (tasks / file).write_text(long.replace('"task": "tiny_writing"', '"task": "tiny_long"'))
    config, tokenizer = small_model()
    with pytest.raises(jf.ConfigError, match=message):
        Tasks(str(tasks / file), config, tokenizer)


def test_a_run_without_the_harness_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    arguments = line(
        tmp_path / "run", write_text(tmp_path / "text.txt"), CHANGES | {"train.eval_tasks": "arc"}
    )
    assert train_here(arguments) == 2
    assert 'pip install "jaxformer[lm_eval]"' in capsys.readouterr().err


def test_the_steps_at_which_tasks_are_asked_are_those_of_evaluations():
    with pytest.raises(jf.ConfigError, match=r"eval_tasks_every=6 is no multiple .*eval_every=4"):
        check(jf.RunConfig(train=TrainConfig(eval_every=4, eval_tasks_every=6)))

"""Fine-tunes a model on a text of yours.

    python train.py configs/finetune.py --run.init_from DIRECTORY --data.train book.txt

DIRECTORY is a run, or a Hugging Face model. No setting of the model is stated here, so all of them
are those of that model; one on the command line takes effect, as in `--model.rope.scaling yarn
--model.rope.factor 4 --model.max_length 8192`.
"""

from jaxformer import RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, RunSettings, TrainConfig

config = RunConfig(
    run=RunSettings(dir="runs/finetune"),
    data=DataConfig(sequence_length=256, packing="documents"),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=20, weight_decay=0.01),
    train=TrainConfig(steps=200, batch_size=8, eval_every=100, checkpoint_every=100),
)

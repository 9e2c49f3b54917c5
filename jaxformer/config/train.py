"""The settings of training, of the optimizer, of the device mesh, and of how several processes
join."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jaxformer.config.settings import (
    AutoCount,
    Bounds,
    Count,
    Factor,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    Volatile,
    divisors,
    parsed_groups,
)
from jaxformer.files import ConfigError

# Which weights of a run are read: auto is the average where the run keeps one.
Weights = Literal["auto", "trained", "average"]
LayerProducts = Literal["dtype", "fp8"]


@dataclass(frozen=True)
class TrainConfig(Section):
    """Steps, batches, logging, evaluation and checkpoints."""

    section = "train"

    steps: Volatile[Count] = 1000
    """Number of optimizer steps of the whole run."""
    batch_size: Annotated[int, Bounds(1, most=2**24)] = 16
    """Number of sequences per step, over all devices."""
    microbatches: AutoCount = "auto"
    """Number of microbatches into which a batch is split to save memory; auto selects 1 on GPU and
    TPU, and on CPU the fewest whose activations take 4 GB at most."""
    label_smoothing: Rate = 0.0
    """Weight of the uniform distribution in the targets."""
    z_loss: NonNegative = 0.0
    """Coefficient of the squared log-partition function, usually 1e-4; 0 disables it."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the loss of training stores logits; all sums, and evaluations, are float32.
    bfloat16 has an error of 0.01 nats a token and 0.4 % of a gradient (root mean squares) where
    logits are below 16, of 0.14 nats and 3 % near -100. Losses of preferences take float32."""
    deterministic: Volatile[bool] = False
    """Whether a GPU takes no kernel that adds in no fixed order, and selects none by its time,
    which makes steps slower; programs for other devices are deterministic anyway."""
    products: LayerProducts = "dtype"
    """How training multiplies by the matrices of the layers: in model.dtype, or in codes of 8 bits
    that are scaled by the largest number of each array, the gradients too. Sums are float32. Heads,
    embeddings, norms, routers, experts, quantized weights and evaluations stay in model.dtype. Only
    an NVIDIA GPU from Ada and Hopper on is faster with fp8."""
    preference_beta: NonNegative = 0.0
    """Coefficient beta of a preference objective (lambda of orpo, tau of ipo); 0 uses its default:
    0.1 for dpo, ipo, orpo and kto, 2 for simpo."""
    preference_margin: NonNegative = 0.5
    """Target margin of the rewards of simpo as a fraction of beta (gamma / beta)."""
    preference_desirable: NonNegative = 1.0
    """Weight of the loss of a desirable completion of kto. Together the weights should make both
    kinds count about as much: weight x number."""
    preference_undesirable: NonNegative = 1.0
    """Weight of the loss of an undesirable completion of kto."""
    contrastive_temperature: Factor = 0.05
    """Temperature of the objective contrastive, by which cosines of vectors are divided."""
    contrastive_widths: str = ""
    """Widths, such as '64, 128', to which the vectors of the objective contrastive may be cut after
    training: its loss is the mean of theirs and that of the whole vectors."""
    ema: Fraction = 0.0
    """Decay d of an exponential average that a run keeps of its weights, each step counting d times
    as much as the next one; 1 is the plain mean, 0 keeps none. Evaluations and every command take
    the average. It needs 4 bytes a parameter."""
    average_from: Natural = 0
    """Number of steps before the average of train.ema begins. Until then it is the weights
    themselves."""
    log_every: Volatile[Count] = 10
    """Number of steps between lines of metrics.jsonl."""
    eval_every: Volatile[Natural] = 200
    """Number of steps between evaluations; 0 evaluates only at the end."""
    eval_batches: Volatile[Natural] = 0
    """Number of batches of an evaluation during training; 0 and the final one read all."""
    eval_tasks: Volatile[str] = ""
    """Tasks of the evaluation harness that the model is asked during training, separated by commas:
    names of its tasks, or YAML files of your own. Their results are metrics of the run."""
    eval_tasks_every: Volatile[Natural] = 0
    """Number of steps between two times that the tasks are asked, a multiple of train.eval_every; 0
    asks them only at the end."""
    checkpoint_every: Volatile[Natural] = 200
    """Number of steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: Volatile[Count] = 2
    """Number of most recent checkpoints that are kept."""
    keep_every: Volatile[Natural] = 0
    """Number of steps between checkpoints that are kept for good; 0 keeps none for that."""
    keep_best: Volatile[Natural] = 0
    """Number of checkpoints kept for the lowest validation loss, of those saved at a step with an
    evaluation."""
    on_bad_step: Volatile[Literal["stop", "skip", "rollback"]] = "stop"
    """What follows a bad step, whose update is never applied: one with a loss or gradient that is
    not finite, or a spike (train.spike_factor). stop ends the run, skip goes on, rollback goes on
    after that batch from the newest checkpoint. Ten steps are skipped, or rollbacks made, at most.
    """
    spike_factor: Volatile[Annotated[float, Bounds(0, most=1e6)]] = 0.0
    """Number of deviations above the median of the last 128 steps from which a loss or a gradient
    norm is a spike; 0: none is. A run is begun with it or without it."""

    @property
    def n_microbatches(self) -> int:
        """Return the number of microbatches; 1 for an "auto" that `runs/resolve.py` has not
        resolved."""
        return 1 if self.microbatches == "auto" else self.microbatches

    def conflicts(self) -> list[str]:
        every = self.eval_tasks_every
        if every and (not self.eval_every or every % self.eval_every):
            return [
                f"eval_tasks_every={every} is no multiple of train.eval_every={self.eval_every}:"
                " the tasks are asked in some of the evaluations."
            ]
        if self.average_from and not self.ema:
            return [
                f"average_from={self.average_from} is the beginning of the average of train.ema,"
                " which is 0: set train.ema to 1 for the plain mean of the weights after it, or to"
                " a decay such as 0.999."
            ]
        if self.average_from and self.average_from >= self.steps:
            return [
                f"average_from={self.average_from} leaves no step of train.steps={self.steps} to"
                " average: choose a smaller one."
            ]
        if self.batch_size % self.n_microbatches:
            return [
                f"batch_size={self.batch_size} is not divisible by"
                f" train.microbatches={self.microbatches}: choose one of"
                f" {divisors(self.batch_size)} microbatches."
            ]
        return []


OptimizerName = Annotated[
    Literal[
        "adamw", "adafactor", "lion", "sgd", "muon", "normuon", "soap", "sophia", "schedule_free"
    ],
    TableAt("jaxformer.training.optimizers.run_optimizer.OPTIMIZERS"),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"],
    TableAt("jaxformer.training.optimizers.schedules.SCHEDULES"),
]
Moments = Annotated[
    Literal["float32", "bfloat16", "int8"], TableAt("jaxformer.training.optimizers.moments.STORES")
]


# What a group of optimizer.groups may give: factors of its learning rate and its weight decay.
GROUP_WORDS = ("lr", "decay")


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    section = "optimizer"

    name: OptimizerName = "adamw"
    """Rule of the update. muon and normuon update the matrices of the layers, and leave all other
    parameters to AdamW. schedule_free wants schedule=constant."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: Natural = 100
    """Number of steps of linear warm-up from 0."""
    decay_steps: Volatile[Natural] = 0
    """Step at which the decay ends; 0 uses train.steps. The rate then stays at its final value."""
    final_fraction: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    wsd_decay_fraction: Annotated[float, Bounds(1e-6, 1)] = 0.2
    """Fraction of the steps after the warm-up in which the wsd schedule decays, one at least."""
    weight_decay: NonNegative = 0.1
    """Weight decay, decoupled from the gradient and multiplied by the learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters to which weight decay applies: matrices, or all."""
    cautious: bool = False
    """Leave out the numbers of an update whose sign is not that of the gradient, and enlarge the
    others instead."""
    groups: str = ""
    """Factors of the learning rate and the weight decay of some parameters, as in
    'embed: lr 0.3, norm: decay 0'. A pattern is one of matrix, lookup, norm and bias, or a name or
    a pattern of the paths that `jaxformer shapes` lists."""
    muon_unit: Literal["matrix", "head"] = "matrix"
    """What muon and normuon orthogonalize at a time: a matrix, or the part of it that belongs to a
    head of attention."""
    soap_max_side: Count = 10_000
    """Longest side of a matrix for which soap keeps a factor, length x length numbers twice; longer
    sides, such as a vocabulary, have none."""
    moments: Moments = "float32"
    """How the moments of matrices are stored between steps: bfloat16 and int8 (blocks of up to 256
    numbers with a scale) are rounded at random, by the seed and the step."""
    b1: Rate = 0.9
    """Decay rate of the first moment (AdamW, Lion, Muon, and the momentum of SGD)."""
    b2: Rate = 0.95
    """Decay rate of the second moment."""
    eps: NonNegative = 1e-8
    """Constant added to the square root of the second moment."""
    clip_norm: NonNegative = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""

    def conflicts(self) -> list[str]:
        try:
            parsed_groups(self.groups, GROUP_WORDS)
        except ConfigError as error:
            return [str(error)]
        return []


@dataclass(frozen=True)
class MeshConfig(Section):
    """Device mesh; the product of its sizes is the number of devices."""

    section = "mesh"

    data: Volatile[Natural] = 0
    """Data parallelism: number of replicas; 0 uses the devices that the other axes leave."""
    fsdp: Volatile[Count] = 1
    """Number of devices over which parameters and batch of a replica are sharded (FSDP)."""
    expert: Volatile[Count] = 1
    """Expert parallelism: devices over which experts are split, rows and other parameters as by
    fsdp."""
    context: Volatile[Count] = 1
    """Context parallelism: devices over which the tokens of each row are split, and parameters as
    by fsdp."""
    tensor: Volatile[Count] = 1
    """Tensor parallelism: devices over which heads, feed-forward width and vocabulary are split."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis, as `make_mesh` takes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True)
class DistillConfig(Section):
    """Distillation (arXiv:1503.02531): what a run learns from a teacher beside its targets."""

    section = "distill"

    teacher: str = ""
    """Directory, or URL, of the model whose probabilities the run learns: a run, a Hugging Face
    model, a GGUF file or an adapter, with the tokenizer of the run. Empty learns from the data
    alone."""
    temperature: Factor = 1.0
    """Temperature T by which the logits of both models are divided. The divergence is multiplied by
    T^2, so that its gradient stays about as large."""
    share: Fraction = 0.5
    """Share of the plain loss: the run minimizes share * plain + (1 - share) * T^2 * KL(teacher ||
    model); 0 learns from the teacher alone."""

    def conflicts(self) -> list[str]:
        default = DistillConfig.temperature, DistillConfig.share
        if not self.teacher and (self.temperature, self.share) != default:
            return [
                f"temperature={self.temperature} and distill.share={self.share} say how a run"
                " learns from a teacher, and distill.teacher is empty: name one, or leave them out."
            ]
        return []


@dataclass(frozen=True)
class GRPOConfig(Section):
    """Rewards (arXiv:2402.03300): how a model answers, and how its answers are compared."""

    section = "grpo"

    reward: str = ""
    """Function of the rewards, as module:function, of a module in the current directory or of a
    package: (prompts, answers, targets) to a number for each answer. Targets are the texts of
    data.target_field."""
    group: Annotated[int, Bounds(2, most=2**16)] = 8
    """Number of answers to a prompt, which are compared with each other; train.batch_size is that
    of all answers of a step."""
    new_tokens: Count = 256
    """Largest number of tokens of an answer; data.source_length is that of a prompt."""
    temperature: Factor = 1.0
    """Temperature at which answers are drawn, and for which their probabilities are."""
    clip: Annotated[float, Bounds(0, below=1)] = 0.2
    """Largest change below 1 of a ratio of probabilities that has a gradient, and above 1 where
    clip_high is 0."""
    clip_high: NonNegative = 0.0
    """Largest change above 1 of that ratio; 0 takes clip."""
    kl: NonNegative = 0.0
    """Coefficient of the divergence from the reference, 0.04 in the paper; 0 needs no reference."""
    lengths: Literal["answer", "tokens", "constant"] = "answer"
    """By what the sum over the tokens is divided: the length of each answer, the tokens of all
    answers of the batch, or new_tokens for each answer (arXiv:2503.20783)."""
    deviation: bool = True
    """Whether the advantages of a group are divided by the standard deviation of its rewards."""


@dataclass(frozen=True)
class LaunchConfig(Section):
    """How the processes of a run join. One process needs none of it; Slurm, Kubernetes, Cloud TPU
    and Open MPI say it by their environment."""

    section = "launch"

    coordinator: Volatile[str] = ""
    """Host and port of process 0, for example node1:12345, where the processes of a run meet."""
    process: Volatile[Annotated[int, Bounds(-1)]] = -1
    """Index of this process, from 0; -1 takes it from the launcher's environment."""
    processes: Volatile[Natural] = 0
    """Number of processes; 0 takes it from the launcher's environment, 1 joins no others."""
    timeout: Volatile[Annotated[float, Bounds(1)]] = 300.0
    """Seconds to wait for the other processes; those that did not come are then named."""

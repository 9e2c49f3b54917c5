"""GPT-2 124M, a 1.1B Llama, BERT and T5 on TPUs: `python benchmarks/train_tpu.py [--fsdp N]`

Needs only a TPU and jax[tpu]. First the device is checked: a run that is stopped and continued
against one that is not, and the attention kernel of each row against float32, forward and backward,
on its shapes. Then each row is trained on random tokens by the library's own step: plain, packed
and padded rows, a window, rows of 8k and 32k tokens, and each policy of model.remat; 5 steps of
warm-up, each timed step waited for, twice. The results are written after each row. `--smoke` runs
the same code in small, on a CPU too, and says nothing about a TPU.
"""

import sys

from accelerator import ours, parsed, parser_of, run_benchmark

SMOKE = ("gpt2_124m_packed", "t5_small_padded")


def main() -> int:
    options = parsed(parser_of(str(__doc__)), SMOKE)
    return run_benchmark("tpu", lambda name: {"jaxformer": ours}, options)


if __name__ == "__main__":
    sys.exit(main())

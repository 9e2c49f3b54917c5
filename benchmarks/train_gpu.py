"""GPT-2 124M, a 1.1B Llama, BERT and T5 on a GPU, the plain ones beside torch.compile.
`python benchmarks/train_gpu.py [--torch-python PYTHON]`

Needs only a GPU, jax[cuda] and, for the baseline, PyTorch. First the device is checked: a run that
is stopped and continued against one that is not, and the attention kernel of each row against
float32, forward and backward, on its shapes. Then each row is trained on random tokens by the
library's own step: plain, packed and padded rows, a window, rows of 8k and 32k tokens, and each
policy of model.remat. The baseline trains the plain ones by the same mathematics (bfloat16 products
and residual stream, float32 master weights, fused AdamW, clipping) in separate processes one after
the other, 5 steps of warm-up, each timed step waited for, twice. The results are written after each
row. `--smoke` runs the same code in small, on a CPU too, and says nothing about a GPU.
"""

import argparse
import importlib.util
import sys

from accelerator import Side, ours, parsed, parser_of, run_benchmark, timed
from pairing import Answer, python_worker
from workloads import torch_flags

from jaxformer.config.run import RunConfig

# The workloads that torch_gpu_baseline.py has the mathematics of.
BASELINES = ("gpt2_124m_gpu", "llama_1b_gpu")
SMOKE = ("llama_1b_gpu", "bert_base_padded")


def baseline(name: str, run: RunConfig, options: argparse.Namespace) -> Answer:
    flags = [*torch_flags(run), "--device", options.torch_device]
    flags += ["--torch-mode", options.torch_mode]
    python = options.torch_python
    with python_worker("torch", "torch_gpu_baseline.py", *flags, python=python) as worker:
        return worker.about | timed(worker, options)


def main() -> int:
    parser = parser_of(str(__doc__))
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        help="a Python that has PyTorch; empty leaves the baseline out",
    )
    parser.add_argument(
        "--torch-mode", default="default", help="mode of torch.compile; none runs eagerly"
    )
    options = parsed(parser, SMOKE)
    options.torch_device = "cpu" if options.smoke else "cuda"
    if options.smoke:
        options.torch_mode = "none"  # to compile takes a minute
    if options.torch_python == sys.executable and importlib.util.find_spec("torch") is None:
        print(
            "No PyTorch in this Python, so the baseline is left out; --torch-python names another.",
            flush=True,
        )
        options.torch_python = ""

    def sides_of(name: str) -> dict[str, Side]:
        compared = options.torch_python and name in BASELINES
        return {"jaxformer": ours, "torch": baseline} if compared else {"jaxformer": ours}

    return run_benchmark("gpu", sides_of, options)


if __name__ == "__main__":
    sys.exit(main())

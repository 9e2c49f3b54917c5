"""Llama 3 8B's shape (arXiv:2407.21783); set the mesh to your devices, as in --mesh.fsdp 8.

Give it text and a tokenizer: --data.train 'corpus/*.jsonl.zst' --tokenizer.path
llama3/tokenizer.json

On 16 chips of 16 GiB (v5e:4x4, mesh.fsdp 16, one row a chip) the host can keep what layers store:
--model.remat names --model.saved none --model.offload attention,input. By the compiler a step then
takes 10 GiB of a chip at its peak (row llama3_8b_v5e_host of benchmarks/compiled.py).
"""

from dataclasses import replace

from llama_1b import config as base

from jaxformer.config import with_settings

config = replace(
    base,
    run=replace(base.run, dir="runs/llama3_8b"),
    model=with_settings(
        base.model,
        {
            "vocab_size": 128_256,
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "d_ff": 14_336,
            "max_length": 8192,
            "rope.theta": 500_000.0,
            "layer_loop": "scan",
            "remat": "full",
        },
    ),
    data=replace(base.data, sequence_length=8192),
    tokenizer=replace(base.tokenizer, vocab_size=128_256),
    optimizer=replace(base.optimizer, learning_rate=3e-4),
    train=replace(base.train, batch_size=128, microbatches=4),
)

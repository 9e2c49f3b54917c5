"""gpt-oss as it was published: the weights of its experts are packed as MXFP4."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from pretrained import assert_close, directory, each, inputs, logits, our_logits, rewrite
from pretrained_variants import GPT_OSS, VARIANTS
from safetensors.torch import load_file, save_file
from transformers import Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import jaxformer as jf
from jaxformer.interop import tensor_files
from jaxformer.interop.pretrained import pretrained_config
from jaxformer.interop.tensor_files import unpacked

ONE = "model.safetensors"
PACKED = ("gate_up_proj", "down_proj")
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def reference_bits(blocks, scales):
    found = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return found.view(torch.uint16).numpy()


def test_every_byte_with_every_scale_is_unpacked_as_transformers_unpacks_it():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, 1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(16, 2)
    found, expected = unpacked(blocks, scales), reference_bits(blocks, scales)
    assert found.dtype == ml_dtypes.bfloat16 and found.shape == expected.shape == (1, 512, 256)
    assert np.array_equal(found.view(np.uint16), expected)


def packed_directory(place, name="gpt-oss"):
    """A copy of the model, its experts replaced by packed ones: the directory, and the tensors that
    transformers unpacks from them."""
    shutil.copytree(directory(name), place)
    stored, dense, rng = load_file(place / ONE), {}, np.random.default_rng(0)
    for key in [key for key in stored if key.endswith(PACKED)]:
        experts, inner, outer = stored.pop(key).shape
        shape = (experts, outer, inner // 32)
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = rng.integers(121, 126, shape, dtype=np.uint8)
        stored[f"{key}_blocks"], stored[f"{key}_scales"] = map(torch.from_numpy, (blocks, scales))
        dense[key] = convert_moe_packed_tensors(stored[f"{key}_blocks"], stored[f"{key}_scales"])
    save_file(stored, place / ONE)
    rewrite(place, quantization_config=CONFIG)
    return place, dense


@each(["gpt-oss yarn"])
def test_a_packed_model_is_that_which_transformers_unpacks(name, tmp_path):
    place, dense = packed_directory(tmp_path / "packed", name)
    hf = VARIANTS[name][0].from_pretrained(
        place,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model, batch = jf.load(place), inputs(name)
    assert_close(our_logits(model, batch), logits(hf.eval(), batch), batch)
    assert pretrained_config(place) == pretrained_config(directory(name))
    gate = model.params["blocks"]["experts"]["gate"][0]
    expected = dense["model.layers.0.mlp.experts.gate_up_proj"][..., ::2]
    assert np.array_equal(gate, expected.float().numpy())
    # The same in bfloat16, which has every number of four bits exactly.
    rounded = jf.load(place, dtype="bfloat16").params["blocks"]["experts"]["down"]
    assert np.array_equal(rounded.astype("float32"), model.params["blocks"]["experts"]["down"])


def test_a_packed_model_is_written_unpacked(tmp_path):
    place, dense = packed_directory(tmp_path / "packed")
    model = jf.load(place)
    jf.save_pretrained(tmp_path / "out", model.params, model.config, dtype="bfloat16")
    written = load_file(tmp_path / "out" / ONE)
    assert all(torch.equal(written[key], weight) for key, weight in dense.items())
    assert written.keys() == load_file(directory("gpt-oss") / ONE).keys()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_one_expert_is_unpacked_at_a_time(tmp_path, monkeypatch):
    place, _ = packed_directory(tmp_path / "packed")
    numbers = []

    def counted(blocks, scales):
        numbers.append(blocks.shape[0])
        return unpacked(blocks, scales)

    monkeypatch.setattr(tensor_files, "unpacked", counted)
    jf.load(place)
    layers, experts = GPT_OSS["num_hidden_layers"], GPT_OSS["num_local_experts"]
    # gate and up are each read from the tensor of both.
    assert set(numbers) == {1} and len(numbers) == 3 * layers * experts


DOWN = "model.layers.0.mlp.experts.down_proj"
WRONG = {
    "blocks of 16 numbers": ({f"{DOWN}_blocks": ((5, 64, 2, 8), torch.uint8)}, r"\[5, 64, 2, 8\]"),
    "flat blocks": ({f"{DOWN}_blocks": ((5, 64, 16), torch.uint8)}, r"\[5, 64, 16\]"),
    "fewer scales": ({f"{DOWN}_scales": ((5, 32, 1), torch.uint8)}, r"scales U8 \[5, 32, 1\]"),
    "floats": ({f"{DOWN}_scales": ((5, 64, 1), torch.float32)}, r"scales F32 \[5, 64, 1\]"),
    "no scales": ({f"{DOWN}_scales": None}, "down_proj_blocks without .*down_proj_scales"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_packed_so_is_refused_with_its_name_and_shape(case, tmp_path):
    changes, reason = WRONG[case]
    place, _ = packed_directory(tmp_path / "packed")
    stored = load_file(place / ONE)
    for key, change in changes.items():
        stored.pop(key)
        if change:
            stored[key] = torch.ones(change[0], dtype=change[1])
    save_file(stored, place / ONE)
    with pytest.raises(jf.ConfigError, match=reason) as error:
        jf.load(place)
    assert DOWN in str(error.value) and "uint8 [experts, out, groups, 16] (32 numbers" in str(
        error.value
    )


def test_packed_tensors_without_their_method_in_config_json_are_refused(tmp_path):
    place, _ = packed_directory(tmp_path / "packed")
    rewrite(place, quantization_config=None)
    with pytest.raises(jf.ConfigError, match=r"down_proj: not in model\.safetensors"):
        jf.load(place)

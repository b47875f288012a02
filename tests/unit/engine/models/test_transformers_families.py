import numpy as np
import pytest
import torch

from benchmarks.model_driver import ModelDriver
from engine.models.registry import load_model

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
pytestmark = pytest.mark.filterwarnings("default")

SMALL = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 19}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 2}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_on_random_weights(family, tmp_path):
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 90, 150).tolist()
    with torch.inference_mode():
        truth = theirs(torch.tensor([ids])).logits[0]
    driver = ModelDriver(load_model(tmp_path), num_rows=2)
    got = torch.cat(
        [driver.every_logit({1: ids[:70]}), driver.every_logit({1: ids[70:149]}), driver.step({1: ids[149:]})]
    )
    torch.testing.assert_close(got, truth, atol=1e-4, rtol=1e-4)

"""transformers imports any module named `kernels` that it finds, so the folder of that name must not look like one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_transformers_is_not_shadowed_at_the_repository_root():
    code = (
        "import importlib.util\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None, spec  # a bare folder at most\n"
        "import transformers, kvrepro_kernels\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "size = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)\n"
        "LlamaForCausalLM(LlamaConfig(**size))\n"
        "print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr

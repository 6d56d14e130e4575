"""What importing costs and changes: no torch, no registry, nothing until it is asked for."""

import subprocess
import sys

import pytest


def fresh(code: str) -> str:
    """Output of `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["k3", "k3.layout", "k3.checkpoint.index", "k3.checkpoint", "k3.parallel", "k3.config"]
)
def test_no_torch(module):
    """These modules import no torch, no transformers and no triton."""
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'triton', 'fla') if m in sys.modules])"
    assert fresh(code) == "[]"


def test_lazy_attributes():
    """Public names resolve on first use, `dir` lists them, and a wrong name says what there is."""
    code = """
import k3, sys
assert set(k3.__all__) <= set(dir(k3)) and "torch" not in sys.modules
assert k3.K3Config().num_hidden_layers == 93 and "torch" not in sys.modules
assert k3.K3Model.__module__ == "k3.model" and "torch" in sys.modules
try:
    k3.K3Modle
except AttributeError as error:
    print(error)
"""
    assert fresh(code).startswith("module 'k3' has no attribute 'K3Modle'; it offers Cache, K3Config, K3Model")


def test_import_changes_no_registry():
    """After importing every public name but calling nothing, transformers does not know kimi_k3."""
    code = """
import k3
from k3 import *
import k3.protocol, k3.registry, k3.model
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
print("kimi_k3" in CONFIG_MAPPING, "kimi_linear" in CONFIG_MAPPING)
"""
    assert fresh(code) == "False True"

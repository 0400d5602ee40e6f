"""What importing loads, and what a process of its own must survive."""

import runpy
import subprocess
import sys

import pytest

import rewire

PROGRAM = """
import sys
import torch
loaded = set(sys.modules)  # by torch alone

def absent(*names):
    for name in names:
        assert name not in sys.modules, name

import rewire
absent("safetensors", "rich", "typer", "PIL", "pooch", "platformdirs", "tomli", "matplotlib")
absent("rewire.data", "requests")
absent(*{"triton", "torch.utils.flop_counter"} - loaded)
import rewire.data
absent("pooch", "PIL", "requests", "rich")
import rewire.cli
absent("matplotlib")

# without their checks these would read from address 0
import rewire.ops.topology as topology
none = torch.empty(0, dtype=torch.int32)
try:
    topology.build(none, none, 3)
except topology.TopologyError:
    print("build refused")
layer = rewire.SparseLinear(4, 3, bias=False, sparsity=0.5)
try:
    layer.load_state_dict({"indptr": none, "indices": none, "values": torch.empty(0)})
except RuntimeError:
    print("state refused")
layer(torch.zeros(2, 4))
"""


def test_importing_loads_little_and_empty_topologies_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "build refused\nstate refused\n"


def test_it_runs_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rewire", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("rewire", run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out.strip() == f"rewire {rewire.__version__}"

"""Sparse layers in models that torch shards: FSDP and DTensor."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rewire
from parallel import batch, build, run, sgd, share
from rewire import distributed

# What FSDP allows, without rewiring ---------------------------------------------------------------


def _by_block(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _whole(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _freed_at_once(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


HOW: dict[str, Callable[[nn.Module], None]] = {
    "by block": _by_block,
    "whole": _whole,
    "freed at once": _freed_at_once,
}


def train(rank: int, world: int, how: str | None) -> dict[str, torch.Tensor]:
    """Two steps on a share of each batch."""
    model = build()
    if how is not None:
        HOW[how](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x, y = share(rank, world, *batch(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    whole = {k: p if how is None else p.full_tensor() for k, p in model.named_parameters()}
    with torch.no_grad():
        whole["output"] = model(batch(2)[0])
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def all_ways(rank: int, world: int) -> dict[str, Any]:
    return {how: train(rank, world, how) for how in HOW}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(all_ways, store=tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("how", HOW)
def test_fsdp_trains_a_model_of_fixed_connections_as_one_process_does(
    two: list[Any], how: str
) -> None:
    alone = train(0, 1, None)
    for rank in two:
        assert rank[how].keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(rank[how][name], expected, rtol=1e-9, atol=1e-12, msg=name)


# What it does not ---------------------------------------------------------------------------------


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp1_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _fsdp1_part(model: nn.Module) -> None:
    model.fc1 = _fsdp1(model.fc1)


def _fsdp2_part(model: nn.Module) -> None:
    fully_shard(model.fc1, mesh=init_device_mesh("cpu", (1,)))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    **HOW,
    "fsdp2 of a part": _fsdp2_part,
    "fsdp1": _fsdp1,
    "fsdp1, flat parameters": _fsdp1_flat,
    "fsdp1 of a part": _fsdp1_part,
}


@pytest.mark.usefixtures("lone_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # in one process
@pytest.mark.parametrize("how", REFUSED)
def test_rewiring_a_sharded_model_raises(how: str) -> None:
    model = build()
    before = rewire.SET(model, sgd(model), until=1000)
    wrapper = REFUSED[how](model)
    remedy = r"FullyShardedDataParallel.*call rewire\.distributed\.Parallel\(model\)"
    for given in (model,) if wrapper is None else (model, wrapper):
        with pytest.raises(ValueError, match=remedy):
            rewire.SET(given, sgd(model), until=1000)
        with pytest.raises(ValueError, match=remedy):
            distributed.Parallel(given)
    with pytest.raises(ValueError, match=remedy):
        before.step()
    assert before.t == 0


@pytest.mark.usefixtures("lone_group")
def test_a_wrapper_whose_constructor_has_failed_is_in_nobodys_way() -> None:
    class Failing(FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    model = build()
    half = [Failing(), FullyShardedDataParallel.__new__(FullyShardedDataParallel)]
    rewire.SET(model, sgd(model), until=1000)
    assert len(half) == 2


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: rewire.SparseLinear(6, 5, sparsity=0.5), (4, 6)),
        (lambda: rewire.SparseLinear(6, 5, sparsity=0.5), (2, 4, 6)),
        (lambda: rewire.SparseConv2d(3, 5, 3, sparsity=0.5), (2, 3, 8, 8)),
        (lambda: rewire.sparsify(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), 0.5), (4, 6)),
        (lambda: rewire.sparsify(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), 0.5), (1, 6)),
    ],
    ids=["linear", "sequences", "conv", "model", "single"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_sharded_values_are_refused_before_a_kernel_reads_them(
    build: Callable[[], nn.Module], shape: tuple[int, ...], placement: Any, grad: bool
) -> None:
    model, mesh = build(), init_device_mesh("cpu", (1,))
    for module in model.modules():
        for key, parameter in module._parameters.items():
            assert parameter is not None
            part = distribute_tensor(parameter.data, mesh, [placement])
            module._parameters[key] = nn.Parameter(part)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"DTensor.*fully_shard"):
        model(torch.randn(shape))


@pytest.mark.usefixtures("lone_group")
def test_a_layer_that_runs_past_the_module_that_gathers_it_is_refused() -> None:
    model = build()
    _whole(model)
    with pytest.raises(RuntimeError, match="call the module that was sharded and not a part of it"):
        model.fc1(torch.randn(3, 72, dtype=torch.float64))

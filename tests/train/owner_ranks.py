"""What each of three ranks does in the test of Owners: a module of its own, for the ranks to import."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from modicum.train.owners import Owners

WORLD = 3


def go(rank, meeting_place):
    """Two matrices over three ranks: one rank owns none, and has no row of the smaller one."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    wholes = [torch.arange(15.0).view(5, 3), torch.arange(8.0).view(2, 4)]
    weights = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for whole in wholes]
    for weight, whole in zip(weights, wholes, strict=True):
        weight.grad = distribute_tensor(-whole, mesh, [Shard(0)])
    owners = Owners(weights)
    assert len(owners.mine) == (1, 1, 0)[rank]
    owners.collect_gradients()
    assert all(torch.equal(matrix.grad, -matrix) for matrix in owners.mine)
    row_sums = [matrix.detach().sum(1, keepdim=True) for matrix in owners.mine]
    for given, whole in zip(owners.as_sharded(row_sums, columns=1), wholes, strict=True):
        assert torch.equal(given.full_tensor(), whole.sum(1, keepdim=True))
    with torch.no_grad():
        for matrix in owners.mine:
            matrix.mul_(2)
    owners.hand_out()
    for weight, whole in zip(weights, wholes, strict=True):
        assert torch.equal(weight.detach().full_tensor(), 2 * whole)
    dist.destroy_process_group()

"""A base model that no single device could hold: every process keeps a share of its layers (FSDP2)."""

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class ShardedBase(DDPStrategy):
    """DDP of adapters that are whole everywhere, over frozen layers of which each process holds a share.

    A layer's weights are gathered for its forward and again for its backward pass, and let go of after each; they
    have no gradient, so nothing is scattered. Adapters are about a hundredth of the model: as each process has all of
    them, norms, penalty, clipping, optimizer and checkpoints are what they are without sharding. On several nodes the
    shares are those of a node (hybrid sharding), and gathering stays inside it.

    Gathering is done by all processes together, so each must take as many forward passes as the others.
    """

    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        share_out(module.language_model.base_model, self._mesh())  # before it moves: no device has to hold the whole
        elsewhere = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, elsewhere)
        super().model_to_device()

    def _mesh(self) -> DeviceMesh:
        shape = (self.num_processes,) if self.num_nodes == 1 else (self.num_nodes, self.num_processes)
        return init_device_mesh(self.root_device.type, shape)


def share_out(decoder: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Have every layer's frozen weights shared out over the last dimension of ``mesh``, once.

    Args:
        decoder: has ``layers``; its other weights stay whole, as the loss reads the embedding outside of any layer.
        mesh: the processes, on one node or (nodes, processes of each).
    """
    if isinstance(decoder, FSDPModule):
        return
    for layer in decoder.layers:
        trained = {parameter for parameter in layer.parameters() if parameter.requires_grad}
        fully_shard(layer, mesh=mesh, ignored_params=trained, reshard_after_forward=True)
    # A root without weights of its own: under it a layer's weights are fetched while the one before it computes.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))

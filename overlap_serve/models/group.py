"""`RankGroup`: the ranks of one engine over torch.distributed, NCCL on CUDA and gloo on CPU.

Owns the store at which the ranks meet, and the communicator. Both are objects: torch's process-wide default group is not used, so
that several groups can live on one host, or in one process. The port is the kernel's choice; rank 0 says which it is.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# All but ProcessGroupNCCL, which a CPU build of torch has not.
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

# Ranks wait for each other at the store while they load, and some read slower disks. Whoever watches them ends a group in which
# one has failed; this only bounds a group that nobody watches.
MEETING_TIMEOUT = timedelta(hours=2)


def open_store(host: str) -> TCPStore:
    """The meeting place, served by this process (rank 0) at `host`, on a free port. Its address: `address_of`."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=MEETING_TIMEOUT)


def address_of(store: TCPStore) -> str:
    return f"{store.host}:{store.port}"


def join_store(address: str) -> TCPStore:
    """Connect to the meeting place of rank 0."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=MEETING_TIMEOUT)


class RankGroup:
    """One rank's view, a `models.tp.TP`. Collectives are work of the stream that is current: they block a CPU stream's thread, and on
    CUDA they are enqueued.

    host: this rank's address towards the others. timeout_s: a collective that takes longer raises on a CPU; on CUDA the communicator
    is aborted and the process ends.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, device: torch.device, host: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._num_agreed = 0
        self.minimum(0)  # the communicator's timeout must not count a late rank's start
        timeout = timedelta(seconds=timeout_s)
        self._group = ProcessGroup(store, rank, size)
        if device.type == "cuda":
            kind, backend = ProcessGroup.BackendType.NCCL, _nccl(store, rank, size, device, timeout)
        else:
            kind, backend = ProcessGroup.BackendType.GLOO, _gloo(store, rank, size, host, timeout)
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(device.type), kind, backend)

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over all ranks; in the memory of `t` if that is contiguous."""
        t = t.contiguous()
        dist.all_reduce(t, group=self._group)
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        """Concatenation over all ranks along the last dimension, in rank order."""
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, t.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, t: Tensor) -> Tensor:
        """What rank 0 has in `t`, in the memory of `t`."""
        dist.broadcast(t, group_src=0, group=self._group)
        return t

    def minimum(self, value: int) -> int:
        """The smallest value of all ranks; waits for the slowest. At start-up only: it goes through the store."""
        keys = [f"minimum/{self._num_agreed}/{rank}" for rank in range(self.size)]
        self._num_agreed += 1
        self._store.set(keys[self.rank], str(value))
        return min(int(self._store.get(key)) for key in keys)


def _gloo(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By address: by default gloo listens where the host's name points to, which is often loopback.
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timeout
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    backend.eager_connect_single_device(device)
    return backend

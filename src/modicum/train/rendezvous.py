"""Where ranks find each other: torchrun's store, cleared of what ranks before a restart have left there.

torchrun hands the same store to the processes that it starts after a failure, and PyTorch looks addresses up in it
without asking whose they are (pytorch/pytorch#135712). The count of restarts does not help: each node has its own.
"""

import time
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_SECONDS_BETWEEN_LOOKS = 0.02


def meet() -> tuple[Store, int, int]:
    """A store in which only ranks that live write, this one's rank, and their number. All ranks call this."""
    store, rank, world_size = next(rendezvous("env://"))
    return fresh_store(store, rank, world_size), rank, world_size


def fresh_store(store: Store, rank: int, world_size: int) -> Store:
    """A part of the store under a name that the first rank makes up, and tells each rank that asks for it now.

    A question has a name of its own, so the answer to one that a dead rank has left is read by nobody.
    """
    own = uuid4().hex
    if rank:
        store.set(f"modicum/asks/{rank}", own)
        name = store.get(f"modicum/answers/{own}").decode()
        store.set(f"modicum/heard/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"modicum/asks/{other}"]):
                asked = store.get(f"modicum/asks/{other}").decode()
                store.set(f"modicum/answers/{asked}", own)
        missing = {other for other in missing if not store.check([f"modicum/heard/{own}/{other}"])}
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return PrefixStore(own, store)

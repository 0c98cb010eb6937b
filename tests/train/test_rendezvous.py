import threading

import torch.distributed as dist

from modicum.train.rendezvous import fresh_store


def meeting(store, world_size):
    """The stores that as many ranks get at once."""
    found = [None] * world_size

    def join(rank):
        found[rank] = fresh_store(store, rank, world_size)

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for rank in reversed(ranks):
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    return found


def test_ranks_share_a_store_that_holds_nothing_from_before_a_restart():
    store = dist.HashStore()
    first = meeting(store, 3)
    first[0].set("address", "of a process that is dead")
    assert all(of_rank.get("address") == b"of a process that is dead" for of_rank in first)
    second = meeting(store, 3)
    assert not any(of_rank.check(["address"]) for of_rank in second)
    second[1].set("address", "new")
    assert all(of_rank.get("address") == b"new" for of_rank in second)

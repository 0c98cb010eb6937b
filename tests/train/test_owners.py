import owner_ranks
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from modicum.train.owners import rows_of_ranks, shared_out


@given(st.integers(1, 50), st.integers(1, 8))
def test_rows_are_cut_as_pytorch_cuts_a_sharded_tensor(rows, ranks):
    chunks = [len(chunk) for chunk in torch.zeros(rows, 1).chunk(ranks)]
    assert rows_of_ranks(rows, ranks) == chunks + [0] * (ranks - len(chunks))


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=30), st.integers(1, 8))
def test_no_owner_has_more_work_than_the_largest_matrix_above_another(shapes, ranks):
    owners = shared_out(shapes, ranks)
    costs = [min(shape) * shape[0] * shape[1] for shape in shapes]
    work = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(work) == sum(costs)
    assert max(work) - min(work) <= max(costs)


def test_a_rank_that_owns_nothing_takes_part_in_every_exchange(tmp_path):
    """Gradients to the owners, a number a row and the moved rows back, each as it was sent."""
    mp.spawn(owner_ranks.go, args=(tmp_path / "meeting",), nprocs=owner_ranks.WORLD)

"""Which rows are where: padding, layouts of shards over processes, real rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlatrain.mesh.batch_layout import BatchLayout, BatchPadding
from xlatrain.mesh.mesh import make_mesh


def test_even_batches_have_no_padding() -> None:
    rows = BatchLayout.contiguous(8).rows((16,))
    assert rows == BatchPadding(16, 16, ((0, 16),)) == BatchPadding.full(16)
    assert not rows.is_padded


@pytest.mark.parametrize(("size", "padded"), [(1, 8), (7, 8), (9, 16), (43, 48)])
def test_uneven_batches_are_padded_at_the_end(size: int, padded: int) -> None:
    assert BatchLayout.contiguous(8).rows((size,)) == BatchPadding(size, padded, ((0, size),))


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 8, 9, 16, 43])
def test_spans_deal_every_row_once_and_leave_the_real_rows_in_front(size: int, processes: int) -> None:
    layouts = [BatchLayout.contiguous(8, p, processes) for p in range(processes)]
    dealt = [[i for span in layout.spans(size) for i in span] for layout in layouts]
    assert sum(dealt, []) == list(range(size))  # noqa: RUF017
    rows = layouts[0].rows([len(mine) for mine in dealt])
    assert rows.size == size
    assert rows.runs == ((0, size),)


def test_processes_with_different_rows_leave_gaps() -> None:
    rows = BatchLayout.contiguous(8, 0, 2).rows((5, 3))
    assert rows == BatchPadding(8, 16, ((0, 5), (8, 11)))


def test_adjacent_runs_are_one() -> None:
    assert BatchLayout.contiguous(4, 0, 2).rows((4, 3)).runs == ((0, 7),)


def test_shards_of_a_process_need_not_be_neighbours() -> None:
    layout = BatchLayout(4, ((0, 2), (1, 3)), 1)
    assert layout.spans(10) == [range(3, 6), range(9, 10)]
    assert layout.rows((6, 4)) == BatchPadding(10, 12, ((0, 10),))


def test_processes_with_the_same_shards_must_bring_the_same_rows() -> None:
    layout = BatchLayout(2, ((0, 1), (0, 1)), 0)
    assert layout.rows((4, 4)) == BatchPadding.full(4)
    with pytest.raises(ValueError, match=r"processes 0 and 1 hold the same part of the batch.* brought 4 and 3 rows"):
        layout.rows((4, 3))


def test_no_rows_at_all() -> None:
    assert BatchLayout.contiguous(4, 0, 2).rows((0, 0)).size == 0


def test_cut_gives_the_real_rows() -> None:
    rows = BatchLayout.contiguous(8, 0, 2).rows((5, 3))
    x = jnp.arange(16)
    assert jax.jit(rows.cut)(x).tolist() == [0, 1, 2, 3, 4, 8, 9, 10]


def test_cut_passes_gradients_to_the_real_rows_only() -> None:
    rows = BatchLayout.contiguous(4).rows((3,))
    gradient = jax.grad(lambda x: rows.cut(x).sum())(jnp.ones(4))
    assert gradient.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 4}, {"fsdp": 2, "tensor": 4}])
def test_layout_of_a_mesh_of_one_process(axes: dict[str, int]) -> None:
    layout = BatchLayout.from_mesh(make_mesh(axes))
    count = int(np.prod([size for axis, size in axes.items() if axis != "tensor"]))
    assert layout == BatchLayout.contiguous(count)


def test_shards_must_be_dealt_evenly() -> None:
    with pytest.raises(ValueError, match="4 shards cannot be dealt evenly to 3 processes"):
        BatchLayout.contiguous(4, 0, 3)

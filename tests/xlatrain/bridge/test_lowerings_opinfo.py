"""PyTorch's own op database through the bridge: a representative part always, all of it on request."""

from __future__ import annotations

import pytest
import torch

from tools import op_check, op_report

_OPS = {op_check.op_name(op): op for op in op_check.op_database()}

# One or two of every family, those first that models and losses use.
_REPRESENTATIVE = """
add addmm amax argmax as_strided baddbmm cat clamp cumsum diagonal_scatter div.floor_rounding erf fft.rfft2 flip gather
index_add index_select linalg.cholesky linalg.solve linalg.svd linalg.vector_norm log_softmax logsumexp masked_scatter
matmul min.reduction_with_dim nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
nn.functional.layer_norm permute pow prod remainder scatter scatter_add scatter_reduce.mean searchsorted
select_scatter slice_scatter softmax sort split_with_sizes std_mean sum topk tril unfold where
""".split()  # noqa: SIM905

_BY_DTYPE = {
    torch.int64: "add argmax clamp cumsum div.trunc_rounding gather pow sum",
    torch.bool: "any bitwise_and cat masked_fill where",
    torch.bfloat16: "addmm cumsum div.no_rounding_mode log_softmax mul softmax var",
    torch.complex64: "abs angle fft.fft matmul prod view_as_real",
}
_OTHER_DTYPES = [(dtype, name) for dtype, names in _BY_DTYPE.items() for name in names.split()]


@pytest.mark.parametrize("name", _REPRESENTATIVE)
def test_op_in_float32(name):
    result = op_check.check_op(_OPS[name], torch.float32, max_samples=2)
    assert (result.outcome, result.refused) == (op_check.PASSES, 0), result.reason


@pytest.mark.parametrize(("dtype", "name"), _OTHER_DTYPES, ids=str)
def test_op_in_other_dtypes(dtype, name):
    result = op_check.check_op(_OPS[name], dtype, max_samples=2)
    assert (result.outcome, result.refused) == (op_check.PASSES, 0), result.reason


@pytest.mark.parametrize("name", ["nonzero", "masked_select", "unique", "item"])
def test_data_dependent_ops_are_refused_with_the_reason(name):
    result = op_check.check_op(_OPS[name], torch.float32, max_samples=2)
    assert result.outcome == op_check.REFUSED
    assert "static shapes" in result.reason or "value of a tensor" in result.reason


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
def test_no_op_of_the_database_is_wrong(dtype):
    results = op_report.run([dtype], max_samples=3)
    bad = [f"{r.name}: {r.outcome}: {r.reason}" for r in results if r.outcome in (op_check.WRONG, op_check.ERROR)]
    assert not bad, "\n".join(bad)
    assert op_report.summarise(results)[op_check.PASSES] > 0.85 * len(results)


def test_report_lists_outcomes_and_reasons():
    results = op_report.run([torch.float32], 1, lambda name: name in ("nonzero", "neg", "randn"))
    text = op_report.markdown(results)
    assert "| float32 | 2 | 1 | 0 | 0 |" in text
    assert "| `nonzero` | float32 | refused |" in text
    assert "`randn` (random: shapes)" in text

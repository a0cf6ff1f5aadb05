"""``torch.autocast`` as on a GPU, for a step that is captured as a CPU step and will run on one.

PyTorch has op lists of autocast for each kind of device. Those of CUDA compute more in float32 than those of CPUs do: softmax,
powers, norms, losses, sums. Within :func:`as_on_a_gpu` the dispatcher's entries for autocast on CPUs do what CUDA's do, and what
the user asks of autocast by the name ``"cuda"`` is asked of the CPU's.

https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.patches import patched

_KEY = "AutocastCPU"
FLOAT32 = """
acos asin binary_cross_entropy binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 log_softmax.int
logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d
norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax.int
softplus sum sum.dim_IntList tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa
_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
""".split()  # noqa: SIM905
LOWER = """
_convolution _convolution.deprecated addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot
linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
""".split()  # noqa: SIM905
WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot".split()  # noqa: SIM905
AS_ELSEWHERE = """
adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cat conv1d.padding conv2d.padding conv3d.padding cross_entropy_loss
ctc_loss.IntList ctc_loss.Tensor fractional_max_pool2d fractional_max_pool3d grid_sampler_2d grid_sampler_3d index_copy max_pool3d
max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stack trace
""".split()  # noqa: SIM905
"""On the CPU's lists alone."""

_on_a_gpu = False


def is_as_on_a_gpu() -> bool:
    """Whether autocast's op lists are CUDA's."""
    return _on_a_gpu


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within the block ``torch.autocast("cpu")`` and ``torch.autocast("cuda")`` both are CUDA's autocast on tensors of the CPU.

    What raises on CUDA because float16 cannot hold it (``binary_cross_entropy``) is computed in float32.
    """
    global _on_a_gpu
    if _on_a_gpu:
        yield
        return
    library = torch.library.Library("aten", "IMPL", _KEY)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid")
            for name, kernel in _kernels().items():
                library.impl(name, kernel)
        _on_a_gpu = True
        with patched(_asked_by_name()):
            yield
    finally:
        _on_a_gpu = False
        library._destroy()


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Name of an op → its kernel, for those that are on CUDA's lists in this release of torch, and on the CPU's alone."""
    on_cuda, on_cpus = (registered(f"Autocast{device}") for device in ("CUDA", "CPU"))
    kinds = ((FLOAT32, _float32), (LOWER, _lower), (WIDEST, _widest))
    kernels = {name: kind(_op(name)) for names, kind in kinds for name in names if name in on_cuda}
    return kernels | {name: torch.library.fallthrough_kernel for name in AS_ELSEWHERE if name in on_cpus - on_cuda}


def registered(key: str) -> set[str]:
    """The names of ATen's ops that have kernels for a dispatch key, in a build without its device too."""
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(op: Any, dtype_for: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            given = itertools.chain(args, kwargs.values())
            if any(isinstance(value, torch.dtype) for value in given):  # an explicit dtype is what the user wants
                return op(*args, **kwargs)
            dtype = dtype_for([leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_eligible(leaf)])
            args, kwargs = pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_eligible(leaf) else leaf, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _float32(op: Any) -> Callable[..., Any]:
    return _casting(op, lambda tensors: torch.float32)


def _lower(op: Any) -> Callable[..., Any]:
    return _casting(op, lambda tensors: torch.get_autocast_dtype("cpu"))


def _widest(op: Any) -> Callable[..., Any]:
    def widest(tensors: list[torch.Tensor]) -> torch.dtype:
        lower = torch.get_autocast_dtype("cpu")
        return torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else lower

    return _casting(op, widest)


def _asked_by_name() -> Iterator[tuple[Any, str, Any]]:
    """Patches by which what users and libraries ask of autocast on ``"cuda"`` is asked of the CPU's."""
    init, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(init)
    def of_the_cpu(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        init(self, _cpu(device_type), *args, **options)

    yield torch.autocast, "__init__", of_the_cpu
    yield torch, "is_autocast_enabled", lambda device="cuda": enabled(_cpu(device))
    yield torch, "get_autocast_dtype", lambda device: dtype(_cpu(device))


def _cpu(device: str) -> str:
    return "cpu" if device == "cuda" else device

"""Convolutions of one to three spatial dims, transposed ones and their backward, by ``lax.conv_general_dilated``.

On CPU in the form that XLA:CPU has fast code for, and kernels of size 1 as matrix products; elsewhere as JAX has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.lowerings import canonical_convolution as canonical
from xlatrain.bridge.lower.lowerings import columns_convolution as columns
from xlatrain.bridge.lower.lowerings import depthwise_convolution as depthwise
from xlatrain.bridge.lower.lowerings.windows import Window
from xlatrain.bridge.lower.registry import is_partitioned, lowers

Gradients = tuple[jax.Array | None, jax.Array | None]
_SPATIAL = "DHW"
_MOST_SLICES = 64
"""Of an image, in the forms that have one for each tap: more would take long to compile."""


def form_of(
    image: Sequence[int], out: Sequence[int], window: Window, batch: int, channels_out: int, channels_in: int, groups: int
) -> ModuleType | None:
    """The module in whose form XLA:CPU is fastest at a convolution and its gradients; None for XLA's own convolution.

    It is decided for the convolution from ``image`` to ``out``, a transposed one as the convolution whose transpose it is;
    ``channels_in`` are those of a group.

    Of a convolution whose kernel has more pixels than its image XLA swaps the two, and misses its fast code: 512 channels 3×3
    at 2×2 take 170 times as long as torch's. Other convolutions copy their kernel into another order, and columns are an
    image times the kernel's size: the smaller of the two decides. Where there are fewer positions than channels, columns take
    0.5 to 1.0 of torch's time and the other form 1.3 to 1.7, with twice as many both take as long; patches that share no pixel
    cost nothing but a new order. Depthwise ones are 6 to 60 times as slow as torch's in XLA's loops, 1 to 10 times by taps.
    Measured by ``python -m benchmarks convolutions`` (``benchmarks/notes/speed_on_cpu.md``).
    """
    slices = math.prod(map(len, window.reached(image, out)))
    if groups > 1:
        return depthwise if channels_in == 1 and channels_out == groups and slices <= _MOST_SLICES else None
    if slices > _MOST_SLICES and not window.is_patches():
        return None
    pixels, positions, kernel = math.prod(image), math.prod(out), math.prod(window.kernel)
    is_swapped = kernel > min(pixels, positions) or positions > pixels
    is_read_once = batch * positions <= 2 * channels_out
    return columns if is_swapped or is_read_once or window.is_patches() else None


@dataclass(frozen=True)
class _Convolution:
    """A convolution: the options of torch's convolutions, with one number for each spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int

    @classmethod
    def from_options(
        cls,
        dims: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> _Convolution:
        """The convolution of torch's arguments, lists of one or ``dims`` numbers."""
        stride, padding, dilation, output_padding = (
            tuple(values) * dims if len(values) == 1 else tuple(values) for values in (stride, padding, dilation, output_padding)
        )
        return cls(stride, padding, dilation, output_padding, transposed, groups)

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """``x`` (N, C_in, …) by ``weight``: (C_out, C_in / groups, …), or (C_in, C_out / groups, …) of a transposed one."""
        spatial = _SPATIAL[-len(self.stride) :]
        return lax.conv_general_dilated(
            x,
            self._kernel(weight),
            window_strides=(1,) * len(spatial) if self.transposed else self.stride,
            padding=self._paddings(weight),
            lhs_dilation=self.stride if self.transposed else None,
            rhs_dilation=self.dilation,
            dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
            feature_group_count=self.groups,
        )

    def on_cpu(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The convolution in the form that XLA:CPU is fast at; shapes as in :meth:`__call__`."""
        if self._is_pointwise(weight):
            return self._pointwise(x, weight)
        window = self._window(weight)
        if not self.transposed and (form := self._form(x, weight, window.positions(x.shape[2:]))):
            return form.convolution(x, weight, window)
        if self.transposed and (form := self._form(x, weight, image := self._image(x, weight))):
            return form.transposed(x, weight, window, image)
        return canonical.convolution(
            x,
            self._kernel(weight),
            stride=(1,) * len(self.stride) if self.transposed else self.stride,
            padding=self._paddings(weight),
            x_dilation=self.stride if self.transposed else None,
            kernel_dilation=self.dilation,
            groups=self.groups,
        )

    def gradients(self, grad: jax.Array, x: jax.Array, weight: jax.Array, wanted: Sequence[bool]) -> Gradients:
        """The gradients by x and by weight, in their shapes; None where not wanted.

        A convolution is linear in each argument: each gradient is JAX's transpose of it, without computing the forward again.
        ``grad`` has the output's shape.
        """
        if self.groups > 1 and wanted[1] and is_partitioned():
            return self._gradients_offset_by_offset(grad, x, weight, wanted)
        return _transposes(self, grad, x, weight, wanted)

    def _gradients_offset_by_offset(self, grad: jax.Array, x: jax.Array, weight: jax.Array, wanted: Sequence[bool]) -> Gradients:
        by_input, _ = _transposes(self, grad, x, weight, (wanted[0], False))
        return by_input, self._by_weight_offset_by_offset(grad, x, weight)

    def _by_weight_offset_by_offset(self, grad: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        """The gradient by weight as one contraction for each of the kernel's positions.

        JAX's is a convolution by groups of the batch. XLA's partitioner (jax 0.10.2) sums it over devices that have the same
        rows, too, and so multiplies it by their number: those of a ``tensor`` axis, but on any mesh also where a step makes its
        batch smaller (a mean over frames); or it ends the process. How rows lie is the partitioner's choice, so that nothing
        here can tell. For several channels in a group it is what XLA:CPU is a hundred times slower at.
        """
        image, output = (grad, x) if self.transposed else (x, grad)
        image = jnp.pad(image, [(0, 0), (0, 0), *((p, p) for p in self.padding)])
        images, outputs = (a.reshape(a.shape[0], self.groups, -1, *a.shape[2:]) for a in (image, output))
        found = []
        for offsets in itertools.product(*map(range, weight.shape[2:])):
            starts = [offset * step for offset, step in zip(offsets, self.dilation, strict=True)]
            sizes = zip(starts, output.shape[2:], self.stride, strict=True)
            seen = images[(..., *(slice(start, start + (n - 1) * step + 1, step) for start, n, step in sizes))]
            found.append(jnp.einsum("ngi...,ngo...->goi", seen, outputs))
        return jnp.stack(found, -1).reshape(weight.shape)

    def gradients_on_cpu(self, grad: jax.Array, x: jax.Array, weight: jax.Array, wanted: Sequence[bool]) -> Gradients:
        """The gradients as in :meth:`gradients`, in the form that XLA:CPU is fast at."""
        if self._is_pointwise(weight):
            return _transposes(self._pointwise, grad, x, weight, wanted)
        image, output = (grad, x) if self.transposed else (x, grad)
        form = self._form(x, weight, grad.shape[2:])
        if form is None and self.groups > 1:
            if wanted[1] and weight.shape[1] > 1:  # XLA:CPU has fast code for one channel in each group only
                return self._gradients_offset_by_offset(grad, x, weight, wanted)
            return self.gradients(grad, x, weight, wanted)
        by_input = self._adjoint(x, grad, weight).on_cpu(grad, weight) if wanted[0] else None
        if by_input is not None:  # a transposed one whose output padding reaches its stride has an adjoint of more outputs
            by_input = by_input[(..., *(slice(size) for size in x.shape[2:]))]
        return by_input, self._by_weight_on_cpu(output, image, weight, form) if wanted[1] else None

    def _by_weight_on_cpu(self, output: jax.Array, image: jax.Array, weight: jax.Array, form: ModuleType | None) -> jax.Array:
        window = self._window(weight)
        if form is depthwise and is_partitioned():  # a sum of several operands, and of rows that other devices have, too
            return self._by_weight_offset_by_offset(*((image, output) if self.transposed else (output, image)), weight)
        if form is not None:
            return form.gradient_by_kernel(output, image, window)
        sizes = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return canonical.gradient_by_kernel(output, image, weight.shape[2:], **sizes)

    def _form(self, x: jax.Array, weight: jax.Array, result: Sequence[int]) -> ModuleType | None:
        """:func:`form_of` this convolution; ``result`` are the spatial sizes that x becomes."""
        image, out = (result, x.shape[2:]) if self.transposed else (x.shape[2:], result)
        return form_of(image, out, self._window(weight), x.shape[0], weight.shape[0], weight.shape[1], self.groups)

    def _window(self, weight: jax.Array) -> Window:
        return Window(weight.shape[2:], self.stride, self.padding, self.dilation)

    def _image(self, x: jax.Array, weight: jax.Array) -> tuple[int, ...]:
        """The spatial sizes of a transposed convolution's result."""
        sizes = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + extra for n, k, s, p, d, extra in sizes)

    def _adjoint(self, x: jax.Array, out: jax.Array, weight: jax.Array) -> _Convolution:
        """The convolution by the same weight from outputs like ``out`` to inputs like ``x``."""
        sizes = zip(x.shape[2:], out.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        cut = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        output_padding = (0,) * len(cut) if self.transposed else tuple(cut)
        return _Convolution(self.stride, self.padding, self.dilation, output_padding, not self.transposed, self.groups)

    def _kernel(self, weight: jax.Array) -> jax.Array:
        """The kernel (C_out, C_in / groups, …) with which a transposed convolution is an ordinary one."""
        if not self.transposed:
            return weight
        c_in, c_out_per_group, *kernel = weight.shape
        grouped = weight.reshape(self.groups, c_in // self.groups, c_out_per_group, *kernel).swapaxes(1, 2)
        return jnp.flip(grouped.reshape(self.groups * c_out_per_group, c_in // self.groups, *kernel), range(2, weight.ndim))

    def _paddings(self, weight: jax.Array) -> list[tuple[int, int]]:
        """The padding of each spatial dim at its beginning and its end, for the convolution by :meth:`_kernel`."""
        if not self.transposed:
            return [(p, p) for p in self.padding]
        reach = [d * (k - 1) for d, k in zip(self.dilation, weight.shape[2:], strict=True)]
        return [(r - p, r - p + extra) for r, p, extra in zip(reach, self.padding, self.output_padding, strict=True)]

    def _is_pointwise(self, weight: jax.Array) -> bool:
        return not self.transposed and self.groups == 1 and set(weight.shape[2:]) == {1} and set(self.padding) == {0}

    def _pointwise(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Convolve with a kernel of size 1 without padding or groups, as one matrix product, channels last.

        XLA:CPU takes 1.4 to 3 times as long for it as a convolution (``benchmarks/notes/speed_on_cpu.md``).
        """
        kept = x[(slice(None), slice(None), *(slice(None, None, step) for step in self.stride))]
        pixels = jnp.moveaxis(kept, 1, -1)
        out = jnp.matmul(pixels.reshape(-1, x.shape[1]), weight.reshape(weight.shape[0], -1).T)
        return jnp.moveaxis(out.reshape(*pixels.shape[:-1], -1), -1, 1)


def _transposes(
    fn: Callable[[jax.Array, jax.Array], jax.Array], grad: jax.Array, x: jax.Array, weight: jax.Array, wanted: Sequence[bool]
) -> Gradients:
    """The gradients by x and weight of ``fn(x, weight)``, which is linear in each; None where not wanted."""
    by_input = jax.linear_transpose(lambda x: fn(x, weight), x)(grad)[0] if wanted[0] else None
    by_weight = jax.linear_transpose(lambda weight: fn(x, weight), weight)(grad)[0] if wanted[1] else None
    return by_input, by_weight


@lowers("aten.convolution.default", "aten.convolution_overrideable.default")
def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.conv2d.html"""
    dims = x.ndim - 2
    convolve = _Convolution.from_options(dims, stride, padding, dilation, transposed, output_padding, groups)
    weight = weight.astype(x.dtype)
    if x.size and weight.size:
        out = lax.platform_dependent(x, weight, cpu=convolve.on_cpu, default=convolve)
    else:
        out = convolve(x, weight)
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * dims).astype(out.dtype)


@lowers("aten.convolution_backward.default", "aten.convolution_backward_overrideable.default")
def convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients by input, weight and bias; None for those that ``output_mask`` leaves out."""
    dims = x.ndim - 2
    convolve = _Convolution.from_options(dims, stride, padding, dilation, transposed, output_padding, groups)
    grad = grad.astype(x.dtype)
    weight = weight.astype(x.dtype)
    if x.size and weight.size:
        by_input, by_weight = lax.platform_dependent(
            grad,
            x,
            weight,
            cpu=lambda grad, x, weight: convolve.gradients_on_cpu(grad, x, weight, output_mask),
            default=lambda grad, x, weight: convolve.gradients(grad, x, weight, output_mask),
        )
    else:
        by_input, by_weight = convolve.gradients(grad, x, weight, output_mask)
    grad_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim))) if output_mask[2] else None
    return by_input, by_weight, grad_bias

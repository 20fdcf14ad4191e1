"""What factorisations and solvers take on CUDA besides their results.

Follows BatchLinearAlgebra.cpp and cuda/linalg/BatchLinearAlgebra.cpp under aten/src/ATen/native. Few or large
matrices are factored and solved by cuSOLVER one by one, many small ones by cuBLAS, which takes a pointer to each. How
much cuSOLVER takes as workspace is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_FEW_SYSTEMS, _LARGE_SYSTEM = 8, 64  # triangular_solve_kernel: these are solved one by one
_FEW_ROWS = 256
_LARGEST_BATCHED = 128  # matrices that lu_factor takes many at a time
_POWERS = 5  # of the polynomial of the highest degree, 18
_POINTER_BYTES = _INDEX_BYTES = 8
_INFO_BYTES = _PIVOT_BYTES = 4


@dataclass(frozen=True)
class _Matrices:
    count: int
    rows: int
    columns: int
    item_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Matrices:
        return cls(prod(tensor.shape[:-2]), tensor.size(-2), tensor.size(-1), tensor.element_size())

    @property
    def bytes(self) -> int:
        return self.count * self.rows * self.columns * self.item_bytes

    @property
    def diagonal_bytes(self) -> int:
        return self.count * min(self.rows, self.columns) * self.item_bytes


class LinearAlgebra:
    """Rules that share the workspace of cuBLAS with its products: ``keep`` takes it where it was not taken yet."""

    def __init__(self, keep: Callable[[Kernel], None]) -> None:
        self._keep = keep

    def rules(self) -> dict[torch._ops.OpOverload, Rule]:
        return {
            _aten.linalg_solve_triangular.default: self._solve_triangular,
            _aten.triangular_solve.default: self._solve_triangular,
            _aten.linalg_qr.default: self._orthogonal,
            _aten.geqrf.default: self._reflections,
            _aten.linalg_householder_product.default: _product_of_reflections,
            _aten.ormqr.default: _multiplied_by_reflections,
            _aten.linalg_lu_factor_ex.default: self._lu_factors,
            _aten.linalg_lu.default: self._lu,
            _aten.lu_unpack.default: _unpacked,
            _aten.linalg_lu_solve.default: self._lu_solve,
            _aten._linalg_solve_ex.default: self._solve,
            _aten.linalg_inv_ex.default: self._inverse,
            _aten._linalg_det.default: self._determinant,
            _aten._linalg_slogdet.default: self._log_determinant,
            _aten.cholesky_inverse.default: self._cholesky_inverse,
            _aten._cholesky_solve_helper.default: self._cholesky_solve,
            _aten.linalg_cholesky_ex.default: _cholesky,
            _aten.linalg_ldl_solve.default: _ldl_solve,
            _aten.linalg_matrix_exp.default: self._exponential,
            _aten._linalg_eigh.default: _factored,
            _aten._linalg_svd.default: _factored,
            _aten._linalg_check_errors.default: check_errors,
        }

    # -- triangular systems ----------------------------------------------------------------------------------------

    def _solve_triangular(self, kernel: Kernel) -> None:
        """``linalg_solve_triangular_out``: a triangle that lies neither by rows nor by columns is copied."""
        kernel.emit()
        triangle = kernel.arg(_triangle(kernel))
        lies = triangle.is_contiguous() or triangle.mT.is_contiguous()
        copy = kernel.temp(0 if lies else nbytes(triangle))
        self._triangular(kernel, _Matrices.of(triangle))
        kernel.free(copy)

    def _triangular(self, kernel: Kernel, of: _Matrices) -> None:
        """``triangular_solve_kernel``: few large systems one by one, others by pointers to each."""
        one_by_one = of.count <= _FEW_SYSTEMS and of.rows >= _LARGE_SYSTEM
        self._by_pointers(kernel, 0 if one_by_one or not of.rows else of.count)

    def _by_pointers(self, kernel: Kernel, count: int, arrays: int = 2) -> None:
        pointers = [kernel.temp(count * _POINTER_BYTES) for _ in range(arrays)]
        self._keep(kernel)
        for handle in pointers:
            kernel.free(handle)

    # -- orthogonal factors ----------------------------------------------------------------------------------------

    def _orthogonal(self, kernel: Kernel) -> None:
        kernel.emit()
        of = _Matrices.of(kernel.arg("A"))
        if not of.bytes:
            return
        kernel.temp(of.diagonal_bytes)  # factors of the reflections
        if kernel.arg("mode") == "r" and of.rows > of.columns:  # the result has no room for the reflections
            kernel.temp(of.bytes)
        self._reflect(kernel, of)
        if kernel.arg("mode") != "r":
            kernel.temp(_INFO_BYTES)

    def _reflections(self, kernel: Kernel) -> None:
        kernel.emit()
        self._reflect(kernel, _Matrices.of(kernel.arg("self")))

    def _reflect(self, kernel: Kernel, of: _Matrices) -> None:
        """``geqrf_kernel``."""
        if of.rows <= _FEW_ROWS and of.count >= max(2, of.rows // 16):
            self._by_pointers(kernel, of.count)
        else:
            _by_cusolver(kernel)

    # -- LU --------------------------------------------------------------------------------------------------------

    def _lu_factors(self, kernel: Kernel) -> None:
        kernel.emit()
        self._lu_factor(kernel, _Matrices.of(kernel.arg("A")))

    def _lu_factor(self, kernel: Kernel, of: _Matrices) -> None:
        """``lu_factor``."""
        if not of.bytes:
            return
        if of.rows == of.columns and of.count == 1:
            _name_workspace(kernel)
        else:
            batched = of.rows == of.columns and of.rows <= _LARGEST_BATCHED
            self._by_pointers(kernel, of.count if batched else 0, arrays=1)

    def _lu(self, kernel: Kernel) -> None:
        """``linalg_lu_out`` factors by columns; its results lie by rows."""
        kernel.emit()
        of = _Matrices.of(kernel.arg("A"))
        factors = kernel.temp(of.bytes)
        temporaries = [
            kernel.temp(of.count * min(of.rows, of.columns) * _PIVOT_BYTES),
            kernel.temp(of.count * _INFO_BYTES),
        ]
        self._lu_factor(kernel, of)
        kernel.free(factors)
        if kernel.arg("pivot"):
            kernel.free(_permutation(kernel, of.count, of.rows))
        for handle in reversed(temporaries):
            kernel.free(handle)

    def _lu_solve(self, kernel: Kernel) -> None:
        kernel.emit()
        factors = kernel.arg("LU")
        _by_columns(kernel, factors)
        transposed = bool(kernel.arg("adjoint")) == bool(kernel.arg("left"))
        self._lu_solved(kernel, factors, kernel.result, transposed=transposed, copied=False)

    def _lu_solved(
        self, kernel: Kernel, factors: torch.Tensor, solved: torch.Tensor, *, transposed: bool, copied: bool
    ) -> None:
        """``linalg_lu_solve_out`` and ``lu_solve_kernel``; a vector is ``copied``."""
        if not factors.numel() or not solved.numel():
            return
        size = factors.size(-1)
        sides = nbytes(solved) // (size * solved.element_size())  # of all systems
        systems = prod(solved.shape[:-2]) if solved.dim() >= factors.dim() else prod(solved.shape[:-1])
        each = sides // max(systems, 1)
        temporaries = [kernel.temp(nbytes(solved))] if copied else []
        way = _way_to_solve(systems, size, each, transposed=transposed)
        if way == "one by one":
            _by_cusolver(kernel)
        elif way == "pointers":
            self._by_pointers(kernel, systems)
        else:
            self._by_triangles(kernel, _Matrices(systems, size, size, 0), nbytes(solved), transposed=transposed)
        for handle in temporaries:
            kernel.free(handle)

    def _by_triangles(self, kernel: Kernel, of: _Matrices, bytes: int, *, transposed: bool) -> None:
        """``lu_solve_triangular``: the rows are permuted before the two triangular systems, or after."""
        temporaries = [_permutation(kernel, of.count, of.rows)]
        if not transposed:  # the inverse permutation, of a range
            temporaries.append(kernel.temp(of.rows * _INDEX_BYTES))
            temporaries.append(kernel.temp(of.count * of.rows * _INDEX_BYTES))
            temporaries.append(kernel.temp(bytes))
        for _ in range(2):
            self._triangular(kernel, of)
        if transposed:
            temporaries.append(kernel.temp(bytes))
        for handle in reversed(temporaries):
            kernel.free(handle)

    def _solve(self, kernel: Kernel) -> None:
        """``_linalg_solve_ex_out``."""
        kernel.emit()
        matrices, sides = kernel.arg("A"), kernel.arg("B")
        if not matrices.numel():
            return
        self._lu_factor(kernel, _Matrices.of(matrices))
        vector = sides.dim() == 1 or (matrices.dim() - 1 == sides.dim() and sides.shape == matrices.shape[:-1])
        solved = kernel.result[0].unsqueeze(-1) if vector else kernel.result[0]
        transposed = not vector and not kernel.arg("left")
        self._lu_solved(kernel, matrices, solved, transposed=transposed, copied=vector)

    def _inverse(self, kernel: Kernel) -> None:
        """``linalg_inv_ex_out`` solves for the identity."""
        kernel.emit()
        of = _Matrices.of(kernel.arg("A"))
        if not of.bytes:
            return
        factors = kernel.temp(of.bytes)
        pivots = kernel.temp(of.count * of.rows * _PIVOT_BYTES)
        self._lu_factor(kernel, of)
        self._lu_solved(kernel, kernel.arg("A"), kernel.result[0], transposed=False, copied=False)
        kernel.free(pivots)
        kernel.free(factors)

    def _determinant(self, kernel: Kernel) -> None:
        """``_linalg_det_out``: the product of the diagonal, times the sign of the permutation."""
        kernel.emit()
        of = _Matrices.of(kernel.arg("A"))
        info = kernel.temp(of.count * _INFO_BYTES)
        self._lu_factor(kernel, of)
        product = kernel.temp(of.count * of.item_bytes)
        kernel.free(_sign(kernel, of))
        kernel.free(product)
        kernel.free(info)

    def _log_determinant(self, kernel: Kernel) -> None:
        kernel.emit()
        of = _Matrices.of(kernel.arg("A"))
        info = kernel.temp(of.count * _INFO_BYTES)
        self._lu_factor(kernel, of)
        sign = _sign(kernel, of)
        signs = kernel.temp(of.diagonal_bytes)
        kernel.free(kernel.temp(of.count * of.item_bytes))
        kernel.free(signs)
        kernel.free(sign)
        kernel.free(kernel.temp(kernel.arg("A").abs().element_size() * of.count * of.rows))
        kernel.free(info)

    def _exponential(self, kernel: Kernel) -> None:
        """``mexp``: of how many powers a polynomial is made depends on each matrix's norm; here of the most."""
        kernel.emit()
        bytes = nbytes(kernel.arg("self"))
        if kernel.arg("self").size(-1) < 2 or not bytes:
            return
        for _ in range(2):  # those of large norms, and the same scaled down
            kernel.temp(bytes)
        kernel.temp(_POWERS * bytes)
        self._keep(kernel)
        kernel.temp(_POWERS * bytes)  # sums of powers
        kernel.unknown = "linalg_matrix_exp: temporaries that depend on norms"

    # -- Cholesky --------------------------------------------------------------------------------------------------

    def _cholesky_inverse(self, kernel: Kernel) -> None:
        kernel.emit()
        of = _Matrices.of(kernel.arg("self"))
        copy = kernel.temp(of.bytes)
        self._by_cholesky(kernel, of)
        kernel.free(copy)

    def _cholesky_solve(self, kernel: Kernel) -> None:
        kernel.emit()
        self._by_cholesky(kernel, _Matrices.of(kernel.arg("A")))

    def _by_cholesky(self, kernel: Kernel, of: _Matrices) -> None:
        """One system by cuSOLVER with a copy of its factor, others by two triangular ones."""
        if of.count == 1:
            info = kernel.temp(_INFO_BYTES)
            kernel.free(kernel.temp(of.bytes))
            kernel.free(info)
            _name_workspace(kernel)
        else:
            for _ in range(2):
                self._triangular(kernel, of)


def _triangle(kernel: Kernel) -> str:
    return "A" if kernel.func is _aten.triangular_solve.default else "self"


def _way_to_solve(systems: int, size: int, sides: int, *, transposed: bool) -> str:
    """``lu_solve_kernel``'s choice, by measurements of its own."""
    few = systems <= 2
    if size == sides:
        return "pointers" if size <= 16 else "triangles"
    if size <= 8:
        return "pointers"
    if size <= 64:
        if few and (sides <= 64 or transposed or size <= 32):
            return "one by one"
        return "pointers" if sides <= 8 else "triangles"
    if size <= 128 and sides <= 2:
        return "one by one" if few else "pointers"
    return "triangles"


def _permutation(kernel: Kernel, count: int, rows: int) -> int:
    """A range, written out for every matrix where there are several."""
    indices = kernel.temp(rows * _INDEX_BYTES)
    if count == 1:
        return indices
    every = kernel.temp(count * rows * _INDEX_BYTES)
    kernel.free(indices)
    return every


def _unpacked(kernel: Kernel) -> None:
    kernel.emit()
    if kernel.arg("unpack_pivots"):
        packed = kernel.arg("LU_data")
        kernel.free(_permutation(kernel, prod(packed.shape[:-2]), packed.size(-2)))


def _sign(kernel: Kernel, of: _Matrices) -> int:
    """``lu_det_P``: how many pivots differ from a range, summed as 64-bit numbers."""
    numbers = kernel.temp(of.rows * _PIVOT_BYTES)
    differ = kernel.temp(of.count * of.rows)
    sign = kernel.temp(of.count * _INDEX_BYTES)
    kernel.free(kernel.temp(of.count * of.rows * _INDEX_BYTES))
    kernel.free(differ)
    kernel.free(numbers)
    return sign


def _product_of_reflections(kernel: Kernel) -> None:
    kernel.emit()
    _by_cusolver(kernel)


def _multiplied_by_reflections(kernel: Kernel) -> None:
    """``ormqr_out``."""
    kernel.emit()
    _by_columns(kernel, kernel.arg("self"))
    _by_cusolver(kernel)


def _ldl_solve(kernel: Kernel) -> None:
    kernel.emit()
    sides = kernel.arg("B")
    if not sides.numel():
        return
    _by_columns(kernel, kernel.arg("LD"))
    copy = kernel.temp(nbytes(kernel.result))
    _by_cusolver(kernel)
    kernel.free(copy)


def _by_columns(kernel: Kernel, matrices: torch.Tensor) -> None:
    """Matrices that do not lie by columns are copied, to the end."""
    kernel.temp(0 if matrices.mT.is_contiguous() else nbytes(matrices))


def _by_cusolver(kernel: Kernel) -> None:
    """Whether it worked is written to memory; so is a workspace."""
    kernel.free(kernel.temp(_INFO_BYTES))
    _name_workspace(kernel)


def _name_workspace(kernel: Kernel) -> None:
    kernel.unknown = f"{kernel.func.overloadpacket}: cuSOLVER's workspace"


def check_errors(kernel: Kernel) -> None:
    """Whether any matrix could not be factored."""
    for _ in range(2 if kernel.args[0].numel() == 1 else 1):
        kernel.temp(1)


def _factored(kernel: Kernel) -> None:
    """Whether each matrix could be factored, asked at the end. Those whose singular values are asked for are written
    over, so they are copied."""
    kernel.emit()
    matrices = kernel.arg("A")
    if not matrices.numel():
        return
    _name_workspace(kernel)
    count = _Matrices.of(matrices).count
    kernel.temp(count * _INFO_BYTES)
    if kernel.func is _aten._linalg_svd.default:
        kernel.free(kernel.temp(nbytes(matrices)))
    for _ in range(2 if count == 1 else 1):
        kernel.temp(1)


def _cholesky(kernel: Kernel) -> None:
    """Several are factored by pointers to each."""
    kernel.emit()
    count = kernel.result[1].numel()
    if kernel.result[0].numel():
        kernel.temp(count * _POINTER_BYTES if count > 1 else 0)
        _name_workspace(kernel)

/* cuBLAS, cuBLASLt, cuSPARSE, cuSOLVER, cuFFT, NVRTC, CUPTI: handles, versions, and what callers read from out-parameters.
 * Their computing functions are generated stubs. None of these libraries allocates device memory of its own here: PyTorch
 * itself allocates cuBLAS's workspaces, with the sizes that it chooses by the device. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define CUDA_MAJOR (CUDART_VERSION / 1000)

static int make_handle(void **out) {
  *out = calloc(1, 256);
  return *out ? 0 : 1;
}
static int write_zeros(char *out, size_t bytes) {
  memset(out, 0, bytes);
  return 0;
}

/* ---- cuBLAS ---- */
API int cublasCreate_v2(void **out) { return make_handle(out); }
API int cublasDestroy_v2(void *handle) {
  free(handle);
  return 0;
}
API int cublasGetMathMode(void *handle UNUSED, int *mode) {
  *mode = 0;
  return 0;
}
API int cublasGetPointerMode_v2(void *handle UNUSED, int *mode) {
  *mode = 0;
  return 0;
}
API int cublasGetVersion_v2(void *handle UNUSED, int *version) {
  *version = CUDA_MAJOR * 10000;
  return 0;
}
API const char *cublasGetStatusString(int status) { return status ? "cuBLAS error" : "success"; }

/* ---- cuBLASLt: any product has one algorithm, without a workspace beyond PyTorch's ---- */
API size_t cublasLtGetVersion(void) { return CUDA_MAJOR >= 13 ? 130100 : 120405; }
API size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }
API int cublasLtCreate(void **out) { return make_handle(out); }
API int cublasLtMatmulDescCreate(void **out) { return make_handle(out); }
API int cublasLtMatmulPreferenceCreate(void **out) { return make_handle(out); }
API int cublasLtMatrixLayoutCreate(void **out) { return make_handle(out); }
API int cublasLtDestroy(void *handle) { return cublasDestroy_v2(handle); }
API int cublasLtMatmulDescDestroy(void *handle) { return cublasDestroy_v2(handle); }
API int cublasLtMatmulPreferenceDestroy(void *handle) { return cublasDestroy_v2(handle); }
API int cublasLtMatrixLayoutDestroy(void *handle) { return cublasDestroy_v2(handle); }

typedef struct {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
} HeuristicResult;
API int cublasLtMatmulAlgoGetHeuristic(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                                       void *c UNUSED, void *d UNUSED, void *preference UNUSED, int wanted,
                                       HeuristicResult *results, int *found) {
  *found = wanted > 0;
  return wanted > 0 ? write_zeros((char *)results, sizeof *results) : 0;
}

/* ---- cuSPARSE, cuSOLVER, cuFFT ---- */
API int cusparseCreate(void **out) { return make_handle(out); }
API const char *cusparseGetErrorString(int status) { return status ? "cuSPARSE error" : "success"; }
#define SPARSE_DESCRIPTOR(create) \
  API int create(void **out) { return make_handle(out); }
SPARSE_DESCRIPTOR(cusparseCreateDnMat)
SPARSE_DESCRIPTOR(cusparseCreateDnVec)
SPARSE_DESCRIPTOR(cusparseCreateCsr)
SPARSE_DESCRIPTOR(cusparseCreateCoo)
SPARSE_DESCRIPTOR(cusparseCreateMatDescr)
SPARSE_DESCRIPTOR(cusparseCreateBsrsv2Info)
SPARSE_DESCRIPTOR(cusparseCreateBsrsm2Info)
SPARSE_DESCRIPTOR(cusparseSpGEMM_createDescr)
SPARSE_DESCRIPTOR(cusparseSpSV_createDescr)
SPARSE_DESCRIPTOR(cusparseSpSM_createDescr)
API int cusparseSpMatGetSize(void *matrix UNUSED, int64_t *rows, int64_t *columns, int64_t *nonzero) {
  int64_t count = brim_device_next_count(-1);
  *rows = *columns = 0;
  *nonzero = count < 0 ? 0 : count;
  return 0;
}
/* The sum of two matrices: as if they had no place in common. */
API int cusparseXcsrgeam2Nnz(void *handle UNUSED, int rows UNUSED, int columns UNUSED, void *of_first UNUSED, int first,
                             void *first_rows UNUSED, void *first_columns UNUSED, void *of_second UNUSED, int second,
                             void *second_rows UNUSED, void *second_columns UNUSED, void *of_sum UNUSED,
                             void *sum_rows UNUSED, int *nonzero, void *workspace UNUSED) {
  *nonzero = first + second;
  return 0;
}
API int cusolverDnCreate(void **out) { return make_handle(out); }
API int cusolverDnCreateParams(void **out) { return make_handle(out); }
API int cusolverDnCreateGesvdjInfo(void **out) { return make_handle(out); }
API int cusolverDnCreateSyevjInfo(void **out) { return make_handle(out); }
API int cufftCreate(int *plan) {
  *plan = 1;
  return 0;
}
API int cufftXtMakePlanMany(int plan UNUSED, int rank UNUSED, void *n UNUSED, void *inembed UNUSED,
                            long long istride UNUSED, long long idist UNUSED, int input UNUSED, void *onembed UNUSED,
                            long long ostride UNUSED, long long odist UNUSED, int output UNUSED, long long batch UNUSED,
                            size_t *workspace_bytes) {
  *workspace_bytes = 0;
  return 0;
}

/* ---- NVRTC: programs compile to nothing ---- */
#define BINARY_BYTES 16
API int nvrtcVersion(int *major, int *minor) {
  *major = CUDA_MAJOR;
  *minor = CUDART_VERSION % 1000 / 10;
  return 0;
}
API int nvrtcCreateProgram(void **out) { return make_handle(out); }
API int nvrtcGetPTXSize(void *program UNUSED, size_t *bytes) {
  *bytes = BINARY_BYTES;
  return 0;
}
API int nvrtcGetCUBINSize(void *program, size_t *bytes) { return nvrtcGetPTXSize(program, bytes); }
API int nvrtcGetPTX(void *program UNUSED, char *out) { return write_zeros(out, BINARY_BYTES); }
API int nvrtcGetCUBIN(void *program UNUSED, char *out) { return write_zeros(out, BINARY_BYTES); }
API int nvrtcGetProgramLogSize(void *program UNUSED, size_t *bytes) {
  *bytes = 1;
  return 0;
}
API int nvrtcGetProgramLog(void *program UNUSED, char *out) { return write_zeros(out, 1); }
API int nvrtcGetLoweredName(void *program UNUSED, const char *expression, const char **name) {
  *name = expression;
  return 0;
}
API const char *nvrtcGetErrorString(int status) { return status ? "NVRTC error" : "success"; }

/* ---- CUPTI: the profiler sees the host's side only ---- */
API int cuptiGetVersion(uint32_t *version) {
  *version = CUDA_MAJOR * 10000;
  return 0;
}
API int cuptiSubscribe(void **subscriber) { return make_handle(subscriber); }
API int cuptiActivityGetNextRecord(void) { return 12; /* no more records */ }
API int cuptiGetResultString(int status, const char **text) {
  *text = status ? "CUPTI error" : "success";
  return 0;
}

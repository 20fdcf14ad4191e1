/* Error codes: their names, and the one that cudaGetLastError gives. */
#define _GNU_SOURCE
#include "device.h"

#include <string.h>

pthread_mutex_t device_mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static __thread Error last_error;

/* A success does not clear what an earlier call left: code that forgets cudaGetLastError() after an error that it
 * expected meets it at PyTorch's next kernel launch, here as on a GPU. */
Error result(Error error) {
  if (error != SUCCESS) last_error = error;
  return error;
}

API Error cudaGetLastError(void) {
  Error error = last_error;
  last_error = SUCCESS;
  return error;
}
API Error cudaPeekAtLastError(void) { return last_error; }

static const struct {
  Error error;
  const char *name, *text;
} known[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_CONTEXT, "cudaErrorDeviceUninitialized", "invalid device context"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {SYMBOL_NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {PEER_ACCESS_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched",
     "capture was not initiated in this stream"},
};

API const char *cudaGetErrorString(Error error) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].error == error) return known[i].text;
  return "unrecognized error code";
}
API const char *cudaGetErrorName(Error error) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].error == error) return known[i].name;
  return "unrecognized error code";
}
API Error cuGetErrorString(Error error, const char **text) {
  *text = cudaGetErrorString(error);
  return SUCCESS;
}
API Error cuGetErrorName(Error error, const char **name) {
  *name = cudaGetErrorName(error);
  return SUCCESS;
}

/* The CUDA driver's API where it is more than another name for the runtime's, and the look-up of its functions by name. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

Error cudaDeviceGetAttribute(int *value, int attribute, int device);
Error cudaMalloc(void **out, size_t bytes);
Error cudaFree(void *pointer);
Error cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
Error cudaStreamCreateWithFlags(Stream **out, unsigned flags);
Error cudaStreamDestroy(void *stream);
Error cudaStreamSynchronize(void *stream);
Error cudaStreamWaitEvent(void *stream, Event *event, unsigned flags);
Error cudaEventCreateWithFlags(Event **out, unsigned flags);
Error cudaEventRecord(Event *event, void *stream);
Error cudaEventSynchronize(Event *event);
Error cudaEventDestroy(Event *event);
Error cudaEventElapsedTime(float *ms, Event *start, Event *end);
Error cudaSetDevice(int device);
void device_uuid(unsigned char uuid[16], int device);

/* ---- devices ---- */
API Error cuInit(unsigned flags UNUSED) { return settings.count ? SUCCESS : NO_DEVICE; }
API Error cuDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return SUCCESS;
}
API Error cuDeviceGetCount(int *count) {
  *count = settings.count;
  return SUCCESS;
}
API Error cuDeviceGet(int *device, int index) {
  *device = index;
  return index >= 0 && index < settings.count ? SUCCESS : INVALID_DEVICE;
}
API Error cuDeviceGetName(char *text, int length, int device UNUSED) {
  snprintf(text, (size_t)length, "%s", settings.name);
  return SUCCESS;
}
API Error cuDeviceTotalMem_v2(size_t *bytes, int device UNUSED) {
  *bytes = settings.memory_bytes;
  return SUCCESS;
}
API Error cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
API Error cuDeviceComputeCapability(int *major, int *minor, int device UNUSED) {
  *major = settings.capability / 10;
  *minor = settings.capability % 10;
  return SUCCESS;
}
API Error cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
  device_uuid(uuid, device);
  return SUCCESS;
}

/* ---- contexts: one a device, whose handle says which ---- */
#define FIRST_CONTEXT 0x1000
static void *context_of(int device) { return (void *)(uintptr_t)(FIRST_CONTEXT + device); }

API Error cuDevicePrimaryCtxRetain(void **context, int device) {
  use_context(device);
  *context = context_of(device);
  return SUCCESS;
}
API Error cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = has_context(device);
  return SUCCESS;
}
API Error cuCtxGetCurrent(void **context) {
  *context = has_context(current_device()) ? context_of(current_device()) : NULL;
  return SUCCESS;
}
API Error cuCtxSetCurrent(void *context) {
  return context ? cudaSetDevice((int)((uintptr_t)context - FIRST_CONTEXT)) : SUCCESS;
}
API Error cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API Error cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : SUCCESS; }
API Error cuCtxGetDevice(int *device) {
  *device = current_device();
  return has_context(current_device()) ? SUCCESS : INVALID_CONTEXT;
}
API Error cuCtxSynchronize(void) {
  finish_device(current_device());
  return SUCCESS;
}

/* ---- memory, streams, events ---- */
API Error cuMemAlloc_v2(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
API Error cuMemFree_v2(void *pointer) { return cudaFree(pointer); }
API Error cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) { return cudaMemGetInfo(free_bytes, total_bytes); }
API Error cuStreamCreate(Stream **out, unsigned flags) { return cudaStreamCreateWithFlags(out, flags); }
API Error cuStreamDestroy_v2(void *stream) { return cudaStreamDestroy(stream); }
API Error cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }
API Error cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
  return cudaStreamWaitEvent(stream, event, flags);
}
API Error cuEventCreate(Event **out, unsigned flags) { return cudaEventCreateWithFlags(out, flags); }
API Error cuEventRecord(Event *event, void *stream) { return cudaEventRecord(event, stream); }
API Error cuEventSynchronize(Event *event) { return cudaEventSynchronize(event); }
API Error cuEventDestroy_v2(Event *event) { return cudaEventDestroy(event); }
API Error cuEventElapsedTime_v2(float *ms, Event *start, Event *end) { return cudaEventElapsedTime(ms, start, end); }

/* ---- look-up by name ---- */
static void *function_called(const char *name) { /* the newest variant first, as the driver does */
  static void *self;
  char versioned[256];
  if (!self) {
    Dl_info own;
    dladdr((void *)cuInit, &own);
    self = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  void *function = dlsym(self, versioned);
  return function ? function : dlsym(self, name);
}
API Error cuGetProcAddress_v2(const char *name, void **out, int version UNUSED, uint64_t flags UNUSED, int *status) {
  *out = function_called(name);
  if (status) *status = *out ? 0 : 1;
  return *out ? SUCCESS : SYMBOL_NOT_FOUND;
}
API Error cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
API Error cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version UNUSED,
                                           unsigned long long flags UNUSED, int *status) {
  *out = function_called(name);
  if (status) *status = *out ? 0 : 1;
  return SUCCESS;
}
API Error cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, flags, status);
}
API Error cuGetExportTable(const void **table, const void *id UNUSED) { /* the driver's undocumented functions */
  *table = NULL;
  return SYMBOL_NOT_FOUND;
}

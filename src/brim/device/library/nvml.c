/* NVML: what nvidia-smi and torch.cuda's counters ask for. It sees all devices of the machine. */
#include "device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_SMALL = 7 };

static void *handle_of(int device) { return (void *)(uintptr_t)(device + 1); }
static int device_of(void *handle) { return (int)(uintptr_t)handle - 1; }

API int nvmlInit_v2(void) { return settings.installed ? NVML_SUCCESS : 9 /* driver not loaded */; }
API int nvmlInit(void) { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned flags UNUSED) { return nvmlInit_v2(); }
API int nvmlShutdown(void) { return NVML_SUCCESS; }
API const char *nvmlErrorString(int error) { return error ? "NVML error" : "success"; }

API int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = CUDART_VERSION;
  return NVML_SUCCESS;
}
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }
API int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  snprintf(text, length, "%s", CUDART_VERSION >= 13000 ? "580.00" : "550.00");
  return NVML_SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)settings.installed;
  return NVML_SUCCESS;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if ((int)index >= settings.installed) return NVML_INVALID_ARGUMENT;
  *handle = handle_of((int)index);
  return NVML_SUCCESS;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > settings.installed) return NVML_NOT_FOUND;
  *handle = handle_of((int)bus - 1);
  return NVML_SUCCESS;
}
/* The form of cudaDeviceProp's: "GPU-" and the sixteen bytes in hexadecimal. */
void device_uuid(unsigned char uuid[16], int device);
API int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
  unsigned char u[16];
  device_uuid(u, device_of(handle));
  snprintf(text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
           u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  return NVML_SUCCESS;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  for (int device = 0; device < settings.installed; device++) {
    char own[64];
    nvmlDeviceGetUUID(handle_of(device), own, sizeof own);
    if (strcmp(own, uuid)) continue;
    *handle = handle_of(device);
    return NVML_SUCCESS;
  }
  return NVML_NOT_FOUND;
}
API int nvmlDeviceGetName(void *handle UNUSED, char *text, unsigned length) {
  snprintf(text, length, "%s", settings.name);
  return NVML_SUCCESS;
}
API int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = (unsigned)device_of(handle);
  return NVML_SUCCESS;
}
API int nvmlDeviceGetCudaComputeCapability(void *handle UNUSED, int *major, int *minor) {
  *major = settings.capability / 10;
  *minor = settings.capability % 10;
  return NVML_SUCCESS;
}

static size_t used(int device) {
  lock();
  size_t bytes = used_bytes(device);
  unlock();
  return bytes;
}
typedef struct {
  unsigned long long total, free, used;
} Memory;
API int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
  size_t bytes = used(device_of(handle));
  *memory = (Memory){settings.memory_bytes, settings.memory_bytes - bytes, bytes};
  return NVML_SUCCESS;
}
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} MemoryV2;
API int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
  size_t bytes = used(device_of(handle));
  *memory = (MemoryV2){memory->version, settings.memory_bytes, 0, settings.memory_bytes - bytes, bytes};
  return NVML_SUCCESS;
}

typedef struct {
  unsigned pid;
  unsigned long long used;
} Process; /* of version 1 */
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
} ProcessV3;

static int processes(int device, unsigned *room) {
  bool one = has_context(device);
  int error = one && *room < 1 ? NVML_SMALL : NVML_SUCCESS;
  *room = one;
  return error;
}
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, Process *list) {
  int device = device_of(handle), error = processes(device, count);
  if (!error && *count) list[0] = (Process){(unsigned)getpid(), used(device)};
  return error;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessV3 *list) {
  int device = device_of(handle), error = processes(device, count);
  if (!error && *count) list[0] = (ProcessV3){(unsigned)getpid(), used(device), ~0u, ~0u};
  return error;
}
API int nvmlDeviceGetUtilizationRates(void *handle UNUSED, unsigned percent[2]) {
  percent[0] = percent[1] = 0;
  return NVML_SUCCESS;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }

/* Devices, their properties and contexts, through the runtime's API. */
#include "device.h"

#include <stdio.h>
#include <string.h>

static __thread int current;
static bool contexts[MAX_DEVICES];

int current_device(void) { return current; }
bool has_context(int device) { return contexts[device]; }
void use_context(int device) { contexts[device] = true; }

/* cudaDeviceProp. CUDA 13 left out eight fields of CUDA 12. */
#if CUDART_VERSION < 13000
#define CUDA12(field) field;
#else
#define CUDA12(field)
#endif
typedef struct {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_mem, shared_mem_per_block;
  int regs_per_block, warp_size;
  size_t mem_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
  CUDA12(int clock_rate)
  size_t total_const_mem;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  CUDA12(int device_overlap)
  int multi_processor_count;
  CUDA12(int kernel_exec_timeout_enabled)
  int integrated, can_map_host_memory;
  CUDA12(int compute_mode)
  int max_texture_1d[2];
  CUDA12(int max_texture_1d_linear)
  int max_texture_2d_to_cubemap_layered[23], max_surfaces[14];
  size_t surface_alignment;
  int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver, async_engine_count,
      unified_addressing;
  CUDA12(int memory_clock_rate)
  int memory_bus_width, l2_cache_size, persisting_l2_cache_max_size, max_threads_per_multiprocessor,
      stream_priorities_supported, global_l1_cache_supported, local_l1_cache_supported;
  size_t shared_mem_per_multiprocessor;
  int regs_per_multiprocessor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id,
      host_native_atomic_supported;
  CUDA12(int single_to_double_precision_perf_ratio)
  int pageable_memory_access, concurrent_managed_access, compute_preemption_supported,
      can_use_host_pointer_for_registered_mem, cooperative_launch;
  CUDA12(int cooperative_multi_device_launch)
  size_t shared_mem_per_block_optin;
  int pageable_memory_access_uses_host_page_tables, direct_managed_mem_access_from_host,
      max_blocks_per_multiprocessor, access_policy_max_window_size;
  size_t reserved_shared_mem_per_block;
  int host_register_supported, sparse_cuda_array_supported, host_register_read_only_supported,
      timeline_semaphore_interop_supported, memory_pools_supported;
  int gpu_direct[6]; /* GPUDirect, pool handles, deferred mapping, IPC events */
  int cluster_launch, rest[64];
} DeviceProperties;

void device_uuid(unsigned char uuid[16], int device) {
  memcpy(uuid, "brim rehearsal ", 15);
  uuid[15] = (unsigned char)device;
}

API Error cudaGetDeviceProperties(DeviceProperties *p, int device) {
  if (device < 0 || device >= settings.count) return result(INVALID_DEVICE);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", settings.name);
  device_uuid(p->uuid, device);
  p->total_global_mem = settings.memory_bytes;
  p->shared_mem_per_block = 48 * KIB;
  p->regs_per_block = p->regs_per_multiprocessor = 65536;
  p->warp_size = 32;
  p->mem_pitch = INT32_MAX;
  p->max_threads_per_block = p->max_threads_dim[0] = p->max_threads_dim[1] = 1024;
  p->max_threads_dim[2] = 64;
  p->max_grid_size[0] = INT32_MAX;
  p->max_grid_size[1] = p->max_grid_size[2] = 65535;
  p->total_const_mem = 64 * KIB;
  p->major = settings.capability / 10;
  p->minor = settings.capability % 10;
  p->texture_alignment = p->surface_alignment = 512;
  p->texture_pitch_alignment = 32;
  p->multi_processor_count = settings.multiprocessors;
  p->can_map_host_memory = p->concurrent_kernels = p->unified_addressing = p->stream_priorities_supported = 1;
  p->pci_bus_id = device + 1;
  p->async_engine_count = 2;
  p->memory_bus_width = settings.bus_bits;
  p->l2_cache_size = (int)settings.l2_bytes;
  p->max_threads_per_multiprocessor = settings.threads_per_multiprocessor;
  p->shared_mem_per_multiprocessor = settings.shared_per_multiprocessor_bytes;
  p->shared_mem_per_block_optin = settings.shared_per_block_bytes;
  p->max_blocks_per_multiprocessor = settings.blocks_per_multiprocessor;
  p->reserved_shared_mem_per_block = settings.capability >= 80 ? KIB : 0;
  p->managed_memory = p->concurrent_managed_access = p->compute_preemption_supported = p->cooperative_launch = 1;
  p->host_register_supported = p->memory_pools_supported = 1;
  p->cluster_launch = settings.capability >= 90;
  return SUCCESS;
}
API Error cudaGetDeviceProperties_v2(DeviceProperties *p, int device) { return cudaGetDeviceProperties(p, device); }

/* cudaDeviceAttr and CUdevice_attribute share their numbers. What is not listed is 0, among it multicast (132), fabric
 * handles (128), GPUDirect (110, 116), run-time limits (17), managed access to pageable memory (88). */
API Error cudaDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 0 || device >= settings.count) return result(INVALID_DEVICE);
  switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break; /* threads per block, x, y */
    case 4: *value = 64; break;
    case 5: *value = INT32_MAX; break; /* grid x */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 48 * (int)KIB; break;
    case 9: *value = 64 * (int)KIB; break;
    case 10: *value = 32; break;
    case 11: *value = INT32_MAX; break;
    case 12: case 82: *value = 65536; break; /* registers */
    case 13: *value = 1700000; break; /* kHz */
    case 14: case 30: *value = 512; break;
    case 15: *value = 1; break;
    case 16: *value = settings.multiprocessors; break;
    case 33: *value = device + 1; break; /* PCI bus */
    case 36: *value = 9000000; break; /* memory, kHz */
    case 37: *value = settings.bus_bits; break;
    case 38: *value = (int)settings.l2_bytes; break;
    case 39: *value = settings.threads_per_multiprocessor; break;
    case 40: *value = 2; break; /* copy engines */
    case 75: *value = settings.capability / 10; break;
    case 76: *value = settings.capability % 10; break;
    case 81: *value = (int)settings.shared_per_multiprocessor_bytes; break;
    case 97: *value = (int)settings.shared_per_block_bytes; break;
    case 106: *value = settings.blocks_per_multiprocessor; break;
    case 111: *value = settings.capability >= 80 ? (int)KIB : 0; break;
    case 120: *value = settings.capability >= 90; break; /* clusters */
    case 19: case 31: case 41: case 78: case 83: case 89: case 90: case 95: case 99: /* mapped host memory, ... */
    case 102: case 103: case 115: *value = 1; break; /* virtual memory, POSIX handles, memory pools */
    default: *value = 0;
  }
  return SUCCESS;
}

API Error cudaGetDeviceCount(int *count) {
  *count = settings.count;
  return result(settings.count ? SUCCESS : NO_DEVICE);
}
API Error cudaSetDevice(int device) {
  if (!settings.count) return result(NO_DEVICE);
  if (device < 0 || device >= settings.count) return result(INVALID_DEVICE);
  current = device;
  use_context(device);
  return SUCCESS;
}
API Error cudaGetDevice(int *device) {
  *device = current;
  return result(settings.count ? SUCCESS : NO_DEVICE);
}
API Error cudaInitDevice(int device, unsigned device_flags UNUSED, unsigned flags UNUSED) {
  if (device < 0 || device >= settings.count) return result(INVALID_DEVICE);
  use_context(device);
  return SUCCESS;
}
API Error cudaDeviceSynchronize(void) {
  finish_device(current);
  return SUCCESS;
}
API Error cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return SUCCESS;
}
API Error cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
API Error cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return SUCCESS;
}
static bool peers[MAX_DEVICES][MAX_DEVICES];
API Error cudaDeviceEnablePeerAccess(int peer, unsigned flags UNUSED) {
  if (peer < 0 || peer >= settings.count || peer == current) return result(INVALID_DEVICE);
  if (peers[current][peer]) return result(PEER_ACCESS_ALREADY_ENABLED);
  peers[current][peer] = true;
  return SUCCESS;
}
API Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}
API Error cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, (size_t)length, "0000:%02x:00.0", (unsigned)device + 1);
  return SUCCESS;
}
API Error cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > settings.count) return result(INVALID_VALUE);
  *device = (int)bus - 1;
  return SUCCESS;
}
API Error cudaDeviceGetLimit(size_t *value, int limit) {
  *value = limit == 0 ? KIB : limit == 2 ? 8 * MIB : 0; /* stack of a thread, heap of kernels */
  return SUCCESS;
}

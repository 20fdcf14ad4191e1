/* Kernels: registered by name when PyTorch's libraries are loaded, counted when they are launched, never run. */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const void *handle; /* what the host launches: the address of a stub function, or of a name */
  const char *name;
  uint64_t launches;
} Kernel;

static Kernel *kernels;
static size_t kernel_count, kernel_capacity;
static bool sorted;
static uint64_t launches, host_launches;

static int by_handle(const void *a, const void *b) {
  uintptr_t x = (uintptr_t)((const Kernel *)a)->handle, y = (uintptr_t)((const Kernel *)b)->handle;
  return x < y ? -1 : x > y;
}

static Kernel *kernel_of(const void *handle) {
  if (!sorted) qsort(kernels, kernel_count, sizeof *kernels, by_handle);
  sorted = true;
  Kernel wanted = {.handle = handle};
  return bsearch(&wanted, kernels, kernel_count, sizeof *kernels, by_handle);
}

static void register_kernel(const void *handle, const char *name) {
  lock();
  if (kernel_count == kernel_capacity) {
    kernel_capacity = 2 * kernel_capacity + 4096;
    kernels = realloc(kernels, kernel_capacity * sizeof *kernels);
  }
  kernels[kernel_count++] = (Kernel){handle, name, 0};
  sorted = false;
  unlock();
}

const void *named_kernel(const char *name) {
  char *own = strdup(name);
  register_kernel(own, own);
  return own;
}

/* ---- counting ---- */
void count_launch(const void *handle) {
  lock();
  launches++;
  Kernel *kernel = kernel_of(handle);
  if (kernel) kernel->launches++;
  unlock();
}
void count_host_launch(void) {
  lock();
  host_launches++;
  unlock();
}
void forget_launches(void) {
  launches = host_launches = 0;
  for (size_t i = 0; i < kernel_count; i++) kernels[i].launches = 0;
}

API uint64_t brim_device_launches(void) { return launches; }
API uint64_t brim_device_host_launches(void) { return host_launches; }

/* size_t brim_device_kernels(size_t index, const char **name, uint64_t *launches): the registered kernel of that index as
 * the compiler mangled its name, and how often it was launched; returns how many are registered. */
API size_t brim_device_kernels(size_t index, const char **name, uint64_t *count) {
  lock();
  size_t registered = kernel_count;
  if (index < registered) {
    *name = kernels[index].name;
    *count = kernels[index].launches;
  }
  unlock();
  return registered;
}

Error launch(const void *handle, Dim3 grid, Dim3 block, size_t shared_bytes, void *stream) {
  (void)grid, (void)block, (void)shared_bytes;
  if (stream_of(stream)->capture) return submit(stream, (Item){.kind = ITEM_KERNEL, .what = "a kernel", .to = (void *)handle});
  count_launch(handle);
  count_host_launch();
  return SUCCESS;
}

/* ---- what nvcc's host code calls ---- */
API void **__cudaRegisterFatBinary(void *binary) {
  void **handle = malloc(sizeof *handle);
  *handle = binary;
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle UNUSED) {}
API void __cudaUnregisterFatBinary(void **handle) { free(handle); }
API char __cudaInitModule(void **handle UNUSED) { return 1; }
API void __cudaRegisterFunction(void **handle UNUSED, const char *host, char *device UNUSED, const char *name) {
  register_kernel(host, name);
}

static __thread struct {
  Dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} pushed;

API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared_bytes = shared_bytes;
  pushed.stream = stream;
  return 0;
}
API Error __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared_bytes, void **stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *stream = pushed.stream;
  return SUCCESS;
}

/* ---- launches ---- */
API Error cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments UNUSED, size_t shared_bytes,
                           void *stream) {
  return launch(kernel, grid, block, shared_bytes, stream);
}
API Error __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments UNUSED, size_t shared_bytes,
                             void *stream) {
  return launch(kernel, grid, block, shared_bytes, stream);
}
API Error cudaLaunchCooperativeKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments UNUSED,
                                      size_t shared_bytes, void *stream) {
  return launch(kernel, grid, block, shared_bytes, stream);
}
typedef struct {
  Dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} LaunchConfiguration;
API Error cudaLaunchKernelExC(const LaunchConfiguration *how, const void *kernel, void **arguments UNUSED) {
  return launch(kernel, how->grid, how->block, how->shared_bytes, how->stream);
}
API Error __cudaGetKernel(const void **kernel, const void *host) {
  *kernel = host;
  return SUCCESS;
}
API Error cudaGetFuncBySymbol(const void **kernel, const void *host) {
  *kernel = host;
  return SUCCESS;
}

/* ---- what kernels are like ---- */
typedef struct {
  size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads_per_block, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes;
} FunctionAttributes; /* the newer fields behind these are not written: older callers have no room for them */

API Error cudaFuncGetAttributes(FunctionAttributes *attributes, const void *kernel UNUSED) {
  /* CUB chooses its tuning by the newest of these that the device runs: architectures that PyTorch is compiled for. */
  static const int compiled[] = {120, 103, 100, 90, 86, 80, 75, 70, 60, 50};
  memset(attributes, 0, sizeof *attributes);
  attributes->max_threads_per_block = 1024;
  attributes->registers = 32;
  attributes->max_dynamic_shared_bytes = (int)settings.shared_per_block_bytes;
  for (size_t i = 0; i < sizeof compiled / sizeof *compiled && !attributes->ptx_version; i++)
    if (compiled[i] <= settings.capability) attributes->ptx_version = attributes->binary_version = compiled[i];
  return SUCCESS;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel UNUSED, int threads,
                                                        size_t shared_bytes) {
  int most = settings.blocks_per_multiprocessor;
  int by_threads = settings.threads_per_multiprocessor / (threads > 0 ? threads : 1);
  int by_shared = shared_bytes ? (int)(settings.shared_per_multiprocessor_bytes / (shared_bytes + KIB)) : most;
  if (by_threads < most) most = by_threads;
  if (by_shared < most) most = by_shared;
  *blocks = most > 1 ? most : 1;
  return SUCCESS;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                 size_t shared_bytes, unsigned flags UNUSED) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}
API Error cudaOccupancyMaxActiveClusters(int *clusters) {
  *clusters = settings.multiprocessors;
  return SUCCESS;
}

/* Variables of the device (__device__ int x): all at one place that nobody computes with. */
API Error cudaGetSymbolAddress(void **out, const void *symbol UNUSED) {
  static char somewhere[64 * KIB];
  *out = somewhere;
  return SUCCESS;
}

/* ---- modules loaded at run time: a module is a handle, a kernel is its name ---- */
static Error load_module(void **out) {
  use_context(current_device());
  *out = malloc(1);
  return *out ? SUCCESS : OUT_OF_MEMORY;
}
API Error cudaLibraryLoadData(void **library) { return load_module(library); }
API Error cuModuleLoadData(void **module) { return load_module(module); }
API Error cuModuleLoadDataEx(void **module) { return load_module(module); }
API Error cuModuleLoad(void **module) { return load_module(module); }
API Error cuLibraryLoadData(void **library) { return load_module(library); }
API Error cudaLibraryUnload(void *library) {
  free(library);
  return SUCCESS;
}
API Error cuModuleUnload(void *module) { return cudaLibraryUnload(module); }
API Error cuLibraryUnload(void *library) { return cudaLibraryUnload(library); }

API Error cudaLibraryGetKernel(const void **kernel, void *library UNUSED, const char *name) {
  *kernel = named_kernel(name);
  return SUCCESS;
}
API Error cuLibraryGetKernel(const void **kernel, void *library, const char *name) {
  return cudaLibraryGetKernel(kernel, library, name);
}
API Error cuModuleGetFunction(const void **kernel, void *module, const char *name) {
  return cudaLibraryGetKernel(kernel, module, name);
}
API Error cuKernelGetFunction(const void **function, const void *kernel) {
  *function = kernel;
  return SUCCESS;
}
API Error cuFuncGetAttribute(int *value, int attribute, const void *function UNUSED) {
  *value = attribute == 0 ? 1024 /* threads of a block */ : attribute == 4 ? 32 /* registers */ : 0;
  return SUCCESS;
}
API Error cuFuncGetModule(const void **module, const void *function) {
  *module = function;
  return SUCCESS;
}
API Error cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}
API Error cuOccupancyMaxActiveClusters(int *clusters) { return cudaOccupancyMaxActiveClusters(clusters); }

API Error cuLaunchKernel(const void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream) {
  return launch(function, (Dim3){grid_x, grid_y, grid_z}, (Dim3){block_x, block_y, block_z}, shared_bytes, stream);
}
API Error cuLaunchCooperativeKernel(const void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                    void *stream) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream);
}
typedef struct {
  Dim3 grid, block;
  unsigned shared_bytes;
  void *stream;
} DriverLaunchConfiguration;
API Error cuLaunchKernelEx(const DriverLaunchConfiguration *how, const void *function) {
  return launch(function, how->grid, how->block, how->shared_bytes, how->stream);
}

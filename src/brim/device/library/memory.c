/* Memory of devices and pinned memory of the host: who has which addresses, and how much of a device is taken. */
#define _GNU_SOURCE
#include "device.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- known ranges: sorted by address, disjoint ---- */
static Range *ranges;
static size_t range_count, range_capacity;

static size_t first_ending_after(uintptr_t address) {
  size_t low = 0, high = range_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].end <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

Range *range_at(const void *pointer) {
  size_t i = first_ending_after((uintptr_t)pointer);
  return i < range_count && ranges[i].begin <= (uintptr_t)pointer ? &ranges[i] : NULL;
}

static bool any_range_in(const void *begin, size_t bytes) {
  size_t i = first_ending_after((uintptr_t)begin);
  return i < range_count && ranges[i].begin < (uintptr_t)begin + bytes;
}

void add_range(void *begin, size_t bytes, int device, RangeKind kind, size_t charged_bytes) {
  if (range_count == range_capacity) {
    range_capacity = 2 * range_capacity + 64;
    ranges = realloc(ranges, range_capacity * sizeof *ranges);
  }
  size_t i = first_ending_after((uintptr_t)begin);
  memmove(ranges + i + 1, ranges + i, (range_count - i) * sizeof *ranges);
  ranges[i] = (Range){(uintptr_t)begin, (uintptr_t)begin + bytes, device, kind, charged_bytes};
  range_count++;
}

void remove_range(Range *range) {
  memmove(range, range + 1, (size_t)(ranges + --range_count - range) * sizeof *range);
}

/* ---- how much of a device is taken ---- */
static struct {
  size_t pages, small, peak;
} taken[MAX_DEVICES];

/* Allocations of less than 1 MiB share 2 MiB pages, as cudaMalloc does it; larger ones have pages of their own. */
#define SMALL MIB
#define SMALL_ROUNDING 512

static size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t used_bytes(int device) {
  size_t context = has_context(device) ? settings.context_bytes : 0;
  return context + taken[device].pages + rounded(taken[device].small, PHYSICAL_PAGE);
}
size_t peak_used_bytes(int device) { return taken[device].peak; }
void reset_peak(int device) { taken[device].peak = used_bytes(device); }

Error charge(int device, size_t bytes) {
  use_context(device);
  size_t *counter = bytes < SMALL ? &taken[device].small : &taken[device].pages;
  size_t more = rounded(bytes, bytes < SMALL ? SMALL_ROUNDING : PHYSICAL_PAGE);
  *counter += more;
  size_t used = used_bytes(device);
  if (used > settings.memory_bytes) {
    *counter -= more;
    return OUT_OF_MEMORY;
  }
  if (used > taken[device].peak) taken[device].peak = used;
  return SUCCESS;
}

void uncharge(int device, size_t bytes) {
  if (bytes < SMALL)
    taken[device].small -= rounded(bytes, SMALL_ROUNDING);
  else
    taken[device].pages -= rounded(bytes, PHYSICAL_PAGE);
}

/* ---- addresses ---- */
void *reserve_addresses(size_t bytes, int protection) {
  size_t length = rounded(bytes, PAGE), mapped = length + PHYSICAL_PAGE;
  char *begin = mmap(NULL, mapped, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return NULL;
  char *aligned = (char *)rounded((uintptr_t)begin, PHYSICAL_PAGE);
  if (aligned > begin) munmap(begin, (size_t)(aligned - begin));
  size_t behind = (size_t)(begin + mapped - (aligned + length));
  if (behind) munmap(aligned + length, behind);
  return aligned;
}

void poison(void *begin, size_t bytes) { memset(begin, 0xFF, bytes); }

/* New memory holds anything. Where order matters, it holds what no computation survives. */
static void poison_new(void *begin, size_t bytes) {
  if (settings.order != ORDER_AT_ONCE) poison(begin, bytes);
}

Error allocate_device_memory(void **out, size_t bytes, int device, RangeKind kind) {
  *out = NULL;
  if (!bytes) return SUCCESS;
  lock();
  Error error = charge(device, bytes);
  if (!error) {
    *out = reserve_addresses(bytes, PROT_READ | PROT_WRITE);
    if (*out) {
      add_range(*out, bytes, device, kind, bytes);
    } else {
      uncharge(device, bytes);
      error = OUT_OF_MEMORY;
    }
  }
  unlock();
  if (*out) poison_new(*out, bytes);
  return result(error);
}

Error free_memory(void *pointer, bool host) {
  if (!pointer) return SUCCESS;
  lock();
  Range *range = range_at(pointer);
  bool known = range && range->begin == (uintptr_t)pointer &&
               (host ? range->kind == HOST_ALLOCATED : range->kind == DEVICE_MEMORY || range->kind == MANAGED_MEMORY);
  Range gone = known ? *range : (Range){0};
  if (known) {
    if (!host) uncharge(range->device, range->charged_bytes);
    remove_range(range);
  }
  unlock();
  if (!known) return result(INVALID_VALUE);
  munmap(pointer, rounded(gone.end - gone.begin, PAGE));
  return SUCCESS;
}

/* ---- device memory ---- */
API Error cudaMalloc(void **out, size_t bytes) {
  return allocate_device_memory(out, bytes, current_device(), DEVICE_MEMORY);
}
API Error cudaMallocManaged(void **out, size_t bytes, unsigned flags UNUSED) {
  return allocate_device_memory(out, bytes, current_device(), MANAGED_MEMORY);
}
API Error cudaFree(void *pointer) {
  use_context(current_device());
  lock();
  Range *range = range_at(pointer);
  int device = range ? range->device : current_device();
  unlock();
  finish_device(device); /* cudaFree waits for the device */
  return free_memory(pointer, false);
}
API Error cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  int device = current_device();
  lock();
  use_context(device);
  *total_bytes = settings.memory_bytes;
  size_t used = used_bytes(device);
  *free_bytes = used < settings.memory_bytes ? settings.memory_bytes - used : 0;
  unlock();
  return SUCCESS;
}

/* Stream-ordered allocation (PyTorch's backend:cudaMallocAsync): at once when asked for, freed in the stream's order. */
API Error cudaMallocAsync(void **out, size_t bytes, void *stream UNUSED) { return cudaMalloc(out, bytes); }
API Error cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool UNUSED, void *stream UNUSED) {
  return cudaMalloc(out, bytes);
}
API Error cudaFreeAsync(void *pointer, void *stream) {
  return submit(stream, (Item){.kind = ITEM_FREE, .to = pointer, .what = "cudaFreeAsync"});
}
API Error cudaDeviceGetDefaultMemPool(void **pool, int device) {
  *pool = (void *)(uintptr_t)(device + 1);
  return SUCCESS;
}
API Error cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
API Error cudaMemPoolCreate(void **pool, const void *properties UNUSED) {
  return cudaDeviceGetDefaultMemPool(pool, current_device());
}
API Error cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  int device = (int)(uintptr_t)pool - 1;
  lock();
  bool sizes = attribute >= 5 && attribute <= 8; /* reserved and used bytes, now and at most */
  *(uint64_t *)value = sizes ? taken[device].pages + taken[device].small : 0;
  unlock();
  return SUCCESS;
}

/* ---- pinned memory of the host ---- */
API Error cudaHostAlloc(void **out, size_t bytes, unsigned flags UNUSED) {
  use_context(current_device());
  *out = NULL;
  if (!bytes) return SUCCESS;
  *out = reserve_addresses(bytes, PROT_READ | PROT_WRITE);
  if (!*out) return result(OUT_OF_MEMORY);
  poison_new(*out, bytes);
  lock();
  add_range(*out, bytes, current_device(), HOST_ALLOCATED, 0);
  unlock();
  return SUCCESS;
}
API Error cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API Error cudaFreeHost(void *pointer) {
  lock();
  Range *range = range_at(pointer);
  size_t bytes = range ? range->end - range->begin : 0;
  unlock();
  if (pointer && bytes) finish_range(pointer, bytes, "cudaFreeHost");
  return free_memory(pointer, true);
}

bool is_mapped(const void *begin, size_t bytes) {
  uintptr_t first = (uintptr_t)begin & ~(PAGE - 1), behind = rounded((uintptr_t)begin + bytes, PAGE);
  unsigned char pages[256];
  for (uintptr_t page = first; page < behind; page += sizeof pages * PAGE) {
    size_t length = behind - page < sizeof pages * PAGE ? behind - page : sizeof pages * PAGE;
    if (mincore((void *)page, length, pages)) return false;
  }
  return true;
}

API Error cudaHostRegister(void *begin, size_t bytes, unsigned flags UNUSED) {
  if (!begin || !bytes || !is_mapped(begin, bytes)) return result(INVALID_VALUE);
  use_context(current_device());
  lock();
  Error error = any_range_in(begin, bytes) ? ALREADY_REGISTERED : SUCCESS;
  if (!error) add_range(begin, bytes, current_device(), HOST_REGISTERED, 0);
  unlock();
  return result(error);
}
API Error cudaHostUnregister(void *begin) {
  lock();
  Range *range = range_at(begin);
  bool known = range && range->kind == HOST_REGISTERED && range->begin == (uintptr_t)begin;
  size_t bytes = known ? range->end - range->begin : 0;
  unlock();
  if (!known) return result(NOT_REGISTERED);
  finish_range(begin, bytes, "cudaHostUnregister");
  if (!is_mapped(begin, bytes)) hazard("%zu registered bytes at %p were unmapped before cudaHostUnregister", bytes, begin);
  lock();
  remove_range(range_at(begin));
  unlock();
  return SUCCESS;
}
API Error cudaHostGetDevicePointer(void **device, void *host, unsigned flags UNUSED) {
  lock();
  bool known = pinned(range_at(host));
  unlock();
  *device = known ? host : NULL;
  return result(known ? SUCCESS : INVALID_VALUE);
}
API Error cudaHostGetFlags(unsigned *flags, void *host) {
  lock();
  bool known = pinned(range_at(host));
  unlock();
  *flags = 0;
  return result(known ? SUCCESS : INVALID_VALUE);
}

/* ---- whose a pointer is ---- */
typedef struct {
  int type, device; /* type: 0 unregistered, 1 host, 2 device, 3 managed */
  void *device_pointer, *host_pointer;
#if CUDART_VERSION >= 13000
  long reserved[8];
#endif
} PointerAttributes;

API Error cudaPointerGetAttributes(PointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = -2;
  attributes->host_pointer = (void *)pointer;
  lock();
  Range *range = range_at(pointer);
  if (range) {
    attributes->type = pinned(range) ? 1 : range->kind == MANAGED_MEMORY ? 3 : 2;
    attributes->device = range->device;
    attributes->device_pointer = (void *)pointer;
    if (attributes->type == 2) attributes->host_pointer = NULL;
  }
  unlock();
  return SUCCESS;
}

API Error cuPointerGetAttribute(void *out, int attribute, const void *pointer) {
  lock();
  Range *range = range_at(pointer);
  Error error = range ? SUCCESS : INVALID_VALUE;
  if (range) {
    size_t bytes = range->end - range->begin;
    switch (attribute) {
      case 2: *(unsigned *)out = pinned(range) ? 1 : 2; break; /* memory type */
      case 3: case 4: *(const void **)out = pointer; break;   /* as the device and as the host see it */
      case 7: *(uint64_t *)out = range->begin; break;         /* buffer id */
      case 9: *(int *)out = range->device; break;
      case 11: *(uintptr_t *)out = range->begin; break;
      case 12: *(size_t *)out = bytes; break;
      default: *(int *)out = 0;
    }
  }
  unlock();
  return error;
}
API Error cuMemGetAddressRange_v2(uintptr_t *begin, size_t *bytes, uintptr_t pointer) {
  lock();
  Range *range = range_at((void *)pointer);
  if (range) {
    if (begin) *begin = range->begin;
    if (bytes) *bytes = range->end - range->begin;
  }
  unlock();
  return range ? SUCCESS : INVALID_VALUE;
}

/* Virtual memory management of the driver API: what PyTorch's expandable segments are made of. */
#define _GNU_SOURCE
#include "device.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A physical allocation, charged to its device until its handle and all its mappings are gone. */
typedef struct {
  size_t bytes;
  int device, references;
} Physical;

typedef struct Mapping {
  uintptr_t begin, end;
  Physical *physical;
  bool accessible;
  struct Mapping *next;
} Mapping;

static Mapping *mappings;

typedef struct {
  int type, handle_types;
  struct {
    int type, id;
  } location;
  void *metadata;
  unsigned char flags[8];
} AllocationProperties;

static void drop(Physical *physical) {
  if (--physical->references) return;
  uncharge(physical->device, physical->bytes);
  free(physical);
}

API Error cuMemGetAllocationGranularity(size_t *bytes, const AllocationProperties *properties UNUSED, int kind UNUSED) {
  *bytes = PHYSICAL_PAGE;
  return SUCCESS;
}
API Error cuMemAddressReserve(void **out, size_t bytes, size_t alignment UNUSED, void *hint UNUSED,
                              unsigned long long flags UNUSED) {
  *out = reserve_addresses(bytes, PROT_NONE);
  if (!*out) return OUT_OF_MEMORY;
  lock();
  add_range(*out, bytes, current_device(), RESERVED_ADDRESSES, 0);
  unlock();
  return SUCCESS;
}
API Error cuMemAddressFree(void *begin, size_t bytes) {
  lock();
  Range *range = range_at(begin);
  bool known = range && range->kind == RESERVED_ADDRESSES && range->begin == (uintptr_t)begin;
  if (known) remove_range(range);
  unlock();
  if (!known) return INVALID_VALUE;
  munmap(begin, bytes);
  return SUCCESS;
}
API Error cuMemCreate(Physical **handle, size_t bytes, const AllocationProperties *properties,
                      unsigned long long flags UNUSED) {
  int device = properties->location.id;
  if (device < 0 || device >= settings.count) return INVALID_DEVICE;
  lock();
  Error error = charge(device, bytes);
  unlock();
  if (error) return error;
  *handle = malloc(sizeof **handle);
  **handle = (Physical){bytes, device, 1};
  return SUCCESS;
}
API Error cuMemRelease(Physical *handle) {
  lock();
  drop(handle);
  unlock();
  return SUCCESS;
}
API Error cuMemMap(char *begin, size_t bytes, size_t offset UNUSED, Physical *handle, unsigned long long flags UNUSED) {
  Mapping *mapping = malloc(sizeof *mapping);
  lock();
  handle->references++;
  *mapping = (Mapping){(uintptr_t)begin, (uintptr_t)begin + bytes, handle, false, mappings};
  mappings = mapping;
  Range *range = range_at(begin);
  if (range) range->device = handle->device;
  unlock();
  return SUCCESS;
}
API Error cuMemSetAccess(void *begin, size_t bytes, const void *descriptions UNUSED, size_t count UNUSED) {
  if (mprotect(begin, bytes, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
  lock();
  for (Mapping *mapping = mappings; mapping; mapping = mapping->next) {
    if (mapping->accessible || mapping->begin < (uintptr_t)begin || mapping->end > (uintptr_t)begin + bytes) continue;
    mapping->accessible = true; /* another device's access comes later and finds values here */
    if (settings.order != ORDER_AT_ONCE) poison((void *)mapping->begin, mapping->end - mapping->begin);
  }
  unlock();
  return SUCCESS;
}
API Error cuMemUnmap(char *begin, size_t bytes) {
  lock();
  Range *range = range_at(begin);
  int device = range ? range->device : current_device();
  unlock();
  finish_device(device);
  void *again =
      mmap(begin, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  lock();
  for (Mapping **at = &mappings; *at;) {
    Mapping *mapping = *at;
    if (mapping->begin >= (uintptr_t)begin && mapping->end <= (uintptr_t)begin + bytes) {
      *at = mapping->next;
      drop(mapping->physical);
      free(mapping);
    } else {
      at = &mapping->next;
    }
  }
  unlock();
  return again == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}
API Error cuMemRetainAllocationHandle(Physical **handle, void *pointer) {
  Error error = INVALID_VALUE;
  lock();
  for (Mapping *mapping = mappings; mapping; mapping = mapping->next) {
    if (mapping->begin > (uintptr_t)pointer || (uintptr_t)pointer >= mapping->end) continue;
    *handle = mapping->physical;
    mapping->physical->references++;
    error = SUCCESS;
    break;
  }
  unlock();
  return error;
}
API Error cuMemGetAllocationPropertiesFromHandle(AllocationProperties *properties, Physical *handle) {
  memset(properties, 0, sizeof *properties);
  properties->type = properties->location.type = 1; /* pinned, on a device */
  properties->location.id = handle->device;
  return SUCCESS;
}

/* Memory shared with other processes: there are none that could use it. */
API Error cuMemExportToShareableHandle(void) { return NOT_SUPPORTED; }
API Error cuMemImportFromShareableHandle(void) { return NOT_SUPPORTED; }
API Error cudaIpcGetMemHandle(void) { return result(NOT_SUPPORTED); }
API Error cudaIpcOpenMemHandle(void **pointer) {
  *pointer = NULL;
  return result(NOT_SUPPORTED);
}

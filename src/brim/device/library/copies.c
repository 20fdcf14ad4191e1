/* Copies and memsets. They are real, but pages that nobody ever wrote to are not read: a gather of shards of a model that was
 * never initialised would otherwise commit all of it. */
#define _GNU_SOURCE
#include "device.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK PHYSICAL_PAGE

static bool in_device_memory(const void *pointer) {
  lock();
  bool mine = on_device(range_at(pointer));
  unlock();
  return mine;
}

/* Whether anything was ever written to these pages of private memory: they are in RAM or in swap. */
static bool written(const void *begin, size_t bytes) {
  static atomic_int file = -2;
  int pagemap = file;
  if (pagemap == -2) file = pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) return true;
  uint64_t entries[CHUNK / PAGE + 2];
  uintptr_t first = (uintptr_t)begin / PAGE, behind = ((uintptr_t)begin + bytes + PAGE - 1) / PAGE;
  size_t length = (behind - first) * sizeof *entries;
  if (pread(pagemap, entries, length, (off_t)(first * sizeof *entries)) != (ssize_t)length) return true;
  for (size_t i = 0; i < behind - first; i++)
    if (entries[i] >> 62) return true; /* bit 63: present, bit 62: swapped out */
  return false;
}

static void clear(char *to, size_t bytes, bool device) {
  char *first = (char *)(((uintptr_t)to + PAGE - 1) & ~(PAGE - 1)), *end = to + bytes;
  char *behind = (char *)((uintptr_t)end & ~(PAGE - 1));
  if (!device || behind <= first) {
    memset(to, 0, bytes);
    return;
  }
  memset(to, 0, (size_t)(first - to));
  memset(behind, 0, (size_t)(end - behind));
  madvise(first, (size_t)(behind - first), MADV_DONTNEED); /* given back instead of touched */
}

void copy_bytes(void *target, const void *source, size_t bytes) {
  char *to = target;
  const char *from = source;
  bool to_device = in_device_memory(to);
  if (to_device && bytes > settings.copy_limit_bytes) return;
  if (bytes < CHUNK || !in_device_memory(from)) {
    memmove(to, from, bytes);
    return;
  }
  if (to < from + bytes && from < to + bytes) { /* overlapping: CUDA leaves it open, memmove is kind */
    memmove(to, from, bytes);
    return;
  }
  while (bytes) {
    size_t piece = CHUNK - (uintptr_t)from % CHUNK;
    if (piece > bytes) piece = bytes;
    if (written(from, piece))
      memcpy(to, from, piece);
    else if (!to_device || written(to, piece < CHUNK ? piece : CHUNK))
      clear(to, piece, to_device);
    to += piece;
    from += piece;
    bytes -= piece;
  }
}

void set_bytes(void *to, int value, size_t bytes) {
  bool device = in_device_memory(to);
  if (device && value && bytes > settings.copy_limit_bytes) return;
  if (value)
    memset(to, value, bytes);
  else
    clear(to, bytes, device && bytes >= 64 * KIB);
}

/* ---- as items of a stream ---- */
static bool still_there(const Item *item, const void *memory, size_t pitch) {
  if (settings.order == ORDER_AT_ONCE) return true;
  size_t bytes = (item->rows - 1) * pitch + item->bytes;
  if (in_device_memory(memory) || is_mapped(memory, bytes)) return true;
  hazard("%s of %zu bytes at %p: that memory was unmapped before the copy", item->what, bytes, memory);
  return false;
}

void carry_out_copy(const Item *item) {
  if (!still_there(item, item->to, item->to_pitch)) return;
  if (!item->staged && !still_there(item, item->from, item->from_pitch)) return;
  for (size_t row = 0; row < item->rows; row++)
    copy_bytes((char *)item->to + row * item->to_pitch, (const char *)item->from + row * item->from_pitch, item->bytes);
}

void carry_out_set(const Item *item) {
  if (item->kind == ITEM_SET) {
    for (size_t row = 0; row < item->rows; row++)
      set_bytes((char *)item->to + row * item->to_pitch, (int)item->value, item->bytes);
    return;
  }
  for (size_t i = 0; i < item->bytes / sizeof(unsigned); i++) ((unsigned *)item->to)[i] = item->value;
}

static atomic_ullong pageable_copies;
API uint64_t brim_device_pageable_copies(void) { return pageable_copies; }

typedef enum { PAGEABLE, PINNED, ON_DEVICE, BEYOND_ITS_END } Place;

static Place place_of(const void *memory, size_t bytes) {
  lock();
  const Range *range = range_at(memory);
  Place place = !range                                       ? PAGEABLE
                : (uintptr_t)memory + bytes > range->end ? BEYOND_ITS_END
                : pinned(range)                            ? PINNED
                                                           : ON_DEVICE;
  unlock();
  return place;
}

static const char *direction(Place from, Place to) {
  if (from == ON_DEVICE) return to == ON_DEVICE ? "a copy on the device" : "a copy to the host";
  return to == ON_DEVICE ? "a copy to the device" : "a copy on the host";
}

/* ---- numbers that kernels would have found ---- */
static _Thread_local int64_t next_count = -1;

/* int64_t brim_device_next_count(int64_t count)
 *
 * How many results the next kernels of this thread find, of which none runs: the host's next read of such a number, once,
 * gives `count` and not what lies in device memory. -1: none is expected. Returns the one before. */
API int64_t brim_device_next_count(int64_t count) {
  int64_t before = next_count;
  next_count = count;
  return before;
}

/* A number of a few bytes, or the numbers of several parts, of 32 bits each. */
static void write_count(void *to, size_t bytes) {
  int64_t count = brim_device_next_count(-1), parts = (int64_t)(bytes / sizeof(int32_t));
  if (bytes <= sizeof count) {
    memcpy(to, &count, bytes);
    return;
  }
  for (int64_t i = 0; i < parts; i++) ((int32_t *)to)[i] = (int32_t)(count / parts + (i < count % parts));
}

/* cudaMemcpyAsync is asynchronous with pinned memory only. Out of pageable memory the runtime reads before it returns; into
 * pageable memory it waits for the copy. */
static Error copy_async(Item item, void *stream) {
  if (!item.bytes || !item.rows) return SUCCESS;
  size_t last = item.rows - 1;
  size_t to_bytes = last * item.to_pitch + item.bytes, from_bytes = last * item.from_pitch + item.bytes;
  Place to = place_of(item.to, to_bytes), from = place_of(item.from, from_bytes);
  if (to == BEYOND_ITS_END || from == BEYOND_ITS_END) return result(INVALID_VALUE);
  item.kind = ITEM_COPY;
  item.what = direction(from, to);
  if (to == PAGEABLE || from == PAGEABLE) pageable_copies++;
  if (next_count >= 0 && from == ON_DEVICE && to != ON_DEVICE && !stream_of(stream)->capture) {
    finish_stream(stream);
    write_count(item.to, item.bytes);
    return SUCCESS;
  }
  if (settings.order != ORDER_AT_ONCE && from == PAGEABLE && !stream_of(stream)->capture) {
    char *staged = malloc(from_bytes);
    memcpy(staged, item.from, from_bytes);
    item.from = staged;
    item.staged = true;
  }
  Error error = submit(stream, item);
  if (to == PAGEABLE && !stream_of(stream)->capture) finish_stream(stream);
  return error;
}

static Error copy_now(Item item) {
  Error error = copy_async(item, NULL);
  finish_stream(NULL);
  return error;
}

static Item flat(void *to, const void *from, size_t bytes) {
  return (Item){.to = to, .from = from, .bytes = bytes, .rows = 1};
}
static Item rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height) {
  return (Item){
      .to = to, .from = from, .bytes = width, .rows = height, .to_pitch = to_pitch, .from_pitch = from_pitch};
}
static Error set_async(void *to, int value, size_t bytes, void *stream) {
  if (!bytes) return SUCCESS;
  if (place_of(to, bytes) == BEYOND_ITS_END) return result(INVALID_VALUE);
  Item item = {.kind = ITEM_SET, .what = "a memset", .to = to, .bytes = bytes, .rows = 1, .value = (unsigned char)value};
  return submit(stream, item);
}

API Error cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind UNUSED, void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cudaMemcpy(void *to, const void *from, size_t bytes, int kind UNUSED) {
  return copy_now(flat(to, from, bytes));
}
API Error cudaMemcpyPeerAsync(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t bytes,
                              void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cudaMemcpyPeer(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t bytes) {
  return copy_now(flat(to, from, bytes));
}
API Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                            int kind UNUSED, void *stream) {
  return copy_async(rows(to, to_pitch, from, from_pitch, width, height), stream);
}
API Error cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                       int kind UNUSED) {
  return copy_now(rows(to, to_pitch, from, from_pitch, width, height));
}
API Error cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
  return set_async(to, value, bytes, stream);
}
API Error cudaMemset(void *to, int value, size_t bytes) { return set_async(to, value, bytes, NULL); }

/* ---- the driver's forms ---- */
API Error cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cuMemcpyAsync(void *to, const void *from, size_t bytes, void *stream) {
  return copy_async(flat(to, from, bytes), stream);
}
API Error cuMemcpyHtoD_v2(void *to, const void *from, size_t bytes) { return copy_now(flat(to, from, bytes)); }
API Error cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes) { return copy_now(flat(to, from, bytes)); }
API Error cuMemsetD8Async(void *to, unsigned char value, size_t bytes, void *stream) {
  return set_async(to, value, bytes, stream);
}
API Error cuMemsetD32Async(void *to, unsigned value, size_t count, void *stream) {
  if (!count) return SUCCESS;
  Item item = {.kind = ITEM_SET_WORDS, .what = "a memset", .to = to, .bytes = 4 * count, .rows = 1, .value = value};
  return submit(stream, item);
}
API Error cuStreamWriteValue32_v2(void *stream, void *to, unsigned value, unsigned flags UNUSED) {
  return cuMemsetD32Async(to, value, 1, stream);
}

/* NCCL: every collective succeeds at once, as if all ranks held the same data. So one process can be rank 0 of 64. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define INVALID_ARGUMENT 4

typedef struct {
  int size; /* 0: not known, of a communicator that was split */
  int rank, device;
} Communicator;

typedef struct {
  char bytes[128];
} UniqueId;

static int make(Communicator **out, int size, int rank, int device) {
  use_context(device);
  *out = malloc(sizeof **out);
  **out = (Communicator){size, rank, device};
  return 0;
}
static size_t type_bytes(int type) { /* int8, uint8, int32, uint32, int64, uint64, float16, 32, 64, bfloat16, fp8 x 2 */
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)(sizeof bytes / sizeof *bytes) ? bytes[type] : 1;
}

/* ---- communicators ---- */
API int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}
API int ncclGetUniqueId(UniqueId *id) {
  memset(id, 7, sizeof *id);
  return 0;
}
API const char *ncclGetErrorString(int error) { return error ? "NCCL error" : "no error"; }
API const char *ncclGetLastError(void *communicator UNUSED) { return ""; }
API int ncclCommInitRank(Communicator **out, int size, UniqueId id UNUSED, int rank) {
  return make(out, size, rank, current_device());
}
API int ncclCommInitRankConfig(Communicator **out, int size, UniqueId id UNUSED, int rank, void *how UNUSED) {
  return make(out, size, rank, current_device());
}
API int ncclCommInitRankScalable(Communicator **out, int size, int rank, int ids UNUSED, void *id UNUSED,
                                 void *how UNUSED) {
  return make(out, size, rank, current_device());
}
API int ncclCommInitAll(Communicator **out, int size, const int *devices) {
  for (int i = 0; i < size; i++) make(out + i, size, i, devices ? devices[i] : i);
  return 0;
}
/* Which ranks share the color only they know together: this one knows its place among them (PyTorch passes it as key). */
API int ncclCommSplit(const Communicator *from, int color, int key, Communicator **out, void *how UNUSED) {
  if (color < 0) { /* NCCL_SPLIT_NOCOLOR */
    *out = NULL;
    return 0;
  }
  return make(out, 0, key, from->device);
}
API int ncclCommDestroy(Communicator *communicator) {
  free(communicator);
  return 0;
}
API int ncclCommAbort(Communicator *communicator) { return ncclCommDestroy(communicator); }
API int ncclCommCount(const Communicator *communicator, int *size) {
  *size = communicator->size ? communicator->size : 1;
  return 0;
}
API int ncclCommUserRank(const Communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return 0;
}
API int ncclCommCuDevice(const Communicator *communicator, int *device) {
  *device = communicator->device;
  return 0;
}
API int ncclCommGetAsyncError(Communicator *communicator UNUSED, int *error) {
  *error = 0;
  return 0;
}

/* ---- collectives ---- */
static int copy(void *to, const void *from, size_t bytes, void *stream) {
  if (to == from || !bytes) return 0;
  Item item = {.kind = ITEM_COPY, .what = "a collective", .to = to, .from = from, .bytes = bytes, .rows = 1};
  return submit(stream, item) == SUCCESS ? 0 : INVALID_ARGUMENT;
}

API int ncclAllGather(const void *from, char *to, size_t count, int type, const Communicator *communicator,
                      void *stream) {
  size_t bytes = count * type_bytes(type);
  if (!communicator->size) return copy(to + (size_t)communicator->rank * bytes, from, bytes, stream);
  for (int rank = 0; rank < communicator->size; rank++) copy(to + (size_t)rank * bytes, from, bytes, stream);
  return 0;
}
API int ncclReduceScatter(const char *from, void *to, size_t count, int type, int operation UNUSED,
                          const Communicator *communicator, void *stream) {
  size_t bytes = count * type_bytes(type);
  return copy(to, from + (size_t)communicator->rank * bytes, bytes, stream);
}
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation UNUSED,
                      const Communicator *communicator UNUSED, void *stream) {
  return copy(to, from, count * type_bytes(type), stream);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int operation UNUSED, int root UNUSED,
                   const Communicator *communicator UNUSED, void *stream) {
  return to ? copy(to, from, count * type_bytes(type), stream) : 0;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root UNUSED,
                      const Communicator *communicator UNUSED, void *stream) {
  return copy(to, from, count * type_bytes(type), stream);
}
API int ncclAlltoAll(const char *from, char *to, size_t count, int type, const Communicator *communicator,
                     void *stream) {
  size_t ranks = communicator->size ? (size_t)communicator->size : 1;
  return copy(to, from, ranks * count * type_bytes(type), stream);
}

API int ncclMemAlloc(void **out, size_t bytes) {
  return allocate_device_memory(out, bytes, current_device(), DEVICE_MEMORY) == SUCCESS ? 0 : 1;
}
API int ncclMemFree(void *pointer) { return free_memory(pointer, false) == SUCCESS ? 0 : INVALID_ARGUMENT; }

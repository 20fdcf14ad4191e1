/* A CUDA device that does not compute: what the files of this folder share.
 *
 * Together they stand in for the CUDA driver, the CUDA runtime and the libraries that a CUDA build of PyTorch links to.
 * Device memory is host memory that is committed when somebody writes to it; copies and memsets are real; kernels are
 * counted, never run. What no file here defines gets a generated stub that is counted and returns 0.
 *
 * All sources are compiled with -DCUDART_VERSION=<as cuda_runtime_api.h has it>, e.g. 13000, and
 * -DCUDNN_VERSION=<as cudnnGetVersion gives it>, e.g. 92000. */
#ifndef BRIM_DEVICE_H
#define BRIM_DEVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define MAX_DEVICES 64

/* cudaError_t and CUresult: the codes that both use share their numbers. */
typedef enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  SYMBOL_NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_UNMATCHED = 903,
} Error;

/* ---- settings.c: what brim.device.settings wrote into BRIM_REHEARSAL_DEVICE ---- */
typedef enum { ORDER_AT_ONCE, ORDER_LATE, ORDER_SEEDED } Order;

typedef struct {
  char name[256];
  int count;                   /* devices that this process sees; 0 without settings */
  int installed;               /* devices of the machine: CUDA_VISIBLE_DEVICES does not hide them from NVML */
  int capability;              /* 90 is compute capability 9.0 */
  int multiprocessors;
  size_t memory_bytes;
  size_t context_bytes;        /* what a process takes on a device before its first allocation */
  size_t l2_bytes;
  size_t shared_per_multiprocessor_bytes;
  size_t shared_per_block_bytes; /* with opt-in */
  int threads_per_multiprocessor;
  int blocks_per_multiprocessor;
  int bus_bits;
  size_t copy_limit_bytes;     /* larger copies to a device are left out */
  size_t cudnn_workspace_bytes;
  Order order;
  uint64_t seed;
} Settings;

extern Settings settings;

/* ---- errors.c ---- */
/* Remembers an error for cudaGetLastError, as the runtime does, and returns it. */
Error result(Error error);

/* One recursive mutex for all state. Copies that are made at once run outside of it. */
extern pthread_mutex_t device_mutex;
static inline void lock(void) { pthread_mutex_lock(&device_mutex); }
static inline void unlock(void) { pthread_mutex_unlock(&device_mutex); }

/* ---- devices.c ---- */
int current_device(void);
void use_context(int device); /* a context is made by the first call that needs one */
bool has_context(int device);

/* ---- memory.c ---- */
typedef enum { HOST_ALLOCATED, HOST_REGISTERED, DEVICE_MEMORY, MANAGED_MEMORY, RESERVED_ADDRESSES } RangeKind;

typedef struct {
  uintptr_t begin, end;
  int device;
  RangeKind kind;
  size_t charged_bytes;
} Range;

#define PHYSICAL_PAGE (2 * MIB) /* the driver hands out device memory in such pages */

static inline bool on_device(const Range *range) {
  return range && (range->kind == DEVICE_MEMORY || range->kind == MANAGED_MEMORY || range->kind == RESERVED_ADDRESSES);
}
static inline bool pinned(const Range *range) {
  return range && (range->kind == HOST_ALLOCATED || range->kind == HOST_REGISTERED);
}

/* With the mutex held: */
Range *range_at(const void *pointer);
void add_range(void *begin, size_t bytes, int device, RangeKind kind, size_t charged_bytes);
void remove_range(Range *range);
size_t used_bytes(int device); /* as nvidia-smi counts: the context included */
size_t peak_used_bytes(int device);
void reset_peak(int device);
Error charge(int device, size_t bytes);
void uncharge(int device, size_t bytes);

/* Without: */
void *reserve_addresses(size_t bytes, int protection); /* on a 2 MiB boundary, nothing committed; NULL: none left */
Error allocate_device_memory(void **out, size_t bytes, int device, RangeKind kind);
Error free_memory(void *pointer, bool host);
bool is_mapped(const void *begin, size_t bytes); /* are there pages at all */
void poison(void *begin, size_t bytes); /* 0xFF bytes: NaN as a float, -1 as an integer */

/* ---- copies.c ---- */
void copy_bytes(void *to, const void *from, size_t bytes);
void set_bytes(void *to, int value, size_t bytes);
API int64_t brim_device_next_count(int64_t count); /* how many results a kernel finds, once; -1: not known */

/* ---- queue.c: what a stream's work is, and when it happens (the head of queue.c says how) ---- */
typedef enum { ITEM_COPY, ITEM_SET, ITEM_SET_WORDS, ITEM_RECORD, ITEM_WAIT, ITEM_CALL, ITEM_FREE, ITEM_KERNEL, ITEM_COMPUTE } ItemKind;

typedef struct Lane Lane;
typedef struct Graph Graph;

/* A position in every lane: clock[i] is the last serial of lane i that comes before. */
#define MAX_LANES 256
typedef uint64_t Clock[MAX_LANES];

typedef struct {
  unsigned flags;
  bool recorded;
  bool destroyed;
  int pending;      /* records that have not happened */
  int queries;      /* since the record */
  double time_ms;   /* when the record was carried out */
  Lane *lane;       /* it is done when this lane has done */
  uint64_t serial;  /* that many items */
  Graph *capture;   /* recorded while this graph was captured */
  uint64_t *clock;
} Event;

typedef struct Item {
  ItemKind kind;
  const char *what; /* for reports of hazards */
  void *to;         /* ITEM_KERNEL: the kernel */
  const void *from;
  size_t bytes;     /* of one row */
  size_t rows, to_pitch, from_pitch;
  unsigned value;
  bool staged;      /* `from` is a private copy of pageable memory */
  Event *event;
  Lane *awaited;
  uint64_t awaited_serial;
  void (*call)(void *);
  void *call_data;
  /* filled in by the queue */
  uint64_t serial;
  struct Item *next;
} Item;

typedef struct {
  int priority, device;
  unsigned flags;
  Lane *lane;       /* from its first item on */
  Graph *capture;   /* being captured into */
} Stream;

Stream *stream_of(void *handle); /* NULL, cudaStreamLegacy, cudaStreamPerThread or what cudaStreamCreate gave */
bool is_stream(void *handle);    /* made by cudaStreamCreate */
Error submit(void *stream, Item item);
void destroy_event(Event *event);
void record_event(Event *event, void *stream);
void wait_for_event(void *stream, const Event *event);
bool event_is_done(Event *event);
bool stream_is_done(void *stream);
void finish_event(Event *event); /* finish: the host waits */
void finish_stream(void *stream);
void finish_device(int device);
void finish_range(const void *begin, size_t bytes, const char *what); /* that memory goes: what is pending there is a hazard */
void retire_lane(Lane *lane);

void carry_out_copy(const Item *item); /* copies.c */
void carry_out_set(const Item *item);

/* ---- graphs.c ---- */
void join_capture(Graph *graph, void *stream);
void capture_item(Graph *graph, Item item);

/* ---- launches.c ---- */
typedef struct { unsigned x, y, z; } Dim3;
Error launch(const void *kernel, Dim3 grid, Dim3 block, size_t shared_bytes, void *stream);
void count_launch(const void *kernel);
const void *named_kernel(const char *name); /* a handle for a kernel of a module that was loaded at run time */
void count_host_launch(void); /* what the host submits: a kernel or a graph */
void forget_launches(void);

/* ---- counters.c ---- */
typedef struct Counter {
  const char *name;
  uint64_t calls;
  struct Counter *next;
} Counter;

void count(Counter *counter); /* called by each generated stub */
void hazard(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif

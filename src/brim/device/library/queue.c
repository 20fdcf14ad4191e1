/* Streams as queues: when an item happens, what comes before it, and what is not ordered though it should be.
 *
 * With ORDER_AT_ONCE each item is carried out when it is submitted.
 *
 * Otherwise it rests in its stream's lane until something waits for it: the host (a synchronisation, or a query that was
 * repeated), cudaFree, or a computation that comes after it in stream order (brim_device_begin_kernel). That is as late
 * as CUDA allows (ORDER_LATE); with ORDER_SEEDED some happen earlier, at moments that the seed settles. Nothing depends on
 * threads or time, so a run repeats exactly. From submission until it happens the target of a copy holds poison.
 *
 * Lateness alone does not find everything: what Python computes in a kernel's place is computed when the kernel is
 * launched, earlier than a GPU would, so a copy that overwrites its input too soon would never be seen. Therefore each
 * lane, each event and the host carry vector clocks, and every access to memory (by a copy, a memset, or a kernel whose
 * tensors Python names) is compared with the accesses of other lanes since the host last waited. Two that overlap, one of
 * which writes, and neither of which is ordered before the other, are a hazard, whatever order was taken this time. */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A poll that is repeated so often ends: loops over cudaEventQuery are waits, too. */
#define POLLS 32

struct Lane {
  size_t index;
  int device;
  bool legacy, blocking; /* the legacy stream and blocking streams of a device are ordered among each other */
  Item *head, **tail;
  uint64_t submitted, done;
  Clock clock; /* what the next item comes after */
  bool retired, calling;
  pthread_t caller;
};

static Lane *lanes[MAX_LANES];
static size_t lane_count;
static Clock host;
static pthread_cond_t call_ended = PTHREAD_COND_INITIALIZER;

static void merge(Clock into, const Clock other) {
  for (size_t i = 0; i < lane_count; i++)
    if (other[i] > into[i]) into[i] = other[i];
}

/* ---- lanes ---- */
static Stream legacy_streams[MAX_DEVICES], thread_streams[MAX_DEVICES];

bool is_stream(void *handle) { return (uintptr_t)handle > 2; }

Stream *stream_of(void *handle) {
  if (is_stream(handle)) return handle;
  int device = current_device();
  Stream *stream = (uintptr_t)handle == 2 ? &thread_streams[device] : &legacy_streams[device];
  stream->device = device;
  return stream;
}

static Lane *lane_of(Stream *stream) {
  if (stream->lane) return stream->lane;
  Lane *lane = NULL;
  for (size_t i = 0; i < lane_count && !lane; i++)
    if (lanes[i]->retired) lane = lanes[i];
  if (!lane) {
    if (lane_count == MAX_LANES) {
      fprintf(stderr, "brim: more than %d streams at once have work: this build of the device has no more\n", MAX_LANES);
      abort();
    }
    lane = calloc(1, sizeof *lane);
    lane->index = lane_count;
    lane->tail = &lane->head;
    lanes[lane_count++] = lane;
  }
  lane->retired = false;
  lane->device = stream->device;
  lane->legacy = stream == &legacy_streams[stream->device];
  lane->blocking = !(stream->flags & 1) && !lane->legacy;
  return stream->lane = lane;
}

/* ---- accesses and hazards ---- */
typedef struct {
  uintptr_t begin, end;
  bool writes;
  size_t lane;
  uint64_t serial;
  char what[48];
} Access;

static Access *accesses;
static size_t access_count, access_capacity;

static void note_access(const Lane *lane, const void *memory, size_t bytes, bool writes, const char *what) {
  uintptr_t begin = (uintptr_t)memory, end = begin + bytes;
  Access *same = NULL;
  for (size_t i = 0; i < access_count; i++) {
    Access *other = &accesses[i];
    if (other->lane == lane->index) {
      if (other->begin == begin && other->end == end && other->writes == writes) same = other;
      continue;
    }
    if (other->end <= begin || end <= other->begin || !(writes || other->writes)) continue;
    if (lane->clock[other->lane] >= other->serial) continue;
    hazard("%s on stream %zu %s %zu bytes at %p that %s on stream %zu %s, and is not ordered after it", what, lane->index,
           writes ? "writes" : "reads", bytes, memory, other->what, other->lane, other->writes ? "writes" : "reads");
  }
  if (!same) {
    if (access_count == access_capacity) {
      access_capacity = 2 * access_capacity + 256;
      accesses = realloc(accesses, access_capacity * sizeof *accesses);
    }
    same = &accesses[access_count++];
    *same = (Access){.begin = begin, .end = end, .writes = writes, .lane = lane->index};
  }
  same->serial = lane->submitted; /* later ones of a lane stand for earlier ones */
  snprintf(same->what, sizeof same->what, "%s", what);
}

/* What the host has waited for comes before everything that is still to be submitted. */
static void host_waited(const Lane *lane) {
  merge(host, lane->clock);
  size_t kept = 0;
  for (size_t i = 0; i < access_count; i++)
    if (accesses[i].serial > host[accesses[i].lane]) accesses[kept++] = accesses[i];
  access_count = kept;
}

static bool touches(const Item *item, const void *memory, size_t bytes) {
  if (item->kind != ITEM_COPY && item->kind != ITEM_SET && item->kind != ITEM_SET_WORDS) return false;
  const char *begin = memory, *end = begin + bytes;
  size_t last = item->rows - 1;
  const char *to = item->to, *from = item->from;
  bool target = to < end && begin < to + last * item->to_pitch + item->bytes;
  bool source = from && !item->staged && from < end && begin < from + last * item->from_pitch + item->bytes;
  return target || source;
}

/* ---- carrying out ---- */
static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void free_event(Event *event) {
  free(event->clock);
  free(event);
}

static void event_happened(Event *event) {
  event->time_ms = now_ms();
  if (!--event->pending && event->destroyed) free_event(event);
}

void destroy_event(Event *event) { /* its pending records still need it */
  lock();
  event->destroyed = true;
  if (!event->pending) free_event(event);
  unlock();
}

static void carry_out(Item *item) {
  switch (item->kind) {
    case ITEM_COPY: carry_out_copy(item); break;
    case ITEM_SET: case ITEM_SET_WORDS: carry_out_set(item); break;
    case ITEM_RECORD: event_happened(item->event); break;
    case ITEM_CALL: item->call(item->call_data); break;
    case ITEM_FREE: free_memory(item->to, false); break;
    case ITEM_KERNEL: count_launch(item->to); break;
    case ITEM_WAIT: case ITEM_COMPUTE: break;
  }
}

/* A callback may wait for threads that call into CUDA, so the mutex is given away meanwhile. */
static void carry_out_call(Lane *lane, Item *item) {
  lane->calling = true;
  lane->caller = pthread_self();
  unlock();
  item->call(item->call_data);
  lock();
  lane->calling = false;
  pthread_cond_broadcast(&call_ended);
}

static void run_to(Lane *lane, uint64_t serial) {
  while (lane->done < serial) {
    if (lane->calling) {
      if (pthread_equal(lane->caller, pthread_self())) return; /* a callback that waits for its own stream */
      pthread_cond_wait(&call_ended, &device_mutex);
      continue;
    }
    Item *item = lane->head;
    if (item->kind == ITEM_WAIT) run_to(item->awaited, item->awaited_serial);
    if (lane->head != item) continue; /* done by another thread during a callback */
    lane->head = item->next;
    if (!lane->head) lane->tail = &lane->head;
    if (item->kind == ITEM_CALL)
      carry_out_call(lane, item);
    else
      carry_out(item);
    lane->done = item->serial;
    if (item->staged) free((void *)item->from);
    free(item);
  }
}

/* ---- submitting ---- */
static Item *push(Lane *lane, Item item) {
  Item *pushed = malloc(sizeof *pushed);
  *pushed = item;
  pushed->next = NULL;
  pushed->serial = ++lane->submitted;
  lane->clock[lane->index] = pushed->serial;
  *lane->tail = pushed;
  lane->tail = &pushed->next;
  return pushed;
}

static void push_wait(Lane *lane, Lane *awaited, uint64_t serial) {
  if (awaited->done < serial)
    push(lane, (Item){.kind = ITEM_WAIT, .what = "a wait", .awaited = awaited, .awaited_serial = serial});
}

/* The order that CUDA gives without being asked: what the host waited for, and the legacy stream among blocking ones. */
static void order_implicitly(Lane *lane) {
  merge(lane->clock, host);
  if (!lane->legacy && !lane->blocking) return;
  for (size_t i = 0; i < lane_count; i++) {
    Lane *other = lanes[i];
    if (other == lane || other->device != lane->device || !(lane->legacy ? other->blocking : other->legacy)) continue;
    push_wait(lane, other, other->submitted);
    merge(lane->clock, other->clock);
  }
}

/* Whatever is ordered before a write to that memory happens now, or poison would be what it finds. */
static void finish_earlier(Lane *lane, const void *memory, size_t bytes) {
  for (size_t i = 0; i < lane_count; i++) {
    uint64_t last = 0;
    for (Item *item = lanes[i]->head; item && item->serial <= lane->clock[i]; item = item->next)
      if (touches(item, memory, bytes)) last = item->serial;
    if (last) run_to(lanes[i], last);
  }
}

static void note_item(Lane *lane, const Item *item) {
  for (size_t row = 0; row < item->rows; row++) {
    if (item->from && !item->staged)
      note_access(lane, (const char *)item->from + row * item->from_pitch, item->bytes, false, item->what);
    note_access(lane, (char *)item->to + row * item->to_pitch, item->bytes, true, item->what);
  }
}

static uint64_t next_random(void) { /* xorshift64 */
  static uint64_t state;
  if (!state) state = settings.seed * 2 + 0x9E3779B97F4A7C15u;
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

static void let_one_happen(void) {
  uint64_t random = next_random();
  if (random & 1) return;
  Lane *lane = lanes[(random >> 8) % lane_count];
  if (lane->head) run_to(lane, lane->head->serial);
}

Error submit(void *handle, Item item) {
  Stream *stream = stream_of(handle);
  if (stream->capture) {
    lock();
    capture_item(stream->capture, item);
    unlock();
    return SUCCESS;
  }
  if (settings.order == ORDER_AT_ONCE) {
    carry_out(&item);
    return SUCCESS;
  }
  lock();
  Lane *lane = lane_of(stream);
  order_implicitly(lane);
  bool moves = item.kind == ITEM_COPY || item.kind == ITEM_SET || item.kind == ITEM_SET_WORDS;
  if (moves) {
    size_t span = (item.rows - 1) * item.to_pitch + item.bytes;
    finish_earlier(lane, item.to, span);
  }
  Item *pushed = push(lane, item);
  if (moves) {
    note_item(lane, pushed);
    for (size_t row = 0; row < item.rows; row++) {
      char *target = (char *)item.to + row * item.to_pitch;
      if (is_mapped(target, item.bytes)) poison(target, item.bytes);
    }
  }
  if (settings.order == ORDER_SEEDED) let_one_happen();
  unlock();
  return SUCCESS;
}

/* ---- events ---- */
void record_event(Event *event, void *handle) {
  Stream *stream = stream_of(handle);
  event->recorded = true;
  event->queries = 0;
  event->capture = stream->capture;
  if (stream->capture || settings.order == ORDER_AT_ONCE) {
    event->time_ms = now_ms();
    return;
  }
  lock();
  Lane *lane = lane_of(stream);
  order_implicitly(lane);
  event->lane = lane;
  event->pending++;
  event->serial = push(lane, (Item){.kind = ITEM_RECORD, .what = "an event", .event = event})->serial;
  if (!event->clock) event->clock = malloc(sizeof(Clock));
  memcpy(event->clock, lane->clock, sizeof(Clock));
  unlock();
}

void wait_for_event(void *handle, const Event *event) {
  if (!event->lane || !event->recorded) return;
  lock();
  Lane *lane = lane_of(stream_of(handle));
  push_wait(lane, event->lane, event->serial);
  merge(lane->clock, event->clock);
  unlock();
}

static void host_saw(const Event *event) {
  Lane seen = {0};
  memcpy(seen.clock, event->clock, sizeof(Clock));
  host_waited(&seen);
}

bool event_is_done(Event *event) {
  if (!event->recorded || !event->lane) return true;
  lock();
  if (event->lane->done < event->serial && ++event->queries >= POLLS) run_to(event->lane, event->serial);
  bool done = event->lane->done >= event->serial;
  if (done) host_saw(event);
  unlock();
  return done;
}

void finish_event(Event *event) {
  if (!event->recorded || !event->lane) return;
  lock();
  run_to(event->lane, event->serial);
  host_saw(event);
  unlock();
}

/* ---- waiting ---- */
static void finish_lane(Lane *lane) {
  run_to(lane, lane->submitted);
  host_waited(lane);
}

void finish_stream(void *handle) {
  if (settings.order == ORDER_AT_ONCE) return;
  lock();
  Lane *lane = lane_of(stream_of(handle));
  order_implicitly(lane);
  finish_lane(lane);
  unlock();
}

bool stream_is_done(void *handle) {
  if (settings.order == ORDER_AT_ONCE) return true;
  static int queries;
  lock();
  Lane *lane = lane_of(stream_of(handle));
  bool done = lane->done >= lane->submitted;
  if (!done && ++queries % POLLS == 0) {
    finish_lane(lane);
    done = true;
  } else if (done) {
    host_waited(lane);
  }
  unlock();
  return done;
}

void finish_device(int device) {
  if (settings.order == ORDER_AT_ONCE) return;
  lock();
  for (size_t i = 0; i < lane_count; i++)
    if (lanes[i]->device == device) finish_lane(lanes[i]);
  unlock();
}

void finish_range(const void *begin, size_t bytes, const char *what) {
  if (settings.order == ORDER_AT_ONCE) return;
  lock();
  for (size_t i = 0; i < lane_count; i++) {
    uint64_t last = 0;
    for (Item *item = lanes[i]->head; item; item = item->next) {
      if (!touches(item, begin, bytes)) continue;
      last = item->serial;
      hazard("%s of %zu bytes at %p while %s on stream %zu was still to use them", what, bytes, begin, item->what, i);
    }
    if (last) run_to(lanes[i], last);
  }
  unlock();
}

void retire_lane(Lane *lane) { /* a destroyed stream's work is still done */
  lock();
  run_to(lane, lane->submitted);
  lane->retired = true;
  unlock();
}

/* ---- for what Python computes in a kernel's place ---- */

/* void brim_device_begin_kernel(void *stream)
 *
 * To be called before an operator is computed on the host in place of the kernels that PyTorch launched on `stream` (a
 * cudaStream_t; NULL: the current device's default stream). Everything that the stream's next kernel is ordered after
 * happens: earlier items of that stream, and of others up to the events that it waits for. Copies that it is not ordered
 * after stay pending: their targets still hold poison. */
API void brim_device_begin_kernel(void *handle) {
  if (settings.order == ORDER_AT_ONCE) return;
  Stream *stream = stream_of(handle);
  if (stream->capture) return;
  lock();
  Lane *lane = lane_of(stream);
  order_implicitly(lane);
  run_to(lane, lane->submitted);
  lane->done = lane->clock[lane->index] = ++lane->submitted;
  unlock();
}

/* void brim_device_kernel_access(void *stream, const void *memory, size_t bytes, int writes, const char *name)
 *
 * Between brim_device_begin_kernel and the computation, once for each piece of memory that the operator `name` reads or
 * writes: reports a hazard where work of another stream touches it and is not ordered before, now or later. */
API void brim_device_kernel_access(void *handle, const void *memory, size_t bytes, int writes, const char *name) {
  if (settings.order == ORDER_AT_ONCE || !bytes) return;
  Stream *stream = stream_of(handle);
  if (stream->capture) return;
  lock();
  note_access(lane_of(stream), memory, bytes, writes, name);
  unlock();
}

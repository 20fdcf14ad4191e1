/* Streams, events and host functions: the runtime's API over the queues. */
#include "device.h"

#include <stdlib.h>

/* ---- streams ---- */
static Error make_stream(Stream **out, unsigned flags, int priority) {
  if (!settings.count) return result(NO_DEVICE);
  use_context(current_device());
  *out = calloc(1, sizeof **out);
  **out = (Stream){.priority = priority, .device = current_device(), .flags = flags};
  return SUCCESS;
}
API Error cudaStreamCreate(Stream **out) { return make_stream(out, 0, 0); }
API Error cudaStreamCreateWithFlags(Stream **out, unsigned flags) { return make_stream(out, flags, 0); }
API Error cudaStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
  return make_stream(out, flags, priority);
}
API Error cudaStreamDestroy(void *handle) {
  if (!is_stream(handle)) return result(INVALID_HANDLE);
  Stream *stream = handle;
  if (stream->lane) retire_lane(stream->lane);
  free(stream);
  return SUCCESS;
}
API Error cudaStreamGetPriority(void *stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return SUCCESS;
}
API Error cudaStreamGetFlags(void *stream, unsigned *flags) {
  *flags = stream_of(stream)->flags;
  return SUCCESS;
}
API Error cudaStreamGetDevice(void *stream, int *device) {
  *device = stream_of(stream)->device;
  return SUCCESS;
}
API Error cudaStreamGetId(void *stream, unsigned long long *id) {
  *id = (uintptr_t)stream;
  return SUCCESS;
}
API Error cudaStreamQuery(void *stream) {
  if (stream_of(stream)->capture) return result(CAPTURE_UNSUPPORTED);
  return result(stream_is_done(stream) ? SUCCESS : NOT_READY);
}
API Error cudaStreamSynchronize(void *stream) {
  if (stream_of(stream)->capture) return result(CAPTURE_UNSUPPORTED);
  finish_stream(stream);
  return SUCCESS;
}

/* ---- host functions ---- */
API Error cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
  return submit(stream, (Item){.kind = ITEM_CALL, .what = "a host function", .call = call, .call_data = data});
}

typedef struct {
  void *stream;
  void (*call)(void *, Error, void *);
  void *data;
} Callback;

static void call_back(void *given) {
  Callback *callback = given;
  callback->call(callback->stream, SUCCESS, callback->data);
  free(callback);
}
API Error cudaStreamAddCallback(void *stream, void (*call)(void *, Error, void *), void *data, unsigned flags UNUSED) {
  if (stream_of(stream)->capture) return result(CAPTURE_UNSUPPORTED);
  Callback *callback = malloc(sizeof *callback);
  *callback = (Callback){stream, call, data};
  return cudaLaunchHostFunc(stream, call_back, callback);
}

/* ---- events ---- */
#define WITHOUT_TIMING 2

API Error cudaEventCreateWithFlags(Event **out, unsigned flags) {
  if (!settings.count) return result(NO_DEVICE);
  use_context(current_device());
  *out = calloc(1, sizeof **out);
  (*out)->flags = flags;
  return SUCCESS;
}
API Error cudaEventCreate(Event **out) { return cudaEventCreateWithFlags(out, 0); }
API Error cudaEventDestroy(Event *event) {
  if (!event) return result(INVALID_HANDLE);
  destroy_event(event);
  return SUCCESS;
}
API Error cudaEventRecord(Event *event, void *stream) {
  if (!event) return result(INVALID_HANDLE);
  record_event(event, stream);
  return SUCCESS;
}
API Error cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags UNUSED) {
  return cudaEventRecord(event, stream);
}
API Error cudaStreamWaitEvent(void *stream, Event *event, unsigned flags UNUSED) {
  if (!event) return result(INVALID_HANDLE);
  if (event->capture) /* the stream joins the capture that the event was recorded in */
    join_capture(event->capture, stream);
  else
    wait_for_event(stream, event);
  return SUCCESS;
}
API Error cudaEventQuery(Event *event) {
  if (!event) return result(INVALID_HANDLE);
  if (event->capture) return result(CAPTURE_UNSUPPORTED);
  return result(event_is_done(event) ? SUCCESS : NOT_READY);
}
API Error cudaEventSynchronize(Event *event) {
  if (!event) return result(INVALID_HANDLE);
  if (event->capture) return result(CAPTURE_UNSUPPORTED);
  finish_event(event);
  return SUCCESS;
}

/* The time between two records on the host. It says nothing of a GPU, but it is never negative in order. */
API Error cudaEventElapsedTime(float *ms, Event *start, Event *end) {
  if (!start || !end || !start->recorded || !end->recorded) return result(INVALID_HANDLE);
  if ((start->flags | end->flags) & WITHOUT_TIMING) return result(INVALID_HANDLE);
  if (start->pending || end->pending) return result(NOT_READY);
  *ms = (float)(end->time_ms - start->time_ms);
  return SUCCESS;
}
API Error cudaEventElapsedTime_v2(float *ms, Event *start, Event *end) { return cudaEventElapsedTime(ms, start, end); }
API Error cudaIpcGetEventHandle(void) { return result(NOT_SUPPORTED); }
API Error cudaIpcOpenEventHandle(void) { return result(NOT_SUPPORTED); }

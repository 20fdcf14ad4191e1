/* CUDA graphs: a capture keeps a stream's items, a launch submits them again. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

struct Graph {
  unsigned long long id;
  Item *items;
  size_t count, capacity;
  Stream **streams; /* captured into this graph: the one that began, and those that joined */
  size_t stream_count;
};

static unsigned long long last_id;

void capture_item(Graph *graph, Item item) {
  if (graph->count == graph->capacity) {
    graph->capacity = 2 * graph->capacity + 64;
    graph->items = realloc(graph->items, graph->capacity * sizeof *graph->items);
  }
  graph->items[graph->count++] = item;
}

void join_capture(Graph *graph, void *handle) {
  Stream *stream = stream_of(handle);
  if (stream->capture) return;
  lock();
  graph->streams = realloc(graph->streams, (graph->stream_count + 1) * sizeof *graph->streams);
  graph->streams[graph->stream_count++] = stream;
  stream->capture = graph;
  unlock();
}

API Error cudaStreamBeginCapture(void *handle, int mode UNUSED) {
  if (!is_stream(handle)) return result(CAPTURE_UNSUPPORTED); /* the legacy stream cannot be captured */
  Graph *graph = calloc(1, sizeof *graph);
  graph->id = ++last_id;
  join_capture(graph, handle);
  return SUCCESS;
}
API Error cudaStreamEndCapture(void *handle, Graph **out) {
  *out = NULL;
  Stream *stream = stream_of(handle);
  Graph *graph = stream->capture;
  if (!graph || graph->streams[0] != stream) return result(CAPTURE_UNMATCHED);
  lock();
  for (size_t i = 0; i < graph->stream_count; i++) graph->streams[i]->capture = NULL;
  graph->stream_count = 0;
  unlock();
  *out = graph;
  return SUCCESS;
}
API Error cudaStreamIsCapturing(void *handle, int *status) {
  *status = stream_of(handle)->capture != NULL;
  return SUCCESS;
}

static Error capture_info(void *handle, int *status, unsigned long long *id, Graph **graph) {
  Graph *captured = stream_of(handle)->capture;
  *status = captured != NULL;
  if (id) *id = captured ? captured->id : 0;
  if (graph) *graph = captured;
  return SUCCESS;
}
#if CUDART_VERSION >= 13000
API Error cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, Graph **graph,
                                   const void **dependencies, const void **edges, size_t *count) {
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return capture_info(stream, status, id, graph);
}
#else
API Error cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  return capture_info(stream, status, id, NULL);
}
API Error cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, Graph **graph,
                                      const void **dependencies, size_t *count) {
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return capture_info(stream, status, id, graph);
}
API Error cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, Graph **graph,
                                      const void **dependencies, const void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}
#endif

API Error cudaGraphGetNodes(const Graph *graph, void **nodes, size_t *count) {
  for (size_t i = 0; nodes && i < *count && i < graph->count; i++) nodes[i] = &graph->items[i];
  *count = graph->count;
  return SUCCESS;
}
API Error cudaGraphCreate(Graph **out, unsigned flags UNUSED) {
  *out = calloc(1, sizeof **out);
  return SUCCESS;
}
API Error cudaGraphDestroy(Graph *graph) {
  free(graph->items);
  free(graph->streams);
  free(graph);
  return SUCCESS;
}
API Error cudaGraphInstantiate(Graph **out, const Graph *graph, unsigned long long flags UNUSED) {
  *out = calloc(1, sizeof **out);
  for (size_t i = 0; i < graph->count; i++) capture_item(*out, graph->items[i]);
  return SUCCESS;
}
API Error cudaGraphInstantiateWithFlags(Graph **out, const Graph *graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}
API Error cudaGraphExecDestroy(Graph *graph) { return cudaGraphDestroy(graph); }
API Error cudaGraphUpload(Graph *graph UNUSED, void *stream UNUSED) { return SUCCESS; }
API Error cudaGraphLaunch(const Graph *graph, void *stream) {
  count_host_launch();
  for (size_t i = 0; i < graph->count; i++) {
    const Item *item = &graph->items[i];
    if (item->kind == ITEM_COMPUTE) /* at once, as an operator outside of a graph */
      ((void (*)(void *, void *))item->to)(item->call_data, stream);
    else
      submit(stream, *item);
  }
  return SUCCESS;
}

/* int brim_device_capture(void *stream, void (*compute)(void *data, void *stream), void *data)
 *
 * While `stream` is captured: each launch of the graph calls `compute`, in the place of kernels that were captured before.
 * It must call brim_device_begin_kernel itself. Returns 0 where nothing is captured. */
API int brim_device_capture(void *stream, void (*compute)(void *, void *), void *data) {
  Graph *graph = stream_of(stream)->capture;
  if (graph && compute) capture_item(graph, (Item){.kind = ITEM_COMPUTE, .what = "an operator", .to = (void *)compute, .call_data = data});
  return graph != NULL;
}

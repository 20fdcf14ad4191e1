/* cuDNN: versions, descriptors that remember what callers read back, and sizes.
 *
 * How much workspace its plans take is not public and changes with each version: it is the setting cudnn_workspace_bytes
 * (0 unless somebody knows better). The weights of recurrent layers are laid out as PyTorch reads them. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define DIMENSIONS 8

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
API int cudnnGetProperty(int property, int *value) {
  size_t version = cudnnGetVersion();
  size_t major = version >= 90000 ? 10000 : 1000; /* 9.20.0 is 92000, 8.9.2 was 8902 */
  *value = (int)(property == 0 ? version / major : property == 1 ? version % major / 100 : version % 100);
  return 0;
}
API const char *cudnnGetErrorString(int status) { return status ? "cuDNN error" : "success"; }
API void cudnnGetLastErrorString(char *out, size_t length) {
  if (length) *out = 0;
}

static int make(void **out, size_t bytes) {
  *out = calloc(1, bytes);
  return *out ? 0 : 2000;
}
static int destroy(void *descriptor) {
  free(descriptor);
  return 0;
}
API int cudnnCreate(void **handle) { return make(handle, 64); }
API int cudnnDestroy(void *handle) { return destroy(handle); }

/* ---- tensors and filters ---- */
typedef struct {
  int type, format, count, sizes[DIMENSIONS], strides[DIMENSIONS];
} Tensor;

API int cudnnCreateTensorDescriptor(void **out) { return make(out, sizeof(Tensor)); }
API int cudnnCreateFilterDescriptor(void **out) { return make(out, sizeof(Tensor)); }
API int cudnnDestroyTensorDescriptor(void *descriptor) { return destroy(descriptor); }
API int cudnnDestroyFilterDescriptor(void *descriptor) { return destroy(descriptor); }

static void copy_ints(int *to, const int *from, int count) { memcpy(to, from, (size_t)count * sizeof *to); }
static int at_most(int count, int limit) { return count < limit ? count : limit; }

API int cudnnSetTensorNdDescriptor(Tensor *tensor, int type, int count, const int *sizes, const int *strides) {
  *tensor = (Tensor){.type = type, .count = at_most(count, DIMENSIONS)};
  copy_ints(tensor->sizes, sizes, tensor->count);
  copy_ints(tensor->strides, strides, tensor->count);
  return 0;
}
API int cudnnGetTensorNdDescriptor(const Tensor *tensor, int wanted, int *type, int *count, int *sizes, int *strides) {
  *type = tensor->type;
  *count = tensor->count;
  copy_ints(sizes, tensor->sizes, at_most(wanted, tensor->count));
  copy_ints(strides, tensor->strides, at_most(wanted, tensor->count));
  return 0;
}
API int cudnnSetFilterNdDescriptor(Tensor *filter, int type, int format, int count, const int *sizes) {
  *filter = (Tensor){.type = type, .format = format, .count = at_most(count, DIMENSIONS)};
  copy_ints(filter->sizes, sizes, filter->count);
  return 0;
}
API int cudnnGetFilterNdDescriptor(const Tensor *filter, int wanted, int *type, int *format, int *count, int *sizes) {
  *type = filter->type;
  *format = filter->format;
  *count = filter->count;
  copy_ints(sizes, filter->sizes, at_most(wanted, filter->count));
  return 0;
}

/* ---- recurrent layers ---- */
enum { RELU, TANH, LSTM, GRU };
enum { NO_BIAS, INPUT_BIAS, DOUBLE_BIAS, RECURRENT_BIAS };

typedef struct {
  int cell, bias, directions, skip_input, type, input, hidden, projected, layers;
} Rnn;
typedef struct {
  int type, steps, batch, features;
} RnnData;

API int cudnnCreateRNNDescriptor(void **out) { return make(out, sizeof(Rnn)); }
API int cudnnDestroyRNNDescriptor(void *descriptor) { return destroy(descriptor); }
API int cudnnCreateRNNDataDescriptor(void **out) { return make(out, sizeof(RnnData)); }
API int cudnnDestroyRNNDataDescriptor(void *descriptor) { return destroy(descriptor); }

API int cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm UNUSED, int cell, int bias, int bidirectional, int input_mode,
                                 int type, int math_type UNUSED, int tensor_cores UNUSED, int32_t input, int32_t hidden,
                                 int32_t projected, int32_t layers, void *dropout UNUSED, uint32_t flags UNUSED) {
  *rnn = (Rnn){cell, bias, bidirectional ? 2 : 1, input_mode == 1, type, input, hidden, projected, layers};
  return 0;
}
API int cudnnSetRNNDataDescriptor(RnnData *data, int type, int layout UNUSED, int steps, int batch, int features,
                                  const int *lengths UNUSED, void *padding UNUSED) {
  *data = (RnnData){type, steps, batch, features};
  return 0;
}

static size_t type_bytes(int type) {
  switch (type) {
    case 1: return 8;         /* double */
    case 2: case 9: return 2; /* half, bfloat16 */
    case 3: return 1;         /* int8 */
    default: return 4;
  }
}
static int gates(const Rnn *rnn) { return rnn->cell == LSTM ? 4 : rnn->cell == GRU ? 3 : 1; }
/* LSTMs may project their hidden state: then fewer numbers recur. */
static bool projects(const Rnn *rnn) { return rnn->projected && rnn->projected != rnn->hidden; }
static int recurring(const Rnn *rnn) { return projects(rnn) ? rnn->projected : rnn->hidden; }
static int layer_input(const Rnn *rnn, int pseudo_layer) {
  if (pseudo_layer < rnn->directions) return rnn->skip_input ? 0 : rnn->input;
  return rnn->directions * recurring(rnn);
}

/* Matrices of a pseudo-layer (a layer and a direction), in elements: gates of the input, gates that recur, projection. */
static size_t matrices(const Rnn *rnn, int pseudo_layer) {
  size_t one = (size_t)rnn->hidden * (size_t)(layer_input(rnn, pseudo_layer) + recurring(rnn));
  return (size_t)gates(rnn) * one + (projects(rnn) ? (size_t)rnn->hidden * (size_t)rnn->projected : 0);
}
static size_t biases(const Rnn *rnn) { /* of a pseudo-layer */
  size_t vectors = rnn->bias == NO_BIAS ? 0 : rnn->bias == DOUBLE_BIAS ? 2 : 1;
  return vectors * (size_t)gates(rnn) * (size_t)rnn->hidden;
}
static size_t all_matrices(const Rnn *rnn, int pseudo_layers) {
  size_t elements = 0;
  for (int i = 0; i < pseudo_layers; i++) elements += matrices(rnn, i);
  return elements;
}

API int cudnnGetRNNWeightSpaceSize(void *handle UNUSED, const Rnn *rnn, size_t *bytes) {
  int pseudo_layers = rnn->layers * rnn->directions;
  *bytes = (all_matrices(rnn, pseudo_layers) + (size_t)pseudo_layers * biases(rnn)) * type_bytes(rnn->type);
  return 0;
}

static void describe(Tensor *tensor, int type, int rows, int columns) {
  *tensor = (Tensor){.type = type, .count = 3, .sizes = {1, rows, columns}, .strides = {rows * columns, columns, 1}};
}

/* All matrices lie before all biases. linear is the number of a gate: first of those that read the input, then of those
 * that recur; behind them the projection. */
static size_t matrix_of(const Rnn *rnn, int pseudo_layer, int linear, int *rows, int *columns) {
  size_t number = (size_t)gates(rnn), hidden = (size_t)rnn->hidden, gate = (size_t)linear;
  size_t input = (size_t)layer_input(rnn, pseudo_layer), recurs = (size_t)recurring(rnn);
  size_t at = all_matrices(rnn, pseudo_layer);
  bool of_input = gate < number, projection = gate >= 2 * number;
  *rows = projection ? (int)recurs : (int)hidden;
  *columns = of_input ? (int)input : projection ? (int)hidden : (int)recurs;
  if (of_input) return at + gate * hidden * input;
  return at + number * hidden * input + (projection ? number : gate - number) * hidden * recurs;
}

static bool bias_of(const Rnn *rnn, int pseudo_layer, int linear, size_t *at) {
  int number = gates(rnn);
  bool of_input = linear < number, recurrent = linear >= number && linear < 2 * number;
  int vector = rnn->bias == DOUBLE_BIAS ? linear : linear % number;
  *at = all_matrices(rnn, rnn->layers * rnn->directions) + (size_t)pseudo_layer * biases(rnn) +
        (size_t)vector * (size_t)rnn->hidden;
  return (of_input && (rnn->bias == INPUT_BIAS || rnn->bias == DOUBLE_BIAS)) ||
         (recurrent && (rnn->bias == RECURRENT_BIAS || rnn->bias == DOUBLE_BIAS));
}

/* Callers ask for a matrix, for a bias (the other pair is NULL), or for both. */
API int cudnnGetRNNWeightParams(void *handle UNUSED, const Rnn *rnn, int32_t pseudo_layer, size_t space_bytes UNUSED,
                                char *space, int32_t linear, Tensor *matrix, char **matrix_at, Tensor *bias,
                                char **bias_at) {
  size_t width = type_bytes(rnn->type);
  int rows, columns;
  size_t at = matrix_of(rnn, pseudo_layer, linear, &rows, &columns);
  if (matrix) describe(matrix, rnn->type, rows, columns);
  if (matrix_at) *matrix_at = columns ? space + at * width : NULL;
  bool has = bias_of(rnn, pseudo_layer, linear, &at);
  if (bias) describe(bias, rnn->type, has ? rnn->hidden : 0, has ? 1 : 0);
  if (bias_at) *bias_at = has ? space + at * width : NULL;
  return 0;
}

/* Not known are the true sizes. What backward must be given is at least what each step's gates (and an LSTM's cell) were,
 * and the outputs of the layers below the last; forward keeps the products of a layer's input. */
API int cudnnGetRNNTempSpaceSizes(void *handle UNUSED, const Rnn *rnn, int training, const RnnData *data,
                                  size_t *workspace_bytes, size_t *reserve_bytes) {
  size_t cells = (size_t)data->steps * (size_t)data->batch * (size_t)rnn->hidden * (size_t)rnn->directions;
  size_t width = type_bytes(rnn->type), kept = (size_t)gates(rnn) + (rnn->cell == LSTM) + 1;
  *workspace_bytes = cells * (size_t)gates(rnn) * width;
  if (reserve_bytes) *reserve_bytes = training ? cells * kept * (size_t)rnn->layers * width : 0;
  return 0;
}

/* ---- other descriptors: nobody reads them back ---- */
#define DESCRIPTOR(kind)                                                                          \
  API int cudnnCreate##kind##Descriptor(void **out) { return make(out, 64); }                     \
  API int cudnnDestroy##kind##Descriptor(void *descriptor) { return destroy(descriptor); }
DESCRIPTOR(Activation)
DESCRIPTOR(Convolution)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(Dropout)
DESCRIPTOR(OpTensor)
DESCRIPTOR(Pooling)
DESCRIPTOR(SpatialTransformer)

API int cudnnDropoutGetStatesSize(void *handle UNUSED, size_t *bytes) {
  *bytes = MIB;
  return 0;
}

/* ---- plans of the backend API: one engine for everything, with the workspace of the settings ---- */
API int cudnnBackendCreateDescriptor(int kind UNUSED, void **out) { return make(out, 256); }
API int cudnnBackendDestroyDescriptor(void *descriptor) { return destroy(descriptor); }

enum { TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_KNOB = 9, TYPE_NUMERICAL_NOTE = 11, TYPE_BEHAVIOUR_NOTE = 19,
       TYPE_INT32 = 23, TYPE_CHAR = 24 };
enum { ATTRIBUTE_HEURISTIC_RESULTS = 202, ATTRIBUTE_PLAN_WORKSPACE = 402 };

API int cudnnBackendGetAttribute(void *descriptor UNUSED, int name, int type, int64_t wanted, int64_t *found, void *out) {
  bool note = type == TYPE_KNOB || type == TYPE_NUMERICAL_NOTE || type == TYPE_BEHAVIOUR_NOTE;
  if (found) *found = note ? 0 : name == ATTRIBUTE_HEURISTIC_RESULTS ? 1 : wanted;
  if (!out) return 0;
  size_t count = wanted > 0 ? (size_t)wanted : 0;
  if (type == TYPE_INT64)
    for (size_t i = 0; i < count; i++)
      ((int64_t *)out)[i] = name == ATTRIBUTE_PLAN_WORKSPACE ? (int64_t)settings.cudnn_workspace_bytes : 0;
  else if (type == TYPE_INT32)
    memset(out, 0, 4 * count);
  else if (type == TYPE_BOOLEAN || type == TYPE_CHAR)
    memset(out, 0, count);
  return 0;
}

/* ---- convolutions of the older API ---- */
typedef struct {
  int algorithm, status;
  float ms;
  size_t workspace_bytes;
  int determinism, math, reserved[3];
} ConvolutionAlgorithm;

static int one_algorithm(ConvolutionAlgorithm *results, int *found) {
  memset(results, 0, sizeof *results);
  results->algorithm = 1;
  results->workspace_bytes = settings.cudnn_workspace_bytes;
  *found = 1;
  return 0;
}
#define CONVOLUTION(pass)                                                                                              \
  API int cudnnGetConvolution##pass##Algorithm_v7(void *handle UNUSED, void *a UNUSED, void *b UNUSED,                 \
                                                  void *convolution UNUSED, void *c UNUSED, int wanted UNUSED,         \
                                                  int *found, ConvolutionAlgorithm *results) {                         \
    return one_algorithm(results, found);                                                                              \
  }                                                                                                                    \
  API int cudnnFindConvolution##pass##AlgorithmEx(void *handle UNUSED, void *a UNUSED, void *x UNUSED, void *b UNUSED, \
                                                  void *y UNUSED, void *convolution UNUSED, void *c UNUSED,            \
                                                  void *z UNUSED, int wanted UNUSED, int *found,                       \
                                                  ConvolutionAlgorithm *results) {                                     \
    return one_algorithm(results, found);                                                                              \
  }                                                                                                                    \
  API int cudnnGetConvolution##pass##WorkspaceSize(void *handle UNUSED, void *a UNUSED, void *b UNUSED,                \
                                                   void *convolution UNUSED, void *c UNUSED, int algorithm UNUSED,     \
                                                   size_t *bytes) {                                                    \
    *bytes = settings.cudnn_workspace_bytes;                                                                           \
    return 0;                                                                                                          \
  }
CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)

/* ---- batch normalisation ---- */
static int none(size_t *bytes) {
  *bytes = 0;
  return 0;
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle UNUSED, int mode UNUSED,
                                                                 int operation UNUSED, void *x UNUSED, void *z UNUSED,
                                                                 void *y UNUSED, void *scale UNUSED,
                                                                 void *activation UNUSED, size_t *bytes) {
  return none(bytes);
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle UNUSED, int mode UNUSED, int operation UNUSED,
                                                             void *activation UNUSED, void *x UNUSED, size_t *bytes) {
  return none(bytes);
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle UNUSED, int mode UNUSED, int operation UNUSED,
                                                          void *x UNUSED, void *y UNUSED, void *dy UNUSED,
                                                          void *dz UNUSED, void *dx UNUSED, void *scale UNUSED,
                                                          void *activation UNUSED, size_t *bytes) {
  return none(bytes);
}

/* ---- CTC loss ---- */
API int cudnnGetCTCLossWorkspaceSize(void *handle UNUSED, void *probabilities UNUSED, void *gradients UNUSED,
                                     void *labels UNUSED, void *label_lengths UNUSED, void *input_lengths UNUSED,
                                     int algorithm UNUSED, void *loss UNUSED, size_t *bytes) {
  return none(bytes);
}
API int cudnnGetCTCLossWorkspaceSize_v8(void *handle UNUSED, int algorithm UNUSED, void *loss UNUSED,
                                        void *probabilities UNUSED, void *gradients UNUSED, size_t *bytes) {
  return none(bytes);
}

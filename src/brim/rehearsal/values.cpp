// Values of the rehearsal device: a kernel of ours in the place of each CUDA kernel of aten, that runs PyTorch's own
// (which allocates, and launches what computes nothing) and has the CPU compute over the same memory: device pointers
// are host pointers.
//
// It is not written in Python because a tensor that Python has seen counts one more reference from then on, and
// autograd, which adds in place to what nobody else holds, would allocate otherwise.
//
// Two modes. `all`: everything is computed. `whole`: whole numbers and booleans up to LIMIT_BYTES and floats up to
// LIMIT_FLOATS; the rest is made up, and so is what follows from it: `made_up` holds the storages' addresses.
// Python is called (operators of the namespace brim_rehearsal) to note where a program reads such a number, to fill in
// plausible ones, and, registered under the key PrivateUse1, for what the CPU has no kernel for.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

constexpr int64_t LIMIT_BYTES = 32 << 20;   // of whole numbers in one tensor
constexpr int64_t LIMIT_FLOATS = 1 << 16;   // elements
constexpr size_t LARGE_BYTES = 8 << 20;     // of weights on the host that are left as they are: see force.py
constexpr double PLAUSIBLE = 1.0;           // what small floats are filled with where nothing computed them
constexpr int64_t NOTED = 1 << 16;          // elements: larger copies to the host are offloading, not reading

bool all_computed = false;
void (*begin_kernel)(void*) = nullptr;  // of the device: see its queue.c
void (*kernel_access)(void*, const void*, size_t, int, const char*) = nullptr;
int (*capture)(void*, void (*)(void*, void*), void*) = nullptr;  // of the device: see its graphs.c
int64_t (*next_count)(int64_t) = nullptr;  // of the device: see its copies.c
thread_local int depth = 0;

std::mutex made_up_lock;
std::unordered_set<const void*> made_up;
std::mutex failed_lock;
std::unordered_set<std::string> failed;  // operators that the CPU could not compute

enum class Special { none, item, equal, copy, unscale, sized };

std::mutex calls_lock;
std::unordered_map<std::string, uint64_t> attention;  // what scaled_dot_product_attention took, and how often

// The choice itself reaches no operator (ATen/native/transformers/attention.cpp asks a stub): what is chosen does.
void count_attention(const std::string& name) {
  static const std::unordered_map<std::string, std::string> kinds{
      {"_scaled_dot_product_flash_attention", "flash"}, {"_scaled_dot_product_efficient_attention", "efficient"},
      {"_scaled_dot_product_cudnn_attention", "cudnn"}, {"_scaled_dot_product_attention_math", "math"}};
  auto found = kinds.find(name);
  if (found == kinds.end()) return;
  std::lock_guard<std::mutex> hold(calls_lock);
  attention[found->second]++;
}

struct Operator {
  std::string name;                // of the packet: "add_"
  std::string full;                // "aten::add_.Tensor"
  std::vector<bool> written, out;  // per argument: is it changed; does what it held not matter
  bool in_place = false, has_out = false, random = false, returns_tensors = false, reference = false;
  bool overwrites = false, selects = false, finds_places = false;
  int generator = -1, pin_memory = -1;
  Special special = Special::none;
};

const std::unordered_set<std::string> OVERWRITES{
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "fill_",
    "zero_", "copy_"};
// What only moves values: an infinity there was meant (a mask).
const std::unordered_set<std::string> SELECTS{
    "masked_fill_", "fill_", "copy_", "where", "cat", "index", "_index_put_impl_", "gather", "index_select", "full"};
// What gives places in a dimension: of equal numbers that were made up it would always be the same one.
const std::unordered_set<std::string> FINDS_PLACES{
    "argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "kthvalue", "topk", "sort", "argsort"};
const std::unordered_set<std::string> SIZED{
    "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"};

template <class F>
void each_tensor(const IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& one : value.toTensorList()) f(one);
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) each_tensor(one, f);
  }
}

Tensor over(const Tensor& t) {  // a CPU tensor over the memory of one of the device
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  Tensor made = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), options)
                               : at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), options);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

template <class F>
IValue mapped(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& one : value.toTensorList()) made.push_back(f(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& one : value.toOptionalTensorList())
      made.push_back(one && one->defined() ? std::optional<Tensor>(f(*one)) : one);
    return made;
  }
  return value;
}

bool is_small(const Tensor& t) {
  if (t.layout() != at::kStrided) return false;
  if (t.is_floating_point() || t.is_complex()) return t.numel() <= LIMIT_FLOATS;
  return t.numel() * static_cast<int64_t>(t.element_size()) <= LIMIT_BYTES;
}
const void* place(const Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->data(); }
bool is_made_up(const Tensor& t) {
  if (!t.is_cuda() || !t.has_storage()) return false;
  std::lock_guard<std::mutex> hold(made_up_lock);
  return made_up.count(place(t)) != 0;
}
// What is known of a storage once it was written. A part of it that is true makes no whole so.
void settle(const Tensor& t, bool invented) {
  if (!t.is_cuda() || !t.has_storage() || t.numel() == 0) return;
  bool whole = t.numel() * t.element_size() >= t.storage().nbytes();
  std::lock_guard<std::mutex> hold(made_up_lock);
  if (invented) made_up.insert(place(t));
  else if (whole) made_up.erase(place(t));
}

DispatchKeySet above() {  // what PyTorch does above kernels, and programs may have switched on
  return c10::autocast_dispatch_keyset |
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher});
}
struct Plain {  // calls go straight to the CPU's kernels
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard none{above()};
};

int device_of(const Stack& stack, size_t begin) {
  int found = -1;
  for (size_t at = begin; at < stack.size() && found < 0; at++)
    each_tensor(stack[at], [&](const Tensor& t) { if (t.is_cuda() && found < 0) found = t.device().index(); });
  if (found >= 0) return found;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index();
}
at::Device cuda(int device) { return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)); }
// A default stream is NULL on every device, and stands for that of the device that is current: make `device` so.
void* stream_of(int device) {
  c10::impl::VirtualGuardImpl guard(at::kCUDA);
  return guard.getStreamNativeHandle(guard.getStream(cuda(device)));
}
// What the stream orders before its next kernel happens, and nothing else.
void begin(int device) {
  if (!begin_kernel) return;
  c10::DeviceGuard current(cuda(device));
  begin_kernel(stream_of(device));
}

uint64_t mixed(uint64_t seed, uint64_t offset) {  // the finalizer of splitmix64
  uint64_t v = seed + (offset + 1) * 0x9E3779B97F4A7C15ull;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}
// Whether a graph is captured on the current stream; `compute`, if given, becomes a part of that graph.
bool captured(int device, void (*compute)(void*, void*) = nullptr, void* data = nullptr) {
  c10::DeviceGuard current(cuda(device));
  return capture && capture(stream_of(device), compute, data);
}
// While a graph is captured, where the device's generator stands is a number on the device: its draws are counted here.
uint64_t offset_of(const at::Generator& theirs, int device) {
  static std::atomic<uint64_t> draws{0};
  return captured(device) ? draws++ : theirs.get_offset();
}
// A CPU generator that follows from where the device's stands: what is drawn again there is drawn again here.
at::Generator generator_for(const Operator& op, const Stack& stack, size_t begin) {
  at::Generator theirs;
  if (op.generator >= 0 && stack[begin + op.generator].isGenerator()) theirs = stack[begin + op.generator].toGenerator();
  if (!theirs.defined() || theirs.device().type() != at::kCUDA)
    theirs = at::globalContext().defaultGenerator(
        at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_of(stack, begin))));
  at::Generator made = at::globalContext().defaultGenerator(at::kCPU).clone();
  std::lock_guard<std::mutex> hold(theirs.mutex());
  made.set_current_seed(mixed(theirs.current_seed(), offset_of(theirs, theirs.device().index())));
  return made;
}

// One call, computed by the CPU.
class Computed {
 public:
  Computed(const Operator& op, const OperatorHandle& handle, const Stack& stack, size_t begin, const at::Generator& drawn)
      : op_(op) {
    for (size_t at = begin; at < stack.size(); at++) {
      size_t number = at - begin;
      IValue value = mapped(stack[at], over);
      if (op.written[number])
        value = mapped(value, [&](const Tensor& t) { return op.out[number] ? at::empty_like(t) : t.clone(); });
      if (value.isDevice()) value = at::Device(at::kCPU);
      if (static_cast<int>(number) == op.generator) value = op.random ? IValue(drawn) : IValue();
      if (static_cast<int>(number) == op.pin_memory) value = IValue();
      if (op.written[number]) written_.emplace_back(stack[at], value);
      results_.push_back(std::move(value));
    }
    Plain plain;
    if (op.reference) {
      if (op.random && op.generator < 0) drawing = &drawn;
      handle.redispatchBoxed(DispatchKeySet(DispatchKey::PrivateUse1), &results_);
      drawing = nullptr;
    } else {
      handle.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &results_);
    }
  }

  bool fits(const Stack& results) const {
    for (size_t at = 0; at < results_.size(); at++)
      if (!alike(results[results.size() - results_.size() + at], results_[at])) return false;
    for (const auto& [theirs, ours] : written_)
      if (!alike(theirs, ours)) return false;
    return true;
  }

  void put(const Stack& results) const {
    Plain plain;
    for (const auto& [theirs, ours] : written_) copy(theirs, ours, false);
    for (size_t at = 0; at < results_.size(); at++)
      copy(results[results.size() - results_.size() + at], results_[at], true);
  }

  static thread_local const at::Generator* drawing;  // for references of what has no argument for it

 private:
  static std::vector<Tensor> listed(const IValue& value) {
    std::vector<Tensor> made;
    if (value.isTensor()) made.push_back(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& one : value.toTensorList()) made.push_back(one);
    return made;
  }
  bool alike(const IValue& theirs, const IValue& ours) const {
    auto one = listed(theirs), other = listed(ours);
    if (one.size() != other.size()) return false;
    for (size_t at = 0; at < one.size(); at++) {
      if (!one[at].defined() || !one[at].numel() || !other[at].defined() || !other[at].numel()) continue;
      if (one[at].sizes() != other[at].sizes()) return false;
    }
    return true;
  }
  void copy(const IValue& theirs, const IValue& ours, bool results) const {
    auto one = listed(theirs), other = listed(ours);
    for (size_t at = 0; at < one.size(); at++) {
      if (!one[at].defined() || !one[at].numel() || !other[at].defined() || !other[at].numel()) continue;
      if (results && is_written(one[at])) continue;
      if (one[at].layout() != at::kStrided) continue;  // its parts are results of operators of their own
      over(one[at]).copy_(other[at]);
    }
  }
  bool is_written(const Tensor& t) const {
    for (const auto& pair : written_)
      for (const Tensor& one : listed(pair.first))
        if (one.is_same(t)) return true;
    return false;
  }

  const Operator& op_;
  Stack results_;
  std::vector<std::pair<IValue, IValue>> written_;
};
thread_local const at::Generator* Computed::drawing = nullptr;

void call_python(const char* name, Stack stack) {
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Plain plain;
  handle.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}
void note(const std::string& what, bool whole) { call_python("brim_rehearsal::noted", {IValue(what), IValue(whole)}); }
void mend(const Tensor& t) {  // make floats finite that follow from what nothing computed
  if (!t.is_floating_point() || t.numel() == 0) return;
  Plain plain;
  Tensor there = over(t);
  there.copy_(at::nan_to_num(there, PLAUSIBLE, PLAUSIBLE, PLAUSIBLE));
}
void fail(const Operator& op) {
  std::lock_guard<std::mutex> hold(failed_lock);
  failed.insert(op.full);
}

// Whether no page that this memory of the host lies in was ever written: it reads as zeros. What is large PyTorch mostly
// has from the system, and not from what it let go of.
bool is_untouched(const void* begin, size_t bytes) {
  // It tells of the process that opened it: a forked child has to open its own.
  static std::atomic<int> pagemap{open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)};
  static const int followed = pthread_atfork(nullptr, nullptr, [] {
    close(pagemap);
    pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  });
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t first = reinterpret_cast<uintptr_t>(begin) / page;
  size_t behind = (reinterpret_cast<uintptr_t>(begin) + bytes + page - 1) / page;
  if (pagemap < 0 || followed || first >= behind) return false;
  std::vector<uint64_t> entries(std::min<size_t>(behind - first, 1 << 15));
  while (first < behind) {
    size_t count = std::min(behind - first, entries.size());
    ssize_t length = static_cast<ssize_t>(count * sizeof(uint64_t));
    if (pread(pagemap, entries.data(), length, static_cast<off_t>(first * sizeof(uint64_t))) != length) return false;
    for (size_t at = 0; at < count; at++)
      if (entries[at] >> 62) return false;  // in RAM or in swap (Linux, Documentation/admin-guide/mm/pagemap.rst)
    first += count;
  }
  return true;
}

// Whether PyTorch has the memory from the system, and not from a file, whose pages are absent before they are read.
bool is_own(const Tensor& t) {
  if (!t.has_storage()) return false;
  const at::DataPtr& memory = t.storage().data_ptr();
  return memory.get_deleter() == at::getCPUAllocator()->raw_deleter();
}

// Before such memory the C library has a note, in a page that may be a huge one: what is looked at lies behind that.
constexpr size_t HEAD_BYTES = 2 << 20;

bool never_written(const Tensor& t) {
  size_t bytes = static_cast<size_t>(t.numel()) * t.element_size();
  const char* memory = static_cast<const char*>(t.const_data_ptr());
  return bytes >= LARGE_BYTES / 2 && is_untouched(memory + HEAD_BYTES, bytes - HEAD_BYTES);
}
// What was written of the head of one such tensor, to another of the same form.
void copy_head(const Tensor& target, const Tensor& source) {
  constexpr size_t PIECE = 64 << 10;
  char* to = static_cast<char*>(target.data_ptr());
  const char* from = static_cast<const char*>(source.const_data_ptr());
  for (size_t at = 0; at < HEAD_BYTES; at += PIECE)
    if (!is_untouched(from + at, PIECE) || !is_untouched(to + at, PIECE)) memcpy(to + at, from + at, PIECE);
}

// While it lives, the next number that a kernel of PyTorch reads of what it found is `count`: it sizes its result by it.
class NextCount {
 public:
  explicit NextCount(int64_t count) {
    TORCH_CHECK(next_count, "Sizes that depend on values need the rehearsal device.");
    before_ = next_count(count);
  }
  ~NextCount() { next_count(before_); }
  NextCount(const NextCount&) = delete;
  NextCount& operator=(const NextCount&) = delete;

 private:
  int64_t before_;
};

void run_inside(const c10::SafeKernelFunction& original, DispatchKeySet keys, Stack* stack) {
  depth++;
  try { original.callBoxed(original.opHandle(), keys, stack); } catch (...) { depth--; throw; }
  depth--;
}

class Kernel : public c10::OperatorKernel {
 public:
  Kernel(Operator op, const OperatorHandle& handle)
      : op_(std::move(op)), original_(handle.getComputedKernelForDispatchKey(DispatchKey::CUDA)) {}

  void operator()(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    if (depth == 0) count_attention(op_.name);
    size_t begin = stack->size() - handle.schema().arguments().size();
    if (all_computed) compute(handle, keys, stack, begin);
    else choose(handle, keys, stack, begin);
  }

 private:
  void run(DispatchKeySet keys, Stack* stack) { run_inside(original_, keys, stack); }

  // Everything is computed.
  void compute(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack, size_t begin_of) {
    int device = device_of(*stack, begin_of);
    if (captured(device)) return record(handle, keys, stack, begin_of, device);
    begin(device);
    if (op_.returns_tensors && depth == 0) tell_accesses(*stack, begin_of, device);
    if (op_.special == Special::equal) return equal(stack, begin_of);
    if (op_.special == Special::sized) return sized_by_values(handle, keys, stack, begin_of);
    if (!op_.returns_tensors || (op_.special == Special::copy && is_plain_copy(*stack, begin_of))) return run(keys, stack);
    std::optional<Computed> computed;
    try {
      at::Generator drawn = op_.random ? generator_for(op_, *stack, begin_of) : at::Generator();
      computed.emplace(op_, handle, *stack, begin_of, drawn);
    } catch (const std::exception& error) {
      if (depth == 0) throw;  // else a part of an operator that is computed as a whole, which may read what nothing wrote
    }
    run(keys, stack);
    begin(device);  // the kernel may have copied; what was computed comes after it
    if (!computed) return;
    TORCH_CHECK(computed->fits(*stack), op_.full, " has other results on the CPU: brim lacks a reference for it.");
    computed->put(*stack);
  }

  struct Access { const void* memory; size_t bytes; bool writes; };

  // A call in a graph: the memory that it works on, as tensors of the CPU that own none of it.
  struct Replayed {
    const Kernel& kernel;
    const OperatorHandle handle;
    int device;
    bool outer;
    std::vector<Access> accesses;
    uint64_t number;
    Stack arguments, results;
    std::optional<Computed> computed;
  };

  // As on a GPU nothing is computed by a capture. What is recorded stays until the process ends.
  void record(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack, size_t begin_of, int device) {
    static std::atomic<uint64_t> number{0};
    bool copied = op_.special == Special::copy && is_plain_copy(*stack, begin_of);
    if (op_.special == Special::equal || op_.special == Special::sized || !op_.returns_tensors || copied)
      return run(keys, stack);
    auto* replayed = new Replayed{*this, handle, device, depth == 0, accesses(*stack, begin_of), number++, {}, {}, {}};
    for (size_t at = begin_of; at < stack->size(); at++) replayed->arguments.push_back(mapped((*stack)[at], over));
    captured(device, compute_replayed, replayed);
    run(keys, stack);
    for (size_t at = stack->size() - handle.schema().returns().size(); at < stack->size(); at++)
      replayed->results.push_back(mapped((*stack)[at], over));
    captured(device, put_replayed, replayed);
  }

  static void compute_replayed(void* data, void* stream) {
    auto& call = *static_cast<Replayed*>(data);
    const Operator& op = call.kernel.op_;
    c10::DeviceGuard current(cuda(call.device));
    begin_kernel(stream);
    if (call.outer) tell(call.accesses, stream, op);
    call.computed.reset();
    try {
      at::Generator drawn = op.random ? generator_for(op, call.arguments, 0) : at::Generator();
      if (op.random) drawn.set_current_seed(mixed(drawn.current_seed(), call.number));
      call.computed.emplace(op, call.handle, call.arguments, 0, drawn);
    } catch (const c10::NotImplementedError& error) {
      if (call.outer) throw;  // else a part of an operator that is computed as a whole
    }
  }

  static void put_replayed(void* data, void* stream) {
    auto& call = *static_cast<Replayed*>(data);
    begin_kernel(stream);
    if (!call.computed) return;
    TORCH_CHECK(call.computed->fits(call.results), call.kernel.op_.full, " has other results when it is replayed.");
    call.computed->put(call.results);
    call.computed.reset();
  }

  std::vector<Access> accesses(const Stack& stack, size_t begin_of) const {
    std::vector<Access> listed;
    for (size_t at = begin_of; at < stack.size(); at++)
      each_tensor(stack[at], [&](const Tensor& t) {
        if (!t.is_cuda() || !t.numel()) return;
        int64_t last = 0;
        for (int64_t dim = 0; dim < t.dim(); dim++) last += (t.size(dim) - 1) * t.stride(dim);
        listed.push_back({t.const_data_ptr(), static_cast<size_t>(last + 1) * t.element_size(),
                          op_.written[at - begin_of]});
      });
    return listed;
  }
  static void tell(const std::vector<Access>& accesses, void* stream, const Operator& op) {
    if (!kernel_access) return;
    for (const Access& one : accesses) kernel_access(stream, one.memory, one.bytes, one.writes, op.full.c_str());
  }
  void tell_accesses(const Stack& stack, size_t begin_of, int device) {
    c10::DeviceGuard current(cuda(device));
    tell(accesses(stack, begin_of), stream_of(device), op_);
  }

  // What a program may branch on is computed, the rest made up.
  void choose(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack, size_t begin) {
    switch (op_.special) {
      case Special::item: return item(keys, stack, begin);
      case Special::equal: return equal(stack, begin);
      case Special::copy: if (!is_small_copy(*stack, begin)) return copy(keys, stack, begin); break;
      case Special::unscale: return run(keys, stack);  // gradients are taken to be finite
      case Special::sized: return guess_or_size(handle, keys, stack, begin);
      case Special::none: break;
    }
    if (!op_.returns_tensors) return run(keys, stack);
    bool small = true, invented = false;
    std::vector<IValue> inputs(stack->begin() + begin, stack->end());
    std::vector<Tensor> written;
    for (size_t at = 0; at < inputs.size(); at++)
      each_tensor(inputs[at], [&](const Tensor& t) {
        small = small && is_small(t);
        if (op_.written[at]) written.push_back(t);
        if (!op_.out[at] && !(op_.overwrites && op_.written[at])) invented = invented || is_made_up(t);
      });
    at::Generator drawn = small && op_.random ? generator_for(op_, *stack, begin) : at::Generator();
    std::optional<Computed> computed;
    // A kernel that works in place may copy within the device: what it works on is read before.
    if (small && op_.in_place) compute_into(computed, handle, *stack, begin, drawn);
    run(keys, stack);
    std::vector<Tensor> made;
    for (const IValue& result : *stack)
      each_tensor(result, [&](const Tensor& t) {
        for (const Tensor& one : written) if (one.is_same(t)) return;
        made.push_back(t);
        small = small && is_small(t);
      });
    if (small && !op_.in_place) {
      Stack arguments(inputs.begin(), inputs.end());
      compute_into(computed, handle, arguments, 0, drawn);
    }
    if (computed && small && computed->fits(*stack)) {
      computed->put(*stack);
      for (auto* list : {&made, &written})
        for (const Tensor& t : *list) {
          settle(t, invented);
          if (invented && !op_.selects && is_small(t)) mend(t);
        }
      if (invented && op_.finds_places) spread(inputs, made, written);
      return;
    }
    if (computed && small && depth == 0) fail(op_);
    for (auto* list : {&made, &written}) for (const Tensor& t : *list) settle(t, true);
    if (op_.has_out) made.insert(made.end(), written.begin(), written.end());
    fill(inputs, made);
  }

  void compute_into(std::optional<Computed>& computed, const OperatorHandle& handle, const Stack& stack, size_t begin,
                    const at::Generator& drawn) {
    try {
      computed.emplace(op_, handle, stack, begin, drawn);
    } catch (const std::exception&) {
      if (depth == 0) fail(op_);  // the CPU has no kernel for it, or not for this type
    }
  }

  // Places among made-up floats: as if nothing had computed them. Whole numbers among them have their own order.
  void spread(const std::vector<IValue>& inputs, const std::vector<Tensor>& made, const std::vector<Tensor>& written) {
    bool of_floats = false;
    each_tensor(inputs[0], [&](const Tensor& t) { of_floats = t.is_floating_point(); });
    std::vector<Tensor> places;
    for (auto* list : {&made, &written})
      for (const Tensor& t : *list) if (t.scalar_type() == at::kLong) places.push_back(t);
    if (of_floats) fill(inputs, places);
  }

  // Plausible numbers for small results that nothing computed.
  void fill(const std::vector<IValue>& inputs, const std::vector<Tensor>& results) {
    c10::List<Tensor> wanted, given;
    for (const Tensor& t : results) {
      if (!t.is_cuda() || !t.numel() || !is_small(t)) continue;
      if (t.is_floating_point() || t.is_complex()) {
        Plain plain;
        over(t).fill_(PLAUSIBLE);
      } else {
        wanted.push_back(over(t));
      }
    }
    if (wanted.empty()) return;
    c10::List<int64_t> whole;
    std::optional<double> number;
    for (const IValue& value : inputs) {
      if (value.isInt()) whole.push_back(value.toInt());
      if (value.isInt()) number = static_cast<double>(value.toInt());
      if (value.isDouble()) number = value.toDouble();
      each_tensor(value, [&](const Tensor& t) { if (given.size() < 2) given.push_back(over(t)); });
    }
    call_python("brim_rehearsal::make_up", {IValue(op_.name), IValue(given), IValue(whole),
                number ? IValue(*number) : IValue(), IValue(wanted)});
  }

  void item(DispatchKeySet keys, Stack* stack, size_t begin) {
    Tensor t = (*stack)[begin].toTensor();
    if (is_made_up(t)) {
      mend(t);
      if (depth == 0) note("a number (" + std::string(t.dtype().name()) + ")", !t.is_floating_point());
    }
    run(keys, stack);
  }

  void equal(Stack* stack, size_t begin) {
    Tensor one = (*stack)[begin].toTensor(), other = (*stack)[begin + 1].toTensor();
    bool same = one.sizes() == other.sizes();
    if (same && !all_computed && (is_made_up(one) || is_made_up(other))) {
      note("whether two tensors are equal", true);
      same = one.const_data_ptr() == other.const_data_ptr();
    } else if (same) {
      Plain plain;
      same = at::equal(over(one), over(other));
    }
    torch::jit::drop(*stack, 2);
    stack->emplace_back(same);
  }

  bool is_small_copy(const Stack& stack, size_t begin) {
    const Tensor &target = stack[begin].toTensor(), &source = stack[begin + 1].toTensor();
    return target.is_cuda() && source.is_cuda() && is_small(target) && is_small(source);
  }
  // What the device copies itself, at its time: as bytes.
  bool is_plain_copy(const Stack& stack, size_t begin) {
    const Tensor &target = stack[begin].toTensor(), &source = stack[begin + 1].toTensor();
    return target.dtype() == source.dtype() && target.sizes() == source.sizes() &&
        target.strides() == source.strides() && target.is_non_overlapping_and_dense() &&
        target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg();
  }
  // To the device, from it, or too much to compute.
  void copy(DispatchKeySet keys, Stack* stack, size_t begin) {
    bool plain = is_plain_copy(*stack, begin);
    Tensor target = (*stack)[begin].toTensor(), source = (*stack)[begin + 1].toTensor();
    bool left = plain && source.is_cpu() && target.is_cuda() && is_own(source) && never_written(source) &&
        never_written(target);
    if (left) {
      copy_head(target, source);  // the rest would be zeros on zeros, that would take RAM
      torch::jit::drop(*stack, stack->size() - begin);
      stack->emplace_back(target);
    } else {
      run(keys, stack);
    }
    if (target.is_cuda()) {
      bool beyond = target.numel() * static_cast<int64_t>(target.element_size()) > LIMIT_BYTES;  // may be left out
      left &= source.is_floating_point();  // weights that nobody drew: force.py
      settle(target, is_made_up(source) || left || beyond || (source.is_cuda() && !plain));
    } else if (is_made_up(source) && source.numel() <= NOTED) {
      mend(target);
      if (depth == 0)
        note(std::to_string(source.numel()) + " numbers (" + std::string(source.dtype().name()) + ")",
             !source.is_floating_point());
    }
  }

  void guess_or_size(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack, size_t begin) {
    Tensor source = (*stack)[begin].toTensor();
    bool invented = is_made_up(source);
    if (invented || !is_small(source)) note("the size of what " + op_.name + " gives", true);
    if (is_small(source)) {
      sized_by_values(handle, keys, stack, begin);
    } else {  // too much to look at: half of it is not zero, all of it is distinct
      TORCH_CHECK(op_.name == "nonzero", op_.full, " of ", source.numel(),
                  " elements is more than a rehearsal computes.");
      NextCount half(source.numel() / 2);
      run(keys, stack);
      invented = true;
    }
    for (size_t at = begin; at < stack->size(); at++)
      each_tensor((*stack)[at], [&](const Tensor& t) { settle(t, invented); });
  }

  // As large as values say: computed first, then copied to what the kernel makes. Those of `unique` do not all read
  // how many there are: its results are made here, and what it takes for a while besides is not counted.
  void sized_by_values(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack, size_t begin) {
    at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(device_of(*stack, begin)));
    Tensor out;
    Stack found;
    for (size_t at = begin; at < stack->size(); at++) {
      if (op_.out[at - begin]) out = (*stack)[at].toTensor();
      found.push_back(op_.out[at - begin] ? IValue(at::empty({0}, out.options().device(at::kCPU)))
                                          : mapped((*stack)[at], over));
    }
    {
      Plain plain;
      handle.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &found);
    }
    if (op_.name == "nonzero") {
      const Tensor& places = found.back().toTensor();
      NextCount count(places.size(0));
      run(keys, stack);
      if (places.numel()) { Plain plain; over(stack->back().toTensor()).copy_(places); }
      return;
    }
    torch::jit::drop(*stack, stack->size() - begin);
    for (const IValue& value : found) {
      const Tensor& result = value.toTensor();
      Tensor made = out.defined() ? out.resize_(result.sizes()) : at::empty(result.sizes(), result.options().device(device));
      if (made.numel()) { Plain plain; over(made).copy_(result); }
      stack->emplace_back(made);
    }
  }

  Operator op_;
  c10::SafeKernelFunction original_;
};

// Operators of sparse tensors whose kernels find how many entries the result has: it is counted first, then they run.
const char* const COUNTED[] = {"_coalesce", "_sparse_sparse_matmul", "index_select"};

class SparseKernel : public c10::OperatorKernel {
 public:
  explicit SparseKernel(const OperatorHandle& handle)
      : name_(handle.schema().name().substr(handle.schema().name().find("::") + 2)),
        original_(handle.getComputedKernelForDispatchKey(DispatchKey::SparseCUDA)) {}

  void operator()(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    size_t begin_of = stack->size() - handle.schema().arguments().size();
    int device = device_of(*stack, begin_of);
    if (captured(device) || along_values(*stack, begin_of)) return run_inside(original_, keys, stack);
    if (all_computed) begin(device);
    bool small = true, whole = true, invented = false, from_invented = false;
    for (size_t at = begin_of; at < stack->size(); at++)
      each_tensor((*stack)[at], [&](const Tensor& t) {
        Tensor places = t.is_sparse() ? t._indices() : t;
        small = small && (all_computed || is_small(places));
        invented = invented || is_made_up(places);
        if (!t.is_sparse()) return;
        whole = whole && (all_computed || is_small(t._values()));
        from_invented = from_invented || is_made_up(t._values());
      });
    auto [met, most] = expected(*stack, begin_of);
    small = small && (all_computed || met <= LIMIT_MET);
    if (!all_computed && (invented || !small)) note("the size of what " + name_ + " gives", true);
    Tensor computed = small ? on_host(handle, *stack, begin_of, whole) : Tensor();
    {
      NextCount entries(computed.defined() ? computed._nnz() : static_cast<int64_t>(std::min(met, most)));
      run_inside(original_, keys, stack);
    }
    const Tensor& result = stack->back().toTensor();
    Tensor places = result._indices(), values = result._values();
    bool known = computed.defined() && places.sizes() == computed._indices().sizes();
    whole = whole && known;
    put(places, known ? computed._indices() : Tensor(), 0, invented || !known);
    put(values, whole ? computed._values() : Tensor(), PLAUSIBLE, invented || from_invented || !whole);
  }

 private:
  static constexpr double LIMIT_MET = 1 << 26;  // a second's work

  // Whether rows are selected in a dimension that all entries have: as many are left.
  static bool along_values(const Stack& stack, size_t begin_of) {
    const Tensor& first = stack[begin_of].toTensor();
    return stack.size() > begin_of + 1 && stack[begin_of + 1].isInt() &&
        c10::maybe_wrap_dim(stack[begin_of + 1].toInt(), first.dim()) >= first.sparse_dim();
  }

  // How many entries, or pairs of them, a kernel meets if they are spread evenly, and how many the result can have.
  static std::pair<double, double> expected(const Stack& stack, size_t begin_of) {
    const Tensor& first = stack[begin_of].toTensor();
    int64_t dim = 1;
    double met = static_cast<double>(first._nnz()), most = 1;
    std::vector<int64_t> sizes = first.sizes().slice(0, first.sparse_dim()).vec();
    for (size_t at = begin_of + 1; at < stack.size(); at++) {
      if (stack[at].isInt()) dim = c10::maybe_wrap_dim(stack[at].toInt(), first.dim());
      if (!stack[at].isTensor()) continue;
      const Tensor& second = stack[at].toTensor();
      double entries = static_cast<double>(second.is_sparse() ? second._nnz() : second.numel());
      met *= entries / static_cast<double>(std::max<int64_t>(first.size(dim), 1));
      sizes[dim] = second.is_sparse() ? second.size(1) : second.numel();
    }
    for (int64_t size : sizes) most *= static_cast<double>(size);
    return {met, most};
  }

  // The CPU's result; without values' own numbers and dimensions if these are too many to look at.
  static Tensor on_host(const OperatorHandle& handle, const Stack& stack, size_t begin_of, bool whole) {
    Plain plain;
    auto entries = [&](const Tensor& t) {
      if (!t.is_sparse()) return over(t);
      Tensor places = over(t._indices()), values;
      if (whole) values = over(t._values());
      else values = at::ones({t._nnz()}, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
      if (c10::isReducedFloatingType(values.scalar_type())) values = values.to(at::kFloat);
      at::IntArrayRef sizes = whole ? t.sizes() : t.sizes().slice(0, t.sparse_dim());
      return at::_sparse_coo_tensor_unsafe(places, values, sizes)._coalesced_(t.is_coalesced());
    };
    Stack found;
    for (size_t at = begin_of; at < stack.size(); at++) found.push_back(mapped(stack[at], entries));
    try {
      handle.redispatchBoxed(DispatchKeySet(DispatchKey::SparseCPU), &found);
    } catch (const std::exception&) {
      return Tensor();
    }
    return found.back().toTensor();
  }

  static void put(const Tensor& target, const Tensor& computed, double otherwise, bool invented) {
    Plain plain;
    if (computed.defined() && computed.numel()) over(target).copy_(computed);
    else if (is_small(target) && target.numel()) over(target).fill_(otherwise);
    settle(target, invented);
    if (invented && computed.defined()) mend(target);
  }

  std::string name_;
  c10::SafeKernelFunction original_;
};

// Copies on the host, casts among them, without what nobody ever wrote: a model that is cast on the CPU would take RAM
// for zeros otherwise. What is copied is the same.
class HostCopy : public c10::OperatorKernel {
 public:
  explicit HostCopy(const OperatorHandle& handle)
      : original_(handle.getComputedKernelForDispatchKey(DispatchKey::CPU)) {}

  void operator()(const OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    size_t begin = stack->size() - handle.schema().arguments().size();
    Tensor target = (*stack)[begin].toTensor(), source = (*stack)[begin + 1].toTensor();
    if (!is_large(target) || !is_large(source) || target.sizes() != source.sizes() ||
        target.strides() != source.strides() || !target.is_non_overlapping_and_dense())
      return original_.callBoxed(original_.opHandle(), keys, stack);
    Plain plain;
    Tensor to = target.as_strided({target.numel()}, {1}), from = source.as_strided({source.numel()}, {1});
    // Pieces end where pages of the target do: what is written to one shows in no other. Reading maps pages, too, so
    // all are looked at first.
    int64_t page = sysconf(_SC_PAGESIZE), off = reinterpret_cast<intptr_t>(to.const_data_ptr()) % page;
    int64_t count = (page - off) / static_cast<int64_t>(to.element_size());
    std::vector<std::pair<Tensor, Tensor>> written;
    for (int64_t at = 0; at < to.numel(); at += count, count = PIECE) {
      count = std::min(count, to.numel() - at);
      Tensor into = to.narrow(0, at, count), piece = from.narrow(0, at, count);
      if (!untouched(piece) || !untouched(into)) written.emplace_back(into, piece);
    }
    for (auto& [into, piece] : written) into.copy_(piece);
    torch::jit::drop(*stack, stack->size() - begin);
    stack->emplace_back(target);
  }

 private:
  static constexpr int64_t PIECE = 1 << 18;  // elements: small enough to be copied by PyTorch's own kernel
  static bool is_large(const Tensor& t) {
    return t.device().is_cpu() && t.layout() == at::kStrided && t.is_floating_point() && !t.is_neg() && is_own(t) &&
        t.numel() * t.element_size() >= LARGE_BYTES / 2;  // cast to half of what is large
  }
  static bool untouched(const Tensor& t) {
    return is_untouched(t.const_data_ptr(), static_cast<size_t>(t.numel()) * t.element_size());
  }
  c10::SafeKernelFunction original_;
};

// Attention made of other operators, which has no kernel of its own: counted, and as it is.
class MathAttention : public c10::OperatorKernel {
 public:
  MathAttention(const OperatorHandle& handle, DispatchKey key) : original_(handle.getComputedKernelForDispatchKey(key)) {}
  void operator()(const OperatorHandle&, DispatchKeySet keys, Stack* stack) {
    count_attention("_scaled_dot_product_attention_math");
    original_.callBoxed(original_.opHandle(), keys, stack);
  }

 private:
  c10::SafeKernelFunction original_;
};

Operator described(const OperatorHandle& handle, bool random) {
  Operator op;
  const auto& schema = handle.schema();
  op.name = schema.name().substr(schema.name().find("::") + 2);
  op.full = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  for (size_t at = 0; at < schema.arguments().size(); at++) {
    const auto& argument = schema.arguments()[at];
    bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    op.written.push_back(written);
    op.out.push_back(written && argument.is_out());
    op.in_place = op.in_place || (written && !argument.is_out());
    op.has_out = op.has_out || (written && argument.is_out());
    if (argument.name() == "generator") op.generator = static_cast<int>(at);
    if (argument.name() == "pin_memory") op.pin_memory = static_cast<int>(at);
  }
  op.returns_tensors = op.in_place || op.has_out;
  for (const auto& one : schema.returns())
    op.returns_tensors = op.returns_tensors || one.type()->str().find("Tensor") != std::string::npos;
  op.random = random;
  op.overwrites = OVERWRITES.count(op.name) != 0;
  op.selects = SELECTS.count(op.name) != 0;
  op.finds_places = FINDS_PLACES.count(op.name) != 0;
  op.reference = handle.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
  if (op.name == "_local_scalar_dense") op.special = Special::item;
  if (op.name == "equal") op.special = Special::equal;
  if (op.name == "copy_") op.special = Special::copy;
  if (op.name == "_amp_foreach_non_finite_check_and_unscale_") op.special = Special::unscale;
  if (SIZED.count(op.name)) op.special = Special::sized;
  return op;
}

// Never destroyed: they go with the process.
torch::Library *library = nullptr, *on_host = nullptr, *asked = nullptr, *with_gradients = nullptr,
               *of_sparse = nullptr;

// Leave weights zero that were never written, if so they are. What their head has of others is cleared.
bool left_zero(const Tensor& t) {
  if (!is_own(t) || !t.is_contiguous() || !never_written(t)) return false;
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* memory = static_cast<char*>(t.data_ptr());
  size_t count = page - reinterpret_cast<uintptr_t>(memory) % page;  // to the end of the first page
  for (size_t at = 0; at < HEAD_BYTES; at += count, count = std::min(page, HEAD_BYTES - at))
    if (!is_untouched(memory + at, count)) memset(memory + at, 0, count);
  return true;
}
std::string told;

}  // namespace

extern "C" {

// Replace the CUDA kernel of an operator ("aten::add_", "Tensor"). Not from several threads at once.
__attribute__((visibility("default"))) int brim_values_replace(const char* name, const char* overload, int random) {
  try {
    if (!library) library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
    struct Quiet : c10::WarningHandler { void process(const c10::Warning&) override {} } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);  // that a kernel is overridden is what is wanted
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    std::string full = std::string(name) + (*overload ? std::string(".") + overload : "");
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                    std::make_unique<Kernel>(described(handle, random != 0), handle)));
  } catch (const std::exception& error) {
    told = error.what();
    return 1;
  }
  return 0;
}
// Count attention by other operators, with gradients and in inference mode, and the entries of sparse results. Not from
// several threads at once.
__attribute__((visibility("default"))) int brim_values_other_keys() {
  try {
    const char* name = "_scaled_dot_product_attention_math";
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), "");
    auto plain = std::make_unique<MathAttention>(handle, DispatchKey::CUDA);
    auto recorded = std::make_unique<MathAttention>(handle, DispatchKey::AutogradCUDA);
    with_gradients =
        new torch::Library(torch::Library::IMPL, "aten", DispatchKey::AutogradCUDA, __FILE__, __LINE__);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(plain)));
    with_gradients->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(recorded)));
    of_sparse = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::SparseCUDA, __FILE__, __LINE__);
    for (const char* counted : COUNTED) {
      auto sparse = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + counted).c_str(), "");
      of_sparse->impl(counted, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<SparseKernel>(sparse)));
    }
  } catch (const std::exception& error) {
    told = error.what();
    return 1;
  }
  return 0;
}
// Leave out of the host's copies what nobody ever wrote, and let Python ask for that. Not from several threads at once.
__attribute__((visibility("default"))) int brim_values_host_copies() {
  try {
    on_host = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CPU, __FILE__, __LINE__);
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    on_host->impl("copy_", torch::CppFunction::makeFromBoxedFunctor(std::make_unique<HostCopy>(handle)));
    asked = new torch::Library(torch::Library::FRAGMENT, "brim_rehearsal", std::nullopt, __FILE__, __LINE__);
    asked->def("left_zero(Tensor tensor) -> bool");
    asked->impl("left_zero", torch::dispatch(DispatchKey::CPU, left_zero));
  } catch (const std::exception& error) {
    told = error.what();
    return 1;
  }
  return 0;
}
__attribute__((visibility("default"))) const char* brim_values_error() { return told.c_str(); }
__attribute__((visibility("default"))) void brim_values_mode(int everything) { all_computed = everything != 0; }
// The device's own functions: for tests in which it works late, and for what is captured in graphs.
__attribute__((visibility("default"))) void brim_values_device(
    void (*begins)(void*), void (*accesses)(void*, const void*, size_t, int, const char*),
    int (*captures)(void*, void (*)(void*, void*), void*), int64_t (*finds)(int64_t)) {
  begin_kernel = begins;
  kernel_access = accesses;
  capture = captures;
  next_count = finds;
}
// A seed for what a reference draws.
__attribute__((visibility("default"))) unsigned long long brim_values_seed() {
  if (!Computed::drawing) return 0;
  at::Generator drawn = *Computed::drawing;
  return drawn.current_seed();
}
// Operators that the CPU could not compute, a line each.
__attribute__((visibility("default"))) const char* brim_values_failed() {
  std::lock_guard<std::mutex> hold(failed_lock);
  told.clear();
  for (const auto& one : failed) told += one + "\n";
  return told.c_str();
}
// What scaled_dot_product_attention took: lines of a name and how often.
__attribute__((visibility("default"))) const char* brim_values_attention() {
  std::lock_guard<std::mutex> hold(calls_lock);
  told.clear();
  for (const auto& one : attention) told += one.first + " " + std::to_string(one.second) + "\n";
  return told.c_str();
}
// A storage that something else than an operator of aten wrote: what it holds was not computed.
__attribute__((visibility("default"))) void brim_values_written(void* data) {
  std::lock_guard<std::mutex> hold(made_up_lock);
  made_up.insert(data);
}
}

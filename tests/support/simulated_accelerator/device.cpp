// A device that plays Intel's XPU in a build of PyTorch that has none: memory of its own (in RAM), operators by falling
// back to the CPU, streams and events that are over at once. What it shows is which of brim's code works on an accelerator
// that is not CUDA; not that Intel's backend works.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::XPU;
constexpr size_t kRounding = 512;  // as c10/cuda/CUDACachingAllocator.h, kMinBlockSize
size_t total_bytes = size_t(2) << 30;

struct Memory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_map<void*, size_t> sizes;
  size_t used = 0, peak = 0;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
  void release(void* pointer) {
    std::lock_guard<std::mutex> held(mutex);
    used -= sizes.at(pointer);
    sizes.erase(pointer);
    std::free(pointer);
  }
};

Memory memory;

void release(void* pointer) {
  if (pointer != nullptr) memory.release(pointer);
}

c10::DeleterFnPtr Memory::raw_deleter() const { return &::release; }

c10::DataPtr Memory::allocate(size_t bytes) {
  const c10::Device device(kType, 0);
  if (bytes == 0) return {nullptr, nullptr, &::release, device};
  const size_t taken = (bytes + kRounding - 1) / kRounding * kRounding;
  std::lock_guard<std::mutex> held(mutex);
  TORCH_CHECK_WITH(OutOfMemoryError, used + taken <= total_bytes, "simulated accelerator out of memory");
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kRounding, taken) == 0, "no RAM for the simulated accelerator");
  sizes[pointer] = taken;
  used += taken;
  peak = std::max(peak, used);
  return {pointer, pointer, &::release, device};
}

using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::StreamId current;
  static std::atomic<c10::StreamId> last;

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment();
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto taken = *static_cast<Moment*>(end) - *static_cast<Moment*>(begin);
    return std::chrono::duration<double, std::milli>(taken).count();
  }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

thread_local c10::StreamId Guard::current = 0;
std::atomic<c10::StreamId> Guard::last{0};

struct Hooks final : at::XPUHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasXPU() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, Hooks)
}

namespace {

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::XPU), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::XPU), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU: what is computed here is computed there.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool) {
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

// With the CPU's kernel, whose sums are then those of a layer that the plan leaves to the processor.
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto there = [](const at::Tensor& tensor) { return tensor.to(at::kCPU); };
  const auto masked = mask.has_value() ? std::optional<at::Tensor>(there(*mask)) : std::nullopt;
  const auto made = at::scaled_dot_product_attention(
      there(query), there(key), there(value), masked, dropout, causal, scale, grouped);
  return made.to(query.device());
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, XPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
}

// Which kernel attention takes is asked of the backend where PyTorch was built with it: by its definition here.
TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { m.impl("scaled_dot_product_attention", attention); }

TORCH_LIBRARY_IMPL(_, XPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Guard guard;
  c10::impl::registerDeviceGuard(kType, &guard);
  c10::SetAllocator(kType, &memory);
  m.def("used_bytes", [] { return memory.used; });
  m.def("peak_bytes", [] { return memory.peak; });
  m.def("reset_peak", [] { memory.peak = memory.used; });
  m.def("total_bytes", [] { return total_bytes; });
  m.def("set_total_bytes", [](size_t bytes) { total_bytes = bytes; });
}
